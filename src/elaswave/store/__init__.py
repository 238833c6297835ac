"""Where a job's durable records and its lease are: a file, or etcd."""
