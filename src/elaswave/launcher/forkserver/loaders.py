"""What a person's own samples and loss are like, found out in a process of its own: their code may start threads, open
files or hang, and the forkserver, which forks workers after it, must have none of that.

The process tells one finding after the other. Those that have come when the time is over count. The script's process
repeats them (`elaswave.engine.checks.rehearsal`); by the samples among them a resumed run knows its data again.

The forkserver's lines to workers over which loaders are handed out: one socket for each worker, which carries sockets.

A worker learns of a loader by a descriptor that arrives on its line: its own line to that loader. It asks for another
one by the loader's number.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from elaswave.data.fingerprint import FIRST_LOSS, Finding
from elaswave.errors import LaunchError
from elaswave.job.script import ReadFile, apart
from elaswave.launcher.forkserver.machine import Loader
from elaswave.system.processes import fork

PROBE_S_MAX = 5.0
"""For the samples."""
LOSS_S_MAX = 15.0
"""For the loss."""
_LOSS_BEGINS = Finding(what="", value="")


class Rehearses(Protocol):
    """An `elaswave.engine.checks.rehearsal.Rehearsal`."""

    def data(self) -> Iterator[Finding]:
        """Yields the findings of the data."""
        ...

    def loss(self) -> Finding | None:
        """Returns the finding of the loss."""
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
    """Yields what comes before the end, or in time."""
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


_ASK_BYTES_MAX = 64


class LoaderSockets:
    """The forkserver's ends of all lines.

    Args:
        watch: called with each line that is opened, and its worker: `asked` is to be called when it can be read.
        unwatch: called with each line that is about to be closed.
    """

    def __init__(
        self, watch: Callable[[socket.socket, int], object], unwatch: Callable[[socket.socket], object]
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._lines: dict[int, socket.socket] = {}

    def open(self, worker: int) -> socket.socket:
        """Makes the line to a worker that is about to be forked.

        Returns:
            The worker's end; the forkserver closes its copy once the worker has it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._lines[worker] = ours
        self._watch(ours, worker)
        return theirs

    def hand_over(self, loader: Loader) -> socket.socket:
        """Makes the line between a worker and a loader that is about to be forked, and hands the worker its end.

        Returns:
            The loader's end; the forkserver closes its copy once the loader has it.
        """
        theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError, KeyError):  # a worker that has ended needs no loader
            socket.send_fds(self._lines[loader.worker], [msgspec.msgpack.encode(loader.number)], [theirs.fileno()])
        return ours

    def asked(self, worker: int) -> list[Loader]:
        """Reads which loaders a worker wants to be replaced. The end of its line closes it."""
        line = self._lines[worker]
        loaders = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = line.recv(_ASK_BYTES_MAX)
                if not data:
                    self._close(worker)
                    break
                loaders.append(Loader(worker, msgspec.msgpack.decode(data, type=int)))
        return loaders

    def _close(self, worker: int) -> None:
        line = self._lines.pop(worker)
        self._unwatch(line)
        line.close()

    def let_go(self) -> None:
        """Closes, in a child, what is the forkserver's."""
        for line in self._lines.values():
            line.close()
