"""What layers cost: seconds and bytes, analytic or profiled, and the memory of a worker that holds them. Pure values.

Seconds are those of one micro-batch on one worker of speed 1.0 at its device's base frequency level.

Of memory this is the one formula, for every caller. A worker that holds layers [start, stop), with h micro-batches in
flight, takes

    sum over its layers of (parameters + sums of gradients + state x copies / holders)  +  h x sum of activations
      +  h x output  +  (h + 1) x gradient of the input

bytes. The last two are kept so that a step that is interrupted goes on where it stood (rule S2 of docs/protocol.md):
of each micro-batch in flight what its last layer here has returned, until the gradient comes back; and the newest
gradients that were handed back, as many as the stage before may have yet to use. That is one more than are in flight
where stages are equally wide under 1f1b; a worker of a narrower stage keeps as many for each worker that it serves,
which is left out. What enters or leaves the model is not handed on, so it is not kept.

*State* is a layer's masters and optimizer slots; it is sliced over the layer's *holders*, the workers that run
the layer, and each slice has *copies*: its owner's and its followers' (of other systems each holder has all of it,
`Costs.whole_copies`). What is in flight is up to the schedule
(`elaswave.planning.costs.schedules`) and to what fits. What is left out: buffers to receive sums, the copy that a
checkpoint makes, and temporary values; the share of a device's memory that training may not fill has to hold them.
Among these is what a layer takes that is run again (`elaswave.engine.checks.determinism_check`): its parameters and
their gradients once more, and one micro-batch's activations and borders. The first micro-batch of every layer takes
that, and spot checks take no more.

`fenced_costs` makes costs of a model whose layers have fences between them: fewer bytes, a little more memory and time.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from elaswave.fences import coded_bytes, kept_places_bytes
from elaswave.planning.costs.network import NetworkLink
from elaswave.types import WHOLE_STAGE

DEFAULT_FOLLOWERS = 1
"""Live copies of every block beside its owner's."""

CONSISTENCIES = ("bitwise", "scaled")
ACCUMULATOR_BITS = (64, 48)
"""Widths that an exact sum of gradients may have."""
_SLACK = 1e-12
"""Relative; differences of rounding."""


def sum_bytes(consistency: str, accumulator_bits: int) -> int:
    """Counts the bytes of the sum of gradients of one parameter, in memory and on its way.

    Args:
        consistency: ``bitwise`` (exact sums) or ``scaled`` (float32).
        accumulator_bits: width of an exact sum.
    Raises:
        ValueError: there is no such sum.
    """
    if consistency not in CONSISTENCIES:
        raise ValueError(f"consistency is {consistency!r}, needed: one of {', '.join(CONSISTENCIES)}")
    if accumulator_bits not in ACCUMULATOR_BITS:
        widths = ", ".join(map(str, ACCUMULATOR_BITS))
        raise ValueError(f"accumulator_bits is {accumulator_bits}, needed: one of {widths}")
    return accumulator_bits // 8 if consistency == "bitwise" else 4


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
    whole_copies: bool = False
    """Whether each worker of a stage holds all of its state, as those of systems do that replicate whole stages; else
    it holds its slice, and those that it follows."""
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
        """Computes the seconds of a step beside its actions under a layout.

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
        """Returns the costs of a job of which it has been measured what a step costs beside its actions, under one
        layout.

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
        """Sums a cost over layers [start, stop)."""
        prefix = self.prefix[field]
        return float(prefix[stop] - prefix[start])


class MemoryParts(NamedTuple):
    """Bytes of one worker, by what takes them."""

    parameters: float
    sums: float
    """Of gradients."""
    state: float
    """Its slices of masters and optimizer slots, followed ones included."""
    activations: float
    kept: float
    """Outputs and gradients, so that an interrupted step goes on where it stood."""

    @property
    def total(self) -> float:
        """All together."""
        return sum(self)

    @property
    def by_name(self) -> dict[str, float]:
        """The same with the names that a person reads."""
        names = ("parameters", "sums of gradients", "optimizer state and copies", "activations", "kept for interrupts")
        return dict(zip(names, self, strict=True))


