"""A process that serves a part, and the messages to and from it. What they mean is `elaswave.models.foreign.part`'s.

Reading and writing never block: whoever waits may be interrupted at any instant, and what was half sent or half read
then goes on with the next request. A server is killed with its connection, and the kernel kills it with this process.
"""

import contextlib
import fcntl
import os
import select
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from elaswave.errors import ForeignError
from elaswave.models.foreign.server import (
    FAILED,
    HEADER_BYTES,
    MessageHeader,
    PartMessage,
    ProtocolError,
    decode_message,
    decode_message_header,
    encode_message,
)

SERVER = Path(__file__).with_name("server.py")
"""The file that serves; it needs nothing else of elaswave."""
FAILURE_BYTES_MAX = 1 << 20
"""What an answer may hold beside arrays: what went wrong, as text."""
TURN_S = 0.05
"""How long a wait lasts before it is checked whether it is to be left."""
END_S_MAX = 60.0
"""How long a killed server may take to end."""
STATUS_S_MAX = 20.0
"""How long a server whose pipe is closed may take to end by itself, so that its status can be told."""
_ENDED = "has ended"
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_BUFFERS_MAX = 256
"""Written at once."""


class _Here(threading.local):
    """What the present thread has started, and ends: no other thread changes it while this one looks through it."""

    def __init__(self) -> None:
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()


_HERE = _Here()


class _Awaited(NamedTuple):
    """An answer that is to come."""

    number: int
    body_bytes_max: int


class Connection:
    """A server and the pipes to it.

    Args:
        command: starts it.
        who: it is, for errors.
    Raises:
        ForeignError: the system cannot start it.
    """

    def __init__(self, command: Sequence[str], who: str) -> None:
        self.who = who
        self.process_id = os.getpid()
        """Of the process that has started it; a forked child must start its own."""
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError as error:
            raise ForeignError(
                f"{who} cannot be started: {error.strerror}: {error.filename or command[0]}; give the path of a Python "
                "interpreter that has the software, or a command that starts a server"
            ) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
            with contextlib.suppress(OSError):  # the system allows no larger ones
                _set_pipe_size(descriptor)
        self._number = 0
        self._unsent: deque[memoryview] = deque()
        self._awaited: deque[_Awaited] = deque()
        self._header: MessageHeader | None = None
        self._room = memoryview(bytearray(HEADER_BYTES))
        self._filled = 0
        self._close = weakref.finalize(self, _end, self._process, self.process_id)
        _HERE.connections.add(self)

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether it can be asked: not closed, and started by this process."""
        return self._close.alive and self.process_id == os.getpid()

    def close(self) -> None:
        """Kills the server and reaps it; nothing happens in a process that has not started it."""
        self._close()

    # -------------------------------------------------------------------------------------------------------- messages

    def ask(self, message: PartMessage, body_bytes_max: int) -> int:
        """Sends a request, as far as there is room for it; the rest goes while its answer is waited for.

        Args:
            message: the request; the memory of its arrays must not be written to before the answer is there.
            body_bytes_max: longest body of the answer, beside `FAILURE_BYTES_MAX` for what goes wrong.
        Returns:
            Its number.
        """
        self._number += 1
        self._unsent.extend(memoryview(data) for data in encode_message(message._replace(number=self._number)))
        self._awaited.append(_Awaited(self._number, max(body_bytes_max, FAILURE_BYTES_MAX)))
        return self._number

    def answer(self, number: int, timeout_s: float, check: Callable[[], None], what: str) -> PartMessage:
        """Waits for the answer to a request. Those to earlier ones, whose wait was left, are thrown away.

        Args:
            number: of the request.
            timeout_s: how long it may take from now on.
            check: called while it waits; may raise, and the same or another answer can be waited for then.
            what: was asked for, for errors.
        Raises:
            ForeignError: it does not come in time, the server has ended, or its answer is no message.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                found = self._move()
            except ProtocolError as error:
                raise self._broken(f"answered what is no message: {error}") from error
            if found is not None and found.number == number:
                return found
            if found is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise self._broken(f"has not answered within {timeout_s:g} s, asked for {what}")
                self._wait(min(left_s, TURN_S))
                check()

    def _wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        if self._unsent:
            poll.register(self._to, select.POLLOUT)
        poll.poll(timeout_s * 1e3)

    def _move(self) -> PartMessage | None:
        """Writes and reads what is possible at once.

        Returns:
            The next answer, if it is there.
        """
        self._write()
        while True:
            if self._filled < len(self._room):
                try:
                    num_bytes = os.readv(self._from, [self._room[self._filled :]])
                except BlockingIOError:
                    return None
                if num_bytes == 0:
                    raise self._broken(_ENDED)
                self._filled += num_bytes
            elif self._header is None:
                if not self._awaited:
                    raise ProtocolError("an answer came that nobody has asked for")
                self._header = decode_message_header(self._room, self._awaited[0].body_bytes_max)
                self._take(self._header.body_bytes)
            else:
                header, body = self._header, self._room
                self._header = None
                self._take(HEADER_BYTES)
                awaited = self._awaited.popleft()
                if header.number != awaited.number:
                    raise ProtocolError(f"the answer to request {header.number} came for that to {awaited.number}")
                return decode_message(header, body)

    def _take(self, num_bytes: int) -> None:
        # torch's memory is aligned to 64 bytes, and not cleared.
        self._room = torch.empty(num_bytes, dtype=torch.uint8).numpy().data if num_bytes else memoryview(b"")
        self._filled = 0

    def _write(self) -> None:
        while self._unsent:
            some = [self._unsent[place] for place in range(min(len(self._unsent), _BUFFERS_MAX))]
            try:
                num_bytes = os.writev(self._to, some)
            except BlockingIOError:
                return
            except BrokenPipeError:
                raise self._broken(_ENDED) from None
            for data in some:
                if num_bytes < len(data):
                    self._unsent[0] = data[num_bytes:]
                    break
                num_bytes -= len(data)
                self._unsent.popleft()

    def _broken(self, what: str) -> ForeignError:
        """Closes the connection: nothing is known of what would come."""
        status = self._process.poll()
        if status is None and what == _ENDED:
            try:
                status = self._process.wait(STATUS_S_MAX)
            except subprocess.TimeoutExpired:
                what = "has closed a pipe to this worker, and goes on"
        self.close()
        ended = (
            "" if status is None else f" (it was killed by signal {-status})" if status < 0 else f" (status {status})"
        )
        return ForeignError(
            f"{self.who} {what}{ended}; what it has said itself stands in the log of the worker, or where the script "
            "writes its errors"
        )


def is_failure(message: PartMessage) -> bool:
    """Tells whether a server says that it could not do what was asked."""
    return message.kind == FAILED


def close_all() -> None:
    """Ends all servers that this thread has started."""
    for connection in list(_HERE.connections):
        if connection.is_open:
            connection.close()


def _set_pipe_size(descriptor: int) -> None:
    fcntl.fcntl(descriptor, _F_SETPIPE_SZ, _PIPE_BYTES)


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """Closes the pipes; in the process that has started the server also kills it."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    if os.getpid() != owner:
        process.returncode = 0  # not this process's to wait for
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device that is gone: the kernel's to end
        process.wait(END_S_MAX)
