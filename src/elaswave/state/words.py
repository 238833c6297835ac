"""The words of exact sums as they lie in memory: one plane of 64-bit integers, or two planes of 32 and 16 bits.

A *plane* is a flat tensor with one entry per element. Sums of 64 bits are one plane, int64. Sums of 48 bits are two:
the low 32 bits, and the high 16, so they take 6 bytes per element in memory and, plane by plane, on their way. Their
arithmetic is that of integers modulo 2**48. It needs no case of its own where such an integer stands in the upper 48
bits of a 64-bit word: sums and checksums modulo 2**64 are then sums modulo 2**48, and the sign is the word's. Totals,
which never leave the worker that makes them, are such words.
"""

from collections.abc import Sequence

import numpy as np
import torch

from elaswave.blocks.grids import WIDE_BITS

Planes = tuple[torch.Tensor, ...]
"""A run of sums: one tensor (int64; float32 in scaled mode), or two (int32, whose entries are unsigned, and int16)."""

_LOW_BITS = 32


def plane_dtypes(width: int) -> tuple[torch.dtype, ...]:
    """Of the planes of exact sums of so many bits."""
    return (torch.int64,) if width == WIDE_BITS else (torch.int32, torch.int16)


def unused_bits(width: int) -> int:
    """Low bits of a word that a sum of so many bits leaves at 0."""
    return WIDE_BITS - width


def cut(planes: Planes, start: int, stop: int) -> Planes:
    """Elements [start, stop) of a run; the same memory."""
    return tuple(plane[start:stop] for plane in planes)


def add_planes(parts: Sequence[Planes]) -> torch.Tensor:
    """The sum of some runs of equal length as words; a single run of one plane is returned itself.

    By numpy, which adds int64 faster than torch.
    """
    if len(parts[0]) == 2:
        return _add_up_narrow(parts)
    if len(parts) == 1:
        return parts[0][0]
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
