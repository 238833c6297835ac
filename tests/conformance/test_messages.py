"""Every transport: messages arrive whole, in order, where they belong, and what does not fit is refused."""

import pytest
import torch
from tests.conformance.worlds import PATIENCE_S, World, finish, settle, until
from tests.memory_transport import MemoryNetwork

from elaswave.errors import FrameError, InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.transport.interface import HEADER_BYTES, Tag

TAG = Tag(channel=7, step=3, attempt=1, a=2, b=5)

TENSORS = [
    torch.arange(12, dtype=torch.float32).view(3, 4),
    torch.arange(5, dtype=torch.float64),
    torch.tensor(7, dtype=torch.int64),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
    torch.tensor([1 + 2j], dtype=torch.complex128),
    torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    torch.tensor([1, 2], dtype=torch.uint16),
    torch.empty((0, 3), dtype=torch.int32),
    torch.zeros((1, 1, 1, 1, 1, 1, 2), dtype=torch.int8),
    torch.arange(1 << 20, dtype=torch.int64),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
@pytest.mark.parametrize("posted_first", [True, False])
def test_a_tensor_arrives_with_its_dtype_and_shape_in_aligned_memory(world, tensor, posted_first):
    a, b = world.linked(2)
    if posted_first:
        received = b.recv(0, TAG)
        sent = a.send(1, TAG, tensor)
    else:
        sent = a.send(1, TAG, tensor)
        settle(a, b)
        received = b.recv(0, TAG)
    finish([sent, received], a, b)
    result = received.result
    assert result.dtype == tensor.dtype and result.shape == tensor.shape
    assert torch.equal(result.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert result.numel() == 0 or result.data_ptr() % 64 == 0


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("unit", [1, 1000, 100_000])
def test_runs_are_gathered_and_scattered_however_either_side_is_cut(world, posted_first, unit):
    a, b = world.linked(2)
    values = torch.arange(10 * unit, dtype=torch.float32)
    pieces = [values[: 3 * unit], values[3 * unit : 3 * unit], values[3 * unit :]]
    outs = [torch.zeros(unit), torch.zeros(8 * unit), torch.zeros(unit)]
    if posted_first:
        received = b.recv(0, TAG, outs)
        sent = a.send(1, TAG, pieces)
    else:
        sent = a.send(1, TAG, pieces)
        settle(a, b)
        received = b.recv(0, TAG, outs)
    finish([sent, received], a, b)
    assert torch.equal(torch.cat(outs), values)
    assert received.result is None


def test_more_pieces_than_one_system_call_takes(world):
    a, b = world.linked(2)
    pieces = list(torch.arange(3000, dtype=torch.int32).view(3000, 1).unbind())
    outs = list(torch.zeros(3000, 300, dtype=torch.int32)[:, :1].contiguous().unbind())
    finish([b.recv(0, TAG, outs), a.send(1, TAG, pieces)], a, b)
    assert torch.cat(outs).tolist() == list(range(3000))


def test_a_run_without_a_place_arrives_flat(world):
    a, b = world.linked(2)
    same, mixed = b.recv(0, TAG), b.recv(0, TAG._replace(b=6))
    sent = [
        a.send(1, TAG, [torch.ones(2, 2), torch.zeros(1)]),
        a.send(1, TAG._replace(b=6), [torch.ones(1), torch.ones(1, dtype=torch.int64)]),
    ]
    finish([same, mixed, *sent], a, b)
    assert same.result.tolist() == [1, 1, 1, 1, 0]
    assert mixed.result.dtype == torch.uint8 and mixed.result.shape == (12,)


def test_received_into_the_given_memory(world):
    a, b = world.linked(2)
    out = torch.zeros(2, 3)
    handle = b.recv(0, TAG, out)
    finish([handle, a.send(1, TAG, torch.ones(2, 3))], a, b)
    assert handle.result is out and out.sum() == 6


def test_bytes_can_be_received_whatever_the_dtype(world):
    a, b = world.linked(2)
    out = torch.zeros(8, dtype=torch.uint8)
    finish([b.recv(0, TAG, out), a.send(1, TAG, torch.tensor([258]))], a, b)
    assert out.tolist() == [2, 1, 0, 0, 0, 0, 0, 0]


def test_a_gradient_tensor_can_be_sent_and_a_leaf_filled(world):
    a, b = world.linked(2)
    leaf = torch.zeros(3, requires_grad=True)
    finish([b.recv(0, TAG, leaf), a.send(1, TAG, torch.ones(3, requires_grad=True))], a, b)
    assert leaf.tolist() == [1, 1, 1]


def test_equal_tags_arrive_in_the_order_of_sending(world):
    a, b = world.linked(2)
    early = [b.recv(0, TAG) for _ in range(2)]
    sent = [a.send(1, TAG, torch.tensor([index])) for index in range(5)]
    settle(a, b)
    late = [b.recv(0, TAG) for _ in range(3)]
    finish([*early, *sent, *late], a, b)
    assert [handle.result.item() for handle in [*early, *late]] == [0, 1, 2, 3, 4]


def test_other_tags_are_not_confused(world):
    a, b = world.linked(2)
    tags = [TAG, TAG._replace(channel=8), TAG._replace(step=4), TAG._replace(attempt=2), TAG._replace(a=9)]
    sent = [a.send(1, tag, torch.tensor([index])) for index, tag in enumerate(tags)]
    received = [b.recv(0, tag) for tag in reversed(tags)]
    finish([*sent, *received], a, b)
    assert [handle.result.item() for handle in received] == [4, 3, 2, 1, 0]


def test_a_worker_can_send_to_itself(world):
    (a,) = world.linked(1)
    first = a.recv(0, TAG)
    a.wait([a.send(0, TAG, torch.tensor([1])), a.send(0, TAG, torch.tensor([2]))], PATIENCE_S)
    out = torch.zeros(1, dtype=torch.int64)
    a.wait([first, a.recv(0, TAG, out)], PATIENCE_S)
    assert (first.result.item(), out.item()) == (1, 2)


def test_all_send_large_frames_before_anybody_receives(world):
    transports = world.linked(3)
    big = 1 << 21
    sent = [
        transport.send(peer, TAG, torch.full((big,), transport.worker, dtype=torch.int64))
        for transport in transports
        for peer in range(3)
        if peer != transport.worker
    ]
    until(lambda: all(handle.done for handle in sent), *transports)
    for transport in transports:
        for peer in range(3):
            if peer != transport.worker:
                handle = transport.recv(peer, TAG)
                transport.wait(handle, PATIENCE_S)
                assert handle.result.unique().tolist() == [peer]


@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize(
    ("out", "seen"),
    [
        (torch.zeros(3), "16 bytes"),
        (torch.zeros(4, dtype=torch.int32), "dtype"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_and_the_link_goes_on(world, posted_first, out, seen):
    a, b = world.linked(2)
    if posted_first:
        handle = b.recv(0, TAG, out)
        a.send(1, TAG, torch.ones(4))
    else:
        a.send(1, TAG, torch.ones(4))
        settle(a, b)
        handle = b.recv(0, TAG, out)
    until(lambda: handle.done, a, b)
    with pytest.raises(FrameError, match=seen):
        b.wait(handle, PATIENCE_S)
    assert not out.any()
    finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(4))], a, b)


def test_a_misfit_to_oneself_is_refused(world):
    (a,) = world.linked(1)
    handle = a.recv(0, TAG, torch.zeros(3))
    a.send(0, TAG, torch.ones(4))
    with pytest.raises(FrameError, match="room for 12"):
        a.wait(handle, PATIENCE_S)


def test_too_many_unexpected_bytes_to_oneself_fail_the_send(world):
    (a,) = world.linked(1, max_unexpected_bytes=1000)
    a.wait(a.send(0, TAG, torch.zeros(900, dtype=torch.uint8)), PATIENCE_S)
    with pytest.raises(FrameError, match="max_unexpected_bytes"):
        a.wait(a.send(0, TAG, torch.zeros(900, dtype=torch.uint8)), PATIENCE_S)
    a.wait(a.recv(0, TAG), PATIENCE_S)


@pytest.mark.parametrize(
    ("tag", "tensor", "seen"),
    [
        (TAG, torch.zeros(4, 4).t(), "contiguous"),
        (TAG, torch.zeros(4, 4)[:, 1], "contiguous"),
        (TAG, torch.zeros(2, device="meta"), "CPU"),
        (TAG, torch.zeros(1, 1, 1, 1, 1, 1, 1, 1), "8 dimensions"),
        (TAG, torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu), "float8_e8m0fnu"),
        (TAG, [torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu)], "float8_e8m0fnu"),
        (TAG._replace(channel=1 << 16), torch.zeros(1), "does not fit"),
        (TAG._replace(step=-1), torch.zeros(1), "does not fit"),
        (TAG, torch.zeros(1025, dtype=torch.uint8), "at most 1024"),
    ],
)
def test_what_cannot_be_sent_is_a_value_error(world, tag, tensor, seen):
    a, _ = world.linked(2, max_frame_bytes=1024)
    with pytest.raises(ValueError, match=seen):
        a.send(1, tag, tensor)


