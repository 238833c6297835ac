"""What a worker's main thread is doing right now, for the heartbeat thread to tell.

Written by one thread and read by another: each change is one assignment of one tuple, so a reader sees a whole state.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

from elaswave.comm.transport import Handle


class Doing(NamedTuple):
    """One state of the main thread."""

    label: str
    computing: bool
    waiting_on: tuple[int, ...]
    """Workers from or to which frames still move; empty where that is not known."""
    since_s: float
    """Monotonic time at which it began."""


class Activity:
    """The present state of one worker's main thread."""

    def __init__(self) -> None:
        self.doing = Doing("start", False, (), time.monotonic())

    @property
    def label(self) -> str:
        """Name of what is being done."""
        return self.doing.label

    def compute(self, label: str) -> None:
        """The worker computes: it cannot be waiting for anybody."""
        self.doing = Doing(label, True, (), time.monotonic())

    def wait(self, label: str, peers: tuple[int, ...] = ()) -> None:
        """The worker waits for others."""
        self.doing = Doing(label, False, peers, time.monotonic())

    def wait_for(self, handles: Iterable[Handle]) -> None:
        """The worker waits, in what it does at present, for the peers of those transfers that have not ended."""
        self.wait(self.label, tuple(sorted({handle.peer for handle in handles if not handle.done})))
