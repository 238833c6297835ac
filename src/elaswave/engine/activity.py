"""What a worker's main thread is doing right now, for the heartbeat thread to tell, and how long its actions last.

`Activity` is written by one thread and read by another: each change is one assignment of one tuple, so a reader sees a
whole state. `ActionTimer` measures the actions of every device, and makes them last on an emulated one (`Pace`): the
engine calls it when an action is computed and before its output leaves.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple

from elaswave.observability.processes import ProcessorWaits, family_cpu_s
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.protocol.step.activity import DATA, RECOVER, START, action_kind
from elaswave.transport.interface import Handle
from elaswave.types import Action, Kind

STIR_S = 0.01
"""Processor time that counts as a sign of life of a worker that is at something for the first time."""
FIRST_KINDS = ("F", "B", "I", "W", "apply", "evaluate", DATA, RECOVER, START)
"""Kinds of what a person's code, or a compiler, may take any time for when it runs for the first time."""


class Doing(NamedTuple):
    """One state of the main thread."""

    label: str
    computing: bool
    waiting_on: tuple[int, ...]
    """Workers from or to which frames still move; empty where that is not known."""
    since_s: float
    """Monotonic time at which it began."""
    starved_s: float = 0.0
    """Seconds since its first heartbeat in which the worker has waited for a processor, if it computes."""
    is_first: bool = False
    """Whether nothing of the kind has run before."""
    began_s: float = 0.0
    """Then: `since_s`, which in what is told is the time at which a processor was used last."""


def work_cpu_s() -> float:
    """Measures the processor time that this process and all that it has started have used, without the thread that
    asks: it tells of others, and is no work."""
    return family_cpu_s(os.getpid()) - time.thread_time()


class Activity:
    """The present state of one worker's main thread.

    Args:
        cpu_clock: of the worker's work; read by the thread that tells.
    """

    def __init__(self, cpu_clock: Callable[[], float] = work_cpu_s) -> None:
        self._ran: set[str] = set()
        """What has run: kinds, actions with their stage."""
        self.compute(START)
        self._cpu_clock = cpu_clock
        # Only the thread that tells writes these.
        self._stirred_cpu_s = 0.0
        self._stirred_s = self.doing.since_s
        self._reported = self.doing
        self._waits: ProcessorWaits | None = None
        self._starved_s = 0.0

    @property
    def label(self) -> str:
        """Name of what is being done."""
        return self.doing.label

    def snapshot(self) -> Doing:
        """Finds what a heartbeat tells; it is called by one thread only.

        Making layers, reading data, loading a checkpoint, and whatever may have to be compiled first, is one long
        action of unknown length. So when a worker does such a thing for the first time, the time since it used a
        processor stands for the time since it began: it gets on, however slowly, or it stands still.
        """
        doing = self.doing
        if not doing.computing:
            return doing
        starved_s = self._seen_starved_s(doing, time.monotonic())
        if not doing.is_first:
            return doing._replace(starved_s=starved_s)
        cpu_s = self._cpu_clock()
        if abs(cpu_s - self._stirred_cpu_s) >= STIR_S:  # less: a process has ended, and with it its count
            self._stirred_cpu_s, self._stirred_s = cpu_s, time.monotonic()
        return doing._replace(since_s=max(doing.since_s, self._stirred_s), starved_s=starved_s)

    def _seen_starved_s(self, doing: Doing, now_s: float) -> float:
        if self._waits is None or doing is not self._reported:
            self._reported, self._waits, self._starved_s = doing, ProcessorWaits(os.getpid(), now_s), 0.0
        else:
            self._starved_s += self._waits.look(now_s)
        return self._starved_s

    def compute(self, label: str) -> None:
        """The worker computes: it cannot be waiting for another worker."""
        now_s = time.monotonic()
        is_first = _without_microbatch(label) not in self._ran and action_kind(label) in FIRST_KINDS
        self.doing = Doing(label, True, (), now_s, is_first=is_first, began_s=now_s)

    def has_run(self) -> None:
        """What the worker is at has run to its end: what is like it will take about as long."""
        self._ran.add(_without_microbatch(self.label))

    @contextmanager
    def building(self) -> Iterator[None]:
        """For a while the worker makes layers that it had not, or loads what is in them; they have not run yet."""
        self._ran.clear()
        with self.during(RECOVER):
            yield

    @contextmanager
    def during(self, label: str) -> Iterator[None]:
        """For a while the worker does something else than it has said; then it goes on with that, from anew."""
        before = self.doing
        self.compute(label)
        try:
            yield
        finally:
            if before.computing:
                self.compute(before.label)
            else:
                self.doing = before

    def wait(self, label: str, peers: tuple[int, ...] = ()) -> None:
        """The worker waits for others."""
        self.doing = Doing(label, False, peers, time.monotonic())

    def wait_on(self, label: str, peers: tuple[int, ...]) -> None:
        """The worker waits for those; if it did so before, it still does."""
        if self.doing[:3] != (label, False, peers):
            self.wait(label, peers)

    def wait_for(self, handles: Iterable[Handle]) -> None:
        """The worker waits, in what it does at present, for the peers of those transfers that have not ended."""
        self.wait(self.label, tuple(sorted({handle.peer for handle in handles if not handle.done})))


def _without_microbatch(label: str) -> str:
    return label.rstrip("0123456789")


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
        """Sets the frequency level's speed relative to the base level's, from the next action on."""
        self._level_speed = speed

    def slow_down(self, factor: float) -> None:
        """Leaves the device this share of its speed, from the next action on."""
        self._slowness = factor

    def seconds(self, kind: Kind, layers: range) -> float:
        """Computes how long an action lasts."""
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
