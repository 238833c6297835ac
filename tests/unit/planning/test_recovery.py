"""Recovery plans by example: survivors stay, copies are promoted where they are, new ones are spread."""

import re
from collections import Counter

import pytest
from msgspec.structs import replace
from tests.unit.planning_cases import moved_layers

from elaswave.blocks.placement import Block, FollowerChooser, Placement, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.planning.programs.layout import make_layout, peers_of, validate_layout
from elaswave.planning.search.recovery import (
    choose_followers,
    promote,
    survivor_layout,
)
from elaswave.types import Hop, Layout, Stage


def layout_of(widths, layers_per_stage=None, num_microbatches=None):
    layers_per_stage = layers_per_stage or [1] * len(widths)
    num_microbatches = num_microbatches or max(widths)
    return make_layout(widths=widths, layers_per_stage=layers_per_stage, num_microbatches=num_microbatches)


def workers_of_routes(layout):
    return ["".join(str(hop.worker) for hop in route) for route in layout.routes]


def ranges(layout):
    return [(stage.start, stage.stop) for stage in layout.stages]


def all_but(*lost):
    return lambda block, worker: worker not in lost


def test_microbatches_of_the_lost_worker_go_to_its_stage_in_turn():
    new = survivor_layout(layout_of([3, 3], num_microbatches=9), {1})
    assert new.stages == (Stage(start=0, stop=1, workers=(0, 2)), Stage(start=1, stop=2, workers=(3, 4, 5)))
    #                                 1 -> 0              1 -> 2              1 -> 0
    assert workers_of_routes(new) == ["03", "04", "25", "03", "24", "25", "03", "04", "25"]


def test_the_least_loaded_survivor_is_served_first():
    stage = Stage(start=0, stop=1, workers=(4, 7, 9))
    routes = tuple((Hop(worker, 0, 0, 1),) for worker in (4, 4, 4, 7, 9, 9, 9, 9))
    new = survivor_layout(Layout(stages=(stage,), routes=routes), [9])
    assert workers_of_routes(new) == ["4", "4", "4", "7", "7", "7", "4", "7"]


def test_losing_nobody_or_strangers_changes_nothing():
    layout = layout_of([2, 2], [2, 3])
    assert survivor_layout(layout, ()) == survivor_layout(layout, {17}) == layout


def test_a_dissolved_stage_is_cut_where_the_neighbours_finish_together():
    layout = layout_of([1, 2, 3], [2, 4, 3], 6)
    new = survivor_layout(layout, {1, 2})
    assert ranges(new) == [(0, 2), (2, 9)]  # 2 layers on 1 worker, 7 on 3
    assert workers_of_routes(new) == ["03", "04", "05", "03", "04", "05"]
    assert moved_layers(layout, new) == {3: [2, 3, 4, 5], 4: [2, 3, 4, 5], 5: [2, 3, 4, 5]}
    assert [stage.workers for stage in new.stages] == [(0,), (3, 4, 5)]


@pytest.mark.parametrize(
    ("costs", "cut"),
    [
        ([1, 1, 1, 1, 1, 1], 3),
        ([1, 1, 9, 1, 1, 1], 3),
        ([1, 1, 1, 1, 5, 5], 4),
        ([5, 5, 1, 1, 1, 1], 2),
        ([0.25, 0, 0, 0, 0, 0.25], 2),  # equally good, and equally many moved: earliest cut
    ],
)
def test_the_cut_follows_the_costs_of_the_layers(costs, cut):
    new = survivor_layout(layout_of([1, 1, 1], [2, 2, 2]), {1}, costs)
    assert ranges(new) == [(0, cut), (cut, 6)]


def test_equal_cuts_move_fewer_copies_of_layers():
    layout = layout_of([2, 1, 1], [1, 1, 1], 2)
    assert ranges(survivor_layout(layout, {2}, [1, 0, 1])) == [(0, 1), (1, 3)]  # one worker takes it, not two


