"""Hugging Face's transformers as layers: which architectures, how they are split, how their files are read."""
