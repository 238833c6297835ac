"""Plans for workers of several speeds: against brute force, and never slower for having more workers or faster ones."""

import itertools
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from tests.property.brute_force import Job, best_step_s, losing, random_job, slowing

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.schedules import SCHEDULES
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.programs.shared_layers import share_layers
from elaswave.planning.search.candidates import Options
from elaswave.planning.search.planner import plan
from elaswave.planning.search.shapes import Shape, build

FAR = Options(horizon_s=1e12)
"""Moving state pays."""
WITHOUT_SEARCH = replace(FAR, local_search=False)
"""As a running job plans."""
CLOSE = 1.005
SLOWER_IN_CLOSED_FORM = (
    228, 394, 554, 614, 636, 666, 674, 683, 735, 782, 791, 1087, 1088, 1125, 1158, 1206, 2017, 2063, 2070
)  # fmt: skip
"""Jobs of up to five workers whose plan in closed form, or by a search from fewer layouts, or that does not reach as
far, is slower than that of the same job with a slower worker."""


def planned_s(job: Job, options: Options = FAR) -> float:
    try:
        return plan(*job, options=options).predicted_step_s
    except InfeasiblePlan:
        return float("inf")


def ratios_to_brute_force(seeds, most, *options):
    """Seconds of plans over those of brute force, for each of the options; below 1 where layers are shared."""
    found = [{} for _ in options]
    for seed in seeds:
        job = random_job(seed, most)
        ours = [planned_s(job, each) for each in options]  # first, so that brute force helps no plan by what it times
        best = best_step_s(job)
        for ratios, seconds in zip(found, ours):
            ratios[seed] = 1.0 if seconds == best else seconds / best
    return found


@pytest.mark.parametrize("first", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_plans_are_nearly_the_best_there_are(first):
    for found in ratios_to_brute_force(range(first, first + 5), 5, WITHOUT_SEARCH, FAR):
        assert statistics.median(found.values()) <= 1 + 1e-9
        assert max(found.values()) <= 1.02, found


def test_few_micro_batches_do_not_need_even_stages():
    """Two micro-batches per pipeline or fewer, or a slow worker that would end with the others."""
    for found in ratios_to_brute_force((20, 25), 9, WITHOUT_SEARCH, FAR):
        assert max(found.values()) <= 1 + 1e-9, found


@pytest.mark.slow
def test_state_of_shared_layers_leaves_room_for_more_in_flight():
    """Memory is short, and every stage of four shares a layer or has no room for a second micro-batch in flight: cuts
    that do not know it are 12 % slower, and slower than those of the same job with a slower worker."""
    job = random_job(54, 9)
    found = plan(*job, options=WITHOUT_SEARCH)
    assert found.predicted_step_s == pytest.approx(151 / 9)
    assert found.predicted_step_s < 0.9 * best_step_s(job)
    assert found.predicted_step_s <= planned_s(slowing(job, 0, 0.6), WITHOUT_SEARCH)
    assert planned_s(job) <= found.predicted_step_s
    assert planned_s(job) <= planned_s(slowing(job, 0, 0.6))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_plans_of_nine_workers_are_nearly_the_best_there_are(first):
    """Of up to nine workers: 32 of 200 jobs have nine. The closed form by which layouts are chosen misses a few: where
    micro-batches come round in an odd rhythm."""
    closed, found = ratios_to_brute_force(range(first, first + 10), 9, WITHOUT_SEARCH, FAR)
    assert statistics.median(closed.values()) <= 1 + 1e-9
    assert {seed for seed, ratio in closed.items() if ratio > 1.02} <= {153}, closed
    assert max(closed.values()) <= 1.06, closed
    assert statistics.median(found.values()) <= 1 + 1e-9
    assert max(found.values()) <= 1.02, found


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_shorter_than_what_it_is_known_to_take_at_least(seed):
    """Candidates are given up by a lower bound, before they have routes: it must never be above the exact time."""
    cluster, costs, before, _ = random_job(seed + 400, 9)
    rng = random.Random(seed)
    workers = rng.sample(range(cluster.num_workers), cluster.num_workers)
    depth = rng.randint(1, min(4, len(workers)))
    ends = sorted(rng.sample(range(1, len(workers)), depth - 1))
    members = tuple(np.sort(workers[start:stop]) for start, stop in itertools.pairwise((0, *ends, len(workers))))
    number = before.num_microbatches
    cuts = share_layers(costs.prefix["busy_s"], np.array([cluster.speed[own].sum() for own in members]), number)
    shape = Shape(members=members, cuts=cuts, num_microbatches=number, origin="")
    schedule = rng.choice(SCHEDULES)
    roomy = replace(cluster, memory_bytes=np.full(cluster.num_workers, 1e9))
    allocation = build(roomy, costs, shape, schedule, np.zeros(cluster.num_workers, dtype=np.int64))
    seconds = time_within_memory(roomy, costs, allocation).step_s
    assert time_within_memory(roomy, costs, allocation, within_s=seconds * (1 + 1e-6)).step_s == seconds
    assert time_within_memory(roomy, costs, allocation, within_s=seconds / 2).step_s == float("inf")


def check_that_more_is_never_slower(job, options=FAR):
    whole_s = planned_s(job, options)
    speed_of = job.cluster.speed_of()
    for worker in job.cluster.ids.tolist():
        if job.cluster.num_workers > 1:
            assert whole_s <= planned_s(losing(job, worker), options) * CLOSE, worker
        assert whole_s <= planned_s(slowing(job, worker, 0.6), options) * CLOSE or speed_of(worker) <= 0.6, worker


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        *(pytest.param(seed, WITHOUT_SEARCH, id=f"{seed}-without") for seed in range(3)),
        pytest.param(0, FAR, id="0-search"),
        *(pytest.param(seed, FAR, id=f"{seed}-search", marks=pytest.mark.slow) for seed in (1, 2)),
    ],
)
def test_more_workers_and_faster_ones_never_make_a_plan_slower(seed, options):
    check_that_more_is_never_slower(random_job(seed + 200, 5), options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOWER_IN_CLOSED_FORM)
