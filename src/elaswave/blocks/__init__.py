"""Blocks, the units in which state is owned and followed: shapes, placement, replica peers, survival. Pure."""
