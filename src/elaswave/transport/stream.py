"""The socket transport: Unix-domain sockets on one host, TCP between hosts, for CPU tensors.

One thread does everything: bytes move inside the calls of the worker's own thread (handing frames through an I/O thread
halves the speed). One `Waiter` holds the links, the listener, the handshakes in progress and interrupts, so every wait
wakes for each of them.

Connections become links in the `Acceptor`: it listens, dials and shakes hands. Unauthenticated peers cannot disturb:
only so many may be in the handshake at a time, each for a bounded time and with 64 bytes of memory (with TLS beside
what OpenSSL needs for it), and nothing ever blocks on them. Connections that are turned away are logged under
``elaswave.transport``, so many in each period; the rest is counted.

Deliberately absent: deciding who is alive. A link that ends is reported to the calls that need it; the control plane
decides.
"""

import logging
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from elaswave.errors import (
    AuthenticationError,
    CommError,
    FrameError,
    InterruptedWaitError,
    PeerLostError,
    WaitTimeoutError,
)
from elaswave.transport import addresses
from elaswave.transport.addresses import Endpoint
from elaswave.transport.emulated import EmulatedLinks, PacedLinks
from elaswave.transport.handshake import (
    CROWDED_OUT,
    NONCE_BYTES,
    Dialler,
    Key,
    LimitedLines,
    Listener,
    UnauthenticatedPeers,
    secrets_of,
    source_network,
)
from elaswave.transport.interface import (
    DEFAULT_MAX_FRAME_BYTES,
    DEFAULT_MAX_UNEXPECTED_BYTES,
    Handle,
    Tag,
    byte_views,
    complete,
    decode_header,
    encode_header,
    fail,
)
from elaswave.transport.link import (
    READ,
    SCRATCH_BYTES,
    WRITE,
    Inbox,
    Link,
    LinkEndedError,
    Waiter,
    interrupted_by_generation,
    make_recv,
)
from elaswave.transport.tls import TlsError, TlsSocket, bound_key

_log = logging.getLogger("elaswave.transport")

_MAX_ACCEPTS_PER_TURN = 16


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
        make_side: Callable[[Key], Dialler | Listener],
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
        self.side: Dialler | Listener | None = None
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
        self._num_lookups: dict[int, int] = {}
        """Of each peer, those that have found an address."""
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
            try:
                found = lookup.results()
            except OSError as error:
                self.trouble[peer] = error
                continue
            # The system prefers the first one. The next lookup takes another address: this one may not answer.
            num_before = self._num_lookups.get(peer, 0)
            self._num_lookups[peer] = num_before + 1
            address = found[num_before % len(found)]
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
        self, sock: socket.socket, make_side: Callable[[Key], Dialler | Listener], peer: int | None, host: str | None
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
            # Before the link is made, which registers the same descriptor.
            self._waiter.unregister(visit.fd)
            self._on_link(visit.side.peer, visit.sock)

    def _secure(self, visit: _Visit) -> bool:
        """Goes on with the TLS handshake; returns whether it is done."""
        if not isinstance(visit.sock, TlsSocket):
            security = self._listening if visit.peer is None else self._dialling
            assert security is not None
            # A socket that could not be connected is writable, too.
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
        # Not a byte more: what follows the handshake are frames, which the link reads.
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


EMULATED_TAG = Tag(0, 0, 0, 0, 0)
"""Of the second send of a frame that an emulated link has brought: nobody waits for it."""
_REDIAL_S = 0.01
_REDIAL_S_MAX = 0.64
"""In the background the time between two tries doubles up to this."""
_MAX_LAST_READS = 64  # of a link that has ended; more than a socket's buffer can hold


class _Wanted:
    """A link that is made in the background."""

    __slots__ = ("address", "backoff_s", "redial_at")

    def __init__(self, address: str) -> None:
        self.address = address
        self.redial_at = 0.0
        self.backoff_s = _REDIAL_S