def test_stages_at_both_ends_may_go():
    layout = layout_of([1, 1, 1], [1, 2, 3], 2)
    new = survivor_layout(layout, {0, 2})
    assert new == Layout(
        stages=(Stage(start=0, stop=6, workers=(1,)),), routes=((Hop(1, 0, 0, 6),), (Hop(1, 0, 0, 6),))
    )


def test_boundaries_between_other_stages_stay():
    layout = layout_of([1, 1, 1, 1, 1], [1, 9, 1, 1, 3])
    assert ranges(survivor_layout(layout, {3})) == [(0, 1), (1, 10), (10, 12), (12, 15)]


def test_two_gaps_beside_one_stage_are_cut_together():
    layout = layout_of([1, 1, 1, 1, 1], [3, 2, 1, 2, 3])
    # Stages of 3, 1 and 3 layers and two gaps of 2: 4 is the best slowest time, and it can be had only if the stage
    # in the middle takes from both sides; of those cuts the earliest ones.
    assert ranges(survivor_layout(layout, {1, 3})) == [(0, 3), (3, 7), (7, 11)]


def test_routes_over_a_shared_layer_stay_cut_where_they_are():
    stages = (
        Stage(start=0, stop=3, workers=(0, 1)),
        Stage(start=2, stop=5, workers=(2,)),
        Stage(start=4, stop=6, workers=(3,)),
    )
    routes = (
        (Hop(0, 0, 0, 3), Hop(2, 1, 3, 4), Hop(3, 2, 4, 6)),
        (Hop(1, 0, 0, 2), Hop(2, 1, 2, 5), Hop(3, 2, 5, 6)),
    )
    layout = Layout(stages=stages, routes=routes)
    one_lost = survivor_layout(layout, {1})
    assert one_lost.routes[0] == routes[0]
    assert one_lost.routes[1] == (Hop(0, 0, 0, 2), *routes[1][1:])
    dissolved = survivor_layout(layout, {2}, [1, 1, 1, 5, 1, 1])
    assert ranges(dissolved) == [(0, 4), (4, 6)]
    assert dissolved.routes == (
        (Hop(0, 0, 0, 4), Hop(3, 1, 4, 6)),
        (Hop(1, 0, 0, 4), Hop(3, 1, 4, 6)),
    )


def test_a_route_that_skipped_a_stage_gets_one_of_its_workers_when_it_must_pass():
    stages = (
        Stage(start=0, stop=2, workers=(0,)),
        Stage(start=1, stop=3, workers=(1, 2)),
        Stage(start=2, stop=5, workers=(3,)),
    )
    routes = ((Hop(0, 0, 0, 1), Hop(1, 1, 1, 3), Hop(3, 2, 3, 5)), (Hop(0, 0, 0, 2), Hop(3, 2, 2, 5)))
    new = survivor_layout(Layout(stages=stages, routes=routes), {3})
    assert ranges(new) == [(0, 2), (1, 5)]
    assert new.routes == ((Hop(0, 0, 0, 1), Hop(1, 1, 1, 5)), (Hop(0, 0, 0, 2), Hop(2, 1, 2, 5)))


@pytest.mark.parametrize(
    ("lost", "costs", "message"),
    [
        ({0, 1, 2, 3}, None, "all workers of the layout are lost (0, 1, 2, 3): no worker can go on"),
        ({0}, [1.0], "1 layer costs are given for 2 layers"),
        ({0, 1}, [1.0, -1.0], "each must be finite and at least 0"),
    ],
)
def test_impossible_losses_are_refused(lost, costs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        survivor_layout(layout_of([2, 2]), lost, costs)


def test_followers_are_promoted_where_they_are():
    layout = layout_of([4], num_microbatches=4)
    blocks = make_blocks([120], 10)
    placement = place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY)
    promotion = promote(placement, blocks, survivor_layout(layout, {1}), all_but(1))
    assert promotion.promoted == tuple(block.id for block in blocks if placement.owner[block.id] == 1)
    assert promotion.orphans == ()
    assert Counter(promotion.placement.owner) == {0: 4, 2: 4, 3: 4}
    for block in promotion.promoted:
        assert promotion.placement.owner[block] == placement.followers[block][0]
        assert promotion.placement.followers[block] == ()


