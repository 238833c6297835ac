"""What a worker's main thread is doing right now, for the heartbeat thread to tell.

Written by one thread and read by another: each change is one assignment of one tuple, so a reader sees a whole state.
"""

import time
from typing import NamedTuple


class Doing(NamedTuple):
    """One state of the main thread."""

    label: str
    computing: bool
    waiting_on: tuple[int, ...]
    """Workers whose frames it waits for; empty where that is not known."""
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
