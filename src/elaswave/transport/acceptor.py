"""Where connections become links: listening, dialling, and the handshakes in between.

Unauthenticated peers cannot disturb: only so many may be in the handshake at a time, each for a bounded time and with
64 bytes of memory (with TLS beside what OpenSSL needs for it), and nothing ever blocks on them. Connections that are
turned away are logged under ``elaswave.transport``, so many in each period; the rest is counted. What happens on a link
once it is made is not known here (``link``, ``stream``).
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from elaswave.errors import AuthenticationError
from elaswave.transport import addresses
from elaswave.transport.handshake import NONCE_BYTES, Dialler, Key, Listener, secrets_of
from elaswave.transport.tls import TlsError, TlsSocket, bound_key
from elaswave.transport.unauthenticated import CROWDED_OUT, LimitedLines, UnauthenticatedPeers, source_network
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
    """A connection in the handshake.

    Args:
        sock: the connection.
        make_side: makes this side of the handshake, with its keys.
        deadline: monotonic time.
        peer: the id that was dialled; None: the other side has dialled.
        host: what was dialled.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_side: Callable[[Key], _Side],
        deadline: float,
        peer: int | None,
        host: str | None,
    ) -> None:
        self.sock: socket.socket | TlsSocket = sock
        self.fd = sock.fileno()
        """Stays known where TLS has closed it."""
        self.make_side = make_side
        self.deadline = deadline
        self.peer = peer
        self.host = host
        self.received = b""
        self.greeting = b""
        self.side: _Side | None = None
        self.is_connected = peer is None

    def begin(self, key: Key) -> None:
        """The connection is as secure as it is to be: the handshake begins."""
        self.side = self.make_side(key)
        self.greeting = self.side.opening()


