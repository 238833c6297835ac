"""Probes that let a job, or one worker, wait until something has happened beside it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_OF_STEP_S = 1.0
"""Far below the time after which a worker that computes is held for lost."""


def log_of(run_dir: Path) -> Path:
    """The coordinator's log of a job."""
    return run_dir / "logs" / "coordinator.log"


class WaitsFor:
    """A probe: worker 0 does something in a step; from then on each step waits for a line, but not for long.

    Args:
        path: of a log; need not exist yet.
        text: what it is to hold.
        do: done first.
        step: the first one that waits.
        patience_s: of a step.
    """

    def __init__(
        self,
        path: Path,
        text: str,
        do: Callable[[], None] = lambda: None,
        *,
        step: int = 6,
        patience_s: float = PATIENCE_OF_STEP_S,
    ) -> None:
        self.path, self.text, self.do, self.step, self.patience_s = path, text, do, step, patience_s
        self.is_done = False

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (phase, index) != ("forward", 0) or machine.step < self.step:
            return
        if machine.worker != min(machine.layout.workers):
            return  # one that waits is enough; worker 0, unless it is lost
        if machine.worker == 0 and not self.is_done:
            self.is_done = True
            self.do()
        deadline_s = time.monotonic() + self.patience_s
        while not (self.path.exists() and self.text in self.path.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a turn of the wait, which has a bound


class HeldUntil:
    """A probe: a worker, before it makes a step, waits until something has happened.

    Args:
        worker: its id.
        step: the step.
        has_happened: looked at again and again.
        patience_s: the job fails after so long.
    """

    def __init__(self, worker: int, step: int, has_happened: Callable[[], bool], *, patience_s: float = 60.0) -> None:
        self.worker, self.step, self.has_happened, self.patience_s = worker, step, has_happened, patience_s

    def reached(self, phase: str, index: int, machine: Any) -> None:
        deadline_s = time.monotonic() + self.patience_s
        while (machine.worker, machine.step) == (self.worker, self.step) and not self.has_happened():
            assert time.monotonic() < deadline_s, f"worker {self.worker} has waited in step {self.step} in vain"
            time.sleep(0.01)
