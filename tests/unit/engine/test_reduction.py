"""REDUCE's balance: what was added and sent, less what has come and was added up, is zero unless something changed."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.placement import ReplicaRole, make_blocks
from elaswave.devices.interface import HOST
from elaswave.devices.loopback import Loopback
from elaswave.engine.reduction import Reduction
from elaswave.hashing import key64
from elaswave.state import sums
from elaswave.state.flat import HeldBlock

SHAPE = make_shape([(40,), (3, 5)])
BLOCKS = make_blocks([SHAPE.size], 32)
OWNERS = (0, 1, 2)
EXPONENTS = [40, 30]
WORKERS = range(3)


def make_crew(*, exact=True, checked=True, width=64, make_device=lambda: HOST):
    """Three workers of one stage, each of which owns a block of its one layer; worker 2 has run nothing."""
    generator = torch.Generator().manual_seed(1)
    crew = []
    for worker in WORKERS:
        reduction = Reduction(worker, BLOCKS, (SHAPE,), exact=exact, checked=checked, width=width, device=make_device())
        reduction.hold([0])
        reduction.begin([EXPONENTS], 4)
        sums = reduction.accumulators[0]
        sums.reset(EXPONENTS)
        for microbatch in range(2) if worker < 2 else ():
            added = sums.add([torch.randn(slot.shape, generator=generator) for slot in SHAPE.tensors])
            assert math.isfinite(float(added)) and added is not False
            sums.coverage += key64(worker, microbatch)
        crew.append(SimpleNamespace(reduction=reduction, sums=sums, slots={}))
    return crew


def owned_by(worker):
    return [block.id for block in BLOCKS if OWNERS[block.id] == worker]


def send(crew):
    """What the links do: each worker's frames land in the owners' slots."""
    for owner in WORKERS:
        for peer in WORKERS:
            if peer != owner:
                slot = crew[owner].reduction.slot(0, peer, owned_by(owner))
                crew[owner].slots[peer] = slot
                for part, sent in zip(slot, crew[peer].reduction.frame(0, owned_by(owner)), strict=True):
                    part.copy_(sent)


def balance_after_reduce(crew):
    """What the vote would come to."""
    for worker, each in enumerate(crew):
        copies = [HeldBlock(BLOCKS[block], ReplicaRole.OWNER, SHAPE, {}) for block in owned_by(worker)]
        each.reduction.reduce(0, copies, [peer for peer in WORKERS if peer != worker])
        assert all(copy.gradient is not None for copy in copies)
    return sum(each.reduction.partial_sums() for each in crew) % 2**64


def in_transit(crew):
    """The blocks whose partial sums differ between the worker that has sent them and their owner."""
    return [block.id for block in BLOCKS if sum(each.reduction.in_transit().get(block.id, 0) for each in crew) % 2**64]


@pytest.mark.parametrize(("exact", "width"), [(True, 64), (True, 48), (False, 64)])
def test_an_undisturbed_reduce_balances(exact, width):
    crew = make_crew(exact=exact, width=width)
    send(crew)
    assert balance_after_reduce(crew) == 0
    assert in_transit(crew) == []
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)
    assert sum(each.sums.checksum for each in crew) != 0 or not exact


@pytest.mark.parametrize(("exact", "width"), [(True, 64), (True, 48), (False, 64)])
def test_on_a_device_a_reduce_balances(exact, width):
    """Also where nothing but the balance is asked for: totals' checksums are on the device until then."""
    crew, on_the_host = (make_crew(exact=exact, width=width, make_device=make) for make in (Loopback, lambda: HOST))
    send(crew)
    send(on_the_host)
    assert balance_after_reduce(crew) == balance_after_reduce(on_the_host) == 0
    assert in_transit(crew) == []
    assert [each.reduction.balance for each in crew] == [each.reduction.balance for each in on_the_host]
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)
    assert [each.sums.checksum for each in crew] == [each.sums.checksum for each in on_the_host]


@pytest.mark.parametrize("seed", range(8))
def test_any_bit_that_flips_in_a_sum_before_it_leaves_shows(seed):
    draw = random.Random(seed)
    crew = make_crew()
    elements = [element for slot in SHAPE.tensors for element in range(slot.offset, slot.stop)]
    words = crew[draw.choice(WORKERS)].sums.sum.numpy().view("uint64")
    words[draw.choice(elements)] ^= 1 << draw.randrange(64)
    send(crew)
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == []  # it came as it was sent
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)


