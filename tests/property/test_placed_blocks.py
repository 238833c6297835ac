"""Which sets of workers hold the only copies of a block, against blocks that are really placed."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.property.layouts import regular_layouts

from elaswave.blocks.placement import holders_of_layers, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.policy.replication import LayerRange
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.types import WHOLE_STAGE, Layout


def placed(layout: Layout, hosts: dict[int, int], placing: Placing) -> PlacedBlocks:
    asked = [
        [stage.num_followers for stage in layout.stages if stage.start <= layer < stage.stop]
        for layer in range(layout.num_layers)
    ]
    ranges = [
        LayerRange(
            start=layer, stop=layer + 1, members=np.array(members),
            followers=WHOLE_STAGE if WHOLE_STAGE in asked[layer] else max(asked[layer]),
        )
        for layer, members in enumerate(holders_of_layers(layout))
    ]  # fmt: skip
    ids = np.array(sorted(hosts))
    return PlacedBlocks(ranges, (ids, np.array([hosts[worker] for worker in ids.tolist()])), placing, {})


def by_blocks(layout: Layout, hosts: dict[int, str] | None, placing: Placing) -> set[frozenset[int]]:
    """Sets of holders of a model's blocks: each owner has just as many in each layer as it takes for each of those that
    may be its first follower to follow one."""
    members = holders_of_layers(layout)
    options = {"scatter_width": placing.scatter_width}
    layout = layout if hosts is None else replace(layout, domains=tuple(hosts.items()))
    blocks = make_blocks([len(each) * len(layout.active) for each in members], 1)
    enough = place_blocks(layout.with_followers(1), blocks, **options)
    firsts: dict[tuple[int, int], set[int]] = {}
    for block in blocks:
        firsts.setdefault((block.layer, enough.owner[block.id]), set()).update(enough.followers[block.id])
    most = [max(len(found) for (of, _), found in firsts.items() if of == layer) for layer in range(len(members))]
    blocks = make_blocks([len(each) * max(1, rounds) for each, rounds in zip(members, most)], 1)
    found = place_blocks(layout, blocks, **options)
    holders = {frozenset(found.holders(block.id)) for block in blocks}
    return {each for each in holders if not any(other < each for other in holders)}


NUMBERS = (0, 1, 2, 3, WHOLE_STAGE)


@settings(max_examples=150, deadline=None)
@given(
    regular_layouts(), st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=2),
    st.sampled_from([1, 2, 3, EVERYBODY]), st.integers(1, 5), st.integers(0, 3), st.data(),
)  # fmt: skip
def test_losses_are_fatal_exactly_if_some_block_loses_all_of_its_holders(
    layout, numbers, scatter_width, per_host, per_rack, data
):
    """For hosts that are known, in racks or not, and for workers on one host; stages may ask for different numbers."""
    layout = layout.with_followers(*(numbers[index % len(numbers)] for index in range(len(layout.stages))))
    if not {0, 1, WHOLE_STAGE}.issuperset(numbers):  # the order in which blocks of many owners meet decides then
        assume(scatter_width != EVERYBODY and len(set(numbers)) == 1)
    hosts = {worker: worker // per_host for worker in layout.active}
    racks = tuple(host // per_rack for host in range(max(hosts.values()) + 1)) if per_rack else ()
    placing = Placing(scatter_width=scatter_width, knows_hosts=per_host < 5, racks=racks)
    labels = {worker: f"{racks[host]}/{host}" if racks else str(host) for worker, host in hosts.items()}
    names = labels if placing.knows_hosts else None
    holders = by_blocks(layout, names, placing)
    copies = placed(layout, hosts, placing)
    sets = [frozenset(each) for size in range(1, len(layout.active) + 1) for each in copies.fatal_sets(size)]
    assert len(sets) == len(set(sets))
    assert set(sets) == holders
    assert copies.smallest_fatal == min(map(len, sets))
    gone = data.draw(st.sets(st.sampled_from(layout.active)))
    assert copies.lost_with(gone) == any(each <= gone for each in sets)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 9), min_size=2), min_size=1, max_size=3), st.integers(1, 2),
    st.sampled_from([1, 2, 3, 4]), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_workers_of_several_ranges_have_each_partner_in_each(stages, num_followers, scatter_width, per_host, data):
    """As where stages share layers or pipelines are cut differently: no set of holders is left out."""
    ranges = [
        LayerRange(start=layer, stop=layer + 1, members=np.array(sorted(members)), followers=num_followers)
        for layer, members in enumerate(stages)
    ]
    ids = np.arange(10)
    placing = Placing(scatter_width=scatter_width)
    copies = PlacedBlocks(ranges, (ids, ids // per_host), placing, {})
    sets = [frozenset(each) for size in range(1, num_followers + 2) for each in copies.fatal_sets(size)]
    everybody = sorted(set().union(*stages))
    assert {worker for each in sets for worker in each} <= set(everybody)
    assert all(any(owner in each for each in sets) for owner in everybody)
    gone = data.draw(st.sets(st.sampled_from(everybody)))
    assert copies.lost_with(gone) == any(each <= gone for each in sets)
