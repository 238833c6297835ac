"""Which process is the coordinator: election, the lease on the store, the job's creation."""
