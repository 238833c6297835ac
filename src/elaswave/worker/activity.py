"""What a worker's main thread is doing right now, for the heartbeat thread to tell.

Written by one thread and read by another: each change is one assignment of one tuple, so a reader sees a whole state.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from elaswave.observability.processor_waits import ProcessorWaits
from elaswave.protocol.position import START
from elaswave.transport.interface import Handle

STIR_S = 0.01
"""Processor time that counts as a sign of life of a main thread that is at `START`."""


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


def own_cpu_clock() -> Callable[[], float]:
    """A clock of the processor time that the calling thread uses, in seconds; any thread may read it."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


class Activity:
    """The present state of one worker's main thread.

    Args:
        cpu_clock: of the main thread; its own if None.
    """

    def __init__(self, cpu_clock: Callable[[], float] | None = None) -> None:
        self.doing = Doing(START, True, (), time.monotonic())
        self._cpu_clock = own_cpu_clock() if cpu_clock is None else cpu_clock
        # Only the thread that tells writes these.
        self._stirred_cpu_s = 0.0
        self._stirred_s = self.doing.since_s
        self._told = self.doing
        self._waits: ProcessorWaits | None = None
        self._starved_s = 0.0

    @property
    def label(self) -> str:
        """Name of what is being done."""
        return self.doing.label

    def told(self) -> Doing:
        """What a heartbeat tells; called by one thread only.

        Making layers and reading data is one long action of unknown length. So while a worker starts,
        the time since its main thread last used the processor stands for the time since it began: it gets on,
        however slowly, or it stands still.
        """
        doing = self.doing
        if not doing.computing:
            return doing
        if doing.label != START:
            return doing._replace(starved_s=self._seen_starved_s(doing, time.monotonic()))
        cpu_s = self._cpu_clock()
        if cpu_s - self._stirred_cpu_s >= STIR_S:
            self._stirred_cpu_s, self._stirred_s = cpu_s, time.monotonic()
        return doing._replace(since_s=max(doing.since_s, self._stirred_s))

    def _seen_starved_s(self, doing: Doing, now_s: float) -> float:
        if self._waits is None or doing is not self._told:
            self._told, self._waits, self._starved_s = doing, ProcessorWaits(os.getpid(), now_s), 0.0
        else:
            self._starved_s += self._waits.look(now_s)
        return self._starved_s

    def compute(self, label: str) -> None:
        """The worker computes: it cannot be waiting for another worker."""
        self.doing = Doing(label, True, (), time.monotonic())

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
