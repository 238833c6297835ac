"""What ``topk`` keeps, against a selection that sorts; and that bytes come back."""

import math
import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave.engine.boundaries.codecs import (
    decode_tensor,
    encode_at,
    encode_tensor,
    indices_of,
    is_codable,
    largest,
    places_of,
)
from elaswave.engine.checks.determinism_check import elsewhere
from elaswave.fences import ROW_ELEMENTS, coded_bytes

few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-40, 3.4e38, math.inf, -math.inf, math.nan])
"""Many ties, and all that is odd."""
rows_of_numbers = st.integers(1, 40).flatmap(
    lambda length: st.lists(
        st.lists(few_values | st.floats(width=32), min_size=length, max_size=length), min_size=1, max_size=4
    )
)


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0] & 0x7FFFFFFF


def by_sorting(row: list[float], num_kept: int) -> list[bool]:
    """The stated rule: larger magnitudes first, by their bits; among equals the lower index."""
    order = sorted(range(len(row)), key=lambda index: (-bits_of(row[index]), index))
    return [index in order[:num_kept] for index in range(len(row))]


@given(rows_of_numbers, st.data())
def test_selection_is_that_of_sorting(rows: list[list[float]], data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(1, len(rows[0])))
    values = torch.tensor(rows, dtype=torch.float32)
    rows = values.tolist()
    expected = [by_sorting(row, num_kept) for row in rows]
    assert largest(values, num_kept).tolist() == expected
    assert largest(elsewhere(values), num_kept).tolist() == expected


@given(st.integers(1, 3 * ROW_ELEMENTS), st.integers(2, 1000), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 0.99]))
def test_bytes_come_back_whatever_size_and_ratio(size: int, ratio: int, seed: int, share_of_zeros: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) >= share_of_zeros)
    codec = f"topk{ratio}"
    if not is_codable(values, codec):
        assert size < 40
        return
    coded = encode_tensor(values, codec)
    assert coded is not None and len(coded) == coded_bytes(codec, (size,), 4)
    places = places_of(coded)
    assert places is not None
    kept = torch.zeros(size, dtype=torch.bool)
    kept[indices_of(places.bytes_, ratio, size)] = True
    expected = [flag for row in values.split(ROW_ELEMENTS) for flag in by_sorting(row.tolist(), -(-len(row) // ratio))]
    assert kept.tolist() == expected
    rounded = values.bfloat16().float()
    assert decode_tensor(coded).equal(torch.where(kept, rounded, 0.0))
    gradient = encode_at(values, places)
    assert gradient is not None and decode_tensor(gradient, places).equal(torch.where(kept, rounded, 0.0))