def test_a_worker_of_the_stage_is_promoted_before_others():
    layout = layout_of([2, 2])
    placement = Placement.of((0, 3, 0, 1), ((2, 1), (), (3, 2), ()))
    blocks = (Block(0, 0, 0, 10), Block(1, 1, 0, 10), Block(2, 0, 10, 20), Block(3, 0, 20, 30))
    promotion = promote(placement, blocks, layout, all_but(0))
    # For block 0: 2 owns less than 1, but 1 is of the stage. For block 2: 3 owns more than 2.
    assert promotion.placement == Placement.of((1, 3, 2, 1), ((2,), (), (3,), ()))
    assert promotion.promoted == (0, 2)


def test_elements_decide_before_ids():
    layout = layout_of([4], num_microbatches=4)
    blocks = (Block(0, 0, 0, 5), Block(1, 0, 5, 9), Block(2, 0, 9, 10), Block(3, 0, 10, 12))
    placement = Placement.of((1, 2, 0, 0), ((), (), (1, 2), (1, 2, 3)))
    promotion = promote(placement, blocks, layout, all_but(0))
    assert promotion.placement == Placement.of((1, 2, 2, 3), ((), (), (1,), (1, 2)))


def test_promotions_count_as_load_of_the_next_ones():
    blocks = make_blocks([40], 10)
    placement = Placement.of((0,) * 4, ((1, 2),) * 4)
    promotion = promote(placement, blocks, layout_of([3], num_microbatches=3), all_but(0))
    assert promotion.placement.owner == (1, 2, 1, 2)


def test_stale_copies_count_as_lost():
    layout = layout_of([3], num_microbatches=3)
    blocks = make_blocks([30], 10)
    placement = Placement.of((0, 1, 2), ((1, 2), (2,), (0, 1)))
    promotion = promote(
        placement, blocks, layout, lambda block, worker: (block, worker) not in {(0, 0), (0, 1), (2, 1)}
    )
    assert promotion.placement == Placement.of((2, 1, 2), ((), (2,), (0,)))
    assert promotion.promoted == (0,)


def test_blocks_without_a_copy_are_named():
    layout = layout_of([2, 1], num_microbatches=2)
    blocks = make_blocks([20, 20], 10)
    placement = Placement.of((0, 1, 2, 2), ((1,), (0,), (0,), ()))
    promotion = promote(placement, blocks, survivor_layout(layout, {2}), all_but(2))
    assert promotion.orphans == (3,)
    assert promotion.promoted == (2,)
    assert promotion.placement == Placement.of((0, 1, 0, 2), ((1,), (0,), (), ()))


def test_new_followers_are_spread_within_the_stage():
    layout = survivor_layout(layout_of([4], num_microbatches=4), {1})
    blocks = make_blocks([120], 10)
    before = promote(
        place_blocks(layout_of([4]).with_followers(1), blocks, scatter_width=EVERYBODY), blocks, layout, all_but(1)
    ).placement
    assert sum(not followers for followers in before.followers) == 6
    after = choose_followers(before, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=1000)
    assert all(len(followers) == 1 for followers in after.followers)
    held = Counter(worker for block in blocks for worker in after.holders(block.id))
    assert held == {0: 8, 2: 8, 3: 8}
    assert (
        choose_followers(after, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=1000) == after
    )


