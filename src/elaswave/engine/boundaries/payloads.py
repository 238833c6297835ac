"""Trees of tensors as one frame, and back.

A single tensor travels as itself, with type and shape in the transport's header. Anything else is one run of bytes: a
description (structure, types and shapes, as JSON), then the tensors, each at a multiple of 64 bytes. Single tensors of
bytes, of no dimension or of many travel in this way too, so that a frame of uint8 is always one of these. A receiver
needs to know nothing beforehand; it checks every number of a description before it uses it.
"""

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import torch

from elaswave.engine.checks.values import MAX_DEPTH, NOTHING, TENSOR, Structure, flatten, num_leaves, unflatten
from elaswave.errors import FrameError, UsageError
from elaswave.transport.frames import DTYPES, MAX_NDIM

_ALIGN = 64
_MAGIC = b"ELWV"
_PREFIX = struct.Struct("<4sI")
_MAX_DESCRIPTION_BYTES = 1 << 20
_MAX_DIMS = 64


class _Description(msgspec.Struct, frozen=True, array_like=True):
    structure: Any
    leaves: list[tuple[int, list[int]]]
    """Code of the type and shape of each tensor."""


def pack_value(value: Any) -> torch.Tensor | list[torch.Tensor]:
    """What the transport sends for a value, whose tensors are contiguous.

    Raises:
        UsageError: its description is too long.
    """
    if isinstance(value, torch.Tensor) and value.dtype != torch.uint8 and 0 < value.dim() <= MAX_NDIM:
        return value
    structure, leaves = flatten(value)
    code_of = {dtype: code for code, dtype in enumerate(DTYPES)}
    text = msgspec.json.encode(_Description(structure, [(code_of[leaf.dtype], list(leaf.shape)) for leaf in leaves]))
    if len(text) > _MAX_DESCRIPTION_BYTES:
        raise UsageError(f"a value of {len(leaves)} tensors is too large to be described: hand on fewer tensors")
    head = _PREFIX.pack(_MAGIC, len(text)) + text
    parts = [torch.frombuffer(bytearray(head + bytes(-len(head) % _ALIGN)), dtype=torch.uint8)]
    for leaf in leaves:
        parts.append(leaf)
        if gap := -leaf.nbytes % _ALIGN:
            parts.append(torch.zeros(gap, dtype=torch.uint8))
    return parts


def unpack_value(frame: torch.Tensor) -> Any:
    """The value that a received frame holds. Its tensors lie in the frame's memory, each with its own version.

    Raises:
        FrameError: the frame contradicts itself.
    """
    if frame.dtype != torch.uint8:
        return frame
    description, offset = _describe(frame)
    storage, leaves = frame.untyped_storage(), []
    for code, shape in description.leaves:
        dtype = DTYPES[code]
        leaf = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload]
        leaves.append(leaf)
        offset += leaf.nbytes + -leaf.nbytes % _ALIGN
    try:
        return unflatten(_as_tuples(description.structure), leaves)
    except (UsageError, TypeError, ValueError) as error:
        raise FrameError(f"a frame describes a value that cannot be: {error}") from error


def _describe(frame: torch.Tensor) -> tuple[_Description, int]:
    """The checked description in a frame, and where its tensors begin."""
    size = len(frame)
    if size < _PREFIX.size:
        raise FrameError(f"a frame of {size} bytes is too short for a value")
    magic, length = _PREFIX.unpack(bytes(frame[: _PREFIX.size].numpy()))
    start = _PREFIX.size + length + -(_PREFIX.size + length) % _ALIGN
    if magic != _MAGIC or length > _MAX_DESCRIPTION_BYTES or start > size:
        raise FrameError(f"a frame of {size} bytes begins with {magic!r} and a description of {length} bytes")
    try:
        text = bytes(frame[_PREFIX.size : _PREFIX.size + length].numpy())
        description = msgspec.json.decode(text, type=_Description)
        structure = _as_tuples(description.structure)
        if num_leaves(structure) != len(description.leaves):
            raise ValueError(f"{num_leaves(structure)} places for {len(description.leaves)} tensors")
        end = start + sum(_num_bytes(code, shape) for code, shape in description.leaves)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"a frame describes a value that cannot be: {error}") from error
    if end != size:
        raise FrameError(f"a frame of {size} bytes describes a value of {end}")
    return description, start


def _num_bytes(code: int, shape: Sequence[int]) -> int:
    """Of a tensor with its gap.

    Raises:
        ValueError: there is no such tensor.
    """
    if not 0 <= code < len(DTYPES) or len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
        raise ValueError(f"a tensor of type {code} and shape {shape}")
    num_bytes = prod(shape) * DTYPES[code].itemsize
    return num_bytes + -num_bytes % _ALIGN


def _as_tuples(structure: Any, depth: int = 0) -> Structure:
    """A structure as JSON has it, as `flatten` makes it.

    Raises:
        ValueError: it is none.
    """
    if structure in (TENSOR, NOTHING):
        return structure
    if not isinstance(structure, list | tuple) or depth > MAX_DEPTH:
        raise ValueError(f"{structure!r} is no structure")
    match list(structure):
        case ["tuple" | "list" as kind, [*parts]]:
            head: tuple[Any, ...] = (kind,)
        case ["dict", [*keys], [*parts]] if len(keys) == len(parts) and {type(key) for key in keys} <= {str, int}:
            head = ("dict", tuple(keys))
        case ["named", str() as name, [*parts]]:
            head = ("named", name)
        case _:
            raise ValueError(f"{structure!r} is no structure")
    return (*head, tuple(_as_tuples(part, depth + 1) for part in parts))
