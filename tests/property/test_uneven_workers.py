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
from elaswave.planning.programs import programs
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.programs.shared_layers import share_layers
from elaswave.planning.search.candidates import Options
from elaswave.planning.search.planner import plan
from elaswave.planning.search.shapes import Shape, build

FAR = Options(horizon_s=1e12)
"""Moving state pays."""
CLOSE = 1.005
SLOWER = (394, 554, 614, 636, 666, 674, 782, 1087, 1125, 1158, 1206, 2017, 2070)
"""Jobs of up to five workers whose plan is slower than that of the same job with a slower worker: layouts are chosen in
closed form (`docs/planning.md`)."""
SLOWER_MOST = 1.065


def planned_s(job: Job) -> float:
    try:
        return plan(*job, options=FAR).predicted_step_s
    except InfeasiblePlan:
        return float("inf")


def ratios_to_brute_force(seeds, most):
    """Seconds of plans over those of brute force; below 1 where layers are shared."""
    found = {}
    for seed in seeds:
        job = random_job(seed, most)
        ours = planned_s(job)  # first, so that brute force helps no plan by what it times
        best = best_step_s(job)
        found[seed] = 1.0 if ours == best else ours / best
    return found


@pytest.mark.parametrize("first", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_plans_are_nearly_the_best_there_are(first):
    found = ratios_to_brute_force(range(first, first + 5), 5)
    assert statistics.median(found.values()) <= 1 + 1e-9
    assert max(found.values()) <= 1.02, found


def test_few_micro_batches_do_not_need_even_stages():
    """Two micro-batches per pipeline or fewer, or a slow worker that would end with the others."""
    found = ratios_to_brute_force((20, 25), 9)
    assert max(found.values()) <= 1 + 1e-9, found


@pytest.mark.slow
def test_state_of_shared_layers_leaves_room_for_more_in_flight():
    """Memory is short, and every stage of four shares a layer or has no room for a second micro-batch in flight: cuts
    that do not know it are 12 % slower, and slower than those of the same job with a slower worker."""
    job = random_job(54, 9)
    found_s = planned_s(job)
    assert found_s == pytest.approx(151 / 9)
    assert found_s < 0.9 * best_step_s(job)
    assert found_s <= planned_s(slowing(job, 0, 0.6))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_plans_of_nine_workers_are_nearly_the_best_there_are(first):
    """Of up to nine workers: 32 of 200 jobs have nine. The closed form by which layouts are chosen misses a few: where
    micro-batches come round in an odd rhythm."""
    found = ratios_to_brute_force(range(first, first + 10), 9)
    assert statistics.median(found.values()) <= 1 + 1e-9
    assert {seed for seed, ratio in found.items() if ratio > 1.02} <= {153}, found
    assert max(found.values()) <= 1.06, found


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


def slower_with_more(job):
    """By how much a plan is slower than one of the same job without a worker, or with a slower one: at most."""
    whole_s = planned_s(job)
    speed_of = job.cluster.speed_of()
    workers = job.cluster.ids.tolist()
    worse = [slowing(job, worker, 0.6) for worker in workers if speed_of(worker) > 0.6]
    worse += [losing(job, worker) for worker in workers if len(workers) > 1]
    return whole_s / min(planned_s(each) for each in worse)


@pytest.mark.parametrize("seed", range(3))
def test_more_workers_and_faster_ones_never_make_a_plan_slower(seed):
    assert slower_with_more(random_job(seed + 200, 5)) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_more_workers_and_faster_ones_never_make_a_larger_plan_slower(seed):
    assert slower_with_more(random_job(seed, 9)) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("seed", (228, 683, 735, 791, 1088, 2063))
def test_nor_plans_that_once_were_slower_with_more(seed):
    assert slower_with_more(random_job(seed, 5)) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOWER)
def test_what_some_plans_lose_by_a_faster_worker_is_little(seed):
    assert slower_with_more(random_job(seed, 5)) <= SLOWER_MOST


@pytest.mark.parametrize("seed", (107, 151))
def test_a_plan_does_not_depend_on_what_was_planned_before(seed, monkeypatch):
    """Times of steps are remembered, and a plan that knows a step's time could go on from it though it is too long."""
    for name in ("_PROGRAMS", "_TIMES", "_AT_LEAST"):
        monkeypatch.setattr(programs, name, programs._Memo(8192))
    job = random_job(seed, 9)
    first = plan(*job, options=FAR)
    assert plan(*job, options=FAR).to_json() == first.to_json()


def test_only_one_kind_of_pipelines_may_have_stages_for_few_micro_batches():
    """Memory is short: with such stages in both kinds, workers hold too much."""
    assert planned_s(random_job(126, 9)) == pytest.approx(68 / 21)
