"""Exact sums of gradients on a device that computes behind the host's back, with the integers of `elaswave.state.sums`.

`elaswave.devices.sums_kernel` adds; what a worker keeps of a layer's sum stands here. Nothing is read by the host while
micro-batches run: maxima, checksums and whether everything was finite stay on the device until the vote asks for all
of them at once.

So a gradient that is not finite is found at the vote, and what else its micro-batch has added is not taken back: the
sums of such an attempt mean nothing, and no vote applies them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from elaswave.blocks.shapes import INITIAL_EXPONENT, WIDE_BITS, LayerShape, segments
from elaswave.devices.sums_kernel import (
    NOT_FINITE,
    Chunks,
    FlatRange,
    Gradients,
    add_by_kernel,
    add_by_operators,
    addresses_of,
    has_kernel,
)
from elaswave.hashing import MASK64, signed64
from elaswave.state.sums import Planes, offset, plane_dtypes, unused_bits

_LOW_BITS = 32
_LOW_MASK = (1 << _LOW_BITS) - 1


class DeviceAccumulator:
    """The exact partial sum of one layer's gradients on one worker; see `elaswave.state.sums.ExactAccumulator`.

    Args:
        shape: the layer's tensors.
        place: the device.
        checked: keep the checksum; else it stays 0.
        width: bits of a sum.
    """

    def __init__(self, shape: LayerShape, place: torch.device, *, checked: bool = True, width: int = WIDE_BITS) -> None:
        self.shape = shape
        self._place = place
        self._checked = checked
        self._unused_bits = unused_bits(width)
        self._planes = tuple(torch.zeros(shape.size, dtype=dtype, device=place) for dtype in plane_dtypes(width))
        self._runs = [FlatRange(slot.offset, slot.numel) for slot in shape.tensors]
        self._chunks = Chunks(self._runs, place) if place.type == "cuda" and has_kernel() else None
        """Of the kernel; None: torch's operators add."""
        self.figures = torch.zeros(len(shape.tensors) + 1, dtype=torch.float64, device=place)
        """Largest absolute gradient seen per tensor, and last the bits of the checksum, before it is shifted."""
        self.reset([INITIAL_EXPONENT] * len(shape.tensors))

    def reset(self, exponents: Sequence[int]) -> None:
        """Empties the sum for a new attempt on the given grids, one exponent per tensor of the layer."""
        assert len(exponents) == len(self.shape.tensors)
        self._is_empty = True
        self.coverage = 0
        """As an `ExactAccumulator`'s."""
        self.covered: dict[int, int] = {}
        """As an `ExactAccumulator`'s."""
        self._exponents = list(exponents)
        self._grids = None if self._chunks is None else self._brought(self._exponents)
        self.figures.zero_()
        self._known: tuple[list[float], int] | None = None

    def _brought(self, numbers: Sequence[int]) -> torch.Tensor:
        """Brings whole numbers to the device, without a wait."""
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(self._place, non_blocking=True)

    @property
    def planes(self) -> Planes:
        """The partial sum, as it lies in memory: [shape.size]."""
        if self._is_empty:
            for plane in self._planes:
                plane.zero_()
            self._is_empty = False
        return self._planes

    @property
    def sum(self) -> torch.Tensor:
        """The same as words, int64 [shape.size]: the sum's own memory where it has 64 bits."""
        return add_planes_on_device([self.planes])

    @property
    def maxima(self) -> list[float]:
        """Largest absolute gradient seen per tensor since `reset`; waits for the device."""
        return self._read()[0]

    @property
    def checksum(self) -> int:
        """Sum of all words that were added since `reset`, modulo 2**64; waits for the device."""
        return self._read()[1]

    def _read(self) -> tuple[list[float], int]:
        if self._known is None:
            self.learn(self.figures.cpu())
        assert self._known is not None
        return self._known

    def learn(self, figures: torch.Tensor) -> None:
        """Takes over `figures` that have been read, so that nobody has to wait for them.

        Args:
            figures: in host memory, as they are now.
        """
        checksum = int(figures[-1:].view(torch.int64)) << self._unused_bits
        self._known = (figures[:-1].tolist(), checksum & MASK64)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Adds one micro-batch's gradients.

        Args:
            gradients: one per tensor of the layer, in order; None counts as zeros.
        Returns:
            A number on the device that is finite if all of them were: their largest absolute value.
        """
        self._known = None
        sizes = torch.zeros(len(gradients), dtype=torch.int32, device=self._place)
        total = self.figures[-1:].view(torch.int64) if self._checked else None
        if self._chunks is None:
            add_by_operators(
                gradients, self._runs, self._exponents, self._planes, sizes, total, is_first=self._is_empty
            )
        else:
            assert self._grids is not None
            flat = [None if gradient is None else gradient.detach().contiguous() for gradient in gradients]
            addresses, dtype, is_aligned = addresses_of(flat, self._runs)
            found = Gradients(self._brought(addresses), dtype, is_aligned)
            add_by_kernel(found, self._chunks, self._grids, self._planes, sizes, total, is_first=self._is_empty)
        self._is_empty = False
        if not len(sizes):
            return self.figures.new_zeros(())
        largest, known = sizes.max(), self.figures[:-1]
        seen = torch.maximum(known, sizes.view(torch.float32).to(torch.float64))
        known.copy_(torch.where(largest < NOT_FINITE, seen, known))
        return largest.reshape(1).view(torch.float32)


def add_planes_on_device(parts: Sequence[Planes]) -> torch.Tensor:
    """Computes the sum of some runs of equal length as words; a single run of one plane is returned itself."""
    if len(parts[0]) == 2:
        total = parts[0][1].to(torch.int64)
        for _, high in parts[1:]:
            total.add_(high)
        total.bitwise_left_shift_(_LOW_BITS)
        for low, _ in parts:
            total.add_(low.to(torch.int64).bitwise_and_(_LOW_MASK))
        return total.bitwise_left_shift_(unused_bits(48))
    if len(parts) == 1:
        return parts[0][0]
    total = parts[0][0] + parts[1][0]
    for (part,) in parts[2:]:
        total.add_(part)
    return total


class Pieces(NamedTuple):
    """Where the tensors of a layer are in some runs of it that lie side by side."""

    tensors: tuple[int, ...]
    """Of each piece the tensor, counted in the layer."""
    slices: tuple[slice, ...]
    gaps: tuple[slice, ...]
    """Padding."""


def pieces_of(shape: LayerShape, runs: Sequence[tuple[int, int]]) -> Pieces:
    """Finds the pieces of tensors in runs; those of one tensor that come to lie beside each other are one.

    Args:
        shape: the layer.
        runs: [start, stop) in the layer, in the order in which they lie.
    """
    found: list[tuple[int, int, int]] = []
    gaps: list[tuple[int, int]] = []
    first_index = shape.tensors[0].id if shape.tensors else 0
    size = 0
    for start, stop in runs:
        done = size
        for segment in segments(shape, start, stop):
            index, first, last = segment.slot.id - first_index, size + segment.start, size + segment.stop
            if done < first:
                gaps.append((done, first))
            if found and found[-1][0] == index and found[-1][2] == first:
                first = found.pop()[1]
            found.append((index, first, last))
            done = last
        size += stop - start
        if done < size:
            gaps.append((done, size))
    return Pieces(
        tuple(index for index, _, _ in found),
        tuple(slice(first, last) for _, first, last in found),
        tuple(slice(first, last) for first, last in gaps),
    )


def checksum_on_device(total: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """Computes the sum of the words of some runs of a layer, wrapping, padding left out, as a number on the device.

    Args:
        total: words (exact) or float32 (scaled) of the runs, side by side.
        pieces: of the runs.
    """
    if total.dtype == torch.float32:
        return torch.zeros((), dtype=torch.int64, device=total.device)
    found = total.sum()
    return found - torch.cat([total[gap] for gap in pieces.gaps]).sum() if pieces.gaps else found


def reduced_gradient_on_device(
    total: torch.Tensor,
    pieces: Pieces,
    exponents: Sequence[int],
    num_microbatches: int,
    num_uses: int = 1,
    width: int = WIDE_BITS,
) -> torch.Tensor:
    """Computes the mean gradient of some runs of a unit, from their totals over all workers; see
    `elaswave.state.sums.reduced_gradient`. What is launched grows with neither runs nor tensors, as far as torch's
    operators on lists go.

    Args:
        total: of the runs, side by side.
        pieces: of the runs.
        exponents, num_microbatches, num_uses, width: as there.
    """
    if total.dtype == torch.float32:
        return total / num_microbatches
    if not pieces.slices:
        return torch.zeros(total.shape, dtype=torch.float32, device=total.device)
    grids = [exponents[tensor] for tensor in pieces.tensors]
    constants = [signed64((offset(grid) * num_microbatches * num_uses) << unused_bits(width)) for grid in grids]
    units = [2.0 ** -(grid + unused_bits(width)) / num_microbatches for grid in grids]
    words = total.clone()  # it may be the sum's own memory
    torch._foreach_sub_([words[piece] for piece in pieces.slices], constants)
    wide = words.to(torch.float64)
    torch._foreach_mul_([wide[piece] for piece in pieces.slices], units)
    reduced = wide.to(torch.float32)
    if pieces.gaps:
        torch._foreach_zero_([reduced[gap] for gap in pieces.gaps])
    return reduced
