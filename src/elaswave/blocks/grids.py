"""Grids and norms as arithmetic: which power of two a tensor's gradients are added on, and sums that have no order.

`elaswave.state.sums` explains grids and adds tensors on them; what follows from the largest gradient of a step, and the
exact sum of the squares of all owners, is decided in the vote and stands here. Pure: no torch, no IO.
"""

import math
import struct
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple


class GridRule(NamedTuple):
    """How the bits of a sum are used."""

    sum_bits: int
    """Of the magnitude of a sum that fits: one of the word's bits is the sign, and one is spare."""
    headroom_bits: int
    """The largest gradient may grow by this factor (as a power of two) from one step to the next before a retry."""
    bits_below_maximum: int
    """The most bits of resolution below a tensor's largest gradient."""


WIDE_BITS = 64
"""Width of a sum, if nothing else is said."""
GRID_RULES = MappingProxyType({WIDE_BITS: GridRule(62, 16, 43), 48: GridRule(46, 10, 33)})
"""By the width of a sum in bits (``elastic.accumulator_bits``)."""
MIN_EXPONENT, MAX_EXPONENT = -90, 200
"""Grids are clamped to these; float32 reaches from 2**-149 to 2**128."""
FEWEST_BITS = 24
"""Bits that a tensor's largest gradient must have on its grid, else the step is tried again: as many as float32 has."""
INITIAL_EXPONENT = 40
"""Grid of the first attempt of the first step, which is made only to measure (see `elaswave.protocol.step.ballot`)."""


def magnitude_bits(maximum: float) -> int:
    """The smallest x with ``maximum < 2**x``, for a positive finite maximum."""
    return math.frexp(maximum)[1]


def next_exponent(maximum: float, exponent: int, num_microbatches: int, width: int = WIDE_BITS) -> int:
    """The grid exponent of the next step.

    Args:
        maximum: largest absolute gradient of the tensor in any micro-batch of this step, finite.
        exponent: this step's exponent, kept where the maximum is 0.
        num_microbatches: terms of each sum, at least 1.
        width: of a sum, in bits.
    """
    if maximum == 0.0:
        return exponent
    rule = GRID_RULES[width]
    bits = min(rule.bits_below_maximum, rule.sum_bits - rule.headroom_bits - count_bits(num_microbatches))
    return max(MIN_EXPONENT, min(MAX_EXPONENT, bits - magnitude_bits(maximum)))


def count_bits(count: int) -> int:
    """The smallest x with ``count <= 2**x``."""
    return (count - 1).bit_length()


def could_overflow(maximum: float, exponent: int, num_microbatches: int, width: int = WIDE_BITS) -> bool:
    """Whether the sum of num_microbatches values up to maximum could leave the range of signed words of that width."""
    num_bits = magnitude_bits(maximum) + exponent + count_bits(num_microbatches)
    return maximum > 0.0 and num_bits > GRID_RULES[width].sum_bits


def is_too_coarse(maximum: float, exponent: int) -> bool:
    """Whether a grid leaves the largest gradient, if there is any, fewer bits than float32 would."""
    return maximum > 0.0 and magnitude_bits(maximum) + exponent < FEWEST_BITS


NORM_LIMBS = 21
_LIMB_BITS = 32
_NORM_SHIFT = 320
_LIMBS = struct.Struct(f"<{NORM_LIMBS}I")
_ALL_LIMBS = (1 << _LIMB_BITS * NORM_LIMBS) - 1


def norm_limbs(square_sums: Sequence[float]) -> list[int]:
    """An exact sum of finite non-negative float64 values as 32-bit limbs, least significant first.

    Limbs of several workers may be added in any order (as int64, without carrying) before `norm_from_limbs`.

    Args:
        square_sums: sums of squares of float32 values, so multiples of 2**-298.
    """
    total = 0
    for value in square_sums:
        numerator, denominator = value.as_integer_ratio()
        total += (numerator << _NORM_SHIFT) // denominator
    return list(_LIMBS.unpack((total & _ALL_LIMBS).to_bytes(_LIMBS.size, "little")))


def norm_from_limbs(limbs: Sequence[int]) -> float:
    """The square root of what `norm_limbs` (added over workers) holds."""
    total = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs) if limb)
    return math.sqrt(total / (1 << _NORM_SHIFT))
