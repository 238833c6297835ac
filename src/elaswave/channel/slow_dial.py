"""A control connection over an emulated link: its bytes arrive when the link between two sites would bring them.

What is said here does not wait for tensors: data is paced below a link's rate, so that only what is small shares it.
Control messages wait for each other. They are as large in a small run as in the one that it stands for, so they take
the bandwidth of the network's file, not that of `sites.rate`.

A thread moves the bytes between the connection and a pair of sockets, of which the client has one end.
"""

import contextlib
import math
import select
import socket
import threading
import time
from collections import deque

from elaswave.config.cluster import configured_sites, control_network
from elaswave.config.schema import Config
from elaswave.transport import addresses
from elaswave.transport.emulated import EmulatedPath

_READ_BYTES = 1 << 16
_WAITING_BYTES_MAX = 1 << 22
"""More is not taken from a side before some of it has arrived."""
_CONNECT_S = 10.0
"""A connection that is not made by then ends, as one that is refused."""


class SlowControl:
    """Dials coordinators over a link.

    Args:
        out, back: the link to the coordinator's site, and from it.
    """

    def __init__(self, out: EmulatedPath, back: EmulatedPath) -> None:
        self._paths = out, back
        self._factor = 1.0

    def slow_down(self, factor: float) -> None:
        """Leaves the link this share of its bandwidth.

        Args:
            factor: above 0; 1 ends it.
        """
        self._factor = factor

    def dial(self, address: str) -> socket.socket:
        """Does the same as `elaswave.transport.addresses.dial`: returns a socket that is connected over the link, or
        soon closed."""
        there = addresses.dial(address)
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        out, back = self._paths
        ways = _Way(far, there, out), _Way(there, far, back)
        threading.Thread(target=self._pump, args=ways, name="slow control", daemon=True).start()
        return near

    def _pump(self, out: "_Way", back: "_Way") -> None:
        there = out.target
        with out.source, there, contextlib.suppress(OSError):
            if not _wait({there: select.POLLOUT}, _CONNECT_S) or there.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return
            ways = (out, back)
            while not all(way.is_over for way in ways):
                now_s = time.monotonic()
                wait_s = min(way.turn(now_s) for way in ways)
                masks = dict.fromkeys((out.source, there), 0)
                for way in ways:
                    masks[way.source] |= select.POLLIN if way.has_room else 0
                    masks[way.target] |= select.POLLOUT if way.is_blocked else 0
                ready = _wait(masks, wait_s)
                for way in ways:
                    if way.has_room and ready.get(way.source, 0) & ~select.POLLOUT:
                        way.read(time.monotonic(), self._factor)


def _wait(masks: dict[socket.socket, int], wait_s: float) -> dict[socket.socket, int]:
    """Waits until something can be done; returns what. Unlike select it takes any descriptor.

    Args:
        masks: what is waited for; of a socket of which nothing is, no error is told either.
        wait_s: at most, rounded up to milliseconds.
    """
    poll, by_fd = select.poll(), {sock.fileno(): sock for sock, mask in masks.items() if mask}
    for fd, sock in by_fd.items():
        poll.register(fd, masks[sock])
    found = poll.poll(None if wait_s == math.inf else math.ceil(1e3 * wait_s))
    return {by_fd[fd]: mask for fd, mask in found}


def slow_control_of(config: Config, worker: int) -> SlowControl | None:
    """Tells how a worker reaches the coordinator; None: as fast as it can.

    Args:
        config: of the run.
        worker: its id. One that joins is taken to be where its number says.
    """
    sites = configured_sites(config)
    if sites is None or sites.coordinator is None or sites.are_real:
        return None
    here, home = sites.site_of(worker), sites.coordinator
    network = control_network(config)
    if here == home:
        return None
    paths = [(home, network.link(here, home)), (here, network.link(home, here))]
    return SlowControl(*(EmulatedPath(site, link.latency_s, link.bandwidth_bytes_per_s) for site, link in paths))


class _Way:
    """One direction."""

    def __init__(self, source: socket.socket, target: socket.socket, path: EmulatedPath) -> None:
        self.source, self.target = source, target
        self.is_blocked = False
        """The target takes nothing more at the moment."""
        self.is_over = False
        self._path = path
        self._free_s = 0.0
        self._under_way: deque[tuple[float, memoryview]] = deque()
        """With the times of arrival; an empty one is the end."""
        self._num_bytes = 0
        self._has_ended = False

    @property
    def has_room(self) -> bool:
        return not self._has_ended and self._num_bytes < _WAITING_BYTES_MAX

    def read(self, now_s: float, factor: float) -> None:
        data = self.source.recv(_READ_BYTES)
        self._has_ended = not data
        seconds = len(data) / (self._path.bandwidth_bytes_per_s * factor)
        self._free_s = max(now_s, self._free_s) + seconds
        self._under_way.append((self._free_s + self._path.latency_s, memoryview(data)))
        self._num_bytes += len(data)

    def turn(self, now_s: float) -> float:
        """Hands over what has arrived; returns the seconds until more will have."""
        self.is_blocked = False
        while self._under_way and self._under_way[0][0] <= now_s:
            due_s, data = self._under_way.popleft()
            if not data:
                self.target.shutdown(socket.SHUT_WR)
                self.is_over = True
                continue
            try:
                sent = self.target.send(data)
            except BlockingIOError:
                sent = 0
            self._num_bytes -= sent
            if sent < len(data):
                self._under_way.appendleft((due_s, data[sent:]))
                self.is_blocked = True
                return math.inf
        return max(0.0, self._under_way[0][0] - now_s) if self._under_way else math.inf
