"""Sockets only: a peer that has no key, sends garbage or never finishes a sentence is refused and disturbs no
worker."""

import logging
import os
import secrets
import socket
import time

import pytest
import torch
from tests.conformance.worlds import KEY, PATIENCE_S, finish, in_threads, link, until

from elaswave.errors import AuthenticationError, FrameError, PeerLostError, WaitTimeoutError
from elaswave.transport import addresses, handshake, stream
from elaswave.transport import link as link_module
from elaswave.transport.handshake import MAGIC, VERSION, Dialler, KeyRing, Listener, Secrets
from elaswave.transport.interface import HEADER_BYTES, Tag, encode_header
from elaswave.transport.stream import StreamTransport

TAG = Tag(channel=1, step=1, attempt=0)


def connected(address: str) -> socket.socket:
    """A raw connection of an unauthenticated peer."""
    sock = addresses.dial(address)
    sock.settimeout(PATIENCE_S)
    return sock


def intruder(victim, worker: int, key: bytes = KEY, sock: socket.socket | None = None) -> socket.socket:
    """A raw peer that does the whole handshake as a worker; raises if it is refused."""
    sock = sock or connected(victim.address)
    try:
        side = Dialler(key, worker, victim.worker, secrets.token_bytes(32))
        sock.sendall(side.opening())
        sock.settimeout(0.001)
        while not side.done:
            victim.poll()
            try:
                data = sock.recv(side.bytes_needed)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionError("refused")
            sock.sendall(side.receive(data))
        victim.poll()
        sock.settimeout(PATIENCE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def still_works(a, b):
    assert a.peers >= {b.worker}
    finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(100))], a, b)


def refused(sock: socket.socket, *transports) -> bool:
    """The other side has closed the connection."""
    sock.settimeout(0.001)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for transport in transports:
            transport.poll()
        try:
            if not sock.recv(1 << 16):
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100),
        bytes(200),
        b"\xff" * 200,
        Dialler(KEY, 0, 9, bytes(32)).opening(),  # wants another worker
        Dialler(KEY, 0, 1, bytes(32)).opening() + bytes(32),  # a wrong answer to the challenge
        Dialler(KEY, 0, 1, bytes(32)).opening().replace(MAGIC + bytes([VERSION]), MAGIC + bytes([VERSION + 7])),
    ],
    ids=["http", "zeros", "ones", "another-worker", "wrong-answer", "version"],
)
def test_garbage_instead_of_a_handshake(stream_world, garbage, caplog):
    a, b = stream_world.linked(2)
    with connected(b.address) as sock, caplog.at_level(logging.WARNING, "elaswave.transport"):
        sock.sendall(garbage)
        assert refused(sock, a, b)
        still_works(a, b)
    assert any("turned a connection away" in message for message in caplog.messages)


def test_a_dialler_with_another_key_is_refused(stream_world):
    a, b = stream_world.linked(2)
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        intruder(b, 0, key=b"not the key of the suite at all!")
    still_works(a, b)


def test_a_dialler_that_skips_the_check_of_our_proof_is_refused(stream_world):
    a, b = stream_world.linked(2)
    with connected(b.address) as sock:
        sock.sendall(Dialler(KEY, 0, 1, bytes(32)).opening())
        until(lambda: len(sock.recv(1 << 16, socket.MSG_PEEK)) > 0 if _readable(sock) else False, a, b)
        sock.sendall(secrets.token_bytes(32))
        assert refused(sock, a, b)
    still_works(a, b)


def test_a_listener_with_another_key_is_not_believed(stream_world):
    a = stream_world.make(0)
    where = f"unix:{stream_world.folder}" if stream_world.kind == "unix" else "tcp:127.0.0.1"
    impostor = StreamTransport(1, key=b"not the key of the suite at all!", listen=where)
    try:

        def serve() -> None:
            with pytest.raises(WaitTimeoutError):
                impostor.wait(impostor.recv(1, TAG), 0.5)

        def dial() -> None:
            with pytest.raises(AuthenticationError, match="worker 1 does not hold this job's key"):
                a.connect({1: impostor.address}, PATIENCE_S)

        in_threads([serve, dial])
    finally:
        impostor.close()
    assert not a.peers and not impostor.peers


def test_a_link_is_made_though_the_key_is_changed_between_the_connection_and_the_handshake(stream_world):
    new = Secrets((b"the new key of the suite of links",))
    where = f"unix:{stream_world.folder}" if stream_world.kind == "unix" else "tcp:127.0.0.1"
    rings = [KeyRing(Secrets((KEY,))) for _ in range(2)]
    a, b = (StreamTransport(worker, key=ring, listen=where) for worker, ring in enumerate(rings))
    try:
        a.want({1: b.address})
        until(lambda: any(visit.is_connected for visit in a._acceptor._visits.values()), a)  # b has accepted nothing
        rings[0].now = rings[1].now = new
        until(lambda: a.peers and b.peers, a, b)
        assert not a._acceptor.trouble, "the first try has failed"
        rings[1].now = Secrets((KEY,))
        sock = connected(b.address)
        until(lambda: b._acceptor._visits, b)
        rings[1].now = new
        intruder(b, 0, *new.accepted, sock).close()
    finally:
        a.close()
        b.close()