def test_what_cannot_be_received_into_is_a_value_error(world):
    a, _ = world.linked(2)
    with pytest.raises(ValueError, match="contiguous"):
        a.recv(1, TAG, torch.zeros(4, 4).t())


def test_a_wait_that_runs_out_names_what_is_missing_and_can_be_repeated(world):
    a, b = world.linked(2)
    handles = [b.recv(0, TAG._replace(b=index)) for index in range(6)]
    with pytest.raises(WaitTimeoutError, match=r"recv \(7, 3, 1, 2, 0\) worker 0.* and 2 more"):
        b.wait(handles, 0.01)
    assert "pending" in repr(handles[0])
    sent = [a.send(1, TAG._replace(b=index), torch.ones(1)) for index in range(6)]
    finish([*sent, *handles], a, b)
    b.wait(handles, 0)
    assert "done" in repr(handles[0])


def test_a_wait_without_time_still_takes_what_is_there(world):
    a, b = world.linked(2)
    handle = b.recv(0, TAG)
    finish([a.send(1, TAG, torch.ones(1))], a)
    deadline_turns = 1000
    while deadline_turns and not handle.done:  # the bytes may need a moment to cross the system
        deadline_turns -= 1
        try:
            b.wait(handle, 0)
        except WaitTimeoutError:
            continue
    assert handle.done


