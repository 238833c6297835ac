"""Hashes and norms of many blocks at once are those of each by itself."""

import math

import torch

from elaswave.state import seals
from elaswave.state.seals import Found, queued_tensor_hash, run_hash, run_hashes, square_sums, tensor_hash
from elaswave.state.sums import square_sum

MASK64 = (1 << 64) - 1


def read(found: Found) -> list:
    return found.in_order(found.numbers)


def runs(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(length, generator=generator) for length in lengths]


def test_hashes_are_the_hosts():
    some = runs(64, 1, 64, 33, 64, 1)
    some[2][5] = math.nan
    assert [each & MASK64 for each in read(run_hashes(some))] == [run_hash(each) for each in some]


def test_hashes_of_runs_of_any_types_and_lengths_are_the_hosts_however_few_are_laid_side_by_side(monkeypatch):
    some = [*runs(64, 1, 7, 0, 33), *(each.bfloat16() for each in runs(64, 3, 1)), torch.arange(9, dtype=torch.int64)]
    some.append(torch.arange(13, dtype=torch.uint8))
    for most in (1 << 23, 70, 1):
        monkeypatch.setattr(seals, "_TOGETHER_ELEMENTS", most)
        for each in (some, some[:5], some[4:8]):
            assert [value & MASK64 for value in read(run_hashes(each))] == list(map(run_hash, each))


def test_a_tensors_hash_is_the_hosts():
    for values in (*runs(1, 33, 40_000), torch.ones(3, 5, dtype=torch.bool), torch.randn(70_000).bfloat16()):
        assert int(queued_tensor_hash(values)) & MASK64 == tensor_hash(values)


def test_a_runs_sum_of_squares_does_not_depend_on_those_beside_it(monkeypatch):
    some = runs(96, 33, 96, 7, 96, 1, 96)
    together = read(square_sums(some))
    assert together == [read(square_sums([each]))[0] for each in some]
    monkeypatch.setattr(seals, "_TOGETHER_ELEMENTS", 192)  # two rows at a time
    assert read(square_sums(some)) == together


def test_sums_of_squares_are_right_to_the_last_bits():
    for length in (1, 2, 3, 5, 64, 1000):
        (run,) = runs(length)
        found = read(square_sums([run]))[0]
        assert math.isclose(found, math.fsum(float(value) ** 2 for value in run), rel_tol=1e-14)
        assert math.isclose(found, square_sum(run), rel_tol=1e-14)
    assert read(square_sums([torch.zeros(0)]))[0] == 0.0
    (huge,) = read(square_sums([torch.full((8,), torch.finfo(torch.float32).max)]))
    assert huge == 8 * float(torch.finfo(torch.float32).max) ** 2


def test_a_sum_of_squares_is_not_finite_where_a_run_is_not():
    some = runs(8, 8, 8)
    some[0][3], some[2][0] = math.nan, math.inf
    assert [math.isfinite(each) for each in read(square_sums(some))] == [False, True, False]
