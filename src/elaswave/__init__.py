"""elaswave: elastic training of PyTorch models that computes the same bits whatever happens to its machines."""

__all__ = ["__version__"]

__version__ = "0.1.0"
