"""Checks that a computation keeps the rules that equal bits need: run twice, compared, spot-checked."""
