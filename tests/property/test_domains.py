"""Placements over hosts: what the loss of any one of them leaves."""

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.property.layouts import layouts

from elaswave.planning.recovery import choose_followers, promote, survivor_layout
from elaswave.planning.target_placement import target_placement
from elaswave.state.domains import hosts_of
from elaswave.state.placement import make_blocks, place_blocks


@st.composite
def jobs(draw):
    """A layout over two hosts or more, blocks, and how they are copied."""
    layout = draw(layouts)
    assume(len(layout.active) > 2)
    names = draw(st.lists(st.sampled_from("abcd"), min_size=len(layout.active), max_size=len(layout.active)))
    assume(len(set(names)) > 1)
    layout = replace(layout, domains=tuple(zip(layout.active, names, strict=True)))
    blocks = make_blocks(draw(st.lists(st.integers(0, 40), min_size=layout.num_layers, max_size=layout.num_layers)), 5)
    return layout, blocks, draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3)))


def survives_any_host(placement, layout, num_blocks):
    hosts = hosts_of(layout)
    return len(hosts) == 1 or all(
        not set(placement.holders(block)) <= set(members) for block in range(num_blocks) for members in hosts.values()
    )


@given(jobs(), st.data())
def test_any_host_can_be_lost_and_then_any_other(job, data):
    layout, blocks, num_followers, width = job
    placement = place_blocks(layout, blocks, num_followers=num_followers, scatter_width=width)
    assert survives_any_host(placement, layout, len(blocks))
    while len(hosts := hosts_of(layout)) > 1:
        lost = set(hosts[data.draw(st.sampled_from(sorted(hosts)), label="lost")])
        layout = survivor_layout(layout, lost)
        found = promote(placement, blocks, layout, lambda _, worker, lost=lost: worker not in lost)
        assert not found.orphans
        placement, before = found.placement, None
        while placement != before:
            before = placement
            placement = choose_followers(
                placement, blocks, layout, num_followers=num_followers, scatter_width=width, max_elements=20
            )
        assert survives_any_host(placement, layout, len(blocks)), "once all copies are made again"


@given(jobs(), st.data())
def test_copies_that_are_all_on_one_host_get_another_one(job, data):
    """As if nothing had been known of hosts when blocks were placed."""
    layout, blocks, num_followers, width = job
    before = place_blocks(replace(layout, domains=()), blocks, num_followers=num_followers, scatter_width=width)
    placement, after = None, before
    while placement != after:
        placement = after
        after = choose_followers(
            placement, blocks, layout, num_followers=num_followers, scatter_width=width, max_elements=20
        )
    assert survives_any_host(placement, layout, len(blocks))
    for block in blocks:
        kept = before.followers[block.id]
        assert placement.followers[block.id][: len(kept)] == kept
        assert len(placement.followers[block.id]) <= len(kept) + 1


@given(jobs(), st.data())
def test_a_target_keeps_each_block_on_two_hosts_and_is_its_own_target(job, data):
    """Also where nothing was known of hosts before, or another host has been taken into the job."""
    layout, blocks, num_followers, width = job
    if data.draw(st.booleans(), label="labels are new"):
        before = place_blocks(replace(layout, domains=()), blocks, num_followers=num_followers, scatter_width=width)
    else:
        lost = {data.draw(st.sampled_from(layout.active), label="newcomer")}
        smaller = survivor_layout(layout, lost)
        before = place_blocks(smaller, blocks, num_followers=num_followers, scatter_width=width)
    arguments = {"num_followers": num_followers, "scatter_width": width}
    target = target_placement(layout, blocks, before, **arguments)
    assert survives_any_host(target, layout, len(blocks))
    if num_followers == 1:
        assert target == target_placement(layout, blocks, target, **arguments)
