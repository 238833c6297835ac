"""Blocks and placement: cut by the model alone, dealt evenly, copied where a failure cannot take both."""

from collections import Counter

import msgspec
import pytest

from elaswave.blocks.placement import (
    DEFAULT_BLOCK_SIZE,
    Block,
    default_block_size,
    holders_of_layers,
    make_blocks,
    place_blocks,
)
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.programs.layout import make_layout
from elaswave.types import Hop, Layout, Stage


def layout_of(widths, layers_per_stage=None):
    layers_per_stage = layers_per_stage or [1] * len(widths)
    return make_layout(widths=widths, layers_per_stage=layers_per_stage, num_microbatches=max(widths))


def on_hosts(layout, hosts):
    return msgspec.structs.replace(layout, domains=tuple(sorted(hosts.items())))


def elements_held(placement, blocks):
    held = Counter()
    for block in blocks:
        for worker in placement.holders(block.id):
            held[worker] += block.num_elements
    return held


def test_blocks_number_the_runs_of_all_layers():
    assert make_blocks([5, 0, 4, 1], 2) == (
        Block(0, 0, 0, 2),
        Block(1, 0, 2, 4),
        Block(2, 0, 4, 5),
        Block(3, 2, 0, 2),
        Block(4, 2, 2, 4),
        Block(5, 3, 0, 1),
    )
    assert make_blocks([]) == ()
    assert make_blocks([DEFAULT_BLOCK_SIZE + 1])[1] == Block(1, 0, DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE + 1)


@pytest.mark.parametrize(
    ("sizes", "block_size", "message"),
    [([4], 0, "block_size is 0"), ([4, -1], 2, "layer 1 has a size of -1 elements")],
)
def test_impossible_blocks_are_refused(sizes, block_size, message):
    with pytest.raises(ValueError, match=message):
        make_blocks(sizes, block_size)


def test_larger_models_have_larger_blocks_but_enough_of_them():
    sizes = {num_elements: default_block_size(num_elements) for num_elements in (0, 870_000, 5_000_000, 10_000_000)}
    assert list(sizes.values()) == [DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE, 2 * DEFAULT_BLOCK_SIZE, 65536]
    assert default_block_size(17 * 10**9) == 65536
    assert all(num_elements / size >= 128 for num_elements, size in sizes.items() if size > DEFAULT_BLOCK_SIZE)


def test_the_number_of_blocks_of_the_largest_models_is_bounded():
    """The coordinator looks at each of them after a loss."""
    for num_elements in (18 * 10**9, 70 * 10**9, 10**12, 10**13):
        size = default_block_size(num_elements)
        assert 2**17 <= num_elements / size <= 2**18
        assert size % 65536 == 0


def test_a_layer_is_interleaved_over_all_workers_of_its_stage():
    blocks = make_blocks([60, 60, 40], 10)
    placement = place_blocks(layout_of([3, 2], [2, 1]).with_followers(0), blocks, scatter_width=EVERYBODY)
    assert placement.owner == (0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    assert placement.followers == ((),) * 16


def test_short_blocks_do_not_unbalance_the_owners():
    blocks = make_blocks([21] * 12, 10)  # two full blocks and one of a single element each
    placement = place_blocks(layout_of([2], [12]).with_followers(0), blocks, scatter_width=EVERYBODY)
    assert elements_held(placement, blocks) == {0: 126, 1: 126}
    blocks = make_blocks([15] * 12, 10)  # a full block and half of one: in turn, one worker would get all full ones
    placement = place_blocks(layout_of([2], [12]).with_followers(0), blocks, scatter_width=EVERYBODY)
    assert elements_held(placement, blocks) == {0: 90, 1: 90}


def test_the_followers_of_an_owner_are_spread_over_its_stage():
    blocks = make_blocks([16 * 12], 1)
    placement = place_blocks(layout_of([4]).with_followers(1), blocks, scatter_width=EVERYBODY)
    pairs = Counter((placement.owner[block.id], *placement.followers[block.id]) for block in blocks)
    assert set(pairs.values()) == {16}
    assert len(pairs) == 4 * 3
    assert set(elements_held(placement, blocks).values()) == {96}


def test_a_stage_of_one_is_followed_from_other_stages():
    blocks = make_blocks([30, 30], 1)
    placement = place_blocks(layout_of([1, 3]).with_followers(1), blocks, scatter_width=EVERYBODY)
    first_stage = Counter(placement.followers[block.id] for block in blocks if block.layer == 0)
    assert first_stage == {(1,): 10, (2,): 10, (3,): 10}
    assert {worker for block in blocks[30:] for worker in placement.followers[block.id]} == {1, 2, 3}
    # Half of the model on worker 0; a third of both halves, twice, on each other worker.
    assert elements_held(placement, blocks) == {0: 30, 1: 30, 2: 30, 3: 30}


def test_further_followers_sit_outside_the_stage():
    blocks = make_blocks([8, 8, 8], 1)
    layout = layout_of([2, 2, 1])
    placement = place_blocks(layout.with_followers(2), blocks, scatter_width=EVERYBODY)
    for block in blocks:
        stages = [layout.stage_of(worker) for worker in placement.holders(block.id)]
        if stages[0] == 2:
            assert set(stages[1:]) == {0, 1} or stages[1] == stages[2] != 2
        else:
            assert stages[0] == stages[1] != stages[2]


def test_followers_are_clamped_and_fall_back_to_whoever_is_left():
    blocks = make_blocks([6], 1)
    placement = place_blocks(layout_of([3]).with_followers(2), blocks, scatter_width=EVERYBODY)
    assert all(sorted(placement.holders(block.id)) == [0, 1, 2] for block in blocks)
    assert place_blocks(layout_of([3]).with_followers(9), blocks, scatter_width=EVERYBODY) == placement
    assert place_blocks(layout_of([1]).with_followers(1), blocks, scatter_width=EVERYBODY).followers == ((),) * 6
    outside_first = place_blocks(layout_of([2, 1]).with_followers(2), make_blocks([4, 4], 1), scatter_width=EVERYBODY)
    assert all(sorted(holders) == [0, 1, 2] for holders in map(outside_first.holders, range(8)))


def test_other_hosts_come_first():
    layout = layout_of([4, 2])
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "a", 5: "c"}
    blocks = make_blocks([64, 64], 1)
    placement = place_blocks(on_hosts(layout, hosts).with_followers(2), blocks, scatter_width=1)
    for block in blocks:
        owner, first, second = placement.holders(block.id)
        assert hosts[first] != hosts[owner]
        assert layout.stage_of(first) == layout.stage_of(owner) != layout.stage_of(second)
        if block.layer == 0:
            assert second == 5, "the only worker outside of the stage on a third host"
        else:
            assert hosts[second] == "b", "hosts a and c hold copies already"
    for same in (dict.fromkeys(range(6), "a"), {worker: f"own-{worker}" for worker in range(6)}):
        crowded = place_blocks(on_hosts(layout, same).with_followers(1), blocks, scatter_width=EVERYBODY)
        assert crowded == place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY)


