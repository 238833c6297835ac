"""Everything that a worker holds: flat layers, blocks and who holds them, exact sums, hashes, checkpoints."""
