"""What travels on a link: a fixed 64-byte header, then the raw bytes of one or more tensors.

This file turns tensors into byte views and headers into bytes and back; no sockets here. A header carries the
generation and the tag, so that a receiver can tell late frames from current ones without any state of the sender. Every
field is checked before a single byte of the payload is read: a header that cannot be right ends the link.

Header, little endian, 64 bytes:

    magic 4 | version 2 | dtype 1 | ndim 1 | generation 4
    channel 2 | step 4 | attempt 2 | a 4 | b 4 | length 8 | dims 7 x 4

Frames carry no checksum and no signature of their own: the link was authenticated when it was made, and what the bytes
mean is verified by the vote. On an untrusted network a link needs TLS (``tls``) or a tunnel around it.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from elaswave.errors import FrameError

MAGIC = b"ELWF"
VERSION = 1
MAX_NDIM = 7
_HEADER = struct.Struct("<4sHBBIHIHIIQ7I")
HEADER_BYTES = _HEADER.size
_NO_DIMS = (0,) * MAX_NDIM


class Tag(NamedTuple):
    """The name of a message between two workers in one generation.

    Messages of one sender with equal tags are received in the order in which they were sent.
    """

    channel: int
    """What kind of traffic: [0, 2**16)."""
    step: int
    """Training step: [0, 2**32)."""
    attempt: int
    """Attempt of that step: [0, 2**16)."""
    a: int = 0
    """Free for the channel's own use, such as a micro-batch: [0, 2**32)."""
    b: int = 0
    """Free for the channel's own use, such as a layer: [0, 2**32)."""


DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
BYTES_CODE = _CODE_OF[torch.uint8]
_ITEM_BYTES = tuple(dtype.itemsize for dtype in DTYPES)
# numpy has no such dtypes, or no byte view of them: the same memory is read as another type of the same size.
_READ_AS = {
    torch.bfloat16: torch.int16,
    torch.complex64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class FrameHeader(NamedTuple):
    """A checked frame header."""

    generation: int
    tag: Tag
    dtype_code: int
    shape: tuple[int, ...]
    length: int
    """Bytes of the payload that follows."""


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a tensor as bytes, without a copy; writable.

    Args:
        tensor: any dtype and shape, contiguous, on the CPU. It must be kept alive and its storage must not be resized
            while the view is in use.
    Returns:
        A one-dimensional view of ``tensor.nbytes`` bytes.
    Raises:
        ValueError: the tensor is not contiguous, not on the CPU, or of a dtype that cannot be sent.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "call .contiguous() before it is sent or received into"
        )
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} cannot travel over this transport: copy it to the CPU first")
    dtype = tensor.dtype
    if dtype not in _CODE_OF:
        raise ValueError(f"tensors of {dtype} cannot be sent: view them as one of {', '.join(map(str, DTYPES))}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.requires_grad:
        tensor = tensor.detach()
    read_as = _READ_AS.get(dtype)
    if read_as is not None:
        tensor = tensor.view(read_as)
    elif dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.numpy().data.cast("B")


def byte_views(tensors: Tensor | Sequence[Tensor]) -> list[memoryview]:
    """The non-empty byte views of one or more tensors; raises as :func:`byte_view`."""
    if isinstance(tensors, Tensor):
        return [byte_view(tensors)] if tensors.numel() else []
    return [byte_view(tensor) for tensor in tensors if tensor.numel()]


def common_dtype_code(tensors: Tensor | Sequence[Tensor]) -> int:
    """The code of the tensors' common dtype; that of bytes if they differ or there are none.

    Raises:
        ValueError: a dtype that cannot be sent.
    """
    if isinstance(tensors, Tensor):
        dtypes = {tensors.dtype}
    else:
        dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and (code := _CODE_OF.get(next(iter(dtypes)))) is not None:
        return code
    if unknown := dtypes - _CODE_OF.keys():
        raise ValueError(f"tensors of {', '.join(map(str, unknown))} cannot be sent: view them as another dtype")
    return BYTES_CODE


def encode_header(generation: int, tag: Tag, tensors: Tensor | Sequence[Tensor], length: int) -> bytes:
    """The header of a frame.

    Several tensors travel as one run of elements: their frame has one dimension, in their common dtype (bytes if they
    differ).

    Args:
        generation: membership generation of the sender, [0, 2**32).
        tag: name of the message.
        tensors: what the frame holds.
        length: total bytes of the tensors.
    Raises:
        ValueError: a field is out of its range, or the tensor has more than seven dimensions.
    """
    dtype_code = common_dtype_code(tensors)
    shape = tuple(tensors.shape) if isinstance(tensors, Tensor) else (length // _ITEM_BYTES[dtype_code],)
    ndim = len(shape)
    if ndim > MAX_NDIM:
        raise ValueError(f"a tensor of {ndim} dimensions cannot be sent, at most {MAX_NDIM}: flatten it")
    try:
        return _HEADER.pack(MAGIC, VERSION, dtype_code, ndim, generation, *tag, length, *shape, *_NO_DIMS[ndim:])
    except struct.error as error:
        raise ValueError(
            f"generation {generation}, {tag} or shape {shape} does not fit a frame header ({error}); "
            "see Tag for the ranges, every dimension must be below 2**32"
        ) from error


def decode_header(data: bytes | bytearray | memoryview, offset: int, max_frame_bytes: int) -> FrameHeader:
    """Read and check a header.

    Args:
        data: at least ``HEADER_BYTES`` bytes from ``offset``.
        offset: where the header starts.
        max_frame_bytes: largest payload that is accepted.
    Raises:
        FrameError: anything about the header that cannot be right.
    """
    fields = _HEADER.unpack_from(data, offset)
    magic, version, dtype_code, ndim, generation = fields[:5]
    length = fields[10]
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r} instead of {MAGIC!r}: these are not elaswave frames")
    if version != VERSION:
        raise FrameError(f"frame has version {version}, this worker speaks {VERSION}: install one release everywhere")
    if dtype_code >= len(DTYPES):
        raise FrameError(f"frame has dtype code {dtype_code}, the largest known is {len(DTYPES) - 1}")
    if ndim > MAX_NDIM:
        raise FrameError(f"frame has {ndim} dimensions, at most {MAX_NDIM} are allowed")
    if length > max_frame_bytes:
        raise FrameError(f"frame announces {length} bytes, the limit is {max_frame_bytes}: raise max_frame_bytes")
    shape = fields[11 : 11 + ndim]
    if math.prod(shape) * _ITEM_BYTES[dtype_code] != length or any(fields[11 + ndim :]):
        raise FrameError(
            f"frame announces {length} bytes, {ndim} dimensions {fields[11:]} of {DTYPES[dtype_code]}: they contradict"
        )
    return FrameHeader(generation, Tag._make(fields[5:10]), dtype_code, shape, length)


def empty_tensor(dtype_code: int, shape: tuple[int, ...]) -> Tensor:
    """New memory for a received frame; torch's CPU allocator aligns it to 64 bytes.

    Raises:
        FrameError: there is not so much memory.
    """
    try:
        return torch.empty(shape, dtype=DTYPES[dtype_code])
    except RuntimeError as error:
        raise FrameError(
            f"no memory for a frame of {DTYPES[dtype_code]} {shape}: lower max_frame_bytes or send less at once"
        ) from error
