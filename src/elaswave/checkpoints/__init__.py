"""Checkpoints: the format, shards that workers write, the commit, the files."""
