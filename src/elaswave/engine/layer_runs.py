"""What a layer is given, what its forward makes and what a backward brings to it; and gradients as they travel.

Micro-batches on their way through the layers of a worker: how far each has come, and the value that it has there.

A computation that is interrupted goes on from here when the step is tried again (rule S2 of ``docs/protocol.md``), and
what was handed on can be handed on once more.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from elaswave.engine.boundaries.fences import NO_MASKS, Masks
from elaswave.engine.checks.values import Lent, Structure, at_boundary, unflatten
from elaswave.protocol.step.salvage import InFlightMicrobatch


class LayerInputs(NamedTuple):
    """What a layer or the loss is given."""

    structure: Structure
    leaves: list[torch.Tensor]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The leaves that a gradient is passed on of."""
        return [leaf for leaf in self.leaves if leaf.requires_grad]


class LayerRun(NamedTuple):
    """What a layer's forward has made."""

    structure: Structure
    leaves: list[torch.Tensor]
    """With their graphs."""
    aux_losses: list[torch.Tensor]
    lent: Lent | None = None
    """What it was called with; None where nothing is to be found out of it any more."""

    def value(self) -> Any:
        """Returns what goes on to the next layer."""
        return unflatten(self.structure, [at_boundary(leaf.detach()) for leaf in self.leaves])


class Saved(NamedTuple):
    """What one layer keeps between forward and backward."""

    given: LayerInputs
    run: LayerRun | None
    """None where the layer is recomputed, or its outputs are not needed any more."""
    buffers: Sequence[torch.Tensor] = ()
    """What the forward has left in persistent buffers."""
    masks: Masks = NO_MASKS
    """Of the fences beside it."""


class Reached(NamedTuple):
    """What a backward has brought to a boundary."""

    gradients: list[torch.Tensor]
    """One for each leaf that is differentiable."""
    count: int | None  # type: ignore[assignment]  # hides tuple.count
    """Of the micro-batch's loss; None where losses have no counts."""

    @property
    def weight(self) -> int:
        """What an auxiliary loss of the micro-batch is multiplied by."""
        return 1 if self.count is None else self.count


Again = Callable[[LayerInputs, Reached], tuple[LayerRun, list[torch.Tensor | None]]]
"""Runs a layer or the loss forward and backward; answers with the gradients of its parameters and of its inputs."""


class Done(NamedTuple):
    """A whole run of a layer or of the loss, forward and backward."""

    given: LayerInputs
    run: LayerRun
    reached: Reached
    """What has come to its outputs; nothing where it is the loss."""
    found: list[torch.Tensor | None]
    """Gradients of its trained parameters, then of its inputs; None where none flows."""


def zeros_where_none(inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Makes what goes on to the layer before: zeros for an input that no gradient reaches."""
    return [
        torch.zeros_like(value) if gradient is None else at_boundary(gradient)
        for value, gradient in zip(inputs, gradients, strict=True)
    ]


def to_send(reached: Reached) -> Any:
    """Makes what a backward hands on: one gradient as it is, else all of them and, if there is one, the count."""
    if reached.count is None and len(reached.gradients) == 1:
        return reached.gradients[0]
    counts = () if reached.count is None else (torch.tensor(reached.count),)
    return (*reached.gradients, *counts)


def received(value: Any) -> Reached:
    """Does the inverse of `to_send`. Gradients are floating-point tensors, a count is int64. None: no gradient is sent
    to layers of which nothing is trained."""
    if value is None:
        return Reached([], None)
    if isinstance(value, torch.Tensor):
        return Reached([value], None)
    if value and value[-1].dtype == torch.int64:
        return Reached(list(value[:-1]), int(value[-1]))
    return Reached(list(value), None)


class ResumePoint(NamedTuple):
    """How far a micro-batch has come in the layers of a hop."""

    layers: range
    at: int
    """Forward, one past the last layer that has run, the loss counted; backward, the lowest one."""
    value: Any
    """Forward, the output of the last layer that has run; backward, a `Reached`."""


class InFlight:
    """Those of one worker in a step, by micro-batch."""

    def __init__(self) -> None:
        self._forwards: dict[int, ResumePoint] = {}
        self._backwards: dict[int, ResumePoint] = {}

    def forward(self, microbatch: int) -> ResumePoint | None:
        """Tells how far a forward has come that has begun, while no backward has."""
        return self._forwards.get(microbatch)

    def backward(self, microbatch: int) -> ResumePoint | None:
        """Tells how far a backward has come that has begun, until what it has made is needed no more."""
        return self._backwards.get(microbatch)

    def went(self, microbatch: int, layers: range, at: int, value: Any) -> None:
        """A forward has come so far."""
        self._forwards[microbatch] = ResumePoint(layers, at, value)

    def returned(self, microbatch: int, layers: range, at: int, reached: Reached) -> None:
        """A backward has come so far."""
        self._forwards.pop(microbatch, None)
        self._backwards[microbatch] = ResumePoint(layers, at, reached)

    def end(self, microbatch: int) -> None:
        """Nothing more is needed of a micro-batch."""
        self._forwards.pop(microbatch, None)
        self._backwards.pop(microbatch, None)

    def keep(self, microbatches: Collection[int]) -> None:
        """Forgets all others."""
        for resume_points in (self._forwards, self._backwards):
            for microbatch in resume_points.keys() - set(microbatches):
                del resume_points[microbatch]

    def through(self, layers: Collection[int]) -> set[int]:
        """Micro-batches whose hop has one of these layers."""
        return {
            microbatch
            for resume_points in (self._forwards, self._backwards)
            for microbatch, resume_point in resume_points.items()
            if not set(resume_point.layers).isdisjoint(layers)
        }

    def facts(self, left_out: Collection[int]) -> tuple[InFlightMicrobatch, ...]:
        """Lists the micro-batches in flight for a report.

        Args:
            left_out: micro-batches that cannot go on from here.
        """
        found = [
            InFlightMicrobatch(microbatch, resume_point.layers.start, resume_point.layers.stop, resume_point.at)
            for microbatch, resume_point in self._forwards.items()
        ]
        found += [
            InFlightMicrobatch(
                microbatch,
                resume_point.layers.start,
                resume_point.layers.stop,
                resume_point.layers.stop,
                resume_point.at,
            )
            for microbatch, resume_point in self._backwards.items()
        ]
        return tuple(
            sorted((each for each in found if each.microbatch not in left_out), key=lambda each: each.microbatch)
        )
