"""How long a process waits for a processor: it could run, and its host has none for it.

Linux counts that for each thread, in ``/proc/PID/task/TID/schedstat``: nanoseconds on a processor, nanoseconds in wait
of one, turns. A wait is added when it ends; before that it shows as a thread that is runnable (R) and whose counts do
not change. A stopped (T), sleeping (S) or blocked (D) thread waits for something else.

Workers look at themselves with every heartbeat of an action, so the files are read by the plainest calls: with
`pathlib` a look took three times as long, and most of a heartbeat went into it.
"""

import os


class ProcessorWaits:
    """Looks at one process, again and again.

    Args:
        pid: its id.
        now_s: monotonic time of the first look, which this is.
    """

    def __init__(self, pid: int, now_s: float) -> None:
        self._folder = f"/proc/{pid}/task"
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
        try:
            threads = os.listdir(self._folder)
        except OSError:
            return {}  # it has ended
        found = {thread: tuple(map(int, self._contents(thread, "schedstat").split())) for thread in threads}
        return {thread: counts for thread, counts in found.items() if len(counts) == 3}

    def _is_runnable(self, thread: str) -> bool:
        return self._contents(thread, "stat").rpartition(b")")[2].split()[:1] == [b"R"]

    def _contents(self, thread: str, name: str) -> bytes:
        """Of a file of one thread; nothing if the thread has just ended, or the kernel does not count."""
        try:
            file = os.open(f"{self._folder}/{thread}/{name}", os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.read(file, 4096)
        except OSError:
            return b""
        finally:
            os.close(file)
