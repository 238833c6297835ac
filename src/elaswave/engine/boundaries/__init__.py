"""What crosses the boundary between two stages: frames, fences and their codecs."""
