"""What a worker computes on, as one thin layer: memory, generator, transfers to and from host memory, marks in time."""
