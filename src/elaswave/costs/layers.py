"""What layers cost: seconds and bytes, analytic or profiled. Pure values.

Seconds are those of one micro-batch on one worker of speed 1.0 at its device's base frequency level.
"""

from functools import cached_property

import msgspec
import numpy as np


class LayerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's costs."""

    name: str = ""
    forward_s: float
    input_gradient_s: float
    """The half of the backward (`I`) that earlier stages wait for."""
    weight_gradient_s: float
    """The half of the backward (`W`) that no other stage waits for. B is I and W together."""
    parameter_bytes: float
    """Of the parameters that a worker holds to compute with."""
    accumulator_bytes: float
    """Of the sums of gradients, on every worker that runs the layer."""
    optimizer_bytes: float
    """Masters and optimizer slots of the layer, once; sharded over its stage, and again for each follower."""
    activation_bytes: float
    """Kept of one micro-batch from its forward until its backward."""
    boundary_bytes: float
    """Of the tensor that leaves the layer, and of its gradient."""


class Costs(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Costs of all layers of a model, embedding and head included, and what a step costs beside its actions."""

    layers: tuple[LayerCosts, ...]
    step_overhead_s: float = 0.0
    """Of a step, beside its actions: reduce, vote, apply, gather as far as they do not overlap with computing."""
    source: str = ""
    """``measured`` with what, or the description's sources."""

    def __post_init__(self) -> None:
        """Checks the figures.

        Raises:
            ValueError: no layer, or a cost that is negative or not finite, by layer and name.
        """
        if not self.layers:
            raise ValueError("costs of no layer are given: needed is at least one")
        for index, layer in enumerate(self.layers):
            for field in layer.__struct_fields__[1:]:
                value = getattr(layer, field)
                if not 0 <= value < float("inf"):
                    raise ValueError(f"layer {index} ({layer.name}): {field} is {value}, needed: at least 0 and finite")
        if not 0 <= self.step_overhead_s < float("inf"):
            raise ValueError(f"step_overhead_s is {self.step_overhead_s}, needed: at least 0 and finite")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def layer_s(self) -> tuple[tuple[float, float, float], ...]:
        """Seconds of each layer's forward, input gradient and weight gradient."""
        return tuple((each.forward_s, each.input_gradient_s, each.weight_gradient_s) for each in self.layers)

    @cached_property
    def prefix(self) -> dict[str, np.ndarray]:
        """For every cost its sum over the layers before each one, and over all: float64 [num_layers + 1].

        ``busy_s`` is forward, input gradient and weight gradient together.
        """
        sums = {
            field: np.concatenate([[0.0], np.cumsum([getattr(layer, field) for layer in self.layers])])
            for field in LayerCosts.__struct_fields__[1:]
        }
        sums["busy_s"] = sums["forward_s"] + sums["input_gradient_s"] + sums["weight_gradient_s"]
        return sums

    def between(self, field: str, start: int, stop: int) -> float:
        """Sum of a cost over layers [start, stop)."""
        prefix = self.prefix[field]
        return float(prefix[stop] - prefix[start])
