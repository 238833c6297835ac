"""Sockets only: a generation that moves while a frame is half-way across. These paths are reached on purpose."""

import pytest
import torch
from tests.conformance.worlds import PATIENCE_S, finish, settle, until

from elaswave.errors import InterruptedWaitError, PeerLostError
from elaswave.transport.interface import HEADER_BYTES, Handle, Tag

TAG = Tag(channel=1, step=1, attempt=0)
BIG = 4 << 20
"""Elements of a frame that no socket buffer holds: 32 MiB."""


def half_sent(a, b, out=None) -> tuple[Handle, Handle]:
    """Send a big frame from worker 0 to worker 1 until it is stuck half-way, begun on both sides."""
    received = b.recv(0, TAG, out)
    sent = a.send(1, TAG, torch.full((BIG,), 666, dtype=torch.int64))
    until(lambda: b.bytes_received.get(0, 0) > 1 << 20, b)
    for _ in range(3):
        b.poll()
    assert not sent.done and not received.done
    return sent, received


def follow_up(a, b, generation):
    """The link still works in the new generation."""
    finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(BIG // 8))], a, b)
    finish([a.recv(1, TAG), b.send(0, TAG, torch.ones(3))], a, b)
    assert a.generation == b.generation == generation


@pytest.mark.parametrize("with_out", [True, False])
def test_a_half_received_buffer_is_never_written_again(socket_world, with_out):
    a, b = socket_world.linked(2)
    out = torch.zeros(BIG, dtype=torch.int64)
    sent, received = half_sent(a, b, out if with_out else None)
    b.advance_generation(1, [0, 1])
    with pytest.raises(InterruptedWaitError, match="generation 1"):
        b.wait(received, PATIENCE_S)
    assert received.result is None
    out.fill_(5)
    finish([sent], a, b)  # the reader drains, so that the send can end
    settle(a, b)
    assert out.unique().tolist() == [5]
    a.advance_generation(1, [0, 1])
    follow_up(a, b, 1)


def test_a_half_received_frame_that_nobody_asked_for_is_dropped(socket_world):
    a, b = socket_world.linked(2)
    sent = a.send(1, TAG, torch.ones(BIG, dtype=torch.int64))
    until(lambda: b.bytes_received.get(0, 0) > 1 << 20, b)
    for transport in (a, b):
        transport.advance_generation(1, [0, 1])
    assert sent.error is not None
    handle = b.recv(0, TAG)
    settle(a, b)
    assert not handle.done
    finish([handle, a.send(1, TAG, torch.ones(1))], a, b)


def test_a_half_sent_frame_is_finished_from_a_private_copy(socket_world):
    a, b = socket_world.linked(2)
    values = torch.arange(BIG)
    out = torch.zeros(BIG, dtype=torch.int64)
    received = b.recv(0, TAG, out)
    sent = a.send(1, TAG, values)
    queued = a.send(1, TAG._replace(a=1), torch.ones(BIG))
    until(lambda: b.bytes_received.get(0, 0) > 1 << 20, b)
    a.advance_generation(1, [0, 1])
    for handle in (sent, queued):
        with pytest.raises(InterruptedWaitError, match="generation 1"):
            a.wait(handle, PATIENCE_S)
    values.fill_(-1)  # the memory is the caller's again
    finish([received], a, b)  # the receiver is still in the old generation and gets the frame that was begun, whole
    assert torch.equal(out, torch.arange(BIG))
    never = b.recv(0, TAG._replace(a=1))
    settle(a, b)
    assert not never.done  # the frame that was not begun is not sent
    b.advance_generation(1, [0, 1])
    follow_up(a, b, 1)


def test_both_sides_edit_while_both_send(socket_world):
    a, b = socket_world.linked(2)
    out_a, out_b = (torch.zeros(BIG, dtype=torch.int64) for _ in range(2))
    a.recv(1, TAG, out_a)
    b.recv(0, TAG, out_b)
    values = torch.full((BIG,), 666, dtype=torch.int64)
    a.send(1, TAG, values)
    b.send(0, TAG, values)
    until(lambda: min(a.bytes_received.get(1, 0), b.bytes_received.get(0, 0)) > 1 << 20, a, b)
    for generation in (1, 2):
        for transport in (a, b):
            transport.advance_generation(generation, [0, 1])
    for out in (values, out_a, out_b):
        out.fill_(5)
    follow_up(a, b, 2)
    settle(a, b)
    assert out_a.unique().tolist() == out_b.unique().tolist() == [5]


def test_a_frame_of_a_newer_generation_that_is_half_received_at_the_edit_counts(socket_world):
    a, b = socket_world.linked(2)
    a.advance_generation(1, [0, 1])
    sent = a.send(1, TAG, torch.arange(BIG))
    until(lambda: b.bytes_received.get(0, 0) > 1 << 20, b)
    b.advance_generation(1, [0, 1])
    out = torch.zeros(BIG, dtype=torch.int64)
    finish([sent, b.recv(0, TAG, out)], a, b)
    assert torch.equal(out, torch.arange(BIG))


def test_a_receive_posted_while_its_frame_is_half_received(socket_world):
    a, b = socket_world.linked(2)
    sent = a.send(1, TAG, torch.arange(BIG))
    until(lambda: b.bytes_received.get(0, 0) > 1 << 20, b)
    out = torch.zeros(BIG, dtype=torch.int64)
    finish([sent, b.recv(0, TAG, out)], a, b)
    assert torch.equal(out, torch.arange(BIG))


@pytest.mark.parametrize("leaver", ["sender", "receiver"])
def test_a_member_that_leaves_with_a_frame_half_way(socket_world, leaver):
    a, b, c = socket_world.linked(3)
    out = torch.zeros(BIG, dtype=torch.int64)
    sent, received = half_sent(a, b, out)
    stayer = b if leaver == "sender" else a
    for transport in (stayer, c):
        transport.advance_generation(1, [stayer.worker, 2])
    handle = received if leaver == "sender" else sent
    with pytest.raises(InterruptedWaitError):
        stayer.wait(handle, PATIENCE_S)
    out.fill_(5)
    until(lambda: not (a if leaver == "sender" else b).peers, a, b, c)
    assert leaver == "receiver" or out.unique().tolist() == [5]
    finish([c.recv(stayer.worker, TAG), stayer.send(2, TAG, torch.ones(2))], stayer, c)


def test_a_peer_that_goes_with_a_frame_half_way_fails_it(socket_world):
    a, b = socket_world.linked(2)
    _, received = half_sent(a, b)
    a.close()
    with pytest.raises(PeerLostError, match="half-way"):
        b.wait(received, PATIENCE_S)


def test_a_receiver_that_goes_with_a_frame_half_way_fails_the_send(socket_world):
    a, b = socket_world.linked(2)
    sent, _ = half_sent(a, b)
    b.close()
    with pytest.raises(PeerLostError, match="worker 1"):
        a.wait(sent, PATIENCE_S)


def test_small_frames_behind_a_stuck_one_keep_their_order(socket_world):
    a, b = socket_world.linked(2)
    sent = [a.send(1, TAG, torch.ones(BIG, dtype=torch.int64))]
    sent += [a.send(1, TAG._replace(a=1), torch.tensor([index])) for index in range(200)]
    assert not sent[-1].done
    received = [b.recv(0, TAG)] + [b.recv(0, TAG._replace(a=1)) for _ in range(200)]
    finish([*sent, *received], a, b)
    assert [handle.result.item() for handle in received[1:]] == list(range(200))
    assert a.bytes_sent[1] == 201 * HEADER_BYTES + 8 * BIG + 200 * 8


def test_an_interrupt_leaves_a_large_transfer_unharmed(socket_world):
    a, b = socket_world.linked(2)
    out = torch.zeros(BIG, dtype=torch.int64)
    received = b.recv(0, TAG, out)
    sent = a.send(1, TAG, torch.arange(BIG))
    b.interrupt("look up")
    with pytest.raises(InterruptedWaitError, match="look up"):
        b.wait(received, PATIENCE_S)
    finish([sent, received], a, b)
    assert torch.equal(out, torch.arange(BIG))
