"""How long actions last: measured on every device, and made to last on an emulated one.

Both hang on `ActionTimer.on_computed`, which the engine calls when an action is computed and before its output leaves.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

from elaswave.planning.costs.profiled import ActionTiming
from elaswave.types import Action, Kind

_SLACK_S = 2e-3
"""An action that begins this soon after the one before has followed it at once: what the processor needed in between
(waking up, sending, the next action's bookkeeping) is no part of the device's time."""
_SLACK_FRACTION = 0.05
_KEPT = 256
"""Newest times kept for each kind of action."""


class Pace:
    """The pace of an emulated device.

    Args:
        layer_s: seconds of each layer's forward, input gradient and weight gradient at speed 1.
        speed: of this worker.
        rest: blocks until a monotonic time while bytes move.
    """

    def __init__(
        self, layer_s: Sequence[tuple[float, float, float]], speed: float, rest: Callable[[float], None]
    ) -> None:
        self._layer_s = layer_s
        self._speed = speed
        self._level_speed = 1.0
        self._slowness = 1.0
        self._rest = rest
        self._last_end_s = 0.0
        """When the device would have done the last action."""

    def set_level_speed(self, speed: float) -> None:
        """The frequency level's speed relative to the base level's, from the next action on."""
        self._level_speed = speed

    def slow_down(self, factor: float) -> None:
        """Leaves the device this share of its speed, from the next action on."""
        self._slowness = factor

    def seconds(self, kind: Kind, layers: range) -> float:
        """How long an action lasts."""
        parts = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}[kind]
        speed = self._speed * self._level_speed * self._slowness
        return sum(self._layer_s[layer][part] for layer in layers for part in parts) / speed

    def hold(self, kind: Kind, layers: range, start_s: float) -> float:
        """Rests until an action that began at a time would be done.

        Returns:
            Monotonic time at which the device began it.
        Raises:
            InterruptedWaitError: a new generation begins.
        """
        duration_s = self.seconds(kind, layers)
        if start_s - self._last_end_s <= min(_SLACK_S, _SLACK_FRACTION * duration_s):
            start_s = min(start_s, self._last_end_s)
        self._last_end_s = start_s + duration_s
        self._rest(self._last_end_s)
        return start_s


class ActionTimes:
    """Measured seconds of one worker's actions by stage, layers and kind.

    Args:
        worker: its id.
        average: of the seconds of many actions.
    """

    def __init__(self, worker: int, average: Callable[[Sequence[float]], float] = median) -> None:
        self._worker = worker
        self._average = average
        self._times: dict[tuple[int, int, int, Kind], deque[float]] = {}

    def add(self, action: Action, layers: range, seconds: float) -> None:
        """An action has taken so long."""
        key = (action.stage, layers.start, layers.stop, action.kind)
        self._times.setdefault(key, deque(maxlen=_KEPT)).append(seconds)

    def take(self) -> list[ActionTiming]:
        """Averages of what was added since the last call."""
        taken, self._times = self._times, {}
        return [
            ActionTiming(
                worker=self._worker,
                stage=stage,
                start=start,
                stop=stop,
                kind=kind,
                seconds=self._average(times),
                count=len(times),
            )
            for (stage, start, stop, kind), times in taken.items()
        ]


class ActionTimer:
    """Measures every action of a worker, after making it last where the device is emulated.

    Args:
        worker: its id.
        pace: of an emulated device; None for a real one.
        rest: blocks until a monotonic time while bytes move.
        has_quota: whether the worker's CPU time is bounded. Then it stands still for a part of every period, so that
            few actions last long and most are short: their mean counts, else their median.
    """

    def __init__(
        self, worker: int, pace: Pace | None, rest: Callable[[float], None], *, has_quota: bool = False
    ) -> None:
        self.pace = pace
        self.times = ActionTimes(worker, fmean if has_quota else median)
        self._rest = rest
        self._slowness = 1.0
        """Of a real device."""

    def slow_down(self, factor: float) -> None:
        """Makes every action last as long as at this share of the device's speed, from the next one on.

        Args:
            factor: above 0; 1 ends it.
        """
        if self.pace is not None:
            self.pace.slow_down(factor)
        else:
            self._slowness = factor

    @property
    def holds(self) -> bool:
        """Whether actions are made to last longer than they take."""
        return self.pace is not None or self._slowness < 1.0

    def on_measured(self, action: Action, layers: range, seconds: float) -> None:
        """A device that computes behind the worker's back has taken so long for an action."""
        self.times.add(action, layers, seconds)

    def on_computed(self, action: Action, layers: range, start_ns: int) -> None:
        """An action has been computed; holds it until an emulated device would be done."""
        start_s = start_ns * 1e-9
        if self.pace is not None:
            start_s = self.pace.hold(action.kind, layers, start_s)
        elif self._slowness < 1.0:
            self._rest(start_s + (time.monotonic() - start_s) / self._slowness)
        self.times.add(action, layers, time.monotonic() - start_s)
