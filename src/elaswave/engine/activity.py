"""What a worker's main thread is doing right now, for the heartbeat thread to tell.

Written by one thread and read by another: each change is one assignment of one tuple, so a reader sees a whole state.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from elaswave.observability.processes import ProcessorWaits, family_cpu_s
from elaswave.protocol.step.activity import DATA, RECOVER, START, action_kind
from elaswave.transport.interface import Handle

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
    """Processor time that this process and all that it has started have used, without the thread that asks: it tells of
    others, and is no work."""
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
        """What a heartbeat tells; called by one thread only.

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
