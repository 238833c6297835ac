"""Input: the loader process, its samples, and what a batch takes in memory."""
