"""The codecs of fences: a floating-point tensor as fewer bytes, and back. Equal numbers give equal bytes, everywhere.

A coded tensor is one run of bytes: a head (codec, type, number of dimensions, 0, then each size as 4 bytes, little
endian) and the numbers.

- ``bf16``: each number rounded to bfloat16, to nearest, ties to even.
- ``int8``, ``int4``: groups of `GROUP_ELEMENTS` neighbouring elements, the last one filled up with zeros. First the
  scales of all groups, bfloat16: the group's largest magnitude over 127 or 7, rounded up, so that no number of the
  group goes beyond the largest whole one. Then each number over its scale, rounded to nearest, ties to even: one byte
  each, or for ``int4`` bytes whose low halves are the first half of a group and whose high halves are the second,
  plus 8.
- ``topk10``: the largest numbers of each row of 1,024 neighbours, one of 10, and their places; see
  `elaswave.engine.boundaries.codecs`. Gradients use the forward's places, and then only numbers travel, or with
  ``topk10-own`` their own.

Only division, rounding, maxima and products that are exact are used, all correctly rounded in IEEE 754, and neither
sums nor random numbers: so the bytes depend on no kernel. A scale below the smallest normal number counts as 0, so that
they do not depend on how a processor takes subnormal numbers either.

A scale per group and the largest magnitude for it are usual (Dettmers et al. 2022, 8-bit optimizers via block-wise
quantization, arXiv 2110.02861); groups of 64, scales in bfloat16 that are rounded up, and the order of the bytes are
ours.

The codec ``topk``: of each row of neighbouring numbers the largest, as bytes, and back.

A row is a run of `ROW_ELEMENTS` neighbours (`elaswave.fences.rows_of`). Which numbers are kept is decided by the bits
of their magnitudes as whole numbers: all above the smallest that is kept, then those that equal it by ascending index,
until there are enough. So ties, of which the zeros behind a ReLU are most, have one answer everywhere; `torch.topk`
promises none, and only the bits of the smallest number that is kept are taken from it.

The bytes, behind a coded tensor's head: the ratio (2 bytes), the numbers of all rows in ascending order of place, each
rounded to bfloat16, then their places, row by row. Places are indices in the row of 2 bytes each, ascending, or a bit
for each element, the lowest bit of a byte first, whichever is shorter for a row of that length. A gradient that uses
the forward's places has the ratio and the numbers alone. All is little endian.
"""

import struct
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F

from elaswave.errors import FrameError
from elaswave.fences import (
    CODECS,
    GROUP_ELEMENTS,
    RATIO_BYTES,
    TopK,
    TopKRows,
    coded_bytes,
    head_bytes,
    payload_bytes,
    places_bytes,
    rows_of,
    top_k_of,
    values_bytes,
)
from elaswave.transport.interface import DTYPES

