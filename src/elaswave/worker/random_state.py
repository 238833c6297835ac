"""Location-free randomness: every draw is keyed by what it is for, never by who makes it or what came before."""

import random

import numpy as np
import torch

from elaswave.hashing import key64


def seed_everything(*parts: int | str) -> None:
    """Seeds torch's, Python's and numpy's global generators for one purpose.

    Args:
        parts: what the draws are for, such as (run seed, step, micro-batch, layer, "forward").
    """
    key = key64(*parts)
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)  # torch's CPU generator uses only the low 32 bits
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
