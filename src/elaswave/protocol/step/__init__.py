"""The worker's machine: one step from RUN to APPLY, its vote and its salvage."""
