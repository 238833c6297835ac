"""What this kernel grants to a job's processes, whom of them it kills first, what it has counted on a connection."""

import contextlib
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Protocol

from elaswave.errors import UsageError
from elaswave.protocol.detection.host_silence import Counters

_BESIDE = 48
"""Descriptors that a process of a job needs beside one or two for each worker: output, sockets, logs, checkpoints, and
what libraries open for a moment."""
GROWTH = 64
"""Workers that may join a job, as far as the system's limit permits: there is room for them from the beginning, since
the limit of a process that runs is raised by itself only."""


def needed_descriptors(num_workers: int, num_loaders: int = 0) -> int:
    """Descriptors that the process of a job needs that needs most: a connection to each worker, and one to come; or,
    in the forkserver, each worker and each loader, and a line to each worker."""
    return (2 + num_loaders) * num_workers + _BESIDE


def workers_max(num_loaders: int = 0) -> int:
    """How many workers a job may have with the limit that this process has.

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


WORKER_SCORE = 500
"""Added to a worker's score, in thousandths of the machine's memory; when memory is short, the kernel kills the process
with the highest. By itself it chooses the largest one, often the launcher, whose end ends the job."""
_SCORE_FILE = Path("/proc/self/oom_score_adj")


def offer_to_kernel() -> None:
    """Makes this process, a worker, one to be killed before those that the job cannot do without. It needs no privilege
    to raise one's own score, and one that was inherited and is higher stays; where there is no such file, the kernel
    chooses as it did."""
    with contextlib.suppress(OSError):
        if int(_SCORE_FILE.read_text()) < WORKER_SCORE:
            _SCORE_FILE.write_text(str(WORKER_SCORE))


_UNACKED = struct.Struct("@I")
_UNACKED_AT = 24
"""`tcpi_unacked` in `struct tcp_info` of linux/tcp.h: segments that were sent and have not been acknowledged."""
_BYTES = struct.Struct("@QQ")
_BYTES_AT = 120
"""`tcpi_bytes_acked` and `tcpi_bytes_received`, since Linux 4.1."""
_SIZE = _BYTES_AT + _BYTES.size


class _Socket(Protocol):
    """Of a socket, or of what asyncio shows of one, what is needed here."""

    @property
    def family(self) -> int:
        """Of its address."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        """What the kernel says of it."""


def counters_of(sock: _Socket, connection: int) -> Counters | None:
    """What this kernel has counted on a TCP connection: what came, and what the other kernel has acknowledged.

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
