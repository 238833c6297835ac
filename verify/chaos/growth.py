"""What the processes of a running job hold (threads, descriptors, memory), looked at again and again from outside.

Each worker has links to all others, so what a process holds follows the number of workers. Growth is what it holds more
later than earlier beside equally many workers.
"""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elaswave.observability.processes import RunProcess, read_processes

LONG_LIVED = ("launcher", "forkserver", "coordinator", "worker")
SAMPLES_MIN = 4
"""With fewer looks at a process beside equally many workers, earlier or later, nothing is said of its growth."""
HELD_MORE_MAX = 2
"""So many threads or descriptors more are no growth: a connection that comes, a file that is being written."""
MEMORY_MORE_MAX = 32 << 20
"""Bytes; so much more is no growth: what an allocator keeps for later."""


class Held(NamedTuple):
    """What a process holds at one time."""

    threads: int
    descriptors: int
    memory_bytes: int


class Growth(NamedTuple):
    """What a process held in the second quarter of its life, and in its second half: medians."""

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

    @property
    def is_large(self) -> bool:
        """Whether it is more than what comes and goes."""
        return max(self.threads, self.descriptors) > HELD_MORE_MAX or self.memory_bytes > MEMORY_MORE_MAX

    def __str__(self) -> str:
        before, after = self.before, self.after
        return (
            f"{self.name}: {before.threads} -> {after.threads} threads, {before.descriptors} -> {after.descriptors} "
            f"descriptors, {before.memory_bytes / 2**20:.1f} -> {after.memory_bytes / 2**20:.1f} MiB"
        )


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
        self._seen: dict[RunProcess, list[tuple[int, Held]]] = {}

    def look(self) -> None:
        """Takes note of what they hold now."""
        found = {process: held_by(process.pid) for process in read_processes(self._run_dir)}
        num_workers = sum(held is not None and process.role == "worker" for process, held in found.items())
        for process, held in found.items():
            if held is not None and process.role in LONG_LIVED:
                self._seen.setdefault(process, []).append((num_workers, held))

    def growth(self) -> list[Growth]:
        """Of those that were seen often enough; of workers only the one that was seen longest."""
        workers = sorted((process for process in self._seen if process.role == "worker"), key=self._num_looks)
        shown = [process for process in self._seen if process.role != "worker"] + workers[-1:]
        found = [growth_of(f"{process.role} {process.id}", self._seen[process]) for process in shown]
        return [growth for growth in found if growth is not None]

    def _num_looks(self, process: RunProcess) -> int:
        return len(self._seen[process])


def growth_of(name: str, samples: Sequence[tuple[int, Held]]) -> Growth | None:
    """Compares the second quarter of a process's life with its second half; in the first quarter it gets ready.

    Args:
        name: of the process.
        samples: (number of workers, what the process held), in order, at equal distances.
    Returns:
        Beside as many workers as in most samples of the shorter of both times; None if there are too few.
    """
    quarter, half = len(samples) // 4, len(samples) // 2
    earlier, later = _by_size(samples[quarter:half]), _by_size(samples[half:])
    counts = {size: min(len(earlier[size]), len(later[size])) for size in earlier if size in later}
    size = max(counts, key=counts.__getitem__, default=None)
    if size is None or counts[size] < SAMPLES_MIN:
        return None
    return Growth(name, _median(earlier[size]), _median(later[size]))


def _by_size(samples: Sequence[tuple[int, Held]]) -> dict[int, list[Held]]:
    found: dict[int, list[Held]] = {}
    for size, held in samples:
        found.setdefault(size, []).append(held)
    return found


def _median(samples: Sequence[Held]) -> Held:
    return Held(*(int(statistics.median(values)) for values in zip(*samples)))
