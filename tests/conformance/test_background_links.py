"""Every transport: links that are made in the background, while others are used."""

import pytest
import torch
from tests.conformance.worlds import PATIENCE_S, World, link, settle, until

from elaswave.errors import PeerLostError
from elaswave.transport.interface import Tag, Transport
from elaswave.transport.stream import StreamTransport

TAG = Tag(channel=1, step=1, attempt=0)


def want(*transports: Transport) -> None:
    """Each wants links to all others."""
    for transport in transports:
        transport.want({other.worker: other.address for other in transports})


def absent(world: World, worker: int) -> str:
    """An address at which nobody listens."""
    addresses = {"unix": f"unix:{world.folder}/nobody.sock", "tcp": "tcp:127.0.0.1:1", "memory": f"memory:{worker}"}
    return addresses["tcp" if world.kind == "tls" else world.kind]


def exchange(a: Transport, b: Transport, number: int) -> None:
    """A frame in each direction, as a step has them, with waits that block."""
    tag = TAG._replace(step=number)
    received = [a.recv(b.worker, tag), b.recv(a.worker, tag)]
    a.wait(a.send(b.worker, tag, torch.tensor([number])), PATIENCE_S)
    b.wait(b.send(a.worker, tag, torch.tensor([-number])), PATIENCE_S)
    a.wait(received[0], PATIENCE_S)
    b.wait(received[1], PATIENCE_S)
    assert [handle.result.item() for handle in received if handle.result is not None] == [-number, number]


def test_a_link_is_made_while_frames_move(world: World) -> None:
    a, b = world.linked(2)
    joiner = world.make(2)
    want(a, joiner)
    want(b, joiner)
    joiner.want({0: a.address, 1: b.address})
    number = 0
    while not a.peers == {1, 2} or not b.peers == {0, 2}:
        number += 1
        exchange(a, b, number)
        joiner.poll()
        assert number < 100_000, "the links never come"
    until(lambda: joiner.peers == {0, 1}, a, b, joiner)
    exchange(a, joiner, 1)
    exchange(b, joiner, 1)
    assert (a.trouble(2), joiner.trouble(0)) == ("", "")


def test_both_sides_at_once_make_one_link(world: World) -> None:
    a, b = world.make(0), world.make(1)
    want(a, b)
    until(lambda: a.peers and b.peers, a, b)
    settle(a, b)
    assert (a.peers, b.peers) == ({1}, {0})
    exchange(a, b, 1)
    link([a, b])  # nothing is left to be done
    want(a, b)
    settle(a, b)
    exchange(a, b, 2)


def test_wanting_never_blocks_and_what_is_seen_of_a_peer_that_is_not_there_is_told(world: World) -> None:
    a, b = world.linked(2)
    a.want({9: absent(world, 9)})
    until(lambda: a.trouble(9), a)
    number = 0
    while number < 20:  # and it is tried again and again
        number += 1
        exchange(a, b, number)
    assert a.peers == {1} and a.trouble(9) == a.unreached(9) != ""
    a.want({})
    exchange(a, b, 21)


def test_a_peer_that_listens_and_never_answers_is_tried_again(
    stream_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StreamTransport, "handshake_timeout_s", 0.05)
        a = stream_world.make(0)
    silent = stream_world.make(1)
    a.want({1: silent.address})
    until(lambda: a.trouble(1), a)
    assert "did not finish the handshake in time" in a.trouble(1) and not a.peers
    assert a.unreached(1) == "", "it may be slow"
    silent.want({0: a.address})
    until(lambda: a.peers == {1} and silent.peers == {0}, silent, a)
    assert a.trouble(1) == ""


def test_a_wish_can_be_withdrawn(world: World) -> None:
    a = world.make(0)
    if world.kind == "memory":  # there a link is made as soon as the peer is there
        a.want({1: "memory:1"})
        a.poll()
        a.want({})
        silent = world.make(1)
    else:
        silent = world.make(1)
        a.want({1: silent.address})
        a.poll()  # it dials
        a.want({})
    settle(a, silent)
    assert (a.peers, silent.peers) == (frozenset(), frozenset())
    want(a, silent)
    until(lambda: a.peers and silent.peers, a, silent)


def test_what_is_wanted_anew_takes_the_place_of_what_was_wanted(world: World) -> None:
    a, b, c = (world.make(worker) for worker in range(3))
    a.want({1: absent(world, 9)})
    a.want({2: c.address})
    c.want({0: a.address})
    until(lambda: a.peers and c.peers, a, b, c)
    assert a.peers == {2}
    a.want({1: b.address, 2: c.address})
    b.want({0: a.address})
    until(lambda: a.peers == {1, 2}, a, b, c)
    exchange(a, c, 1)


def test_a_wanted_link_outlives_an_generation_without_its_peer_and_any_other_does_not(world: World) -> None:
    a, b, joiner = world.linked(3)
    a.want({2: joiner.address})
    for transport in (a, b):
        transport.advance_generation(1, [0, 1])
    assert a.peers == {1, 2} and b.peers == {0}
    until(lambda: joiner.peers == {0}, joiner, a, b)
    for transport in (a, joiner):
        transport.advance_generation(2, [0, 2])
    exchange(a, joiner, 1)


def test_a_wanted_link_that_ends_is_made_again(stream_world: World) -> None:
    a = stream_world.make(0)
    first = stream_world.make(1)
    want(a, first)
    until(lambda: a.peers and first.peers, a, first)
    first.close()
    until(lambda: not a.peers, a)
    with pytest.raises(PeerLostError):
        a.wait(a.recv(1, TAG), PATIENCE_S)
    second = stream_world.make(1)
    want(a, second)
    until(lambda: a.peers and second.peers, a, second)
    exchange(a, second, 1)


def test_another_key_is_told_and_no_link_is_made(stream_world: World) -> None:
    from tests.conformance import worlds

    a = stream_world.make(0)
    own, worlds.KEY = worlds.KEY, b"the key of another job altogether"
    try:
        stranger = stream_world.make(1)
    finally:
        worlds.KEY = own
    want(a, stranger)
    until(lambda: a.trouble(1), a, stranger)
    assert "key" in a.trouble(1) and not a.peers and not stranger.peers
