"""Exact sums on one grid per tensor, and the exact norm: the single steps. The laws are under ``property``."""

import math
import random
from fractions import Fraction

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.shapes import (
    FEWEST_BITS,
    GRID_RULES,
    INITIAL_EXPONENT,
    MAX_EXPONENT,
    MIN_EXPONENT,
    NORM_LIMBS,
    could_overflow,
    count_bits,
    is_too_coarse,
    magnitude_bits,
    next_exponent,
    norm_from_limbs,
    norm_limbs,
)
from elaswave.state.sums import ExactAccumulator, FloatAccumulator, checksum, reduced_gradient, square_sum

FLOAT32_MAX = torch.finfo(torch.float32).max
SHAPE = make_shape([(2, 3), (5,)])


def mean_of(accumulator, exponents, num_microbatches, shape=SHAPE):
    return reduced_gradient(accumulator.sum.clone(), shape, 0, exponents, num_microbatches)


def ones():
    return [torch.ones(slot.shape) for slot in SHAPE.tensors]


@pytest.mark.parametrize(("maximum", "bits"), [(1.0, 1), (0.5, 0), (0.75, 0), (2.0**-149, -148), (FLOAT32_MAX, 128)])
def test_magnitude_bits(maximum, bits):
    assert magnitude_bits(maximum) == bits
    assert maximum < 2.0**bits <= 2 * maximum


RULE = GRID_RULES[64]


@pytest.mark.parametrize(("count", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (65536, 16)])
def test_count_bits(count, bits):
    assert count_bits(count) == bits


def test_the_next_grid_leaves_headroom_above_and_resolution_below_the_maximum():
    exponent = next_exponent(1.5, 0, 8)
    assert 2.0**RULE.bits_below_maximum / 2 <= 1.5 * 2.0**exponent < 2.0**RULE.bits_below_maximum
    assert not could_overflow(1.5 * 2.0**RULE.headroom_bits, exponent, 8)
    assert could_overflow(4.0 * 2.0**RULE.headroom_bits, exponent, 8)


@pytest.mark.parametrize(("maximum", "exponent", "count"), [(1.5, 61, 1), (1.5, 60, 2), (1.5, 59, 3), (1.5, 45, 65536)])
def test_sums_may_use_62_bits_and_no_more(maximum, exponent, count):
    """With one bit more a single gradient is cut off at 2**62, where the slow path's conversion ends."""
    assert not could_overflow(maximum, exponent, count)
    assert could_overflow(maximum, exponent + 1, count)
    exact = ExactAccumulator(make_shape([(1,)]))
    exact.reset([exponent])
    for _ in range(count if count < 4 else 4):
        exact.add([torch.tensor([maximum])])
    terms = min(count, 4)
    assert mean_of(exact, [exponent], terms, make_shape([(1,)]))[0] == maximum


def test_a_gradient_of_63_bits_would_be_cut_off():
    exact = ExactAccumulator(make_shape([(1,)]))
    exact.reset([62])
    exact.add([torch.tensor([1.5])])
    assert mean_of(exact, [62], 1, make_shape([(1,)]))[0] == 1.0
    assert could_overflow(1.5, 62, 1)


@pytest.mark.parametrize("maximum", [1.0, 1.5, 2.0**-149, FLOAT32_MAX])
def test_a_grid_is_too_coarse_below_the_bits_of_float32(maximum):
    enough = FEWEST_BITS - magnitude_bits(maximum)
    assert not is_too_coarse(maximum, enough)
    assert is_too_coarse(maximum, enough - 1)
    assert not is_too_coarse(0.0, MIN_EXPONENT)


def test_many_microbatches_take_resolution_and_not_headroom():
    exponent = next_exponent(1.5, 0, 65536)
    assert exponent < next_exponent(1.5, 0, 8)
    assert not could_overflow(1.5 * 2.0**RULE.headroom_bits, exponent, 65536)


def test_a_maximum_of_zero_keeps_the_grid_and_cannot_overflow():
    assert next_exponent(0.0, 17, 8) == 17
    assert not could_overflow(0.0, MAX_EXPONENT, 65536)


def test_grids_are_clamped_where_float32_ends():
    assert next_exponent(2.0**-149, 0, 8) <= MAX_EXPONENT
    assert next_exponent(1e-320, 0, 8) == MAX_EXPONENT
    assert next_exponent(1e300, 0, 8) == MIN_EXPONENT
    assert not could_overflow(FLOAT32_MAX, next_exponent(FLOAT32_MAX, 0, 65536), 65536)


