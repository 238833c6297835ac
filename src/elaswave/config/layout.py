"""The layout of a run written out: how many workers each stage has, and which layers."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from elaswave.config.devices import emulated_costs, own_layer_costs, shape_of
from elaswave.config.own import OWN
from elaswave.config.schema import Config
from elaswave.costs.analytic import multiplications
from elaswave.planning.layout import partition_layers, resolve_widths


def resolve(config: Config, workers: int | None = None, layer_parameters: Sequence[int] | None = None) -> Config:
    """The same configuration with ``layout.widths`` and ``layout.layers`` set.

    Args:
        config: valid.
        workers: number of workers that the layout must have; decides the layout where none is given.
        layer_parameters: number of parameters of each layer of a script's own model: before anything is measured, a
            layer is taken to cost as much as it has. None: all its layers are taken to be equal.
    Raises:
        ConfigError: lists why no such layout exists.
    """
    given = config.layout
    widths = resolve_widths(given.stages, given.replicas, given.widths, workers)
    shape = msgspec.structs.replace(given, stages=None, replicas=None, widths=widths)
    config = msgspec.structs.replace(config, layout=shape)
    if shape.layers is not None:
        return config
    if config.model.family == OWN:
        costs = own_layer_costs(layer_parameters or (1,) * config.model.num_layers)
    else:
        costs = multiplications(shape_of(config))
    if config.device.kind == "emulated":
        prefix = emulated_costs(config).prefix["busy_s"]
        costs = tuple(float(after - before) for before, after in pairwise(prefix))
    layers = partition_layers(costs, widths)
    return msgspec.structs.replace(config, layout=msgspec.structs.replace(shape, layers=layers))
