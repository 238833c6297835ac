"""Collectives over every transport: right results, the same bits everywhere, and an end in every failure."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conformance.worlds import PATIENCE_S, in_threads, until

from elaswave.errors import InterruptedWaitError, PeerLostError, WaitTimeoutError
from elaswave.transport.group import Group, _cut, _doubling, doubling_partners

CHANNEL = 4


def together(transports, function):
    """Run ``function(group)`` on every worker at the same time."""
    workers = [transport.worker for transport in transports]
    groups = [Group(transport, workers, CHANNEL) for transport in transports]
    return in_threads([lambda group=group: function(group) for group in groups])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_all_reduce_adds_and_takes_maxima(world, size):
    transports = world.linked(size)

    def run(group):
        results = []
        for index, count in enumerate((1, 5, 3000, 70_001)):
            total = torch.arange(count) * (group.rank + 1)
            group.all_reduce(total, step=index, timeout_s=PATIENCE_S)
            largest = torch.arange(count, dtype=torch.float32) * (1 if group.rank % 2 else -1) + group.rank
            group.all_reduce(largest, step=index, sub=1, op="max", timeout_s=PATIENCE_S)
            results.append((total, largest))
        return results

    for results in together(transports, run):
        for total, largest in results:
            values = torch.arange(len(total))
            assert torch.equal(total, values * (size * (size + 1) // 2))
            expected = [values.float() * (1 if rank % 2 else -1) + rank for rank in range(size)]
            assert torch.equal(largest, torch.stack(expected).amax(0))


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("count", [100, 50_000])
def test_every_member_has_the_same_bits(world, size, dtype, count):
    transports = world.linked(size)

    def run(group):
        generator = torch.Generator().manual_seed(group.rank)
        values = torch.randn(count, generator=generator, dtype=torch.float64)
        values = (values * 2.0**60).to(dtype) if dtype == torch.int64 else values.to(dtype)  # sums wrap
        group.all_reduce(values, step=1, timeout_s=PATIENCE_S)
        return values

    first, *others = together(transports, run)
    for other in others:
        assert torch.equal(first.view(torch.uint8), other.view(torch.uint8))


def test_a_shaped_tensor_is_reduced_in_place(world):
    def run(group):
        tensor = torch.ones(50, 30, 20)
        group.all_reduce(tensor, step=1, timeout_s=PATIENCE_S)
        return tensor

    for tensor in together(world.linked(3), run):
        assert tensor.shape == (50, 30, 20) and tensor.unique().tolist() == [3.0]


def test_large_all_reduces_follow_each_other_without_mixing(world):
    """Of equal sizes, larger and smaller ones: the memory of the last one serves where it fits."""

    def run(group):
        seen = []
        for step, size in enumerate((40_000, 40_000, 42_000, 42_000, 40_000, 41_000)):
            tensor = torch.full((size,), group.rank + 10 * step)
            group.all_reduce(tensor, step=step, timeout_s=PATIENCE_S)
            seen.append(tensor.unique().tolist())
        return seen

    for seen in together(world.linked(3), run):
        assert seen == [[3 + 30 * step] for step in range(6)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_all_reduce_with_an_operation_of_the_callers(world, size):
    def combine(total, other):  # a sum and a maximum side by side, as in the vote
        total[0] += other[0]
        total[1] = torch.maximum(total[1], other[1])

    def run(group):
        tensor = torch.tensor([group.rank + 1, 100 - group.rank])
        group.all_reduce_with(tensor, combine, step=1, attempt=2, sub=3, timeout_s=PATIENCE_S)
        return tensor.tolist()

    assert together(world.linked(size), run) == [[size * (size + 1) // 2, 100]] * size


def test_all_gather_keeps_everybodys_shape(world):
    def run(group):
        own = torch.full((group.rank + 1, 2), group.rank, dtype=torch.bfloat16)
        gathered = group.all_gather(own, step=1, timeout_s=PATIENCE_S)
        assert gathered[group.rank] is own
        return gathered

    for gathered in together(world.linked(4), run):
        assert [tuple(tensor.shape) for tensor in gathered] == [(rank + 1, 2) for rank in range(4)]
        assert all((tensor == rank).all() for rank, tensor in enumerate(gathered))


def test_all_gather_into_given_memory(world):
    def run(group):
        out = torch.zeros(3, 10)
        rows = list(out.unbind())
        rows[group.rank].fill_(group.rank)
        group.all_gather(rows[group.rank], rows, step=1, timeout_s=PATIENCE_S)
        again = torch.zeros(3, 10)
        group.all_gather(torch.full((10,), float(group.rank)), list(again.unbind()), step=2, timeout_s=PATIENCE_S)
        return out, again

    for out, again in together(world.linked(3), run):
        assert out[:, 0].tolist() == again[:, 0].tolist() == [0, 1, 2]


def test_all_to_all_delivers_each_its_own(world):
    def run(group):
        tensors = [torch.full((10 * group.rank + peer,), 10 * group.rank + peer) for peer in range(group.size)]
        received = group.all_to_all(tensors, step=1, timeout_s=PATIENCE_S)
        return [(len(tensor), tensor.unique().tolist()) for tensor in received]

    for rank, received in enumerate(together(world.linked(4), run)):
        expected = [10 * peer + rank for peer in range(4)]
        assert received == [(value, [value] if value else []) for value in expected]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nobody_leaves_a_barrier_before_all_have_entered(world, size):
    entered: set[int] = set()
    seen = []

    def run(group):
        for step in range(5):
            entered.add((step, group.rank))
            group.barrier(step=step, timeout_s=PATIENCE_S)
            seen.append(all((step, rank) in entered for rank in range(size)))

    together(world.linked(size), run)
    assert all(seen) and len(seen) == 5 * size


def test_groups_overlap_and_are_edited_without_network(world):
    transports = world.linked(4)
    before = [dict(transport.bytes_sent) for transport in transports]
    groups = {
        members: {worker: Group(transports[worker], members, channel) for worker in members}
        for channel, members in enumerate([(0, 1), (2, 3), (0, 2), (3, 1), (3, 2, 1)])
    }
    assert [dict(transport.bytes_sent) for transport in transports] == before

    def run(worker):
        results = []
        for members, by_worker in groups.items():
            if worker in members:
                tensor = torch.tensor([1 << worker])
                by_worker[worker].all_reduce(tensor, step=1, timeout_s=PATIENCE_S)
                results.append((members, tensor.item()))
        return results

    for results in in_threads([lambda worker=worker: run(worker) for worker in range(4)]):
        for members, value in results:
            assert value == sum(1 << member for member in members)


def test_a_collective_ends_when_a_member_is_lost(world):
    transports = world.linked(3)
    tensors = [torch.ones(100_000) for _ in range(2)]

    def run(index):
        group = Group(transports[index], [0, 1, 2], CHANNEL)
        with pytest.raises(PeerLostError, match="worker 2"):
            group.all_reduce(tensors[index], step=1, timeout_s=PATIENCE_S)

    timer = threading.Timer(0.05, transports[2].close)
    timer.start()
    in_threads([lambda: run(0), lambda: run(1)])
    timer.join()


def test_a_collective_can_be_interrupted_and_done_again_in_the_next_epoch(world):
    transports = world.linked(3)
    tensors = [torch.ones(100_000) for _ in range(2)]
    groups = [Group(transports[index], [0, 1, 2], CHANNEL) for index in range(2)]

    def interrupted(index):
        with pytest.raises(InterruptedWaitError, match="worker 2 hangs"):
            groups[index].all_reduce(tensors[index], step=1, timeout_s=PATIENCE_S)

    timers = [threading.Timer(0.05, transports[index].interrupt, ["worker 2 hangs"]) for index in range(2)]
    for timer in timers:
        timer.start()
    in_threads([lambda: interrupted(0), lambda: interrupted(1)])
    for timer in timers:
        timer.join()

    def again(index):
        transports[index].advance_epoch(1, [0, 1])
        tensors[index].fill_(float(index + 1))
        Group(transports[index], [0, 1], CHANNEL).all_reduce(tensors[index], step=1, timeout_s=PATIENCE_S)
        return tensors[index].unique().tolist()

    assert in_threads([lambda: again(0), lambda: again(1)]) == [[3.0], [3.0]]
    until(lambda: not transports[2].peers, transports[2])


def test_a_collective_is_bounded_in_time(world):
    transports = world.linked(2)
    with pytest.raises(WaitTimeoutError, match="worker 1"):
        Group(transports[0], [0, 1], CHANNEL).barrier(step=1, timeout_s=0.01)


def test_what_makes_no_sense_is_a_value_error(world):
    a, _ = world.linked(2)
    for members in ([1], [0, 0, 1]):
        with pytest.raises(ValueError, match="every member once"):
            Group(a, members, CHANNEL)
    group = Group(a, [0, 1], CHANNEL)
    with pytest.raises(ValueError, match="all_reduce_with"):
        group.all_reduce(torch.ones(1), step=1, op="mean", timeout_s=1)
    with pytest.raises(ValueError, match="contiguous"):
        group.all_reduce(torch.ones(200, 200).t(), step=1, timeout_s=1)
    with pytest.raises(ValueError, match="one for each"):
        group.all_to_all([torch.ones(1)], step=1, timeout_s=1)
    with pytest.raises(ValueError, match="one for each"):
        group.all_gather(torch.ones(1), [torch.ones(1)], step=1, timeout_s=1)


@given(size=st.integers(1, 70))
def test_recursive_doubling_brings_every_value_to_every_member_once(size):
    roles = [_doubling(size, rank) for rank in range(size)]
    held = [{rank: 1} for rank in range(size)]
    for rank, (helper, _, _) in enumerate(roles):
        if helper is not None:
            assert roles[helper][1] == rank
            held[helper] = {**held[helper], **held[rank]}
    num_turns = {len(partners) for helper, _, partners in roles if helper is None}
    assert len(num_turns) == 1
    for turn in range(num_turns.pop()):
        after = list(held)
        for rank, (helper, _, partners) in enumerate(roles):
            if helper is None:
                partner = partners[turn]
                assert roles[partner][2][turn] == rank
                assert not held[rank].keys() & held[partner].keys()
                after[rank] = {**held[rank], **held[partner]}
        held = after
    for rank, (helper, _, _) in enumerate(roles):
        assert held[rank if helper is None else helper].keys() == set(range(size))
    workers = [3 * rank + 1 for rank in range(size)]
    for worker in workers:
        for partner in doubling_partners(workers, worker):
            assert worker in doubling_partners(workers, partner)


@given(num_elements=st.integers(0, 10_000), num_slices=st.integers(1, 40))
def test_slices_cover_everything_once_and_start_aligned(num_elements, num_slices):
    slices = _cut(num_elements, num_slices)
    assert len(slices) == num_slices
    assert [start for start, _ in slices] == [0] + [stop for _, stop in slices[:-1]]
    assert slices[-1][1] == num_elements
    assert all(start % 64 == 0 for start, _ in slices)