_WHOLE = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""Of the same size."""


class _Part(NamedTuple):
    """Rows of equal length, and where they are."""

    rows: TopKRows
    elements: slice
    kept: slice
    """Among the numbers that are kept."""
    place_bytes: slice
    """Among the bytes of places."""


def _parts(ratio: int, num_elements: int) -> Iterator[_Part]:
    element = kept = byte = 0
    for rows in rows_of(ratio, num_elements):
        ends = (
            element + rows.num_rows * rows.length,
            kept + rows.num_rows * rows.num_kept,
            byte + rows.num_rows * rows.place_bytes,
        )
        yield _Part(rows, slice(element, ends[0]), slice(kept, ends[1]), slice(byte, ends[2]))
        element, kept, byte = ends


def largest(values: torch.Tensor, num_kept: int) -> torch.Tensor:
    """Chooses which numbers of each row are kept.

    Args:
        values: floating-point numbers [rows, length].
        num_kept: of each row.
    Returns:
        bool [rows, length].
    """
    whole = _WHOLE[values.dtype]
    bits = values.view(whole) & torch.iinfo(whole).max
    smallest = bits.topk(num_kept, dim=1).values[:, -1:]
    above, equal = bits > smallest, bits == smallest
    missing = num_kept - above.sum(1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= missing))


def write_places(values: torch.Tensor, ratio: int, places: torch.Tensor) -> None:
    """Chooses the numbers that are kept.

    Args:
        values: floating-point numbers [num_elements].
        ratio: of so many one is kept.
        places: uint8 [places_bytes(ratio, num_elements)]; is written.
    """
    for part in _parts(ratio, len(values)):
        rows = part.rows
        kept = largest(values[part.elements].view(rows.num_rows, rows.length), rows.num_kept)
        found = places[part.place_bytes]
        if rows.has_bitmap:
            found.view(rows.num_rows, rows.place_bytes).copy_(_packed(kept))
        else:
            indices = kept.nonzero()[:, 1].to(torch.int16)
            found.view(-1, 2).copy_(indices.view(torch.uint8).view(-1, 2))


def indices_of(places: torch.Tensor, ratio: int, num_elements: int) -> torch.Tensor:
    """Computes where the kept numbers lie: int64, ascending.

    Raises:
        FrameError: the bytes name other places than a codec would, or not as many.
    """
    found = []
    for part in _parts(ratio, num_elements):
        rows, bytes_ = part.rows, places[part.place_bytes]
        if rows.has_bitmap:
            kept = _unpacked(bytes_.view(rows.num_rows, rows.place_bytes))
            if bool(kept[:, rows.length :].any()) or bool((kept.sum(1) != rows.num_kept).any()):
                raise FrameError(f"places of a coded tensor do not name {rows.num_kept} of {rows.length} in each row")
            indices = kept[:, : rows.length].nonzero()[:, 1].view(rows.num_rows, rows.num_kept)
        else:
            pairs = bytes_.view(rows.num_rows, rows.num_kept, 2).to(torch.int64)
            indices = pairs[..., 0] | pairs[..., 1] << 8
            if bool((indices[:, 1:] <= indices[:, :-1]).any()) or bool((indices[:, -1] >= rows.length).any()):
                raise FrameError(f"places of a coded tensor do not ascend below {rows.length}")
        starts = torch.arange(rows.num_rows)[:, None] * rows.length + part.elements.start
        found.append((indices + starts).view(-1))
    return torch.cat(found)


def write_values(values: torch.Tensor, ratio: int, places: torch.Tensor, payload: torch.Tensor) -> None:
    """Writes the ratio and the numbers at some places.

    Args:
        values: floating-point numbers [num_elements].
        ratio: of so many one is kept.
        places: of these, as `write_places` writes them.
        payload: uint8 [values_bytes(ratio, num_elements)]; is written.
    """
    payload[:RATIO_BYTES] = torch.tensor([ratio & 255, ratio >> 8], dtype=torch.uint8)
    kept = values[indices_of(places, ratio, len(values))].to(torch.bfloat16)
    payload[RATIO_BYTES:] = kept.view(torch.uint8)


def ratio_of(payload: torch.Tensor) -> int:
    """Reads what a payload begins with."""
    low, high = payload[:RATIO_BYTES].tolist()
    return int(low | high << 8)


def spread(payload: torch.Tensor, places: torch.Tensor, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Puts the numbers at their places, with zeros elsewhere: [num_elements].

    Raises:
        FrameError: the bytes contradict themselves.
    """
    ratio = ratio_of(payload)
    kept = payload[RATIO_BYTES : values_bytes(ratio, num_elements)].clone().view(torch.bfloat16)
    found = torch.zeros(num_elements, dtype=dtype)
    found[indices_of(places, ratio, num_elements)] = kept.to(dtype)
    return found


def places_in(payload: torch.Tensor, num_elements: int) -> torch.Tensor:
    """Cuts out the places at the end of a payload."""
    return payload[len(payload) - places_bytes(ratio_of(payload), num_elements) :]