def test_unexpected_bytes_are_bounded_and_only_their_sender_suffers(world):
    a, b, c = world.linked(3, max_unexpected_bytes=1000)
    a.send(2, TAG, torch.zeros(600, dtype=torch.uint8))
    b.send(2, TAG, torch.zeros(600, dtype=torch.uint8))
    settle(a, b, c)
    assert c.peers == {0, 1}
    a.send(2, TAG, torch.zeros(401, dtype=torch.uint8))
    until(lambda: c.peers == {1}, a, b, c)
    first = c.recv(0, TAG)
    c.wait(first, PATIENCE_S)  # it had arrived
    assert first.result.shape == (600,)
    with pytest.raises(PeerLostError, match="worker 0: it sent what cannot be right.*max_unexpected_bytes"):
        c.wait(c.recv(0, TAG), PATIENCE_S)
    finish([c.recv(1, TAG)], b, c)


def test_expected_bytes_do_not_count_against_the_bound(world):
    a, b = world.linked(2, max_unexpected_bytes=1000)
    for _ in range(3):
        finish([b.recv(0, TAG), a.send(1, TAG, torch.zeros(5000, dtype=torch.uint8))], a, b)
        a.send(1, TAG, torch.zeros(900, dtype=torch.uint8))
        settle(a, b)
        finish([b.recv(0, TAG)], b)


def test_a_worker_that_was_never_linked_is_lost(world):
    a = world.make(0)
    for handle in (a.send(5, TAG, torch.ones(1)), a.recv(5, TAG)):
        with pytest.raises(PeerLostError, match="never linked"):
            a.wait(handle, PATIENCE_S)


def test_bytes_are_counted_by_peer_and_survive_the_link(world):
    a, b, c = world.linked(3)
    finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(10))], a, b)
    assert dict(a.bytes_sent).get(1) == dict(b.bytes_received).get(0) == HEADER_BYTES + 40
    assert dict(a.bytes_sent).get(2, 0) == 0
    b.close()
    until(lambda: a.peers == {2}, a, c)
    assert dict(a.bytes_sent).get(1) == HEADER_BYTES + 40


def test_after_close_everything_fails_and_nothing_hangs(world):
    a, b = world.linked(2)
    pending = [a.recv(1, TAG), a.recv(0, TAG)]
    a.close()
    a.close()
    for handle in [*pending, a.recv(1, TAG), a.recv(0, TAG), a.send(1, TAG, torch.ones(1)), a.send(0, TAG, TENSORS[0])]:
        with pytest.raises(InterruptedWaitError, match="closed"):
            a.wait(handle, PATIENCE_S)
    a.interrupt("nobody hears this")
    with pytest.raises(InterruptedWaitError, match="closed"):
        a.poll()
    until(lambda: not b.peers, b)


def test_a_world_of_one_kind_is_what_it_says(world: World):
    a, b = world.linked(2)
    kind = "tcp" if world.kind == "tls" else world.kind
    assert a.address.startswith(f"{kind}:") and a.address != b.address
    assert (a.worker, a.generation, a.peers) == (0, 0, frozenset({1}))


def test_a_worker_has_one_transport_in_a_memory_network():
    network = MemoryNetwork()
    network.transport(0).close()
    with pytest.raises(ValueError, match="never used again"):
        network.transport(0)
