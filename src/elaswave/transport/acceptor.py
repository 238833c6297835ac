"""Where connections become links: listening, dialling, and the handshakes in between.

Unauthenticated peers cannot disturb: only so many may be in the handshake at a time, each for a bounded time and with
64 bytes of memory, and nothing ever blocks on them. A connection that is turned away is logged under
``elaswave.transport``. What happens on a link once it is made is not known here (``link``, ``stream``).
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

from elaswave.errors import AuthenticationError
from elaswave.transport import addresses
from elaswave.transport.handshake import NONCE_BYTES, Dialler, Listener, check_key
from elaswave.transport.unauthenticated import CROWDED_OUT, UnauthenticatedPeers
from elaswave.transport.waiter import READ, WRITE, Waiter

_log = logging.getLogger("elaswave.transport")

_MAX_ACCEPTS_PER_TURN = 16


class _Side(Protocol):
    """One side of the handshake (see ``handshake``)."""

    peer: int
    done: bool
    bytes_needed: int

    def opening(self) -> bytes: ...

    def receive(self, data: bytes) -> bytes: ...


class _Visit:
    """A connection in the handshake."""

    def __init__(self, sock: socket.socket, side: _Side, deadline: float, dialled: bool) -> None:
        self.sock = sock
        self.side = side
        self.deadline = deadline
        self.dialled = dialled
        self.received = b""
        self.greeting = side.opening()


class Acceptor:
    """The entrance of one transport.

    Args:
        worker: own id.
        key: the job's secret.
        listen: where to listen (see ``addresses.listen``).
        waiter: tells when a connection has something to say.
        on_link: called with the peer's id and its socket when a handshake is done.
        refusal: returns why a worker may not link with us, or None if it may.
        timeout_s: seconds that a handshake may take.
    Raises:
        OSError: the system refuses to listen there.
        ValueError: the key is too short or the address is unusable.
    """

    def __init__(
        self,
        worker: int,
        key: bytes,
        listen: str,
        waiter: Waiter,
        on_link: Callable[[int, socket.socket], None],
        refusal: Callable[[int], str | None],
        timeout_s: float,
    ) -> None:
        self.trouble: dict[int, Exception] = {}
        """The last thing that went wrong with each peer that was dialled."""
        self._worker = worker
        self._key = check_key(key)
        self._waiter = waiter
        self._on_link = on_link
        self._refusal = refusal
        self._timeout_s = timeout_s
        self._visits: dict[int, _Visit] = {}
        self._unauthenticated: UnauthenticatedPeers[_Visit] = UnauthenticatedPeers()
        """Those of the visits that were not dialled."""
        self._listener, self.address, self._remove = addresses.listen(listen, worker)
        waiter.register(self._listener.fileno(), self._accept)

    @property
    def dialling(self) -> set[int]:
        """Peers whose handshake goes on."""
        return {visit.side.peer for visit in self._visits.values() if visit.dialled}

    def dial(self, peer: int, address: str) -> None:
        """Begin to connect; ``on_link`` is called, or ``trouble`` is noted.

        Raises:
            ValueError: the address cannot be understood.
        """
        try:
            sock = addresses.dial(address)
        except OSError as error:
            self.trouble[peer] = error
            return
        self._begin(sock, Dialler(self._key, self._worker, peer, os.urandom(NONCE_BYTES)), dialled=True)

    def hang_up(self, peer: int) -> None:
        """Stop dialling a peer."""
        for visit in list(self._visits.values()):
            if visit.dialled and visit.side.peer == peer:
                self._turn_away(visit, ConnectionError("this worker has stopped dialling"))

    def expire(self) -> float:
        """Turn away the connections that took too long; returns the seconds until the next one will have."""
        if not self._visits:
            return math.inf
        now = time.monotonic()
        nearest = math.inf
        for visit in list(self._visits.values()):
            if visit.deadline <= now:
                self._turn_away(visit, TimeoutError("it did not finish the handshake in time"))
            else:
                nearest = min(nearest, visit.deadline - now)
        return nearest

    def close(self, *, remove: bool = True) -> None:
        """Stop listening and end all handshakes.

        Args:
            remove: also remove the socket file.
        """
        for visit in self._visits.values():
            visit.sock.close()
        self._visits.clear()
        self._listener.close()
        if remove:
            self._remove()

    def _accept(self, event: int) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except OSError:  # the peer has gone, or no descriptor is left: the next turn tries again
                return
            addresses.tune(sock)
            side = Listener(self._key, self._worker, os.urandom(NONCE_BYTES), self._refusal)
            visit = self._begin(sock, side, dialled=False)
            if oldest := self._unauthenticated.admit(visit):
                self._turn_away(oldest, TimeoutError(CROWDED_OUT))

    def _begin(self, sock: socket.socket, side: _Side, *, dialled: bool) -> _Visit:
        visit = _Visit(sock, side, time.monotonic() + self._timeout_s, dialled)
        self._visits[sock.fileno()] = visit
        self._waiter.register(sock.fileno(), lambda event: self._on_event(visit), WRITE if dialled else READ)
        return visit

    def _on_event(self, visit: _Visit) -> None:
        sock, side = visit.sock, visit.side
        try:
            if visit.greeting:
                _send(sock, visit.greeting)
                visit.greeting = b""
                self._waiter.set_mask(sock.fileno(), READ)
                return
            data = sock.recv(side.bytes_needed - len(visit.received))
            if not data:
                raise ConnectionError("it hung up during the handshake: it refuses this worker, or holds another key")
            visit.received += data
            if len(visit.received) < side.bytes_needed:
                return
            received, visit.received = visit.received, b""
            reply = side.receive(received)
            if reply:
                _send(sock, reply)
        except BlockingIOError:
            return
        except (OSError, AuthenticationError) as error:
            self._turn_away(visit, error)
            return
        if side.done:
            del self._visits[sock.fileno()]
            self._unauthenticated.remove(visit)
            self._waiter.unregister(sock.fileno())
            self._on_link(side.peer, sock)

    def _turn_away(self, visit: _Visit, error: Exception) -> None:
        fd = visit.sock.fileno()
        del self._visits[fd]
        self._unauthenticated.remove(visit)
        self._waiter.unregister(fd)
        visit.sock.close()
        if visit.dialled:
            self.trouble[visit.side.peer] = error
        else:
            _log.warning("worker %d turned a connection away: %s", self._worker, error)


def _send(sock: socket.socket, data: bytes) -> None:
    """Send a message of the handshake: it always fits into the fresh socket of one of our workers."""
    try:
        complete = sock.send(data) == len(data)
    except BlockingIOError:
        complete = False
    if not complete:
        raise ConnectionError("its connection does not take a whole message of the handshake")