def test_a_round_keeps_within_what_a_worker_may_send_and_receive():
    layout = layout_of([1, 1, 1])
    blocks = make_blocks([40, 40, 40], 10)
    bare = Placement.of((0,) * 4 + (1,) * 4 + (2,) * 4, ((),) * 12)
    rounds = []
    placement = bare
    for _ in range(2):
        following = choose_followers(
            placement, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=20
        )
        rounds.append([block for block in range(12) if following.followers[block] != placement.followers[block]])
        placement = following
    assert rounds == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert placement.followers == place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY).followers


def test_a_block_larger_than_the_limit_goes_alone():
    layout = layout_of([2], num_microbatches=2)
    blocks = make_blocks([30], 10)
    placement = Placement.of((0, 1, 0), ((),) * 3)
    for following in (((1,), (), ()), ((1,), (0,), ()), ((1,), (0,), (1,))):
        placement = choose_followers(
            placement, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=1
        )
        assert placement.followers == following


def test_blocks_without_any_copy_come_first():
    layout = layout_of([3], num_microbatches=3)
    blocks = make_blocks([20], 10)
    placement = choose_followers(
        Placement.of((0, 0), ((1,), ())), blocks, layout.with_followers(2), scatter_width=EVERYBODY, max_elements=10
    )
    assert placement.followers == ((1,), (2,))


def test_the_second_copy_lives_outside_unless_the_stage_has_none():
    layout = layout_of([2, 1], num_microbatches=2)
    blocks = make_blocks([30, 10], 10)
    placement = Placement.of((0, 0, 2, 2), ((1,), (2,), (), ()))
    following = choose_followers(
        placement, blocks, layout.with_followers(2), scatter_width=EVERYBODY, max_elements=1000
    )
    assert following.followers[:2] == ((1, 2), (2, 1))
    assert following.followers[2][0] in (0, 1)  # its owner is outside: a copy in the stage is wanted


def test_other_hosts_are_preferred():
    layout = layout_of([4], num_microbatches=4)
    blocks = make_blocks([40], 10)
    placement = place_blocks(layout.with_followers(0), blocks, scatter_width=EVERYBODY)
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    layout = replace(layout, domains=tuple(hosts.items()))
    following = choose_followers(
        placement, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=1000
    )
    assert all(
        hosts[owner] != hosts[follower] for owner, (follower,) in zip(following.owner, following.followers, strict=True)
    )


def test_a_lone_worker_can_have_no_followers():
    layout = layout_of([1])
    blocks = make_blocks([20], 10)
    placement = Placement.of((0, 0), ((), ()))
    assert (
        choose_followers(placement, blocks, layout.with_followers(2), scatter_width=EVERYBODY, max_elements=1)
        == placement
    )


def test_impossible_placements_are_refused():
    layout = layout_of([2], num_microbatches=2)
    message = "block 1 is held by workers 5, 1, but the layout has only 0, 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_followers(
            Placement.of((0, 5), ((1,), (1,))),
            make_blocks([20], 10),
            layout.with_followers(2),
            scatter_width=EVERYBODY,
            max_elements=1,
        )


def test_a_worker_that_is_new_runs_all_its_layers_anew():
    old = layout_of([1, 1], [2, 2])
    new = Layout(
        stages=(Stage(start=0, stop=3, workers=(0,)), Stage(start=3, stop=4, workers=(1, 8))),
        routes=((Hop(0, 0, 0, 3), Hop(1, 1, 3, 4)),),
    )
    assert moved_layers(old, new) == {0: [2], 8: [3]}
    assert moved_layers(old, old) == {}


def test_the_survivors_need_no_link_to_the_lost():
    layout = layout_of([2, 2], num_microbatches=4)
    blocks = make_blocks([20, 20], 5)
    new = survivor_layout(layout, {2})
    placement = promote(
        place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY), blocks, new, all_but(2)
    ).placement
    assert set(peers_of(new, placement, blocks)) == {0, 1, 3}
    assert all(2 not in peers for peers in peers_of(new, placement, blocks).values())


# ------------------------------------------------------------------------------------------------------- idle members


def with_idle(layout, *idle):
    return replace(layout, idle=idle)


