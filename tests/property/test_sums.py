"""The laws of exact sums: free of order, grouping and cuts; the stated formula to the bit; close to the true sum."""

import math
from fractions import Fraction

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.shapes import make_shape

from elaswave.blocks.shapes import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    NORM_LIMBS,
    could_overflow,
    next_exponent,
    norm_from_limbs,
    norm_limbs,
)
from elaswave.hashing import MASK64, signed64
from elaswave.state.sums import ExactAccumulator, offset, reduced_gradient, square_sum

SIZES = [(3,), (2, 2)]
SHAPE = make_shape(SIZES)
NUM_VALUES = 7
COLUMNS = (range(3), range(3, 7))
"""Elements of each tensor."""

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
"""All of them: denormals, zeros of both signs, the largest."""
bfloat16s = st.integers(0, 0xFFFF).map(lambda bits: _float_of(bits << 16)).filter(math.isfinite)
same_scale = st.integers(-140, 120).flatmap(
    lambda scale: st.lists(
        st.floats(-1, 1, width=32).map(lambda value: float(np.float32(value * 2.0**scale))),
        min_size=NUM_VALUES,
        max_size=NUM_VALUES,
    )
)
"""The values of one micro-batch whose gradients are about equally large, as real ones are."""


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _microbatch(values: list[float], dtype: torch.dtype) -> list[torch.Tensor]:
    flat = torch.tensor(values, dtype=torch.float32).to(dtype)
    return [flat[:3], flat[3:].view(2, 2)]


@st.composite
def microbatches(draw: st.DrawFn) -> list[list[torch.Tensor]]:
    """Gradients of several micro-batches, any finite values, float32 or bfloat16."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    number = float32s if dtype == torch.float32 else bfloat16s
    row = st.lists(number, min_size=NUM_VALUES, max_size=NUM_VALUES)
    rows = draw(st.lists(st.one_of(row, same_scale if dtype == torch.float32 else row), min_size=1, max_size=6))
    return [_microbatch(values, dtype) for values in rows]


def flat_values(gradients: list[torch.Tensor]) -> list[float]:
    return [float(value) for gradient in gradients for value in gradient.reshape(-1)]


def grids_for(parts: list[list[torch.Tensor]]) -> list[int]:
    """The grids that the vote chooses for these gradients."""
    return [
        next_exponent(max(float(gradients[t].abs().max()) for gradients in parts), 0, len(parts))
        for t in range(len(SIZES))
    ]


def units(value: float, exponent: int) -> int:
    """n(g) by the definition, in rational numbers: Python rounds halves to even."""
    return round(Fraction(value) * Fraction(2) ** exponent)


def elements(flat: torch.Tensor) -> torch.Tensor:
    """The tensors' elements, without padding."""
    return torch.cat([flat[slot.offset : slot.stop] for slot in SHAPE.tensors])


def exponents_of_elements(exponents: list[int]) -> list[int]:
    return [exponents[0]] * 3 + [exponents[1]] * 4


def summed(parts: list[list[torch.Tensor]], exponents: list[int]) -> torch.Tensor:
    accumulator = ExactAccumulator(SHAPE)
    accumulator.reset(exponents)
    for gradients in parts:
        assert accumulator.add(gradients)
    return accumulator.sum.clone()


exponent = st.integers(MIN_EXPONENT, MAX_EXPONENT)


@given(parts=microbatches(), grids=st.tuples(exponent, exponent), data=st.data())
def test_no_order_no_grouping_and_no_cut_shows_in_the_mean(parts, grids, data) -> None:
    exponents = list(grids) if data.draw(st.booleans()) else grids_for(parts)
    expected = reduced_gradient(summed(parts, exponents), SHAPE, 0, exponents, len(parts))

    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    order = data.draw(st.permutations(range(len(parts))))
    partial_sums = [
        summed([parts[index] for index in order if owners[index] == worker], exponents) for worker in range(3)
    ]
    total = torch.zeros(SHAPE.size, dtype=torch.int64)
    for index in data.draw(st.permutations(range(3))):
        total += partial_sums[index]
    cuts = sorted(data.draw(st.lists(st.integers(0, SHAPE.size), max_size=3)))
    runs = zip([0, *cuts], [*cuts, SHAPE.size], strict=True)
    means = [reduced_gradient(total[start:stop].clone(), SHAPE, start, exponents, len(parts)) for start, stop in runs]
    assert torch.cat(means).view(torch.int32).equal(expected.view(torch.int32))


@given(parts=microbatches(), grids=st.tuples(exponent, exponent), data=st.data())
def test_the_mean_is_the_stated_formula_to_the_bit(parts, grids, data) -> None:
    """Also where the fast path gives way to the slow one, up to where a sum could overflow."""
    exponents = list(grids) if data.draw(st.booleans()) else grids_for(parts)
    count = len(parts)
    rows = [flat_values(gradients) for gradients in parts]
    for t, columns in enumerate((range(3), range(3, 7))):
        maximum = max(abs(row[column]) for row in rows for column in columns)
        assume(not could_overflow(maximum, exponents[t], count))
    mean = elements(reduced_gradient(summed(parts, exponents), SHAPE, 0, exponents, count))
    for column, grid in enumerate(exponents_of_elements(exponents)):
        total = sum(units(row[column], grid) for row in rows)
        assert -(2**63) <= total < 2**63
        with np.errstate(over="ignore", under="ignore"):
            expected = np.float32(float(total) * (2.0**-grid / count))
        assert float(mean[column]) == float(expected)


