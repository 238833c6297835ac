"""Layers as flat tensors: where each parameter lies inside its layer's one-dimensional storage.

Blocks, sums, verification and checkpoints all see a layer as one flat run of elements. Offsets depend on the model
alone, never on the layout, the number of workers or the compute dtype, so that block boundaries (and with them every
hash and every partial norm) are the same wherever a layer lives.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from elaswave.models.layers import LayerSpec, ModelSpec, build_layer

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
    """Whether weight decay applies."""

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


def align(num_elements: int) -> int:
    """The next multiple of `ALIGNMENT_ELEMENTS`."""
    return -(-num_elements // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def model_shapes(model: ModelSpec) -> tuple[LayerShape, ...]:
    """The flat storage of every layer, found by building each on the meta device (no memory, no random draw)."""
    shapes = []
    index = 0
    for layer, spec in enumerate(model.layers):
        with torch.device("meta"):
            module = spec.build()
        tensors = []
        offset = 0
        for name, parameter in module.named_parameters():
            slot = TensorSlot(
                index,
                f"{spec.name}.{name}",
                layer,
                tuple(parameter.shape),
                offset,
                parameter.numel(),
                spec.decays(name, parameter.shape),
            )
            tensors.append(slot)
            offset = align(slot.stop)
            index += 1
        shapes.append(LayerShape(layer, tuple(tensors), offset))
    return tuple(shapes)


def initial_values(spec: LayerSpec, shape: LayerShape, seed: int) -> torch.Tensor:
    """The float32 initial values of one layer, shape [shape.size]; a pure function of (seed, layer)."""
    module = build_layer(spec, seed, shape.layer)
    flat = torch.zeros(shape.size, dtype=torch.float32)
    for slot, parameter in zip(shape.tensors, module.parameters(), strict=True):
        flat[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
    return flat


class FlatLayer:
    """A layer whose parameters are views into one flat tensor of the compute dtype.

    Args:
        spec: how the module is built.
        shape: where its tensors lie.
        dtype: dtype that forward and backward compute in (the float32 masters live in blocks).
    """

    def __init__(self, spec: LayerSpec, shape: LayerShape, dtype: torch.dtype) -> None:
        self.spec = spec
        self.shape = shape
        self.module = build_layer(spec, 0, shape.layer)  # the seed is irrelevant: every value is overwritten
        self.flat = torch.zeros(shape.size, dtype=dtype)
        self.parameters: list[torch.nn.Parameter] = list(self.module.parameters())
        for slot, parameter in zip(shape.tensors, self.parameters, strict=True):
            parameter.data = self.flat[slot.offset : slot.stop].view(slot.shape)
            assert parameter.data_ptr() % 64 == 0, f"{slot.name} is not 64-byte aligned"


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
