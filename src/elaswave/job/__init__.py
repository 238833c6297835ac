"""What all processes of a job know of it: its plan, network, keys, and what each host is to it."""
