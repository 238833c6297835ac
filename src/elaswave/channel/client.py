"""A worker's or an agent's end of its control connection: it outlives coordinators, and never stops the computation.

`send` writes to the socket from the calling thread; everything else (connecting, authenticating, receiving, heartbeats,
connecting again) happens on a thread of its own, so that it goes on while the main thread computes. A process that must
not have threads (because it forks) calls `turn` itself instead of `start`.

On each connection the client first says `hello()`, then sends again, in order, every durable message that has not been
acknowledged, and then says `facts()`. Messages that are not durable are dropped while there is no connection: `hello()`
and `facts()` are called after that, and what they say must make up for them. Messages sent meanwhile follow after the
facts, except durable ones sent while `facts()` is being called, which go before them: a fact comes neither before a
durable message that is older, nor behind another message that is newer.
"""

import contextlib
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from elaswave.channel.wire import (
    COORDINATOR,
    MAX_MESSAGE_BYTES,
    ControlFrameKind,
    Frame,
    Session,
    encode_payload,
    peer_name,
)
from elaswave.errors import AuthenticationError, BacklogError, CommError, FrameError
from elaswave.protocol.leadership.store_position import first_position, newest_position
from elaswave.transport import addresses
from elaswave.transport.handshake import Key, secrets_of
from elaswave.transport.tls import Tls

FIRST_BACKOFF_S = 0.01
LAST_BACKOFF_S = 0.25
"""Between two rounds of dials; within a round, of several addresses the next one is dialled at once."""
HANDSHAKE_TIMEOUT_S = 5.0
AMONG_SEVERAL_TIMEOUT_S = 2.0
"""The same where several are dialled in turn."""
CONNECT_AMONG_SEVERAL_S = 0.5
"""How long a host may take to accept a connection there, which its kernel does: one that is gone does not answer."""
SILENCE_TIMEOUT_S = 10.0
"""A connection on which no heartbeat has been answered for this long is given up, and made again."""
SILENCE_AMONG_SEVERAL_S = 3.0
"""The same where another candidate may have a coordinator by then."""
KNOWN_LOOKUP_S = 1.0
"""How long the look-up of a name may take that has had an address; then that one is dialled."""
MAX_UNACKNOWLEDGED_BYTES = 256 << 20
MAX_UNSENT_BYTES = 256 << 20
_READ_BYTES = 1 << 18

_log = logging.getLogger("elaswave.channel")
_T = TypeVar("_T")


