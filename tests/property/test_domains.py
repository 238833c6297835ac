"""Placements over hosts: what the loss of any one of them leaves."""

from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.property.layouts import layouts

from elaswave.blocks.domains import hosts_of, workers_by_site
from elaswave.blocks.placement import make_blocks, place_blocks
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.search.recovery import choose_followers, promote, survivor_layout
from elaswave.planning.state_moves.target_placement import target_placement


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
    placement = place_blocks(layout.with_followers(num_followers), blocks, scatter_width=width)
    assert survives_any_host(placement, layout, len(blocks))
    while len(hosts := hosts_of(layout)) > 1:
        lost = set(hosts[data.draw(st.sampled_from(sorted(hosts)), label="lost")])
        left = {worker: host for worker, host in layout.domain_of.items() if worker not in lost}
        layout = survivor_layout(layout, lost)
        assert layout.domain_of == left, "survivors are where they were"
        found = promote(placement, blocks, layout, lambda _, worker, lost=lost: worker not in lost)
        assert not found.orphans
        placement, before = found.placement, None
        while placement != before:
            before = placement
            placement = choose_followers(
                placement, blocks, layout.with_followers(num_followers), scatter_width=width, max_elements=20
            )
        assert survives_any_host(placement, layout, len(blocks)), "once all copies are made again"


@given(jobs(), st.data())
def test_copies_that_are_all_on_one_host_get_another_one(job, data):
    """As if nothing had been known of hosts when blocks were placed."""
    layout, blocks, num_followers, width = job
    before = place_blocks(replace(layout, domains=()).with_followers(num_followers), blocks, scatter_width=width)
    placement, after = None, before
    while placement != after:
        placement = after
        after = choose_followers(
            placement, blocks, layout.with_followers(num_followers), scatter_width=width, max_elements=20
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
        before = place_blocks(replace(layout, domains=()).with_followers(num_followers), blocks, scatter_width=width)
    else:
        lost = {data.draw(st.sampled_from(layout.active), label="newcomer")}
        smaller = survivor_layout(layout, lost)
        before = place_blocks(smaller.with_followers(num_followers), blocks, scatter_width=width)
    layout = layout.with_followers(num_followers)
    arguments = {"scatter_width": width}
    target = target_placement(layout, blocks, before, **arguments)
    assert survives_any_host(target, layout, len(blocks))
    if num_followers == 1:
        assert target == target_placement(layout, blocks, target, **arguments)


def test_a_target_has_copies_on_three_hosts_where_there_are_three():
    """Replica peers alone put a block on two of them."""
    layout = make_layout(widths=[3, 3], layers_per_stage=[1, 1], num_microbatches=3)
    blocks = make_blocks([60, 60], 5)
    before = place_blocks(layout.with_followers(2), blocks, scatter_width=2)
    names = dict(enumerate("abcabc"))
    target = target_placement(
        replace(layout, domains=tuple(names.items())).with_followers(2), blocks, before, scatter_width=2
    )
    assert all(len({names[worker] for worker in target.holders(block.id)}) == 3 for block in blocks)


@given(jobs(), st.data())
def test_copies_inside_a_site_never_leave_it_and_are_as_many_as_it_has_room_for(job, data):
    """From the start, once copies are made again after a loss, and as the target of a move."""
    layout, blocks, num_followers, width = job
    layout = layout.with_followers(num_followers)
    arguments = {"scatter_width": width}
    anywhere = place_blocks(layout, blocks, **arguments)
    layout = replace(layout, copies="inside")

    def is_right(placement, exactly):
        sites = workers_by_site(layout)
        for block in range(len(blocks)):
            (here,) = (members for members in sites.values() if placement.owner[block] in members)
            near = [worker for worker in placement.followers[block] if worker in here]
            room = [worker for worker in here if worker != placement.owner[block] and worker in layout.active]
            assert len(near) == min(num_followers, len(room)), block
            assert not exactly or len(near) == len(placement.followers[block]), block

    inside = place_blocks(layout, blocks, **arguments)
    is_right(inside, exactly=True)
    target = target_placement(layout, blocks, anywhere, **arguments)
    is_right(target, exactly=True)
    if num_followers == 1:
        assert target == target_placement(layout, blocks, target, **arguments)
    lost = {data.draw(st.sampled_from(layout.active), label="lost")}
    layout = survivor_layout(layout, lost)
    before = promote(anywhere, blocks, layout, lambda _, worker: worker not in lost).placement
    assume(all(worker in layout.workers for worker in before.owner))
    placement = None
    while placement != before:
        placement = before
        before = choose_followers(placement, blocks, layout, max_elements=20, **arguments)
    counts = [sum(w in s for w in (o, *f)) for o, f in zip(placement.owner, placement.followers, strict=True)
              for s in workers_by_site(layout).values() if o in s]  # fmt: skip
    sizes = [len([w for w in s if w in layout.active]) for o in placement.owner
             for s in workers_by_site(layout).values() if o in s]  # fmt: skip
    assert all(count >= min(num_followers + 1, size) for count, size in zip(counts, sizes, strict=True))
