"""Every transport: waits can be interrupted, peers come and go singly, and an older generation cannot affect
anything."""

import threading
import time

import pytest
import torch
from tests.conformance.worlds import PATIENCE_S, finish, in_threads, link, settle, until

from elaswave.errors import CommError, InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.transport.interface import Tag

TAG = Tag(channel=1, step=1, attempt=0)


def outcome(handle):
    """How a handle has ended, for comparisons."""
    return type(handle.error).__name__ if handle.error else "done" if handle.done else "pending"


def test_a_wait_on_a_live_silent_peer_can_be_interrupted(world):
    a, b = world.linked(2)
    handle = b.recv(0, TAG)
    timer = threading.Timer(0.05, b.interrupt, ["a new generation"])
    timer.start()
    with pytest.raises(InterruptedWaitError, match="a new generation"):
        b.wait(handle, PATIENCE_S)
    timer.join()
    assert not handle.done and b.peers == {0}  # nothing is lost by it
    finish([handle, a.send(1, TAG, torch.ones(1))], a, b)


def test_an_interrupt_before_the_wait_is_not_lost_and_is_used_up_once(world):
    a, b = world.linked(2)
    b.interrupt("first")
    b.interrupt("second")
    handle = b.recv(0, TAG)
    with pytest.raises(InterruptedWaitError, match="second"):
        b.wait(handle, PATIENCE_S)
    finish([handle, a.send(1, TAG, torch.ones(1))], a, b)
    b.wait(handle, PATIENCE_S)


def test_an_interrupt_for_an_generation_that_has_begun_is_void(world):
    a, b = world.linked(2)
    b.interrupt("to generation 1", generation=1)
    for transport in (a, b):
        transport.advance_generation(1, [0, 1])
    handle = b.recv(0, TAG)
    with pytest.raises(WaitTimeoutError):
        b.wait(handle, 0.01)
    b.interrupt("to generation 2", generation=2)
    b.interrupt("to generation 1, late", generation=1)
    with pytest.raises(InterruptedWaitError, match="to generation 2"):
        b.wait(handle, PATIENCE_S)


def test_a_rest_moves_bytes_until_its_time(world):
    a, b = world.linked(2)
    handle = b.recv(0, TAG)
    a.wait(a.send(1, TAG, torch.ones(1)), PATIENCE_S)
    begin_s = time.monotonic()
    b.rest(begin_s + 0.02)
    assert time.monotonic() >= begin_s + 0.02 and outcome(handle) == "done"
    b.rest(begin_s)  # which is over already


def test_a_rest_can_be_interrupted(world):
    a, _ = world.linked(2)
    timer = threading.Timer(0.05, a.interrupt, ["a new generation"])
    timer.start()
    with pytest.raises(InterruptedWaitError, match="a new generation"):
        a.rest(time.monotonic() + PATIENCE_S)
    timer.join()


def test_connecting_can_be_interrupted(world):
    a = world.make(0)
    silent = world.make(1)  # listens, but never serves its acceptor
    timer = threading.Timer(0.05, a.interrupt, ["the job ends"])
    timer.start()
    with pytest.raises(InterruptedWaitError, match="the job ends"):
        a.connect({2: silent.address.replace("memory:1", "memory:2")}, PATIENCE_S)
    timer.join()


def test_connecting_to_nobody_ends_in_time_and_names_them(world):
    a, b = world.make(0), world.make(1)
    absent = {"unix": f"unix:{world.folder}/nobody.sock", "tcp": "tcp:127.0.0.1:1", "memory": "memory:9"}[
        "tcp" if world.kind == "tls" else world.kind
    ]
    with pytest.raises(WaitTimeoutError, match=r"worker[s]? \[?9"):
        a.connect({0: a.address, 9: absent}, 0.05)
    link([a, b])  # and it did no harm


def test_links_are_made_once(world):
    a, b, c = world.linked(3)
    handle = b.recv(0, TAG)
    link([a, b, c])
    finish([handle, a.send(1, TAG, torch.ones(1))], a, b)


