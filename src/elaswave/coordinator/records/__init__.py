"""What the coordinator keeps of a run: events, recoveries, checkpoints, the result."""
