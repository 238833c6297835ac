"""The codec ``topk``: of each row of neighbouring numbers the largest, as bytes, and back.

A row is a run of `ROW_ELEMENTS` neighbours (`elaswave.fences.rows_of`). Which numbers are kept is decided by the bits
of their magnitudes as whole numbers: all above the smallest that is kept, then those that equal it by ascending index,
until there are enough. So ties, of which the zeros behind a ReLU are most, have one answer everywhere; `torch.topk`
promises none, and only the bits of the smallest number that is kept are taken from it.

The bytes, behind a coded tensor's head: the ratio (2 bytes), the numbers of all rows in ascending order of place, each
rounded to bfloat16, then their places, row by row. Places are indices in the row of 2 bytes each, ascending, or a bit
for each element, the lowest bit of a byte first, whichever is shorter for a row of that length. A gradient that uses
the forward's places has the ratio and the numbers alone. All is little endian.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from elaswave.errors import FrameError
from elaswave.fences import RATIO_BYTES, TopKRows, places_bytes, rows_of, values_bytes

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
    """Which numbers of each row are kept.

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
    """Where the kept numbers lie: int64, ascending.

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
    """What a payload begins with."""
    low, high = payload[:RATIO_BYTES].tolist()
    return int(low | high << 8)


def spread(payload: torch.Tensor, places: torch.Tensor, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers at their places, zeros elsewhere: [num_elements].

    Raises:
        FrameError: the bytes contradict themselves.
    """
    ratio = ratio_of(payload)
    kept = payload[RATIO_BYTES : values_bytes(ratio, num_elements)].clone().view(torch.bfloat16)
    found = torch.zeros(num_elements, dtype=dtype)
    found[indices_of(places, ratio, num_elements)] = kept.to(dtype)
    return found


def places_in(payload: torch.Tensor, num_elements: int) -> torch.Tensor:
    """The places at the end of a payload."""
    return payload[len(payload) - places_bytes(ratio_of(payload), num_elements) :]


_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def _packed(kept: torch.Tensor) -> torch.Tensor:
    """bool [rows, length] as uint8 [rows, length / 8 rounded up]."""
    bits = F.pad(kept.to(torch.uint8), (0, -kept.shape[1] % 8)).view(len(kept), -1, 8)
    return (bits * _BITS).sum(2, dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `_packed`, filled up to whole bytes."""
    return ((packed[..., None] & _BITS) != 0).view(len(packed), -1)
