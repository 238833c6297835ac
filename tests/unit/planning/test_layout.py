"""Layouts: widths from what a person asks for, layers dealt to stages, routes, and who talks to whom."""

import itertools
import re

import pytest

from elaswave.blocks.placement import Placement, make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.errors import ConfigError
from elaswave.planning.costs.schedules import in_flight_bounds
from elaswave.planning.programs.layout import (
    layout_problems,
    make_layout,
    partition_layers,
    peers_of,
    resolve_widths,
    validate_layout,
)
from elaswave.types import Hop, Layout, Stage


@pytest.mark.parametrize(
    ("stages", "replicas", "widths", "workers", "expected"),
    [
        (None, None, None, None, (2, 2)),
        (None, None, None, 1, (1,)),
        (None, None, None, 2, (1, 1)),
        (None, None, None, 3, (3,)),
        (None, None, None, 8, (4, 4)),
        (4, 1, None, None, (1, 1, 1, 1)),
        (2, 3, None, 6, (3, 3)),
        (None, None, [1, 3], None, (1, 3)),
        (None, None, [2, 1, 2], 5, (2, 1, 2)),
        (3, None, None, None, (2, 2, 2)),
        (None, 3, None, None, (3, 3)),
        (3, None, None, 6, (2, 2, 2)),
        (None, 3, None, 3, (3,)),
    ],
)
def test_widths_follow_from_what_is_given(stages, replicas, widths, workers, expected):
    assert resolve_widths(stages, replicas, widths, workers) == expected


@pytest.mark.parametrize(
    ("stages", "replicas", "widths", "workers", "messages"),
    [
        (2, None, [1, 3], None, ["layout.stages: 2 is given beside layout.widths = [1, 3]"]),
        (2, 2, [1, 3], None, ["layout.stages", "layout.replicas"]),
        (0, -1, None, 0, ["layout.stages: 0", "layout.replicas: -1", "--workers: 0"]),
        (None, None, [], None, ["layout.widths: is empty"]),
        (None, None, [1, 0, -2], None, ["stage 1 has width 0", "stage 2 has width -2"]),
        (2, 2, None, 5, ["--workers: 5 is given, but 2 stages x 2 replicas needs 4"]),
        (None, None, [1, 3], 3, ["--workers: 3 is given, but layout.widths = [1, 3] needs 4"]),
        (3, None, None, 4, ["4 workers cannot be split by layout.stages = 3"]),
        (None, 3, None, 4, ["4 workers cannot be split by layout.replicas = 3"]),
    ],
)
def test_contradicting_widths_are_refused_with_every_problem(stages, replicas, widths, workers, messages):
    with pytest.raises(ConfigError) as caught:
        resolve_widths(stages, replicas, widths, workers)
    assert len(caught.value.problems) == len(messages)
    for problem, message in zip(caught.value.problems, messages):
        assert message in problem


def test_worker_ids_are_stage_major_and_routes_take_turns():
    layout = make_layout(widths=[1, 3], layers_per_stage=[3, 5], num_microbatches=5)
    assert layout.stages == (Stage(start=0, stop=3, workers=(0,)), Stage(start=3, stop=8, workers=(1, 2, 3)))
    assert [[hop.worker for hop in route] for route in layout.routes] == [[0, 1], [0, 2], [0, 3], [0, 1], [0, 2]]
    assert layout.routes[4] == (Hop(0, 0, 0, 3), Hop(2, 1, 3, 8))
    assert layout.num_layers == 8
    assert layout.describe() == "[1,3]"
    assert make_layout(widths=[2, 2], layers_per_stage=[3, 3], num_microbatches=8).describe() == "2x2"
    validate_layout(layout)


def test_an_impossible_layout_lists_every_problem():
    problems = layout_problems([5, 1, 1], num_layers=2, num_microbatches=4, layers_per_stage=[2, 0])
    assert [problem.split(":")[0] for problem in problems] == ["layout", "layout", "layout.layers", "layout.layers"]
    assert "width 5 is wider than batch.num_microbatches = 4" in problems[0]
    assert "3 stages for a model of 2 layers" in problems[1]
    assert "[2, 0] is for 2 stages, but there are 3" in problems[2]
    assert "leaves a stage without layers" in problems[3]
    assert "adds up to 3, but the model has 8" in layout_problems(
        [1, 1], num_layers=8, num_microbatches=1, layers_per_stage=[1, 2]
    )[0]  # fmt: skip
    assert layout_problems([1], num_layers=1, num_microbatches=0) == ["batch.num_microbatches: 0 is below 1"]
    assert layout_problems([2, 2], num_layers=6, num_microbatches=2) == []
    with pytest.raises(ConfigError, match="is wider than"):
        make_layout(widths=[3], layers_per_stage=[2], num_microbatches=2)