@given(parts=microbatches())
def test_on_the_chosen_grids_the_mean_is_within_1e_7_of_the_true_one(parts) -> None:
    exponents = grids_for(parts)
    mean = elements(reduced_gradient(summed(parts, exponents), SHAPE, 0, exponents, len(parts)))
    rows = [flat_values(gradients) for gradients in parts]
    for columns in (range(3), range(3, 7)):
        largest = max(abs(Fraction(row[column])) for row in rows for column in columns)
        # Half of float32's smallest number is what no float32 can do better than.
        bound = Fraction(1, 10**7) * largest + Fraction(1, 2**150)
        for column in columns:
            exact = sum((Fraction(row[column]) for row in rows), Fraction(0)) / len(rows)
            assert abs(Fraction(float(mean[column])) - exact) <= bound


@given(parts=microbatches(), repeats=st.sampled_from([1, 2, 7, 60]), grown=st.integers(0, 16))
def test_the_error_is_within_the_stated_bound_for_any_number_of_microbatches(parts, repeats, grown) -> None:
    """Also on the grid of an earlier step whose gradients were larger; `docs/numerics.md` states the bound."""
    count = len(parts) * repeats
    rows = [flat_values(gradients) for gradients in parts]
    maxima = [max(abs(Fraction(row[column])) for row in rows for column in columns) for columns in COLUMNS]
    exponents = [next_exponent(min(float(m) * 2.0**grown, 2.0**127), 0, count) for m in maxima]
    mean = elements(reduced_gradient(summed(parts * repeats, exponents), SHAPE, 0, exponents, count))
    for columns, maximum in zip(COLUMNS, maxima, strict=True):
        setting = maximum * 2**grown
        assert not could_overflow(float(maximum), exponents[0 if columns is COLUMNS[0] else 1], count)
        for column in columns:
            exact = sum((Fraction(row[column]) for row in rows), Fraction(0)) / len(rows)
            bound = abs(exact) / 2**24 + setting * max(Fraction(1), Fraction(count, 4)) / 2**43
            assert abs(Fraction(float(mean[column])) - exact) <= bound * (1 + Fraction(1, 2**20)) + Fraction(1, 2**150)


@given(parts=microbatches(), others=microbatches())
def test_partial_sums_may_wrap(parts, others) -> None:
    """What is added and taken away again is gone, however far the sum went in between."""
    exponents = grids_for(parts)
    total = summed(parts, exponents)
    expected = reduced_gradient(total.clone(), SHAPE, 0, exponents, len(parts))
    far = summed(others, exponents) + signed64(1 << 62)
    for _ in range(5):
        total += far
    for _ in range(5):
        total -= far
    assert reduced_gradient(total, SHAPE, 0, exponents, len(parts)).equal(expected)


@given(parts=microbatches(), grids=st.tuples(exponent, exponent))
def test_a_sum_that_overflows_is_wrong_but_no_larger_than_its_largest_term(parts, grids) -> None:
    """So it stays finite, and the vote judges it as an overflow and not as a gradient that is not finite."""
    mean = elements(reduced_gradient(summed(parts, list(grids)), SHAPE, 0, list(grids), len(parts)))
    rows = [flat_values(gradients) for gradients in parts]
    for columns, grid in ((range(3), grids[0]), (range(3, 7), grids[1])):
        largest = max(abs(row[column]) for row in rows for column in columns)
        assert float(mean[list(columns)].abs().max()) <= largest + 2.0**-grid


@given(parts=microbatches())
def test_partial_sums_hold_units_and_constants(parts) -> None:
    """What travels between workers, modulo 2**64: the units, and one constant for every addition."""
    exponents = grids_for(parts)
    total = elements(summed(parts, exponents))
    for column, grid in enumerate(exponents_of_elements(exponents)):
        expected = sum(units(flat_values(gradients)[column], grid) + offset(grid) for gradients in parts)
        assert int(total[column]) & MASK64 == expected & MASK64


@given(blocks=st.lists(st.lists(float32s, max_size=5), max_size=12), data=st.data())
def test_the_norm_is_exact_and_free_of_order_and_owner(blocks, data) -> None:
    square_sums = [square_sum(torch.tensor(values, dtype=torch.float32)) for values in blocks]
    exact = sum((Fraction(value) for value in square_sums), Fraction(0))
    assert norm_from_limbs(norm_limbs(square_sums)) == math.sqrt(exact.numerator / exact.denominator)

    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(blocks), max_size=len(blocks)))
    order = data.draw(st.permutations(range(len(blocks))))
    limbs = np.zeros(NORM_LIMBS, dtype=np.int64)
    for worker in range(4):
        limbs += np.array(norm_limbs([square_sums[index] for index in order if owners[index] == worker]))
    assert norm_from_limbs(limbs.tolist()) == norm_from_limbs(norm_limbs(square_sums))
