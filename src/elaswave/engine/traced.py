"""A transport that records its transfers for the trace; used only with ``--profile``."""

import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from elaswave.observability.trace import TraceRecorder
from elaswave.transport.frames import Tag
from elaswave.transport.interface import Handle, Transport


class TracedTransport:
    """Passes everything on to another transport, and notes when each transfer was asked for and done.

    Args:
        inner: does the work.
        trace: gets one record per transfer.
    """

    def __init__(self, inner: Transport, trace: TraceRecorder) -> None:
        self.worker = inner.worker
        self.generation = inner.generation
        self._inner = inner
        self._trace = trace
        self._pending: list[tuple[Handle, int, int]] = []

    @property
    def address(self) -> str:
        """Where other workers reach this one."""
        return self._inner.address

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        return self._inner.peers

    @property
    def broken(self) -> tuple[int, str] | None:
        """A peer whose link has ended in this generation though frames of it were sent there, and how it ended."""
        return self._inner.broken

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes handed to each peer so far."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> Mapping[int, int]:
        """Bytes taken from each peer so far."""
        return self._inner.bytes_received

    @property
    def moved_bytes(self) -> int:
        """See `Transport.moved_bytes`."""
        return self._inner.moved_bytes

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """See `Transport.connect`."""
        self._inner.connect(addresses, timeout_s)

    def want(self, addresses: Mapping[int, str]) -> None:
        """See `Transport.want`."""
        self._inner.want(addresses)

    def trouble(self, peer: int) -> str:
        """See `Transport.trouble`."""
        return self._inner.trouble(peer)

    def unreached(self, peer: int) -> str:
        """See `Transport.unreached`."""
        return self._inner.unreached(peer)

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """See `Transport.send`."""
        start_ns = time.monotonic_ns()
        return self._note(self._inner.send(dst, tag, tensors), _num_bytes(tensors), start_ns)

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """See `Transport.recv`."""
        start_ns = time.monotonic_ns()
        return self._note(self._inner.recv(src, tag, out), 0 if out is None else _num_bytes(out), start_ns)

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """See `Transport.wait`."""
        try:
            self._inner.wait(handles, timeout_s)
        finally:
            self._collect()

    def poll(self) -> None:
        """See `Transport.poll`."""
        self._inner.poll()
        self._collect()

    def rest(self, until_s: float) -> None:
        """See `Transport.rest`."""
        self._inner.rest(until_s)
        self._collect()

    def interrupt(self, reason: str, generation: int | None = None) -> None:
        """See `Transport.interrupt`."""
        self._inner.interrupt(reason, generation)

    def advance_generation(self, generation: int, members: Iterable[int]) -> None:
        """See `Transport.advance_generation`."""
        self._inner.advance_generation(generation, members)
        self.generation = generation
        self._pending.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()

    def _note(self, handle: Handle, num_bytes: int, start_ns: int) -> Handle:
        self._pending.append((handle, num_bytes, start_ns))
        return handle

    def _collect(self) -> None:
        """Records what has been done since the last look."""
        end_ns = time.monotonic_ns()
        rest = []
        for handle, num_bytes, start_ns in self._pending:
            if not handle.done:
                rest.append((handle, num_bytes, start_ns))
            elif handle.error is None:
                size = num_bytes if handle.result is None else handle.result.nbytes
                self._trace.transfer(
                    sent=handle.verb == "send",
                    peer=handle.peer,
                    num_bytes=size,
                    start_ns=start_ns,
                    end_ns=end_ns,
                    tag=handle.tag,
                )
        self._pending = rest


def _num_bytes(tensors: Tensor | Sequence[Tensor]) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(tensor.nbytes for tensor in tensors)
