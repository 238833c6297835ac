"""A control connection: typed messages over a stream socket, length-prefixed, bounded, never pickled.

The sockets are pairs made before the workers are forked, so nobody else can connect to them.
"""

import select
import socket
import struct
import threading
import time
from typing import Generic, TypeVar

import msgspec

from elaswave.errors import FrameError, PeerLostError, WaitTimeoutError

MAX_MESSAGE_BYTES = 256 << 20
"""Largest message: checkpoint items and digests of models with very many tensors."""
SEND_TIMEOUT_S = 60.0

_PREFIX = struct.Struct("<I")
_T = TypeVar("_T")


class Channel(Generic[_T]):
    """One end of a control connection.

    Sending is thread-safe; receiving belongs to one thread.

    Args:
        connection: a connected stream socket, owned by the channel from now on.
        peer: id of the worker on the other side, or -1 for the coordinator.
        receives: union of the message types that may arrive.
    """

    def __init__(self, connection: socket.socket, peer: int, receives: type[_T]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._peer = peer
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self.closed = False
        """The other side has ended the connection."""

    def fileno(self) -> int:
        """The socket's descriptor, to be polled for reading."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Sends one message, waiting up to `SEND_TIMEOUT_S` for the other side to read.

        Raises:
            PeerLostError: the connection has ended.
            WaitTimeoutError: the other side does not read.
        """
        payload = self._encoder.encode(message)
        rest = memoryview(_PREFIX.pack(len(payload)) + payload)
        deadline = time.monotonic() + SEND_TIMEOUT_S
        with self._lock:
            while rest:
                try:
                    rest = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    if not select.select([], [self._socket], [], max(0.0, deadline - time.monotonic()))[1]:
                        raise WaitTimeoutError(
                            f"the control connection to {self._name} has not been read for {SEND_TIMEOUT_S:.0f} s"
                        ) from None
                except OSError as error:
                    self.closed = True
                    raise PeerLostError(self._peer, f"control connection: {error.strerror}") from error

    def receive(self) -> list[_T]:
        """The messages that have arrived completely; does not block. Sets `closed` at the end of the connection.

        Raises:
            FrameError: bytes that are no message.
        """
        while True:
            try:
                chunk = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.closed = True
                break
            self._buffer += chunk
        messages: list[_T] = []
        while len(self._buffer) >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(self._buffer)
            if length > MAX_MESSAGE_BYTES:
                raise FrameError(
                    f"a control message of {length} bytes from {self._name}; at most {MAX_MESSAGE_BYTES} are allowed"
                )
            if len(self._buffer) < _PREFIX.size + length:
                break
            payload = bytes(self._buffer[_PREFIX.size : _PREFIX.size + length])
            del self._buffer[: _PREFIX.size + length]
            try:
                messages.append(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                raise FrameError(f"a malformed control message from {self._name}: {error}") from error
        return messages

    def wait(self, timeout_s: float) -> list[_T]:
        """Waits for messages and returns those that are there.

        Raises:
            PeerLostError: the connection has ended.
            WaitTimeoutError: none came in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            messages = self.receive()
            if messages:
                return messages
            if self.closed:
                raise PeerLostError(self._peer, "control connection closed")
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(f"nothing came from {self._name} within {timeout_s:.0f} s")
            select.select([self._socket], [], [], left)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    @property
    def _name(self) -> str:
        return "the coordinator" if self._peer < 0 else f"worker {self._peer}"
