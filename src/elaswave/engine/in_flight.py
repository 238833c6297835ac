"""What a worker keeps of a step's micro-batches: how far each has come in its layers, with what values; and its score.

A layer or the loss is given `LayerInputs`, makes a `LayerRun`, and a backward brings a `Reached` to it; `to_send` makes
of that what travels. A computation that is interrupted goes on from here when the step is tried again (rule S2 of
``docs/protocol.md``), and what was handed on can be handed on once more. Where a micro-batch ends, `Scoring` has its
loss and metrics.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from elaswave.config.values import plain
from elaswave.devices.interface import Reading, Readings
from elaswave.engine.boundaries.fences import NO_MASKS, Masks
from elaswave.engine.checks.values import Lent, Structure, Watching, at_boundary, unflatten
from elaswave.errors import UsageError
from elaswave.models.layers import ModelSpec, describe
from elaswave.protocol.step.ballot import MetricSum, Scores
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


_LARGEST_COUNT = 1 << 53
_WRITTEN = (
    "{what}, which may be the dataset's own memory, read again in later passes, or what the backward needs: work on a "
    "copy (targets = targets.clone())"
)


class Scored(NamedTuple):
    """What a loss has returned."""

    total: torch.Tensor
    """A scalar with its graph."""
    count: int | None  # type: ignore[assignment]  # hides tuple.count
    """None: the total is the micro-batch's mean."""


class Scoring:
    """Runs a model's loss and metrics, and adds up what they say.

    Args:
        model: with loss and metrics.
        readings: of the device that computes them.
        watching: looks after what loss and metrics are given.
    """

    def __init__(self, model: ModelSpec, readings: Readings, watching: Watching) -> None:
        self._model = model
        self._readings, self._watching = readings, watching
        self._has_counts: bool | None = None
        """Whether the loss returns counts; its first micro-batch says so."""
        self.scored: dict[int, Reading] = {}
        """By micro-batch: the mean, or the total where it has a count."""
        self.clear()

    @property
    def losses(self) -> dict[int, float]:
        """What `scored` says; waits for the device."""
        return {microbatch: loss.value for microbatch, loss in self.scored.items()}

    def clear(self) -> None:
        """Nothing has been scored."""
        self.scored.clear()
        self._counts: dict[int, int] = {}
        self._metrics: dict[int, list[MetricSum]] = {}
        """By micro-batch, in the order of their names."""
        self._aux_losses: dict[tuple[int, int], tuple[list[Reading], int]] = {}
        """By layer and micro-batch, with the weight of the micro-batch."""

    def keep(self, losses: int, aux_losses: Callable[[int, int], bool]) -> None:
        """Forgets all but some.

        Args:
            losses: micro-batches whose loss and metrics stay, one bit each.
            aux_losses: whether those of (layer, micro-batch) stay.
        """
        for by_microbatch in (self.scored, self._counts, self._metrics):
            for microbatch in [number for number in by_microbatch if not losses >> number & 1]:
                del by_microbatch[microbatch]
        self._aux_losses = {place: total for place, total in self._aux_losses.items() if aux_losses(*place)}

    @property
    def scores(self) -> Scores:
        """All that has been scored."""
        metrics = [MetricSum()] * len(self._model.metrics)
        for of_one in self._metrics.values():
            metrics = [total.merged(one) for total, one in zip(metrics, of_one, strict=True)]
        aux_loss = MetricSum()
        for values, weight in self._aux_losses.values():
            total = MetricSum()
            for value in values:
                total = total.plus(weight * value.value, 1)
            aux_loss = aux_loss.merged(total)
        return Scores(self.losses, sum(self._counts.values()), len(self._counts), tuple(metrics), aux_loss)

    def loss(self, output: Any, targets: Any) -> Scored:
        """Runs the loss; `note` adds it to the others.

        Raises:
            UsageError: it returns neither a scalar nor total and count, or not always the same of them, or it writes
                its targets.
        """
        watched = self._watching.watch(targets)
        returned = self._model.loss(output, targets)
        self._watching.expect(watched, partial(_WRITTEN.format, what="the loss writes its targets"))
        total, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        what = "the loss returned"
        if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.is_floating_point():
            raise UsageError(
                f"{what} {describe(total)}, needed is a scalar tensor, the mean over the micro-batch, or "
                "LossOutput(total, count)"
            )
        scored = Scored(total, None if count is None else _whole_count(what, count))
        has_counts = scored.count is not None
        if self._has_counts is None:
            self._has_counts = has_counts
        elif self._has_counts is not has_counts:
            raise UsageError(f"{what} a count for some micro-batches and none for others: always return one, or never")
        return scored

    def note(self, microbatch: int, scored: Scored) -> None:
        """Counts the loss of a micro-batch."""
        self.scored[microbatch] = self._readings.note(scored.total)
        if scored.count is not None:
            self._counts[microbatch] = scored.count

    def measure(self, microbatch: int, output: Any, targets: Any) -> None:
        """Runs the metrics.

        Raises:
            UsageError: one returns neither a number nor total and count, or writes what it is given.
        """
        found = []
        with torch.no_grad():
            for name, metric in self._model.metrics.items():
                watched = self._watching.watch(output, targets)
                returned = metric(output, targets)
                what = f"the metric {name} writes what it is given"
                self._watching.expect(watched, partial(_WRITTEN.format, what=what))
                found.append(MetricSum().plus(*_total_and_count(name, returned)))
        self._metrics[microbatch] = found

    def note_aux_losses(self, layer: int, microbatch: int, values: Iterable[Reading], weight: int) -> None:
        """Counts the auxiliary losses of a layer and a micro-batch, instead of what was noted of them before.

        Args:
            values: as the layer has told them.
            weight: the count of the micro-batch, if losses have counts, else 1.
        """
        self._aux_losses[layer, microbatch] = (list(values), weight)


def _total_and_count(name: str, returned: Any) -> tuple[float, int]:
    what = f"the metric {name} returned"
    total, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, 1)
    total = plain(total)
    if isinstance(total, torch.Tensor) and total.numel() == 1 and not total.is_complex():
        total = total.item()
    if not isinstance(total, int | float):
        raise UsageError(
            f"{what} {describe(total)}, needed is a number, the mean over the micro-batch, or (total, count)"
        )
    return float(total), _whole_count(what, count)


def _whole_count(what: str, count: Any) -> int:
    value = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else plain(count)
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < _LARGEST_COUNT:
        raise UsageError(f"{what} {describe(count)} as its count, needed is a whole number, at least 0")
    if value != int(value):
        raise UsageError(f"{what} the count {value}, needed is a whole number: counts are added exactly")
    return int(value)
