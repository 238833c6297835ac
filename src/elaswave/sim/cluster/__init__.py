"""A training step over shared links, and weeks of a cluster in virtual time."""
