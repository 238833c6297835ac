"""Exact sums on a device: one pass over a layer's gradients rounds them to their grids, adds them and takes maxima.

The words are those of `elaswave.state.sums`, the constant of every addition included, so that a sum has the same bits
wherever its terms were added, and its owner subtracts the same constants. One launch serves any number of tensors: a
table of chunks says where each lies, and a list of addresses where this micro-batch's gradients are. Nothing is read by
the host. Two implementations with equal bits: a Triton kernel, and torch's operators for devices without Triton.

What differs from the CPU's accumulator follows from the single pass, which cannot know of a value that is not finite
before it has added others: such a value adds 0 units, and the maximum of its tensor is not finite. Each addition writes
its maxima to a row of its own, so the vote can leave out the rows that are not finite, and name their micro-batch. A
sum that such a row belongs to must not be used.

No streams, allocations or waits here, and no packages but torch and, where it is installed, Triton.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# Kernels have no types that Python knows.
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CHUNK_ELEMENTS = 4096
"""Elements that one program of the kernel adds."""
NUM_WARPS = 8
NOT_FINITE = 0x7F800000
"""Maxima are bits of float32, which for numbers of one sign are in the order of the numbers; from here on they are
infinite or not a number."""
_VECTOR_BYTES = 16
_VECTOR_ELEMENTS = 8
"""Most elements of a vector: of int16, the smallest type of a plane."""
_CLAMP = 2.0**62


class FlatRange(NamedTuple):
    """A tensor in its layer's flat storage."""

    offset: int
    """Its first element."""
    numel: int


