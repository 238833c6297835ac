"""Real links that are paced: data leaves below a link's rate, so that no queue of it grows on the way.

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
from collections.abc import Callable, Iterable
from typing import Protocol

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
        """Its descriptor."""

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
    """That the kernel holds, and has not sent for the first time."""
    (found,) = _INT.unpack(fcntl.ioctl(sock.fileno(), _SIOCOUTQNSD, _INT.pack(0)))
    return int(found)
