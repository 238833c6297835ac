"""The laws of sums of 48 bits: integers modulo 2**48, whatever carries; the means of 64 bits wherever these fit."""

from fractions import Fraction

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.property.test_sums import SHAPE, elements, exponent, exponents_of_elements, flat_values, microbatches

from elaswave.blocks.shapes import GRID_RULES, could_overflow, next_exponent
from elaswave.hashing import MASK64, signed64
from elaswave.state.sums import (
    ExactAccumulator,
    NarrowTerm,
    Planes,
    add_planes,
    checksum,
    plane_dtypes,
    reduced_gradient,
    unused_bits,
)

WIDTH = 48
MODULUS = 1 << WIDTH
SIZE = 4

words = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3).flatmap(lambda near: st.sampled_from([1 << 31, 1 << 32, 1 << 47, 1 << 48]).map(near.__add__)),
)
"""Any, and those beside a carry."""
runs = st.lists(words, min_size=SIZE, max_size=SIZE)


def planes_of(values: list[int]) -> Planes:
    """A run that holds these numbers modulo 2**48, by the definition."""
    low = np.array([value & 0xFFFFFFFF for value in values], dtype=np.uint32).view(np.int32)
    high = np.array([value >> 32 & 0xFFFF for value in values], dtype=np.uint16).view(np.int16)
    return torch.from_numpy(low), torch.from_numpy(high)


def word_of(value: int) -> int:
    """A number modulo 2**48 in the upper bits of a word."""
    return signed64(value << unused_bits(WIDTH))


@given(first=runs, steps=st.lists(st.tuples(st.sampled_from(["put", "add", "subtract"]), runs), max_size=6))
def test_terms_are_integers_modulo_2_to_the_48(first: list[int], steps: list[tuple[str, list[int]]]) -> None:
    planes = planes_of(first)
    assert [plane.dtype for plane in planes] == list(plane_dtypes(WIDTH))
    memory = torch.zeros(SIZE, dtype=torch.int64)
    term = NarrowTerm(planes, memory, np.empty(SIZE + 1, dtype=np.int64))
    expected = list(first)
    for verb, values in steps:
        memory.copy_(torch.tensor(values))
        getattr(term, verb)()
        kept, sign = {"put": (0, 1), "add": (1, 1), "subtract": (1, -1)}[verb]
        expected = [kept * had + sign * new for had, new in zip(expected, values, strict=True)]
    assert add_planes([planes]).tolist() == [word_of(value) for value in expected]


@given(parts=st.lists(runs, min_size=1, max_size=5))
def test_partial_sums_add_up_modulo_2_to_the_48(parts: list[list[int]]) -> None:
    planes = [planes_of(values) for values in parts]
    before = [plane.clone() for part in planes for plane in part]
    assert add_planes(planes).tolist() == [word_of(sum(column)) for column in zip(*parts, strict=True)]
    assert all(map(torch.equal, (plane for part in planes for plane in part), before))


def accumulated(parts: list[list[torch.Tensor]], exponents: list[int], width: int) -> ExactAccumulator:
    accumulator = ExactAccumulator(SHAPE, width=width)
    accumulator.reset(exponents)
    for gradients in parts:
        assert accumulator.add(gradients)
    return accumulator


def grids_for(parts: list[list[torch.Tensor]]) -> list[int]:
    """The grids that the vote chooses for these gradients."""
    maxima = (max(float(gradients[t].abs().max()) for gradients in parts) for t in range(2))
    return [next_exponent(maximum, 0, len(parts), WIDTH) for maximum in maxima]


@given(parts=microbatches(), data=st.data())
def test_neither_order_nor_grouping_shows_and_means_are_those_of_64_bits(parts, data) -> None:
    exponents = grids_for(parts)
    wide = accumulated(parts, exponents, 64)
    expected = reduced_gradient(wide.sum, SHAPE, 0, exponents, len(parts))
    order = data.draw(st.permutations(parts))
    middle = data.draw(st.integers(0, len(parts)))
    groups = [accumulated(group, exponents, WIDTH) for group in (order[:middle], order[middle:])]
    total = add_planes([group.planes for group in groups])
    mean = reduced_gradient(total, SHAPE, 0, exponents, len(parts), width=WIDTH)
    assert mean.view(torch.int32).equal(expected.view(torch.int32))
    assert checksum(total, SHAPE, 0) == sum(group.checksum for group in groups) & MASK64


@given(parts=microbatches(), grids=st.tuples(exponent, exponent))
def test_on_any_grid_that_the_vote_admits_sums_do_not_wrap(parts, grids) -> None:
    exponents = list(grids)
    for t, grid in enumerate(exponents):
        maximum = max(float(gradients[t].abs().max()) for gradients in parts)
        assume(not could_overflow(maximum, grid, len(parts), WIDTH))
    sums = elements(accumulated(parts, exponents, WIDTH).sum)
    for column, grid in enumerate(exponents_of_elements(exponents)):
        exact = sum(round(Fraction(flat_values(gradients)[column]) * Fraction(2) ** grid) for gradients in parts)
        assert int(sums[column]) == exact << unused_bits(WIDTH)


@given(parts=microbatches())
def test_the_error_is_within_the_stated_bound(parts) -> None:
    """`docs/numerics.md` states it."""
    exponents = grids_for(parts)
    total = accumulated(parts, exponents, WIDTH).sum
    mean = elements(reduced_gradient(total, SHAPE, 0, exponents, len(parts), width=WIDTH))
    rows = [flat_values(gradients) for gradients in parts]
    for columns in (range(3), range(3, 7)):
        largest = max(Fraction(abs(row[column])) for row in rows for column in columns)
        for column in columns:
            exact = sum((Fraction(row[column]) for row in rows), Fraction(0)) / len(rows)
            bound = abs(exact) / 2**24 + largest / 2 ** GRID_RULES[WIDTH].bits_below_maximum
            assert abs(Fraction(float(mean[column])) - exact) <= bound * (1 + Fraction(1, 2**20)) + Fraction(1, 2**150)


@given(parts=microbatches(), bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_what_is_not_finite_leaves_the_sum_as_it_was(parts, bad: float) -> None:
    exponents = grids_for(parts)
    accumulator = accumulated(parts, exponents, WIDTH)
    before, checked = accumulator.sum, accumulator.checksum
    assert not accumulator.add([parts[0][0], torch.full((2, 2), bad)])
    assert accumulator.sum.equal(before)
    assert accumulator.checksum == checked
