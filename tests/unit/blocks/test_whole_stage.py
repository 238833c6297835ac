"""Stages all of whose workers hold all of its state (`WHOLE_STAGE`): who follows, what a loss and a join change."""

import msgspec
import pytest

from elaswave.blocks.placement import Placement, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.blocks.survival import survival_of
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.search.recovery import choose_followers, promote, put_to_work, survivor_layout, without_surplus
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.types import WHOLE_STAGE, Layout, Stage


def whole(widths, hosts="", **options) -> Layout:
    layout = make_layout(widths=widths, layers_per_stage=[2] * len(widths), num_microbatches=max(widths), **options)
    domains = tuple(enumerate(hosts)) if hosts else ()
    return msgspec.structs.replace(layout, domains=domains).with_followers(WHOLE_STAGE)


def blocks_of(layout, size=8):
    return make_blocks([size] * (layout.num_layers + len(layout.shared)), 1)


def holders_by_layer(placement, blocks):
    found = {}
    for block in blocks:
        found.setdefault(block.layer, set()).add(frozenset(placement.holders(block.id)))
    return found


def refill(placement, blocks, layout, scatter_width=2, **options):
    """The rounds until nothing is lacking."""
    rounds = [placement]
    while True:
        after = choose_followers(rounds[-1], blocks, layout, max_elements=3, scatter_width=scatter_width, **options)
        if after == rounds[-1]:
            return rounds
        rounds.append(after)


def test_all_others_of_the_stage_follow():
    layout = whole([3, 2])
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=1)
    first, second = {frozenset({0, 1, 2})}, {frozenset({3, 4})}
    assert holders_by_layer(placement, blocks) == {0: first, 1: first, 2: second, 3: second}
    # One group of holders for each owner, whatever the scatter width.
    assert sorted(placement.groups) == [(0, 1, 2), (1, 2, 0), (2, 0, 1), (3, 4), (4, 3)]
    survival = survival_of(placement, layout)
    assert (survival.num_copies, survival.num_fatal) == (2, 1), "only both of the second stage"


def test_a_worker_alone_in_its_stage_is_followed_from_another():
    layout = whole([1, 3])
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=EVERYBODY)
    alone = [placement.holders(block.id) for block in blocks if block.layer < 2]
    assert {owner for owner, *_ in alone} == {0}
    assert {len(holders) for holders in alone} == {2}
    assert {holders[1] for holders in alone} == {1, 2, 3}, "spread over the others"
    nobody = whole([1])
    assert place_blocks(nobody, blocks_of(nobody), scatter_width=1).groups == ((0,),)


def test_one_follows_elsewhere_where_a_stage_is_on_one_host():
    layout = whole([2, 2], hosts="aabb")
    blocks = blocks_of(layout)
    for placement in (
        place_blocks(layout, blocks, scatter_width=2),
        target_placement(
            layout,
            blocks,
            place_blocks(msgspec.structs.replace(layout, domains=()), blocks, scatter_width=2),
            scatter_width=2,
        ),
    ):
        for block in blocks:
            inside, outside = ({0, 1}, {2, 3}) if block.layer < 2 else ({2, 3}, {0, 1})
            holders = set(placement.holders(block.id))
            assert inside < holders and len(holders & outside) == 1
        assert not survival_of(placement, layout).fatal_hosts
    spread = whole([2, 2], hosts="abab")
    assert max(map(len, place_blocks(spread, blocks, scatter_width=2).groups)) == 2, "each stage is on both hosts"


def test_copies_inside_a_site_stay_there():
    layout = msgspec.structs.replace(whole([3, 2], hosts="aabaa"), copies="inside")
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=2)
    for block in blocks:
        owner, *followers = placement.holders(block.id)
        assert all((worker == 2) == (owner == 2) for worker in followers)
        if block.layer < 2 and owner != 2:
            assert set(followers) == {0, 1} - {owner}
    assert () in {group[1:] for group in placement.groups}, "worker 2 is alone at its site"


