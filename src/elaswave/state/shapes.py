"""Where each parameter lies inside its layer's one-dimensional storage. No torch: the coordinator reads it too.

Blocks, sums, verification and checkpoints all see a layer as one flat run of elements. Offsets depend on the model
alone, never on the layout, the number of workers or the compute dtype, so that block boundaries (and with them every
hash and every partial norm) are the same wherever a layer lives.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
    group: int = 0
    """The optimizer's parameter group that it is in."""
    states: tuple[str, ...] | None = None
    """Its float32 states, "master" among them; None: all that the run has."""
    scalars: tuple[tuple[str, str], ...] = ()
    """Name and element type of the states that it has once, not per element."""

    def has(self, slot: str) -> bool:
        """Whether the tensor has one of the run's float32 states."""
        return self.states is None or slot in self.states

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


class StoredState(NamedTuple):
    """One state of one tensor, as a checkpoint holds it."""

    slot: str
    tensor: str
    """Its full name."""
    shape: tuple[int, ...]
    """() for a scalar state."""
    dtype: str
    """Element type, as `elaswave.state.checkpoint_format` names it."""


class StateShapes(NamedTuple):
    """What a model and its optimizer keep, as far as it does not take torch to say it."""

    layer_names: tuple[str, ...]
    layers: tuple[LayerShape, ...]
    slots: tuple[str, ...]
    """Float32 states of elements: the master weights first, then those of the optimizer. A tensor has some of them."""
    late: tuple[str, ...] = ()
    """Those of `slots`, and of the scalar states, that come into being with the first update."""

    def slots_of(self, tensors: Iterable[TensorSlot], num_updates: int) -> tuple[str, ...]:
        """The float32 states of a run of elements.

        Args:
            tensors: that have elements in it.
            num_updates: that have been made.
        Returns:
            Their names, in the order of `slots`.
        """
        tensors = tuple(tensors)
        there = (slot for slot in self.slots if num_updates or slot not in self.late)
        return tuple(slot for slot in there if any(tensor.has(slot) for tensor in tensors))

    def stored(self, num_updates: int) -> Iterator[StoredState]:
        """All states that a checkpoint holds after so many updates."""
        for tensor in all_tensors(self.layers):
            for slot in self.slots_of((tensor,), num_updates):
                yield StoredState(slot, tensor.name, tensor.shape, "float32")
            for name, dtype in tensor.scalars:
                if num_updates or name not in self.late:
                    yield StoredState(name, tensor.name, (), dtype)


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


def with_states(shapes: tuple[LayerShape, ...], states: tuple[str, ...]) -> tuple[LayerShape, ...]:
    """The same tensors with more states."""
    return tuple(
        shape._replace(
            tensors=tuple(
                slot if slot.states is None else slot._replace(states=(*slot.states, *states)) for slot in shape.tensors
            )
        )
        for shape in shapes
    )


def all_tensors(shapes: Sequence[LayerShape]) -> tuple[TensorSlot, ...]:
    """Every tensor of the model, in the order of `TensorSlot.id`."""
    return tuple(slot for shape in shapes for slot in shape.tensors)
