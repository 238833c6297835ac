"""The coordinator's end of all control connections, on asyncio. It moves messages and decides nothing.

Nothing here waits: messages are handled and sent from the event loop's callbacks, and a peer that does not read is cut
off instead of being waited for. Unauthenticated peers cannot disturb: only so many may be in the handshake at a time,
each for a bounded time and with bounded memory; a connection that is turned away is logged under ``elaswave.channel``.

A message that must not be lost carries a number. It is acknowledged when `on_message` has returned and what it has led
to is durable; one that comes again, because its connection ended before the acknowledgement, is handled once in the
life of a server. A new server knows of none, so that messages may be handled once by each.

Operators hold the job's key too, but are no part of the job: they come and go, and a person may stop one in the middle
of a word. What one of them may send, and leave unread, is a small part of what a worker may (`OPERATOR_LIMITS`).
"""

import asyncio
import ipaddress
import logging
import math
import socket
import struct
import time
from asyncio.trsock import TransportSocket
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec

from elaswave.channel.wire import (
    COORDINATOR,
    MAX_MESSAGE_BYTES,
    ControlFrameKind,
    Frame,
    Session,
    encode_payload,
    is_operator,
    peer_name,
)
from elaswave.errors import AuthenticationError, FrameError
from elaswave.protocol.detection.host_silence import Counters
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.transport import addresses
from elaswave.transport.handshake import (
    CROWDED_OUT,
    Key,
    LimitedLines,
    UnauthenticatedPeers,
    secrets_of,
    source_network,
)
from elaswave.transport.tls import Tls

HANDSHAKE_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""A peer that has not taken all that waits for it within this time is cut off."""
MAX_OUTBOX_BYTES = 128 << 20
"""A peer for which more than this waits is cut off."""

_UNACKED = struct.Struct("@I")
_UNACKED_AT = 24
"""`tcpi_unacked` in `struct tcp_info` of linux/tcp.h: segments that were sent and have not been acknowledged."""
_BYTES = struct.Struct("@QQ")
_BYTES_AT = 120
"""`tcpi_bytes_acked` and `tcpi_bytes_received`, since Linux 4.1."""
_SIZE = _BYTES_AT + _BYTES.size

_log = logging.getLogger("elaswave.channel")
_T = TypeVar("_T")


class PeerLimits(NamedTuple):
    """What is borne of one peer before it is cut off."""

    message_bytes_max: int
    """Of one message from it."""
    outbox_bytes_max: int
    """That wait for it."""
    frames_per_s: float = math.inf
    """From it, in the mean; `BURST_S` of it may come at once."""


OPERATOR_LIMITS = PeerLimits(message_bytes_max=1 << 16, outbox_bytes_max=4 << 20, frames_per_s=50.0)
BURST_S = 10.0


class RefusedPeer(NamedTuple):
    """To a peer that may not connect."""

    word: msgspec.Struct | None
    """What it is told."""


class DurableHistory(Protocol):
    """Of a coordinator's store (`elaswave.store.store.Store`) what is needed here."""

    @property
    def store_position(self) -> StorePosition | None:
        """Where it stands."""

    def when_durable(self, call: Callable[[], None]) -> None:
        """Calls back once all that was handled so far is durable."""


