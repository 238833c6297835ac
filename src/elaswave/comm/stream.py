"""The socket transport: Unix-domain sockets on one host, TCP between hosts, for CPU tensors.

One thread does everything: bytes move inside the calls of the worker's own thread (handing frames through an I/O thread
halves the speed). One epoll set holds the links, the listener, the handshakes in progress, the descriptor that
``interrupt`` writes to and those that are watched for the caller; so every wait wakes for each of them.

Strangers cannot disturb: at most ``_MAX_HANDSHAKES`` connections may be in the handshake, each for a bounded time and with
64 bytes of memory, and nothing ever blocks on them. What is refused is logged under ``elaswave.comm``.

Deliberately absent: deciding who is alive. A link that ends is reported to whoever needs it; the control plane decides.
"""

import contextlib
import logging
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from elaswave.comm import addresses as address_book
from elaswave.comm.frames import Tag, byte_views, decode_header, encode_header
from elaswave.comm.handshake import NONCE_BYTES, Dialler, Listener, check_key
from elaswave.comm.link import SCRATCH_BYTES, Link, LinkEndedError
from elaswave.comm.transport import (
    DEFAULT_MAX_FRAME_BYTES,
    DEFAULT_MAX_UNEXPECTED_BYTES,
    Handle,
    Inbox,
    complete,
    describe_pending,
    fail,
    make_recv,
)
from elaswave.errors import (
    AuthenticationError,
    CommError,
    FrameError,
    InterruptedWaitError,
    PeerLostError,
    WaitTimeoutError,
)

_log = logging.getLogger("elaswave.comm")

_MAX_HANDSHAKES = 128
_REDIAL_S = 0.01
_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


class _Side(Protocol):
    """One side of the handshake (see ``handshake``)."""

    peer: int
    done: bool
    bytes_needed: int

    def opening(self) -> bytes: ...

    def receive(self, data: bytes) -> bytes: ...


class _Handshake:
    """A connection that is not a link yet."""

    def __init__(self, sock: socket.socket, side: _Side, deadline: float, dialled: bool) -> None:
        self.sock = sock
        self.side = side
        self.deadline = deadline
        self.dialled = dialled
        self.received = b""
        self.to_send = side.opening()


