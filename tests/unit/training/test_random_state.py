"""The generators: seeded for a purpose, and given back where they are a person's own."""

import random

import numpy as np
import torch

from elaswave.devices.interface import generators_kept, seed_everything


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_a_purpose_decides_what_is_drawn() -> None:
    seed_everything(1, "a", 2)
    first = drawn()
    seed_everything(1, "b", 2)
    second = drawn()
    seed_everything(1, "a", 2)
    assert drawn() == first and not set(first) & set(second)


def test_what_is_lent_is_given_back() -> None:
    seed_everything(1)
    expected = drawn(), drawn()
    seed_everything(1)
    assert drawn() == expected[0]
    try:
        with generators_kept():
            seed_everything(2)
            drawn()
            raise ValueError
    except ValueError:
        pass
    assert drawn() == expected[1]
