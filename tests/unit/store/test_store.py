"""The blocks that a worker holds: roles, decay runs, bytes, digests."""

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.placement import ReplicaRole, make_blocks, place_blocks, roles_of
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.coordinator.records.run_state import add_digests
from elaswave.hashing import MASK64
from elaswave.planning.programs.layout import make_layout
from elaswave.state.flat import BlockStore, HeldBlock, tensor_digest

SHAPES = [make_shape([(10, 7), (9,), (3, 5)]), make_shape([(40,)], layer=1, first_id=3)]
BLOCKS = make_blocks([shape.size for shape in SHAPES], 64)
LAYOUT = make_layout(widths=[3], layers_per_stage=[2], num_microbatches=3)
VALUES = {
    name: [torch.randn(shape.size, generator=torch.Generator().manual_seed(seed)) for shape in SHAPES]
    for seed, name in enumerate(("master", "exp_avg"))
}


def store_of(worker, placement):
    held = {}
    for block, role in roles_of(worker, placement, BLOCKS).items():
        run = BLOCKS[block]
        slots = {name: values[run.layer][run.start : run.stop].clone() for name, values in VALUES.items()}
        held[block] = HeldBlock(run, role, SHAPES[run.layer], slots)
    return BlockStore(dict(reversed(held.items())))


def stores(num_followers):
    placement = place_blocks(LAYOUT.with_followers(num_followers), BLOCKS, scatter_width=EVERYBODY)
    return placement, [store_of(worker, placement) for worker in LAYOUT.workers]


def whole_digests():
    return {
        f"{name}.{slot.name}": tensor_digest(name, slot.name, 0, values[slot.layer][slot.offset : slot.stop])
        for name, values in VALUES.items()
        for shape in SHAPES
        for slot in shape.tensors
    }


@pytest.mark.parametrize("num_followers", [0, 1, 2])
def test_roles_are_those_of_the_placement(num_followers):
    placement, held = stores(num_followers)
    for block in BLOCKS:
        holders = [worker for worker in LAYOUT.workers if block.id in held[worker].held]
        assert sorted(placement.holders(block.id)) == holders
        owners = [worker for worker in holders if held[worker][block.id].role is ReplicaRole.OWNER]
        assert owners == [placement.owner[block.id]]


def test_blocks_come_in_ascending_order():
    _, held = stores(2)
    assert [block.block.id for block in held[0]] == sorted(held[0].held)
    owned = [block.block.id for block in held[0].with_role(ReplicaRole.OWNER)]
    followed = [block.block.id for block in held[0].with_role(ReplicaRole.FOLLOWER)]
    assert owned == sorted(owned) and followed == sorted(followed)
    assert sorted(owned + followed) == sorted(held[0].held)


@pytest.mark.parametrize("num_followers", [1, 2])
def test_owners_and_followers_each_have_the_digest_of_the_whole(num_followers):
    _, held = stores(num_followers)
    expected = dict(sorted(whole_digests().items()))
    assert add_digests(store.digest_parts(ReplicaRole.OWNER) for store in held) == expected
    followers = add_digests(store.digest_parts(ReplicaRole.FOLLOWER) for store in held)
    assert followers == {name: num_followers * value & MASK64 for name, value in expected.items()}
    assert all(store.digest_parts(ReplicaRole.OWNER) != expected for store in held)


def test_digests_are_weighted_by_block():
    _, (first, *_) = stores(1)
    several, none = first.weighted_digests((), dict.fromkeys(first.held, 3), {})
    both = add_digests(first.digest_parts(role) for role in ReplicaRole)
    assert several == {name: 3 * value & MASK64 for name, value in both.items()}
    assert none == {}


def test_bytes_are_those_of_all_slots_and_both_roles():
    _, held = stores(1)
    elements = sum(block.num_elements for block in BLOCKS)
    assert sum(store.optimizer_bytes() for store in held) == 2 * elements * 2 * 4


def test_decay_applies_to_the_runs_of_matrices_inside_a_block():
    shape = make_shape([(4, 8), (2, 16), (32,), (3, 3), (2, 2)])
    runs = [HeldBlock(block, ReplicaRole.OWNER, shape, {}).decay_runs for block in make_blocks([shape.size], 48)]
    # Neighbours are joined, padding between tensors is left out.
    assert runs == [((0, 48),), ((0, 16),), ((0, 9), (32, 36)), ()]
    assert shape.size == 160


def test_a_gradient_is_there_only_during_a_step():
    _, held = stores(1)
    assert all(block.gradient is None for block in held[0])
