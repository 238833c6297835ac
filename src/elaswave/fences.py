"""Fences: which boundaries of a model have a codec, and how many bytes it leaves. Pure; numbers are coded elsewhere.

A fence belongs to the model, never to a link: its codec is applied whether or not a stage ends there, so that bits do
not depend on the layout. All of it is ours: of FusionLLM (arXiv 2410.12707) only the abstract could be read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

Codec = Literal["none", "bf16", "int8", "int4"]
CODECS: tuple[Codec, ...] = get_args(Codec)
GROUP_ELEMENTS = 64
"""Neighbouring elements of a tensor that share a scale, a bfloat16 number, under ``int8`` and ``int4``."""
_SCALE_BYTES = 2
_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
_NARROW_BYTES = 2
"""Of an element under ``bf16``."""
_HEAD_BYTES = 4
_DIM_BYTES = 4


class Fence(NamedTuple):
    """One fence."""

    after: str
    """Name of the layer behind which it stands."""
    codec: Codec

    def __str__(self) -> str:
        return f"{self.after}:{self.codec}"


def fence_of(text: str) -> Fence:
    """A fence as it is written: ``LAYER:CODEC``. The name may have colons itself.

    Raises:
        ValueError: it is none.
    """
    after, colon, codec = text.rpartition(":")
    if not after or not colon or codec not in CODECS:
        raise ValueError(f"{text!r} is no fence: needed is LAYER:CODEC with one of {', '.join(CODECS)}")
    return Fence(after, codec)


def built_in_layer_names(num_blocks: int) -> tuple[str, ...]:
    """Names of the layers of a built-in model."""
    return ("embedding", *(f"block.{index}" for index in range(num_blocks)), "head")


def codecs_at(fences: Iterable[str], names: Sequence[str]) -> dict[int, Codec]:
    """The codec behind each layer that has a fence, by position.

    Args:
        fences: as they are written.
        names: of the model's layers, in order.
    Raises:
        ValueError: one that `fence_problems` would name.
    """
    fences = tuple(fences)
    if problems := fence_problems(fences, names):
        raise ValueError("; ".join(problems))
    found = map(fence_of, fences)
    return dict(sorted((names.index(fence.after), fence.codec) for fence in found))


def fence_problems(fences: Iterable[str], names: Sequence[str]) -> list[str]:
    """What is wrong with the fences of a model: one line for each.

    Args:
        fences: as they are written, each good in itself.
        names: of the model's layers, in order.
    """
    problems = []
    seen: dict[str, str] = {}
    for text in fences:
        after = fence_of(text).after
        if after not in names:
            shown = ", ".join(names[:-1] if len(names) <= 9 else (*names[:4], "...", *names[-4:-1]))
            problems.append(f'"{text}": the model has no layer {after}; a fence stands behind one of {shown or "none"}')
        elif after == names[-1]:
            problems.append(f'"{text}": {after} is the last layer, and a fence stands between two layers')
        elif after in seen:
            problems.append(f'"{text}": there is "{seen[after]}" already; a boundary has one fence')
        seen.setdefault(after, text)
    return problems


def changing(fences: Iterable[str]) -> tuple[str, ...]:
    """Those whose codec changes bits, sorted: ``none`` leaves a value as it is."""
    return tuple(sorted(text for text in fences if fence_of(text).codec != "none"))


def head_bytes(num_dims: int) -> int:
    """What stands before the numbers of a coded tensor: codec, type and shape."""
    return _HEAD_BYTES + _DIM_BYTES * num_dims


def payload_bytes(codec: str, num_elements: int) -> int:
    """The numbers of a coded tensor: under ``int8`` and ``int4`` whole groups, each with its scale."""
    if codec == "bf16":
        return _NARROW_BYTES * num_elements
    num_groups = -(-num_elements // GROUP_ELEMENTS)
    return num_groups * (_SCALE_BYTES + GROUP_ELEMENTS * _BITS[codec] // 8)


def coded_bytes(codec: str, shape: Sequence[int], element_bytes: int) -> int:
    """Bytes of a floating-point tensor behind a fence, known from its shape alone.

    A tensor that a codec would not make smaller stays as it is.

    Args:
        codec: one of `CODECS`.
        shape: of the tensor.
        element_bytes: of its type.
    """
    num_elements = 1
    for size in shape:
        num_elements *= size
    raw = num_elements * element_bytes
    if codec == "none" or not num_elements:
        return raw
    return min(raw, head_bytes(len(shape)) + payload_bytes(codec, num_elements))
