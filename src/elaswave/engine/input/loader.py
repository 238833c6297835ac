"""The life of a loader: a process that makes micro-batches for one worker, in the order in which it is asked.

It holds no state but the data: whichever loader is asked, and whenever, the micro-batch is the same. It ends when its
worker does.
"""

import contextlib
import os
import socket
import time

import msgspec

from elaswave.engine.batches import BatchMaker, BatchName, failure_of
from elaswave.engine.input.batch_memory import to_memory

MESSAGE_BYTES_MAX = 1 << 17


def loader_log(worker: int) -> str:
    """Name of the log of a worker's loaders."""
    return f"loader-{worker}.log"


class BatchMade(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch; its memory's descriptor comes along."""

    name: BatchName
    seconds: float
    """That it took to make."""


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A loader's first word: which process it is."""

    pid: int


class NotMade(msgspec.Struct, frozen=True, tag=True):
    """A micro-batch cannot be made; see `BatchError`."""

    name: BatchName
    kind: str
    summary: str
    traceback_text: str


def say_who(line: socket.socket) -> None:
    """Tells the worker which process this is, before the data are opened: it looks whether that computes."""
    with contextlib.suppress(ConnectionError):  # it has ended
        line.send(msgspec.msgpack.encode(Begun(os.getpid())))


def serve_batches(maker: BatchMaker, line: socket.socket) -> int:
    """Makes micro-batches until the worker is gone.

    Args:
        maker: makes them.
        line: to the worker; keeps messages apart.
    Returns:
        Exit status.
    """
    try:
        while request := line.recv(MESSAGE_BYTES_MAX):
            _answer(maker, line, msgspec.msgpack.decode(request, type=BatchName))
    except ConnectionError:
        pass  # the worker has ended, or wants another loader
    return 0


def _answer(maker: BatchMaker, line: socket.socket, name: BatchName) -> None:
    begin_s = time.monotonic()
    try:
        memory = to_memory(maker.make(name))
    except Exception as error:
        failure = failure_of(name, error)
        line.send(msgspec.msgpack.encode(NotMade(name, failure.kind, failure.summary, failure.traceback_text)))
        return
    try:
        socket.send_fds(line, [msgspec.msgpack.encode(BatchMade(name, time.monotonic() - begin_s))], [memory])
    finally:
        os.close(memory)
