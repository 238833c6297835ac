"""Exact gradient sums: fixed point of 64 or 48 bits on one power-of-two grid per tensor, and the exact squared norm.

Adding integers is associative, so the reduced gradient does not depend on which worker ran which micro-batch, nor on
the order in which partial sums met. A tensor whose grid exponent is e is summed in units of ``2**-e``:

1. ``n(g) = round_half_even(g * 2**e)`` for every element of every micro-batch's gradient (float32 or bfloat16);
2. ``S = sum of n(g)`` over all N micro-batches, modulo 2**64, or 2**48;
3. the reduced gradient is ``float32(float64(S) * (2**-e / N))``: the mean over micro-batches. This is the one formula.
   Of a tensor that layers share, each of whose u uses is added by itself, S has N * u terms.

The next step's exponent follows from the largest absolute gradient M of this step (a maximum, so free of order):
M * 2**e has 43 bits, which leaves 16 of headroom and the bits of N below 2**62; with sums of 48 bits it has 33, which
leaves 10 below 2**46 (`elaswave.blocks.shapes.GRID_RULES`). Whether a sum could overflow is judged from the largest
single gradient, never from a partial sum; wrapping partial sums are harmless.

Rounding uses the addition of ``1.5 * 2**(52 - e)`` in float64, whose bits then hold ``n(g)`` plus a constant; the
constants of all N additions are subtracted once, by the owner; modulo 2**48 they are 0. Gradients too large for that
(2**51 units and more) take a slower path to the same integers.

Each addition also adds the plain sum of all words that it adds to one number, the accumulator's `checksum`. That is
linear, so the checksums of all contributors add up to the `checksum` of the owners' totals, modulo 2**64, unless a bit
has changed in between. It finds every single changed word; two changes that cancel, and words that have changed places,
it does not.

The words of exact sums as they lie in memory: one plane of 64-bit integers, or two planes of 32 and 16 bits.

A *plane* is a flat tensor with one entry per element. Sums of 64 bits are one plane, int64. Sums of 48 bits are two:
the low 32 bits, and the high 16, so they take 6 bytes per element in memory and, plane by plane, on their way. Their
arithmetic is that of integers modulo 2**48. It needs no case of its own where such an integer stands in the upper 48
bits of a 64-bit word: sums and checksums modulo 2**64 are then sums modulo 2**48, and the sign is the word's. Totals,
which never leave the worker that makes them, are such words.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from elaswave.blocks.shapes import INITIAL_EXPONENT, WIDE_BITS, LayerShape, TensorSlot, segments
from elaswave.hashing import MASK64, signed64

Planes = tuple[torch.Tensor, ...]
"""A run of sums: one tensor (int64; float32 in scaled mode), or two (int32, whose entries are unsigned, and int16)."""

_LOW_BITS = 32


def plane_dtypes(width: int) -> tuple[torch.dtype, ...]:
    """Returns the types of the planes of exact sums of so many bits."""
    return (torch.int64,) if width == WIDE_BITS else (torch.int32, torch.int16)


def unused_bits(width: int) -> int:
    """Counts the low bits of a word that a sum of so many bits leaves at 0."""
    return WIDE_BITS - width


def cut(planes: Planes, start: int, stop: int) -> Planes:
    """Cuts elements [start, stop) out of a run; the same memory."""
    return tuple(plane[start:stop] for plane in planes)


def add_planes(parts: Sequence[Planes]) -> torch.Tensor:
    """Computes the sum of some runs of equal length as words; a single run of one plane is returned itself.

    By numpy, which adds int64 faster than torch.
    """
    if len(parts[0]) == 2:
        return _add_up_narrow(parts)
    if len(parts) == 1:
        return parts[0][0]
    # Into new memory: an owner never adds to its own sum what has come, which is void after a loss (S4).
    total = np.add(parts[0][0].numpy(), parts[1][0].numpy())
    for (part,) in parts[2:]:
        np.add(total, part.numpy(), out=total)
    return torch.from_numpy(total)


def _add_up_narrow(parts: Sequence[Planes]) -> torch.Tensor:
    total = parts[0][1].numpy().astype(np.int64)
    for _, high in parts[1:]:
        np.add(total, high.numpy(), out=total)
    np.left_shift(total, _LOW_BITS, out=total)
    for low, _ in parts:
        np.add(total, low.numpy().view(np.uint32), out=total)  # what it carries arrives in the high bits
    np.left_shift(total, unused_bits(48), out=total)
    return torch.from_numpy(total)


class WideTerm:
    """Where the words of a piece of a sum of 64 bits are added.

    Args:
        planes: of the piece.
        words: that are added, int64; always in this memory.
    """

    def __init__(self, planes: Planes, words: torch.Tensor) -> None:
        self._total = planes[0].numpy()
        self._words = words.numpy()

    def put(self) -> None:
        """Makes the words the sum."""
        np.copyto(self._total, self._words)

    def add(self) -> None:
        """Adds the words."""
        np.add(self._total, self._words, out=self._total)

    def subtract(self) -> None:
        """Subtracts the words."""
        np.subtract(self._total, self._words, out=self._total)


class NarrowTerm:
    """Where the low 48 bits of the words of a piece are added to a sum of 48 bits. Adding takes the words apart: they
    are others afterwards.

    Args:
        planes: of the piece.
        words: that are added, int64; always in this memory.
        scratch: for as many int64.
    """

    def __init__(self, planes: Planes, words: torch.Tensor, scratch: np.ndarray) -> None:
        self._low, self._high = planes[0].numpy().view(np.uint32), planes[1].numpy()
        self._words = words.numpy()
        # Of little-endian words, the only ones that torch runs on.
        self._low_of_words = self._words.view(np.uint32)[::2]
        self._high_of_words = self._words.view(np.int16)[2::4]
        self._wide = scratch[: len(self._words)]

    def put(self) -> None:
        """Makes the words the sum."""
        np.copyto(self._low, self._low_of_words)
        np.copyto(self._high, self._high_of_words)

    def add(self) -> None:
        """Adds the words."""
        np.copyto(self._wide, self._low)
        np.add(self._words, self._wide, out=self._words)  # and carries into the high bits
        self._take_low()

    def subtract(self) -> None:
        """Subtracts the words."""
        np.copyto(self._wide, self._low)
        np.subtract(self._wide, self._words, out=self._words)
        self._take_low()

    def _take_low(self) -> None:
        np.copyto(self._low, self._low_of_words)
        np.add(self._high, self._high_of_words, out=self._high)


_FAST_LIMIT_BITS = 51


_PIECE_ELEMENTS = 1 << 16
"""Most elements that are added in one go: their gradients, their words in float64 and their sums together take 1.25
mebibytes, which a core's own cache holds."""


