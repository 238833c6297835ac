"""One live connection to a peer, how its frames meet receives, and what the one thread of a transport blocks on.

A `Link` takes frames out of a queue and puts frames into an inbox; it never blocks. Reading always drains, whatever the
state of the receives, so that a send which a peer has begun can always end. Small frames are read many at a time
through one scratch buffer; the body of a large one goes straight to where it belongs. Who may connect, when to call and
what to do with a lost link are the transport's business (``stream``).

An `Inbox` holds, for one peer, the receives that wait for a frame and the frames that wait for a receive: pure
bookkeeping that all transports share, so that they cannot differ in it. Its generation rules (rules 1, 4, 7 and 8 of
"The commit, exactly" in the design):

- a frame of an older generation is read and dropped; of a newer one it is kept, within a bound, until the receiver
  advances;
- advancing fails everything that is pending, and from then on nothing of the old generation is written into the
  caller's memory: a buffer that is half filled is swapped for scratch in the same call;
- frames that had arrived but were not asked for are forgotten with their generation.

A `Waiter` holds the epoll set, the descriptor that ``interrupt`` writes to from any thread, and the loop behind
``Transport.wait``. It knows nothing of links and frames, and of generations only whether an interrupt's is newer.
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from elaswave.errors import CommError, FrameError, InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.transport.interface import (
    BYTES_CODE,
    HEADER_BYTES,
    Failures,
    FrameHeader,
    Handle,
    Tag,
    byte_view,
    byte_views,
    common_dtype_code,
    complete,
    decode_header,
    describe_pending,
    empty_tensor,
    fail,
)
from elaswave.transport.tls import TlsSocket


class Incoming:
    """A frame whose payload is on its way in."""

    __slots__ = ("buffer", "generation", "handle", "header", "remaining", "views")

    def __init__(self, header: FrameHeader) -> None:
        self.header = header
        self.generation = header.generation
        self.remaining = header.length
        self.views: list[memoryview] | None = None
        """Where the next bytes go; None: they are dropped."""
        self.handle: Handle | None = None
        self.buffer: Tensor | None = None

    def discard(self) -> None:
        """Drop what has come and what is still to come; the memory is never touched again."""
        self.views = None
        self.handle = None
        self.buffer = None


class Inbox:
    """Receives and frames of one peer.

    Args:
        peer: the sender.
        generation: present generation.
        max_unexpected_bytes: bound for frames that are not asked for yet, newer generations included.
    """

    def __init__(self, peer: int, generation: int, max_unexpected_bytes: int) -> None:
        self.peer = peer
        self.generation = generation
        self.max_unexpected_bytes = max_unexpected_bytes
        self.stored_bytes = 0
        self._posted: dict[Tag, deque[Handle]] = {}
        self._arrived: dict[Tag, deque[tuple[FrameHeader, Tensor]]] = {}
        self._newer: list[tuple[FrameHeader, Tensor]] = []

    def post(self, handle: Handle) -> bool:
        """Add a receive.

        Returns:
            True if its frame was here already and the handle is done.
        """
        frames = self._arrived.get(handle.tag)
        if frames is None:
            handles = self._posted.get(handle.tag)
            if handles is None:
                self._posted[handle.tag] = deque((handle,))
            else:
                handles.append(handle)
            return False
        header, buffer = frames.popleft()
        if not frames:
            del self._arrived[handle.tag]
        self.stored_bytes -= header.length
        _hand_over(handle, header, buffer)
        return True

    def has_frame(self, tag: Tag) -> bool:
        """A frame of this tag is here and not yet asked for."""
        return tag in self._arrived

    def begin(self, header: FrameHeader) -> Incoming:
        """Decide where the payload of a frame goes.

        Raises:
            FrameError: the peer has sent more unexpected bytes than allowed.
        """
        frame = Incoming(header)
        if header.generation < self.generation:
            return frame
        if header.generation == self.generation:
            handle = self._take_posted(header.tag)
            if handle is not None:
                if handle.views is None:
                    buffer = empty_tensor(header.dtype_code, header.shape)
                    frame.buffer = buffer
                    frame.views = [byte_view(buffer)] if header.length else []
                elif (problem := _misfit(handle, header)) is None:
                    frame.views = handle.views
                else:
                    # The payload is read all the same, and dropped: the next header stands behind it.
                    fail(handle, FrameError(problem))
                    return frame
                frame.handle = handle
                return frame
        if self.stored_bytes + header.length > self.max_unexpected_bytes:
            raise FrameError(
                f"worker {self.peer} has sent {self.stored_bytes + header.length} bytes that were not asked for, the "
                f"limit is {self.max_unexpected_bytes}: post receives earlier or raise max_unexpected_bytes"
            )
        self.stored_bytes += header.length
        frame.buffer = empty_tensor(header.dtype_code, header.shape)
        frame.views = [byte_view(frame.buffer)] if header.length else []
        return frame

    def deliver(self, header: FrameHeader, payload: Sequence[memoryview]) -> None:
        """Take a whole frame at once, by copying its payload.

        Raises:
            FrameError: the peer has sent more unexpected bytes than allowed.
        """
        frame = self.begin(header)
        if frame.views is not None:
            copy_bytes(payload, frame.views)
        self.finish(frame)

    def finish(self, frame: Incoming) -> None:
        """Take a frame whose payload is complete."""
        handle, buffer, header = frame.handle, frame.buffer, frame.header
        if handle is not None:
            if buffer is not None:
                handle.result = buffer
            complete(handle)
        elif buffer is None:
            pass  # dropped
        elif header.generation == self.generation:
            # A receive may have been posted while the payload came in.
            handle = self._take_posted(header.tag)
            if handle is not None:
                self.stored_bytes -= header.length
                _hand_over(handle, header, buffer)
            else:
                self._arrived.setdefault(header.tag, deque()).append((header, buffer))
        else:
            self._newer.append((header, buffer))

    def abandon(self, frame: Incoming, error: CommError) -> None:
        """Forget a frame that will never be complete; its receive fails."""
        if frame.handle is not None:
            fail(frame.handle, error)
        elif frame.buffer is not None:
            self.stored_bytes -= frame.header.length
        frame.discard()

    def fail_posted(self, make_error: Callable[[], CommError]) -> None:
        """Fail all receives that wait; frames that have arrived stay."""
        for handles in self._posted.values():
            for handle in handles:
                fail(handle, make_error())
        self._posted.clear()

    def advance(self, generation: int, incoming: Incoming | None) -> None:
        """Move to a newer generation.

        Args:
            generation: the new generation.
            incoming: the frame that is being filled just now, if any; swapped for scratch if it is of an older
                generation.
        """
        if incoming is not None and incoming.generation < generation:
            self.abandon(incoming, interrupted_by_generation(generation))
        self.fail_posted(lambda: interrupted_by_generation(generation))
        self._arrived.clear()
        self.generation = generation
        # A newer frame that is half here keeps its share of the bound.
        self.stored_bytes = incoming.header.length if incoming is not None and incoming.buffer is not None else 0
        newer, self._newer = self._newer, []
        for header, buffer in newer:
            if header.generation < generation:
                continue
            self.stored_bytes += header.length
            if header.generation == generation:
                self._arrived.setdefault(header.tag, deque()).append((header, buffer))
            else:
                self._newer.append((header, buffer))

    def _take_posted(self, tag: Tag) -> Handle | None:
        handles = self._posted.get(tag)
        if handles is None:
            return None
        handle = handles.popleft()
        if not handles:
            del self._posted[tag]
        return handle


def make_recv(src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None, failures: Failures) -> Handle:
    """Makes a receive handle whose memory has been checked; raises ValueError as :func:`byte_view`."""
    handle = Handle("recv", src, tag, failures)
    if out is not None:
        handle.views = byte_views(out)
        handle.dtype_code = common_dtype_code(out)
        handle.keep = out
        if isinstance(out, Tensor):
            handle.result = out
    return handle


def interrupted_by_generation(generation: int) -> InterruptedWaitError:
    """Makes the error of everything that was pending when a generation began."""
    return InterruptedWaitError(f"generation {generation} has begun; what was pending belongs to an older one")


def copy_bytes(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """Copy one run of bytes to another of the same length, however either is cut."""
    if len(source) == len(target) == 1:
        target[0][:] = source[0]
        return
    pieces = iter(source)
    piece = memoryview(b"")
    for view in target:
        filled = 0
        while filled < len(view):
            if not piece:
                piece = next(pieces)
            size = min(len(piece), len(view) - filled)
            view[filled : filled + size] = piece[:size]
            piece = piece[size:]
            filled += size


def _misfit(handle: Handle, header: FrameHeader) -> str | None:
    """Tells why a frame does not fit the memory of a receive, or returns None."""
    assert handle.views is not None
    room = sum(map(len, handle.views))
    if room != header.length:
        return (
            f"worker {handle.peer} sent {header.length} bytes as {header.tag} but the receive has room for {room}: "
            "both sides must agree on shape and dtype"
        )
    if handle.dtype_code != header.dtype_code and BYTES_CODE not in (handle.dtype_code, header.dtype_code):
        return (
            f"worker {handle.peer} sent dtype code {header.dtype_code} as {header.tag} but the receive expects "
            f"{handle.dtype_code} (see elaswave.transport.interface): both sides must agree on the dtype"
        )
    return None


def _hand_over(handle: Handle, header: FrameHeader, buffer: Tensor) -> None:
    """Give a frame that lies in its own memory to a receive."""
    if handle.views is None:
        handle.result = buffer
    elif (problem := _misfit(handle, header)) is not None:
        fail(handle, FrameError(problem))
        return
    elif header.length:
        copy_bytes([byte_view(buffer)], handle.views)
    complete(handle)


SCRATCH_BYTES = 64 << 10
"""Size of the read buffer that all links of a transport share; frames that fit need one system call together."""
_MAX_VIEWS_PER_CALL = 256  # the system's bound is 1,024
_MAX_READS_PER_TURN = 16  # then the other links have their turn


class LinkEndedError(Exception):
    """The connection is over. Stays inside the transport, which turns it into PeerLostError."""


class _Outgoing:
    """A frame that did not fit into the socket's buffer yet."""

    __slots__ = ("handle", "started", "views")

    def __init__(self, handle: Handle | None, views: list[memoryview], started: bool) -> None:
        self.handle = handle
        self.views = views
        self.started = started