def test_a_lost_peer_fails_only_what_needs_it(world):
    a, b, c = world.linked(3)
    needs_a, needs_b = c.recv(0, TAG), c.recv(1, TAG)
    a.close()
    for handles in ([needs_b, needs_a], [needs_a, needs_b]):
        with pytest.raises(PeerLostError, match="worker 0") as caught:
            c.wait(handles, PATIENCE_S)  # at once, though the other goes on
        assert caught.value.worker == 0
    assert outcome(needs_b) == "pending" and c.peers == {1}
    with pytest.raises(PeerLostError):
        c.wait(c.recv(0, TAG), PATIENCE_S)
    with pytest.raises(PeerLostError):
        c.wait(c.send(0, TAG, torch.ones(1)), PATIENCE_S)
    finish([needs_b, b.send(2, TAG, torch.ones(1))], b, c)


def test_a_blocked_wait_wakes_when_its_peer_goes(world):
    a, b = world.linked(2)
    handle = b.recv(0, TAG)
    timer = threading.Timer(0.05, a.close)
    timer.start()
    with pytest.raises(PeerLostError, match="worker 0"):
        b.wait(handle, PATIENCE_S)
    timer.join()


def test_what_a_peer_sent_before_it_went_can_still_be_received(world):
    a, b = world.linked(2)
    posted = b.recv(0, TAG)
    finish([a.send(1, TAG._replace(b=index), torch.tensor([index])) for index in range(3)], a)
    a.close()
    until(lambda: not b.peers, b)
    late = [b.recv(0, TAG._replace(b=index)) for index in (1, 2)]
    b.wait([posted, *late], PATIENCE_S)
    assert [handle.result.item() for handle in (posted, *late)] == [0, 1, 2]
    with pytest.raises(PeerLostError):
        b.wait(b.recv(0, TAG), PATIENCE_S)


def test_a_lost_link_over_which_something_was_sent_fails_the_next_wait_that_would_block(world):
    a, b, c = world.linked(3)
    finish([c.send(0, TAG, torch.ones(1))], c)
    a.close()
    until(lambda: c.peers == {1}, c)
    from_b = c.recv(1, TAG)
    finish([b.send(2, TAG, torch.ones(1)), from_b], b, c)
    c.wait(from_b, PATIENCE_S)  # it is here: what can still be finished is finished
    for _ in range(2):
        with pytest.raises(PeerLostError, match="worker 0"):
            c.wait(c.recv(1, TAG), PATIENCE_S)
    c.advance_generation(1, (1, 2))
    b.advance_generation(1, (1, 2))
    finish([b.send(2, TAG, torch.ones(1)), again := c.recv(1, TAG)], b, c)
    c.wait(again, PATIENCE_S)


def test_a_link_that_is_made_again_does_not_hide_that_frames_were_lost_with_the_one_before(world):
    a, b, c = world.linked(3)
    finish([c.send(0, TAG, torch.ones(1))], c)
    a.advance_generation(1, (0, 1))  # it closes its end of the link
    until(lambda: c.peers == {1}, c)
    link([a, c])
    assert c.peers == {0, 1}
    with pytest.raises(PeerLostError, match="worker 0"):
        c.wait(c.recv(1, TAG), PATIENCE_S)


def test_a_blocked_wait_wakes_when_a_link_goes_over_which_something_was_sent(world):
    a, b, c = world.linked(3)
    finish([c.send(0, TAG, torch.ones(1))], c)
    timer = threading.Timer(0.05, a.close)
    timer.start()
    with pytest.raises(PeerLostError, match="worker 0"):
        c.wait(c.recv(1, TAG), PATIENCE_S)
    timer.join()


def test_a_frame_that_could_not_be_sent_fails_the_next_wait_that_would_block(world):
    a, b, c = world.linked(3)
    a.close()
    until(lambda: c.peers == {1}, c)
    assert outcome(c.send(0, TAG, torch.ones(1))) == "PeerLostError"
    with pytest.raises(PeerLostError, match="worker 0"):
        c.wait(c.recv(1, TAG), PATIENCE_S)


def test_a_blocked_wait_looks_at_all_its_handles_when_a_peer_goes(world):
    a, b, c = world.linked(3)
    handles = [c.recv(0, TAG), c.recv(1, TAG)]
    timer = threading.Timer(0.05, a.close)
    timer.start()
    with pytest.raises(PeerLostError, match="worker 0"):
        c.wait(handles, PATIENCE_S)
    timer.join()