_REDUCED_ELEMENTS = 1 << 15
"""Most elements whose mean is made in one go, for the same reason."""


class Scratch:
    """Memory in which gradients become float64; shared by the accumulators of one thread."""

    def __init__(self) -> None:
        self.values = torch.empty(_PIECE_ELEMENTS, dtype=torch.float64)

    @cached_property
    def wide(self) -> np.ndarray:
        """Where sums of 48 bits become int64."""
        return np.empty(_PIECE_ELEMENTS, dtype=np.int64)


class _Part(NamedTuple):
    """The elements of one tensor in a piece."""

    tensor: int
    """Its index in the layer."""
    elements: slice | None
    """Of the tensor; None for all."""
    values: torch.Tensor
    """Where they become float64."""
    numbers: np.ndarray
    """The same memory."""


class _Piece:
    """A run of a layer's flat storage that is added in one go: some whole tensors, or a part of one. No padding.

    Args:
        start: first element in the layer.
        scratch: where its elements become float64.
    """

    def __init__(self, start: int, scratch: Scratch) -> None:
        self.start = self.stop = start
        self.parts: list[_Part] = []
        self._scratch = scratch

    def append(self, index: int, slot: TensorSlot, first: int, size: int) -> None:
        """Appends the next part: elements [first, first + size) of a tensor."""
        view = self._scratch.values[self.stop - self.start :][:size]
        is_whole = size == slot.numel
        values = view.view(slot.added_shape) if is_whole else view
        self.parts.append(_Part(index, None if is_whole else slice(first, first + size), values, view.numpy()))
        self.stop += size
        self.words = self._scratch.values[: self.stop - self.start].view(torch.int64)
        """All its elements as they are added."""