def test_a_search_mends_plans_that_were_slower_with_more(seed):
    check_that_more_is_never_slower(random_job(seed, 5))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_more_workers_and_faster_ones_never_make_a_larger_plan_slower(seed):
    check_that_more_is_never_slower(random_job(seed, 9), WITHOUT_SEARCH)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_nor_a_larger_plan_by_a_search(seed):
    check_that_more_is_never_slower(random_job(seed, 9))


def test_shared_layers_dealt_by_speed_can_take_longer_with_a_faster_worker():
    """Worker 5 at 0.7 of the speed gets one micro-batch of two layers and one of one, at 0.6 none of two; others wait
    for that of two. Where it is spared, the step is as short as with the slower worker."""
    job = random_job(18, 9)
    whole = plan(*job, options=FAR)
    spared, by_speed = (replace(whole.allocation, spares_slow=each) for each in (True, False))
    assert whole.allocation.spares_slow
    assert whole.to_json()["spares_slow"]

    def layers_of(allocation, number):
        routes = make_routes(allocation, job.costs, job.cluster).routes
        return sorted(hop.stop - hop.start for route in routes for hop in route if hop.worker == number)

    assert layers_of(by_speed, 5) == [1, 2]
    assert layers_of(spared, 5) == [1, 1]
    slower_s = planned_s(slowing(job, 5, 0.6))
    assert time_within_memory(job.cluster, job.costs, spared).step_s == whole.predicted_step_s <= slower_s * CLOSE
    assert time_within_memory(job.cluster, job.costs, by_speed).step_s > slower_s * 1.05


def test_only_one_kind_of_pipelines_may_have_stages_for_few_micro_batches():
    """Memory is short: with such stages in both kinds, workers hold too much."""
    job = random_job(126, 9)
    assert planned_s(job, WITHOUT_SEARCH) == pytest.approx(68 / 21)