def test_optimizer_state_of_the_default_model_stays_within_its_bound():
    """(1 + followers) / workers of the total + 10 % at 2 x 2, for layers as the default GPT has them."""
    blocks = make_blocks([40960, *[198272] * 4, 33024], 16384)
    total = sum(block.num_elements for block in blocks)
    layout = layout_of([2, 2], [3, 3])
    for num_followers in (0, 1, 2, 3):
        placement = place_blocks(layout.with_followers(num_followers), blocks, scatter_width=EVERYBODY)
        assert max(elements_held(placement, blocks).values()) <= ((1 + num_followers) / 4 + 0.1) * total
    placement = place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY)
    assert max(elements_held(placement, blocks).values()) <= 1.1 * total / 2


def test_worker_ids_need_not_be_dense():
    layout = Layout(
        stages=(Stage(start=0, stop=2, workers=(4, 9)), Stage(start=2, stop=3, workers=(7,))),
        routes=((Hop(4, 0, 0, 2), Hop(7, 1, 2, 3)), (Hop(9, 0, 0, 2), Hop(7, 1, 2, 3))),
    )
    placement = place_blocks(layout.with_followers(1), make_blocks([2, 2, 2], 1), scatter_width=EVERYBODY)
    assert placement.owner == (4, 9, 4, 9, 7, 7)
    assert placement.followers == ((9,), (4,), (9,), (4,), (9,), (4,))


def test_a_shared_layer_is_held_by_both_stages():
    layout = Layout(
        stages=(Stage(start=0, stop=2, workers=(0,)), Stage(start=1, stop=3, workers=(1, 2))),
        routes=((Hop(0, 0, 0, 2), Hop(1, 1, 2, 3)),),
    )
    assert holders_of_layers(layout) == ((0,), (0, 1, 2), (1, 2))
    placement = place_blocks(layout.with_followers(1), make_blocks([1, 6, 1], 1), scatter_width=EVERYBODY)
    assert set(placement.owner[1:7]) == {0, 1, 2}


def test_balance_at_a_larger_size():
    layout = layout_of([12] * 8, [4] * 8)
    blocks = make_blocks([100_000] * 32, 16384)
    placement = place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY)
    held = elements_held(placement, blocks)
    mean = sum(held.values()) / 96
    assert 0.8 * mean <= min(held.values()) <= max(held.values()) <= 1.2 * mean


def test_impossible_placements_are_refused():
    with pytest.raises(ValueError, match="num_followers of a stage is -2"):
        place_blocks(layout_of([2]).with_followers(-2), make_blocks([2], 1), scatter_width=EVERYBODY)


@pytest.mark.parametrize("layer", [1, -1])
def test_blocks_of_another_model_are_refused(layer):
    with pytest.raises(ValueError, match=f"block 0 is of layer {layer}, but the layout has 1 layers"):
        place_blocks(layout_of([1]).with_followers(0), [Block(0, layer, 0, 1)], scatter_width=EVERYBODY)


def test_idle_members_get_nothing():
    layout = layout_of([2])
    blocks = make_blocks([40], 10)
    joined = msgspec.structs.replace(layout, idle=(5, 6))
    assert place_blocks(joined.with_followers(3), blocks, scatter_width=EVERYBODY) == place_blocks(
        layout.with_followers(3), blocks, scatter_width=EVERYBODY
    )