class ControlServer(Generic[_T]):
    """Listens for workers and agents, and exchanges messages with them.

    Everything happens on the event loop that `start` was called on; no method may be called from another thread.

    Args:
        max_message_bytes: largest message in either direction.
        max_outbox_bytes: a peer for which more waits is cut off.
        operator_limits: the same, and more, for operators.
        handshake_timeout_s: how long an unauthenticated peer may take to prove that it holds the key.
        stall_timeout_s: how long a peer may leave unread what waits for it.
        history: what is acknowledged when it is durable there; peers are told where it stands before the messages that
            follow from it. None: there is none.
        now_s: clock by which `last_heartbeat_s` counts.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        operator_limits: PeerLimits = OPERATOR_LIMITS,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        history: DurableHistory | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        """Where clients connect, once started."""
        self.max_message_bytes = max_message_bytes
        self.limits = PeerLimits(max_message_bytes, max_outbox_bytes)
        self.operator_limits = operator_limits
        self.handshake_timeout_s = handshake_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self._history = history
        self.now_s = now_s
        self._unauthenticated: UnauthenticatedPeers[_Connection] = UnauthenticatedPeers()
        self._peers: dict[int, _Connection] = {}
        self._handled: dict[int, tuple[int, int]] = {}
        """By peer: which client it was, and the number of its last message that was handled."""
        self._acknowledged: dict[int, tuple[int, int]] = {}
        """The same of the last message that was acknowledged."""
        self.age_s = 0.0
        """Seconds that the message in hand has waited at its sender, which may have lacked a connection."""
        self._newest: tuple[msgspec.Struct, bytes] | None = None
        """What was sent last, and as what."""
        self._server: asyncio.Server | None = None
        self._lines = LimitedLines()
        self._end_of_lines: asyncio.TimerHandle | None = None
        self._num_connections = 0
        self._closing = False

    async def start(
        self,
        listen: str,
        key: Key,
        receives: Any,
        on_message: Callable[[int, _T], None],
        on_connected: Callable[[int], None],
        on_closed: Callable[[int], None],
        *,
        tls: Tls | None = None,
        on_refused: Callable[[str], None] = lambda reason: None,
        on_stranger: Callable[[str], None] = lambda reason: None,
        on_store_position: Callable[[int, StorePosition], RefusedPeer | None] = lambda peer, store_position: None,
        refusal: Callable[[int], str | None] = lambda peer: None,
        key_of: Callable[[int], Key] | None = None,
    ) -> None:
        """Starts listening. The callbacks must not block for long; what they raise ends `serve`.

        Args:
            listen: ``unix:PATH`` of the socket file (a stale one is replaced) or ``tcp:HOST[:PORT]``.
            key: the job's key, or several.
            receives: union of the message types that may arrive.
            on_message: called with the peer's id and its message.
            on_connected: called with the id of a peer that has connected, or has replaced its older connection.
            on_closed: called with the id of a peer that has no connection any more.
            tls: certificate files; only for ``tcp:``.
            on_refused: called with one line about a connection that was turned away or a peer that was cut off.
            on_stranger: called with one line about a peer that speaks as one of the job, and has not proved that it
                holds the job's key.
            on_store_position: called with the newest store position that a peer has been told, before it counts as
                connected;
                returns what it is told if it is turned away.
            refusal: returns why a participant may not connect, or None if it may.
            key_of: gives the keys of which a participant of an id must hold one; None: ``key``, whoever it is.
        Raises:
            OSError: the system refuses to listen there.
            ValueError: the address or the key cannot be used, or TLS is asked for on a Unix socket.
            ConfigError: certificate files that cannot be used.
        """
        secrets_of(key)  # checks them
        self._key, self._key_of = key, key_of
        self._receives = receives
        self._on_message, self._on_connected, self._on_closed = on_message, on_connected, on_closed
        self._on_refused, self._on_stranger, self._refusal = on_refused, on_stranger, refusal
        self._on_store_position = on_store_position
        if tls is not None and not listen.startswith("tcp:"):
            raise ValueError(f"TLS is for tcp: addresses, but {listen!r} is none: leave out the certificate")
        self._security = tls.listening() if tls else None
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        sock, self.address, self._remove = addresses.listen_at(listen)
        if sock.family != socket.AF_UNIX and tls is None:
            host = sock.getsockname()[0]
            if not ipaddress.ip_address(host).is_loopback:
                _log.warning(
                    "control connections at %s are authenticated but not encrypted: set net.tls if others "
                    "can read the network",
                    self.address,
                )
        if sock.family == socket.AF_UNIX:
            self._server = await self._loop.create_unix_server(lambda: _Connection(self), sock=sock)
        else:
            self._server = await self._loop.create_server(lambda: _Connection(self), sock=sock)

    async def serve(self) -> None:
        """Waits until the server is closed.

        Raises:
            Exception: what a callback has raised; the server should be closed then.
        """
        await asyncio.shield(self._done)

    @property
    def peers(self) -> list[int]:
        """Ids of the peers that are connected, ascending."""
        return sorted(self._peers)

    def last_heartbeat_s(self, peer: int) -> float | None:
        """Computes the seconds since something came from a peer; None if it is not connected."""
        connection = self._peers.get(peer)
        return None if connection is None else self.now_s() - connection.last_heartbeat_s

    def look(self, peers: Iterable[int]) -> list[Counters]:
        """Lists what the kernel has counted on the connections to some peers. On those where nothing waits for an
        acknowledgement it sends a sign of life, so that the other kernel has something to acknowledge."""
        found = []
        for peer in peers:
            connection = self._peers.get(peer)
            counters = None if connection is None else connection.look()
            if counters is not None:
                found.append(counters)
                if not counters.is_outstanding:
                    self._answer(peer)
        return found

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        """Sends a message now; never waits.

        Returns:
            Whether the peer is connected. If not, the message is dropped: what a peer must know, it is told again when
            it connects.
        Raises:
            FrameError: the message is larger than may be sent.
        """
        return bool(self.send_all([peer], message))

    def send_all(self, peers: Iterable[int], message: msgspec.Struct) -> list[int]:
        """Sends one message to several peers.

        Returns:
            Those that are connected.
        Raises:
            FrameError: the message is larger than may be sent.
        """
        if self._newest is None or self._newest[0] is not message:  # a decision goes to one member after the other
            self._newest = message, encode_payload(message, self.max_message_bytes)
        payload = self._newest[1]
        reached, store_position = [], None if self._history is None else self._history.store_position
        for peer in peers:
            connection = self._peers.get(peer)
            if connection is not None and store_position is not None and not is_operator(peer):
                # Before the message: a peer that has seen what follows from an entry must know of the entry (H9).
                connection.tell(store_position)
            if connection is not None and connection.write(ControlFrameKind.MESSAGE, 0, payload):
                reached.append(peer)
        return reached

    def hang_up(self, peer: int) -> None:
        """Ends a peer's connection: what is written already still goes out, what does not fit is dropped."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.hang_up()

    def keep(self, peers: Container[int]) -> None:
        """Ends the connections of all others, and all that are not opened yet: their handshakes, also those that are
        done, may have gone by a key that counts no more. Who belongs here dials again."""
        for connection in list(self._unauthenticated):
            connection.transport.abort()
        for peer in self.peers:
            if peer not in peers:
                self.hang_up(peer)

    async def close(self, flush_timeout_s: float = 1.0) -> None:
        """Stops listening, sends what waits, ends all connections. No callback is called any more.

        Args:
            flush_timeout_s: how long peers have to take what waits for them.

        May be called again, and on a server that has not started.
        """
        if self._closing or self._server is None:
            return
        self._closing = True
        self._server.close()
        self._remove()
        connections = [*self._unauthenticated, *self._peers.values()]
        for connection in self._unauthenticated:
            connection.transport.abort()
        for connection in self._peers.values():
            connection.transport.close()
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=flush_timeout_s)
        left = [connection for connection in connections if not connection.lost.done()]
        for connection in left:
            connection.transport.abort()
        if left:
            await asyncio.wait([connection.lost for connection in left])
        if not self._done.done():
            self._done.set_result(None)

    # --------------------------------------------------------------------------------------------- from connections

    def new_session(self) -> Session[_T]:
        """Makes a session for a connection that was accepted."""
        return Session.listening(
            self._key,
            COORDINATOR,
            self._receives,
            self._refusal,
            key_of=self._key_of,
            security=self._security,
            max_message_bytes=self.max_message_bytes,
        )

    def next_number(self) -> int:
        """Returns a number for a connection: one that no other has had."""
        self._num_connections += 1
        return self._num_connections

    def entered(self, connection: "_Connection") -> None:
        """An unauthenticated peer has connected."""
        source = source_network(connection.transport.get_extra_info("peername"))
        if ended := self._unauthenticated.admit(connection, source):
            ended.refuse(CROWDED_OUT)

    def spoke(self, connection: "_Connection") -> None:
        """Something has come from a connection."""
        self._unauthenticated.spoke(connection)

    def left(self, connection: "_Connection") -> None:
        """A connection has ended."""
        self._unauthenticated.remove(connection)
        peer = connection.session.peer
        # One that a newer connection has replaced takes nobody along.
        if self._peers.get(peer) is connection:
            del self._peers[peer]
            if is_operator(peer):
                # It never comes again: another one has another id.
                del self._handled[peer]
                self._acknowledged.pop(peer, None)
            if not self._closing:
                self._call(self._on_closed, peer)

    def arrived(self, connection: "_Connection", frames: list[Frame]) -> None:
        """Frames have come from a peer that has proved that it holds the key."""
        peer = connection.session.peer
        answer = False
        connection.count(len(frames))
        try:
            for frame in frames:
                if self._closing or self._done.done() or connection.is_hung_up:
                    return
                if frame.kind is ControlFrameKind.OPEN:
                    self._opened(connection, peer, frame.number)
                    continue
                if frame.kind is ControlFrameKind.STORE_POSITION and connection in self._unauthenticated:
                    if not self._call(self._received_position, connection, peer, frame.message):
                        return
                    continue
                if self._peers.get(peer) is not connection or frame.kind in (
                    ControlFrameKind.ACK,
                    ControlFrameKind.STORE_POSITION,
                ):
                    raise FrameError(f"{frame.kind.name} from {peer_name(peer)}, which may not be sent here")
                # Also for one that comes again: the acknowledgement may be what was lost.
                answer |= frame.number > 0
                numbered = frame.kind is ControlFrameKind.MESSAGE and frame.number > 0
                client, handled = self._handled[peer]
                if numbered and frame.number <= handled:
                    continue
                self.age_s = frame.age_s
                if frame.message is not None and not self._call(self._on_message, peer, frame.message):
                    return
                if numbered:
                    # Only what was handled without an error is acknowledged.
                    self._handled[peer] = (client, frame.number)
        finally:
            if answer and self._peers.get(peer) is connection:
                # Also where a frame that may not come ends the connection: those before it were handled.
                newest = self._handled[peer]
                if self._history is None or self._acknowledged.get(peer) == newest:
                    self._acknowledge(peer, newest)  # nothing of it waits for the store, which may be slow
                else:
                    self._history.when_durable(partial(self._acknowledge, peer, newest))
                    if self._acknowledged.get(peer) != newest:
                        self._answer(peer)  # what was asked for is a sign of life

    def _acknowledge(self, peer: int, handled: tuple[int, int]) -> None:
        """Messages of a peer are handled, and need not be said again to any coordinator."""
        # Until it is durable another client may have come under this id, with numbers of its own.
        if self._handled.get(peer, (0, 0))[0] == handled[0]:
            self._acknowledged[peer] = handled
            self._answer(peer)

    def _answer(self, peer: int) -> None:
        connection = self._peers.get(peer)
        if connection is not None and peer in self._handled:
            client, number = self._acknowledged.get(peer, (0, 0))
            connection.write(ControlFrameKind.ACK, number if client == self._handled[peer][0] else 0, b"")

    def keep_alive(self) -> None:
        """Gives all peers a sign of life, while the caller keeps the event loop waiting."""
        for peer in self.peers:
            self._answer(peer)

    def refused(self, reason: str, is_stranger: bool) -> None:
        """Notes that a connection was turned away; of a stranger it says so."""
        now_s = self._loop.time()
        if self._lines.admit(now_s) and not self._closing:
            _log.warning("%s", reason)
            self._call(self._on_refused, reason)
            if is_stranger:
                self._call(self._on_stranger, reason)
        if self._lines.ends_s is not None and self._end_of_lines is None:
            self._end_of_lines = self._loop.call_at(self._lines.ends_s, self._say_the_rest)

    def _say_the_rest(self) -> None:
        self._end_of_lines = None
        reason = self._lines.unsaid(self._loop.time())
        if reason and not self._closing:
            _log.warning("%s", reason)
            self._call(self._on_refused, reason)

    def _received_position(self, connection: "_Connection", peer: int, store_position: StorePosition) -> None:
        """Of who is turned away the connection is never opened: it takes the place of no other one of that name. What
        an operator has heard is of no account: it is no member."""
        if is_operator(peer):
            return
        turned = self._on_store_position(peer, store_position)
        if turned is not None:
            if turned.word is not None:
                connection.write(ControlFrameKind.MESSAGE, 0, encode_payload(turned.word, self.max_message_bytes))
            connection.hang_up()

    def _opened(self, connection: "_Connection", peer: int, client: int) -> None:
        if connection not in self._unauthenticated:
            raise FrameError(f"{peer_name(peer)} opened its connection twice")
        self._unauthenticated.remove(connection)
        connection.settle(self.operator_limits if is_operator(peer) else self.limits)
        older = self._peers.get(peer)
        # Before the older one ends: `left` then finds that it is the peer's no more.
        self._peers[peer] = connection
        if older is not None:
            older.transport.abort()
        if peer not in self._handled or self._handled[peer][0] != client:
            # Another client of this id counts from 1 again.
            self._handled[peer] = (client, 0)
        self._call(self._on_connected, peer)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> bool:
        try:
            callback(*arguments)
        except Exception as error:
            if not self._done.done():
                self._done.set_exception(error)
            return False
        return True


