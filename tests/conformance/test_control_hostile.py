"""A peer that has no key, sends garbage, repeats others or never finishes is refused, logged, and disturbs no
member."""

import os
import struct

import pytest
from tests.conformance.coordinators import KEY, KINDS, Hello, Owner, RawPeer, Say, Tell, Town, until

from elaswave.channel.client import ControlClient
from elaswave.channel.wire import COORDINATOR, PROTOCOL_VERSION, ControlFrameKind, encode_payload
from elaswave.transport import handshake
from elaswave.transport.handshake import Dialler

HELLO_BYTES = 50


@pytest.fixture(params=KINDS)
def town(request, tmp_path):
    yield from _town(request.param, tmp_path)


@pytest.fixture
def one_town(tmp_path):
    """For what does not depend on the kind of socket."""
    yield from _town("unix", tmp_path)


def _town(kind, tmp_path):
    town = Town(kind, tmp_path)
    yield town
    town.close()
    assert os.listdir(town.folder) == [], "a socket file is left"


@pytest.fixture
def world(town):
    """A coordinator, and a member that must go on undisturbed."""
    yield from _world(town)


@pytest.fixture
def one_world(one_town):
    yield from _world(one_town)


def _world(town, **options):
    coordinator = town.coordinator(**options)
    member = town.participant(1)
    member.works()
    yield town, coordinator
    member.works()
    assert member.num_hellos == 1 and coordinator.events(1) == ["connected"], "the member was disturbed"
    assert {who for _, who, _ in coordinator.log} <= {1, 66}
    assert coordinator.failure is None


def reasons(coordinator, text: str) -> None:
    """Waits until a peer was turned away for a reason."""
    until(lambda: any(text in reason for reason in coordinator.refusals))


def frame(version=PROTOCOL_VERSION, kind=ControlFrameKind.MESSAGE, length=0, number=0) -> bytes:
    return struct.pack("<BBIIQ", version, kind, 0, length, number)


def test_a_wrong_key(world, caplog):
    town, coordinator = world
    with pytest.raises(Exception, match="does not hold this job's key"):
        town.raw_peer(key=b"another key of enough bytes").authenticate()
    # One that goes on without checking the coordinator's proof, as a peer without the key would.
    raw_peer = town.raw_peer()
    guessing = raw_peer.session
    raw_peer.flush()
    while guessing._side is None:
        raw_peer.receive()
    raw_peer.flush()
    guessing._side.receive = lambda data: os.urandom(32)  # type: ignore[method-assign]
    raw_peer.receive()
    assert raw_peer.is_refused()
    reasons(coordinator, "claims to be worker 66 does not hold this job's key")
    assert "control connection of an unauthenticated peer ended" in caplog.text
    assert coordinator.events(66) == []
    assert coordinator.strangers == coordinator.refusals[-1:], "of one that hung up without a word nobody knows why"


def test_a_client_with_another_key_is_named_on_both_sides(world):
    town, coordinator = world
    key = b"another key of enough bytes"
    stranger = ControlClient([(coordinator.address, "")], key, 66, Tell, Owner(), tls=town.tls)
    until(lambda: stranger.turn(0.01) and coordinator.strangers)
    assert "does not hold this job's key" in stranger.trouble
    stranger.close()
    assert "worker 66 was given another key than this process" in coordinator.strangers[0]
    assert coordinator.events(66) == []


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 2, os.urandom(4096), bytes(50)])
def test_garbage(world, garbage):
    town, coordinator = world
    raw_peer = town.raw_peer()
    raw_peer.write(garbage)
    assert raw_peer.is_refused()
    reasons(coordinator, "TLS failed" if town.kind == "tls" else "it is not an elaswave worker")
    assert coordinator.strangers == []


def test_a_replayed_handshake(one_world):
    town, coordinator = one_world
    honest = town.raw_peer().authenticate().say_hello()
    until(lambda: coordinator.events(66) == ["connected"])
    replayed = town.raw_peer()
    replayed.write(honest.sent[:HELLO_BYTES])
    proof = replayed.socket.recv(1 << 16)
    assert proof
    replayed.write(honest.sent[HELLO_BYTES : HELLO_BYTES + 32])
    assert replayed.is_refused()
    reasons(coordinator, "does not hold this job's key")
    assert coordinator.events(66) == ["connected"], "the honest one stays connected"
    assert honest.say(1).acknowledged() == 1


