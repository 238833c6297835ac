"""Where each parameter lies inside its layer's one-dimensional storage. No torch: the coordinator reads it too.

Blocks, sums, verification and checkpoints all see a layer as one flat run of elements. Offsets depend on the model
alone, never on the layout, the number of workers or the compute dtype, so that block boundaries (and with them every
hash and every partial norm) are the same wherever a layer lives.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGNMENT_ELEMENTS = 32
"""Every parameter starts at a multiple of this: 64 bytes in bfloat16, 128 in float32. CPU kernels round some
products differently when rows start elsewhere, so the alignment is part of what keeps bits equal."""


class TensorSlot(NamedTuple):
    """One parameter tensor of the model and its place in its layer's flat storage."""

    id: int
    """Position among all tensors of the model."""
    name: str
    """Full name, such as ``block.0.attention.qkv.weight``."""
    layer: int
    shape: tuple[int, ...]
    offset: int
    """First element in the layer's flat storage."""
    numel: int
    decays: bool
    """Whether weight decay applies, by the usual rule: matrices and embeddings decay, biases and norms do not."""

    @property
    def stop(self) -> int:
        """One past the last element in the flat storage."""
        return self.offset + self.numel


class LayerShape(NamedTuple):
    """The tensors of one layer and the length of its flat storage."""

    layer: int
    tensors: tuple[TensorSlot, ...]
    size: int
    """Elements of the flat storage, padding included."""


class StateShapes(NamedTuple):
    """What a model and its optimizer keep, as far as it does not take torch to say it."""

    layer_names: tuple[str, ...]
    layers: tuple[LayerShape, ...]
    slots: tuple[str, ...]
    """Float32 states of every element: the master weights, and those of the optimizer."""


def align(num_elements: int) -> int:
    """The next multiple of `ALIGNMENT_ELEMENTS`."""
    return -(-num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


class Segment(NamedTuple):
    """The part of one tensor that lies in a run [start, stop) of a layer's flat storage."""

    slot: TensorSlot
    start: int
    """First element, counted from the beginning of the run."""
    stop: int
    """One past the last element, counted from the beginning of the run."""
    tensor_start: int
    """First element, counted from the beginning of the flattened tensor."""


def segments(shape: LayerShape, start: int, stop: int) -> Iterator[Segment]:
    """The tensors' parts inside [start, stop), padding left out, in order."""
    tensors = shape.tensors
    for index in range(bisect_right(tensors, start, key=_stop), len(tensors)):
        slot = tensors[index]
        if slot.offset >= stop:
            return
        first, last = max(slot.offset, start), min(slot.stop, stop)
        if first < last:
            yield Segment(slot, first - start, last - start, first - slot.offset)


def _stop(slot: TensorSlot) -> int:
    return slot.stop


def all_tensors(shapes: Sequence[LayerShape]) -> tuple[TensorSlot, ...]:
    """Every tensor of the model, in the order of `TensorSlot.id`."""
    return tuple(slot for shape in shapes for slot in shape.tensors)