@pytest.mark.parametrize("scatter_width", [1, 2, EVERYBODY])
def test_a_joiner_fills_up_and_a_loss_leaves_nothing_to_refill(scatter_width):
    layout = whole([3, 3])
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=scatter_width)
    smaller = survivor_layout(layout, {0, 2})
    placement = promote(placement, blocks, smaller, lambda _, worker: worker not in {0, 2}).placement
    rounds = refill(placement, blocks, smaller, scatter_width)
    lacking = [block.id for block in blocks if placement.holders(block.id) == (1,)]
    assert lacking == [block.id for block in blocks if block.layer < 2], "alone in its stage: one follows elsewhere"
    assert {len(rounds[-1].holders(block)) for block in lacking} == {2}
    one_less = survivor_layout(layout, {1})
    placement = place_blocks(layout, blocks, scatter_width=scatter_width)
    placement = promote(placement, blocks, one_less, lambda _, worker: worker != 1).placement
    assert refill(placement, blocks, one_less, scatter_width) == [placement], "two others still hold all"

    joined = put_to_work(msgspec.structs.replace(one_less, idle=(6,)), 6)
    assert [stage.workers for stage in joined.stages] == [(0, 2, 6), (3, 4, 5)]
    rounds = refill(placement, blocks, joined, scatter_width)
    for before, after in zip(rounds, rounds[1:]):
        new = [len(after.holders(block.id)) - len(before.holders(block.id)) for block in blocks]
        assert set(new) <= {0, 1} and 0 < sum(new) <= 3, "as many as it may receive in a step"
        assert after.owner == before.owner
    full = holders_by_layer(rounds[-1], blocks)
    assert full[0] == full[1] == {frozenset({0, 2, 6})}
    assert refill(placement, blocks, joined, scatter_width, urgent=True) == [placement], "others hold them all"
    target = target_placement(joined, blocks, rounds[-1], scatter_width=scatter_width)
    assert holders_by_layer(target, blocks) == full
    assert target_placement(joined, blocks, target, scatter_width=scatter_width) == target


def test_a_change_comes_into_force_with_few_copies():
    """A joiner owns its share; what else it is to hold comes afterwards, but for what else would be on one host."""
    layout = whole([3, 3])
    blocks = blocks_of(layout)
    before = place_blocks(survivor_layout(layout, {1}), blocks, scatter_width=2)
    for hosts, elsewhere in (("", False), ("abaccc", True), ("abbccc", False)):
        joined = msgspec.structs.replace(layout, domains=tuple(enumerate(hosts)) if hosts else ())
        target = target_placement(joined, blocks, before, scatter_width=2)
        for block in blocks:
            if block.layer >= 2:
                continue
            assert {0, 2} <= set(target.holders(block.id)), "nothing is dropped that is there"
            assert (1 in target.holders(block.id)) == (target.owner[block.id] == 1 or elsewhere)
        assert 1 in target.owner
        rounds = refill(target, blocks, joined)
        for layer in (0, 1):
            (holders,) = {h & {0, 1, 2} for h in holders_by_layer(rounds[-1], blocks)[layer]}
            assert holders == {0, 1, 2}
    # What is missing is made where it is needed most: on the other host.
    layout = whole([4], hosts="aabb")
    blocks = blocks_of(layout)
    placement = Placement.of([0] * len(blocks), [(1,)] * len(blocks))
    after = choose_followers(placement, blocks, layout, max_elements=1, scatter_width=2, urgent=True)
    (new,) = (set(after.holders(block)) - {0, 1} for block in range(len(blocks)) if len(after.holders(block)) > 2)
    assert new <= {2, 3}
    nobody = Placement.of([0] * len(blocks), [()] * len(blocks))
    after = choose_followers(nobody, blocks, layout, max_elements=10**9, scatter_width=2, urgent=True)
    assert all(set(after.followers[block.id]) <= {2, 3} for block in blocks), "before worker 1, which is on the same"
    # One outside stands in for none of the stage.
    mixed = whole([3, 2])
    blocks = blocks_of(mixed)
    placement = Placement.of(
        [0 if block.layer < 2 else 3 for block in blocks], [(1, 3) if block.layer < 2 else (4,) for block in blocks]
    )
    full = refill(placement, blocks, mixed)[-1]
    assert all({0, 1, 2} <= set(full.holders(block.id)) for block in blocks if block.layer < 2)
    # A layer that comes from another stage: its owner and one more, though three shall hold it.
    layout = whole([3, 3])
    stages = (
        Stage(start=0, stop=1, workers=(0, 1, 2), num_followers=WHOLE_STAGE),
        Stage(start=1, stop=4, workers=(3, 4, 5), num_followers=WHOLE_STAGE),
    )
    moved = msgspec.structs.replace(layout, stages=stages)
    target = target_placement(
        moved, blocks_of(layout), place_blocks(layout, blocks_of(layout), scatter_width=2), scatter_width=2
    )
    assert {len(target.holders(block.id)) for block in blocks_of(layout) if block.layer == 1} == {2}


