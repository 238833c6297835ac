"""Costs from the timings of a running job: robust against noise, kept current. Pure: timings come in, costs go out.

A worker reports how long its actions took: hops of some layers, forward or backward. What is wanted are seconds per
layer, so that layers can be moved, and speeds of workers, so that work can be. Both follow in three steps:

1. *Robust*: of each worker, range of layers and kind the median over the last reports counts, so that a page fault or
   a neighbour on the machine does not.
2. *Speeds*: workers that ran the same layers are compared with each other. The one in the middle, of two the faster
   one, has speed 1: machines slow down, they do not speed up. Between stages nothing can be compared, so a stage that
   is slow as a whole has costly layers.
3. *Layers*: ranges are cut at each other's ends. Within a piece, layers share seconds as analytic costs do; the
   pieces' seconds solve the ranges' in the least squares, as near to the analytic ones, scaled, as possible. With
   ordinary stages each is a piece of its own; shared boundary layers and former layouts separate more.

A backward that was only ever measured whole is parted as analytic costs part it.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.types import Kind

WINDOW = 20
"""Reports that count, of each worker, range and kind."""
SMALLEST_SHARE = 1e-3
"""Of a layer, relative to the mean layer: what is free by analytic costs may cost something after all."""


class ActionTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How long one worker's actions of one kind on one range of layers took: one entry of a report."""

    worker: int
    stage: int
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    kind: Kind
    """F, B, I or W."""
    seconds: float
    """Median of the actions (their mean under a quota of CPU time), computing only: without waits for input."""
    count: int
    """Number of actions."""
    level_speed: float = 1.0
    """Speed of the frequency level at which the worker ran, relative to its device's base level."""

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: no layer, no action, a speed of none, or seconds that are negative or not finite.
        """
        if (
            not 0 <= self.start < self.stop
            or self.count < 1
            or not 0 <= self.seconds < float("inf")
            or not 0 < self.level_speed < float("inf")
        ):
            raise ValueError(
                f"worker {self.worker} reports {self.count} actions of layers [{self.start}, {self.stop}) of "
                f"{self.seconds} s at speed {self.level_speed}: needed are at least one action and layer, a time of at "
                "least 0 and a speed above 0"
            )


class _Key(msgspec.Struct, frozen=True):
    """What is timed: hashable."""

    worker: int
    start: int
    stop: int
    kind: Kind


class CostMeter:
    """Collects reports and makes costs of them.

    Args:
        analytic: costs of the same layers: their bytes are taken over, their seconds only as shares.
        window: reports that count.
    Raises:
        ValueError: a window below 1.
    """

    def __init__(self, analytic: Costs, *, window: int = WINDOW) -> None:
        if window < 1:
            raise ValueError(f"the window is {window} reports, needed: at least 1")
        self._analytic = analytic
        self._window = window
        self._num_reports = 0
        self._seconds: dict[_Key, deque[float]] = {}
        self._latest: dict[_Key, int] = {}
        self._overheads_s: deque[float] = deque(maxlen=window)

    @property
    def num_reports(self) -> int:
        """Reports so far."""
        return self._num_reports

    def add(self, timings: Sequence[ActionTiming], *, speeds: Mapping[int, float] | None = None) -> None:
        """Takes in one report: what some or all workers did in a step.

        Args:
            timings: of the step.
            speeds: of workers, as far as they are known to differ from 1 (an older device): their seconds are
                converted to those of a worker of speed 1. A frequency level's speed is in the timing itself.
        Raises:
            ValueError: layers that the analytic costs lack, or a speed that is not above 0.
        """
        self._num_reports += 1
        for timing in timings:
            if timing.stop > self._analytic.num_layers:
                raise ValueError(
                    f"worker {timing.worker} reports layers [{timing.start}, {timing.stop}), but the analytic costs "
                    f"have {self._analytic.num_layers} layers: give those of the model that runs"
                )
            speed = 1.0 if speeds is None else speeds.get(timing.worker, 1.0)
            if not 0 < speed < float("inf"):
                raise ValueError(f"the speed of worker {timing.worker} is {speed}, needed: above 0 and finite")
            key = _Key(timing.worker, timing.start, timing.stop, timing.kind)
            self._seconds.setdefault(key, deque(maxlen=self._window)).append(
                timing.seconds * timing.level_speed * speed
            )
            self._latest[key] = self._num_reports
        self._forget()

    def add_step(self, step_s: float, run_s: float) -> None:
        """Takes in how long a whole step took, and its actions.

        Args:
            step_s: from the beginning of the step to that of the next one.
            run_s: of that until its last action has ended.
        Raises:
            ValueError: a time that is negative, or a part that is longer than the whole.
        """
        if not 0 <= run_s <= step_s < float("inf"):
            raise ValueError(f"a step of {step_s} s with {run_s} s of actions: needed 0 <= actions <= step")
        self._overheads_s.append(step_s - run_s)

    def speeds(self) -> dict[int, float]:
        """Computes the speed of every worker that has reported, relative to those that ran the same layers; lists ids
        in ascending order."""
        base = self._base_seconds()
        ratios: dict[int, list[float]] = {}
        for key, seconds in self._medians().items():
            ratios.setdefault(key.worker, []).append(base[key.start, key.stop, key.kind] / seconds if seconds else 1.0)
        # A layer that takes no measurable time tells nothing.
        return {
            worker: statistics.median([ratio for ratio in values if ratio > 0] or [1.0])
            for worker, values in sorted(ratios.items())
        }

    def relative_speeds(
        self, timings: Sequence[ActionTiming], speeds: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Computes how fast workers were in one report, relative to what all reports say of the same layers.

        Args:
            timings: of the report, which has been added.
            speeds: as it was added with.
        Returns:
            Worker -> expected over measured seconds of all its actions; a worker that runs its layers alone is compared
            with its own past. Those whose actions took no measurable time are left out.
        """
        base = self._base_seconds()
        expected: dict[int, float] = {}
        taken: dict[int, float] = {}
        for timing in timings:
            worker, seconds = timing.worker, base[timing.start, timing.stop, timing.kind]
            speed = timing.level_speed * (1.0 if speeds is None else speeds.get(worker, 1.0))
            expected[worker] = expected.get(worker, 0.0) + timing.count * seconds
            taken[worker] = taken.get(worker, 0.0) + timing.count * timing.seconds * speed
        return {worker: expected[worker] / s for worker, s in taken.items() if s > 0 and expected[worker] > 0}

    def costs(self) -> Costs:
        """Costs by what has been measured; by the analytic costs, scaled, where nothing has.

        Raises:
            ValueError: no timing has been reported.
        """
        if not self._seconds:
            raise ValueError("no action has been timed: add a report first")
        layers = self._analytic.layers
        forward = self._factors("F", [layer.forward_s for layer in layers])
        backward = self._factors("B", [layer.input_gradient_s + layer.weight_gradient_s for layer in layers])
        inputs = self._factors("I", [layer.input_gradient_s for layer in layers])
        weights = self._factors("W", [layer.weight_gradient_s for layer in layers])
        whole = [total for total in (forward, backward, inputs, weights) if total is not None]
        # One kind that is missing (a run that only evaluates) goes by the others.
        scale = float(np.median([np.median(seconds[1]) for seconds in whole]))
        measured = []
        for index, layer in enumerate(layers):
            input_s, weight_s = self._halves(index, inputs, weights, backward, scale)
            measured.append(
                msgspec.structs.replace(
                    layer,
                    forward_s=layer.forward_s * scale if forward is None else float(forward[0][index]),
                    input_gradient_s=input_s,
                    weight_gradient_s=weight_s,
                )
            )
        workers = {key.worker for key in self._seconds}
        return Costs(
            layers=tuple(measured),
            step_overhead_s=(
                statistics.median(self._overheads_s) if self._overheads_s else self._analytic.step_overhead_s
            ),
            end_link=None if self._overheads_s else self._analytic.end_link,
            source=f"measured: medians of the last {min(self._num_reports, self._window)} reports of {len(workers)} "
            "workers; analytic bytes",
        )

    def _halves(
        self,
        index: int,
        inputs: "_Solution | None",
        weights: "_Solution | None",
        backward: "_Solution | None",
        scale: float,
    ) -> tuple[float, float]:
        """Computes the seconds of both halves of a layer's backward."""
        layer = self._analytic.layers[index]
        if inputs is not None and weights is not None:
            return float(inputs[0][index]), float(weights[0][index])
        if backward is None:
            return layer.input_gradient_s * scale, layer.weight_gradient_s * scale
        whole = layer.input_gradient_s + layer.weight_gradient_s
        share = layer.input_gradient_s / whole if whole > 0 else 0.5
        seconds = float(backward[0][index])
        return seconds * share, seconds * (1 - share)

    def _forget(self) -> None:
        """Drops what is older than the window where newer reports tell of the same layers."""
        oldest = self._num_reports - self._window
        current: dict[Kind, set[int]] = {}
        for key, report in self._latest.items():
            if report > oldest:
                current.setdefault(key.kind, set()).update(range(key.start, key.stop))
        for key, report in list(self._latest.items()):
            if report <= oldest and current.get(key.kind, set()).issuperset(range(key.start, key.stop)):
                del self._latest[key], self._seconds[key]

    def _medians(self) -> dict[_Key, float]:
        return {key: statistics.median(seconds) for key, seconds in self._seconds.items()}

    def _base_seconds(self) -> dict[tuple[int, int, Kind], float]:
        """Computes the seconds of a worker of speed 1: takes the lower median of those who ran a range."""
        by_range: dict[tuple[int, int, Kind], list[float]] = {}
        for key, seconds in self._medians().items():
            by_range.setdefault((key.start, key.stop, key.kind), []).append(seconds)
        return {where: statistics.median_low(values) for where, values in by_range.items()}

    def _factors(self, kind: Kind, analytic_s: Sequence[float]) -> "_Solution | None":
        """Computes the seconds of each layer for one kind of action, and the factors to the analytic ones; returns None
        if none was timed."""
        ranges = {(start, stop): s for (start, stop, each), s in self._base_seconds().items() if each == kind}
        if not ranges:
            return None
        return _solve(ranges, analytic_s)