def test_a_mean_is_that_of_all_additions_and_padding_stays_zero():
    exact = ExactAccumulator(SHAPE)
    exact.reset([40, 30])
    assert exact.add([torch.full((2, 3), 0.25), torch.arange(5.0)])
    assert exact.add([torch.full((2, 3), 0.75), -3 * torch.arange(5.0)])
    mean = mean_of(exact, [40, 30], 2)
    assert mean[:6].tolist() == [0.5] * 6
    assert mean[32:37].tolist() == [-0.0, -1.0, -2.0, -3.0, -4.0]
    assert mean[6:32].tolist() == [0.0] * 26
    assert exact.maxima == [0.75, 12.0]


def test_a_missing_gradient_counts_as_zeros():
    exact = ExactAccumulator(SHAPE)
    exact.reset([40, 40])
    assert exact.add([None, torch.ones(5)])
    assert mean_of(exact, [40, 40], 1)[:6].tolist() == [0.0] * 6
    assert exact.maxima == [0.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_as_a_whole(bad):
    exact = ExactAccumulator(SHAPE)
    exact.reset([40, 40])
    before = exact.sum.clone()
    second = torch.ones(5)
    second[3] = bad
    assert not exact.add([torch.ones(2, 3), second])
    assert exact.sum.equal(before)
    assert exact.maxima == [0.0, 0.0]
    assert exact.add(ones())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_empty", [True, False])
def test_what_was_added_before_a_gradient_that_is_not_finite_is_taken_back(bad, is_empty):
    """A layer is added in pieces, and the bad value lies in its last one."""
    shape = make_shape([(8,), (3, 70_000)])
    exact, other = ExactAccumulator(shape), ExactAccumulator(shape)
    for accumulator in (exact, other):
        accumulator.reset([40, 38])
        if not is_empty:
            accumulator.add([torch.ones(8), torch.full((3, 70_000), -0.3)])
    large = torch.randn(3, 70_000) * 2.0**16  # the slow path, too
    large[2, -1] = bad
    assert not exact.add([torch.full((8,), 2.0), large])
    assert (exact.checksum, exact.maxima) == (other.checksum, other.maxima)
    good = [torch.randn(8), torch.randn(3, 70_000)]
    assert exact.add(good) and other.add(good)
    assert exact.sum.equal(other.sum)
    assert exact.checksum == other.checksum == checksum(exact.sum, shape, 0)


def test_a_reset_empties_the_sum_and_sets_the_grids():
    exact = ExactAccumulator(SHAPE)
    exact.reset([INITIAL_EXPONENT, INITIAL_EXPONENT])
    exact.add([torch.full((2, 3), 7.0), torch.ones(5)])
    exact.reset([3, 4])
    assert exact.maxima == [0.0, 0.0]
    exact.add([torch.full((2, 3), 0.06), torch.full((5,), 0.06)])
    mean = mean_of(exact, [3, 4], 1)
    assert mean[:6].tolist() == [0.0] * 6  # below half a unit of 1/8
    assert mean[32:37].tolist() == [1 / 16] * 5


def test_ties_are_rounded_to_even_units():
    exact = ExactAccumulator(make_shape([(4,)]))
    exact.reset([0])
    exact.add([torch.tensor([0.5, 1.5, -0.5, -2.5])])
    assert mean_of(exact, [0], 1, make_shape([(4,)]))[:4].tolist() == [0.0, 2.0, 0.0, -2.0]


def test_values_beside_one_beyond_the_fast_path_are_rounded_the_same_way():
    shape = make_shape([(6,)])
    exact = ExactAccumulator(shape)
    exact.reset([0])
    exact.add([torch.tensor([2.0**55, 0.5, 0.75, 1.5, -1.5, -0.75])])
    assert mean_of(exact, [0], 1, shape)[:6].tolist() == [2.0**55, 0.0, 1.0, 2.0, -2.0, -1.0]


def test_maxima_are_those_of_all_microbatches():
    exact = ExactAccumulator(make_shape([(2,), (1,)]))
    for values in ([0.5, -4.0], [3.0, 1.0], [-1.0, 0.0]):
        exact.add([torch.tensor(values), torch.tensor([values[0]])])
    assert exact.maxima == [4.0, 3.0]


@pytest.mark.parametrize("bits", [50, 51, 52, 58, 61])
def test_values_beyond_the_fast_path_are_added_as_well(bits):
    shape = make_shape([(3,), (2,)])
    exact = ExactAccumulator(shape)
    exact.reset([0, 0])
    exact.add([torch.tensor([2.0**bits, -(2.0**bits), 1.0]), torch.tensor([3.0, -5.0])])
    assert mean_of(exact, [0, 0], 1, shape)[[0, 1, 2, 32, 33]].tolist() == [2.0**bits, -(2.0**bits), 1.0, 3.0, -5.0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("value", [3584.0, 2048.25, 4095.75, 2047.75])
def test_between_2_to_the_51_and_2_to_the_52_units_float64_has_no_bits_left_beside_the_constant(value, sign):
    exact = ExactAccumulator(make_shape([(2,)]))
    exact.reset([40])
    exact.add([torch.tensor([sign * value, 1.0])])
    assert mean_of(exact, [40], 1, make_shape([(2,)]))[:2].tolist() == [sign * value, 1.0]


def test_the_checksum_is_that_of_all_words_that_were_added():
    exact = ExactAccumulator(SHAPE)
    exact.reset([40, 38])
    assert exact.checksum == checksum(exact.sum, SHAPE, 0) == 0
    for scale in (1.0, 2.0**13, 2.0**20):  # the fast path, and the slow one
        exact.add([torch.randn(2, 3) * scale, torch.randn(5)])
        assert exact.checksum == checksum(exact.sum, SHAPE, 0) == exact.sum.sum().item() % 2**64
    parts = [checksum(exact.sum[start:stop], SHAPE, start) for start, stop in ((0, 3), (3, 35), (35, 64))]
    assert sum(parts) % 2**64 == exact.checksum
    before = exact.checksum
    assert not exact.add([torch.randn(2, 3), torch.full((5,), math.nan)])  # nothing was added
    assert exact.checksum == before
    exact.reset([40, 38])
    assert exact.checksum == 0


def test_a_checksum_can_be_left_out_and_sums_of_float32_have_none():
    unchecked, scaled = ExactAccumulator(SHAPE, checked=False), FloatAccumulator(SHAPE)
    for accumulator in (unchecked, scaled):
        accumulator.reset([40, 40])
        accumulator.add(ones())
        assert accumulator.checksum == 0
    assert checksum(scaled.sum, SHAPE, 0) == 0
    assert checksum(unchecked.sum, SHAPE, 0) != 0


def test_a_part_of_a_layer_is_reduced_like_the_whole():
    exact = ExactAccumulator(SHAPE)
    exact.reset([40, 38])
    exact.add([torch.randn(2, 3), torch.randn(5)])
    whole = mean_of(exact, [40, 38], 3)
    for start, stop in ((0, 32), (32, 64), (3, 35), (33, 36)):
        part = reduced_gradient(exact.sum[start:stop].clone(), SHAPE, start, [40, 38], 3)
        assert part.equal(whole[start:stop])


def test_a_layer_without_tensors_has_an_empty_sum():
    exact = ExactAccumulator(make_shape([]))
    exact.reset([])
    assert exact.add([])
    assert exact.sum.shape == (0,)
    assert reduced_gradient(exact.sum, make_shape([]), 0, [], 4).shape == (0,)


def test_float_sums_are_plain_additions():
    scaled = FloatAccumulator(SHAPE)
    scaled.reset([0, 0])
    assert scaled.add([torch.full((2, 3), 0.1), None])
    assert scaled.add([torch.full((2, 3), 0.2), torch.ones(5)])
    assert scaled.add([torch.full((2, 3), math.inf), torch.ones(5)])
    mean = mean_of(scaled, [0, 0], 4)
    assert mean[:6].tolist() == [math.inf] * 6
    assert mean[32:37].tolist() == [0.5] * 5
    scaled.reset([0, 0])
    assert scaled.add(ones())
    assert mean_of(scaled, [0, 0], 1)[:6].tolist() == [1.0] * 6


def test_squares_neither_overflow_nor_vanish():
    assert square_sum(torch.tensor([FLOAT32_MAX, FLOAT32_MAX])) == 2 * float(FLOAT32_MAX) ** 2
    assert square_sum(torch.tensor([2.0**-149] * 4)) == 4 * 2.0**-298
    assert math.isnan(square_sum(torch.tensor([1.0, math.nan])))


def test_the_norm_takes_the_largest_and_the_smallest_numbers():
    assert norm_from_limbs(norm_limbs([9.0, 16.0])) == 5.0
    assert norm_from_limbs(norm_limbs([])) == 0.0
    assert norm_from_limbs(norm_limbs([2.0**-298])) == 2.0**-149
    # A million blocks of 16,384 of float32's largest value.
    huge = square_sum(torch.full((16384,), FLOAT32_MAX))
    assert norm_from_limbs([limb * 2**20 for limb in norm_limbs([huge])]) == math.sqrt(huge) * 2**10
    assert len(norm_limbs([huge] * 1000)) == NORM_LIMBS
    assert all(0 <= limb < 2**32 for limb in norm_limbs([huge] * 1000))


def test_limbs_of_many_sums_are_those_of_each() -> None:
    draw = random.Random(5)
    sums = [draw.choice((0.0, 1.0, draw.random())) * 2.0 ** draw.randrange(-240, 200) for _ in range(1000)]
    total = sum(int(Fraction(value) * 2**320) for value in sums)
    assert sum(limb << 32 * place for place, limb in enumerate(norm_limbs(sums))) == total
    assert norm_limbs([0.0] * 1000) == [0] * NORM_LIMBS
