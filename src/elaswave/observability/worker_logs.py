"""Logs of workers in a run's folder: their names, their last lines, and copies of those that other hosts have.

A host that has a run folder of its own sends what its workers print. The coordinator appends it to a file of the same
name in its own folder, so that one folder tells of all workers. What is sent of one worker is bounded.
"""

import os
from pathlib import Path

from elaswave.untrusted import open_binary, open_regular

LOGS_DIR = "logs"
LINES = 5
"""So many last lines of a lost worker stand in the recovery's report."""
TAIL_BYTES = 4096
"""In so many last bytes they are looked for; more of one line is left out."""
SENT_AT_ONCE_BYTES = 16 << 10
SENT_MAX_BYTES = 4 << 20
"""Of one worker's log; what it prints beyond that stands on its host."""


def worker_log(worker: int) -> str:
    """The name of a worker's log."""
    return f"worker-{worker}.log"


def last_lines(run_dir: Path, worker: int) -> list[str]:
    """What a worker has printed last, as far as it is known here; a line that was cut is shown as it is."""
    try:
        with open_binary(run_dir / LOGS_DIR / worker_log(worker)) as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LINES:]


def add_to_copy(run_dir: Path, worker: int, text: str) -> None:
    """Appends to the copy of a log that another host has.

    Raises:
        OSError: the folder cannot be written.
    """
    path = run_dir / LOGS_DIR / worker_log(worker)
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as log:
        log.write(text)


class LogTail:
    """What of one worker's log has still to be sent.

    Args:
        run_dir: of its host.
        worker: its id.
    """

    def __init__(self, run_dir: Path, worker: int) -> None:
        self._path = run_dir / LOGS_DIR / worker_log(worker)
        self._num_sent = 0

    def next(self, *, is_last: bool = False) -> str:
        """The next part; empty if there is none.

        Args:
            is_last: the worker has ended: what does not fit is left out before its last words, and not after them.
        """
        try:
            size = self._path.stat().st_size
        except OSError:
            return ""
        if self._num_sent >= SENT_MAX_BYTES and not is_last:
            return ""
        skipped = max(0, size - self._num_sent - TAIL_BYTES) if is_last else 0
        begin, num_bytes = self._num_sent + skipped, TAIL_BYTES if is_last else SENT_AT_ONCE_BYTES
        if begin >= size:
            return ""
        try:
            with open_binary(self._path) as log:
                log.seek(begin)
                part = log.read(num_bytes)
        except OSError:
            return ""
        self._num_sent = begin + len(part)
        text = part.decode(errors="replace")
        if skipped:
            text = f"\n[{skipped} bytes stand only in {self._path}]\n{text}"
        if self._num_sent >= SENT_MAX_BYTES and not is_last:
            text += f"\n[what follows stands only in {self._path}, but for the last words]\n"
        return text