_Solution = tuple[np.ndarray, np.ndarray]


def _solve(ranges: Mapping[tuple[int, int], float], analytic_s: Sequence[float]) -> _Solution:
    """Computes the seconds of layers from the seconds of ranges.

    Args:
        ranges: [start, stop) -> seconds.
        analytic_s: of each layer; only their proportions count.
    Returns:
        Seconds of each layer, float64 [num_layers], none negative; and how many times the analytic ones they are.
    """
    shares = np.array(analytic_s, dtype=np.float64)
    mean = shares.mean() or 1.0
    shares = np.maximum(shares, SMALLEST_SHARE * mean)
    cuts = sorted({0, len(shares), *(end for pair in ranges for end in pair)})
    piece_of = np.searchsorted(np.array(cuts), np.arange(len(shares)), side="right") - 1
    sums = np.add.reduceat(shares, cuts[:-1])
    measured_s = np.array(list(ranges.values()))
    # Row: a range; column: a piece; entry: its analytic seconds if it is in the range.
    inside = np.array([[start <= cut < stop for cut in cuts[:-1]] for start, stop in ranges], dtype=np.float64)
    rows = inside * sums
    overall = float(measured_s.sum() / rows.sum())
    # Deviations from the overall factor, each equation relative to its size, so that short ranges count as much as
    # long ones; of all solutions the one with the smallest deviations.
    weights = 1.0 / np.maximum(rows.sum(axis=1) * max(overall, 1e-300), 1e-300)
    right = (measured_s - rows.sum(axis=1) * overall) * weights
    deviations = np.linalg.lstsq(rows * weights[:, None] * max(overall, 1e-300), right, rcond=1e-9)[0]
    factors = np.maximum(overall * (1 + deviations), 0.0)[piece_of]
    return factors * shares, factors


def prediction_error(predicted_s: float, measured_s: Sequence[float]) -> float:
    """Computes by how much a predicted step is off the steps that were run: positive if it promised less time than they
    took.

    Args:
        predicted_s: of a step.
        measured_s: of the steps; their median counts.
    Returns:
        ``(measured - predicted) / measured``.
    Raises:
        ValueError: no step, or one that took no time.
    """
    if not measured_s or not statistics.median(measured_s) > 0:
        raise ValueError(f"steps of {list(measured_s)[:8]} s are no measure: needed is at least one above 0")
    median_s = statistics.median(measured_s)
    return (median_s - predicted_s) / median_s
