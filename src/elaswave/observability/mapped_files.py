"""Files that processes have mapped into memory, and which of them have become shorter since.

A process that reads a page of a mapping behind the end of its file is killed by SIGBUS, wherever it stands, and has no
chance to say which file it was. Whoever reads there next dies as well. So who sees such a death looks which mappings
reach behind the end of their file: in ``/proc/PID/maps`` of those that live, and in what was seen of all a while ago,
since the one that died may have been the only one.
"""

import mmap
import os
from collections.abc import Iterable

FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""Between two looks, which become rarer: what a job maps it maps at its beginning."""


class MappedFiles:
    """What the processes of one host's part of a job have mapped.

    Args:
        now_s: monotonic time.
    """

    def __init__(self, now_s: float) -> None:
        self._ends: dict[str, int] = {}
        """Path -> up to where it was mapped, in bytes."""
        self._has_begun = False
        self._interval_s = FIRST_LOOK_S
        self._due_s = now_s + FIRST_LOOK_S

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look; says so once."""
        if now_s < self._due_s:
            return False
        self._interval_s = min(2 * self._interval_s, LAST_LOOK_S)
        self._due_s = now_s + self._interval_s
        return True

    def has_begun(self) -> None:
        """The first step has been made, and with it the first micro-batches: now it is time, whenever it was last."""
        if not self._has_begun:
            self._has_begun, self._due_s, self._interval_s = True, 0.0, FIRST_LOOK_S

    def look(self, pids: Iterable[int]) -> None:
        """Notes what these processes have mapped now."""
        for pid in pids:
            for path, end in _mapped_by(pid).items():
                self._ends[path] = max(end, self._ends.get(path, 0))

    def cut_short(self, pids: Iterable[int]) -> list[str]:
        """The files that end before what is, or was, mapped of them: what is to be said of each.

        Others may be about to read there too, so what was seen before is tried first: it takes a hundredth of a look.
        """
        found = self._cut_short()
        if not found:
            self.look(pids)
            found = self._cut_short()
        return found

    def _cut_short(self) -> list[str]:
        found = []
        for path, end in sorted(self._ends.items()):
            try:
                size = os.stat(path).st_size
            except OSError:
                continue  # one that is gone is kept by its mappings as it was
            if end > -(-size // mmap.PAGESIZE) * mmap.PAGESIZE:
                found.append(f"{path}, of which {end} bytes are mapped into memory, has {size} now")
        return found


def _mapped_by(pid: int) -> dict[str, int]:
    """Path -> up to where a process has mapped it for reading, as ``/proc/PID/maps`` has it."""
    ends: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}  # it has ended
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(b"/") or not fields[1].startswith(b"r"):
            continue
        begin, _, stop = fields[0].partition(b"-")
        path = os.fsdecode(fields[5])
        end = int(fields[2], 16) + int(stop, 16) - int(begin, 16)
        if not path.endswith(" (deleted)") and not path.startswith("/dev/"):
            ends[path] = max(end, ends.get(path, 0))
    return ends