def test_a_recorded_handshake_cannot_be_replayed(stream_world):
    a, b = stream_world.linked(2)
    nonce, key = bytes(32), KEY
    recorded = Dialler(key, 0, 1, nonce)
    answer = recorded.receive(Listener(key, 1, b"\1" * 32, lambda peer: None).receive(recorded.opening()))
    with connected(b.address) as sock:
        sock.sendall(recorded.opening() + answer)
        assert refused(sock, a, b)
    still_works(a, b)


def test_somebody_who_listens_but_never_answers_does_not_block_the_others(stream_world):
    a, b = stream_world.make(0), stream_world.make(1)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        silent = f"tcp:127.0.0.1:{mute.getsockname()[1]}"

        def dial() -> None:
            with pytest.raises(WaitTimeoutError, match=f"worker 5 at {silent}"):
                a.connect({1: b.address, 5: silent}, 0.3)

        in_threads([dial, lambda: b.connect({0: a.address}, PATIENCE_S)])
    still_works(a, b)


def test_slow_handshakes_expire_and_do_not_block_others(stream_world, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(StreamTransport, "handshake_timeout_s", 0.2)
        b = stream_world.make(1)
    a = stream_world.make(0)
    slow = [connected(b.address) for _ in range(5)]
    try:
        for index, sock in enumerate(slow):
            sock.sendall(Dialler(KEY, 0, 1, bytes(32)).opening()[: 10 * index])
        link([a, b])
        still_works(a, b)
        for sock in slow:
            assert refused(sock, a, b)
    finally:
        for sock in slow:
            sock.close()
    still_works(a, b)


def test_a_blocked_wait_ends_slow_handshakes_too(stream_world, monkeypatch):
    a = stream_world.make(0)
    monkeypatch.setattr(StreamTransport, "handshake_timeout_s", 0.05)
    b = stream_world.make(1)
    link([a, b])
    with connected(b.address) as sock:
        with pytest.raises(WaitTimeoutError):
            b.wait(b.recv(0, TAG), 0.3)
        sock.settimeout(1)
        assert sock.recv(10) == b""


def test_a_crowd_of_unauthenticated_peers_cannot_use_up_memory_or_time(stream_world, monkeypatch):
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 8)
    a, b = stream_world.make(0), stream_world.make(1)
    crowd = [connected(b.address) for _ in range(40)]
    try:
        for _ in range(10):
            b.poll()
        gone = 0
        for sock in crowd:
            sock.setblocking(False)
            try:
                gone += sock.recv(1) == b""
            except BlockingIOError:
                continue
        assert gone == 32
        link([a, b])
        still_works(a, b)
    finally:
        for sock in crowd:
            sock.close()


def header(**changes: object) -> bytes:
    """A good header with some bytes replaced: name -> (offset, bytes)."""
    data = bytearray(encode_header(0, TAG, torch.zeros(4), 16))
    for offset, value in changes.values():
        data[offset : offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"\0" * 64, "these are not elaswave frames"),
        (bytes(range(256)) * 16, "not elaswave frames"),
        (header(version=(4, b"\x63\0")), "version 99"),
        (header(dtype=(6, b"\xff")), "dtype code 255"),
        (header(ndim=(7, b"\x08")), "8 dimensions"),
        (header(length=(28, b"\xff" * 8)), "announces 18446744073709551615 bytes"),
        (header(length=(28, (5 << 30).to_bytes(8, "little"))), "announces 5368709120 bytes"),
        (header(length=(28, b"\x11")), "contradict"),
        (header(dim=(36, b"\x05")), "contradict"),
        (header(dim=(40, b"\x01")), "contradict"),
    ],
    ids=["zeros", "noise", "version", "dtype", "ndim", "largest", "too-long", "length", "dim", "spare-dim"],
)
@pytest.mark.parametrize("waiting", [True, False])
def test_a_peer_that_sends_what_cannot_be_right_loses_its_link(stream_world, data, seen, waiting, caplog):
    a, b, c = stream_world.linked(3)
    sock = intruder(c, 1)  # takes the place of b, as one who holds the key could
    try:
        handle = c.recv(1, TAG) if waiting else None
        other = c.recv(0, TAG)
        with caplog.at_level(logging.WARNING, "elaswave.transport"):
            sock.sendall(data)
            until(lambda: c.peers == {0}, c)
        assert any(seen in message for message in caplog.messages)
        with pytest.raises(PeerLostError, match=seen):
            c.wait(handle or c.recv(1, TAG), PATIENCE_S)
        finish([other, a.send(2, TAG, torch.ones(3))], a, c)
    finally:
        sock.close()


