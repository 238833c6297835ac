"""Real links that are paced: which rate the kernel is told for which connection."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.conformance.worlds import World, finish, link

from elaswave.transport.emulated import EmulatedPath, PacedLinks
from elaswave.transport.interface import Tag

_SO_MAX_PACING_RATE = 47
PATHS = {1: EmulatedPath(0, 0.1, 1e6), 2: EmulatedPath(0, 0.1, 1e6), 3: EmulatedPath(1, 0.1, 2e5)}


@contextlib.contextmanager
def connection(*, unread_bytes: int = 0) -> Iterator[socket.socket]:
    """A TCP connection to a peer that does not read, and has no room for so much."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as near, listener.accept()[0]:
            near.setblocking(False)
            if unread_bytes:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * unread_bytes)
                near.send(bytes(unread_bytes))
            yield near


def rate_of(sock: socket.socket) -> int:
    (found,) = struct.unpack("@Q", sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8))
    return int(found)


UNPACED = 2**64 - 1


def test_a_link_that_sends_has_the_rate_of_its_path_and_others_are_left_alone() -> None:
    with connection() as first, connection() as near:
        links = PacedLinks(PATHS.get)
        links.begin(1, first)
        links.begin(9, near)
        assert links.share([(1, first), (9, near)], 0.0, sending=1) > 1e9
        assert rate_of(first) == 1_000_000 and rate_of(near) == UNPACED
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 1_000_000


def test_those_that_have_something_to_send_to_one_site_share_its_rate() -> None:
    with connection(unread_bytes=1 << 20) as first, connection() as second, connection() as other:
        links = PacedLinks(PATHS.get)
        those = [(1, first), (2, second), (3, other)]
        links.share(those, 0.0, sending=3)
        assert (rate_of(first), rate_of(other)) == (1_000_000, 200_000)
        next_s = links.share(those, 0.01, sending=2)
        assert (rate_of(first), rate_of(second), rate_of(other)) == (500_000, 500_000, 200_000)
        assert 0 < next_s < 1, "it is to be looked when one of them is done"
        links.share(those, 0.02)
        assert rate_of(first) == 500_000, "it was looked a moment ago"
        links.share(those, 0.01 + next_s)
        assert rate_of(first) == 1_000_000, "the other one has sent all of it"


def test_a_link_that_slows_down_and_one_that_ends() -> None:
    with connection() as first:
        links = PacedLinks(PATHS.get)
        links.share([(1, first)], 0.0, sending=1)
        links.slow_down(0.01)
        links.share([(1, first)], 0.0, sending=1)
        assert rate_of(first) == 10_000
        links.end(first)
    with connection() as again:  # most probably with the same descriptor
        links.share([(1, again)], 0.0, sending=1)
        assert rate_of(again) == 10_000


def test_sockets_within_a_machine_are_left_alone() -> None:
    first, second = socket.socketpair()
    with first, second:
        links = PacedLinks(PATHS.get)
        links.begin(1, first)
        assert links.share([(1, first)], 0.0, sending=1) > 1e9


def test_frames_over_paced_links_arrive_at_that_rate(tmp_path: Path) -> None:
    world = World("tcp", tmp_path)
    try:
        paths = {1: EmulatedPath(0, 0.0, 2e6)}
        pair = [world.make(0, paced=PacedLinks(paths.get)), world.make(1)]
        link(pair)
        data, found = torch.arange(250_000, dtype=torch.float32), torch.zeros(250_000)
        begin_s = time.monotonic()
        arrived = pair[1].recv(0, Tag(0, 0, 0), found)
        sent = pair[0].send(1, Tag(0, 0, 0), data)
        finish([sent, arrived], *pair)
        assert torch.equal(data, found)
        assert time.monotonic() - begin_s > 0.25, "a megabyte at two a second; never sooner, however loaded"
    finally:
        world.close()