class _Connection(asyncio.Protocol):
    """One accepted connection."""

    def __init__(self, server: ControlServer[Any]) -> None:
        self.session: Session[Any] = server.new_session()
        self.last_heartbeat_s = 0.0
        """When something came last, by the server's clock."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._settled = False
        self._number = server.next_number()
        self._sent_position: StorePosition | None = None
        self.is_hung_up = False
        """What comes is not read any more."""
        self._limits = server.limits
        self._num_frames = 0.0
        """That count against the limit."""
        self._counted_s = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # asyncio then calls `pause_writing`, which bounds the wait, as soon as one byte is left over.
        self.transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.entered(self)
        slow = "it did not finish the handshake in time"
        self._timer = self._loop.call_later(self._server.handshake_timeout_s, self.refuse, slow)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.is_hung_up:
            return
        self.last_heartbeat_s = self._server.now_s()
        if not self._settled:
            self._server.spoke(self)
        try:
            frames = self.session.feed(data)
            self._flush()
            if frames:
                self._server.arrived(self, frames)
        except (AuthenticationError, FrameError) as error:
            # What the session says of it goes out as far as the socket takes it now: `refuse` drops the rest.
            self._flush()
            is_stranger = isinstance(error, AuthenticationError) and not self.session.open and self.session.peer >= 0
            self.refuse(str(error), is_stranger=is_stranger)

    def write(self, kind: ControlFrameKind, number: int, payload: bytes) -> bool:
        """Sends a frame; returns whether the connection still stands."""
        if self._refused or self.is_hung_up or self.transport.is_closing():
            return False
        self.session.write(kind, number, payload)
        self._flush()
        waiting = self.transport.get_write_buffer_size()
        if waiting > self._limits.outbox_bytes_max:
            self.refuse(f"{peer_name(self.session.peer)} does not read: {waiting} bytes wait for it")
            return False
        return True

    def tell(self, store_position: StorePosition) -> None:
        """Sends where the history stands, if it has gone on."""
        if store_position != self._sent_position:
            self._sent_position = store_position
            self.write(ControlFrameKind.STORE_POSITION, 0, encode_payload(store_position))

    def look(self) -> Counters | None:
        """Reads what the kernel has counted; None if it is no TCP connection, or is ending."""
        if self._refused or self.is_hung_up or self.transport.is_closing():
            return None
        return counters_of(self.transport.get_extra_info("socket"), self._number)

    def settle(self, limits: PeerLimits) -> None:
        """The handshake is over: its time limit ends, the peer's own limits begin."""
        self._settled = True
        self._limits = limits
        self.session.max_message_bytes = limits.message_bytes_max
        self._stop_timer()

    def count(self, num_frames: int) -> None:
        """Frames have come.

        Raises:
            FrameError: too many in too short a time.
        """
        now_s, rate = self._loop.time(), self._limits.frames_per_s
        if rate < math.inf:
            left = self._num_frames - (now_s - self._counted_s) * rate
            self._num_frames, self._counted_s = max(0.0, left) + num_frames, now_s
            if self._num_frames > rate * BURST_S:
                raise FrameError(f"{peer_name(self.session.peer)} sends more than {rate:g} frames a second")

    def hang_up(self) -> None:
        """Ends the connection, without waiting for a peer that does not read."""
        self.is_hung_up = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        # Before `settle` the timer is the handshake's, which goes on whatever is read.
        if self._timer is None:
            stalled = f"it did not read what waited for it within {self._server.stall_timeout_s:g} s"
            self._timer = self._loop.call_later(self._server.stall_timeout_s, self.refuse, stalled)

    def resume_writing(self) -> None:
        if self._settled:
            self._stop_timer()

    def refuse(self, reason: str, *, is_stranger: bool = False) -> None:
        """Ends the connection at once, and says why."""
        if self._refused:
            return
        self._refused = True
        who = peer_name(self.session.peer) if self.session.open else "an unauthenticated peer"
        self.transport.abort()
        self._server.refused(f"control connection of {who} ended: {reason}", is_stranger)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        if not self.lost.done():
            self.lost.set_result(None)
        self._server.left(self)

    def _flush(self) -> None:
        data = self.session.take()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def counters_of(sock: socket.socket | TransportSocket, connection: int) -> Counters | None:
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