def test_what_a_peer_sent_is_kept_even_if_its_end_is_met_by_a_send(world):
    if world.kind in ("tcp", "tls"):
        pytest.skip("TCP itself forgets what has come when a send meets the end of a connection")
    a, b = world.linked(2)
    finish([a.send(1, TAG._replace(b=index), torch.full((1000,), index)) for index in range(300)], a)
    a.close()
    sent = b.send(0, TAG, torch.ones(1))
    late = [b.recv(0, TAG._replace(b=index)) for index in range(300)]
    b.wait(late, PATIENCE_S)
    assert [handle.result[0].item() for handle in late] == list(range(300))
    until(lambda: not b.peers, b)
    assert sent.done


def test_an_generation_fails_what_is_pending_and_gives_its_memory_back(world):
    a, b = world.linked(2)
    out = torch.zeros(4)
    handles = [b.recv(0, TAG, out), b.recv(0, TAG._replace(a=1)), b.recv(1, TAG)]
    b.advance_generation(1, [0, 1])
    for handle in handles:
        with pytest.raises(InterruptedWaitError, match="generation 1 has begun"):
            b.wait(handle, PATIENCE_S)
    a.send(1, TAG, torch.ones(4))  # of generation 0, to the tag that waited
    settle(a, b)
    assert not out.any()


def test_late_frames_of_an_older_generation_are_dropped(world):
    a, b = world.linked(2)
    for size in (4, 1 << 20):
        a.send(1, TAG, torch.ones(size))
    b.advance_generation(1, [0, 1])
    out = torch.zeros(4)
    handle = b.recv(0, TAG, out)
    settle(a, b)
    a.send(1, TAG, torch.ones(4))
    settle(a, b)
    assert outcome(handle) == "pending" and not out.any()
    a.advance_generation(1, [0, 1])
    finish([handle, a.send(1, TAG, torch.full((4,), 2.0))], a, b)
    assert out.tolist() == [2.0] * 4


def test_frames_that_had_arrived_are_forgotten_with_their_generation(world):
    a, b = world.linked(2)
    finish([a.send(1, TAG, torch.ones(1))], a)
    settle(a, b)
    for transport in (a, b):
        transport.advance_generation(1, [0, 1])
    handle = b.recv(0, TAG)
    settle(a, b)
    assert outcome(handle) == "pending"


def test_frames_of_newer_generations_are_kept_until_their_time(world):
    a, b = world.linked(2)
    posted = b.recv(0, TAG)
    for generation in (1, 2, 5):
        a.advance_generation(generation, [0, 1])
        finish([a.send(1, TAG, torch.tensor([generation]))], a)
    settle(a, b)
    assert outcome(posted) == "pending"
    b.advance_generation(2, [0, 1])
    handle = b.recv(0, TAG)
    finish([handle], a, b)
    assert handle.result.item() == 2
    assert outcome(b.recv(0, TAG)) == "pending"  # that of generation 1 is gone
    b.advance_generation(5, [0, 1])
    handle = b.recv(0, TAG)
    finish([handle], a, b)
    assert handle.result.item() == 5


def test_frames_of_newer_generations_are_bounded(world):
    a, b = world.linked(2, max_unexpected_bytes=1000)
    a.advance_generation(1, [0, 1])
    a.send(1, TAG, torch.zeros(600, dtype=torch.uint8))
    settle(a, b)
    assert b.peers == {0}
    a.send(1, TAG, torch.zeros(600, dtype=torch.uint8))
    until(lambda: not b.peers, a, b)


def test_late_frames_cost_no_memory(world):
    a, b = world.linked(2, max_unexpected_bytes=1000)
    b.advance_generation(1, [0, 1])
    for _ in range(5):
        a.send(1, TAG, torch.zeros(900, dtype=torch.uint8))
    settle(a, b)
    assert b.peers == {0}


def test_frames_of_generations_that_were_passed_over_cost_no_memory(world):
    a, b = world.linked(2, max_unexpected_bytes=1000)
    for generation in (1, 3, 5):
        a.advance_generation(generation, [0, 1])
        finish([a.send(1, TAG, torch.zeros(900, dtype=torch.uint8))], a)
        settle(a, b)
        assert b.peers == {0}
        b.advance_generation(generation + 1, [0, 1])
    for transport in (a, b):
        transport.advance_generation(7, [0, 1])
    finish([a.send(1, TAG, torch.zeros(1000, dtype=torch.uint8)), b.recv(0, TAG)], a, b)


