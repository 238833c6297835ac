"""Recovery over arbitrary layouts and losses, against brute force and independent statements of what must hold."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.property.layouts import layouts
from tests.unit.planning_cases import moved_layers

from elaswave.blocks.placement import Placement, holders_of_layers, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.costs.schedules import in_flight_bounds
from elaswave.planning.programs.layout import peers_of, validate_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.validation import validate_programs
from elaswave.planning.search.recovery import (
    choose_followers,
    promote,
    survivor_layout,
)


@st.composite
def losses(draw, layout):
    """Some of the workers, often whole stages, never all."""
    lost = set(draw(st.lists(st.sampled_from(layout.workers), max_size=len(layout.workers) - 1)))
    for stage in layout.stages:
        if draw(st.booleans()) and len(lost.union(stage.workers)) < len(layout.workers):
            lost.update(stage.workers)
    return lost - {draw(st.sampled_from(layout.workers))}


@st.composite
def layouts_with_losses(draw):
    layout = draw(layouts)
    return layout, draw(losses(layout))


def costs_of(draw, layout):
    return draw(st.lists(st.integers(0, 9), min_size=layout.num_layers, max_size=layout.num_layers), label="costs")


@given(layouts_with_losses(), st.data())
def test_survivors_stay_where_they_are_and_every_layer_is_run(case, data):
    layout, lost = case
    costs = data.draw(st.none() | st.just(costs_of(data.draw, layout)))
    new = survivor_layout(layout, lost, costs)
    validate_layout(new)
    assert survivor_layout(layout, sorted(lost, reverse=True), costs) == new
    assert new.num_layers == layout.num_layers
    assert new.num_microbatches == layout.num_microbatches
    remaining = [stage for stage in layout.stages if lost.issuperset(stage.workers) is False]
    assert [set(stage.workers) for stage in new.stages] == [set(stage.workers) - lost for stage in remaining]
    for stage, before in zip(new.stages, remaining, strict=True):
        assert stage.start <= before.start < before.stop <= stage.stop
    for (before, after), (old_before, old_after) in zip(pairwise(new.stages), pairwise(remaining), strict=True):
        if old_before.stop >= old_after.start:  # nothing between them is orphaned
            assert (before.stop, after.start) == (old_before.stop, old_after.start)
        else:
            assert before.stop == after.start
    if not lost:
        assert new == layout


@given(layouts_with_losses())
def test_a_survivor_keeps_its_microbatches_and_all_its_layers_of_them(case):
    layout, lost = case
    new = survivor_layout(layout, lost)
    for before, after in zip(layout.routes, new.routes, strict=True):
        now = {hop.worker: hop for hop in after}
        for hop in before:
            if hop.worker not in lost:
                assert now[hop.worker].start <= hop.start < hop.stop <= now[hop.worker].stop


@given(layouts_with_losses())
def test_lost_microbatches_are_spread_as_evenly_as_possible(case):
    layout, lost = case
    new = survivor_layout(layout, lost)
    kept = Counter(hop.worker for route in layout.routes for hop in route)
    carried = Counter(hop.worker for route in new.routes for hop in route)
    for stage in new.stages:
        for worker in stage.workers:
            # A worker that got something has at most one more than any other: no other deal has a lower peak.
            if carried[worker] > kept[worker]:
                assert all(carried[worker] <= carried[other] + 1 for other in stage.workers)


def runs_with_gaps(stages):
    """Maximal runs of stages with a gap of layers between each two."""
    run = [stages[0]]
    for before, after in pairwise(stages):
        if before.stop >= after.start:
            yield run
            run = []
        run.append(after)
    yield run


@given(layouts_with_losses(), st.data())
def test_cuts_agree_with_brute_force(case, data):
    layout, lost = case
    costs = costs_of(data.draw, layout)
    prefix = [0, *accumulate(costs)]
    new = survivor_layout(layout, lost, [cost / 8 for cost in costs])
    stages = iter(new.stages)
    for run in runs_with_gaps([stage for stage in layout.stages if not lost.issuperset(stage.workers)]):
        got = [next(stages) for _ in run]
        first, last = got[0].start, got[-1].stop

        def judge(cuts, first=first, last=last, got=got):
            ranges = list(pairwise((first, *cuts, last)))
            times = [
                Fraction(prefix[stop] - prefix[start], stage.width)
                for (start, stop), stage in zip(ranges, got, strict=True)
            ]
            moved = sum(stage.width * (stop - start) for (start, stop), stage in zip(ranges, got, strict=True))
            return max(times), moved, cuts

        every = product(*(range(before.stop, after.start + 1) for before, after in pairwise(run)))
        if len(run) > 1:
            assert judge(tuple(stage.stop for stage in got[:-1])) == min(map(judge, every))


@given(layouts_with_losses())
def test_the_new_layout_compiles(case):
    layout, lost = case
    new = survivor_layout(layout, lost)
    programs = compile_programs(new, "1f1b")
    validate_programs(new, programs, max_in_flight=in_flight_bounds(new, "1f1b"))
    assert lost.isdisjoint(peers_of(new))


@given(layouts_with_losses(), st.data())
def test_losses_can_follow_each_other(case, data):
    layout, lost = case
    for worker in data.draw(st.permutations(sorted(lost))):
        layout = survivor_layout(layout, {worker})
        validate_layout(layout)
    assert lost.isdisjoint(layout.workers)


@given(layouts_with_losses())
def test_moved_layers_are_the_new_ones(case):
    layout, lost = case
    new = survivor_layout(layout, lost)
    before, after = holders_of_layers(layout), holders_of_layers(new)
    expected = {
        worker: moved
        for worker in new.workers
        if (moved := [n for n in range(new.num_layers) if worker in after[n] and worker not in before[n]])
    }
    assert moved_layers(layout, new) == expected
    assert all(moved_layers(new, layout)[worker] for worker in lost)  # to whom everything is new


@st.composite
def placements(draw):
    """A layout before and after a loss, blocks, a placement before, and which copies are stale."""
    layout, lost = draw(layouts_with_losses())
    sizes = draw(st.lists(st.integers(0, 60), min_size=layout.num_layers, max_size=layout.num_layers))
    blocks = make_blocks(sizes, draw(st.integers(3, 20)))
    placement = place_blocks(layout.with_followers(draw(st.integers(0, 3))), blocks, scatter_width=EVERYBODY)
    stale = set()
    if blocks and draw(st.booleans()):
        copies = [(block.id, worker) for block in blocks for worker in placement.holders(block.id)]
        stale = draw(st.sets(st.sampled_from(copies), max_size=5))
    return layout, lost, blocks, placement, stale


@given(placements())
def test_only_valid_copies_are_promoted_and_kept(case):
    layout, lost, blocks, placement, stale = case
    new = survivor_layout(layout, lost)

    def valid(block, worker):
        return worker not in lost and (block, worker) not in stale

    promotion = promote(placement, blocks, new, valid)
    assert promote(placement, blocks, new, valid) == promotion
    members = holders_of_layers(new)
    orphans = set()
    for block in blocks:
        alive = {worker for worker in placement.holders(block.id) if valid(block.id, worker)}
        owner, *followers = promotion.placement.holders(block.id)
        old_owner = placement.owner[block.id]
        if not alive:
            orphans.add(block.id)
            assert (owner, followers) == (old_owner, [])
            continue
        assert {owner, *followers} == alive
        assert len(followers) == len(alive) - 1
        if old_owner in alive:
            assert owner == old_owner
        elif alive.intersection(members[block.layer]):
            assert owner in members[block.layer]
    assert set(promotion.orphans) == orphans
    assert list(promotion.promoted) == [
        block.id for block in blocks if promotion.placement.owner[block.id] != placement.owner[block.id]
    ]


@given(layouts, st.integers(1, 3), st.integers(1, 20), st.data())
def test_as_many_losses_as_followers_are_survived(layout, num_followers, block_size, data):
    blocks = make_blocks([40] * layout.num_layers, block_size)
    placement = place_blocks(layout.with_followers(num_followers), blocks, scatter_width=EVERYBODY)
    lost = data.draw(st.sets(st.sampled_from(layout.workers), max_size=min(num_followers, len(layout.workers) - 1)))
    promotion = promote(placement, blocks, survivor_layout(layout, lost), lambda _, worker: worker not in lost)
    assert promotion.orphans == ()


@given(placements(), st.integers(0, 3), st.integers(0, 80), st.data())
def test_rounds_of_re_replication_end_with_every_copy_in_place(case, num_followers, max_elements, data):
    layout, lost, blocks, placement, _ = case
    layout = survivor_layout(layout, lost)
    promotion = promote(placement, blocks, layout, lambda _, worker: worker not in lost)
    orphans = set(promotion.orphans)  # brought back by a checkpoint: dealt anew
    dealt = place_blocks(layout.with_followers(0), blocks, scatter_width=EVERYBODY)
    placement = Placement.of(
        tuple(
            dealt.owner[block.id] if block.id in orphans else promotion.placement.owner[block.id] for block in blocks
        ),
        promotion.placement.followers,
    )
    hosts = {worker: data.draw(st.sampled_from("abc")) for worker in layout.workers}
    layout = replace(layout, domains=tuple(hosts.items()))
    if len(set(hosts.values())) == len(hosts):  # a host for each: as if they were on one
        hosts = dict.fromkeys(hosts, "")
    width = data.draw(st.sampled_from((1, 2, EVERYBODY)))
    workers = set(layout.workers)
    wanted = min(num_followers, len(workers) - 1)
    members_of_layer = holders_of_layers(layout)

    layout = layout.with_followers(num_followers)
    arguments = {"max_elements": max_elements, "scatter_width": width}
    while (following := choose_followers(placement, blocks, layout, **arguments)) != placement:
        assert choose_followers(placement, blocks, layout, **arguments) == following
        assert following.owner == placement.owner
        sent, received, num_new = Counter(), Counter(), 0
        for block in blocks:
            before, after = placement.followers[block.id], following.followers[block.id]
            assert after[: len(before)] == before
            if before == after:
                continue
            (new,) = after[len(before) :]
            owner, members = placement.owner[block.id], set(members_of_layer[block.layer])
            earlier = {owner, *before}
            assert len(before) < wanted or len({hosts[worker] for worker in earlier}) == 1
            elsewhere = {worker for worker in workers if hosts[worker] != hosts[owner]}
            if elsewhere:
                assert elsewhere.intersection(after), "on another host before in the stage"
            elif not before and owner in members:  # others have their replica peers where they are
                assert new in (members - earlier or workers)
            num_new += 1
            sent[owner] += block.num_elements
            received[new] += block.num_elements
        assert 1 <= num_new
        if num_new > 1:
            # The very first one may be larger than the limit; then nothing else leaves or reaches the same two.
            too_large = {block.num_elements for block in blocks if block.num_elements > max_elements}
            assert all(amount <= max_elements or amount in too_large for amount in sent.values())
            assert all(amount <= max_elements or amount in too_large for amount in received.values())
        placement = following
    assert all(len(copies) >= wanted for copies in placement.followers)
    assert (
        choose_followers(
            placement, blocks, layout.with_followers(num_followers), scatter_width=EVERYBODY, max_elements=1
        )
        == placement
    )


@given(layouts)
def test_losing_everybody_is_refused(layout):
    with pytest.raises(ValueError, match="no worker can go on"):
        survivor_layout(layout, layout.workers)
