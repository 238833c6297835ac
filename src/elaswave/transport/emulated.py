"""Links that are slow on purpose: frames to some peers arrive only when a described link would have brought them.

A frame takes ``bytes / bandwidth`` to leave, behind what was sent to the same site before, and arrives ``latency``
later: as planning has it (`elaswave.planning.costs.network`). What is on its way is a copy, so a send is done when its
    last byte
would have left. Frames stand here until they arrive, then go to the peer's real link, whole. What is said to the
coordinator goes another way, and never waits here: so bulk data delays no heartbeat.

No sockets here and no clock: times are arguments.

Real links that are paced: data leaves below a link's rate, so that no queue of it grows on the way.

What fills the queue before a slow link delays all that goes the same way, heartbeats among them. So the kernel sends
the data of each connection at a rate (`SO_MAX_PACING_RATE`; it needs no queueing discipline). A link belongs to a
worker and a site: connections to one site that have something to send share its rate, by equal parts. The kernel also
holds at most `STANDING_S` of data that has not left, which is what a step that is tried again finds before it.

Where the way has become slower than its file says, TCP finds that out; BBR, where the kernel offers it, without filling
the queue. Unix sockets have no way that could be slow, and are left alone.
"""

import contextlib
import fcntl
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from elaswave.errors import CommError
from elaswave.transport.interface import Handle, complete, fail


class EmulatedPath(NamedTuple):
    """How frames reach a peer."""

    site: int
    """What goes to one site goes one after the other."""
    latency_s: float
    bandwidth_bytes_per_s: float


class _Leaving:
    """A frame that has not left yet."""

    __slots__ = ("begin_s", "handle", "num_bytes", "path", "put_s", "views")

    def __init__(self, handle: Handle, path: EmulatedPath, views: Sequence[memoryview], put_s: float) -> None:
        self.handle = handle
        self.path = path
        self.views = views
        self.num_bytes = sum(map(len, views))
        self.put_s = put_s
        self.begin_s = math.inf
        """When its first byte leaves; infinite until that is so."""


class Arrival(NamedTuple):
    """A frame that has come to the end of its way."""

    peer: int
    frame: memoryview


class EmulatedLinks:
    """The slow links of one worker.

    Args:
        path_to: how frames reach a peer; None: as fast as they can.
    """

    def __init__(self, path_to: Callable[[int], EmulatedPath | None]) -> None:
        self._path_to = path_to
        self._factor = 1.0
        self._leaving: dict[int, deque[_Leaving]] = {}
        """By site, in order."""
        self._free_s: dict[int, float] = {}
        """By site, when the frame before has left."""
        self._under_way: list[tuple[float, int, Arrival]] = []
        """With the times of arrival, and sites."""
        self._left_bytes = 0
        self._partings: list[tuple[Callable[[int], bool], float]] = []
        """Which sites cannot be reached, and until when."""

    def put(self, handle: Handle, views: Sequence[memoryview], now_s: float) -> bool:
        """Takes a frame.

        Args:
            handle: of its send, done once the frame has left.
            views: its header and payload, which stay unchanged until then.
            now_s: monotonic time.
        Returns:
            Whether it was taken: False for a peer to which nothing is emulated.
        """
        path = self._path_to(handle.peer)
        if path is None:
            return False
        self._leaving.setdefault(path.site, deque()).append(_Leaving(handle, path, views, now_s))
        return True

    def turn(self, now_s: float) -> tuple[list[Arrival], float, bool]:
        """Lets time pass.

        Returns:
            Frames that have arrived, in order; seconds until the next one leaves or arrives; whether any has left now.
        """
        has_left = False
        next_s = math.inf
        back_s = {site: back for site in self._leaving if (back := self._back_s(site, now_s))}
        for site, queue in self._leaving.items():
            while queue:
                if site in back_s:
                    next_s = min(next_s, back_s[site] - now_s)
                    break
                frame = queue[0]
                if frame.begin_s == math.inf:
                    frame.begin_s = max(frame.put_s, self._free_s.get(site, 0.0))
                end_s = frame.begin_s + self._sending_s(frame)
                if end_s > now_s:
                    next_s = min(next_s, end_s - now_s)
                    break
                queue.popleft()
                self._free_s[site] = end_s
                copy = memoryview(b"".join(frame.views))
                self._under_way.append((end_s + frame.path.latency_s, site, Arrival(frame.handle.peer, copy)))
                self._left_bytes += frame.num_bytes
                complete(frame.handle)
                has_left = True
        arrived, still = [], []
        for each in self._under_way:
            due_s = max(each[0], back_s.get(each[1], 0.0))
            if due_s <= now_s:
                arrived.append(each)
            else:
                still.append(each)
                next_s = min(next_s, due_s - now_s)
        self._under_way = still
        arrived.sort(key=lambda each: each[0])
        return [arrival for _, _, arrival in arrived], next_s, has_left

    @property
    def has_frames(self) -> bool:
        """Whether any frame has not arrived yet: somebody has to let time pass."""
        return bool(self._under_way) or any(self._leaving.values())

    def slow_down(self, factor: float) -> None:
        """Leaves every link this share of its bandwidth, also for the frame that is leaving.

        Args:
            factor: above 0; 1 ends it.
        """
        self._factor = factor

    def part(self, is_away: Callable[[int], bool], until_s: float) -> None:
        """Holds back what is on its way to some sites, or goes there; it follows later. Called from any thread.

        Args:
            is_away: which sites.
            until_s: monotonic time.
        """
        self._partings.append((is_away, until_s))

    def _back_s(self, site: int, now_s: float) -> float:
        """Computes when a site can be reached again; 0 if it can."""
        if not self._partings:
            return 0.0
        return max((until_s for is_away, until_s in self._partings if until_s > now_s and is_away(site)), default=0.0)

    def moved_bytes(self, now_s: float) -> int:
        """Counts the bytes that have left so far, those of frames that are leaving included. It is called from any
        thread."""
        moved = float(self._left_bytes)
        for queue in list(self._leaving.values()):
            first = next(iter(list(queue)), None)
            if first is not None and first.begin_s <= now_s:
                moved += first.num_bytes * min(1.0, (now_s - first.begin_s) / max(self._sending_s(first), 1e-9))
        return int(moved)

    def drop(self, peer: int, make_error: Callable[[], CommError]) -> None:
        """The link to a peer has ended: what was to go there is lost."""
        self._under_way = [each for each in self._under_way if each[2].peer != peer]
        for site, queue in self._leaving.items():
            for frame in queue:
                if frame.handle.peer == peer:
                    fail(frame.handle, make_error())
            self._leaving[site] = deque(frame for frame in queue if frame.handle.peer != peer)

    def clear(self, make_error: Callable[[], CommError]) -> None:
        """A new generation begins: everything of older ones is forgotten, and the links are free."""
        for queue in self._leaving.values():
            for frame in queue:
                fail(frame.handle, make_error())
            queue.clear()
        self._under_way.clear()
        self._free_s.clear()

    def _sending_s(self, frame: _Leaving) -> float:
        return frame.num_bytes / (frame.path.bandwidth_bytes_per_s * self._factor)