class StreamTransport:
    """``Transport`` over sockets; see there for what the methods promise.

    Args:
        worker: id of this worker.
        key: secret of the job, at least 16 bytes, or several; a process that holds none of them cannot link.
        listen: ``unix:/private/folder`` or ``tcp:10.0.0.7``, or a place (see ``addresses``).
        generation: generation to start with.
        max_frame_bytes: largest payload sent, or accepted from a peer.
        max_unexpected_bytes: most bytes kept for each peer of frames that are not asked for yet.
        emulated: links that are slower than they are.
        paced: rates of real ones.
    Raises:
        OSError: the system refuses to listen there.
        ValueError: the key is too short or the address is unusable.
        ConfigError: certificate files that cannot be used.
    """

    handshake_timeout_s = 5.0
    """Time that an unauthenticated peer has to prove itself."""

    def __init__(
        self,
        worker: int,
        *,
        key: Key,
        listen: str | Endpoint,
        generation: int = 0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_unexpected_bytes: int = DEFAULT_MAX_UNEXPECTED_BYTES,
        emulated: EmulatedLinks | None = None,
        paced: PacedLinks | None = None,
    ) -> None:
        self.worker = worker
        self.generation = generation
        self._emulated = emulated
        self._paced = paced
        self._max_frame_bytes = max_frame_bytes
        self._max_unexpected_bytes = max_unexpected_bytes
        self._scratch = bytearray(SCRATCH_BYTES)
        self._links: dict[int, Link] = {}
        self._inboxes: dict[int, Inbox] = {worker: Inbox(worker, generation, max_unexpected_bytes)}
        self._lost: dict[int, str] = {}
        self._sent_to: set[int] = set()
        """Peers to which frames of the present generation have been sent."""
        self._broken: dict[int, str] = {}
        """Those of them whose link has ended in this generation, and how."""
        self._members: frozenset[int] = frozenset()
        self._former: set[int] = set()
        self._past_sent: dict[int, int] = {}
        self._past_received: dict[int, int] = {}
        self._wanted: dict[int, _Wanted] = {}
        """Links that are made in the background."""
        self._waiter = Waiter(worker, self._timers)
        place = Endpoint(listen) if isinstance(listen, str) else listen
        try:
            self._acceptor = Acceptor(
                worker, key, place, self._waiter, self._add_link, self._refusal, self.handshake_timeout_s
            )
        except BaseException:
            self._waiter.close()
            raise
        _open_transports.add(self)

    @property
    def address(self) -> str:
        """What other workers pass to ``connect`` to reach this one."""
        return self._acceptor.address

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        return frozenset(self._links)

    @property
    def broken(self) -> tuple[int, str] | None:
        """See ``Transport.broken``."""
        return next(iter(self._broken.items()), None)

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes handed to each peer so far, headers included."""
        totals = dict(self._past_sent)
        for peer, link in self._links.items():
            totals[peer] = totals.get(peer, 0) + link.bytes_sent
        return totals

    @property
    def bytes_received(self) -> Mapping[int, int]:
        """Bytes taken from each peer so far, headers included."""
        totals = dict(self._past_received)
        for peer, link in self._links.items():
            totals[peer] = totals.get(peer, 0) + link.bytes_received
        return totals

    @property
    def moved_bytes(self) -> int:
        """See ``Transport.moved_bytes``."""
        # Over a copy: the thread of the heartbeats asks as well.
        moved = sum(link.bytes_sent + link.bytes_received for link in list(self._links.values()))
        return moved if self._emulated is None else moved + self._emulated.moved_bytes(time.monotonic())

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """Start sending; see ``Transport.send``."""
        views = byte_views(tensors)
        length = sum(map(len, views))
        if length > self._max_frame_bytes:
            raise ValueError(f"{tag} has {length} bytes, a frame at most {self._max_frame_bytes}: send it in parts")
        header = encode_header(self.generation, tag, tensors, length)
        handle = Handle("send", dst, tag, self._waiter.failures)
        link = self._links.get(dst)
        if link is None:
            if dst == self.worker and not self._waiter.closed:
                self._send_to_self(handle, header, views)
            else:
                error = self._no_link(dst)
                # A frame without a link is as lost as one that was sent over a link that has ended (W11).
                self._broken.setdefault(dst, self._lost.get(dst, str(error)))
                fail(handle, error)
            return handle
        handle.keep = tensors
        self._sent_to.add(dst)
        views.insert(0, memoryview(header))
        if self._emulated is None or not self._emulated.put(handle, views, time.monotonic()):
            self._hand_over(link, handle, views)
        return handle

    def _hand_over(self, link: Link, handle: Handle, views: list[memoryview]) -> None:
        """Begins to send a frame over a link."""
        if self._paced is not None:
            self._paced.share(self._connections(), time.monotonic(), sending=link.peer)
        waited = link.wants_write
        try:
            link.send(handle, views)
        except LinkEndedError as error:
            self._link_ended(link, str(error))
            if not handle.done:
                fail(handle, self._no_link(link.peer))
            return
        if link.wants_write and not waited:
            self._waiter.set_mask(link.sock.fileno(), READ | WRITE)

    def _timers(self) -> float:
        """Does what is due before the waiter blocks; returns the seconds until it is to be called again."""
        next_s = min(self._acceptor.expire(), self._dial_wanted())
        if self._paced is not None:
            next_s = min(next_s, self._paced.share(self._connections(), time.monotonic()))
        if self._emulated is None:
            return next_s
        arrived, frames_s, has_left = self._emulated.turn(time.monotonic())
        for peer, frame in arrived:
            if (link := self._links.get(peer)) is not None:
                self._hand_over(link, Handle("send", peer, EMULATED_TAG, self._waiter.failures), [frame])
        return 0.0 if has_left else min(next_s, frames_s)  # a send that is done now may be what is waited for

    def _connections(self) -> Iterator[tuple[int, socket.socket | TlsSocket]]:
        return ((peer, link.sock) for peer, link in self._links.items())

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """Start receiving; see ``Transport.recv``."""
        handle = make_recv(src, tag, out, self._waiter.failures)
        inbox = self._inboxes.get(src)
        # What a peer has sent before its link ended can still be received.
        if inbox is None or (src not in self._links and src != self.worker and not inbox.has_frame(tag)):
            fail(handle, self._no_link(src))
        else:
            inbox.post(handle)
        return handle

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """Block until all are done well or one has failed; see ``Transport.wait``."""
        self._waiter.wait(handles, timeout_s, self.generation, self._check_links)

    def poll(self) -> None:
        """Move bytes that can move now, without blocking."""
        self._waiter.turn(0)

    def rest(self, until_s: float) -> None:
        """Block until a time, moving bytes meanwhile; see ``Transport.rest``."""
        self._waiter.rest(until_s, self.generation)

    def interrupt(self, reason: str, generation: int | None = None) -> None:
        """Wake the wait that is blocked, or the next one that would block; thread-safe. See ``Transport.interrupt``."""
        self._waiter.interrupt(reason, generation)

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Make the links that are missing; see ``Transport.connect``."""
        wanted = {peer: address for peer, address in addresses.items() if peer != self.worker}
        deadline = time.monotonic() + timeout_s
        acceptor = self._acceptor
        acceptor.trouble.clear()
        redial_at = dict.fromkeys(wanted, 0.0)
        try:
            while missing := [peer for peer in wanted if peer not in self._links]:
                self._waiter.check_interrupts(self.generation)
                now = time.monotonic()
                if now >= deadline:
                    trouble_of = {peer: acceptor.trouble.get(peer, "no sign of it") for peer in missing}
                    seen = "; ".join(f"worker {peer} at {wanted[peer]}: {trouble_of[peer]}" for peer in missing)
                    raise WaitTimeoutError(f"worker {self.worker} has no link after {timeout_s:g} s to {seen}")
                wake_at = deadline
                for peer in missing:
                    if peer > self.worker and peer not in acceptor.dialling:
                        if redial_at[peer] <= now:
                            redial_at[peer] = now + _REDIAL_S
                            acceptor.dial(peer, wanted[peer])
                        wake_at = min(wake_at, redial_at[peer])
                self._waiter.turn(max(0.0, wake_at - now))
                for peer in missing:
                    # No further try would mend this; all other troubles may pass.
                    if isinstance(trouble := acceptor.trouble.get(peer), AuthenticationError):
                        raise trouble
        finally:
            for peer in wanted:
                if peer not in self._links:
                    acceptor.hang_up(peer)

    def want(self, addresses: Mapping[int, str]) -> None:
        """Make links in the background; see ``Transport.want``."""
        wanted = {peer: address for peer, address in addresses.items() if peer != self.worker}
        for peer in self._wanted.keys() - wanted.keys():
            self._acceptor.hang_up(peer)
            self._acceptor.trouble.pop(peer, None)
        self._wanted = {peer: self._wanted.get(peer) or _Wanted(address) for peer, address in wanted.items()}
        for peer, address in wanted.items():
            self._wanted[peer].address = address

    def trouble(self, peer: int) -> str:
        """Tells the last thing seen of a wanted peer; see ``Transport.trouble``."""
        trouble = self._acceptor.trouble.get(peer)
        return "" if trouble is None or peer in self._links else str(trouble)

    def unreached(self, peer: int) -> str:
        """Tells what shows that nobody answers as a peer; see ``Transport.unreached``."""
        return "" if isinstance(self._acceptor.trouble.get(peer), TimeoutError) else self.trouble(peer)

    def _dial_wanted(self) -> float:
        """Dials the wanted peers that this side dials and whose time has come; returns the seconds until the next."""
        nearest_s = math.inf
        for peer, wanted in self._wanted.items():
            if peer < self.worker or peer in self._links or peer in self._acceptor.dialling:
                continue
            now = time.monotonic()
            if wanted.redial_at <= now:
                wanted.redial_at = now + wanted.backoff_s
                wanted.backoff_s = min(2 * wanted.backoff_s, _REDIAL_S_MAX)
                try:
                    self._acceptor.dial(peer, wanted.address)
                except ValueError as error:
                    # Noted and not raised: the call that happens to move bytes has not asked for this link.
                    self._acceptor.trouble[peer] = error
            nearest_s = min(nearest_s, wanted.redial_at - now)
        return nearest_s

    def advance_generation(self, generation: int, members: Iterable[int]) -> None:
        """Edit the membership in place; see ``Transport.advance_generation``."""
        if generation <= self.generation:
            raise ValueError(
                f"generation {generation} does not follow generation {self.generation}: generations only grow"
            )
        self.generation = generation
        members = frozenset(members)
        self._former |= self._members - members
        self._members = members
        for peer, link in list(self._links.items()):
            if peer in members or peer in self._wanted:
                link.advance(generation)
            else:
                # This worker ends the link itself: with an error of its own it does not count as broken (W11).
                detail = f"generation {generation} has begun without worker {peer}"
                self._close_link(link, detail, InterruptedWaitError(detail))
        for peer, inbox in list(self._inboxes.items()):
            # An inbox with a link has moved together with the link, and with the frame that is half here.
            if peer not in self._links:
                inbox.advance(generation, None)
            if peer not in members and peer not in self._wanted and peer != self.worker:
                del self._inboxes[peer]
        if self._emulated is not None:
            self._emulated.clear(lambda: interrupted_by_generation(generation))
        self._sent_to.clear()
        self._broken.clear()

    def close(self) -> None:
        """End all links and remove the socket file; may be called twice."""
        if self._waiter.closed:
            return
        error = InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        for link in list(self._links.values()):
            self._close_link(link, "the transport was closed", error)
        self._inboxes[self.worker].fail_posted(lambda: error)
        self._inboxes.clear()
        self._acceptor.close()
        self._waiter.close()
        _open_transports.discard(self)

    def _abandon_in_child(self) -> None:
        """Close this process's copies of the descriptors: the parent's links must end with the parent."""
        for link in self._links.values():
            link.sock.close()
        self._links.clear()
        self._acceptor.close(remove=False)
        self._waiter.close(forked=True)

    def _on_link_event(self, link: Link, event: int) -> None:
        try:
            if event & ~WRITE:
                link.read()
            if event & WRITE:
                link.flush()
                if not link.wants_write:
                    self._waiter.set_mask(link.sock.fileno(), READ)
        except LinkEndedError as error:
            self._link_ended(link, str(error))
        except FrameError as error:
            self._refuse_link(link, error)

    def _link_ended(self, link: Link, detail: str) -> None:
        """A connection is over: take what the peer sent before its end, then report it."""
        try:
            for _ in range(_MAX_LAST_READS):
                before = link.bytes_received
                link.read()
                if link.bytes_received == before:
                    break
        except LinkEndedError:
            pass
        except FrameError as error:
            self._refuse_link(link, error)
            return
        self._close_link(link, detail)

    def _refuse_link(self, link: Link, error: FrameError) -> None:
        _log.warning("worker %d ends its link to worker %d: %s", self.worker, link.peer, error)
        self._close_link(link, f"it sent what cannot be right: {error}")

    def _close_link(self, link: Link, detail: str, error: CommError | None = None) -> None:
        peer = link.peer
        del self._links[peer]
        self._past_sent[peer] = self._past_sent.get(peer, 0) + link.bytes_sent
        self._past_received[peer] = self._past_received.get(peer, 0) + link.bytes_received
        self._lost[peer] = detail
        self._waiter.unregister(link.sock.fileno())
        if self._paced is not None:
            self._paced.end(link.sock)
        link.close(detail, error)
        if self._emulated is not None:
            self._emulated.drop(peer, lambda: PeerLostError(peer, detail) if error is None else error)
        if error is None and peer in self._sent_to:
            self._broken[peer] = detail
            # No receive need have failed by this: the count has a wait look at the links.
            self._waiter.failures.count += 1

    def _check_links(self) -> None:
        """Checks W11: raises `PeerLostError` if a link has ended in this generation though frames of it were sent
        there."""
        if self.broken is not None:
            raise PeerLostError(*self.broken)

    def _no_link(self, peer: int) -> CommError:
        if self._waiter.closed:
            return InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        return PeerLostError(peer, self._lost.get(peer, f"worker {self.worker} was never linked with it: call connect"))

    def _send_to_self(self, handle: Handle, header: bytes, views: list[memoryview]) -> None:
        try:
            self._inboxes[self.worker].deliver(decode_header(header, 0, self._max_frame_bytes), views)
        except FrameError as error:
            fail(handle, error)
        else:
            complete(handle)

    def _refusal(self, peer: int) -> str | None:
        # One side dials, so that two workers do not make two links at once.
        if peer >= self.worker:
            return "the lower id dials"
        if peer in self._former:
            return f"it has left, and ids are never used again (this worker is at generation {self.generation})"
        return None

    def _add_link(self, peer: int, sock: socket.socket | TlsSocket) -> None:
        old = self._links.get(peer)
        if old is not None:  # it dials again because its end of the old link is gone
            self._link_ended(old, "it has dialled again")
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = Inbox(peer, self.generation, self._max_unexpected_bytes)
        link = Link(peer, sock, inbox, self._scratch, self._max_frame_bytes)
        self._links[peer] = link
        self._lost.pop(peer, None)
        if self._paced is not None:
            self._paced.begin(peer, sock)
        if peer in self._wanted:
            self._wanted[peer].backoff_s = _REDIAL_S
        self._waiter.register(sock.fileno(), lambda event: self._on_link_event(link, event))


_open_transports: "weakref.WeakSet[StreamTransport]" = weakref.WeakSet()


def _abandon_all_in_child() -> None:
    for transport in list(_open_transports):
        transport._abandon_in_child()
    _open_transports.clear()


os.register_at_fork(after_in_child=_abandon_all_in_child)
