"""Losses and metrics of the micro-batches that end on this worker."""

import math
from typing import Any, NamedTuple

import torch

from elaswave.errors import UsageError
from elaswave.models.calls import describe
from elaswave.models.layers import ModelSpec
from elaswave.protocol.scores import MetricSum, Scores
from elaswave.worker.values import versions

_LARGEST_COUNT = 1 << 53


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
    """

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._has_counts: bool | None = None
        """Whether the loss returns counts; its first micro-batch says so."""
        self.losses: dict[int, float] = {}
        """By micro-batch: the mean, or the total where it has a count."""
        self.clear()

    def clear(self) -> None:
        """Nothing has been scored."""
        self.losses.clear()
        self._count = self._num_counted = 0
        self._metrics = {name: MetricSum() for name in self._model.metrics}
        self._aux_loss = MetricSum()

    @property
    def scores(self) -> Scores:
        """All that has been scored."""
        return Scores(dict(self.losses), self._count, self._num_counted, tuple(self._metrics.values()), self._aux_loss)

    def loss(self, microbatch: int, output: Any, targets: Any) -> Scored:
        """Runs the loss.

        Raises:
            UsageError: it returns neither a scalar nor total and count, or not always the same of them, or it writes
                its targets.
        """
        before = versions(targets)
        returned = self._model.loss(output, targets)
        _refuse_written(before, versions(targets), "the loss writes its targets")
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
        self.losses[microbatch] = float(total.detach())
        if scored.count is not None:
            self._count += scored.count
            self._num_counted += 1
        return scored

    def measure(self, output: Any, targets: Any) -> None:
        """Runs the metrics.

        Raises:
            UsageError: one returns neither a number nor total and count, or writes what it is given.
        """
        with torch.no_grad():
            for name, metric in self._model.metrics.items():
                before = versions(output, targets)
                returned = metric(output, targets)
                _refuse_written(before, versions(output, targets), f"the metric {name} writes what it is given")
                self._metrics[name] = self._metrics[name].plus(*_total_and_count(name, returned))

    def add_aux_loss(self, value: float) -> None:
        """Counts an auxiliary loss.

        Args:
            value: weighted with the count of its micro-batch, if losses have counts.
        """
        self._aux_loss = self._aux_loss.plus(value, 1)


def _refuse_written(before: list[int], now: list[int], what: str) -> None:
    if before != now:
        raise UsageError(
            f"{what}, which may be the dataset's own memory, read again in later passes, or what the backward needs: "
            "work on a copy (targets = targets.clone())"
        )


def _total_and_count(name: str, returned: Any) -> tuple[float, int]:
    what = f"the metric {name} returned"
    total, count = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, 1)
    if isinstance(total, torch.Tensor) and total.numel() == 1 and not total.is_complex():
        total = total.item()
    if not isinstance(total, int | float):
        raise UsageError(
            f"{what} {describe(total)}, needed is a number, the mean over the micro-batch, or (total, count)"
        )
    return float(total), _whole_count(what, count)


def _whole_count(what: str, count: Any) -> int:
    value = count.item() if isinstance(count, torch.Tensor) and count.numel() == 1 else count
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < _LARGEST_COUNT:
        raise UsageError(f"{what} {describe(count)} as its count, needed is a whole number, at least 0")
    if value != int(value):
        raise UsageError(f"{what} the count {value}, needed is a whole number: counts are added exactly")
    return int(value)
