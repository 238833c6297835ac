"""What a job asks of its machine: a private folder, open files, who is killed first, what was counted on a connection.

The folder holds sockets and journal. Its lock file is held by the launcher and all processes that it forks, and the
kernel lets go of it when the last of them has ended: a folder whose lock is free belongs to no running job, and is
removed by the next one. (Programs that tidy up temporary folders by age leave one alone whose lock is held, if they are
as careful as systemd's.)
"""

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from elaswave.config.values import path_problem
from elaswave.errors import LaunchError, UsageError
from elaswave.protocol.detection.host_silence import Counters

PREFIX = "elaswave-"
_LOCK_FILE = "lock"
_BESIDE = 48
"""Descriptors that a process of a job needs beside one or two for each worker: output, sockets, logs, checkpoints, and
what libraries open for a moment."""
GROWTH = 64
"""Workers that may join a job, as far as the system's limit permits: there is room for them from the beginning, since
the limit of a process that runs is raised by itself only."""
WORKER_SCORE = 500
"""Added to a worker's score, in thousandths of the machine's memory; when memory is short, the kernel kills the process
with the highest. By itself it chooses the largest one, often the launcher, whose end ends the job."""
_SCORE_FILE = Path("/proc/self/oom_score_adj")
_UNACKED = struct.Struct("@I")
_UNACKED_AT = 24
"""`tcpi_unacked` in `struct tcp_info` of linux/tcp.h: segments that were sent and have not been acknowledged."""
_BYTES = struct.Struct("@QQ")
_BYTES_AT = 120
"""`tcpi_bytes_acked` and `tcpi_bytes_received`, since Linux 4.1."""
_SIZE = _BYTES_AT + _BYTES.size


class JobFolder:
    """A new folder, until `close` or the death of the last process that holds it.

    Raises:
        LaunchError: the system refuses one.
    """

    def __init__(self) -> None:
        if problem := path_problem(tempfile.gettempdir()):
            raise LaunchError(f"TMPDIR: {problem}")
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            unnamed = self.path / f"{_LOCK_FILE}.new"
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / _LOCK_FILE)  # named only now that it is held: no other process can have had it
        except OSError as error:
            raise LaunchError(
                f"no folder for the job's sockets and journal can be made in {tempfile.gettempdir()}: "
                f"{error.strerror}; make room there, or set TMPDIR to another folder"
            ) from error

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_dead() -> list[Path]:
    """Removes the folders of this user's jobs that have no process any more: their launchers were killed.

    Others may have made folders of the same name, to keep a job from starting: nothing of them is opened. No trouble
    here keeps one from starting either.

    Returns:
        Those that it has removed.
    """
    removed = []
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(parent) if name.startswith(PREFIX))
        for name in names:
            with contextlib.suppress(OSError, RecursionError):  # it is in use, or gone meanwhile
                if _removes(parent / name):
                    removed.append(parent / name)
    return removed


def _removes(folder: Path) -> bool:
    """Removes a folder if it is one that this user alone can write to, and whose lock is free."""
    if not _is_own(os.lstat(folder), stat.S_IFDIR):
        return False
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_own(os.fstat(within), stat.S_IFDIR):
            return False
        lock = os.open(_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
        try:
            if not _is_own(os.fstat(lock), stat.S_IFREG):
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    finally:
        os.close(within)
    return True


def _is_own(found: os.stat_result, kind: int) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & others


def refused(error: OSError, what: str, advice: str) -> LaunchError:
    """Makes the error to tell when the system refuses something that a job needs."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return LaunchError(f"{what}: {error.strerror} ({name}); {advice}")


def needed_descriptors(num_workers: int, num_loaders: int = 0) -> int:
    """Descriptors that the process of a job needs that needs most: a connection to each worker, and one to come; or,
    in the forkserver, each worker and each loader, and a line to each worker."""
    return (2 + num_loaders) * num_workers + _BESIDE


def workers_max(num_loaders: int = 0) -> int:
    """Computes how many workers a job may have with the limit that this process has.

    Args:
        num_loaders: of each worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _BESIDE) // (2 + num_loaders)


def provide_descriptors(num_workers: int, num_loaders: int = 0) -> None:
    """Raises this process's limit as far as the job needs and the system allows; children inherit it.

    Args:
        num_workers: of the job.
        num_loaders: of each worker.
    Raises:
        UsageError: the system does not allow enough.
    """
    needed = needed_descriptors(num_workers, num_loaders)
    wanted = needed_descriptors(num_workers + GROWTH, num_loaders)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"a job of {num_workers} workers needs up to {needed} open files in a process, and the limit here is "
            f"{hard} (ulimit -n): raise it to {needed} or more, or train with fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def offer_to_kernel() -> None:
    """Makes this process, a worker, one to be killed before those that the job cannot do without. It needs no privilege
    to raise one's own score, and one that was inherited and is higher stays; where there is no such file, the kernel
    chooses as it did."""
    with contextlib.suppress(OSError):
        if int(_SCORE_FILE.read_text()) < WORKER_SCORE:
            _SCORE_FILE.write_text(str(WORKER_SCORE))


class _Socket(Protocol):
    """Of a socket, or of what asyncio shows of one, what is needed here."""

    @property
    def family(self) -> int:
        """Of its address."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """Returns what the kernel says of it."""


def counters_of(sock: _Socket, connection: int) -> Counters | None:
    """Reads what this kernel has counted on a TCP connection: what came, and what the other kernel has acknowledged.

    The other kernel acknowledges while its processes get no processor, or are stopped; so this tells a host that is cut
    off from one that is busy (`elaswave.protocol.detection.host_silence`).

    Args:
        sock: its socket; not closed.
        connection: its number.
    Returns:
        None if it is no TCP connection, or the kernel does not count there.
    """
    if sock.family == socket.AF_UNIX:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:
        return None
    if len(info) < _SIZE:
        return None
    (num_unacked,) = _UNACKED.unpack_from(info, _UNACKED_AT)
    num_acknowledged, num_received = _BYTES.unpack_from(info, _BYTES_AT)
    return Counters(connection, num_received, num_acknowledged, num_unacked > 0)
