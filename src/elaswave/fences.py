"""Fences: which boundaries of a model have a codec, and how many bytes it leaves. Pure; numbers are coded elsewhere.

A fence belongs to the model, never to a link: its codec is applied whether or not a stage ends there, so that bits do
not depend on the layout. All of it is ours: of FusionLLM (arXiv 2410.12707) only the abstract could be read.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Codec = str
"""One of `CODECS`, or what `top_k_of` reads."""
CODECS: tuple[Codec, ...] = ("none", "bf16", "int8", "int4")
"""Those without a parameter."""
MAX_RATIO = 1000
"""Of ``topk``: of so many numbers one is kept."""
_RATIO = "(?:[2-9]|[1-9][0-9]{1,2}|1000)"
_TOP_K = rf"topk{_RATIO}(?:-own)?|adatopk{_RATIO}"
CODEC_PATTERN = "|".join((*CODECS, _TOP_K))
CODEC_WORDS = f"one of {', '.join(CODECS)}, topkR, topkR-own and adatopkR with R from 2 to {MAX_RATIO}, as topk10"
FENCE_RATIO_PATTERN = rf"[1-9][0-9]{{0,9}}:.+:(?:1|{_RATIO})"
GROUP_ELEMENTS = 64
"""Neighbouring elements of a tensor that share a scale, a bfloat16 number, under ``int8`` and ``int4``."""
_SCALE_BYTES = 2
_BITS: Mapping[str, int] = {"int8": 8, "int4": 4}
_NARROW_BYTES = 2
"""Of an element under ``bf16``."""
_HEAD_BYTES = 4
_DIM_BYTES = 4
ROW_ELEMENTS = 1024
"""Neighbouring elements of a tensor of which ``topk`` keeps the largest, the last row with what is left. Rows are runs
of neighbours and no dimension: so a size follows from the number of elements alone, and a tensor whose last dimension
is short, as images have, keeps no more than its share."""
RATIO_BYTES = 2
INDEX_BYTES = 2


class Fence(NamedTuple):
    """One fence."""

    after: str
    """Name of the layer behind which it stands."""
    codec: Codec

    def __str__(self) -> str:
        return f"{self.after}:{self.codec}"


class TopK(NamedTuple):
    """A codec that keeps the largest numbers of each row."""

    ratio: int
    """Of so many numbers one is kept, rounded up in each row."""
    has_own_mask: bool = False
    """Whether a gradient has its own largest numbers kept, instead of those at the places that were kept forward."""
    is_adaptive: bool = False
    """Whether the ratio is the largest of those that a run may choose."""

    def __str__(self) -> str:
        return ("ada" if self.is_adaptive else "") + f"topk{self.ratio}" + ("-own" if self.has_own_mask else "")


class TopKRows(NamedTuple):
    """Rows of equal length of a tensor under ``topk``."""

    num_rows: int
    length: int
    num_kept: int
    """Of each row."""

    @property
    def has_bitmap(self) -> bool:
        """Whether the places are a bit for each element, which is shorter than an index for each that is kept."""
        return INDEX_BYTES * self.num_kept >= -(-self.length // 8)

    @property
    def place_bytes(self) -> int:
        """Of the places of one row."""
        return -(-self.length // 8) if self.has_bitmap else INDEX_BYTES * self.num_kept


def top_k_of(codec: Codec) -> TopK | None:
    """Reads what a codec's name says of ``topk``; None: it is no such codec."""
    if re.fullmatch(_TOP_K, codec) is None:
        return None
    adaptive, _, rest = codec.partition("topk")
    ratio, _, own = rest.partition("-")
    return TopK(int(ratio), bool(own), bool(adaptive))


class FenceRatio(NamedTuple):
    """From a step on an adaptive fence has a ratio."""

    from_step: int
    after: str
    """Name of the layer behind which the fence stands."""
    ratio: int
    """1: what passes is not coded."""

    def __str__(self) -> str:
        return f"{self.from_step}:{self.after}:{self.ratio}"


def fence_ratio_of(text: str) -> FenceRatio:
    """Parses what is written as ``STEP:LAYER:RATIO``; the name may have colons itself."""
    step, _, rest = text.partition(":")
    after, _, ratio = rest.rpartition(":")
    return FenceRatio(int(step), after, int(ratio))


def ratio_problems(ratios: Iterable[str], fences: Iterable[str]) -> list[str]:
    """Lists what is wrong with the ratios of adaptive fences: one line for each.

    Args:
        ratios: as they are written, each good in itself.
        fences: of the same model.
    """
    most = {
        fence.after: top_k.ratio
        for fence in map(fence_of, fences)
        if (top_k := top_k_of(fence.codec)) is not None and top_k.is_adaptive
    }
    problems, last_step = [], 0
    for text in ratios:
        from_step, after, ratio = fence_ratio_of(text)
        if after not in most:
            problems.append(f'"{text}": there is no fence {after}:adatopkR')
        elif ratio > most[after]:
            problems.append(f'"{text}": the fence {after}:adatopk{most[after]} has ratios up to {most[after]}')
        if from_step < last_step:
            problems.append(f'"{text}": steps must not fall, and {last_step} is before it')
        last_step = max(last_step, from_step)
    return problems


