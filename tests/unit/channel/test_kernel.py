"""What the kernel counts on connections is what was sent, received and acknowledged."""

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from elaswave.channel.server import counters_of
from elaswave.protocol.detection.host_silence import Counters

WAIT_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def look(sock: socket.socket) -> Counters:
    found = counters_of(sock, 7)
    assert found is not None and found.connection == 7
    return found


def wait_for(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_what_comes_and_what_is_acknowledged_is_counted(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    before = look(one)
    one.sendall(b"x" * 1000)
    wait_for(lambda: look(one).num_acknowledged == before.num_acknowledged + 1000)  # nobody has read it
    assert not look(one).is_outstanding and look(one).num_received == before.num_received
    other.sendall(b"y" * 300)
    wait_for(lambda: look(one).num_received == before.num_received + 300)


def test_there_is_nothing_to_count_on_other_sockets_and_closed_connections(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = socket.socketpair()
    with near, far:
        assert counters_of(near, 1) is None
    pair[0].close()
    assert counters_of(pair[0], 1) is None
