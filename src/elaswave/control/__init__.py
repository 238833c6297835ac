"""The control plane: starting workers, watching them, and keeping the records of a run."""
