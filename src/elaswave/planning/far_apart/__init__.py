"""Plans for machines far apart: OP-Fence, what it is compared with, and the objective that all of them share. Pure."""
