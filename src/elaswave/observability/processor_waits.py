"""How long a process waits for a processor: it could run, and its host has none for it.

Linux counts that for each thread, in ``/proc/PID/task/TID/schedstat``: nanoseconds on a processor, nanoseconds in wait
of one, turns. A wait is added when it ends; before that it shows as a thread that is runnable (R) and whose counts do
not change. A stopped (T), sleeping (S) or blocked (D) thread waits for something else.
"""

import os
from pathlib import Path


class ProcessorWaits:
    """Looks at one process, again and again.

    Args:
        pid: its id.
        now_s: monotonic time of the first look, which this is.
    """

    def __init__(self, pid: int, now_s: float) -> None:
        self._folder = Path(f"/proc/{pid}/task")
        self._looked_s = now_s
        self._counts = self._read()

    def look(self, now_s: float) -> float:
        """Takes another look.

        Args:
            now_s: monotonic time.
        Returns:
            Seconds since the look before in which the process has waited for a processor: those of the thread that
            waited longest, since the others may depend on it. 0 if the process has ended, or its kernel does not count.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        before, self._counts = self._counts, self._read()
        longest_s = 0.0
        for thread, counts in self._counts.items():
            known = before.get(thread)
            if known is None:
                continue  # it has begun since
            if counts != known:
                longest_s = max(longest_s, (counts[1] - known[1]) * 1e-9)
            elif self._is_runnable(thread):
                longest_s = passed_s
        return min(longest_s, passed_s)  # a wait that has ended may have begun before that look, and have been counted

    def _read(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        try:
            for thread in os.listdir(self._folder):
                found[thread] = tuple(map(int, (self._folder / thread / "schedstat").read_text().split()))
        except OSError:
            pass  # it, or one of its threads, has just ended; or the kernel does not count
        return {thread: counts for thread, counts in found.items() if len(counts) == 3}

    def _is_runnable(self, thread: str) -> bool:
        try:
            stat = (self._folder / thread / "stat").read_text(errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "R"
