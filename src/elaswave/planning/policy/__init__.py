"""Recovery policies: what each does after a loss, and what it would reach without one."""