class Chunks:
    """Where one launch adds: the tensors of one layer, or of several whose sums are one allocation.

    Args:
        runs: the tensors, in the order in which their gradients are given.
        device: that the sums are on.
        chunk_elements: that one program adds, a power of two.
    """

    def __init__(self, runs: Sequence[FlatRange], device: torch.device, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        rows = [
            (index, first, run.offset + first, min(chunk_elements, run.numel - first))
            for index, run in enumerate(runs)
            for first in range(0, run.numel, chunk_elements)
        ]
        self.runs = tuple(runs)
        self.chunk_elements = chunk_elements
        self.table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(device)
        """int64 [chunks, 4]: tensor, first element in it, first element in the sums, number of elements."""
        self.is_aligned = all(run.offset % _VECTOR_ELEMENTS == 0 for run in runs)


class Gradients(NamedTuple):
    """The gradients of one micro-batch as the kernel finds them. Their memory must live until it has run."""

    addresses: torch.Tensor
    """int64 [tensors], on the device; 0 counts as zeros."""
    dtype: torch.dtype
    """float32 or bfloat16, of all of them."""
    is_aligned: bool


def addresses_of(
    gradients: Sequence[torch.Tensor | None], runs: Sequence[FlatRange]
) -> tuple[list[int], torch.dtype, bool]:
    """Address of each gradient (0: there is none), their type, and whether the kernel may load whole vectors.

    Args:
        gradients: contiguous, of one type.
        runs: the tensors that they are of.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    sizes = [run.numel if gradient is None else gradient.numel() for gradient, run in zip(gradients, runs, strict=True)]
    assert sizes == [run.numel for run in runs], f"gradients of {sizes} elements for tensors {list(runs)}"
    dtypes = {gradient.dtype for gradient in present}
    assert dtypes <= {torch.float32, torch.bfloat16} and len(dtypes) <= 1, f"gradients of types {dtypes}"
    assert all(gradient.is_contiguous() for gradient in present), "the kernel reads gradients in the order of memory"
    found = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
    return found, dtypes.pop() if dtypes else torch.float32, all(each % _VECTOR_BYTES == 0 for each in found)


def add_by_kernel(
    gradients: Gradients,
    chunks: Chunks,
    exponents: torch.Tensor,
    planes: Sequence[torch.Tensor],
    maxima: torch.Tensor,
    checksum: torch.Tensor | None = None,
    *,
    is_first: bool = False,
    num_warps: int = NUM_WARPS,
) -> None:
    """Adds one micro-batch's gradients; one launch on the current stream.

    Args:
        gradients: one per tensor of the chunks.
        chunks: where they are added.
        exponents: int64 [tensors], of their grids.
        planes: one, int64, or two, int32 and int16, as `elaswave.state.sums` describes them; [elements].
        maxima: int32 [tensors], zeros before: takes the bits of the largest absolute gradients (`NOT_FINITE`).
        checksum: int64 [1], to which the sum of all added words is added, modulo 2**64; None: it is not kept.
        is_first: the sums have no terms yet, whatever is in their memory. Padding is never written.
        num_warps: of a program.
    """
    if len(chunks.table) == 0:
        return
    _add_chunk[(len(chunks.table),)](
        gradients.addresses,
        chunks.table,
        exponents,
        planes[0],
        planes[-1],
        maxima,
        maxima if checksum is None else checksum,
        IS_BFLOAT16=gradients.dtype == torch.bfloat16,
        IS_NARROW=len(planes) == 2,
        IS_FIRST=is_first,
        IS_CHECKED=checksum is not None,
        IS_ALIGNED=gradients.is_aligned and chunks.is_aligned and _start_at_vectors(planes),
        SIZE=chunks.chunk_elements,
        num_warps=num_warps,
    )


def add_by_operators(
    gradients: Sequence[torch.Tensor | None],
    runs: Sequence[FlatRange],
    exponents: Sequence[int],
    planes: Sequence[torch.Tensor],
    maxima: torch.Tensor,
    checksum: torch.Tensor | None = None,
    *,
    is_first: bool = False,
) -> None:
    """Does the same as `add_by_kernel` with torch's operators: some twenty launches per tensor, and float64 in memory.

    Args:
        gradients: one per tensor, float32 or bfloat16; None counts as zeros.
        runs: where the tensors lie in the planes.
        exponents: of their grids.
        planes, maxima, checksum, is_first: as of `add_by_kernel`.
    """
    for index, (gradient, run, exponent) in enumerate(zip(gradients, runs, exponents, strict=True)):
        if run.numel == 0:
            continue
        parts = [plane[run.offset : run.offset + run.numel] for plane in planes]
        if gradient is None:
            gradient = torch.zeros(run.numel, dtype=torch.float32, device=planes[0].device)
        values = gradient.detach().reshape(-1).to(torch.float32)
        sizes = values.view(torch.int32) & 0x7FFFFFFF
        maxima[index : index + 1].copy_(torch.maximum(maxima[index : index + 1], sizes.max()))
        wide = torch.where(sizes < NOT_FINITE, values, 0.0).to(torch.float64)
        constant = _offset(exponent)
        near = (wide + 1.5 * 2.0 ** (52 - exponent)).view(torch.int64)
        far = (wide * 2.0**exponent).clamp_(-_CLAMP, _CLAMP).to(torch.int64).add_(constant)
        words = torch.where(wide.abs() < 2.0 ** (51 - exponent), near, far)
        if checksum is not None:
            checksum.add_(words.sum())
        if len(parts) == 1:
            parts[0].copy_(words if is_first else parts[0] + words)
            continue
        low, high = parts
        if not is_first:
            words = words + (low.to(torch.int64) & 0xFFFFFFFF)
        carried = (words >> 32).to(torch.int16)
        high.copy_(carried if is_first else high + carried)
        low.copy_(words.to(torch.int32))


def _offset(exponent: int) -> int:
    """Computes the bits of ``1.5 * 2**(52 - exponent)``, as `elaswave.state.sums.offset`."""
    return ((1023 + 52 - exponent) << 52) | (1 << 51)


def _start_at_vectors(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.data_ptr() % _VECTOR_BYTES == 0 for tensor in tensors)


def has_kernel() -> bool:
    """Tells whether Triton is installed."""
    return triton is not None


_add_chunk: Any = None

if triton is not None:

    @triton.jit
    def _add_values(
        address,
        first,
        count,
        exponent,
        low,
        high,
        maximum,
        checksum,
        IS_BFLOAT16: tl.constexpr,
        IS_NARROW: tl.constexpr,
        IS_FIRST: tl.constexpr,
        IS_CHECKED: tl.constexpr,
        IS_ALIGNED: tl.constexpr,
        IS_WHOLE: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        # Powers of two by their bits: 2**exponent, the first number too large for the fast path, and its constant.
        scale = ((1023 + exponent) << 52).to(tl.float64, bitcast=True)
        far_from = ((1023 + 51 - exponent) << 52).to(tl.float64, bitcast=True)
        offset = ((1023 + 52 - exponent) << 52) | (1 << 51)
        constant = offset.to(tl.float64, bitcast=True)

        lanes = tl.arange(0, SIZE)
        # A whole chunk has no mask: one that is read from memory would keep the compiler from loading vectors.
        is_here = None if IS_WHOLE else lanes < count
        bits = tl.zeros((SIZE,), dtype=tl.int32)
        if address != 0:
            if (
                IS_BFLOAT16
            ):  # its bits are the upper half of a float32's; Triton's interpreter converts denormals wrongly
                halves = address.to(tl.pointer_type(tl.int16)) + first
                if IS_ALIGNED:
                    halves = tl.multiple_of(halves, 16)
                bits = tl.load(halves + lanes, mask=is_here).to(tl.int32) << 16
            else:
                source = address.to(tl.pointer_type(tl.int32)) + first
                if IS_ALIGNED:
                    source = tl.multiple_of(source, 16)
                bits = tl.load(source + lanes, mask=is_here)
        if not IS_WHOLE:
            bits = tl.where(is_here, bits, 0)

        values = bits.to(tl.float32, bitcast=True)
        sizes = bits & 0x7FFFFFFF
        tl.atomic_max(maximum, tl.max(sizes, 0))
        wide = tl.where(sizes < 0x7F800000, values, 0.0).to(tl.float64)
        near = (wide + constant).to(tl.int64, bitcast=True)
        # A float32 of 2**51 units and more is a whole number of units: nothing is rounded here.
        clamped = tl.minimum(tl.maximum(wide * scale, -4611686018427387904.0), 4611686018427387904.0)
        words = tl.where(tl.abs(wide) < far_from, near, clamped.to(tl.int64) + offset)
        if IS_CHECKED:
            added = words if IS_WHOLE else tl.where(is_here, words, 0)
            tl.atomic_add(checksum, tl.sum(added, 0))

        if IS_NARROW:
            if not IS_FIRST:
                words += tl.load(low + lanes, mask=is_here).to(tl.int64) & 0xFFFFFFFF
            carried = (words >> 32).to(tl.int16)
            if not IS_FIRST:
                carried += tl.load(high + lanes, mask=is_here)
            tl.store(low + lanes, words.to(tl.int32), mask=is_here)
            tl.store(high + lanes, carried, mask=is_here)
        else:
            if not IS_FIRST:
                words += tl.load(low + lanes, mask=is_here)
            tl.store(low + lanes, words, mask=is_here)

    @triton.jit
    def _add_chunk(
        addresses,
        table,
        exponents,
        low,
        high,
        maxima,
        checksum,
        IS_BFLOAT16: tl.constexpr,
        IS_NARROW: tl.constexpr,
        IS_FIRST: tl.constexpr,
        IS_CHECKED: tl.constexpr,
        IS_ALIGNED: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        row = table + 4 * tl.program_id(0).to(tl.int64)
        tensor = tl.load(row)
        first = tl.load(row + 1)
        place = tl.load(row + 2)
        count = tl.load(row + 3)
        address = tl.load(addresses + tensor)
        exponent = tl.load(exponents + tensor)
        low += place
        high += place
        if IS_ALIGNED:
            low = tl.multiple_of(low, 16)
            high = tl.multiple_of(high, 16)
        if count == SIZE:
            _add_values(
                address,
                first,
                count,
                exponent,
                low,
                high,
                maxima + tensor,
                checksum,
                IS_BFLOAT16,
                IS_NARROW,
                IS_FIRST,
                IS_CHECKED,
                IS_ALIGNED,
                True,
                SIZE,
            )
        else:
            _add_values(
                address,
                first,
                count,
                exponent,
                low,
                high,
                maxima + tensor,
                checksum,
                IS_BFLOAT16,
                IS_NARROW,
                IS_FIRST,
                IS_CHECKED,
                IS_ALIGNED,
                False,
                SIZE,
            )
