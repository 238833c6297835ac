"""Control connections over emulated links: bytes come whole, in order, and no sooner than the link lets them."""

import contextlib
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from elaswave.channel.slow_dial import SlowControl, slow_control_of
from elaswave.config.load import load_config
from elaswave.transport.emulated import EmulatedPath

WAIT_S = 60.0
FILE = "examples/far_apart/four_regions_small.toml"


def echo(listener: socket.socket) -> None:
    """Sends back all that comes, then what was open ends."""
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


@pytest.fixture
def address(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        thread = threading.Thread(target=echo, args=(listener,))
        thread.start()
        yield f"unix:{tmp_path / 'socket'}"
        thread.join(WAIT_S)
        assert not thread.is_alive()


def ask(near: socket.socket, data: bytes) -> tuple[bytes, float]:
    """What comes back, and after how long."""
    near.settimeout(WAIT_S)
    begin_s = time.monotonic()
    near.sendall(data)
    found = b""
    while len(found) < len(data):
        found += near.recv(1 << 16)
    return found, time.monotonic() - begin_s


def test_bytes_take_latency_and_bandwidth_of_both_ways(address: str) -> None:
    link = SlowControl(EmulatedPath(1, 0.05, 1e6), EmulatedPath(0, 0.03, 1e5))
    with link.dial(address) as near:
        data = bytes(range(256)) * 20
        found, seconds = ask(near, data)
        assert found == data and seconds >= 0.08 + len(data) / 1e6 + len(data) / 1e5
        link.slow_down(0.1)
        found, seconds = ask(near, data)
        assert found == data and seconds >= 0.08 + len(data) / 1e5 + len(data) / 1e4
        near.shutdown(socket.SHUT_WR)
        assert near.recv(1) == b"", "the end arrives too"


def test_any_descriptor_will_do(address: str) -> None:
    """A coordinator of a large job, and a script with many files, have more than a thousand."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 1200:
        pytest.skip(f"needs 1200 descriptors, may have {limits[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    link = SlowControl(EmulatedPath(1, 0.0, 1e6), EmulatedPath(0, 0.0, 1e6))
    try:
        with contextlib.ExitStack() as held:
            while held.enter_context(open(os.devnull)).fileno() < 1024:
                pass
            with link.dial(address) as near:
                assert near.fileno() >= 1024 and ask(near, b"word")[0] == b"word"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_coordinator_that_refuses_or_is_gone_closes_the_connection(tmp_path: Path) -> None:
    link = SlowControl(EmulatedPath(1, 0.01, 1e6), EmulatedPath(0, 0.01, 1e6))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # nobody listens
        near = link.dial(f"tcp:127.0.0.1:{port}")
        with near:
            near.settimeout(WAIT_S)
            assert near.recv(1) == b""
    with pytest.raises(OSError, match="No such file"):
        link.dial(f"unix:{tmp_path}/nobody")


def test_workers_of_the_coordinators_site_need_no_link() -> None:
    settings = [f"sites.network={FILE}", "layout.widths=[1, 1, 1]"]
    assert slow_control_of(load_config(None, settings), 0) is None
    assert slow_control_of(load_config(), 0) is None
    config = load_config(None, [*settings, "sites.coordinator=oregon"])
    assert slow_control_of(config, 0) is None and slow_control_of(config, 2) is not None
