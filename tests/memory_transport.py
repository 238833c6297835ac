"""The in-process transport: workers are threads (or objects) of one process. For tests and the simulator.

It shares the matching and generation rules (``inbox``) and the waiting (``waiter``) of the socket transport and passes
the same conformance suite. Sending copies the bytes into the receiver at once, under the network's lock, so a send is
done when it returns.
"""

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from elaswave.errors import CommError, FrameError, InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.transport.interface import (
    DEFAULT_MAX_FRAME_BYTES,
    DEFAULT_MAX_UNEXPECTED_BYTES,
    HEADER_BYTES,
    Handle,
    Tag,
    byte_views,
    complete,
    decode_header,
    encode_header,
    fail,
)
from elaswave.transport.link import Inbox, Waiter, make_recv


class MemoryNetwork:
    """What the workers of one process are connected by."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.transports: dict[int, MemoryTransport] = {}

    def transport(
        self,
        worker: int,
        *,
        generation: int = 0,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_unexpected_bytes: int = DEFAULT_MAX_UNEXPECTED_BYTES,
    ) -> "MemoryTransport":
        """Make a worker's transport; see ``StreamTransport`` for the arguments.

        Raises:
            ValueError: the worker has had one.
        """
        with self.lock:
            if worker in self.transports:
                raise ValueError(f"worker {worker} has had a transport in this network: ids are never used again")
            transport = MemoryTransport(self, worker, generation, max_frame_bytes, max_unexpected_bytes)
            self.transports[worker] = transport
            for other in self.transports.values():  # one of them may wait for this worker in connect
                other._waiter.wake()
            return transport


class MemoryTransport:
    """``Transport`` within a process; see there for what the methods promise. Made by ``MemoryNetwork.transport``."""

    def __init__(
        self, network: MemoryNetwork, worker: int, generation: int, max_frame_bytes: int, max_unexpected_bytes: int
    ) -> None:
        self.worker = worker
        self.generation = generation
        self._network = network
        self._max_frame_bytes = max_frame_bytes
        self._max_unexpected_bytes = max_unexpected_bytes
        self._links: set[int] = set()
        self._inboxes: dict[int, Inbox] = {worker: Inbox(worker, generation, max_unexpected_bytes)}
        self._lost: dict[int, str] = {}
        self._sent_to: set[int] = set()
        self._broken: dict[int, str] = {}
        self._members: frozenset[int] = frozenset()
        self._former: set[int] = set()
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._wanted: frozenset[int] = frozenset()
        self._waiter = Waiter(worker, self._link_wanted)

    @property
    def address(self) -> str:
        """What other workers pass to ``connect`` to reach this one."""
        return f"memory:{self.worker}"

    @property
    def peers(self) -> frozenset[int]:
        """Workers to which a link is up."""
        return frozenset(self._links)

    @property
    def broken(self) -> tuple[int, str] | None:
        """See ``Transport.broken``."""
        return next(iter(dict(self._broken).items()), None)

    @property
    def bytes_sent(self) -> Mapping[int, int]:
        """Bytes handed to each peer so far, headers included."""
        return dict(self._sent)

    @property
    def bytes_received(self) -> Mapping[int, int]:
        """Bytes taken from each peer so far, headers included."""
        return dict(self._received)

    @property
    def moved_bytes(self) -> int:
        """See ``Transport.moved_bytes``."""
        return sum(self.bytes_sent.values()) + sum(self.bytes_received.values())

    def connect(self, addresses: Mapping[int, str], timeout_s: float) -> None:
        """Make the links that are missing; see ``Transport.connect``. A link is there as soon as either side asks."""
        wanted = [peer for peer in addresses if peer != self.worker]
        deadline = time.monotonic() + timeout_s
        while True:
            with self._network.lock:
                missing = [peer for peer in wanted if peer not in self._links and not self._link(peer)]
            if not missing:
                return
            self._waiter.check_interrupts(self.generation)
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise WaitTimeoutError(
                    f"worker {self.worker} has no link after {timeout_s:g} s to workers {missing}: no sign of them"
                )
            self._waiter.turn(remaining_s)

    def want(self, addresses: Mapping[int, str]) -> None:
        """Make links in the background; see ``Transport.want``."""
        self._wanted = frozenset(addresses) - {self.worker}

    def trouble(self, peer: int) -> str:
        """The last thing seen of a wanted peer; see ``Transport.trouble``."""
        return "no sign of it" if peer in self._wanted - self._links else ""

    def unreached(self, peer: int) -> str:
        """See ``Transport.unreached``."""
        return self.trouble(peer)

    def _link_wanted(self) -> float:
        """Links that can be made now; a transport that is made later wakes this one."""
        with self._network.lock:
            for peer in self._wanted - self._links:
                self._link(peer)
        return math.inf

    def send(self, dst: int, tag: Tag, tensors: Tensor | Sequence[Tensor]) -> Handle:
        """Send; see ``Transport.send``. The handle is done when this returns."""
        views = byte_views(tensors)
        length = sum(map(len, views))
        if length > self._max_frame_bytes:
            raise ValueError(f"{tag} has {length} bytes, a frame at most {self._max_frame_bytes}: send it in parts")
        encoded = encode_header(self.generation, tag, tensors, length)
        handle = Handle("send", dst, tag, self._waiter.failures)
        with self._network.lock:
            if self._waiter.closed or (dst not in self._links and dst != self.worker):
                error = self._no_link(dst)
                self._broken.setdefault(dst, self._lost.get(dst, str(error)))
                fail(handle, error)
                return handle
            if dst != self.worker:
                self._sent_to.add(dst)
            receiver = self._network.transports[dst]
            try:
                header = decode_header(encoded, 0, receiver._max_frame_bytes)
                receiver._inboxes[self.worker].deliver(header, views)
            except FrameError as refusal:
                if dst == self.worker:
                    fail(handle, refusal)
                else:
                    receiver._unlink(self.worker, f"it sent what cannot be right: {refusal}")
                    self._unlink(dst, "it has closed the connection")
                    fail(handle, self._no_link(dst))
                return handle
            if dst != self.worker:
                size = HEADER_BYTES + length
                self._sent[dst] = self._sent.get(dst, 0) + size
                receiver._received[self.worker] = receiver._received.get(self.worker, 0) + size
                receiver._waiter.wake()
        complete(handle)
        return handle

    def recv(self, src: int, tag: Tag, out: Tensor | Sequence[Tensor] | None = None) -> Handle:
        """Start receiving; see ``Transport.recv``."""
        handle = make_recv(src, tag, out, self._waiter.failures)
        with self._network.lock:
            inbox = self._inboxes.get(src)
            if inbox is None or (src not in self._links and src != self.worker and not inbox.has_frame(tag)):
                fail(handle, self._no_link(src))
            else:
                inbox.post(handle)
        return handle

    def wait(self, handles: Handle | Iterable[Handle], timeout_s: float) -> None:
        """Block until all are done well or one has failed; see ``Transport.wait``."""
        self._waiter.wait(handles, timeout_s, self.generation, self._check_links)

    def poll(self) -> None:
        """Bytes have moved when they were sent; only signals and interrupts are looked for."""
        self._waiter.turn(0)

    def rest(self, until_s: float) -> None:
        """Block until a time, moving bytes meanwhile; see ``Transport.rest``."""
        self._waiter.rest(until_s, self.generation)

    def interrupt(self, reason: str, generation: int | None = None) -> None:
        """Wake the wait that is blocked, or the next one that would block; thread-safe. See ``Transport.interrupt``."""
        self._waiter.interrupt(reason, generation)

    def advance_generation(self, generation: int, members: Iterable[int]) -> None:
        """Edit the membership in place; see ``Transport.advance_generation``."""
        if generation <= self.generation:
            raise ValueError(
                f"generation {generation} does not follow generation {self.generation}: generations only grow"
            )
        with self._network.lock:
            self.generation = generation
            members = frozenset(members)
            self._former |= self._members - members
            self._members = members
            for peer in sorted(self._links - members - self._wanted):
                detail = f"generation {generation} has begun without worker {peer}"
                self._unlink(peer, detail, InterruptedWaitError(detail))
                self._network.transports[peer]._unlink(self.worker, "it has closed the connection")
            for peer, inbox in list(self._inboxes.items()):
                inbox.advance(generation, None)
                if peer not in members and peer not in self._wanted and peer != self.worker:
                    del self._inboxes[peer]
            self._sent_to.clear()
            self._broken.clear()

    def close(self) -> None:
        """End all links; may be called twice."""
        with self._network.lock:
            if self._waiter.closed:
                return
            error = InterruptedWaitError(f"the transport of worker {self.worker} was closed")
            for peer in sorted(self._links):
                self._unlink(peer, "the transport was closed", error)
                self._network.transports[peer]._unlink(self.worker, "it has closed the connection")
            self._inboxes[self.worker].fail_posted(lambda: error)
            self._inboxes.clear()
            self._waiter.close()

    def _link(self, peer: int) -> bool:
        other = self._network.transports.get(peer)
        if other is None or other._waiter.closed or peer in self._former or self.worker in other._former:
            return False
        for here, there in ((self, peer), (other, self.worker)):
            here._links.add(there)
            here._lost.pop(there, None)
            if there not in here._inboxes:
                here._inboxes[there] = Inbox(there, here.generation, here._max_unexpected_bytes)
            here._waiter.wake()
        return True

    def _unlink(self, peer: int, detail: str, error: CommError | None = None) -> None:
        self._links.discard(peer)
        self._lost[peer] = detail
        self._inboxes[peer].fail_posted(lambda: error if error is not None else PeerLostError(peer, detail))
        if error is None and peer in self._sent_to:
            self._broken[peer] = detail
            self._waiter.failures.count += 1
        self._waiter.wake()

    def _check_links(self) -> None:
        if (broken := self.broken) is not None:
            raise PeerLostError(*broken)

    def _no_link(self, peer: int) -> CommError:
        if self._waiter.closed:
            return InterruptedWaitError(f"the transport of worker {self.worker} was closed")
        return PeerLostError(peer, self._lost.get(peer, f"worker {self.worker} was never linked with it: call connect"))
