"""Layers as flat tensors: their shapes, initial values, and modules whose parameters are views into one tensor.

Where each parameter lies is described by `elaswave.state.shapes`.
"""

import torch

from elaswave.models.admission import check_module
from elaswave.models.layers import Layer, ModelSpec, build_layer
from elaswave.state.shapes import LayerShape, TensorSlot, align


def model_shapes(model: ModelSpec) -> tuple[LayerShape, ...]:
    """The flat storage of every layer, found by building each on the meta device (no memory, no random draw).

    Raises:
        UsageError: a module that cannot be trained as it stands.
    """
    shapes = []
    index = 0
    for layer, spec in enumerate(model.layers):
        with torch.device("meta"):
            module = spec.build()
        check_module(spec.name, module)
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
                parameter.dim() >= 2,
            )
            tensors.append(slot)
            offset = align(slot.stop)
            index += 1
        shapes.append(LayerShape(layer, tuple(tensors), offset))
    return tuple(shapes)


def initial_values(spec: Layer, shape: LayerShape, seed: int) -> torch.Tensor:
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

    def __init__(self, spec: Layer, shape: LayerShape, dtype: torch.dtype) -> None:
        self.spec = spec
        self.shape = shape
        self.module = build_layer(spec, 0, shape.layer)  # the seed is irrelevant: every value is overwritten
        self.flat = torch.zeros(shape.size, dtype=dtype)
        self.parameters: list[torch.nn.Parameter] = list(self.module.parameters())
        for slot, parameter in zip(shape.tensors, self.parameters, strict=True):
            parameter.data = self.flat[slot.offset : slot.stop].view(slot.shape)
            assert parameter.data_ptr() % 64 == 0, f"{slot.name} is not 64-byte aligned"
