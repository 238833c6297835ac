"""Losses and metrics of the micro-batches that end on this worker."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from elaswave.config.values import plain
from elaswave.devices.interface import Reading, Readings
from elaswave.engine.checks.values import Watching
from elaswave.errors import UsageError
from elaswave.models.layers import ModelSpec, describe
from elaswave.protocol.step.scores import MetricSum, Scores

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
