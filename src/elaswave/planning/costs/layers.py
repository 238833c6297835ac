"""What layers cost: seconds and bytes, analytic or profiled. Pure values.

Seconds are those of one micro-batch on one worker of speed 1.0 at its device's base frequency level.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np

from elaswave.planning.costs.network import NetworkLink


class HeldLayers(Protocol):
    """Workers that hold the same layers: a stage."""

    @property
    def start(self) -> int:
        """First layer."""

    @property
    def stop(self) -> int:
        """One past the last layer."""

    @property
    def width(self) -> int:
        """Number of workers."""


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
    """Of a step, beside its actions, whatever its layout: vote and apply, and of reduce and gather what `end_link` does
    not tell. See `overhead_s`."""
    end_link: NetworkLink | None = None
    """Over which a worker sends sums and fetches parameters at the end of a step; None: that is not modelled."""
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

    def overhead_s(self, stages: Iterable[HeldLayers]) -> float:
        """Seconds of a step beside its actions under a layout.

        Sums of gradients travel while earlier layers still compute. Nothing is left to hide those of the layer that a
        stage's backward ends with, its first, and after the vote the new parameters of all its layers. A layer's sums
        and parameters are sliced over the workers that hold it, those of both stages where two share it: of g workers
        each sends and fetches all but its own g-th part. The slowest stage counts, since the vote and the next step
        wait for all.

        Args:
            stages: all of a job, of all its pipelines.
        """
        if self.end_link is None:
            return self.step_overhead_s
        known = [(stage.start, stage.stop, stage.width) for stage in stages]
        holders = [0] * self.num_layers
        for start, stop, width in known:
            for layer in range(start, stop):
                holders[layer] += width
        sums, parameters = self._end_bytes
        most = 0.0
        for start, stop, _ in known:
            travels = sums[start] * (1 - 1 / holders[start])
            for layer in range(start, stop):
                travels += parameters[layer] * (1 - 1 / holders[layer])
            most = max(most, travels)
        return self.step_overhead_s + (self.end_link.transfer_s(most) if most else 0.0)

    def measured_at(self, stages: Sequence[HeldLayers], overhead_s: float) -> "Costs":
        """The costs of a job of which it has been measured what a step costs beside its actions, under one layout.

        That layout is given the measured seconds. Others differ by what travels: what the link does not explain of the
        measured seconds is theirs too, and a link that explains more than was measured is taken to be faster.

        Args:
            stages: of the layout that was measured.
            overhead_s: that was measured.
        """
        travel_s = msgspec.structs.replace(self, step_overhead_s=0.0).overhead_s(stages)
        link = self.end_link
        if link is not None and travel_s > overhead_s:
            factor = overhead_s / travel_s
            link = None if not factor else NetworkLink(
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor, latency_s=link.latency_s * factor
            )  # fmt: skip
        return msgspec.structs.replace(self, step_overhead_s=max(0.0, overhead_s - travel_s), end_link=link)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def layer_s(self) -> tuple[tuple[float, float, float], ...]:
        """Seconds of each layer's forward, input gradient and weight gradient."""
        return tuple((each.forward_s, each.input_gradient_s, each.weight_gradient_s) for each in self.layers)

    @cached_property
    def _end_bytes(self) -> tuple[list[float], list[float]]:
        """Bytes of sums and of parameters of each layer."""
        return [each.accumulator_bytes for each in self.layers], [each.parameter_bytes for each in self.layers]

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

    @cached_property
    def border_bytes(self) -> np.ndarray:
        """What goes to each layer from the one before it, float64 [num_layers + 1]; 0 at both ends of the model."""
        return np.array([0.0, *(layer.boundary_bytes for layer in self.layers[:-1]), 0.0])

    def between(self, field: str, start: int, stop: int) -> float:
        """Sum of a cost over layers [start, stop)."""
        prefix = self.prefix[field]
        return float(prefix[stop] - prefix[start])
