"""What every transport promises: ``Transport`` is the protocol, a ``Handle`` one send or receive that goes on.

No sockets, threads or clocks here. The rules by which frames meet receives are in ``link``.

What travels on a link: a fixed 64-byte header, then the raw bytes of one or more tensors.

This file turns tensors into byte views and headers into bytes and back; no sockets here. A header carries the
generation and the tag, so that a receiver can tell late frames from current ones without any state of the sender. Every
field is checked before a single byte of the payload is read: a header that cannot be right ends the link.

Header, little endian, 64 bytes:

    magic 4 | version 2 | dtype 1 | ndim 1 | generation 4
    channel 2 | step 4 | attempt 2 | a 4 | b 4 | length 8 | dims 7 x 4

Frames carry no checksum and no signature of their own: the link was authenticated when it was made, and what the bytes
mean is verified by the vote. On an untrusted network a link needs TLS (``tls``) or a tunnel around it.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from elaswave.errors import CommError, FrameError

MAGIC = b"ELWF"
VERSION = 1
MAX_NDIM = 7
_HEADER = struct.Struct("<4sHBBIHIHIIQ7I")
HEADER_BYTES = _HEADER.size
_NO_DIMS = (0,) * MAX_NDIM


class Tag(NamedTuple):
    """The name of a message between two workers in one generation.

    Messages of one sender with equal tags are received in the order in which they were sent.
    """

    channel: int
    """What kind of traffic: [0, 2**16)."""
    step: int
    """Training step: [0, 2**32)."""
    attempt: int
    """Attempt of that step: [0, 2**16)."""
    a: int = 0
    """Free for the channel's own use, such as a micro-batch: [0, 2**32)."""
    b: int = 0
    """Free for the channel's own use, such as a layer: [0, 2**32)."""


DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODE_OF = {dtype: code for code, dtype in enumerate(DTYPES)}
BYTES_CODE = _CODE_OF[torch.uint8]
_ITEM_BYTES = tuple(dtype.itemsize for dtype in DTYPES)
# numpy has no such dtypes, or no byte view of them: the same memory is read as another type of the same size.
_READ_AS = {
    torch.bfloat16: torch.int16,
    torch.complex64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class FrameHeader(NamedTuple):
    """A checked frame header."""

    generation: int
    tag: Tag
    dtype_code: int
    shape: tuple[int, ...]
    length: int
    """Bytes of the payload that follows."""


def byte_view(tensor: Tensor) -> memoryview:
    """Returns the memory of a tensor as bytes, without a copy; it is writable.

    Args:
        tensor: any dtype and shape, contiguous, on the CPU. It must be kept alive and its storage must not be resized
            while the view is in use.
    Returns:
        A one-dimensional view of ``tensor.nbytes`` bytes.
    Raises:
        ValueError: the tensor is not contiguous, not on the CPU, or of a dtype that cannot be sent.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "call .contiguous() before it is sent or received into"
        )
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} cannot travel over this transport: copy it to the CPU first")
    dtype = tensor.dtype
    if dtype not in _CODE_OF:
        raise ValueError(f"tensors of {dtype} cannot be sent: view them as one of {', '.join(map(str, DTYPES))}")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.requires_grad:
        tensor = tensor.detach()
    read_as = _READ_AS.get(dtype)
    if read_as is not None:
        tensor = tensor.view(read_as)
    elif dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.numpy().data.cast("B")


def byte_views(tensors: Tensor | Sequence[Tensor]) -> list[memoryview]:
    """Lists the non-empty byte views of one or more tensors; raises as :func:`byte_view`."""
    if isinstance(tensors, Tensor):
        return [byte_view(tensors)] if tensors.numel() else []
    return [byte_view(tensor) for tensor in tensors if tensor.numel()]


def common_dtype_code(tensors: Tensor | Sequence[Tensor]) -> int:
    """Finds the code of the tensors' common dtype; that of bytes if they differ or there are none.

    Raises:
        ValueError: a dtype that cannot be sent.
    """
    if isinstance(tensors, Tensor):
        dtypes = {tensors.dtype}
    else:
        dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and (code := _CODE_OF.get(next(iter(dtypes)))) is not None:
        return code
    if unknown := dtypes - _CODE_OF.keys():
        raise ValueError(f"tensors of {', '.join(map(str, unknown))} cannot be sent: view them as another dtype")
    return BYTES_CODE


def encode_header(generation: int, tag: Tag, tensors: Tensor | Sequence[Tensor], length: int) -> bytes:
    """Encodes the header of a frame.

    Several tensors travel as one run of elements: their frame has one dimension, in their common dtype (bytes if they
    differ).

    Args:
        generation: membership generation of the sender, [0, 2**32).
        tag: name of the message.
        tensors: what the frame holds.
        length: total bytes of the tensors.
    Raises:
        ValueError: a field is out of its range, or the tensor has more than seven dimensions.
    """
    dtype_code = common_dtype_code(tensors)
    shape = tuple(tensors.shape) if isinstance(tensors, Tensor) else (length // _ITEM_BYTES[dtype_code],)
    ndim = len(shape)
    if ndim > MAX_NDIM:
        raise ValueError(f"a tensor of {ndim} dimensions cannot be sent, at most {MAX_NDIM}: flatten it")
    try:
        return _HEADER.pack(MAGIC, VERSION, dtype_code, ndim, generation, *tag, length, *shape, *_NO_DIMS[ndim:])
    except struct.error as error:
        raise ValueError(
            f"generation {generation}, {tag} or shape {shape} does not fit a frame header ({error}); "
            "see Tag for the ranges, every dimension must be below 2**32"
        ) from error


def decode_header(data: bytes | bytearray | memoryview, offset: int, max_frame_bytes: int) -> FrameHeader:
    """Read and check a header.

    Args:
        data: at least ``HEADER_BYTES`` bytes from ``offset``.
        offset: where the header starts.
        max_frame_bytes: largest payload that is accepted.
    Raises:
        FrameError: anything about the header that cannot be right.
    """
    fields = _HEADER.unpack_from(data, offset)
    magic, version, dtype_code, ndim, generation = fields[:5]
    length = fields[10]
    if magic != MAGIC:
        raise FrameError(f"frame starts with {magic!r} instead of {MAGIC!r}: these are not elaswave frames")
    if version != VERSION:
        raise FrameError(f"frame has version {version}, this worker speaks {VERSION}: install one release everywhere")
    if dtype_code >= len(DTYPES):
        raise FrameError(f"frame has dtype code {dtype_code}, the largest known is {len(DTYPES) - 1}")
    if ndim > MAX_NDIM:
        raise FrameError(f"frame has {ndim} dimensions, at most {MAX_NDIM} are allowed")
    if length > max_frame_bytes:
        raise FrameError(f"frame announces {length} bytes, the limit is {max_frame_bytes}: raise max_frame_bytes")
    shape = fields[11 : 11 + ndim]
    if math.prod(shape) * _ITEM_BYTES[dtype_code] != length or any(fields[11 + ndim :]):
        raise FrameError(
            f"frame announces {length} bytes, {ndim} dimensions {fields[11:]} of {DTYPES[dtype_code]}: they contradict"
        )
    return FrameHeader(generation, Tag._make(fields[5:10]), dtype_code, shape, length)


def empty_tensor(dtype_code: int, shape: tuple[int, ...]) -> Tensor:
    """Allocates new memory for a received frame; torch's CPU allocator aligns it to 64 bytes.

    Raises:
        FrameError: there is not so much memory.
    """
    try:
        return torch.empty(shape, dtype=DTYPES[dtype_code])
    except RuntimeError as error:
        raise FrameError(
            f"no memory for a frame of {DTYPES[dtype_code]} {shape}: lower max_frame_bytes or send less at once"
        ) from error


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
        """Tells the last thing seen of a peer whose link is wanted and not there; empty if nothing was seen yet."""
        ...

    def unreached(self, peer: int) -> str:
        """Does the same as `trouble`, but only if it shows that nobody answers at the address as that peer, who may be
        slow to."""
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
    """Describes which handles are not done, for error messages."""
    pending = [handle for handle in handles if not handle.done]
    names = [f"{handle.verb} {tuple(handle.tag)} worker {handle.peer}" for handle in pending[:limit]]
    more = f" and {len(pending) - limit} more" if len(pending) > limit else ""
    return ", ".join(names) + more
