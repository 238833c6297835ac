"""The generators that draws without a generator of their own come from, each at its device.

Every draw is keyed by what it is for, never by who makes it or what came before: so no draw depends on the layout.
Nothing outside of this folder seeds a generator by itself: a draw on a device comes from the device's generator, and
one that is keyed by the processor's alone would depend on what was drawn there before.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from elaswave.hashing import key64


def seed_host(key: int) -> None:
    """Seeds the processor's.

    Args:
        key: in [0, 2**64); torch's generator uses only the low 32 bits.
    """
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


def seed_at(place: torch.device, key: int) -> None:
    """Seeds the one that draws at a place come from.

    Args:
        place: where the drawn tensor is to lie.
        key: in [0, 2**64).
    """
    if place.type == "cpu":
        seed_host(key)
        return
    module = torch.get_device_module(place.type)
    generators = getattr(module, "default_generators", ())
    if generators:
        generators[place.index or 0].manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    else:
        module.manual_seed_all(key & 0xFFFFFFFF)


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