@pytest.mark.parametrize(
    ("costs", "widths", "expected"),
    [
        ([1] * 6, [1, 1], (3, 3)),
        ([1] * 7, [1, 1], (3, 4)),
        ([0.1] * 7, [1, 1, 1], (2, 2, 3)),
        ([1] * 8, [1, 3], (2, 6)),
        ([1] * 10, [2, 1, 2], (4, 2, 4)),
        ([10, 1, 1, 1, 1, 1], [1, 1, 1], (1, 2, 3)),
        ([1, 1, 1, 10], [1, 1], (3, 1)),
        ([0, 0, 0], [1, 1, 1], (1, 1, 1)),
        ([5], [4], (1,)),
    ],
)
def test_layers_are_dealt_so_that_the_slowest_stage_is_fastest(costs, widths, expected):
    assert partition_layers(costs, widths) == expected


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_split_is_the_best_of_all_splits(num_stages):
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    for widths in itertools.product([1, 2, 3], repeat=num_stages):

        def key(split, widths=widths):
            edges = [0, *itertools.accumulate(split)]
            loads = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
            factors = [6 // width for width in widths]
            times = [load * factor for load, factor in zip(loads, factors)]
            return max(times), sum(load * time for load, time in zip(loads, times)), split

        splits = (s for s in itertools.product(range(1, 9), repeat=num_stages) if sum(s) == len(costs))
        assert partition_layers(costs, widths) == min(splits, key=key)


@pytest.mark.parametrize(
    ("costs", "widths", "message"),
    [
        ([1.0], [1, 1], "cannot split 1 layers into 2 stages"),
        ([1.0], [], "cannot split 1 layers into 0 stages"),
        ([1.0, 1.0], [1, 0], "each must be at least 1"),
        ([1.0, -1.0], [1, 1], "each must be finite and at least 0"),
        ([1.0, float("nan")], [1, 1], "each must be finite"),
        ([1.0, float("inf")], [1, 1], "each must be finite"),
    ],
)
def test_an_impossible_split_is_refused(costs, widths, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        partition_layers(costs, widths)


def shared_layout() -> Layout:
    """Two stages that share layer 2: micro-batch 0 runs it on stage 0, micro-batch 1 on stage 1."""
    return Layout(
        stages=(Stage(start=0, stop=3, workers=(0,)), Stage(start=2, stop=5, workers=(3, 7))),
        routes=((Hop(0, 0, 0, 3), Hop(3, 1, 3, 5)), (Hop(0, 0, 0, 2), Hop(7, 1, 2, 5))),
    )


def test_neighbouring_stages_may_share_a_layer():
    validate_layout(shared_layout())


def test_pipelines_of_different_depth_fit_into_one_layout():
    stages = ((0, 2), (0, 3), (2, 4), (3, 6), (4, 6))
    layout = Layout(
        stages=tuple(Stage(start=a, stop=b, workers=(index,)) for index, (a, b) in enumerate(stages)),
        routes=((Hop(1, 1, 0, 3), Hop(3, 3, 3, 6)), (Hop(0, 0, 0, 2), Hop(2, 2, 2, 4), Hop(4, 4, 4, 6))),
    )
    validate_layout(layout)
    assert peers_of(layout)[0] == {1, 2}  # shares its layers with one, hands on to the other
    assert in_flight_bounds(layout, "1f1b") == dict.fromkeys(range(5), 1)
    many = Layout(stages=layout.stages, routes=layout.routes * 4)
    assert in_flight_bounds(many, "1f1b") == {0: 3, 1: 2, 2: 2, 3: 1, 4: 1}
    assert in_flight_bounds(many, "zero-bubble") == {0: 3, 1: 2, 2: 3, 3: 2, 4: 3}
    assert in_flight_bounds(many, "zero-bubble-h2") == dict.fromkeys(range(5), 4)  # no worker is given more


STAGES = (Stage(start=0, stop=2, workers=(0,)), Stage(start=2, stop=4, workers=(1, 2)))
ROUTE = (Hop(0, 0, 0, 2), Hop(1, 1, 2, 4))


@pytest.mark.parametrize(
    ("stages", "routes", "message"),
    [
        ((), (), "there is no stage"),
        (STAGES, (), "there is no route"),
        ((Stage(start=1, stop=2, workers=(0,)),), ((Hop(0, 0, 1, 2),),), "the first stage begins at layer 1"),
        ((Stage(start=0, stop=2, workers=()),), (ROUTE[:1],), "stage 0 has no workers"),
        ((Stage(start=0, stop=0, workers=(0,)),), (ROUTE[:1],), "stage 0 has no layers"),
        ((Stage(start=0, stop=2, workers=(1, 0)),), (ROUTE[:1],), "they must ascend"),
        (
            (STAGES[0], Stage(start=3, stop=4, workers=(1,))),
            (ROUTE,),
            "no stage holds layers [2, 3), between stages 0",
        ),
        ((STAGES[0], Stage(start=0, stop=1, workers=(1,))), (ROUTE,), "do not come after those of stage 0, [0, 2)"),
        ((STAGES[1], Stage(start=0, stop=4, workers=(0,))), (ROUTE,), "do not come after those of stage 0, [2, 4)"),
        ((STAGES[0], Stage(start=2, stop=4, workers=(0, 1))), (ROUTE,), "worker 0 is in more than one stage"),
        (STAGES, ((),), "does not begin at layer 0"),
        (STAGES, (ROUTE[:1],), "end at layer 4"),
        (STAGES, ((Hop(0, 0, 0, 1), Hop(1, 1, 2, 4)),), "layer 1 follows, but the hop to worker 1 begins at layer 2"),
        (STAGES, ((ROUTE[0], Hop(1, 0, 2, 4)),), "stage 0 does not come after stage 0"),
        (STAGES, ((ROUTE[0], Hop(1, 5, 2, 4)),), "stage 5 is not one of the 2 stages"),
        (STAGES, ((ROUTE[0], Hop(0, 1, 2, 4)),), "worker 0 is not in stage 1"),
        (STAGES, ((Hop(0, 0, 0, 3), Hop(1, 1, 3, 4)),), "stage 0 holds layers [0, 2), but is asked to run [0, 3)"),
    ],
)
def test_a_malformed_layout_is_refused(stages, routes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_layout(Layout(stages=stages, routes=routes))


def test_peers_by_routes_and_stages():
    layout = make_layout(widths=[1, 3], layers_per_stage=[1, 1], num_microbatches=4)
    assert peers_of(layout) == {0: {1, 2, 3}, 1: {0, 2, 3}, 2: {0, 1, 3}, 3: {0, 1, 2}}
    layout = make_layout(widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=4)
    assert peers_of(layout) == {0: {1, 2}, 1: {0, 3}, 2: {0, 3}, 3: {1, 2}}
    assert peers_of(shared_layout()) == {0: {3, 7}, 3: {0, 7}, 7: {0, 3}}
    assert peers_of(make_layout(widths=[1], layers_per_stage=[1], num_microbatches=1)) == {0: set()}


def test_peers_by_placement_join_owners_with_stage_members_and_followers():
    layout = make_layout(widths=[1, 1, 1], layers_per_stage=[1, 1, 1], num_microbatches=1)
    blocks = make_blocks([1, 1, 1], 1)
    assert peers_of(layout, Placement.of((0, 1, 2), ((), (), ())), blocks) == {0: {1}, 1: {0, 2}, 2: {1}}
    assert peers_of(layout, Placement.of((0, 1, 2), ((2,), (), ())), blocks) == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    layout = make_layout(widths=[3], layers_per_stage=[1], num_microbatches=3)
    # One owner alone: the other two exchange nothing with each other.
    assert peers_of(layout, Placement.of((1,), ((),)), make_blocks([1], 1)) == {0: {1}, 1: {0, 2}, 2: {1}}
    layout = make_layout(widths=[2, 2], layers_per_stage=[1, 1], num_microbatches=4)
    blocks = make_blocks([8, 8], 1)
    assert peers_of(
        layout, place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY), blocks
    ) == peers_of(layout)


@pytest.mark.parametrize(
    ("idle", "message"),
    [((5, 3), "the idle workers are listed as (5, 3)"), ((2, 7), "worker 2 is idle and in a stage")],
)
def test_impossible_idle_members_are_refused(idle, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_layout(Layout(stages=STAGES, routes=(ROUTE,), idle=idle))


def test_idle_members_have_the_peers_that_their_blocks_give_them():
    layout = Layout(stages=STAGES, routes=(ROUTE,), idle=(7, 8))
    validate_layout(layout)
    placement = Placement.of((0, 7), ((), (2,)))
    assert peers_of(layout, placement, make_blocks([1, 0, 1], 1)) == {0: {1}, 1: {0, 7}, 2: {7}, 7: {1, 2}, 8: set()}
