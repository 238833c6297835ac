"""What an operator asks of a running job: status, members, layouts, checkpoints, keys."""