class Link:
    """A connection to an authenticated peer.

    Args:
        peer: its worker id.
        sock: connected, non-blocking.
        inbox: where its frames go.
        scratch: read buffer of at least ``SCRATCH_BYTES``, shared by the links of one transport.
        max_frame_bytes: largest payload that is accepted.
    """

    def __init__(
        self, peer: int, sock: socket.socket | TlsSocket, inbox: Inbox, scratch: bytearray, max_frame_bytes: int
    ) -> None:
        self.peer = peer
        self.sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self.inbox = inbox
        self.bytes_sent = 0
        self.bytes_received = 0
        self._scratch = memoryview(scratch)
        self._max_frame_bytes = max_frame_bytes
        self._queue: deque[_Outgoing] = deque()
        self._incoming: Incoming | None = None
        self._partial = b""  # the beginning of a header

    @property
    def wants_write(self) -> bool:
        """Frames wait for room in the socket."""
        return bool(self._queue)

    def send(self, handle: Handle, views: list[memoryview]) -> None:
        """Send a frame, as far as the socket takes it now; the rest is queued.

        Args:
            handle: done once the last byte is handed to the system.
            views: header and payload, none of them empty.
        Raises:
            LinkEndedError: the connection is over.
        """
        # Behind a frame that has left in part: bytes of two frames must not mix.
        if self._queue:
            self._queue.append(_Outgoing(handle, views, started=False))
            return
        sent = self._write(views)
        if views or self._is_held():
            self._queue.append(_Outgoing(handle, views, started=sent > 0))
        else:
            complete(handle)

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it now.

        Raises:
            LinkEndedError: the connection is over.
        """
        while self._queue:
            frame = self._queue[0]
            if self._write(frame.views):
                frame.started = True
            if frame.views or self._is_held():
                return
            self._queue.popleft()
            if frame.handle is not None:
                complete(frame.handle)

    def read(self) -> None:
        """Take what has come, up to a bound that keeps one busy peer from starving the others.

        Raises:
            FrameError: the peer has sent what cannot be right.
            LinkEndedError: the connection is over; everything that came before its end has been taken.
        """
        num_reads = 0
        # What TLS has decrypted wakes nobody any more: it is read whatever the turn.
        while num_reads < _MAX_READS_PER_TURN or (self._tls is not None and self._tls.pending):
            num_reads += 1
            incoming = self._incoming
            if incoming is None:
                if not self._read_frames():
                    return
            elif not self._read_body(incoming):
                return

    def advance(self, generation: int) -> None:
        """Forget what belongs to older generations; their memory is the callers' again when this returns."""
        self.inbox.advance(generation, self._incoming)
        if not self._queue:
            return
        head = self._queue[0]
        keep: deque[_Outgoing] = deque()
        if head.started:  # the peer has its beginning: finish it from a private copy
            keep.append(_Outgoing(None, [memoryview(b"".join(head.views))], started=True))
        for frame in self._queue:
            if frame.handle is not None:
                fail(frame.handle, interrupted_by_generation(generation))
        self._queue = keep

    def close(self, detail: str, error: CommError | None = None) -> None:
        """End the connection; everything that needs it fails.

        Args:
            detail: what was seen, for PeerLostError.
            error: raised instead of PeerLostError where the end was our own wish.
        """

        def make_error() -> CommError:
            return error if error is not None else PeerLostError(self.peer, detail)

        self.sock.close()
        if self._incoming is not None:
            self.inbox.abandon(self._incoming, make_error())
            self._incoming = None
        for frame in self._queue:
            if frame.handle is not None:
                fail(frame.handle, make_error())
        self._queue.clear()
        self.inbox.fail_posted(make_error)

    def _is_held(self) -> bool:
        """The last bytes that were sent have not been handed to the system whole."""
        return self._tls is not None and self._tls.holds

    def _write(self, views: list[memoryview]) -> int:
        """Hand bytes to the system and remove them from ``views``; returns how many."""
        total = 0
        while views or self._is_held():
            try:
                sent = self.sock.sendmsg(views[:_MAX_VIEWS_PER_CALL])
            except BlockingIOError:
                break
            except OSError as error:
                raise LinkEndedError(f"sending failed: {error}") from error
            total += sent
            _consume(views, sent)
        self.bytes_sent += total
        return total

    def _read_frames(self) -> bool:
        """Read into scratch and take the frames found there; returns whether there may be more to read."""
        scratch = self._scratch
        have = len(self._partial)
        if have:
            scratch[:have] = self._partial
            self._partial = b""
        try:
            got = self.sock.recv_into(scratch[have:] if have else scratch)
        except BlockingIOError:
            self._partial = bytes(scratch[:have])
            return False
        except OSError as error:
            raise LinkEndedError(f"receiving failed: {error}") from error
        if got == 0:
            raise LinkEndedError("it has closed the connection")
        self.bytes_received += got
        end = have + got
        start = 0
        while end - start >= HEADER_BYTES:
            header = decode_header(scratch, start, self._max_frame_bytes)
            start += HEADER_BYTES
            incoming = self.inbox.begin(header)
            here = min(incoming.remaining, end - start)
            if here:
                if incoming.views is not None:
                    _scatter(incoming.views, scratch[start : start + here])
                incoming.remaining -= here
                start += here
            if incoming.remaining:
                self._incoming = incoming
                return True
            self.inbox.finish(incoming)
        if start < end:
            self._partial = bytes(scratch[start:end])
        # A buffer that was not filled says that the socket is empty: one system call less.
        return end == len(scratch) or self._tls is not None  # which gives one record at a time

    def _read_body(self, incoming: Incoming) -> bool:
        """Read into the memory of a frame; returns whether there may be more to read."""
        views = incoming.views
        try:
            if views is None:
                got = self.sock.recv_into(self._scratch, min(incoming.remaining, len(self._scratch)))
            elif len(views) == 1:
                got = self.sock.recv_into(views[0])
            else:
                got = self.sock.recvmsg_into(views[:_MAX_VIEWS_PER_CALL])[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkEndedError(f"receiving failed half-way through a frame: {error}") from error
        if got == 0:
            raise LinkEndedError("it has closed the connection half-way through a frame")
        self.bytes_received += got
        incoming.remaining -= got
        if views is not None:
            _consume(views, got)
        if incoming.remaining == 0:
            self._incoming = None
            self.inbox.finish(incoming)
        return True


def _consume(views: list[memoryview], num_bytes: int) -> None:
    """Remove bytes from the front of a list of views, in place."""
    done = 0
    for view in views:
        if num_bytes < len(view):
            break
        num_bytes -= len(view)
        done += 1
    del views[:done]
    if num_bytes:
        views[0] = views[0][num_bytes:]


def _scatter(views: list[memoryview], data: memoryview) -> None:
    """Copy bytes to the front of a list of views and remove what was filled, in place."""
    start = 0
    done = 0
    for view in views:
        room = min(len(view), len(data) - start)
        view[:room] = data[start : start + room]
        start += room
        if room < len(view):
            views[done] = view[room:]
            break
        done += 1
        if start == len(data):
            break
    del views[:done]


READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_LONGEST_BLOCK_S = 3600.0  # epoll counts in 32-bit milliseconds; a longer wait blocks again


class Waiter:
    """Waits for one transport.

    Args:
        worker: its worker, for messages.
        timers: called before every block; does what is due and returns the seconds until it wants to be called again.
    """

    def __init__(self, worker: int, timers: Callable[[], float] = lambda: math.inf) -> None:
        self.worker = worker
        self.failures = Failures()
        self.closed = False
        self._timers = timers
        self._interrupts: deque[tuple[str, int | None]] = deque()
        self._on_event: dict[int, Callable[[int], None]] = {}
        self._epoll = select.epoll()
        self._wake_lock = threading.RLock()  # a signal handler may interrupt, too
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.register(self._wake_fd, self._woken)

    def register(self, fd: int, on_event: Callable[[int], None], mask: int = READ) -> None:
        """Call back with the epoll event mask whenever the descriptor is ready; replaces what was registered."""
        if fd in self._on_event:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._on_event[fd] = on_event

    def set_mask(self, fd: int, mask: int) -> None:
        """Change what a registered descriptor is watched for."""
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stop watching; unknown descriptors are ignored."""
        if self._on_event.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed by its owner already
                self._epoll.unregister(fd)

    def wake(self) -> None:
        """Let a blocked ``turn`` return. Thread-safe."""
        with self._wake_lock:  # the number of a closed descriptor may be another file's by now
            if not self.closed:
                os.eventfd_write(self._wake_fd, 1)

    def interrupt(self, reason: str, generation: int | None) -> None:
        """See ``Transport.interrupt``. Thread-safe."""
        # Before the wake: who is woken looks here.
        self._interrupts.append((reason, generation))
        self.wake()

    def check_interrupts(self, generation: int) -> None:
        """Use up all interrupts so far.

        Args:
            generation: the present generation; an interrupt that asks to move to it, or to an older one, is void.
        Raises:
            InterruptedWaitError: one of them is not void.
        """
        reason = None
        while self._interrupts:
            text, target = self._interrupts.popleft()
            if target is None or target > generation:
                reason = text
        if reason is not None:
            raise InterruptedWaitError(reason)

    def turn(self, timeout_s: float) -> None:
        """Block until something happens or the time is over, and serve it.

        Raises:
            InterruptedWaitError: the transport was closed.
        """
        if self.closed:
            raise InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        timeout_s = min(timeout_s, self._timers(), _LONGEST_BLOCK_S)
        for fd, event in self._epoll.poll(timeout_s):
            on_event = self._on_event.get(fd)
            if on_event is not None:  # an earlier event of this turn may have closed it
                on_event(event)

    def wait(
        self, handles: Handle | Iterable[Handle], timeout_s: float, generation: int, check_links: Callable[[], None]
    ) -> None:
        """See ``Transport.wait``.

        Args:
            handles, timeout_s: as there.
            generation: the present one.
            check_links: raises if what has been sent in this generation is lost; called before blocking, whenever
                something has failed.
        """
        pending = [handles] if isinstance(handles, Handle) else list(handles)
        deadline = None
        failures_seen = -1
        while True:
            has_failures = failures_seen != self.failures.count
            if has_failures:
                failures_seen = self.failures.count
                for handle in pending:
                    if handle.error is not None:
                        raise handle.error
            # The last ones usually end last: what is before them need not be looked at until they have.
            while pending and pending[-1].done:
                if (error := pending.pop().error) is not None:
                    raise error
            if not pending:
                return
            # Only where it would block (W11): what has come is taken first.
            if has_failures:
                check_links()
            if self._interrupts:
                self.check_interrupts(generation)
            now = time.monotonic()
            # The time begins where the wait would first block; a wait of no time serves once what is ready.
            if deadline is None:
                deadline = now + timeout_s
                self.turn(max(timeout_s, 0.0))
            elif now < deadline:
                self.turn(deadline - now)
            else:
                raise WaitTimeoutError(f"worker {self.worker} waited {timeout_s:g} s for {describe_pending(pending)}")

    def rest(self, until_s: float, generation: int) -> None:
        """See ``Transport.rest``; ``generation`` is the present one."""
        while (left_s := until_s - time.monotonic()) > 0:
            if self._interrupts:
                self.check_interrupts(generation)
            self.turn(left_s)

    def close(self, *, forked: bool = False) -> None:
        """Close the descriptors that were made here; may be called twice.

        Args:
            forked: this is a child of the process that made them; the thread that held the lock is not here.
        """
        if forked:
            self._wake_lock = threading.RLock()
        with self._wake_lock:
            if self.closed:
                return
            self.closed = True
            os.close(self._wake_fd)
        self._on_event.clear()
        self._epoll.close()

    def _woken(self, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
