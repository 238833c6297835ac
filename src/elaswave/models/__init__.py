"""Models as lists of layers, each of which any worker can build alone."""
