"""What the processes of a running job hold (threads, descriptors, memory), looked at again and again from outside."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elaswave.observability.processes import RunProcess, read_processes

LONG_LIVED = ("launcher", "template", "coordinator", "worker")
SAMPLES_MIN = 8
"""With fewer looks at a process nothing is said of its growth."""


class Held(NamedTuple):
    """What a process holds at one time."""

    threads: int
    descriptors: int
    memory_bytes: int


class Growth(NamedTuple):
    """What a process held in the second quarter of its life, and in the last one: medians."""

    name: str
    before: Held
    after: Held

    @property
    def threads(self) -> int:
        """More than before."""
        return self.after.threads - self.before.threads

    @property
    def descriptors(self) -> int:
        """More than before."""
        return self.after.descriptors - self.before.descriptors

    @property
    def memory_bytes(self) -> int:
        """More than before."""
        return self.after.memory_bytes - self.before.memory_bytes


def held_by(pid: int) -> Held | None:
    """What a process holds; None if it does not live, or is another user's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None  # it has ended, and is not reaped yet
    return Held(int(fields["Threads"]), descriptors, 1024 * int(fields["VmRSS"].split()[0]))


class GrowthWatch:
    """Looks at the long-lived processes of a job.

    Args:
        run_dir: of the job; need not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: dict[RunProcess, list[Held]] = {}

    def look(self) -> None:
        """Takes note of what they hold now."""
        for process in read_processes(self._run_dir):
            held = held_by(process.pid) if process.role in LONG_LIVED else None
            if held is not None:
                self._seen.setdefault(process, []).append(held)

    def growth(self) -> list[Growth]:
        """Of those that were seen often enough; of workers only the one that was seen longest."""
        workers = sorted((process for process in self._seen if process.role == "worker"), key=self._num_looks)
        shown = [process for process in self._seen if process.role != "worker"] + workers[-1:]
        return [
            growth_of(f"{process.role} {process.id}", self._seen[process])
            for process in shown
            if self._num_looks(process) >= SAMPLES_MIN
        ]

    def _num_looks(self, process: RunProcess) -> int:
        return len(self._seen[process])


def growth_of(name: str, samples: Sequence[Held]) -> Growth:
    """Compares the second quarter of a process's life with the last one; in the first one it gets ready.

    Args:
        name: of the process.
        samples: what it held, in order, at equal distances; at least four.
    """
    quarter = len(samples) // 4
    return Growth(name, _median(samples[quarter : 2 * quarter]), _median(samples[-quarter:]))


def _median(samples: Sequence[Held]) -> Held:
    return Held(*(int(statistics.median(values)) for values in zip(*samples)))
