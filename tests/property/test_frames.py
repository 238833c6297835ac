"""Frames: whatever can be sent is described exactly, and no bytes whatever make the reader do anything but refuse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaswave.errors import FrameError
from elaswave.transport.interface import (
    HEADER_BYTES,
    Tag,
    byte_view,
    byte_views,
    decode_header,
    empty_tensor,
    encode_header,
)
from elaswave.transport.link import _consume, _scatter, copy_bytes

TAGS = st.builds(
    Tag,
    channel=st.integers(0, (1 << 16) - 1),
    step=st.integers(0, (1 << 32) - 1),
    attempt=st.integers(0, (1 << 16) - 1),
    a=st.integers(0, (1 << 32) - 1),
    b=st.integers(0, (1 << 32) - 1),
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8])
CUTS = st.lists(st.integers(0, 20), max_size=8)


@given(
    generation=st.integers(0, (1 << 32) - 1),
    tag=TAGS,
    dtype=DTYPES,
    shape=st.lists(st.integers(0, 4), max_size=7),
)
def test_a_header_tells_what_the_frame_holds(generation, tag, dtype, shape):
    tensor = torch.zeros(shape, dtype=dtype)
    data = encode_header(generation, tag, tensor, tensor.nbytes)
    assert len(data) == HEADER_BYTES
    header = decode_header(b"???" + data, 3, 1 << 40)
    assert (header.generation, header.tag, header.shape, header.length) == (
        generation,
        tag,
        tuple(shape),
        tensor.nbytes,
    )
    again = empty_tensor(header.dtype_code, header.shape)
    assert again.dtype == dtype and again.shape == tensor.shape
    assert sum(map(len, byte_views(tensor))) == tensor.nbytes


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_refused(data):
    with pytest.raises(FrameError):
        decode_header(data, 0, 1 << 40)


@given(
    offset=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255), shape=st.lists(st.integers(1, 4), max_size=3)
)
def test_a_header_with_one_byte_changed_is_refused_or_still_consistent(offset, value, shape):
    tensor = torch.zeros(shape)
    data = bytearray(encode_header(1, Tag(2, 3, 4, 5, 6), tensor, tensor.nbytes))
    data[offset] = value
    try:
        header = decode_header(data, 0, 1 << 20)
    except FrameError:
        return
    made = empty_tensor(header.dtype_code, header.shape)
    assert made.nbytes == header.length <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e5m2])
def test_a_byte_view_is_the_memory_itself(dtype):
    tensor = torch.zeros(3, 2, dtype=dtype)
    view = byte_view(tensor)
    assert len(view) == tensor.nbytes and not view.readonly
    view[:] = bytes(range(len(view)))
    assert tensor.reshape(-1).view(torch.uint8).tolist() == list(range(tensor.nbytes))


def test_an_empty_tensor_has_an_empty_view():
    assert len(byte_view(torch.empty(0))) == 0
    assert byte_views([torch.empty(0), torch.empty(3, 0)]) == []


@given(source=CUTS, target=CUTS)
def test_bytes_are_copied_however_both_sides_are_cut(source, target):
    total = min(sum(source), sum(target))
    data = bytes(index % 251 for index in range(total))
    pieces, at = [], 0
    for size in source:
        pieces.append(memoryview(data)[at : at + size])
        at = min(total, at + size)
    views, at = [], 0
    for size in target:
        size = min(size, total - at)
        views.append(memoryview(bytearray(size)))
        at += size
    copy_bytes(pieces, views)
    assert b"".join(views) == data


@given(sizes=st.lists(st.integers(1, 20), max_size=8), first=st.integers(0, 160))
def test_views_are_filled_from_the_front(sizes, first):
    memory = [bytearray(size) for size in sizes]
    views = [memoryview(piece) for piece in memory]
    data = bytes(1 + index % 250 for index in range(sum(sizes)))
    first = min(first, len(data))
    _scatter(views, memoryview(data)[:first])
    assert sum(map(len, views)) == len(data) - first
    rest = memoryview(data)[first:]
    while rest:  # then as the socket does it
        size = min(7, len(views[0]), len(rest))
        views[0][:size] = rest[:size]
        _consume(views, size)
        rest = rest[size:]
    assert views == [] and b"".join(memory) == data
