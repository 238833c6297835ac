"""How frames meet receives: pure bookkeeping that all transports share, so that they cannot differ in it.

An ``Inbox`` holds, for one peer, the receives that wait for a frame and the frames that wait for a receive. No sockets,
threads or clocks here.

Generation rules (the design, "The commit, exactly", rules 1, 4, 7 and 8):

- a frame of an older generation is read and dropped; of a newer one it is kept, within a bound, until the receiver
  advances;
- advancing fails everything that is pending, and from then on nothing of the old generation is written into the
  caller's memory: a buffer that is half filled is swapped for scratch in the same call;
- frames that had arrived but were not asked for are forgotten with their generation.
"""

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from elaswave.errors import CommError, FrameError, InterruptedWaitError
from elaswave.transport.frames import (
    BYTES_CODE,
    FrameHeader,
    Tag,
    byte_view,
    byte_views,
    common_dtype_code,
    empty_tensor,
)
from elaswave.transport.interface import Failures, Handle, complete, fail


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
    """A receive handle whose memory has been checked; raises ValueError as :func:`byte_view`."""
    handle = Handle("recv", src, tag, failures)
    if out is not None:
        handle.views = byte_views(out)
        handle.dtype_code = common_dtype_code(out)
        handle.keep = out
        if isinstance(out, Tensor):
            handle.result = out
    return handle


def interrupted_by_generation(generation: int) -> InterruptedWaitError:
    """The error of everything that was pending when a generation began."""
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
    """Why a frame does not fit the memory of a receive, or None."""
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
            f"{handle.dtype_code} (see elaswave.transport.frames): both sides must agree on the dtype"
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
