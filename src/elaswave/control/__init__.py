"""The control plane: starting workers, watching them, and keeping the books of a run."""
