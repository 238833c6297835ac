"""Hashes and norms of many blocks at once are those of each by itself."""

import math

import torch

from elaswave.state import device_verify
from elaswave.state.device_verify import run_hashes, square_sums
from elaswave.state.sums import square_sum
from elaswave.state.verify import run_hash

MASK64 = (1 << 64) - 1


def runs(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(length, generator=generator) for length in lengths]


def test_hashes_are_the_hosts():
    some = runs(64, 1, 64, 33, 64, 1)
    some[2][5] = math.nan
    assert [each & MASK64 for each in run_hashes(some).tolist()] == [run_hash(each) for each in some]
    assert run_hashes([]).tolist() == []


def test_a_runs_sum_of_squares_does_not_depend_on_those_beside_it(monkeypatch):
    some = runs(96, 33, 96, 7, 96, 1, 96)
    together = square_sums(some).tolist()
    assert together == [square_sums([each]).item() for each in some]
    monkeypatch.setattr(device_verify, "_TOGETHER_ELEMENTS", 192)  # two rows at a time
    assert square_sums(some).tolist() == together


def test_sums_of_squares_are_right_to_the_last_bits():
    for length in (1, 2, 3, 5, 64, 1000):
        (run,) = runs(length)
        found = square_sums([run]).item()
        assert math.isclose(found, math.fsum(float(value) ** 2 for value in run), rel_tol=1e-14)
        assert math.isclose(found, square_sum(run), rel_tol=1e-14)
    assert square_sums([torch.zeros(0)]).item() == 0.0
    huge = square_sums([torch.full((8,), torch.finfo(torch.float32).max)]).item()
    assert huge == 8 * float(torch.finfo(torch.float32).max) ** 2


def test_a_sum_of_squares_is_not_finite_where_a_run_is_not():
    some = runs(8, 8, 8)
    some[0][3], some[2][0] = math.nan, math.inf
    assert [math.isfinite(each) for each in square_sums(some).tolist()] == [False, True, False]
