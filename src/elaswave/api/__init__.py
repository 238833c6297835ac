"""The public interface for a script's own model: trainer, result, and what ``elaswave run`` hands to a script."""
