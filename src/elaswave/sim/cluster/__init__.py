"""Weeks of a cluster in virtual time."""