def test_idle_survivors_stay_idle():
    layout = with_idle(layout_of([2, 2], num_microbatches=4), 4, 9)
    new = survivor_layout(layout, {0, 4})
    assert (new.idle, new.active) == ((9,), (1, 2, 3))
    assert workers_of_routes(new) == ["12", "13", "12", "13"]
    assert survivor_layout(layout, {2, 3}).idle == (4, 9)  # a stage is dissolved rather than given to them


def test_idle_survivors_become_a_stage_where_nobody_else_is_left():
    layout = with_idle(layout_of([2, 1], [2, 3], 5), 4, 7, 9)
    new = survivor_layout(layout, {0, 1, 2, 7})
    validate_layout(new)
    assert new.stages == (Stage(start=0, stop=5, workers=(4, 9)),)
    assert (new.idle, workers_of_routes(new)) == ((), ["4", "9", "4", "9", "4"])


def test_the_loss_of_idle_members_too_leaves_nobody():
    with pytest.raises(ValueError, match="all workers of the layout are lost \\(0, 1, 5\\)"):
        survivor_layout(with_idle(layout_of([2]), 5), {0, 1, 5})


def test_idle_members_are_no_new_followers():
    layout = with_idle(layout_of([2], num_microbatches=2), 2)
    blocks = make_blocks([30], 10)
    placement = Placement.of((0, 0, 2), ((), (2,), ()))
    after = choose_followers(placement, blocks, layout.with_followers(1), scatter_width=EVERYBODY, max_elements=100)
    # What an idle member still holds counts, and it may be the owner from whom another one copies.
    assert after == Placement.of((0, 0, 2), ((1,), (2,), (1,)))
    after = choose_followers(placement, blocks, layout.with_followers(5), scatter_width=EVERYBODY, max_elements=100)
    assert after == Placement.of((0, 0, 2), ((1,), (2, 1), (1,)))
    # Nobody else could hold them: nothing is lacking.
    alone = with_idle(layout_of([1]), 2)
    placement = Placement.of((0, 2), ((), (0,)))
    assert (
        choose_followers(
            placement, make_blocks([20], 10), alone.with_followers(1), scatter_width=EVERYBODY, max_elements=1
        )
        == placement
    )


def test_copies_on_the_host_of_an_idle_worker_get_another_one():
    """Each active worker has a host for itself; an idle one, beside one of them, holds what a move has brought."""
    layout = with_idle(make_layout(widths=[1, 1], layers_per_stage=[1, 1], num_microbatches=2), 2)
    layout = replace(layout, domains=((0, "h0"), (1, "h1"), (2, "h1")))
    blocks = make_blocks([8, 8], 8)
    together = Placement.of((0, 1), ((1,), (2,)))
    after = choose_followers(together, blocks, layout.with_followers(1), max_elements=100, scatter_width=2)
    assert after == Placement.of((0, 1), ((1,), (2, 0)))


def test_blocks_with_the_same_holders_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has ten thousand blocks and some dozen kinds of holders; survivors and coordinator choose in a turn."""
    layout = make_layout(widths=[4, 4], layers_per_stage=[1, 1], num_microbatches=8)
    blocks = make_blocks([1000, 1000], 1)
    new = survivor_layout(layout, {1})
    before = promote(place_blocks(layout.with_followers(1), blocks, scatter_width=2), blocks, new, all_but(1)).placement
    counted: list[int] = []
    count = FollowerChooser.count

    def noted(self, members, holders, num_elements, num_blocks=1):
        counted.append(num_blocks)
        count(self, members, holders, num_elements, num_blocks)

    monkeypatch.setattr(FollowerChooser, "count", noted)
    choose_followers(before, blocks, new.with_followers(1), scatter_width=2, max_elements=10**9)
    assert sum(counted) == len(blocks)
    assert len(counted) == len({(block.layer, before.holders(block.id)) for block in blocks}) < 100