def _pieces(shape: LayerShape, scratch: Scratch) -> list[_Piece]:
    pieces: list[_Piece] = []
    for index, slot in enumerate(shape.tensors):
        for first in range(0, slot.numel, _PIECE_ELEMENTS):
            size = min(_PIECE_ELEMENTS, slot.numel - first)
            start = slot.offset + first
            last = pieces[-1] if pieces else None
            if last is None or last.stop != start or start + size - last.start > _PIECE_ELEMENTS:
                pieces.append(_Piece(start, scratch))
            pieces[-1].append(index, slot, first, size)
    return pieces


class ExactAccumulator:
    """The exact partial sum of one layer's gradients on one worker.

    `add` is called for every parameter and micro-batch, and is bound by memory: hence the pieces, each of which stays
    in the core's cache from the search for its largest gradient until it is added. Each operation is done by the
    library that is faster at it: torch's addition of int64 multiplies by its alpha, too, and takes three times as long
    as numpy's; numpy's sum of int64 takes twice as long as torch's.

    Args:
        shape: the layer's tensors.
        scratch: None for memory of its own.
        checked: keep the checksum; else it stays 0.
        width: bits of a sum.
    """

    def __init__(
        self, shape: LayerShape, scratch: Scratch | None = None, *, checked: bool = True, width: int = WIDE_BITS
    ) -> None:
        self.shape = shape
        self._checked = checked
        self._unused_bits = unused_bits(width)
        self._planes = tuple(torch.zeros(shape.size, dtype=dtype) for dtype in plane_dtypes(width))
        scratch = scratch or Scratch()
        self._terms = [(piece, self._term(piece, scratch)) for piece in _pieces(shape, scratch)]
        self.reset([INITIAL_EXPONENT] * len(shape.tensors))

    def _term(self, piece: _Piece, scratch: Scratch) -> WideTerm | NarrowTerm:
        planes = cut(self._planes, piece.start, piece.stop)
        return NarrowTerm(planes, piece.words, scratch.wide) if self._unused_bits else WideTerm(planes, piece.words)

    def reset(self, exponents: Sequence[int]) -> None:
        """Empties the sum for a new attempt on the given grids, one exponent per tensor of the layer."""
        assert len(exponents) == len(self.shape.tensors)
        # Nothing is zeroed: the first addition writes over what is there.
        self._is_empty = True
        self.maxima = [0.0] * len(exponents)
        """Largest absolute gradient seen per tensor since `reset`."""
        self.coverage = 0
        """Sum of the keys of all micro-batches that were added since `reset`, modulo 2**64; kept by who adds."""
        self.covered: dict[int, int] = {}
        """Those micro-batches, one bit each, by the use that they were added for; kept by who adds."""
        self.checksum = 0
        """Sum of all words that were added since `reset`, modulo 2**64: what the words of `sum` must come to."""
        self._exponents = list(exponents)
        self._magic = [_magic(exponent) for exponent in exponents]
        self._slow_from = [2.0 ** (_FAST_LIMIT_BITS - exponent) for exponent in exponents]

    @property
    def planes(self) -> Planes:
        """The partial sum in grid units plus `offset` per addition, wrapping, as it lies in memory: [shape.size]."""
        if self._is_empty:
            for plane in self._planes:
                plane.zero_()
            self._is_empty = False
        return self._planes

    @property
    def sum(self) -> torch.Tensor:
        """The same as words, int64 [shape.size]: the sum's own memory where it has 64 bits."""
        return add_planes([self.planes])

    def add(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Adds one micro-batch's gradients, all of them or (where one is not finite) none.

        Args:
            gradients: one per tensor of the layer, in order; None counts as zeros.
        Returns:
            Whether all of them were finite.
        """
        present = [_present(gradient, slot) for gradient, slot in zip(gradients, self.shape.tensors, strict=True)]
        maxima, checksum = [0.0] * len(present), self.checksum
        for number, (piece, term) in enumerate(self._terms):
            if not self._make_words(piece, present, maxima):
                self._take_back(number, present)
                self.checksum = checksum
                return False
            if self._checked:
                words = int(piece.words.sum())  # while the piece is in the cache
                self.checksum = (self.checksum + (words << self._unused_bits)) & MASK64
            if self._is_empty:
                term.put()
            else:
                term.add()
        self.maxima = list(map(max, self.maxima, maxima))
        self._is_empty = False
        return True

    def _make_words(self, piece: _Piece, gradients: Sequence[torch.Tensor], maxima: list[float]) -> bool:
        """Makes the words of a piece, unless a gradient in it is not finite.

        Args:
            gradients: of the layer's tensors.
            maxima: largest absolute values of the tensors, taken on.
        Returns:
            Whether all of them were finite.
        """
        for index, elements, values, numbers in piece.parts:
            gradient = gradients[index] if elements is None else gradients[index][elements]
            largest = _largest(gradient)
            if not math.isfinite(largest):
                return False
            maxima[index] = max(maxima[index], largest)
            # Both paths leave the same integers, so whether one is taken shows in no bit.
            if largest >= self._slow_from[index]:
                values.view(torch.int64).copy_(_fast_bits_slowly(gradient, self._exponents[index]))
            else:
                values.copy_(gradient)
                np.add(numbers, self._magic[index], out=numbers)
        return True

    def _take_back(self, num_pieces: int, gradients: Sequence[torch.Tensor]) -> None:
        """Subtracts the first pieces again; in an empty sum nothing counts that has been written."""
        for piece, term in [] if self._is_empty else self._terms[:num_pieces]:
            # Made again: all pieces share one scratch memory.
            self._make_words(piece, gradients, [0.0] * len(gradients))
            term.subtract()


def _present(gradient: torch.Tensor | None, slot: TensorSlot) -> torch.Tensor:
    """Returns a gradient of a tensor, None as zeros; flat where it is added in several pieces."""
    if gradient is None:
        # Zeros and not nothing: the owner takes the constants of all N additions off, so each must have been made.
        gradient = torch.zeros(slot.added_shape, dtype=torch.float32)
    return gradient.reshape(-1) if slot.numel > _PIECE_ELEMENTS else gradient


def _fast_bits_slowly(gradient: torch.Tensor, exponent: int) -> torch.Tensor:
    """Computes the same integers as the fast path, for values that float64's mantissa cannot hold beside the
    constant."""
    scaled = torch.round(gradient.to(torch.float64) * 2.0**exponent)
    # A sum that could overflow is never used (the vote fails); clamping only keeps the conversion defined.
    return scaled.clamp_(-(2.0**62), 2.0**62).to(torch.int64) + offset(exponent)


class FloatAccumulator:
    """The float32 partial sum of one layer's gradients on one worker (``consistency = "scaled"``).

    Args:
        shape: the layer's tensors.
        place: where the sum is; None: in the host's memory.
    """

    def __init__(self, shape: LayerShape, place: torch.device | None = None) -> None:
        self.shape = shape
        self.sum = torch.zeros(shape.size, dtype=torch.float32, device=place)
        self.maxima = [0.0] * len(shape.tensors)
        self.coverage = 0
        """As an `ExactAccumulator`'s."""
        self.covered: dict[int, int] = {}
        """As an `ExactAccumulator`'s."""
        self.checksum = 0
        """Always 0: rounding is not linear, so sums of float32 have no checksum."""
        self.planes = (self.sum,)
        """As an `ExactAccumulator`'s."""
        self._views = [self.sum[slot.offset : slot.stop].view(slot.added_shape) for slot in shape.tensors]

    def reset(self, exponents: Sequence[int]) -> None:
        """Empties the sum; the grids are not used."""
        self.coverage = 0
        self.covered = {}
        self.sum.zero_()

    def add(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Adds one micro-batch's gradients. Always True: the vote's norm finds what is not finite."""
        pairs = [(v, g) for v, g in zip(self._views, gradients, strict=True) if g is not None]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        return True


def checksum(total: torch.Tensor, shape: LayerShape, start: int) -> int:
    """Computes the sum of the words of a run of a layer modulo 2**64, padding left out; 0 for sums of float32.

    Args:
        total: words (exact) or float32 (scaled) sum of the run [start, start + len(total)).
        shape: the layer.
        start: first element of the run.
    """
    if total.dtype == torch.float32:
        return 0
    runs = segments(shape, start, start + total.numel())
    return sum(int(total[run.start : run.stop].sum()) for run in runs) & MASK64


def reduced_gradient(
    total: torch.Tensor,
    shape: LayerShape,
    start: int,
    exponents: Sequence[int],
    num_microbatches: int,
    num_uses: int = 1,
    width: int = WIDE_BITS,
) -> torch.Tensor:
    """Computes the mean gradient of a run of a unit, from its total over all workers.

    Args:
        total: words (exact) or float32 (scaled) sum of the run [start, start + len(total)).
        shape: the layer.
        start: first element of the run.
        exponents: one grid exponent per tensor of the layer.
        num_microbatches: that the mean is over, N.
        num_uses: additions of each micro-batch, u; the total holds N x u.
        width: bits of a sum.
    Returns:
        float32, shape of total; zero in the padding.
    """
    if total.dtype == torch.float32:
        return total / num_microbatches
    reduced = torch.empty(total.shape, dtype=torch.float32)
    words, values = total.numpy(), reduced.numpy()
    first_index, done = shape.tensors[0].id if shape.tensors else 0, 0
    for segment in segments(shape, start, start + total.numel()):
        values[done : segment.start] = 0.0
        done = segment.stop
        exponent = exponents[segment.slot.id - first_index]
        constant = signed64((offset(exponent) * num_microbatches * num_uses) << unused_bits(width))
        unit = 2.0 ** -(exponent + unused_bits(width))
        for first in range(segment.start, done, _REDUCED_ELEMENTS):
            part = slice(first, min(first + _REDUCED_ELEMENTS, done))
            units = words[part] - constant
            np.multiply(units, unit / num_microbatches, out=values[part], casting="same_kind")  # in float64
    values[done:] = 0.0
    return reduced


def _magic(exponent: int) -> float:
    return 1.5 * 2.0 ** (52 - exponent)


def offset(exponent: int) -> int:
    """Computes what one addition on the fast path adds beside the units: the bits of ``1.5 * 2**(52 - exponent)``."""
    return ((1023 + 52 - exponent) << 52) | (1 << 51)


def _largest(gradient: torch.Tensor) -> float:
    """Finds the largest absolute value; nan where there is one."""
    if gradient.numel() == 0:
        return 0.0
    low, high = torch.aminmax(gradient)
    return max(-float(low), float(high))


def square_sum(gradient: torch.Tensor) -> float:
    """Computes the sum of squares of one block in float64 (squares of float32 would under- and overflow)."""
    wide = gradient.to(torch.float64)
    return float(wide.mul_(wide).sum())