@pytest.mark.parametrize("seed", range(8))
def test_any_bit_that_flips_in_a_sum_of_48_bits_shows(seed):
    draw = random.Random(seed)
    crew = make_crew(width=48)
    elements = [element for slot in SHAPE.tensors for element in range(slot.offset, slot.stop)]
    plane = draw.choice(crew[draw.choice(WORKERS)].sums.planes).numpy()
    bits = plane.view(f"uint{8 * plane.itemsize}")
    bits[draw.choice(elements)] ^= 1 << draw.randrange(8 * plane.itemsize)
    send(crew)
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == []
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)


@pytest.mark.parametrize("plane", [0, 1])
def test_a_bit_of_48_that_flips_on_its_way_shows_and_its_block_is_known(plane):
    crew = make_crew(width=48)
    send(crew)
    crew[2].slots[1][plane][4] ^= 1 << 9
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == [2]
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)


def test_48_bits_take_6_bytes_in_memory_and_on_the_way_and_give_the_same_means():
    found = {}
    for width in (64, 48):
        crew = make_crew(width=width)
        each = crew[0].reduction
        held = sum(plane.nbytes for plane in each.accumulators[0].planes)
        come, gone = each.slot(0, 1, owned_by(0)), each.frame(0, owned_by(1))
        assert [part.dtype for part in come] == [part.dtype for part in gone]
        send(crew)
        copies = [HeldBlock(BLOCKS[block], ReplicaRole.OWNER, SHAPE, {}) for block in owned_by(0)]
        each.reduce(0, copies, [1, 2])
        found[width] = held / SHAPE.size, (sum(part.nbytes for part in gone) - 8) / 32, copies[0].gradient
    assert found[64][:2] == (8, 8)
    assert found[48][:2] == (6, 6)
    assert found[64][2].equal(found[48][2])  # the grids are the same here


def test_a_bit_that_flips_in_padding_costs_nothing():
    crew = make_crew()
    assert SHAPE.tensors[0].stop < SHAPE.tensors[1].offset
    crew[0].sums.sum[SHAPE.tensors[0].stop] ^= 1
    send(crew)
    assert balance_after_reduce(crew) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_a_coverage_that_changes_on_its_way_shows(exact):
    crew = make_crew(exact=exact)
    send(crew)
    crew[1].slots[0][-1].view(torch.int32)[0] ^= 1
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == [1]


def test_a_bit_that_flips_on_its_way_shows_and_its_block_is_known():
    crew = make_crew()
    send(crew)
    crew[2].slots[1][0][4] ^= 1 << 40
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == [2]
    assert all(each.reduction.balance == each.reduction.recount() for each in crew)


def test_sums_that_are_added_up_wrongly_show_and_who_did_it(monkeypatch):
    add_up, calls = sums.add_planes, []

    def wrong(parts):
        calls.append(len(parts))
        return add_up(parts[:2]) if len(calls) == 2 else add_up(parts)  # worker 1 leaves out the last one, worker 2's

    crew = make_crew()
    for each in crew:
        monkeypatch.setattr(each.reduction, "_add_planes", wrong)
    crew[2].sums.add([torch.ones(slot.shape) for slot in SHAPE.tensors])
    send(crew)
    assert balance_after_reduce(crew) != 0
    assert calls == [3, 3, 3]
    assert in_transit(crew) == []
    assert [each.reduction.balance == each.reduction.recount() for each in crew] == [True, False, True]


def test_two_changes_that_cancel_do_not_show():
    """What a plain sum cannot see; `docs/numerics.md` says so."""
    crew = make_crew()
    crew[0].sums.sum[0] += 1 << 40
    crew[1].sums.sum[7] -= 1 << 40
    send(crew)
    assert balance_after_reduce(crew) == 0


def test_without_checks_only_coverage_is_balanced():
    crew = make_crew(checked=False)
    crew[0].sums.sum[0] ^= 1 << 40
    send(crew)
    assert [each.sums.checksum for each in crew] == [0, 0, 0]
    assert balance_after_reduce(crew) == 0
