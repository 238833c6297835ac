"""What a worker does: programs, steps, votes, evaluation, checkpoints."""