_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def _packed(kept: torch.Tensor) -> torch.Tensor:
    """Packs bool [rows, length] as uint8 [rows, length / 8 rounded up]."""
    bits = F.pad(kept.to(torch.uint8), (0, -kept.shape[1] % 8)).view(len(kept), -1, 8)
    return (bits * _BITS).sum(2, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Does the inverse of `_packed`; the result is filled up to whole bytes."""
    return ((packed[..., None] & _BITS) != 0).view(len(packed), -1)


_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
_TOP_K, _TOP_K_OWN, _TOP_K_VALUES = range(len(CODECS), len(CODECS) + 3)
"""Numbers of ``topk``: gradients have the forward's places; have their own; are such a gradient."""
_NUMBER_OF: dict[str, int] = {codec: number for number, codec in enumerate(CODECS)}
_LARGEST = {"int8": 127, "int4": 7}
"""Whole number."""
_NEAR_LIMIT = 0.98
"""Share of a type's largest number up to which a magnitude is coded: above it, a number that is rounded up could become
infinite."""
_DIMS_MAX = 255


def is_codable(tensor: torch.Tensor, codec: str) -> bool:
    """Tells whether a codec applies to a tensor: one of floating-point numbers that it makes smaller."""
    if not tensor.is_floating_point() or tensor.dtype not in _CODE_OF or tensor.dim() > _DIMS_MAX:
        return False
    return coded_bytes(codec, tensor.shape, tensor.dtype.itemsize) < tensor.nbytes


def encode_tensor(tensor: torch.Tensor, codec: str) -> torch.Tensor | None:
    """Encodes a tensor as bytes.

    Args:
        tensor: one that is codable, contiguous.
        codec: any but ``none``.
    Returns:
        uint8 [coded_bytes(codec, shape, size of an element)]; None: the codec has no numbers for it, since one is not
        finite, or so large that it would not stay so.
    """
    top_k = top_k_of(codec)
    number = _NUMBER_OF[codec] if top_k is None else _TOP_K_OWN if top_k.has_own_mask else _TOP_K
    coded, payload = _begun(tensor, number, payload_bytes(codec, tensor.numel()))
    values = tensor.detach().reshape(-1)
    if top_k is not None:
        places = payload[values_bytes(top_k.ratio, len(values)) :]
        write_places(values, top_k.ratio, places)
        is_good = _is_codable_as_bfloat16(values)
        if is_good:
            write_values(values, top_k.ratio, places, payload[: len(payload) - len(places)])
    else:
        is_good = _narrow(payload, values) if codec == "bf16" else _quantize(payload, values, _LARGEST[codec])
    return coded if is_good else None


class Places(NamedTuple):
    """Where the numbers of a tensor lie that ``topk`` has kept."""

    ratio: int
    bytes_: torch.Tensor

    def equal(self, other: "Places | None") -> bool:
        """Tells whether they are the same."""
        return other is not None and self.ratio == other.ratio and self.bytes_.equal(other.bytes_)


def places_of(coded: torch.Tensor) -> Places | None:
    """Finds what has to be kept of a coded activation for its gradient; None: nothing.

    Raises:
        FrameError: the bytes contradict themselves.
    """
    number, _, shape = _read_head(coded)
    if number != _TOP_K:
        return None
    payload = coded[head_bytes(len(shape)) :]
    return Places(ratio_of(payload), places_in(payload, prod(shape)).clone())


def encode_at(tensor: torch.Tensor, places: Places) -> torch.Tensor | None:
    """Encodes as bytes a gradient whose numbers at some places are kept; the places are not in them.

    Args:
        tensor: contiguous, of floating-point numbers.
        places: of a tensor of that shape.
    Returns:
        uint8; None: as of `encode`.
    """
    coded, payload = _begun(tensor, _TOP_K_VALUES, values_bytes(places.ratio, tensor.numel()))
    values = tensor.detach().reshape(-1)
    if not _is_codable_as_bfloat16(values):
        return None
    write_values(values, places.ratio, places.bytes_, payload)
    return coded


def needs_places(coded: torch.Tensor) -> bool:
    """Tells whether `decode` has to be given the places."""
    return len(coded) > 0 and int(coded[0]) == _TOP_K_VALUES


def _begun(tensor: torch.Tensor, number: int, num_payload_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes bytes with a head, and returns them and those of them that are to be written."""
    head = struct.pack(f"<BBBB{tensor.dim()}I", number, _CODE_OF[tensor.dtype], tensor.dim(), 0, *tensor.shape)
    coded = torch.empty(len(head) + num_payload_bytes, dtype=torch.uint8)
    coded[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return coded, coded[len(head) :]


def _is_codable_as_bfloat16(values: torch.Tensor) -> bool:
    return bool(values.abs().amax() <= _limit(values.dtype))


def _limit(dtype: torch.dtype) -> float:
    return _NEAR_LIMIT * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _narrow(payload: torch.Tensor, values: torch.Tensor) -> bool:
    narrow = payload.view(torch.bfloat16)
    narrow.copy_(values)
    return bool(narrow.abs().amax() <= _limit(values.dtype))


def _quantize(payload: torch.Tensor, values: torch.Tensor, largest: int) -> bool:
    groups = values.float()
    if missing := -len(groups) % GROUP_ELEMENTS:
        groups = F.pad(groups, (0, missing))
    groups = groups.view(-1, GROUP_ELEMENTS)
    magnitudes = groups.abs().amax(1)
    if not bool(magnitudes.amax() <= _limit(values.dtype)):  # also where it is no number
        return False
    scales = _rounded_up(magnitudes / largest)
    num_scale_bytes = 2 * len(scales)
    payload[:num_scale_bytes].view(torch.bfloat16).copy_(scales)
    # A group of zeros is divided by 1: its numbers are smaller than a scale, and become 0.
    whole = groups.div(torch.where(scales > 0, scales, 1.0)[:, None]).round_()
    if largest == _LARGEST["int8"]:
        payload[num_scale_bytes:].view(torch.int8).view(-1, GROUP_ELEMENTS).copy_(whole)
    else:
        halves = whole.add_(8).to(torch.uint8)
        middle = GROUP_ELEMENTS // 2
        payload[num_scale_bytes:].view(-1, middle).copy_(halves[:, :middle] | halves[:, middle:] << 4)
    return True


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """Rounds positive float32 numbers up to the next larger ones that bfloat16 has; those below the normal ones become
    0."""
    bits = scales.view(torch.int32)
    rounded = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(scales >= torch.finfo(torch.float32).tiny, rounded, 0.0)


def decode_tensor(coded: torch.Tensor, places: Places | None = None) -> torch.Tensor:
    """Decodes the tensor that bytes stand for, of the type and shape that the coded one had.

    Args:
        coded: the bytes.
        places: of a gradient whose bytes do not hold them.
    Raises:
        FrameError: the bytes contradict themselves, or the places.
    """
    number, dtype, shape = _read_head(coded)
    num_elements = prod(shape)
    payload = coded[head_bytes(len(shape)) :]
    if number == _TOP_K_VALUES:
        if places is None or places.ratio != ratio_of(payload):
            known = "none are known" if places is None else f"those known are of ratio {places.ratio}"
            raise FrameError(
                f"a coded gradient needs the places of an activation of ratio {ratio_of(payload)}; {known}"
            )
        return spread(payload, places.bytes_, num_elements, dtype).view(shape)
    if number in (_TOP_K, _TOP_K_OWN):
        return spread(payload, places_in(payload, num_elements), num_elements, dtype).view(shape)
    codec = CODECS[number]
    if codec == "bf16":
        return payload.view(torch.bfloat16).to(dtype).view(shape)
    num_scale_bytes = 2 * -(-num_elements // GROUP_ELEMENTS)
    scales = payload[:num_scale_bytes].view(torch.bfloat16).float()[:, None]
    numbers = payload[num_scale_bytes:]
    if codec == "int8":
        whole = numbers.view(torch.int8).view(-1, GROUP_ELEMENTS).float()
    else:
        halves = numbers.view(-1, GROUP_ELEMENTS // 2)
        whole = torch.cat([halves & 15, halves >> 4], 1).float().sub_(8)
    return whole.mul_(scales).view(-1)[:num_elements].to(dtype).view(shape)


def _read_head(coded: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
    """Reads the number of the codec, type and shape, checked against the number of bytes."""
    num_bytes = len(coded) if coded.dim() == 1 and coded.dtype == torch.uint8 else 0
    if num_bytes >= head_bytes(0):
        number, dtype_code, num_dims, zero = coded[:4].tolist()
        start = head_bytes(num_dims)
        if num_bytes >= start and 0 < number <= _TOP_K_VALUES and dtype_code < len(DTYPES) and not zero:
            shape = struct.unpack(f"<{num_dims}I", bytes(coded[4:start].numpy()))
            dtype = DTYPES[dtype_code]
            if dtype.is_floating_point and num_bytes - start == _payload_bytes(number, coded[start:], prod(shape)):
                return number, dtype, shape
    begin = coded.reshape(-1)[:8].tolist()
    raise FrameError(f"{num_bytes} bytes of a coded tensor begin with {begin}, which is no head of theirs")


def _payload_bytes(number: int, payload: torch.Tensor, num_elements: int) -> int:
    """Computes how many bytes there should be behind a head; -1: it says what cannot be."""
    if number < len(CODECS):
        return payload_bytes(CODECS[number], num_elements)
    if len(payload) < RATIO_BYTES or top_k_of(str(codec := TopK(ratio_of(payload)))) is None:
        return -1
    return (
        values_bytes(codec.ratio, num_elements) if number == _TOP_K_VALUES else payload_bytes(str(codec), num_elements)
    )