class Acceptor:
    """The entrance of one transport.

    Args:
        worker: own id.
        key: the job's secret, or several.
        place: where to listen, and how it is secured.
        waiter: tells when a connection has something to say.
        on_link: called with the peer's id and its socket when a handshake is done.
        refusal: returns why a worker may not link with us, or None if it may.
        timeout_s: seconds that a handshake may take.
    Raises:
        OSError: the system refuses to listen there.
        ValueError: the key is too short or the address is unusable.
        ConfigError: certificate files that cannot be used.
    """

    def __init__(
        self,
        worker: int,
        key: Key,
        place: addresses.Endpoint,
        waiter: Waiter,
        on_link: Callable[[int, socket.socket | TlsSocket], None],
        refusal: Callable[[int], str | None],
        timeout_s: float,
    ) -> None:
        self.trouble: dict[int, Exception] = {}
        """The last thing that went wrong with each peer that was dialled."""
        self._worker = worker
        secrets_of(key)  # checks them
        self._key = key
        self._waiter = waiter
        self._on_link = on_link
        self._refusal = refusal
        self._timeout_s = timeout_s
        self._visits: dict[int, _Visit] = {}
        self._lookups: dict[int, addresses.NameLookup] = {}
        """Of the names of peers that are being dialled."""
        self._num_lookups = 0
        self._unauthenticated: UnauthenticatedPeers[_Visit] = UnauthenticatedPeers()
        """Those of the visits that were not dialled."""
        self._lines = LimitedLines()
        tls = place.tls
        if tls is not None and place.listen.startswith("unix:"):
            raise ValueError(f"TLS is for tcp: addresses, but {place.listen!r} is none: leave out the certificate")
        self._listening = None if tls is None else tls.listening()
        self._dialling = None if tls is None else tls.dialling()
        self._listener, self.address, self._remove = addresses.listen(
            place.listen, worker, advertise=place.advertise, ports=place.ports
        )
        waiter.register(self._listener.fileno(), self._accept)

    @property
    def dialling(self) -> set[int]:
        """Peers whose handshake goes on."""
        return {visit.peer for visit in self._visits.values() if visit.peer is not None} | self._lookups.keys()

    def dial(self, peer: int, address: str) -> None:
        """Begin to connect; ``on_link`` is called, or ``trouble`` is noted. A name is looked up first, each time.

        Raises:
            ValueError: the address cannot be understood.
        """
        if addresses.has_name(address):
            self._lookups[peer] = addresses.NameLookup(address, self._waiter.wake)
        else:
            self._connect(peer, address, addresses.host_of(address))

    def _connect(self, peer: int, address: str, host: str) -> None:
        try:
            sock = addresses.dial(address)
        except OSError as error:
            self.trouble[peer] = error
            return

        def make_side(key: Key) -> Dialler:
            return Dialler(key, self._worker, peer, os.urandom(NONCE_BYTES))

        self._begin(sock, make_side, peer, host)

    def _tend_lookups(self) -> float:
        """Goes on with the names that have been looked up; returns the seconds until the next one is given up."""
        nearest = math.inf
        for peer, lookup in list(self._lookups.items()):
            if not lookup.is_over:
                nearest = min(nearest, lookup.left_s)
                continue
            del self._lookups[peer]
            self._num_lookups += 1
            try:
                found = lookup.results()
            except OSError as error:
                self.trouble[peer] = error
                continue
            address = found[self._num_lookups % len(found)]
            self._connect(peer, address, addresses.host_of(lookup.address))
        return nearest

    def hang_up(self, peer: int) -> None:
        """Stop dialling a peer."""
        self._lookups.pop(peer, None)
        for visit in list(self._visits.values()):
            if visit.peer == peer:
                self._end(visit)

    def expire(self) -> float:
        """Turn away the connections that took too long; returns the seconds until the next one will have."""
        nearest = self._tend_lookups() if self._lookups else math.inf
        if not self._visits and self._lines.ends_s is None:
            return nearest
        now = time.monotonic()
        if unsaid := self._lines.unsaid(now):
            _log.warning("worker %d: %s", self._worker, unsaid)
        elif (ends_s := self._lines.ends_s) is not None:
            nearest = min(nearest, ends_s - now)
        for visit in list(self._visits.values()):
            if visit.deadline <= now and not visit.is_connected:
                self._turn_away(visit, ConnectionError(f"nothing there has answered within {self._timeout_s:g} s"))
            elif visit.deadline <= now:
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
        self._lookups.clear()
        self._listener.close()
        if remove:
            self._remove()

    def _accept(self, event: int) -> None:
        for _ in range(_MAX_ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except OSError:  # the peer has gone, or no descriptor is left: the next turn tries again
                return
            addresses.tune(sock)
            visit = self._begin(sock, self._make_listener, None, None)
            if ended := self._unauthenticated.admit(visit, source_network(address)):
                self._turn_away(ended, TimeoutError(CROWDED_OUT))

    def _make_listener(self, key: Key) -> Listener:
        return Listener(key, self._worker, os.urandom(NONCE_BYTES), self._refusal)

    def _begin(
        self, sock: socket.socket, make_side: Callable[[Key], _Side], peer: int | None, host: str | None
    ) -> _Visit:
        visit = _Visit(sock, make_side, time.monotonic() + self._timeout_s, peer, host)
        if self._listening is None:
            visit.begin(self._key)
        self._visits[visit.fd] = visit
        self._waiter.register(visit.fd, lambda event: self._on_event(visit), READ if peer is None else WRITE)
        return visit

    def _on_event(self, visit: _Visit) -> None:
        visit.is_connected = True
        self._unauthenticated.spoke(visit)
        try:
            if visit.side is None and not self._secure(visit):
                return
            is_done = self._shake_hands(visit)
        except BlockingIOError:
            return
        except TlsError as error:
            self._turn_away(visit, AuthenticationError(str(error)))
            return
        except (OSError, AuthenticationError) as error:
            self._turn_away(visit, error)
            return
        if is_done:
            assert visit.side is not None
            del self._visits[visit.fd]
            self._unauthenticated.remove(visit)
            self._waiter.unregister(visit.fd)
            self._on_link(visit.side.peer, visit.sock)

    def _secure(self, visit: _Visit) -> bool:
        """Goes on with the TLS handshake; returns whether it is done."""
        if not isinstance(visit.sock, TlsSocket):
            security = self._listening if visit.peer is None else self._dialling
            assert security is not None
            if failed := visit.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failed, os.strerror(failed))
            visit.sock = TlsSocket(visit.sock, security, visit.host)
        waits_to_write = visit.sock.shake_hands()
        if waits_to_write is not None:
            self._waiter.set_mask(visit.fd, WRITE if waits_to_write else READ)
            return False
        bind = partial(bound_key, certificate_digest=visit.sock.listener_digest)
        visit.begin(lambda: secrets_of(self._key).each(bind))
        self._waiter.set_mask(visit.fd, READ)
        return True

    def _shake_hands(self, visit: _Visit) -> bool:
        """Goes on with the handshake; returns whether it is done."""
        sock, side = visit.sock, visit.side
        assert side is not None
        if visit.greeting:
            _send(sock, visit.greeting)
            visit.greeting = b""
            self._waiter.set_mask(visit.fd, READ)
            return False
        data = sock.recv(side.bytes_needed - len(visit.received))
        if not data:
            raise ConnectionError(
                "it hung up during the handshake: it refuses this worker, holds another key, or only one side uses TLS"
            )
        visit.received += data
        if len(visit.received) < side.bytes_needed:
            return False
        received, visit.received = visit.received, b""
        reply = side.receive(received)
        if reply:
            _send(sock, reply)
        return side.done

    def _end(self, visit: _Visit) -> None:
        del self._visits[visit.fd]
        self._unauthenticated.remove(visit)
        self._waiter.unregister(visit.fd)
        visit.sock.close()

    def _turn_away(self, visit: _Visit, error: Exception) -> None:
        self._end(visit)
        if visit.peer is not None:
            self.trouble[visit.peer] = error
        elif self._lines.admit(time.monotonic()):
            _log.warning("worker %d turned a connection away: %s", self._worker, error)


def _send(sock: socket.socket | TlsSocket, data: bytes) -> None:
    """Send a message of the handshake: it always fits into the fresh socket of one of our workers."""
    try:
        complete = sock.send(data) == len(data)
    except BlockingIOError:
        complete = False
    if not complete:
        raise ConnectionError("its connection does not take a whole message of the handshake")