def test_an_generation_makes_room_for_new_unexpected_bytes(world):
    a, b = world.linked(2, max_unexpected_bytes=1000)
    for generation in range(1, 5):
        a.send(1, TAG, torch.zeros(900, dtype=torch.uint8))
        settle(a, b)
        for transport in (a, b):
            transport.advance_generation(generation, [0, 1])
    a.send(1, TAG, torch.zeros(900, dtype=torch.uint8))
    finish([b.recv(0, TAG)], a, b)


def test_generations_only_grow(world):
    a, _ = world.linked(2, generation=3)
    for generation in (2, 3):
        with pytest.raises(ValueError, match="generations only grow"):
            a.advance_generation(generation, [0, 1])
    a.advance_generation(4, [0, 1])
    assert a.generation == 4


def test_links_to_workers_that_have_left_are_closed_and_the_others_stay(world):
    a, b, c = world.linked(3)
    gone = [c.recv(0, TAG), c.recv(1, TAG)]
    for transport in (b, c):
        transport.advance_generation(1, [1, 2])
    assert c.peers == {1} and [outcome(handle) for handle in gone] == ["InterruptedWaitError"] * 2
    with pytest.raises(PeerLostError, match="without worker 0"):
        c.wait(c.recv(0, TAG), PATIENCE_S)
    finish([c.recv(1, TAG), b.send(2, TAG, torch.ones(1))], b, c)
    until(lambda: not a.peers, a)


def test_a_stopped_worker_that_wakes_up_cannot_affect_anything(world):
    a, b, c = world.linked(3)
    a.send(2, TAG, torch.full((4,), 666.0))  # under way when it stops
    for transport in (b, c):
        transport.advance_generation(1, [0, 1, 2])  # an edit that keeps it
    out = torch.zeros(4)
    handle = c.recv(0, TAG, out)
    a.send(2, TAG, torch.full((4,), 666.0))
    settle(a, b, c)
    for transport in (b, c):
        transport.advance_generation(2, [1, 2])  # and one that does not
    assert outcome(handle) == "InterruptedWaitError"
    handle = c.recv(1, TAG, out)
    sent = [a.send(peer, TAG, torch.full((4,), 666.0)) for peer in (1, 2)]
    until(lambda: not a.peers, a, b, c)
    settle(a, b, c)
    assert not out.any() and outcome(handle) == "pending"
    addresses = {1: b.address, 2: c.address}
    with pytest.raises(CommError):  # it may not come back: its id has left
        in_threads([lambda: a.connect(addresses, 0.3), lambda: serve(b, 0.4), lambda: serve(c, 0.4)])
    assert b.peers == {2} and c.peers == {1}
    assert all(handle.done for handle in sent)


def serve(transport, seconds):
    """Keep a transport busy waiting for nothing."""
    with pytest.raises(WaitTimeoutError):
        transport.wait(transport.recv(transport.worker, Tag(9, 9, 9)), seconds)


def test_a_newcomer_is_linked_while_the_others_go_on(world):
    a, b = world.linked(2)
    handle = b.recv(0, TAG)
    c = world.make(2)
    addresses = {0: a.address, 1: b.address, 2: c.address}
    in_threads(
        [lambda: c.connect(addresses, PATIENCE_S), *(lambda t=t: t.connect({2: c.address}, PATIENCE_S) for t in (a, b))]
    )
    finish([handle, a.send(1, TAG, torch.ones(1))], a, b)
    for transport in (a, b, c):
        transport.advance_generation(1, [0, 1, 2])
    finish([c.recv(0, TAG), a.send(2, TAG, torch.ones(1))], a, c)


def test_a_newcomer_whose_link_an_edit_closed_may_come_again(world):
    a, b = world.linked(2)
    for transport in (a, b):
        transport.advance_generation(1, [0, 1])
    c = world.make(2, generation=1)
    link([a, b, c])
    for transport in (a, b):
        transport.advance_generation(2, [0, 1])  # the edit does not know the newcomer yet
    until(lambda: not c.peers, c)
    c.advance_generation(2, [0, 1, 2])
    link([a, b, c])
    finish([c.recv(0, TAG), a.send(2, TAG, torch.ones(1))], a, c)
