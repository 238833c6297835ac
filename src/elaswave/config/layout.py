"""The layout of a run written out: how many workers each stage has, and which layers."""

from itertools import pairwise

import msgspec

from elaswave.config.devices import emulated_costs, shape_of
from elaswave.config.schema import Config
from elaswave.costs.analytic import multiplications
from elaswave.planning.layout import partition_layers, resolve_widths


def resolve(config: Config, workers: int | None = None) -> Config:
    """The same configuration with ``layout.widths`` and ``layout.layers`` set.

    Args:
        config: valid.
        workers: number of workers that the layout must have; decides the layout where none is given.
    Raises:
        ConfigError: lists why no such layout exists.
    """
    given = config.layout
    widths = resolve_widths(given.stages, given.replicas, given.widths, workers)
    shape = msgspec.structs.replace(given, stages=None, replicas=None, widths=widths)
    config = msgspec.structs.replace(config, layout=shape)
    if shape.layers is not None:
        return config
    costs = multiplications(shape_of(config))
    if config.device.kind == "emulated":
        prefix = emulated_costs(config).prefix["busy_s"]
        costs = tuple(float(after - before) for before, after in pairwise(prefix))
    layers = partition_layers(costs, widths)
    return msgspec.structs.replace(config, layout=msgspec.structs.replace(shape, layers=layers))