def test_everything_said_at_once(one_world):
    """A recording played back does not even wait for our words."""
    town, coordinator = one_world
    honest = town.raw_peer().authenticate().say_hello()
    replayed = town.raw_peer()
    replayed.write(honest.sent)
    assert replayed.is_refused()
    reasons(coordinator, "spoke out of turn")


def test_our_own_words_sent_back(one_world):
    town, coordinator = one_world
    raw_peer = town.raw_peer()
    raw_peer.flush()
    proof = raw_peer.socket.recv(1 << 16)
    raw_peer.write(proof[-32:])
    assert raw_peer.is_refused()
    reasons(coordinator, "does not hold this job's key")


def test_slow_unauthenticated_peers(town):
    for coordinator_town, coordinator in _world(town, handshake_timeout_s=0.1):
        half = RawPeer(coordinator_town.listen)
        silent = RawPeer(coordinator_town.listen)
        authenticated = coordinator_town.raw_peer().authenticate()
        half.write(Dialler(KEY, 66, COORDINATOR, os.urandom(32)).opening()[:-1] if town.kind != "tls" else b"\x16\x03")
        assert half.is_refused() and silent.is_refused() and authenticated.is_refused()
        reasons(coordinator, "did not finish the handshake in time")
        for raw_peer in (half, silent):
            raw_peer.close()


def test_too_many_unauthenticated_peers(one_world, monkeypatch):
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 4)
    town, coordinator = one_world
    raw_peers = [town.raw_peer() for _ in range(8)]
    assert all(raw_peer.is_refused() for raw_peer in raw_peers[:4])
    reasons(coordinator, "too many handshakes at a time")
    late = town.raw_peer().authenticate().say_hello()
    assert late.say(1).acknowledged() == 1


def test_a_flood_of_unauthenticated_peers_is_counted_instead_of_logged(one_world, monkeypatch, caplog):
    monkeypatch.setattr(handshake, "MAX_LINES_PER_PERIOD", 3)
    monkeypatch.setattr(handshake, "PERIOD_S", 0.5)
    town, coordinator = one_world
    for _ in range(10):
        raw_peer = town.raw_peer()
        raw_peer.write(bytes(HELLO_BYTES))
        assert raw_peer.is_refused()
        raw_peer.close()
    reasons(coordinator, "more connections were turned away within 0.5 s")
    assert len(coordinator.refusals) <= 8
    assert "more connections were turned away" in caplog.text


def test_whom_the_owner_refuses(one_town):
    refusal = {66: "it has been fenced"}.get
    for town, coordinator in _world(one_town, refusal=refusal):
        with pytest.raises(ConnectionError):
            town.raw_peer().authenticate().say_hello()
        reasons(coordinator, "worker 66 may not link with the coordinator: it has been fenced")
        town.raw_peer(own=1)