class MemoryModel:
    """Bytes of a worker by the layers that it holds.

    Args:
        costs: of the layers.
        state_share: share of a layer's state that one of its holders has, copies included: of each layer, float64
            [num_layers], or one number for all layers.
    """

    def __init__(self, costs: Costs, state_share: np.ndarray | float) -> None:
        prefix = costs.prefix
        self._parameters = prefix["parameter_bytes"]
        self._activations = prefix["activation_bytes"]
        state = prefix["optimizer_bytes"]
        if costs.whole_copies:
            state_share = 1.0
        if isinstance(state_share, np.ndarray):
            state = np.concatenate([[0.0], np.cumsum(np.diff(state) * state_share)])
        else:
            state = state * state_share
        self._sums = prefix["accumulator_bytes"]
        self._state = state
        self._fixed = self._parameters + self._sums + state
        self._borders = costs.border_bytes
        """Of activations that go to each layer, and of the gradients that come back."""

    @classmethod
    def of_stages(cls, costs: Costs, stages: Sequence[HeldLayers], followers: int) -> "MemoryModel":
        """Makes the model of a job whose stages are known; neighbouring ones may share layers.

        Args:
            costs: of the layers.
            stages: all of them.
            followers: live copies of every block beside its owner's, as far as there are other workers.
        """
        holders = np.zeros(costs.num_layers)
        for stage in stages:
            holders[stage.start : stage.stop] += stage.width
        return cls(costs, num_copies(followers, sum(stage.width for stage in stages)) / np.maximum(1.0, holders))

    @classmethod
    def of_width(cls, costs: Costs, holders: float, copies: int) -> "MemoryModel":
        """Makes the model of a stage that shares no layers.

        Args:
            costs: of the layers.
            holders: workers of the stage; a part of one where a layer is spread over stages.
            copies: of every block.
        """
        return cls(costs, copies / holders)

    def parts(self, start: int, stop: int, in_flight: int) -> MemoryParts:
        """Computes the parts of the memory of one worker that holds layers [start, stop) and so many micro-batches in
        flight."""
        parameters, sums, state, activations = (
            float(sums[stop] - sums[start]) for sums in (self._parameters, self._sums, self._state, self._activations)
        )
        before, behind = float(self._borders[start]), float(self._borders[stop])
        return MemoryParts(parameters, sums, state, activations * in_flight, (behind + before) * in_flight + before)

    def fixed_bytes(self, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
        """Computes the bytes of layers [start, stop) with nothing in flight; gives one entry for each pair."""
        return np.asarray(self._fixed[stop] - self._fixed[start] + self._borders[start])

    def activation_bytes(self, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
        """Computes the bytes of one micro-batch in flight in layers [start, stop), with what is kept of it."""
        activations = self._activations[stop] - self._activations[start]
        return np.asarray(activations + self._borders[stop] + self._borders[start])

    def sent_bytes(self, start: int, stop: int) -> float:
        """Computes what a worker has to be sent to take up layers [start, stop): parameters, and its slices of
        state."""
        sent = self._parameters + self._state
        return float(sent[stop] - sent[start])

    def ends(self, in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes what `total_bytes` is the difference of: float64 [num_layers + 1] each, by where layers stop and
        start."""
        totals = self._fixed + self._activations * in_flight
        return totals + self._borders * in_flight, totals - self._borders * (in_flight + 1)

    def total_bytes(self, start: np.ndarray, stop: np.ndarray, in_flight: int) -> np.ndarray:
        """Computes the bytes of layers [start, stop) with so many micro-batches in flight; gives one entry for each
        pair."""
        return self.fixed_bytes(start, stop) + self.activation_bytes(start, stop) * in_flight

    def most_bytes(self, in_flight: int) -> float:
        """No worker takes more, whatever layers it holds, with so many micro-batches in flight."""
        all_layers = float(self._fixed[-1] + self._activations[-1] * in_flight)
        return all_layers + (2 * in_flight + 1) * float(self._borders.max())

    def most_in_flight(self, start: int, stop: int, memory_bytes: np.ndarray) -> np.ndarray:
        """Micro-batches in flight for which workers have room beside layers [start, stop).

        Args:
            start, stop: layers of the stage.
            memory_bytes: of its workers, float64.
        Returns:
            Whole numbers as float64; below 0 where not even the layers fit, infinite without activations.
        """
        return fitting(memory_bytes - self.fixed_bytes(start, stop), self.activation_bytes(start, stop))


def num_copies(followers: int, num_workers: int) -> int:
    """Counts the copies of every block, the owner's included: each is on another worker."""
    return min(1 + followers, num_workers)


def followers_that_fit(width: int, copy_bytes: float, memory_bytes: float, share: float) -> int:
    """Counts the followers that the blocks of a stage have where nobody has asked for a number: all of the stage, if
    copies of others' blocks then take at most a share of a worker's memory; else as many as do, and at least one.

    Args:
        width: workers of the stage.
        copy_bytes: of one copy of the whole stage, with the mean gradient that it receives.
        memory_bytes: of the worker of the stage that has the least.
        share: of it that the copies may take.
    Returns:
        A number, or `elaswave.types.WHOLE_STAGE`.
    """
    room = share * memory_bytes * width
    return WHOLE_STAGE if room >= (width - 1) * copy_bytes else max(1, int(room // copy_bytes))


def fitting(free_bytes: np.ndarray, each_bytes: np.ndarray) -> np.ndarray:
    """Computes how many micro-batches of this size fit into what is free.

    Args:
        free_bytes: of each worker; below 0 where something is lacking already.
        each_bytes: of one micro-batch.
    Returns:
        Whole numbers as float64; infinite where nothing lacks and a micro-batch takes no memory.
    """
    room = np.where(free_bytes >= 0, np.inf, -1.0)
    return np.floor(np.divide(free_bytes, each_bytes, out=room, where=each_bytes > 0) * (1 + _SLACK))


def fenced_costs(
    costs: Costs, codecs: Mapping[int, str], *, element_bytes: int, memory_bandwidth_bytes_per_s: float | None = None
) -> Costs:
    """Computes the costs of a model with fences.

    What leaves the layer before a fence is smaller. Its worker keeps the coded bytes of a micro-batch until its
    backward, since a step that is tried again may send them again; where gradients use the forward's places, either
    side keeps these, too. Such gradients are shorter than the activations, and are counted as if they were not. A codec
    reads and writes memory: once the tensor and
    its coded bytes, on either side and in either direction, which is the least that it can take.

    Args:
        costs: without fences.
        codecs: by position of the layer before each fence.
        element_bytes: of an activation.
        memory_bandwidth_bytes_per_s: of the device; None: the codec's time is in what is measured.
    """
    layers = list(costs.layers)
    for index, codec in codecs.items():
        raw = costs.layers[index].boundary_bytes
        num_elements = round(raw / element_bytes)
        coded = float(coded_bytes(codec, (num_elements,), element_bytes))
        if coded >= raw:
            continue
        moving_s = (raw + coded) / memory_bandwidth_bytes_per_s if memory_bandwidth_bytes_per_s else 0.0
        places = kept_places_bytes(codec, num_elements)
        before, behind = layers[index], layers[index + 1]
        layers[index] = msgspec.structs.replace(
            before,
            boundary_bytes=coded,
            activation_bytes=before.activation_bytes + coded + places,
            forward_s=before.forward_s + moving_s,
            input_gradient_s=before.input_gradient_s + moving_s,
        )
        layers[index + 1] = msgspec.structs.replace(
            behind,
            activation_bytes=behind.activation_bytes + places,
            forward_s=behind.forward_s + moving_s,
            input_gradient_s=behind.input_gradient_s + moving_s,
        )
    return msgspec.structs.replace(costs, layers=tuple(layers))
