"""Which sets of workers hold the only copies of a block, against blocks that are really placed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.layouts import irregular_layouts, regular_layouts

from elaswave.planning.placed_blocks import PlacedBlocks, Placing
from elaswave.planning.replication import LayerRange
from elaswave.state.placement import holders_of_layers, make_blocks, place_blocks
from elaswave.types import Layout


def placed(layout: Layout, hosts: dict[int, int], placing: Placing) -> PlacedBlocks:
    ranges = [
        LayerRange(start=layer, stop=layer + 1, members=np.array(members))
        for layer, members in enumerate(holders_of_layers(layout))
    ]
    ids = np.array(sorted(hosts))
    return PlacedBlocks(ranges, (ids, np.array([hosts[worker] for worker in ids.tolist()])), placing, {})


def by_blocks(layout: Layout, num_followers: int) -> list[frozenset[int]]:
    """Holders of every block of a model whose workers own a few for each peer."""
    peers = max(len(members) for members in holders_of_layers(layout))
    blocks = make_blocks([peers * (peers - 1) * 2 + 1] * layout.num_layers, 1)
    found = place_blocks(layout, blocks, num_followers=num_followers)
    return [frozenset(found.holders(block.id)) for block in blocks]


@settings(max_examples=60, deadline=None)
@given(st.one_of(regular_layouts(), irregular_layouts()), st.integers(0, 2), st.data())
def test_losses_are_fatal_exactly_if_some_block_loses_all_of_its_holders(layout, num_followers, data):
    holders = by_blocks(layout, num_followers)
    copies = placed(layout, dict.fromkeys(layout.active, 0), Placing(followers=num_followers, knows_hosts=False))
    size = len(holders[0])
    sets = [frozenset(each) for each in copies.fatal_sets(size)]
    assert len(sets) == len(set(sets))
    # Further followers are dealt beside the first ones, so a model has not all of the sets that could be.
    assert set(holders) == set(sets) if num_followers < 2 else set(holders) <= set(sets)
    gone = data.draw(st.sets(st.sampled_from(layout.active)))
    assert copies.lost_with(gone) == any(each <= gone for each in sets)
    assert list(copies.fatal_sets(size + 1)) == []
