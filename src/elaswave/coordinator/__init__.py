"""The coordinator: the process that carries out what the machines in `elaswave.protocol` decide."""
