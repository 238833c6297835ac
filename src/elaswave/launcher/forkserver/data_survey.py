"""What a person's own samples and loss are like, found out in a process of its own: their code may start threads, open
files or hang, and the template, which forks workers after it, must have none of that.

The process tells one finding after the other. Those that have come when the time is over count. The script's process
repeats them (`elaswave.engine.checks.rehearsal`); by the samples among them a resumed run knows its data again.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from elaswave.data.fingerprint import FIRST_LOSS, Finding
from elaswave.errors import LaunchError
from elaswave.job.read_files import ReadFile, apart
from elaswave.launcher.forkserver.forking import fork

PROBE_S_MAX = 5.0
"""For the samples."""
LOSS_S_MAX = 15.0
"""For the loss."""
_LOSS_BEGINS = Finding(what="", value="")


class Rehearses(Protocol):
    """An `elaswave.engine.checks.rehearsal.Rehearsal`."""

    def data(self) -> Iterator[Finding]:
        """Of the data."""
        ...

    def loss(self) -> Finding | None:
        """Of the loss."""
        ...


def probe_dataset(begin: Callable[[], Rehearses], log: Path, read_files: Sequence[ReadFile] = ()) -> list[Finding]:
    """Finds out what samples and loss are like; nothing where the system lets no process begin.

    Args:
        begin: called in the other process.
        log: takes the output of that process.
        read_files: that it opens anew.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        body = apart(read_files, lambda: _tell(begin, theirs))
        child = fork("the survey of the data", log, body, let_go=lambda: os.close(ours))
    except LaunchError:
        os.close(ours)
        return []
    finally:
        os.close(theirs)
    try:
        return list(_received(ours))
    finally:
        os.close(ours)
        os.kill(child.pid, signal.SIGKILL)  # it may hang
        child.reap()


def _received(descriptor: int) -> Iterator[Finding]:
    """What comes before the end, or in time."""
    deadline_s, part, begun = time.monotonic() + PROBE_S_MAX, b"", False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, part = (part + data).split(b"\n")
        for line in lines:
            finding = msgspec.json.decode(line, type=Finding)
            if finding == _LOSS_BEGINS:
                deadline_s, begun = time.monotonic() + LOSS_S_MAX, True
            else:
                yield finding
    if begun:
        yield Finding(what=FIRST_LOSS, value="", text=f"it takes more than {LOSS_S_MAX:g} s")


def _tell(begin: Callable[[], Rehearses], descriptor: int) -> int:
    def tell(finding: Finding) -> None:
        os.write(descriptor, msgspec.json.encode(finding) + b"\n")

    rehearsal = begin()
    for finding in rehearsal.data():
        tell(finding)
    tell(_LOSS_BEGINS)
    loss = rehearsal.loss()
    if loss is not None:
        tell(loss)
    return 0
