"""Bugs planted in the simulated product on purpose, each of which the search must find."""
