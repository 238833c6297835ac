"""Token sources and the sampler that says which samples belong to which micro-batch."""