def next_heartbeat_s(now_s: float, interval_s: float) -> float:
    """Computes when the next heartbeat is due: at a multiple of the interval on the machine's clock.

    So all clients of a machine send theirs at one instant, and the coordinator wakes once for them instead of once for
    each: on busy cores waking costs it more than reading.

    Args:
        now_s: monotonic time.
        interval_s: between two of them.
    """
    due_s = (now_s // interval_s + 1) * interval_s
    return due_s if due_s > now_s else due_s + interval_s  # by rounding


class _Sent(NamedTuple):
    """A message that is kept."""

    number: int
    """0 if it is not durable."""
    payload: bytes
    made_s: float
    """Monotonic time."""


class _Phase(Enum):
    """Where the connection stands."""

    DOWN = "down"
    HANDSHAKE = "handshake"
    OPENING = "opening"
    """`hello` and `standing` are being called."""
    OPEN = "open"


class ClientOwner(Protocol):
    """Whom a `ControlClient` serves. All is called on the client's thread (or in its `turn`), without locks: it may
    call `send`. What it raises ends the client, and its thread as any thread's."""

    def receive(self, message: Any) -> None:
        """A message has arrived."""

    def hello(self) -> msgspec.Struct:
        """Returns the first message on each new connection."""

    def standing(self) -> Sequence[msgspec.Struct]:
        """Lists the messages on each new connection that follow what was not acknowledged."""
        return ()

    def heartbeat(self) -> msgspec.Struct | None:
        """Returns what is sent every `ControlClient.interval_s` while connected (`next_heartbeat_s`); None: an empty
        one."""
        return None


class ControlClient(Generic[_T]):
    """A connection to the coordinator that is made again whenever it ends.

    Must be made by the process that uses it, hence after a fork; in the child of a later fork it is closed.

    Args:
        targets: where there may be a coordinator, or a successor of it: addresses, and with TLS what the certificate
            there must name; empty: as it is dialled. They are dialled in turn. A name is looked up again for every
            dial, in a thread; where that fails, or takes long, what the last look-up has found is dialled.
        key: the job's key, or several: of a ring those that it has when a connection is made.
        peer: own id.
        receives: union of the message types that may arrive.
        owner: gets what arrives, and says what is sent by itself.
        tls: certificate files; only for ``tcp:``.
        dial: begins to connect to an address.
        job_generation: of the job that the owner takes part in, see
            `elaswave.protocol.leadership.store_position.StorePosition`;
            0: it does not yet.
    Raises:
        ValueError: the key is too short, or TLS is asked for on a Unix socket.
        ConfigError: certificate files that cannot be used.

    What else can be chosen is chosen before it is used:
    """

    interval_s = 0.1
    """Between heartbeats."""
    silence_timeout_s: float
    """A connection on which heartbeats are not answered for this long is made again; at first as long as fits the
    number of targets."""
    max_message_bytes = MAX_MESSAGE_BYTES
    """Largest message in either direction."""
    max_unacknowledged_bytes = MAX_UNACKNOWLEDGED_BYTES
    """Of durable messages that are kept for the coordinator."""

    def __init__(
        self,
        targets: Sequence[tuple[str, str]],
        key: Key,
        peer: int,
        receives: Any,
        owner: ClientOwner,
        *,
        tls: Tls | None = None,
        dial: Callable[[str], socket.socket] = addresses.dial,
        job_generation: int = 0,
    ) -> None:
        address, is_alone = targets[0][0], len(targets) == 1
        if tls is not None and not address.startswith("tcp:"):
            raise ValueError(f"TLS is for tcp: addresses, but {address!r} is none: leave out the certificate")
        self.peer = peer
        self.trouble = ""
        """Why the last connection ended or could not be made."""
        self._dial_address = dial
        self._targets = list(targets)
        self._target = 0
        """Index of the one that is dialled, or connected."""
        secrets_of(key)  # checks them
        self._key = key
        self._receives = receives
        self._owner = owner
        self._security = tls.dialling() if tls else None
        self._has_tls = tls is not None
        self._dial_timeout_s = HANDSHAKE_TIMEOUT_S if is_alone else AMONG_SEVERAL_TIMEOUT_S
        self._connect_timeout_s = HANDSHAKE_TIMEOUT_S if is_alone else CONNECT_AMONG_SEVERAL_S
        self.silence_timeout_s = SILENCE_TIMEOUT_S if is_alone else SILENCE_AMONG_SEVERAL_S
        # Tells the server that numbers begin anew: a later process may have the same id.
        self._identity = secrets.randbits(64)

        # Guards everything below; threads that wait for acknowledgements wait on it. Only `turn` changes the phase.
        self._changed = threading.Condition(threading.Lock())
        self._phase = _Phase.DOWN
        self._session: Session[_T] | None = None
        self._socket: socket.socket | None = None
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        self._wants_to_write = False
        self._unacknowledged: deque[_Sent] = deque()
        self._num_unacknowledged_bytes = 0
        self._last_number = 0
        self._deaf = False
        """The other side reads no more. What it said before is still read, until the connection's end is reached."""
        self._meanwhile: list[_Sent] = []
        """Sent while `hello` and `standing` were being called."""
        self._broken: Exception | None = None
        """Set by `send` and `silence`: the connection must be given up."""
        self._silent = False
        self._store_position = first_position(job_generation) if job_generation else None
        """The newest that a coordinator has told."""
        self._closing = False
        self._closed = False

        self._created = time.monotonic()
        self._last_connected: float | None = None
        self._opened_at = 0.0
        self._first_unanswered = math.inf
        self._num_unanswered = 0
        """Heartbeats since the first one that asked for an answer and has had none."""
        self._next_question = 0.0
        self._next_heartbeat = math.inf
        self._deadline = math.inf
        """Of the handshake."""
        self._next_dial = 0.0
        self._lookups: dict[int, addresses.NameLookup] = {}
        """Of the targets' names, while they go on."""
        self._found: dict[int, list[str]] = {}
        """What the last look-up of a target's name has found."""
        self._num_dials = [0] * len(self._targets)
        """Of each target."""
        self._num_failed = 0
        """Dials since the last connection."""
        self._is_accepted = False
        """Whether the kernel of the host that is dialled has answered."""
        self._backoff_s = FIRST_BACKOFF_S
        self._thread: threading.Thread | None = None
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        _clients.add(self)

    # ------------------------------------------------------------------------------------------------- for its owner

    def start(self) -> None:
        """Starts the thread, which connects and stays connected until `close`."""
        assert self._thread is None and not self._closed
        self._thread = threading.Thread(target=self._run, name=f"control of {peer_name(self.peer)}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `turn` has something to do; for owners without a thread."""
        return self._epoll.fileno()

    def turn(self, max_wait_s: float = 0.0) -> float:
        """Does what is to be done now; for owners without a thread.

        Args:
            max_wait_s: how long to wait for something to do; `math.inf` for as long as it takes.
        Returns:
            Seconds after which it wants to be called again at the latest, even if nothing arrives.
        """
        self._wait(min(self._tend(), max_wait_s))
        return self._tend()

    def send(self, message: msgspec.Struct, durable: bool = False) -> bool:
        """Sends a message now, if there is a connection; never waits for one. Any thread may call it.

        Args:
            durable: keep the message, and send it again on every new connection until it is acknowledged.
        Returns:
            Whether it has been handed to a connection. If not, it is dropped unless it is durable.
        Raises:
            FrameError: it is larger than may be sent.
            BacklogError: too much is waiting to be acknowledged.
        """
        payload = encode_payload(message, self.max_message_bytes)
        with self._changed:
            if self._closing:
                return False
            number = 0
            if durable:
                if self._num_unacknowledged_bytes + len(payload) > self.max_unacknowledged_bytes:
                    raise BacklogError(
                        f"{len(self._unacknowledged)} messages ({self._num_unacknowledged_bytes} bytes) of "
                        f"{peer_name(self.peer)} wait for the coordinator, which has been gone for "
                        f"{self._disconnected_s():.0f} s; at most {self.max_unacknowledged_bytes} bytes are kept: "
                        "bring the coordinator back"
                    )
                self._last_number = number = self._last_number + 1
                self._unacknowledged.append(_Sent(number, payload, time.monotonic()))
                self._num_unacknowledged_bytes += len(payload)
            if self._silent or self._broken is not None:
                return False
            if self._phase is _Phase.OPENING:
                self._meanwhile.append(_Sent(number, payload, time.monotonic()))
                return True
            if self._phase is not _Phase.OPEN:
                return False
            assert self._session is not None
            self._session.write(ControlFrameKind.MESSAGE, number, payload)
            self._flush()
            return self._broken is None and not self._deaf

    def silence(self, on: bool) -> None:
        """Drops everything in both directions, as if the network did, until it is called with False.

        The connection is not closed, so that the other side sees nothing but silence; afterwards a new one is made.
        """
        with self._changed:
            if self._silent and not on:
                self._broken = ConnectionError("it was silenced")
            self._silent = on
            self._wake()

    def dial_first(self) -> None:
        """Gives up the connection: a coordinator is known to be where this client dials first. For owners without a
        thread."""
        assert self._thread is None
        with self._changed:
            if self._closed:
                return
            if self._phase is not _Phase.DOWN:
                self._drop(ConnectionError("another coordinator has taken over"))
            self._target = 0
            self._next_dial = 0.0

    def close(self, timeout_s: float = 1.0) -> bool:
        """Sends what can be sent, waits for acknowledgements, and ends the connection for good.

        Args:
            timeout_s: how long to wait for acknowledgements.
        Returns:
            Whether every durable message has been acknowledged.
        """
        deadline = time.monotonic() + timeout_s
        thread = self._thread
        with self._changed:
            self._closing = True
            # A callback may close the client: its own thread must not wait for itself.
            if thread is not None and thread is not threading.current_thread():
                self._changed.wait_for(lambda: self._closed or not self._is_waiting(), timeout_s)
        while thread is None and not self._closed and self._is_waiting() and time.monotonic() < deadline:
            self.turn(min(0.05, max(0.0, deadline - time.monotonic())))
        with self._changed:
            complete = not self._unacknowledged
            self._closed = True
            self._wake()
        if thread is None:
            self._release()
        elif thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        return complete

    @property
    def connected(self) -> bool:
        """Whether the coordinator has been greeted and the connection stands."""
        return self._phase is _Phase.OPEN

    @property
    def disconnected_s(self) -> float:
        """Seconds without a connection; 0 while there is one."""
        return self._disconnected_s()

    # ------------------------------------------------------------------------------------------------ the own thread

    def _run(self) -> None:
        try:
            wait_s = self._tend()
            while not self._closed:
                self._wait(wait_s)
                wait_s = self._tend()
        finally:
            self._release()

    def _wait(self, wait_s: float) -> None:
        """Waits for something to do, and does what has come."""
        for fd, events in self._epoll.poll(None if wait_s == math.inf else wait_s):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            else:
                self._on_ready(events)

    def _tend(self) -> float:
        """Does what is due; returns the seconds until something will be."""
        now = time.monotonic()
        with self._changed:
            if self._closed:
                return 0.0
            if self._broken is not None:
                self._drop(self._broken)
            if self._phase is _Phase.HANDSHAKE and now >= self._deadline:
                self._drop(
                    TimeoutError(
                        "the coordinator did not finish the handshake in time"
                        if self._is_accepted
                        else "the coordinator's host does not answer"
                    )
                )
            # Heartbeats too: after a stop of this process the clock alone would accuse the other side.
            if now - self._first_unanswered > self.silence_timeout_s and self._num_unanswered >= 3:
                self._target = (self._target + 1) % len(self._targets)  # a host that is gone does not answer dials
                self._drop(TimeoutError(f"the coordinator was silent for {self.silence_timeout_s:g} s"))
            if self._silent and self._phase is _Phase.DOWN:
                return math.inf
            lookup = self._lookups.get(self._target)
            if self._phase is _Phase.DOWN and (now >= self._next_dial or (lookup is not None and lookup.is_done)):
                self._dial()
        if self._phase is _Phase.OPEN and now >= self._next_heartbeat:
            # Without the lock, as all calls of the owner: it may call `send`.
            message = self._owner.heartbeat()
            payload = b"" if message is None else encode_payload(message, self.max_message_bytes)
            with self._changed:
                # Being answered costs as much as a heartbeat, so only some of them ask for it.
                asks = self._num_unanswered == 0 and now >= self._next_question
                if asks:
                    self._first_unanswered = now
                    self._next_question = now + self.silence_timeout_s / 4
                if self._session is not None:
                    self._session.write(ControlFrameKind.HEARTBEAT, int(asks), payload)
                    self._flush()
                self._num_unanswered += asks or self._num_unanswered > 0
                self._next_heartbeat = next_heartbeat_s(now, self.interval_s)
        due = {
            _Phase.DOWN: self._next_dial,
            _Phase.HANDSHAKE: self._deadline,
            _Phase.OPENING: now,
            _Phase.OPEN: self._next_heartbeat,
        }
        return max(0.0, due[self._phase] - time.monotonic())

    def _on_ready(self, events: int) -> None:
        with self._changed:
            sock, session = self._socket, self._session
            if sock is None or session is None:
                return
            try:
                if events & select.EPOLLOUT:
                    if not self._is_accepted:
                        self._is_accepted = True
                        # The host is there; from here on the coordinator has its own time.
                        self._deadline = time.monotonic() + self._dial_timeout_s
                    self._flush()
                data = sock.recv(_READ_BYTES) if events & ~select.EPOLLOUT else None
                if data == b"":
                    raise ConnectionError("the coordinator ended the connection")
                if self._silent or self._broken is not None or not data:
                    return  # also what had come before a silence was over
                frames = session.feed(data)
                self._flush()
            except BlockingIOError:
                return
            except (OSError, CommError) as error:
                if self._silent:
                    # Silence hides also this; the socket would be ready for ever.
                    self._epoll.unregister(sock)
                    self._broken = error
                else:
                    with contextlib.suppress(OSError):
                        sock.send(session.take())  # so that the other side learns why
                    self._drop(error)
                return
            opening = self._phase is _Phase.HANDSHAKE and session.open
            if opening:
                self._phase = _Phase.OPENING
        if opening:
            self._greet(session)
        for frame in frames:
            self._on_frame(frame)

    def _greet(self, session: Session[_T]) -> None:
        now_s = time.monotonic()
        replayed_state = [
            _Sent(0, encode_payload(fact, self.max_message_bytes), now_s) for fact in self._owner.standing()
        ]
        with self._changed:
            # Taken after the facts, so that no durable message that is older than one of them comes behind it.
            durable = list(self._unacknowledged)
            self._meanwhile = [sent for sent in self._meanwhile if not sent.number]
        hello = encode_payload(self._owner.hello(), self.max_message_bytes)
        with self._changed:
            # Before OPEN: a coordinator that lacks what we have heard turns us away before we count as connected (H9).
            if self._store_position is not None:
                session.write(ControlFrameKind.STORE_POSITION, 0, encode_payload(self._store_position))
            session.write(ControlFrameKind.OPEN, self._identity)
            session.write(ControlFrameKind.MESSAGE, 0, hello)
            for sent in [*durable, *replayed_state, *self._meanwhile]:
                session.write(ControlFrameKind.MESSAGE, sent.number, sent.payload, time.monotonic() - sent.made_s)
            self._meanwhile = []
            self._phase = _Phase.OPEN
            self._opened_at = time.monotonic()
            self._next_heartbeat = next_heartbeat_s(self._opened_at, self.interval_s)
            self._flush()
        if self.trouble:
            _log.info("%s is connected to the coordinator again", peer_name(self.peer))

    def _on_frame(self, frame: Frame) -> None:
        # Whatever comes is a sign of life.
        self._first_unanswered, self._num_unanswered = math.inf, 0
        if frame.kind is ControlFrameKind.MESSAGE and frame.message is not None:
            if not self._silent and self._broken is None:
                self._owner.receive(frame.message)
        elif frame.kind is ControlFrameKind.STORE_POSITION:
            if not self._silent:
                self._store_position = newest_position(self._store_position, frame.message)
        elif frame.kind is ControlFrameKind.ACK:
            with self._changed:
                while self._unacknowledged and self._unacknowledged[0].number <= frame.number:
                    self._num_unacknowledged_bytes -= len(self._unacknowledged.popleft().payload)
                self._changed.notify_all()
        else:
            with self._changed:
                self._broken = FrameError(f"{frame.kind.name} from the coordinator, which only clients may send")

    # ---------------------------------------------------------------------------------------------- under the lock

    def _dial(self) -> None:
        address, host = self._targets[self._target]
        try:
            found = [address] if not addresses.has_name(address) else self._look_up(address)
            if not found:
                return
            place = found[self._num_dials[self._target] % len(found)]  # the first one is preferred by the system
            self._num_dials[self._target] += 1
            sock = self._dial_address(place)
        except OSError as error:
            self._drop(error)
            return
        self._socket = sock
        self._session = Session.dialling(
            self._key,
            self.peer,
            COORDINATOR,
            self._receives,
            security=self._security,
            host=host or (addresses.host_of(address) if self._has_tls else ""),
            max_message_bytes=self.max_message_bytes,
        )
        self._phase = _Phase.HANDSHAKE
        self._is_accepted = False
        self._deadline = time.monotonic() + self._connect_timeout_s
        self._wants_to_write = True  # the first bytes follow when the connection is there
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)

    def _look_up(self, address: str) -> list[str]:
        """Finds the addresses of the target's name; none while that is being looked up.

        Raises:
            OSError: it has none, or the look-up takes long, and none was known before.
        """
        target = self._target
        lookup = self._lookups.get(target)
        if lookup is None:
            timeout_s = KNOWN_LOOKUP_S if target in self._found else None
            self._lookups[target] = lookup = addresses.NameLookup(address, self._wake_from_outside, timeout_s)
            self._next_dial = time.monotonic() + lookup.left_s
            return []
        if lookup.is_done:
            del self._lookups[target]  # else it goes on, and its result is for a later dial: no name has two threads
        try:
            self._found[target] = lookup.results()
        except OSError:
            if target not in self._found:
                raise
        return self._found[target]

    def _flush(self) -> None:
        """Writes what the session has to say; what does not fit is written when the socket takes it."""
        assert self._session is not None and self._socket is not None
        # Also taken where it is dropped, else it would go out after the silence.
        data = self._session.take()
        if self._silent or self._deaf:
            return
        if data:
            self._unsent.append(memoryview(data))
            self._num_unsent_bytes += len(data)
        try:
            while self._unsent:
                written = self._socket.send(self._unsent[0])
                self._num_unsent_bytes -= written
                if written == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][written:]
        except BlockingIOError:
            pass
        except OSError:
            self._deaf = True
            return
        if self._num_unsent_bytes > MAX_UNSENT_BYTES:
            self._broken = ConnectionError(f"the coordinator does not read: {self._num_unsent_bytes} bytes wait for it")
            self._wake()
            return
        if bool(self._unsent) != self._wants_to_write:
            self._wants_to_write = bool(self._unsent)
            self._epoll.modify(self._socket, select.EPOLLIN | (select.EPOLLOUT if self._wants_to_write else 0))
        if not self._unsent:
            self._changed.notify_all()

    def _drop(self, error: Exception) -> None:
        """The connection has ended, or could not be made; another try follows."""
        now = time.monotonic()
        if self._phase is _Phase.OPEN:
            self._last_connected = now
            self._num_failed = 0
            # One that ended at once was no success: who hangs up on us is not to be dialled a hundred times a second.
            if now - self._opened_at >= LAST_BACKOFF_S:
                self._backoff_s = FIRST_BACKOFF_S
        else:
            # Only after a failed try the next one is dialled: where a coordinator was there may be its successor.
            self._num_failed += 1
            self._target = (self._target + 1) % len(self._targets)
        if self._socket is not None:
            self._socket.close()  # leaves the epoll set by itself
        self._socket = self._session = self._broken = None
        self._deaf = False
        self._unsent.clear()
        self._num_unsent_bytes = 0
        self._phase = _Phase.DOWN
        self._first_unanswered, self._num_unanswered = math.inf, 0
        # All targets are dialled before there is a wait.
        if self._num_failed % len(self._targets):
            self._next_dial = now
        else:
            self._next_dial = now + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self.trouble:
            level = logging.WARNING if isinstance(error, AuthenticationError | FrameError) else logging.INFO
            _log.log(level, "%s has no connection to the coordinator: %s", peer_name(self.peer), error)
        self.trouble = trouble
        self._changed.notify_all()

    def _disconnected_s(self) -> float:
        if self._phase is _Phase.OPEN:
            return 0.0
        return time.monotonic() - (self._created if self._last_connected is None else self._last_connected)

    def _is_waiting(self) -> bool:
        return not self._silent and bool(self._unacknowledged or self._unsent)

    # ------------------------------------------------------------------------------------------------------ its end

    def _wake_from_outside(self) -> None:
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _release(self) -> None:
        with self._changed:
            self._close_descriptors()
            self._changed.notify_all()

    def _close_descriptors(self) -> None:
        self._closing = self._closed = True
        if self._phase is _Phase.OPEN:
            self._last_connected = time.monotonic()
        self._phase = _Phase.DOWN
        if self._socket is not None:
            self._socket.close()
        self._socket = self._session = None
        self._epoll.close()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1


_clients: "weakref.WeakSet[ControlClient[Any]]" = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that kept the descriptors would hold its parent's connection open beyond the parent's end, and its thread
    # does not exist here. The lock may have been held by that thread, so it is replaced.
    for client in list(_clients):
        client._changed = threading.Condition(threading.Lock())
        client._thread = None
        client._close_descriptors()


os.register_at_fork(after_in_child=_close_in_child)
