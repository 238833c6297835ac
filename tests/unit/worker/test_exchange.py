"""REDUCE's balance: what was added and sent, less what has come and was added up, is zero unless something changed."""

import random
from types import SimpleNamespace

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.hashing import key64
from elaswave.planning.layout import make_layout
from elaswave.state.placement import Placement, make_blocks
from elaswave.state.store import BlockStore, HeldBlock, Role
from elaswave.state.sums import ExactAccumulator, FloatAccumulator
from elaswave.transport.memory import MemoryNetwork
from elaswave.worker import exchange as exchange_module
from elaswave.worker.activity import Activity
from elaswave.worker.exchange import Exchange

SHAPE = make_shape([(40,), (3, 5)])
BLOCKS = make_blocks([SHAPE.size], 32)
OWNERS = (0, 1, 2)
EXPONENTS = [40, 30]
WORKERS = range(3)


@pytest.fixture
def transports():
    network = MemoryNetwork()
    made = [network.transport(worker) for worker in WORKERS]
    for transport in made:
        transport.connect({other: made[other].address for other in WORKERS}, timeout_s=10.0)
    yield made
    for transport in made:
        transport.close()


def make_crew(transports, accumulator=ExactAccumulator, *, checked=True):
    """Three workers of one stage, each of which owns a block of its one layer; worker 2 has run nothing."""
    generator = torch.Generator().manual_seed(1)
    crew = []
    for worker in WORKERS:
        sums = accumulator(SHAPE)
        sums.reset(EXPONENTS)
        exchange = Exchange(
            worker,
            layout=make_layout(widths=(3,), layers_per_stage=(1,), num_microbatches=4),
            placement=Placement(OWNERS, ((), (), ())),
            blocks=BLOCKS,
            shapes=(SHAPE,),
            store=BlockStore({
                block.id: HeldBlock(block, Role.OWNER, SHAPE, {}, version=0)
                for block in BLOCKS
                if OWNERS[block.id] == worker
            }),
            layers={},
            accumulators={0: sums},
            transport=transports[worker],
            activity=Activity(),
            checked=checked,
        )  # fmt: skip
        exchange.begin(1, 1)
        for microbatch in range(2) if worker < 2 else ():
            assert sums.add([torch.randn(slot.shape, generator=generator) for slot in SHAPE.tensors])
            sums.coverage += key64(worker, microbatch)
        crew.append(SimpleNamespace(exchange=exchange, sums=sums))
    return crew


def send(crew):
    for each in crew:
        each.exchange.send_partials(0, 1, 1)


def balance_after_reduce(crew):
    """What the vote would come to."""
    for each in crew:
        each.exchange.reduce(1, 1, [EXPONENTS])
    return sum(each.exchange.balance + each.sums.checksum for each in crew) % 2**64


def in_transit(crew):
    """The blocks whose partial sums differ between who has sent and who owns them."""
    return [block.id for block in BLOCKS if sum(each.exchange.in_transit().get(block.id, 0) for each in crew) % 2**64]


@pytest.mark.parametrize("accumulator", [ExactAccumulator, FloatAccumulator])
def test_an_undisturbed_reduce_balances(transports, accumulator):
    crew = make_crew(transports, accumulator)
    send(crew)
    assert balance_after_reduce(crew) == 0
    assert in_transit(crew) == []
    assert all(each.exchange.balance == each.exchange.recount() for each in crew)
    assert sum(each.sums.checksum for each in crew) != 0 or accumulator is FloatAccumulator


@pytest.mark.parametrize("seed", range(8))
def test_any_bit_that_flips_in_a_sum_before_it_leaves_shows(transports, seed):
    draw = random.Random(seed)
    crew = make_crew(transports)
    elements = [element for slot in SHAPE.tensors for element in range(slot.offset, slot.stop)]
    words = crew[draw.choice(WORKERS)].sums.sum.numpy().view("uint64")
    words[draw.choice(elements)] ^= 1 << draw.randrange(64)
    send(crew)
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == []  # it came as it was sent
    assert all(each.exchange.balance == each.exchange.recount() for each in crew)


def test_a_bit_that_flips_in_padding_costs_nothing(transports):
    crew = make_crew(transports)
    assert SHAPE.tensors[0].stop < SHAPE.tensors[1].offset
    crew[0].sums.sum[SHAPE.tensors[0].stop] ^= 1
    send(crew)
    assert balance_after_reduce(crew) == 0


@pytest.mark.parametrize("accumulator", [ExactAccumulator, FloatAccumulator])
def test_a_coverage_that_changes_on_its_way_shows(transports, accumulator):
    crew = make_crew(transports, accumulator)
    send(crew)
    crew[1].exchange._buffers[0, 0][-1].view(torch.int32)[0] ^= 1
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == [1]


def test_a_bit_that_flips_on_its_way_shows_and_its_block_is_known(transports):
    crew = make_crew(transports)
    send(crew)
    crew[2].exchange._buffers[0, 1][0][4] ^= 1 << 40
    assert balance_after_reduce(crew) != 0
    assert in_transit(crew) == [2]
    assert all(each.exchange.balance == each.exchange.recount() for each in crew)


def test_sums_that_are_added_up_wrongly_show_and_who_did_it(transports, monkeypatch):
    add_up, calls = exchange_module._add_up, []

    def wrong(parts):
        calls.append(len(parts))
        return add_up(parts[:2]) if len(calls) == 2 else add_up(parts)  # worker 1 leaves out the last one, worker 2's

    monkeypatch.setattr(exchange_module, "_add_up", wrong)
    crew = make_crew(transports)
    crew[2].sums.add([torch.ones(slot.shape) for slot in SHAPE.tensors])
    send(crew)
    assert balance_after_reduce(crew) != 0
    assert calls == [3, 3, 3]
    assert in_transit(crew) == []
    assert [each.exchange.balance == each.exchange.recount() for each in crew] == [True, False, True]


def test_two_changes_that_cancel_do_not_show(transports):
    """What a plain sum cannot see; `docs/numerics.md` says so."""
    crew = make_crew(transports)
    crew[0].sums.sum[0] += 1 << 40
    crew[1].sums.sum[7] -= 1 << 40
    send(crew)
    assert balance_after_reduce(crew) == 0


def test_without_checks_only_coverage_is_balanced(transports):
    crew = make_crew(transports, lambda shape: ExactAccumulator(shape, checked=False), checked=False)
    crew[0].sums.sum[0] ^= 1 << 40
    send(crew)
    assert [each.sums.checksum for each in crew] == [0, 0, 0]
    assert balance_after_reduce(crew) == 0
