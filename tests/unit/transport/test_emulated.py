"""Emulated links: when frames leave and arrive, who waits for whom, and what becomes of them at ends and
generations."""

import math
import time
from pathlib import Path

import pytest
import torch
from tests.conformance.worlds import PATIENCE_S, World, link

from elaswave.errors import InterruptedWaitError, PeerLostError
from elaswave.transport.emulated import EmulatedLinks, EmulatedPath
from elaswave.transport.interface import Failures, Handle, Tag

PATHS = {1: EmulatedPath(0, 0.5, 100.0), 2: EmulatedPath(0, 0.5, 100.0), 3: EmulatedPath(1, 0.1, 1000.0)}


def handle(peer: int) -> Handle:
    return Handle("send", peer, Tag(0, 0, 0), Failures())


def frame(num_bytes: int) -> list[memoryview]:
    return [memoryview(bytes([number % 251 for number in range(num_bytes)]))]


def test_a_frame_takes_its_bytes_over_the_bandwidth_and_then_the_latency() -> None:
    links = EmulatedLinks(PATHS.get)
    sent = handle(1)
    assert not links.has_frames
    assert links.put(sent, frame(100), 10.0) and not links.put(handle(9), frame(1), 10.0)
    assert links.turn(10.0) == ([], 1.0, False) and not sent.done
    arrived, next_s, has_left = links.turn(11.0)
    assert (arrived, next_s, has_left, sent.done) == ([], 0.5, True, True)
    assert links.has_frames, "it is under way"
    ((peer, content),), next_s, has_left = links.turn(11.5)
    assert (peer, bytes(content), next_s, has_left) == (1, bytes(frame(100)[0]), math.inf, False)
    assert not links.has_frames


def test_what_goes_to_one_site_goes_one_after_the_other_and_other_sites_do_not_wait() -> None:
    links = EmulatedLinks(PATHS.get)
    first, second, other = handle(1), handle(2), handle(3)
    for each in (first, second, other):
        links.put(each, frame(100), 0.0)
    assert [arrival.peer for arrival in links.turn(0.2)[0]] == [3]
    assert links.turn(1.4)[0] == [] and first.done and not second.done
    assert [arrival.peer for arrival in links.turn(2.5)[0]] == [1, 2]


def test_a_frame_behind_a_free_link_begins_when_it_is_put_there() -> None:
    links = EmulatedLinks(PATHS.get)
    links.put(handle(1), frame(100), 0.0)
    links.turn(5.0)
    links.put(handle(1), frame(100), 5.0)
    assert links.turn(5.5)[1] == pytest.approx(0.5)


def test_a_link_that_slows_down_goes_on_at_the_new_rate_and_is_seen_to_move() -> None:
    links = EmulatedLinks(PATHS.get)
    links.put(handle(1), frame(100), 0.0)
    links.turn(0.0)
    links.slow_down(0.01)
    assert links.turn(50.0)[1] == pytest.approx(50.0)
    moved = [links.moved_bytes(at_s) for at_s in (10.0, 20.0, 90.0)]
    assert moved == sorted(set(moved)) and moved[-1] == 90
    links.turn(100.0)
    assert links.moved_bytes(100.0) == links.moved_bytes(200.0) == 100


def test_what_goes_to_a_site_that_is_away_stands_still_until_it_is_back() -> None:
    """What is on its way and what has not left; other sites notice nothing. One that is away for good stays so."""
    links = EmulatedLinks(PATHS.get)
    first, second = handle(1), handle(2)
    for each in (first, second, handle(3)):
        links.put(each, frame(100), 0.0)
    assert [arrival.peer for arrival in links.turn(1.0)[0]] == [3]
    links.part(lambda site: site == 0, 9.0)
    links.put(handle(3), frame(100), 1.0)
    assert first.done and not second.done
    assert [arrival.peer for arrival in links.turn(1.6)[0]] == [3]
    assert links.turn(4.0) == ([], 5.0, False) and not second.done
    arrived, next_s, has_left = links.turn(9.0)
    assert [arrival.peer for arrival in arrived] == [1, 2] and second.done and has_left and next_s == math.inf
    links.part(lambda site: site == 0, math.inf)
    links.put(handle(1), frame(100), 9.0)
    assert links.turn(99.0) == ([], math.inf, False)


def test_what_was_to_go_to_a_lost_peer_is_lost_and_an_generation_frees_the_link() -> None:
    links = EmulatedLinks(PATHS.get)
    lost, left = handle(1), handle(2)
    for each in (lost, left):
        links.put(each, frame(100), 0.0)
    links.drop(1, lambda: PeerLostError(1, "gone"))
    assert isinstance(lost.error, PeerLostError) and not left.done
    links.clear(lambda: InterruptedWaitError("over"))
    assert isinstance(left.error, InterruptedWaitError)
    links.put(handle(2), frame(100), 0.5)
    links.turn(0.5)
    links.turn(1.5)
    assert [arrival.peer for arrival in links.turn(2.0)[0]] == [2]
    links.put(handle(2), frame(100), 3.0)
    links.turn(4.0)
    links.drop(2, lambda: PeerLostError(2, "gone"))
    assert links.turn(9.0) == ([], math.inf, False)


def test_frames_of_a_transport_arrive_whole_in_order_and_a_send_ends_when_they_have_left(tmp_path: Path) -> None:
    """Two transports: a large frame and a small one behind it, and one where nothing is emulated."""
    world, slow = World("unix", tmp_path), EmulatedPath(0, 0.05, 2e6)
    try:
        here = world.make(0, emulated=EmulatedLinks(lambda peer: slow))
        there = world.make(1, emulated=EmulatedLinks(lambda peer: None))
        link([here, there])
        large = torch.arange(30_000)
        sent = [here.send(1, Tag(1, 1, 0), large), here.send(1, Tag(1, 2, 0), torch.tensor([7]))]
        assert not sent[0].done and there.send(0, Tag(1, 3, 0), torch.tensor([8])).done
        got = [there.recv(0, Tag(1, step, 0)) for step in (1, 2)]
        here.wait(sent, PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        while not all(each.done for each in got) and time.monotonic() < until_s:
            here.poll()
            there.poll()
        assert got[0].result is not None and got[0].result.equal(large)
        assert got[1].result is not None and got[1].result.tolist() == [7]
        assert here.moved_bytes > large.nbytes
        unsent = here.send(1, Tag(1, 4, 0), large)
        here.advance_generation(1, (0, 1))
        assert isinstance(unsent.error, InterruptedWaitError)
        unsent = here.send(1, Tag(1, 4, 0), large)
        here.close()
        assert isinstance(unsent.error, InterruptedWaitError)
    finally:
        world.close()
