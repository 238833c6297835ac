"""Pipelines of several depths beside each other: each worker has a place, and few have to move."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.property.clusters import make_cluster, make_costs
from tests.unit.planning_cases import plan

from elaswave.planning.costs.machines import ClusterEvent
from elaswave.planning.costs.step_time.exact import durations_of, time_programs
from elaswave.planning.plan import Allocation, Chain, StageShare, levels_of
from elaswave.planning.policy.fault_free_policies import fault_free
from elaswave.planning.programs.layout import validate_layout
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import allocation_of, make_routes
from elaswave.planning.search.apportionment import apportion_pipelines
from elaswave.planning.search.candidates import Options
from elaswave.planning.search.pipelines import PipelineWorkers, mixed_pipelines, ranges_of
from elaswave.planning.search.templates import orders_of, template_beside, template_of_few


def mixes_after(cluster, costs, allocation, lost, *, most=16, leave_out=True):
    """All mixes of what is left of a job of one chain, with the workers that are left."""
    left = cluster.without(lost)
    stages = allocation.chains[0].stages
    members = [np.flatnonzero(np.isin(left.ids, stage.workers)) for stage in stages]
    held = np.zeros((left.num_workers, 2), dtype=np.int64)
    for stage, own in zip(stages, members, strict=True):
        held[own] = stage.start, stage.stop
    found = mixed_pipelines(
        left,
        costs,
        PipelineWorkers(
            usual=ranges_of(allocation.chains[0]),
            members=members,
            free=np.zeros(0, dtype=np.int64),
            held=held,
            levels=np.zeros(left.num_workers, dtype=np.int64),
        ),
        allocation.num_microbatches,
        "zero-bubble-h2",
        followers=1,
        most=most,
        leave_out=leave_out,
    )
    return left, found


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(1, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_every_worker_has_a_place_and_every_micro_batch_passes_every_layer(stages, replicas, more, number, data):
    costs = make_costs([1.0 + index % 3 for index in range(stages + more)])
    cluster = make_cluster([1.0] * (stages * replicas))
    lost = data.draw(st.sets(st.integers(0, cluster.num_workers - 1), max_size=cluster.num_workers - 1))
    allocation = fault_free(cluster, costs, stages, replicas, number)
    leave_out = data.draw(st.booleans())
    left, found = mixes_after(cluster, costs, allocation, sorted(lost), leave_out=leave_out)
    for each, name in found:
        each.check()
        assert each.num_microbatches == number
        if len(each.chains) == name.count(" x ") - 1 and not leave_out:  # else one depth is too slow to be given any
            assert each.workers.tolist() == left.ids.tolist()
        validate_layout(make_routes(each, costs, left))
        assert len({len(chain.stages) for chain in each.chains}) == len(each.chains)


def test_most_pipelines_go_on_as_they_are():
    """Of six pipelines one has lost a worker: the five others may stay, and do not move."""
    cluster, costs = make_cluster([1.0] * 18), make_costs([1.0] * 12)
    allocation = fault_free(cluster, costs, 3, 6, 24)
    left, found = mixes_after(cluster, costs, allocation, [7], leave_out=False)
    by_name = {name.partition(": ")[2]: each for each, name in found}
    kept = by_name["5 x 3, 1 x 2"].chains[0]
    for share, before in zip(kept.stages, allocation.chains[0].stages, strict=True):
        assert (share.start, share.stop) == (before.start, before.stop)
        assert set(share.workers.tolist()) <= set(before.workers.tolist())
    assert kept.num_microbatches in (20, 21, 22)


def test_depths_are_mixed_where_that_is_faster():
    """Two micro-batches per pipeline are few beside the way through four stages: two stages are better, and three."""
    cluster, costs = make_cluster([1.0] * 16), make_costs([3.0] * 20)
    before = fault_free(cluster, costs, 4, 4, 8)
    left, event = cluster.without([5]), ClusterEvent(kind="lost", workers=(5,))
    far: dict[str, Any] = {"horizon_s": 1e12, "schedules": ("1f1b",), "share_layers": False}
    found = plan(left, costs, before, event, options=Options(**far))
    without = plan(left, costs, before, event, options=Options(mix_depths=False, **far))
    assert found.reason.startswith("pipelines x workers of each: ")
    assert len(found.allocation.chains) > 1
    assert found.predicted_step_s < 0.98 * without.predicted_step_s
    assert found.predicted_step_s == time_within_memory(left, costs, found.allocation).step_s
    # and the next loss finds pipelines of several depths
    gone = int(found.allocation.chains[0].stages[0].workers[0])
    again = plan(left.without([gone]), costs, found.allocation, ClusterEvent(kind="lost", workers=(gone,)))
    assert again.allocation.num_microbatches == 8
    stays = plan(left, costs, before, event, options=Options(move_workers=False, **far))
    assert len(stays.allocation.chains) == 1


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_plan_does_not_depend_on_the_number_of_stages_of_before(num_stages):
    """Eight micro-batches and 19 workers: eight pipelines of two stages, one micro-batch each, and one of three."""
    cluster = make_cluster([1.0] * 24)
    costs = make_costs([1.0, 1.0, 2.0, 0.5, 1.0, 1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0])
    before = fault_free(cluster, costs, num_stages, 24 // num_stages, 8, "zero-bubble-h2")
    lost = ClusterEvent(kind="lost", workers=tuple(range(5)))
    found = plan(cluster.without(lost.workers), costs, before, lost, options=Options(horizon_s=1e12))
    assert found.predicted_step_s <= 11.5 * (1 + 1e-9), found.reason


def test_workers_may_go_into_fewer_stages():
    cluster = make_cluster([1.0] * 24)
    costs = make_costs([0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    before = fault_free(cluster, costs, 6, 4, 12, "zero-bubble-h2")
    lost = ClusterEvent(kind="lost", workers=(0, 1))
    left = cluster.without(lost.workers)
    found = plan(left, costs, before, lost, options=Options(horizon_s=1e12))
    assert found.reason.startswith("moving workers into 5 stages")
    same = plan(left, costs, before, lost, options=Options(horizon_s=1e12, move_workers=False))
    assert found.predicted_step_s < 0.98 * same.predicted_step_s


def test_slow_workers_share_a_pipeline_with_fewer_micro_batches():
    """Two of eight workers at half speed: one pipeline of two stages has both, and half as much to do."""
    cluster, costs = make_cluster([1.0] * 8), make_costs([1.0] * 8)
    allocation = fault_free(cluster, costs, 2, 4, 28)
    slow = replace(cluster, speed=np.array([1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]))
    found = {name.partition(": ")[2]: each for each, name in mixes_after(slow, costs, allocation, [], most=40)[1]}
    fast, others = found["4 x 2"].chains
    assert [share.workers.tolist() for share in others.stages] == [[1], [7]]
    assert (fast.num_microbatches, others.num_microbatches) == (24, 4)


@given(
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=2, max_size=6),
    st.lists(st.sampled_from([0.5, 0.7, 1.0]), min_size=1, max_size=3),
    st.sampled_from(["1f1b", "zero-bubble-h2"]),
)
@settings(max_examples=30, deadline=None)
def test_a_pipeline_of_a_single_micro_batch_has_the_best_stages_of_all(seconds, speeds, schedule):
    """Its stages need not be even: what counts is the way there and back, and which worker is first."""
    assume(len(speeds) <= len(seconds))
    costs = make_costs(seconds)
    found = template_of_few(costs, tuple(speeds), frozenset(), 1, split=schedule != "1f1b")

    def step_s(ranges, order):
        stages = tuple(
            StageShare(
                start=start, stop=stop, workers=np.array([worker]), num_microbatches=np.array([1]),
                levels=np.array([0]),
            )
            for worker, (start, stop) in enumerate(ranges)
        )  # fmt: skip
        chain = Chain(stages=stages, num_microbatches=1, cuts=tuple({start: 1} for start, _ in ranges[1:]))
        return time_within_memory(make_cluster(order), costs, Allocation(chains=(chain,), schedule=schedule)).step_s

    best = min(
        step_s(tuple(pairwise((0, *inner, len(seconds)))), order)
        for inner in combinations(range(1, len(seconds)), len(speeds) - 1)
        for order in permutations(speeds)
    )
    assert step_s(*found) <= best * (1 + 1e-9)


def test_the_orders_of_workers_that_differ_are_found_without_those_that_do_not():
    """Twelve workers, of whom one is slow, have 12 orders; their 479 million permutations take minutes."""
    for speeds in ((1.0,), (1.0, 1.0), (0.5, 1.0, 1.0), (1.0, 0.5, 0.7, 0.5, 1.0)):
        assert orders_of(speeds) == sorted(set(permutations(speeds)), reverse=True)
    assert len(orders_of((1.0,) * 11 + (0.6,))) == 12
    found = template_of_few(make_costs([1.0] * 13), (1.0,) * 11 + (0.6,), frozenset(), 1, split=True)
    assert found is not None and sorted(found.speeds) == [0.6] + [1.0] * 11


def test_stages_for_few_micro_batches_are_only_tried_in_small_pipelines():
    assert template_of_few(make_costs([1.0] * 40), (1.0,) * 8, frozenset(), 1, split=True) is None
    assert template_of_few(make_costs([1.0] * 3), (1.0,) * 4, frozenset(), 1, split=True) is None
    beside = template_of_few(make_costs([1.0] * 4), (1.0, 1.0), frozenset({(0, 2), (2, 4)}), 9, split=True)
    assert beside.ranges == ((0, 2), (2, 4))
    assert template_of_few(make_costs([1.0] * 4), (1.0,) * 2, frozenset({(1, 3)}), 9, split=True).ranges[0] != (0, 3)


def test_a_pipelines_layers_are_split_by_the_speeds_of_its_workers():
    costs = make_costs([1.0] * 6)
    found = template_beside(costs, (1.0, 0.5), frozenset())
    assert found == (((0, 4), (4, 6)), (1.0, 0.5))
    front_heavy = make_costs([4.0, 1.0, 1.0])
    assert template_beside(front_heavy, (1.0, 0.5), frozenset()) == (((0, 1), (1, 3)), (1.0, 0.5))


def test_pipelines_of_one_stage_are_one_chain():
    """A layout has one such stage, and its micro-batches go to all of its workers in turn: what was predicted chain by
    chain would be of another order."""
    cluster, costs = make_cluster([0.5, 0.5, 0.5, 0.5, 0.75]), make_costs([0.25] * 5)
    before = fault_free(cluster, costs, 5, 1, 5)
    left, event = cluster.without((0,)), ClusterEvent(kind="lost", workers=(0,))
    found = plan(left, costs, before, event, options=Options(share_layers=False), axes=frozenset({"graph"}))
    (chain,) = found.allocation.chains
    (stage,) = chain.stages
    assert stage.workers.tolist() == [1, 2, 3, 4] and stage.num_microbatches.tolist() == [1, 1, 1, 2]
    assert chain.num_microbatches == 5 and chain.cuts == ()
    layout = make_routes(found.allocation, costs, left)
    again = allocation_of(layout, found.allocation.schedule, levels_of(found.allocation))
    assert make_routes(again, costs, left) == layout
    programs = compile_programs(layout, found.allocation.schedule)
    durations = durations_of(costs.layer_s, left.speed_of())
    assert time_programs(layout, programs, durations).step_s == pytest.approx(found.predicted_step_s)


def test_single_stages_are_joined_beside_deeper_pipelines():
    cluster, costs = make_cluster([1.0, 0.5, 0.25, 1.0, 1.0]), make_costs([1.0] * 4)
    before = fault_free(make_cluster([1.0] * 5), costs, 1, 5, 20)
    _, found = mixes_after(cluster, costs, before, [], most=200)
    for allocation, _ in found:
        allocation.check()
        assert sum(len(chain.stages) == 1 for chain in allocation.chains) <= 1
    assert any(len(allocation.chains) > 1 for allocation, _ in found)


def test_workers_may_be_left_over():
    """Seven workers and four micro-batches: a rectangle of six, or pipelines of several depths."""
    cluster, costs = make_cluster([1.0] * 8), make_costs([1.0] * 8)
    allocation = fault_free(cluster, costs, 2, 4, 8)
    names = {name for _, name in mixes_after(cluster, costs, allocation, [0], most=40)[1]}
    assert "pipelines x workers of each: 3 x 2" in names
    slow = replace(cluster, speed=np.array([0.1, *[1.0] * 7]))
    for each, name in mixes_after(slow, costs, allocation, [7], most=40)[1]:
        if name.endswith(": 3 x 2"):
            assert 0 not in each.workers


def test_a_mix_that_does_not_fit_is_left_out():
    costs = make_costs([1.0] * 6, parameter_bytes=10.0)
    roomy, tight = (make_cluster([1.0] * 6, memory_bytes=size) for size in (1e9, 130.0))
    allocation = fault_free(roomy, costs, 3, 2, 4)
    names = [{name for _, name in mixes_after(each, costs, allocation, [0])[1]} for each in (roomy, tight)]
    assert any(" x 1" in name for name in names[0])
    assert names[1] < names[0] and not any(" x 1" in name for name in names[1])


def test_templates_run_beside_each_other():
    costs = make_costs([1.0] * 6)
    assert template_beside(costs, (1.0,) * 3, frozenset()).ranges == ((0, 2), (2, 4), (4, 6))
    assert template_beside(costs, (1.0,) * 6, frozenset({(0, 1), (1, 5), (5, 6)})) is None
    assert template_beside(costs, (1.0,) * 7, frozenset()) is None


@pytest.mark.parametrize(("number", "expected"), [(0, [0, 0]), (1, [1, 0]), (7, [6, 1])])
def test_micro_batches_are_dealt_to_the_pipelines_that_end_first(number, expected):
    assert apportion_pipelines(number, [3, 1], [(1.0, 1.0), (1.0, 1.5)]) == expected