def test_where_fewer_are_asked_for_the_others_are_given_back():
    layout = whole([4, 2], hosts="aabbab")
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=2)
    fewer = layout.with_followers(1, WHOLE_STAGE)
    kept = without_surplus(placement, blocks, fewer)
    hosts = dict(layout.domains)
    for block in blocks:
        owner, *followers = kept.holders(block.id)
        if block.layer < 2:
            (follower,) = followers
            assert follower in placement.followers[block.id] and hosts[follower] != hosts[owner]
        else:
            assert kept.holders(block.id) == placement.holders(block.id)
    assert without_surplus(kept, blocks, layout) == kept


def test_a_unit_of_two_stages_is_held_by_both():
    layout = whole([2, 2], shared=((0, 3),))
    blocks = blocks_of(layout)
    placement = place_blocks(layout, blocks, scatter_width=2)
    assert holders_by_layer(placement, blocks)[4] == {frozenset({0, 1, 2, 3})}
    # It counts for a stage that asks for fewer too.
    mixed = layout.with_followers(WHOLE_STAGE, 1)
    placement = place_blocks(mixed, blocks, scatter_width=2)
    assert holders_by_layer(placement, blocks)[4] == {frozenset({0, 1, 2, 3})}


def test_the_number_goes_with_the_layers():
    layout = whole([2, 2, 1]).with_followers(WHOLE_STAGE, 0, 2)
    assert [stage.num_followers for stage in survivor_layout(layout, {4}).stages] == [WHOLE_STAGE, 0]
    assert [stage.num_followers for stage in survivor_layout(layout, {0, 1}).stages] == [0, 2]
    idle = msgspec.structs.replace(layout, idle=(7, 8))
    assert survivor_layout(idle, {0, 1, 2, 3, 4}).stages == (
        Stage(start=0, stop=6, workers=(7, 8), num_followers=WHOLE_STAGE),
    )
    other = make_layout(widths=[1, 1], layers_per_stage=[3, 3], num_microbatches=1)
    assert [stage.num_followers for stage in other.with_followers_of(layout).stages] == [WHOLE_STAGE, 2]
    with pytest.raises(ValueError, match="argument"):
        layout.with_followers(1, 2)


def test_any_followers_of_before_stay_and_nothing_is_copied_in_vain():
    layout = whole([3])
    blocks = blocks_of(layout, 3)
    before = Placement.of([0] * 6, [(2, 1)] * 6)
    target = target_placement(layout, blocks, before, scatter_width=2)
    assert all(set(target.holders(block.id)) == {0, 1, 2} for block in blocks)
    assert choose_followers(target, blocks, layout, max_elements=1, scatter_width=2) is target