def test_somebody_who_wants_another(one_world):
    town, coordinator = one_world
    raw_peer = town.raw_peer()
    raw_peer.write(Dialler(KEY, 66, 7, os.urandom(32)).opening())
    assert raw_peer.is_refused()
    reasons(coordinator, "worker 66 dialled worker 7 but reached the coordinator")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            lambda session: session.write(ControlFrameKind.MESSAGE, 1, encode_payload(Say(1))),
            "MESSAGE from worker 66, which may not",
        ),
        (lambda session: session.write(ControlFrameKind.HEARTBEAT), "HEARTBEAT from worker 66, which may not"),
        (
            lambda session: (session.write(ControlFrameKind.OPEN, 1), session.write(ControlFrameKind.ACK, 1)),
            "ACK from worker 66",
        ),
        (
            lambda session: (session.write(ControlFrameKind.OPEN, 1), session.write(ControlFrameKind.OPEN, 1)),
            "opened its connection twice",
        ),
        (lambda session: session.write(ControlFrameKind.MESSAGE, 0, b"\xc1"), "a malformed message from worker 66"),
        (
            lambda session: session.write(ControlFrameKind.MESSAGE, 0, encode_payload(Tell(1))),
            "a malformed message from worker 66",
        ),
        (
            lambda session: session.write(ControlFrameKind.MESSAGE, 0, encode_payload(Hello()) + b"x"),
            "a malformed message from worker 66",
        ),
        (lambda session: session.write(9), "a malformed message from worker 66: 9 is not a valid ControlFrameKind"),
        (lambda session: session._leaving.append(frame(length=1 << 31)), "a message of 2147483648 bytes from worker"),
        (
            lambda session: session._leaving.append(frame(version=PROTOCOL_VERSION + 1)),
            "install one release everywhere",
        ),
        (lambda session: session._leaving.append(frame() + bytes(16)), "it was changed, replayed or moved"),
    ],
)
def test_a_member_that_breaks_the_rules(one_world, said, reason):
    """It holds the key, but is broken or of another release."""
    town, coordinator = one_world
    raw_peer = town.raw_peer().authenticate()
    said(raw_peer.session)
    raw_peer.flush()
    assert raw_peer.is_refused()
    reasons(coordinator, reason)


@pytest.mark.parametrize("how", ["changed", "replayed", "left out", "reflected", "cut short"])
def test_frames_that_somebody_on_the_way_has_touched(one_world, how):
    town, coordinator = one_world
    raw_peer = town.raw_peer().authenticate().say_hello()
    session = raw_peer.session
    until(lambda: coordinator.events(66) == ["connected"])
    session.write(ControlFrameKind.MESSAGE, 1, encode_payload(Say(1)))
    first = session.take()
    session.write(ControlFrameKind.MESSAGE, 2, encode_payload(Say(2)))
    second = session.take()
    if how == "changed":
        raw_peer.write(first[:20] + bytes([first[20] ^ 1]) + first[21:])
    elif how == "replayed":
        raw_peer.write(first)
        assert raw_peer.acknowledged() == 1
        raw_peer.write(first)
    elif how == "left out":
        raw_peer.write(second)
    elif how == "reflected":
        coordinator.call(lambda: coordinator.server.send(66, Tell(1)))
        raw_peer.write(raw_peer.socket.recv(1 << 16))
    else:
        raw_peer.write(first[:-1] + second)
    assert raw_peer.is_refused()
    reasons(coordinator, "control connection of worker 66 ended: a frame that worker 66 did not send in this place")
    assert coordinator.said(66) == ([1] if how == "replayed" else [])
    until(lambda: coordinator.events(66) == ["connected", "closed"])


def deaf_peer(town, coordinator) -> RawPeer:
    """A member that reads nothing."""
    deaf = town.raw_peer().authenticate().say_hello()
    until(lambda: coordinator.events(66) == ["connected"])
    return deaf


def fill(coordinator) -> int:
    """Sends a MiB again and again until the peer is gone; returns how often that went well."""

    noise = os.urandom(1 << 20)  # compressing it gains nothing

    def send_all() -> int:
        for sent in range(100):
            if not coordinator.server.send(66, Tell(1, noise)):
                return sent
        return 100

    return coordinator.call(send_all)


def test_a_peer_that_does_not_read_is_cut_off(town):
    for _, coordinator in _world(town, max_outbox_bytes=8 << 20):
        deaf_peer(town, coordinator)
        assert 8 <= fill(coordinator) < 100
        reasons(coordinator, "worker 66 does not read: ")
        coordinator.wait_for_events(66, "connected", "closed")
        assert fill(coordinator) == 0


def test_a_peer_that_reads_too_slowly_is_cut_off(one_town):
    for town, coordinator in _world(one_town, stall_timeout_s=0.05):
        deaf_peer(town, coordinator)
        assert fill(coordinator) == 100
        reasons(coordinator, "did not read what waited for it within 0.05 s")


def test_one_that_reads_in_the_end_stays(one_town):
    for town, coordinator in _world(one_town):
        slow = deaf_peer(town, coordinator)
        assert fill(coordinator) == 100
        while len(slow.frames) < 100:
            slow.receive()
        slow.frames.clear()
        assert slow.say(1).acknowledged() == 1
