"""The tensors of what a worker holds: flat layers, blocks in memory, exact sums, hashes and seals."""
