"""The memory that a worker takes: the one formula, for every caller. Pure.

A worker that holds layers [start, stop), with h micro-batches in flight, takes

    sum over its layers of (parameters + sums of gradients + state x copies / holders)  +  h x sum of activations
      +  h x output  +  (h + 1) x gradient of the input

bytes. The last two are kept so that a step that is interrupted goes on where it stood (rule S2 of docs/protocol.md):
of each micro-batch in flight what its last layer here has returned, until the gradient comes back; and the newest
gradients that were handed back, as many as the stage before may have yet to use. That is one more than are in flight
where stages are equally wide under 1f1b; a worker of a narrower stage keeps as many for each worker that it serves,
which is left out. What enters or leaves the model is not handed on, so it is not kept.

*State* is a layer's masters and optimizer slots; it is sliced over the layer's *holders*, the workers that run
the layer, and each slice has *copies*: its owner's and its followers'. What is in flight is up to the schedule
(`elaswave.planning.costs.schedules`) and to what fits. What is left out: buffers to receive sums, the copy that a
checkpoint makes, and temporary values; the share of a device's memory that training may not fill has to hold them.
Among these is what a layer takes that is run again (`elaswave.engine.checks.determinism_check`): its parameters and
their gradients once more, and one micro-batch's activations and borders. The first micro-batch of every layer takes
that, and spot checks take no more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs, HeldLayers

DEFAULT_FOLLOWERS = 1
"""Live copies of every block beside its owner's."""

_SLACK = 1e-12
"""Relative; differences of rounding."""


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
        """Of a job whose stages are known; neighbouring ones may share layers.

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
        """Of a stage that shares no layers.

        Args:
            costs: of the layers.
            holders: workers of the stage; a part of one where a layer is spread over stages.
            copies: of every block.
        """
        return cls(costs, copies / holders)

    def parts(self, start: int, stop: int, in_flight: int) -> MemoryParts:
        """Of one worker that holds layers [start, stop) and so many micro-batches in flight."""
        parameters, sums, state, activations = (
            float(sums[stop] - sums[start]) for sums in (self._parameters, self._sums, self._state, self._activations)
        )
        before, behind = float(self._borders[start]), float(self._borders[stop])
        return MemoryParts(parameters, sums, state, activations * in_flight, (behind + before) * in_flight + before)

    def fixed_bytes(self, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
        """Of layers [start, stop) with nothing in flight; one entry for each pair."""
        return np.asarray(self._fixed[stop] - self._fixed[start] + self._borders[start])

    def activation_bytes(self, start: int | np.ndarray, stop: int | np.ndarray) -> np.ndarray:
        """Of one micro-batch in flight in layers [start, stop), with what is kept of it."""
        activations = self._activations[stop] - self._activations[start]
        return np.asarray(activations + self._borders[stop] + self._borders[start])

    def sent_bytes(self, start: int, stop: int) -> float:
        """What a worker has to be sent to take up layers [start, stop): parameters, and its slices of state."""
        sent = self._parameters + self._state
        return float(sent[stop] - sent[start])

    def ends(self, in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """What `total_bytes` is the difference of: float64 [num_layers + 1] each, by where layers stop and start."""
        totals = self._fixed + self._activations * in_flight
        return totals + self._borders * in_flight, totals - self._borders * (in_flight + 1)

    def total_bytes(self, start: np.ndarray, stop: np.ndarray, in_flight: int) -> np.ndarray:
        """Of layers [start, stop) with so many micro-batches in flight; one entry for each pair."""
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
    """Copies of every block, the owner's included: each is on another worker."""
    return min(1 + followers, num_workers)


def fitting(free_bytes: np.ndarray, each_bytes: np.ndarray) -> np.ndarray:
    """How many micro-batches of this size fit into what is free.

    Args:
        free_bytes: of each worker; below 0 where something is lacking already.
        each_bytes: of one micro-batch.
    Returns:
        Whole numbers as float64; infinite where nothing lacks and a micro-batch takes no memory.
    """
    room = np.where(free_bytes >= 0, np.inf, -1.0)
    return np.floor(np.divide(free_bytes, each_bytes, out=room, where=each_bytes > 0) * (1 + _SLACK))
