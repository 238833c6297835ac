"""A probe that lets a job go on slowly until something has happened beside it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_OF_STEP_S = 0.7
"""Far below the time after which a worker that computes is held for lost."""


def log_of(run_dir: Path) -> Path:
    """The coordinator's log of a job."""
    return run_dir / "logs" / "coordinator.log"


class WaitsFor:
    """A probe: worker 0 does something in a step; from then on each of its steps waits for a line, but not for long.

    Args:
        path: of a log; need not exist yet.
        text: what it is to hold.
        do: done first.
        step: the first one that waits.
    """

    def __init__(self, path: Path, text: str, do: Callable[[], None] = lambda: None, *, step: int = 6) -> None:
        self.path, self.text, self.do, self.step = path, text, do, step
        self.is_done = False

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.worker, phase, index) != (0, "forward", 0) or machine.step < self.step:
            return
        if not self.is_done:
            self.is_done = True
            self.do()
        deadline_s = time.monotonic() + PATIENCE_OF_STEP_S
        while not (self.path.exists() and self.text in self.path.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a turn of the wait, which has a bound
