"""What every transport promises: ``Transport`` is the protocol, a ``Handle`` one send or receive that goes on.

No sockets, threads or clocks here. The rules by which frames meet receives are in ``inbox``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from elaswave.errors import CommError
from elaswave.transport.frames import BYTES_CODE, Tag

DEFAULT_MAX_FRAME_BYTES = 4 << 30
DEFAULT_MAX_UNEXPECTED_BYTES = 1 << 30


class Failures:
    """How many handles of a transport have failed; tells a wait when to look at all of its handles."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Handle:
    """One send or receive that may still be going on. Made by a transport; read by its user.

    Attributes:
        done: it has ended, well or badly.
        error: why it has failed, or None.
        result: a finished receive's tensor (the caller's own memory where ``out`` was given as one tensor, None where
            it was several); None for sends.
    """

    __slots__ = ("done", "dtype_code", "error", "failures", "keep", "peer", "result", "tag", "verb", "views")

    def __init__(self, verb: str, peer: int, tag: Tag, failures: Failures) -> None:
        self.verb = verb
        self.failures = failures
        self.peer = peer
        self.tag = tag
        self.done = False
        self.error: CommError | None = None
        self.result: Tensor | None = None
        self.keep: object = None
        """The caller's tensors, kept alive while bytes may still move."""
        self.views: list[memoryview] | None = None
        """Where a receive's bytes go; None means into new memory."""
        self.dtype_code = BYTES_CODE

    def __repr__(self) -> str:
        state = "pending" if not self.done else "failed" if self.error else "done"
        return f"<{self.verb} {tuple(self.tag)} worker {self.peer}: {state}>"


class Transport(Protocol):
    """The data plane of one worker.

    Not thread-safe, except ``interrupt``. Bytes move, and wanted links are made, only inside ``send``, ``poll``,
    ``wait``, ``rest`` and ``connect``, in the thread that calls them: a worker that computes for long calls ``poll``
    between layers.
    """

    worker: int
    """Id of this worker."""
    generation: int
    """Generation that is stamped on every frame sent and required of every frame received."""

    @property
    def address(self) -> str:
        """What other workers pass to ``connect`` to reach this one."""
        ...

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        ...

    @property
    def broken(self) -> tuple[int, str] | None:
        """A peer whose link has ended in this generation though frames of it were sent there, and how it ended."""
        ...

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes handed to each peer so far, headers included."""
        ...

    @property
    def bytes_received(self) -> Mapping[int, int]:
        """Bytes taken from each peer so far, headers included."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Grows whenever bytes of a frame move, in any direction: tells a slow link from one that stands still. It may
        fall when a link ends. Thread-safe."""
        ...

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Make the links that are missing. Both sides call it: the lower id dials, the higher accepts.

        Args:
            addresses: peer to its ``address``; an entry for this worker is ignored.
            timeout_s: bound in seconds.
        Raises:
            AuthenticationError: a dialled peer does not hold the job's key.
            InterruptedWaitError: ``interrupt`` was called.
            WaitTimeoutError: some links are still missing; names them and the last thing seen of each.
        """
        ...

    def want(self, addresses: Mapping[int, str]) -> None:
        """Make links in the background, for peers that are to become members; never blocks.

        They are made inside the calls that move bytes; `peers` tells when one stands. One that ends is made again.
        Both sides ask for it, as of ``connect``. A wanted link outlives a new generation of which the peer is no
        member.

        Args:
            addresses: peer to its ``address``, of all that are wanted from now on: those that were wanted before are
                given up, as far as their links are not there. An entry for this worker is ignored.
        """
        ...

    def trouble(self, peer: int) -> str:
        """The last thing seen of a peer whose link is wanted and not there; empty if nothing was seen yet."""
        ...

    def unreached(self, peer: int) -> str:
        """As `trouble`, but only if it shows that nobody answers at the address as that peer, who may be slow to."""
        ...

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """Start sending. The memory must stay unchanged until the handle is done.

        Args:
            dst: peer, or this worker itself.
            tag: name of the message.
            tensors: contiguous CPU tensors; several travel as one run of elements.
        Raises:
            ValueError: a tensor or tag that cannot be sent, or more bytes than a frame may have. A missing link is not
                raised here but by ``wait``.
        """
        ...

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """Start receiving.

        Args:
            src: peer, or this worker itself.
            tag: name of the message.
            out: where the bytes go; sizes and dtypes must fit, or the handle fails with FrameError (tensors of uint8
                take anything of their size). None: new memory, 64-byte aligned, of the sender's dtype and shape.
        """
        ...

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """Block until all handles are done well, or one has failed.

        Handles that were still going on when this raises go on, and can be waited for again.

        Args:
            handles: what to wait for.
            timeout_s: bound in seconds.
        Raises:
            FrameError: a frame did not fit its receive.
            InterruptedWaitError: ``interrupt`` was called, or the generation of a handle has passed.
            PeerLostError: a handle needs a peer whose link has ended; or this would block, and a link has ended over
                which frames of this generation were sent: the peer may never have read them, and a link that is made
                again does not bring them back.
            WaitTimeoutError: the bound has passed; names what is missing.
        """
        ...

    def poll(self) -> None:
        """Move bytes that can move now, without blocking."""
        ...

    def rest(self, until_s: float) -> None:
        """Block until a time, moving bytes meanwhile; for a worker whose device is emulated.

        Args:
            until_s: monotonic time.
        Raises:
            InterruptedWaitError: ``interrupt`` was called.
        """
        ...

    def interrupt(self, reason: str, generation: int | None = None) -> None:
        """Wake the wait that is blocked, or the next one that would block, with InterruptedWaitError. Thread-safe.

        Args:
            reason: text of the error.
            generation: the generation that the interrupt asks to move to; it is void once the transport is there.
        """
        ...

    def advance_generation(self, generation: int, members: Iterable[int]) -> None:
        """Edit the membership in place: needs no network and cannot block.

        Everything pending fails with InterruptedWaitError and its memory is the caller's again at once. Links to
        workers that are neither members nor wanted are closed; a former member stays refused for ever. Missing links
        are made by ``connect``.

        Args:
            generation: larger than the present one.
            members: workers of the new generation, this one included or not.
        Raises:
            ValueError: the generation does not grow.
        """
        ...

    def close(self) -> None:
        """End all links and remove what this transport has made. May be called twice."""
        ...


def complete(handle: Handle) -> None:
    """Mark a handle as done well."""
    handle.keep = None
    handle.views = None
    handle.done = True


def fail(handle: Handle, error: CommError) -> None:
    """Mark a handle as done badly; its memory is the caller's again."""
    handle.error = error
    handle.result = None
    handle.failures.count += 1
    complete(handle)


def describe_pending(handles: Iterable[Handle], limit: int = 4) -> str:
    """Which handles are not done, for error messages."""
    pending = [handle for handle in handles if not handle.done]
    names = [f"{handle.verb} {tuple(handle.tag)} worker {handle.peer}" for handle in pending[:limit]]
    more = f" and {len(pending) - limit} more" if len(pending) > limit else ""
    return ", ".join(names) + more
