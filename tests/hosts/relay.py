"""The network between hosts of tests: a thread that carries packets, and does to them what networks do.

Each host has a TUN device, which the thread holds the other end of. Between each two hosts there are two wires, one in
each direction: each has a delay, a rate, a share of packets that it loses, and may be cut, so that packets vanish and
nobody is told. A host that has an address has wires to all others.
"""

import contextlib
import ctypes
import fcntl
import heapq
import ipaddress
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass

MTU_BYTES = 16_000
"""Large, so that few packets carry much: this is Python."""
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_PACKETS_AT_ONCE = 64
_PRIORITY = -15


@dataclass
class Wire:
    """One direction between two hosts."""

    delay_s: float = 0.0
    rate_bytes_per_s: float = float("inf")
    loss: float = 0.0
    """Share of packets that vanish."""
    is_cut: bool = False
    free_s: float = 0.0
    """When the last packet has left, by the rate."""
    longest_s: float = 0.0
    """That a packet has waited for those before it."""


def open_tun(pid: int, name: str) -> int:
    """Makes a device in the network namespace of a process; it is gone once the descriptor is closed.

    Returns:
        A descriptor from which to read the packets that the host sends, and to which to write those that it receives.
    """
    found: list[int | OSError] = []

    def make() -> None:  # in a thread of its own, which alone enters the namespace, and ends there
        try:
            with open(f"/proc/{pid}/ns/net", "rb") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI))
            found.append(fd)
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, OSError):
        raise result
    return result


class Relay:
    """Carries packets from its making to its `end`.

    Args:
        seed: of the draws that decide which packets are lost.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._devices: dict[int, int] = {}
        """Host -> descriptor."""
        self._hosts: dict[int, int] = {}
        """Descriptor that is looked at -> host."""
        self._fds: list[int] = []
        """All that are to be closed."""
        self._host_at: dict[bytes, int] = {}
        self._wires: dict[tuple[int, int], Wire] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        """(when it arrives, order, host, packet)"""
        self._num_packets = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._thread = threading.Thread(target=self._carry, name="relay", daemon=True)
        self._thread.start()
        with contextlib.suppress(PermissionError):  # a network does not wait for processors that the hosts keep busy
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, _PRIORITY)

    def attach(self, host: int, fd: int) -> None:
        """A host is on the network from now on, with this device instead of the one that it may have had.

        Args:
            fd: of its device; closed by this class.
        """
        self._fds.append(fd)
        others = {each: at for each, at in self._hosts.items() if at != host}
        self._hosts = {**others, fd: host}  # the thread may be looking at it
        self._devices[host] = fd
        self._wake()

    def give(self, host: int, *addresses: str) -> None:
        """A host has these addresses from now on, and no others."""
        there = {ipaddress.ip_address(address).packed: host for address in addresses}
        self._host_at = {**{at: each for at, each in self._host_at.items() if each != host}, **there}

    def wire(self, source: int, target: int) -> Wire:
        """The wire from one host to another one: what is set there counts from the next packet on."""
        return self._wires.setdefault((source, target), Wire())

    def end(self) -> None:
        """Carries no more."""
        self._is_over = True
        self._wake()
        self._thread.join()
        for fd in [*self._fds, self._wake_fd]:
            os.close(fd)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _carry(self) -> None:
        while not self._is_over:
            now_s = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now_s:
                _, _, host, packet = heapq.heappop(self._waiting)
                self._deliver(host, packet)
            wait_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
            ready, _, _ = select.select(
                [self._wake_fd, *self._hosts], [], [], None if wait_s is None else max(0.0, wait_s)
            )
            for fd in ready:
                if fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                else:
                    self._read(fd)

    def _read(self, fd: int) -> None:
        source = self._hosts.get(fd)
        if source is None:  # it has another device by now
            return
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(fd, 1 << 16)
            except OSError:  # nothing more, or the host is gone
                return
            where = packet[16:20] if packet[0] >> 4 == 4 else packet[24:40]
            target = self._host_at.get(where)
            if target is not None:
                self._send(self.wire(source, target), target, packet)

    def _send(self, wire: Wire, target: int, packet: bytes) -> None:
        if wire.is_cut or (wire.loss and self._random.random() < wire.loss):
            return
        now_s = time.monotonic()
        wire.longest_s = max(wire.longest_s, wire.free_s - now_s)
        wire.free_s = max(wire.free_s, now_s) + len(packet) / wire.rate_bytes_per_s
        arrives_s = wire.free_s + wire.delay_s
        if arrives_s <= now_s:
            self._deliver(target, packet)
        else:
            self._num_packets += 1
            heapq.heappush(self._waiting, (arrives_s, self._num_packets, target, packet))

    def _deliver(self, host: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # its device is full, or gone
            os.write(self._devices[host], packet)
