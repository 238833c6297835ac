"""Location-free randomness: every draw is keyed by what it is for, never by who makes it or what came before."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from elaswave.devices.generators import seed_host
from elaswave.hashing import key64


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the generators that `seed_everything` seeds their states back: in a person's own process, where they are
    not ours."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_everything(*parts: int | str) -> None:
    """Seeds torch's, Python's and numpy's global generators for one purpose.

    Args:
        parts: what the draws are for, such as (run seed, step, micro-batch, layer, "forward").
    """
    key = key64(*parts)
    seed_host(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
