"""What a worker computes: layers, micro-batches, sums, updates."""