def test_a_huge_announced_frame_costs_no_memory_before_it_comes(stream_world):
    a, b, c = stream_world.linked(3)
    sock = intruder(c, 1)
    try:
        sock.sendall(encode_header(0, TAG, torch.empty((1 << 31,), dtype=torch.uint8, device="meta"), 1 << 31))
        until(lambda: c.peers == {0}, c)  # more than max_unexpected_bytes
        finish([c.recv(0, TAG), a.send(2, TAG, torch.ones(3))], a, c)
    finally:
        sock.close()


def test_a_header_that_comes_byte_by_byte(stream_world):
    a, b, c = stream_world.linked(3)
    sock = intruder(c, 1)
    try:
        handles = [c.recv(1, TAG), c.recv(1, TAG)]
        frame = header() + torch.arange(4.0).numpy().tobytes()
        for byte in frame + frame:
            sock.sendall(bytes([byte]))
            c.poll()
        finish(handles, c)
        assert [handle.result.tolist() for handle in handles] == [[0, 1, 2, 3]] * 2
        assert len(frame) == HEADER_BYTES + 16
    finally:
        sock.close()


def test_a_header_that_is_cut_where_the_read_buffer_ends(stream_world):
    a, b, c = stream_world.linked(3)
    sock = intruder(c, 1)
    try:
        frame = header() + torch.arange(4.0).numpy().tobytes()
        assert link_module.SCRATCH_BYTES % len(frame) in range(1, HEADER_BYTES)
        data = frame * (link_module.SCRATCH_BYTES // len(frame) + 1)
        handles = [c.recv(1, TAG) for _ in range(len(data) // len(frame))]
        for part in (data[: link_module.SCRATCH_BYTES], data[link_module.SCRATCH_BYTES :]):
            sock.sendall(part)
            until(lambda part=part: len(data) - c.bytes_received[1] < len(data) - len(part) + 1, c)
            c.poll()
        finish(handles, c)
        assert all(handle.result.tolist() == [0, 1, 2, 3] for handle in handles)
    finally:
        sock.close()


def test_a_peer_that_dials_again_replaces_its_link(stream_world):
    a, b, c = stream_world.linked(3)
    pending = c.recv(1, TAG)
    finish([b.send(2, TAG._replace(a=1), torch.ones(1))], b)
    sock = intruder(c, 1)
    try:
        with pytest.raises(PeerLostError, match="dialled again"):
            c.wait(pending, PATIENCE_S)
        before = c.recv(1, TAG._replace(a=1))
        c.wait(before, PATIENCE_S)  # what the old link had brought is there
        after = c.recv(1, TAG)
        sock.sendall(header() + bytes(16))
        c.wait(after, PATIENCE_S)
        assert c.peers == {0, 1}
    finally:
        sock.close()


def test_a_dialler_of_the_wrong_side_is_refused(stream_world):
    a, b = stream_world.linked(2)
    with pytest.raises(ConnectionError, match="refused"):
        intruder(a, 1)
    still_works(a, b)


@pytest.mark.parametrize("key", [b"", b"short", b"fifteen bytes.."])
def test_a_short_key_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match="at least 16"):
        StreamTransport(0, key=key, listen=f"unix:{tmp_path / 'private'}")
    assert not (tmp_path / "private").exists() or not os.listdir(tmp_path / "private")


def test_no_memory_for_a_frame_is_a_frame_error():
    from elaswave.transport.interface import empty_tensor

    with pytest.raises(FrameError, match="no memory"):
        empty_tensor(0, (1 << 31, 1 << 31))


def _readable(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_no_descriptor_is_left_behind(stream_world, tmp_path):
    folder = tmp_path / "again"
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        where = f"unix:{folder}" if stream_world.kind == "unix" else "tcp:127.0.0.1"
        transports = [StreamTransport(worker, key=KEY, listen=where) for worker in range(3)]
        link(transports)
        a, b, c = transports
        raw_peers = [connected(b.address) for _ in range(3)]
        b.poll()
        with pytest.raises(WaitTimeoutError):
            a.connect({7: f"unix:{tmp_path}/nobody.sock", 8: c.address}, 0.02)
        for transport in (a, b):
            transport.advance_generation(1, [0, 1])
        with pytest.raises(ValueError, match="has no port"):
            a.connect({9: "tcp:127.0.0.1"}, 0.02)
        for transport in transports:
            transport.close()
        for sock in raw_peers:
            sock.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_handshake_never_blocks_on_a_full_socket():
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        while True:
            try:
                here.send(bytes(1 << 16))
            except BlockingIOError:
                break
        with pytest.raises(ConnectionError, match="does not take a whole message"):
            stream._send(here, b"hello")
