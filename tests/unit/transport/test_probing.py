"""Probes over real sockets: both sides hold one key, every wait has a bound, and who answers survives whoever asks."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from elaswave.errors import AuthenticationError, ProbeError
from elaswave.planning.costs.link_probes import PROBE_BYTES_MAX
from elaswave.transport import probing
from elaswave.transport.addresses import reserve
from elaswave.transport.handshake import MAX_LINES_PER_PERIOD, NONCE_BYTES, Dialler

KEY = b"k" * 32


@contextlib.contextmanager
def answering(said: list[str], key: bytes = KEY) -> Iterator[int]:
    """A host that answers; its port."""
    over = threading.Event()
    with reserve("127.0.0.1") as listener:
        listener.listen()
        arguments = (listener, key, lambda: not over.is_set(), said.append)
        thread = threading.Thread(target=probing.answer, args=arguments)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaswave.planning.costs.link_probes.PROBE_BYTES_MAX", 1 << 18)


def dialled(port: int, key: bytes = KEY) -> socket.socket:
    """A connection that has shaken hands, for what a good host would not send."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    side = Dialler(key, probing.PROBER, probing.PROBER, b"n" * NONCE_BYTES)
    sock.sendall(side.opening())
    while not side.done:
        sock.sendall(side.receive(sock.recv(side.bytes_needed, socket.MSG_WAITALL)))
    return sock


def test_a_link_is_measured_in_both_directions_and_again() -> None:
    said: list[str] = []
    with answering(said) as port:
        found = [probing.measure_link("localhost", port, KEY) for _ in range(2)]
    assert all(each.out.bandwidth_bytes_per_s > 0 and each.back.bandwidth_bytes_per_s > 0 for each in found)
    assert said == [f"127.0.0.1 measured this link with {each.num_probes} probes" for each in found]


def test_nobody_there_is_told_with_what_to_do() -> None:
    with reserve("127.0.0.1") as kept, pytest.raises(ProbeError, match="nobody answers probes at .*start `elaswave"):
        probing.measure_link("127.0.0.1", kept.getsockname()[1], KEY)


def test_another_key_is_refused_on_both_sides() -> None:
    said: list[str] = []
    with answering(said, b"x" * 32) as port, pytest.raises(AuthenticationError, match="does not hold this job's key"):
        probing.measure_link("127.0.0.1", port, KEY)
    assert "was given another key than this process" in said[0]


def test_one_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PROBE_S_MAX", 0.2)
    with reserve("127.0.0.1") as silent:
        silent.listen()
        with pytest.raises(ProbeError, match=r"has not done its part of the handshake within 0\.2 s: it has stopped"):
            probing.measure_link("127.0.0.1", silent.getsockname()[1], KEY)


def test_one_that_speaks_otherwise_or_ends_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for answer, said in ((b"HTTP/1.1 400 Bad Request\r\n" + b" " * 200, "began with"), (b"ELW", "after 3 of 78")):
            thread = threading.Thread(target=lambda answer=answer: _greets(server, answer))
            thread.start()
            with pytest.raises((AuthenticationError, ProbeError), match=said):
                probing.measure_link("127.0.0.1", server.getsockname()[1], KEY)
            thread.join(30)


def _greets(server: socket.socket, answer: bytes) -> None:
    sock, _ = server.accept()
    with sock, contextlib.suppress(OSError):  # who measures has left, with bytes that it did not read
        sock.recv(1 << 16)
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass


def test_who_answers_survives_whoever_asks() -> None:
    """One that ends in the midst of a probe, that closes one direction, that wants too much, that has no key."""
    said: list[str] = []
    with answering(said) as port:
        with dialled(port) as sock:
            sock.sendall(struct.pack("<QQ", 1000, 0) + b"few")
        with dialled(port) as sock:
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1) == b""
        with dialled(port) as sock:
            sock.sendall(struct.pack("<QQ", 0, PROBE_BYTES_MAX + 1))
            assert sock.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            sock.sendall(bytes(100))
        assert probing.measure_link("127.0.0.1", port, KEY).num_probes
    assert ["after 3 of 1000 bytes" in said[0], "with 0 probes" in said[1]] == [True, True]
    assert f"bytes, at most {PROBE_BYTES_MAX} are answered" in said[2]
    assert "it is not an elaswave worker" in said[3] and "measured this link with" in said[4]


def test_strangers_make_nobody_wait() -> None:
    said: list[str] = []
    with answering(said) as port:
        strangers = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(200)]
        found = probing.measure_link("localhost", port, KEY)
        for stranger in strangers:
            stranger.close()
    assert f"127.0.0.1 measured this link with {found.num_probes} probes" in said
    assert len(said) <= MAX_LINES_PER_PERIOD + 1


def test_two_that_measure_take_turns() -> None:
    said: list[str] = []
    with answering(said) as port, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: probing.measure_link("localhost", port, KEY), range(3)))
    assert sorted(said) == sorted(f"127.0.0.1 measured this link with {each.num_probes} probes" for each in found)