class StreamTransport:
    """``Transport`` over sockets; see there for what the methods promise.

    Args:
        worker: id of this worker.
        key: secret of the job, at least 16 bytes; whoever does not hold it cannot link.
        listen: ``unix:/private/folder`` or ``tcp:10.0.0.7`` (see ``addresses``).
        epoch: epoch to start with.
        max_frame_bytes: largest payload accepted from a peer.
        max_unexpected_bytes: most bytes kept for each peer of frames that nobody has asked for yet.
        handshake_timeout_s: time that a stranger has to prove itself.
    Raises:
        OSError: the system refuses to listen there.
        ValueError: the key is too short or the address is unusable.
    """

    def __init__(
        self,
        worker: int,
        *,
        key: bytes,
        listen: str,
        epoch: int = 0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_unexpected_bytes: int = DEFAULT_MAX_UNEXPECTED_BYTES,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        self.worker = worker
        self.epoch = epoch
        self._key = check_key(key)
        self._max_frame_bytes = max_frame_bytes
        self._max_unexpected_bytes = max_unexpected_bytes
        self._handshake_timeout_s = handshake_timeout_s
        self._scratch = bytearray(SCRATCH_BYTES)
        self._links: dict[int, Link] = {}
        self._inboxes: dict[int, Inbox] = {worker: Inbox(worker, epoch, max_unexpected_bytes)}
        self._lost: dict[int, str] = {}
        self._members: frozenset[int] = frozenset()
        self._former: set[int] = set()
        self._handshakes: dict[int, _Handshake] = {}
        self._dial_trouble: dict[int, Exception] = {}
        self._past_sent: dict[int, int] = {}
        self._past_received: dict[int, int] = {}
        self._interrupt: tuple[str, int | None] | None = None
        self._closed = False
        self._listener, self._address, self._remove_listener = address_book.listen(listen, worker)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._on_event: dict[int, Callable[[int], None]] = {}
        self._register(self._listener.fileno(), self._accept)
        self._register(self._wake_fd, self._on_wake)
        _open_transports.add(self)

    # ------------------------------------------------------------------ what it is

    @property
    def address(self) -> str:
        """What other workers pass to ``connect`` to reach this one."""
        return self._address

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        return frozenset(self._links)

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

    # ------------------------------------------------------------------ messages

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """Start sending; see ``Transport.send``."""
        views = byte_views(tensors)
        length = sum(map(len, views))
        header = encode_header(self.epoch, tag, tensors, length)
        handle = Handle("send", dst, tag)
        link = self._links.get(dst)
        if link is None:
            if dst == self.worker and not self._closed:
                self._send_to_self(handle, header, views)
            else:
                fail(handle, self._no_link(dst))
            return handle
        handle.keep = tensors
        waited = link.wants_write
        views.insert(0, memoryview(header))
        try:
            link.send(handle, views)
        except LinkEndedError as error:
            self._link_ended(link, str(error))
            if not handle.done:
                fail(handle, self._no_link(dst))
            return handle
        if link.wants_write and not waited:
            self._epoll.modify(link.sock.fileno(), _READ | _WRITE)
        return handle

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """Start receiving; see ``Transport.recv``."""
        handle = make_recv(src, tag, out)
        inbox = self._inboxes.get(src)
        if inbox is None or (src not in self._links and src != self.worker and not inbox.has_frame(tag)):
            fail(handle, self._no_link(src))
        else:
            inbox.post(handle)
        return handle

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """Block until all are done well or one has failed; see ``Transport.wait``."""
        pending = [handles] if isinstance(handles, Handle) else list(handles)
        deadline = 0.0
        while True:
            still = []
            for handle in pending:
                if not handle.done:
                    still.append(handle)
                elif handle.error is not None:
                    raise handle.error
            if not still:
                return
            pending = still
            if self._interrupt is not None:
                self._raise_interrupt()
            now = time.monotonic()
            if not deadline:
                deadline = now + timeout_s
            if now >= deadline:
                raise WaitTimeoutError(f"worker {self.worker} waited {timeout_s:g} s for {describe_pending(pending)}")
            self._turn(deadline - now)

    def poll(self) -> None:
        """Move bytes that can move now, without blocking."""
        self._turn(0)

    def interrupt(self, reason: str, epoch: int | None = None) -> None:
        """Wake the wait that is blocked, or the next one that would block; thread-safe. See ``Transport.interrupt``."""
        self._interrupt = (reason, epoch)
        with contextlib.suppress(OSError):  # closed meanwhile: nobody waits any more
            os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int, callback: Callable[[], None] | None) -> None:
        """Call back whenever a file descriptor is readable; see ``Transport.watch``."""
        if callback is None:
            self._unregister(fd)
        else:
            watched = callback
            self._register(fd, lambda _: watched())

    # ------------------------------------------------------------------ membership

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Make the links that are missing; see ``Transport.connect``."""
        wanted = {peer: address for peer, address in addresses.items() if peer != self.worker}
        deadline = time.monotonic() + timeout_s
        redial_at = dict.fromkeys((peer for peer in wanted if peer > self.worker), 0.0)
        self._dial_trouble.clear()
        while missing := [peer for peer in wanted if peer not in self._links]:
            if self._interrupt is not None:
                self._raise_interrupt()
            now = time.monotonic()
            if now >= deadline:
                seen = "; ".join(
                    f"worker {peer} at {wanted[peer]}: {self._dial_trouble.get(peer, 'no sign of it')}"
                    for peer in missing
                )
                raise WaitTimeoutError(f"worker {self.worker} has no link after {timeout_s:g} s to {seen}")
            dialling = {handshake.side.peer for handshake in self._handshakes.values() if handshake.dialled}
            wake_at = deadline
            for peer in missing:
                if peer <= self.worker or peer in dialling:
                    continue
                if now >= redial_at[peer]:
                    redial_at[peer] = now + _REDIAL_S
                    self._dial(peer, wanted[peer], deadline)
                wake_at = min(wake_at, redial_at[peer])
            self._turn(max(0.0, wake_at - now))
            for peer in missing:
                trouble = self._dial_trouble.get(peer)
                if isinstance(trouble, AuthenticationError):
                    raise trouble

    def advance_epoch(self, epoch: int, members: Iterable[int]) -> None:
        """Edit the membership in place; see ``Transport.advance_epoch``."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow epoch {self.epoch}: epochs only grow")
        members = frozenset(members)
        self.epoch = epoch
        self._former |= self._members - members
        self._members = members
        for peer in list(self._links):
            if peer in members:
                self._links[peer].advance(epoch)
                self._watch_writes(self._links[peer])
            else:
                self._close_link(
                    peer,
                    f"it is not a member of epoch {epoch}",
                    InterruptedWaitError(f"epoch {epoch} has begun without worker {peer}"),
                )
        for peer in list(self._inboxes):
            if peer not in self._links:
                self._inboxes[peer].advance(epoch, None)
            if peer not in members and peer != self.worker:
                del self._inboxes[peer]

    def close(self) -> None:
        """End all links and remove the socket file; may be called twice."""
        if self._closed:
            return
        self._closed = True
        error = InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        for peer in list(self._links):
            self._close_link(peer, "the transport was closed", error)
        self._inboxes.clear()
        self._release()
        self._remove_listener()
        _open_transports.discard(self)

    def _release(self) -> None:
        """Close every descriptor; also used in forked children, where nothing may be sent or removed."""
        self._closed = True
        for link in self._links.values():
            link.sock.close()
        for handshake in self._handshakes.values():
            handshake.sock.close()
        self._handshakes.clear()
        self._on_event.clear()
        self._listener.close()
        self._epoll.close()
        os.close(self._wake_fd)
        self._wake_fd = -1

    # ------------------------------------------------------------------ the loop

    def _turn(self, timeout_s: float) -> None:
        """Wait once for anything and serve it."""
        if self._closed:
            raise InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        if self._handshakes:
            timeout_s = min(timeout_s, self._expire_handshakes())
        for fd, event in self._epoll.poll(timeout_s):
            on_event = self._on_event.get(fd)
            if on_event is not None:  # an earlier event of this turn may have closed it
                on_event(event)

    def _register(self, fd: int, on_event: Callable[[int], None], mask: int = _READ) -> None:
        if fd in self._on_event:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._on_event[fd] = on_event

    def _unregister(self, fd: int) -> None:
        if self._on_event.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed by its owner already
                self._epoll.unregister(fd)

    def _on_wake(self, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        assert interrupt is not None
        reason, epoch = interrupt
        if epoch is None or epoch > self.epoch:
            raise InterruptedWaitError(reason)

    # ------------------------------------------------------------------ links

    def _on_link_event(self, link: Link, event: int) -> None:
        try:
            if event & ~_WRITE:
                link.read()
            if event & _WRITE:
                link.flush()
                self._watch_writes(link)
        except LinkEndedError as error:
            self._link_ended(link, str(error))
        except FrameError as error:
            self._close_link(link.peer, f"it sent what cannot be right: {error}")

    def _watch_writes(self, link: Link) -> None:
        if not link.wants_write:
            self._epoll.modify(link.sock.fileno(), _READ)

    def _link_ended(self, link: Link, detail: str) -> None:
        """A connection is over: take what the peer sent before the end, then report it."""
        try:
            while link.sock.fileno() >= 0:
                before = link.bytes_received
                link.read()
                if link.bytes_received == before:
                    break
        except LinkEndedError:
            pass
        except FrameError as error:
            detail = f"{detail}; and it sent what cannot be right: {error}"
        self._close_link(link.peer, detail)

    def _close_link(self, peer: int, detail: str, error: CommError | None = None) -> None:
        link = self._links.pop(peer)
        self._past_sent[peer] = self._past_sent.get(peer, 0) + link.bytes_sent
        self._past_received[peer] = self._past_received.get(peer, 0) + link.bytes_received
        self._lost[peer] = detail
        self._unregister(link.sock.fileno())
        link.close(detail, error)
        if error is None:
            _log.warning("worker %d lost worker %d: %s", self.worker, peer, detail)

    def _no_link(self, peer: int) -> CommError:
        if self._closed:
            return InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        return PeerLostError(peer, self._lost.get(peer, f"worker {self.worker} was never linked with it: call connect"))

    def _send_to_self(self, handle: Handle, header: bytes, views: list[memoryview]) -> None:
        try:
            self._inboxes[self.worker].deliver(decode_header(header, 0, self._max_frame_bytes), views)
        except FrameError as error:
            fail(handle, error)
        else:
            complete(handle)

    # ------------------------------------------------------------------ handshakes

    def _refusal(self, peer: int) -> str | None:
        if peer >= self.worker:
            return "the lower id dials"
        if peer in self._former:
            return f"it has left; ids are never used again (this worker is at epoch {self.epoch})"
        return None

    def _accept(self, event: int) -> None:
        for _ in range(16):
            try:
                sock, _address = self._listener.accept()
            except OSError:  # nobody there any more, or no descriptor left: the next turn tries again
                return
            address_book.tune(sock)
            strangers = [handshake for handshake in self._handshakes.values() if not handshake.dialled]
            if len(strangers) >= _MAX_HANDSHAKES:
                self._end_handshake(strangers[0], TimeoutError("too many handshakes at once; the oldest is dropped"))
            side = Listener(self._key, self.worker, os.urandom(NONCE_BYTES), self._refusal)
            self._begin_handshake(sock, side, time.monotonic() + self._handshake_timeout_s, dialled=False)

    def _dial(self, peer: int, address: str, deadline: float) -> None:
        try:
            sock = address_book.dial(address)
        except OSError as error:
            self._dial_trouble[peer] = error
            return
        side = Dialler(self._key, self.worker, peer, os.urandom(NONCE_BYTES))
        self._begin_handshake(sock, side, min(deadline, time.monotonic() + self._handshake_timeout_s), dialled=True)

    def _begin_handshake(self, sock: socket.socket, side: _Side, deadline: float, *, dialled: bool) -> None:
        handshake = _Handshake(sock, side, deadline, dialled)
        self._handshakes[sock.fileno()] = handshake
        mask = _WRITE if dialled else _READ
        self._register(sock.fileno(), lambda event: self._on_handshake_event(handshake), mask)

    def _on_handshake_event(self, handshake: _Handshake) -> None:
        sock, side = handshake.sock, handshake.side
        try:
            if handshake.to_send:  # at most 64 bytes in flight: they always fit, or the other side is not one of ours
                sent = sock.send(handshake.to_send)
                if sent < len(handshake.to_send):
                    raise AuthenticationError("its connection does not even take a greeting")
                handshake.to_send = b""
                self._epoll.modify(sock.fileno(), _READ)
                return
            data = sock.recv(side.bytes_needed - len(handshake.received))
            if not data:
                raise ConnectionError(
                    "it closed the connection during the handshake (it refuses this worker, or holds another key)"
                )
            handshake.received += data
            if len(handshake.received) < side.bytes_needed:
                return
            received, handshake.received = handshake.received, b""
            reply = side.receive(received)
            if reply and sock.send(reply) < len(reply):
                raise AuthenticationError("its connection does not even take a greeting")
        except BlockingIOError:
            return
        except (OSError, AuthenticationError) as error:
            self._end_handshake(handshake, error)
            return
        if side.done:
            self._establish(handshake)

    def _establish(self, handshake: _Handshake) -> None:
        sock, peer = handshake.sock, handshake.side.peer
        del self._handshakes[sock.fileno()]
        if peer in self._links:  # it dials again because its end of the old link is gone
            self._close_link(peer, "it has dialled again")
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = Inbox(peer, self.epoch, self._max_unexpected_bytes)
        link = Link(peer, sock, inbox, self._scratch, self._max_frame_bytes)
        self._links[peer] = link
        self._lost.pop(peer, None)
        self._register(sock.fileno(), lambda event: self._on_link_event(link, event))

    def _end_handshake(self, handshake: _Handshake, error: Exception) -> None:
        fd = handshake.sock.fileno()
        del self._handshakes[fd]
        self._unregister(fd)
        handshake.sock.close()
        if handshake.dialled:
            self._dial_trouble[handshake.side.peer] = error
        else:
            _log.warning("worker %d refused a connection: %s", self.worker, error)

    def _expire_handshakes(self) -> float:
        """Drop the handshakes that took too long; returns the seconds until the next one has."""
        now = time.monotonic()
        nearest = float("inf")
        for handshake in list(self._handshakes.values()):
            if handshake.deadline <= now:
                self._end_handshake(handshake, TimeoutError("it did not prove itself in time"))
            else:
                nearest = min(nearest, handshake.deadline - now)
        return nearest


_open_transports: "weakref.WeakSet[StreamTransport]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child must not hold its parent's links open: peers would not see the parent's death."""
    for transport in list(_open_transports):
        transport._release()
    _open_transports.clear()


os.register_at_fork(after_in_child=_forget_in_child)
