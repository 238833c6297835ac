"""Layers as a worker holds them, with the units that they share, made without a worker."""

from collections.abc import Iterable

import torch

from elaswave.blocks.shapes import LayerShape
from elaswave.models.layers import ModelSpec
from elaswave.state.flat import FlatLayer, FlatUnit, initial_values, model_shapes


def make_held(
    model: ModelSpec, layers: Iterable[int] | None, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[dict[int, FlatLayer], dict[int, FlatUnit], tuple[LayerShape, ...]]:
    """Layers with their initial values.

    Args:
        model: of all layers.
        layers: those that are wanted; None: all.
        seed: of the run.
        dtype: that they compute in.
    Returns:
        The layers and the shared units, by number, and the shapes of all units.
    """
    shapes = model_shapes(model)
    wanted = list(range(len(model.layers))) if layers is None else list(layers)
    units = {}
    for shape in shapes[len(model.layers) :]:
        if set(shape.users) & set(wanted):
            first = shape.users[0]
            units[shape.layer] = unit = FlatUnit(shape, dtype)
            unit.flat.copy_(initial_values(model.layers[first], shape, seed, layer=first))
    held = {index: FlatLayer(model.layers[index], shapes[index], dtype, units=units, seed=seed) for index in wanted}
    return held, units, shapes