STANDING_S = 1.0
"""Data that the kernel holds for a link, as seconds of its rate."""
_STANDING_BYTES_MIN = 1 << 16
_LOOK_S = 0.05
"""So often it is looked which links have something to send, while more than one have."""
_SO_MAX_PACING_RATE = 47
"""Of asm-generic/socket.h; Python's socket module has no name for it."""
_SIOCOUTQNSD = 0x894B
"""Of linux/sockios.h: bytes in the queue that have not been sent."""
_INT = struct.Struct("@i")
_U64 = struct.Struct("@Q")


class PacedPath(Protocol):
    """The way to a peer."""

    @property
    def site(self) -> int:
        """What goes to one site shares its rate."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Of data."""


class _Connection(Protocol):
    """Of a socket, or of one inside TLS, what is needed here."""

    @property
    def family(self) -> int:
        """Of its address."""

    def fileno(self) -> int:
        """Returns its descriptor."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """Tells the kernel what it shall do."""


class PacedLinks:
    """The rates of one worker's real links.

    Args:
        path_to: the way to a peer; None: no slow one.
    """

    def __init__(self, path_to: Callable[[int], PacedPath | None]) -> None:
        self._path_to = path_to
        self._factor = 1.0
        self._rates: dict[int, int] = {}
        """By descriptor, as the kernel was told."""
        self._looked_s = -math.inf
        self._is_shared = False

    def slow_down(self, factor: float) -> None:
        """Leaves every link this share of its rate.

        Args:
            factor: above 0; 1 ends it.
        """
        self._factor = factor

    def begin(self, peer: int, sock: _Connection) -> None:
        """A link to a peer is there."""
        if sock.family == socket.AF_UNIX or self._path_to(peer) is None:
            return
        with contextlib.suppress(OSError):  # not offered by this kernel, or not to this user
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

    def end(self, sock: _Connection) -> None:
        """A link is about to be closed."""
        self._rates.pop(sock.fileno(), None)

    def share(self, links: Iterable[tuple[int, _Connection]], now_s: float, sending: int | None = None) -> float:
        """Gives each link that has something to send its part of the rate to its site.

        Args:
            links: peers and connections.
            now_s: monotonic time.
            sending: a peer to which something is about to be sent; None: it is only looked who is done.
        Returns:
            Seconds until it is to be looked again.
        """
        if sending is None and now_s < self._looked_s + _LOOK_S:
            return self._looked_s + _LOOK_S - now_s if self._is_shared else math.inf
        self._looked_s = now_s
        busy: dict[int, list[tuple[_Connection, float]]] = {}
        for peer, sock in links:
            path = None if sock.family == socket.AF_UNIX else self._path_to(peer)
            if path is not None and (peer == sending or _unsent_bytes(sock)):
                busy.setdefault(path.site, []).append((sock, path.bandwidth_bytes_per_s))
        self._is_shared = any(len(those) > 1 for those in busy.values())
        for those in busy.values():
            for sock, bandwidth in those:
                self._pace(sock, max(1, int(bandwidth * self._factor / len(those))))
        return _LOOK_S if self._is_shared else math.inf

    def _pace(self, sock: _Connection, rate: int) -> None:
        if self._rates.get(sock.fileno()) == rate:
            return
        self._rates[sock.fileno()] = rate
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _U64.pack(rate))
        standing = max(_STANDING_BYTES_MIN, int(rate * STANDING_S))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, min(standing, 1 << 30))


def _unsent_bytes(sock: _Connection) -> int:
    """Counts the bytes that the kernel holds, and has not sent for the first time."""
    (found,) = _INT.unpack(fcntl.ioctl(sock.fileno(), _SIOCOUTQNSD, _INT.pack(0)))
    return int(found)
