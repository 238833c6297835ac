"""One live connection to a peer: frames out of a queue, frames into an inbox. Non-blocking, driven by its transport.

Reading always drains, whatever the state of the receives, so that a send which a peer has begun can always end. Small
frames are read many at a time through one scratch buffer; the body of a large one goes straight to where it belongs.
Who may connect, when to call and what to do with a lost link are the transport's business (``stream``).
"""

import socket
from collections import deque

from elaswave.errors import CommError, PeerLostError
from elaswave.transport.frames import HEADER_BYTES, decode_header
from elaswave.transport.inbox import Inbox, Incoming, interrupted_by_generation
from elaswave.transport.interface import Handle, complete, fail
from elaswave.transport.tls import TlsSocket

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