def ratios_at(recorded: Iterable[FenceRatio], step: int) -> dict[str, int]:
    """Finds the ratio in force in a step, by layer.

    Args:
        recorded: in the order of their steps.
        step: which.
    """
    return {each.after: each.ratio for each in recorded if each.from_step <= step}


def with_ratios(recorded: Iterable[FenceRatio], first_step: int, ratios: Mapping[str, int]) -> list[FenceRatio]:
    """Returns the list once other ratios are in force.

    Args:
        recorded: before. What is later than the step is void: the run has gone back.
        first_step: from which on they are in force.
        ratios: by layer; of fences that are not in it nothing changes.
    """
    kept = [each for each in recorded if each.from_step < first_step]
    known = ratios_at(kept, first_step)
    new = [FenceRatio(first_step, after, ratio) for after, ratio in sorted(ratios.items()) if known.get(after) != ratio]
    return kept + new


def codec_in_force(codec: Codec, ratio: int | None) -> Codec:
    """Finds what an adaptive codec stands for at a ratio; any other one stands for itself.

    Args:
        codec: of a fence.
        ratio: that was chosen; None: the largest.
    """
    top_k = top_k_of(codec)
    if top_k is None or not top_k.is_adaptive:
        return codec
    ratio = min(ratio or top_k.ratio, top_k.ratio)
    return "none" if ratio == 1 else str(TopK(ratio))


def adaptive(codecs: Mapping[int, Codec]) -> dict[int, int]:
    """Maps the position of the layer before each adaptive fence to the largest ratio of that fence."""
    found = {boundary: top_k_of(codec) for boundary, codec in codecs.items()}
    return {boundary: top_k.ratio for boundary, top_k in found.items() if top_k is not None and top_k.is_adaptive}


def is_codec(text: str) -> bool:
    """Tells whether a text names a codec."""
    return text in CODECS or top_k_of(text) is not None


def rows_of(ratio: int, num_elements: int) -> tuple[TopKRows, ...]:
    """Lists the rows of a tensor under ``topk``: the full ones, then what is left."""
    full, rest = divmod(num_elements, ROW_ELEMENTS)
    found = [TopKRows(full, ROW_ELEMENTS, -(-ROW_ELEMENTS // ratio))] if full else []
    return (*found, *([TopKRows(1, rest, -(-rest // ratio))] if rest else ()))


def fence_of(text: str) -> Fence:
    """Reads a fence as it is written: ``LAYER:CODEC``. The name may have colons itself.

    Raises:
        ValueError: it is none.
    """
    after, colon, codec = text.rpartition(":")
    if not after or not colon or not is_codec(codec):
        raise ValueError(f"{text!r} is no fence: needed is LAYER:CODEC with {CODEC_WORDS}")
    return Fence(after, codec)


def built_in_layer_names(num_blocks: int) -> tuple[str, ...]:
    """Lists the names of the layers of a built-in model."""
    return ("embedding", *(f"block.{index}" for index in range(num_blocks)), "head")


def codecs_at(fences: Iterable[str], names: Sequence[str]) -> dict[int, Codec]:
    """Finds the codec behind each layer that has a fence, by position.

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
    """Lists what is wrong with the fences of a model: one line for each.

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
    """Lists those whose codec changes bits, sorted: ``none`` leaves a value as it is."""
    return tuple(sorted(text for text in fences if fence_of(text).codec != "none"))


def head_bytes(num_dims: int) -> int:
    """Counts the bytes of what stands before the numbers of a coded tensor: codec, type and shape."""
    return _HEAD_BYTES + _DIM_BYTES * num_dims


def payload_bytes(codec: str, num_elements: int) -> int:
    """Counts the bytes of the numbers of a coded tensor: under ``int8`` and ``int4`` whole groups, each with its scale;
    under ``topk`` what is kept, and its places."""
    if codec == "bf16":
        return _NARROW_BYTES * num_elements
    if top_k := top_k_of(codec):
        return values_bytes(top_k.ratio, num_elements) + places_bytes(top_k.ratio, num_elements)
    num_groups = -(-num_elements // GROUP_ELEMENTS)
    return num_groups * (_SCALE_BYTES + GROUP_ELEMENTS * _BITS[codec] // 8)


def values_bytes(ratio: int, num_elements: int) -> int:
    """Computes the bytes of the ratio and the numbers that ``topk`` keeps: all that travels where the places are
    known."""
    kept = sum(rows.num_rows * rows.num_kept for rows in rows_of(ratio, num_elements))
    return RATIO_BYTES + _NARROW_BYTES * kept


def places_bytes(ratio: int, num_elements: int) -> int:
    """Counts the bytes that tell where the numbers lie that ``topk`` keeps."""
    return sum(rows.num_rows * rows.place_bytes for rows in rows_of(ratio, num_elements))


def kept_places_bytes(codec: Codec, num_elements: int) -> int:
    """Counts the bytes of what either side of a fence keeps of a tensor until its gradient comes: the places, where
    gradients use them."""
    top_k = top_k_of(codec)
    return places_bytes(top_k.ratio, num_elements) if top_k and not top_k.has_own_mask else 0


def coded_bytes(codec: str, shape: Sequence[int], element_bytes: int) -> int:
    """Computes the bytes of a floating-point tensor behind a fence, known from its shape alone.

    A tensor that a codec would not make smaller stays as it is.

    Args:
        codec: one of `CODECS`, or ``topk``.
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
