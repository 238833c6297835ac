"""Probes that let a job, or one worker, wait until something has happened beside it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elaswave.protocol.step.activity import WRITE

PATIENCE_OF_STEP_S = 1.0
"""Far below the time after which a worker that computes is held for lost."""


def log_of(run_dir: Path) -> Path:
    """The coordinator's log of a job."""
    return run_dir / "logs" / "coordinator.log"


@contextmanager
def held_up(machine: Any) -> Iterator[None]:
    """Holds a worker up inside a step: meanwhile it says that it waits for its disk, for which nobody is suspected. An
    action passes for a hang after two seconds, once the coordinator has seen steps that are slow enough to be seen.

    Args:
        machine: the worker's.
    """
    activity = machine.observer.activity
    before = activity.doing
    activity.wait(WRITE)
    try:
        yield
    finally:
        (activity.compute if before.computing else activity.wait)(before.label)


def wait_until(condition: Callable[[], bool], *, patience_s: float = 60.0) -> None:
    """Waits in a process of a job until something has happened; what cannot be read yet has not.

    Args:
        condition: looked at again and again.
        patience_s: the job fails after so long.
    """
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.01)
    raise AssertionError(f"waited for {patience_s:.0f} s in vain")


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
        if (machine.worker, machine.step) == (self.worker, self.step) and not self.has_happened():
            with held_up(machine):
                wait_until(self.has_happened, patience_s=self.patience_s)
