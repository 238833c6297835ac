"""Single steps between allocations, and the search that takes them: what every neighbour keeps, and where it ends."""

import numpy as np
import pytest
from tests.property.brute_force import Job, random_job

from elaswave.errors import InfeasiblePlan
from elaswave.planning.plan import Allocation
from elaswave.planning.programs import programs
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.search import local_search
from elaswave.planning.search.candidates import Options
from elaswave.planning.search.local_search import LocalSearch
from elaswave.planning.search.neighbours import Neighbourhood
from elaswave.planning.search.planner import plan

SEEDS = (394, 554, 614, 636, 674, 1088)


def neighbourhood_of(job: Job, **options: bool) -> Neighbourhood:
    workers = job.cluster.ids.tolist()
    return Neighbourhood(
        costs=job.costs,
        speeds=dict(zip(workers, job.cluster.speed.tolist(), strict=True)),
        levels=dict.fromkeys(workers, 0),
        **options,
    )


def planned(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Allocation, float]:
    """Without a search."""
    with monkeypatch.context() as patch:
        patch.setattr(local_search, "STARTS", 0)
        found = plan(*job, options=Options(horizon_s=1e12))
    return found.allocation, found.predicted_step_s


def timed_s(job: Job, allocation: Allocation) -> float:
    try:
        return time_within_memory(job.cluster, job.costs, allocation).step_s
    except (InfeasiblePlan, ValueError):
        return float("inf")


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_are_allocations_and_take_no_less_than_their_bound(seed, monkeypatch):
    job = random_job(seed, 5)
    allocation, _ = planned(job, monkeypatch)
    steps = neighbourhood_of(job)
    search = LocalSearch(job.cluster, job.costs, steps, followers=1)
    others = list(steps.of(allocation))
    assert others
    for other in (other for near in others[:5] for other in (near, *steps.of(near))):
        other.check()
        assert other.num_microbatches == allocation.num_microbatches
        assert search.least_s(other) <= timed_s(job, other) * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_search_ends_where_no_neighbour_is_better(seed, monkeypatch):
    job = random_job(seed, 5)
    allocation, seconds = planned(job, monkeypatch)
    steps = neighbourhood_of(job)
    found, found_s = LocalSearch(job.cluster, job.costs, steps, followers=1).improved(allocation, seconds)
    assert found_s <= seconds
    assert found_s == pytest.approx(timed_s(job, found))
    assert min(timed_s(job, other) for other in steps.of(found)) >= found_s * (1 - 1e-9)


def test_layers_shared_by_workers_of_several_speeds_are_dealt_in_both_ways():
    job = random_job(18, 9)
    allocation = plan(*job, options=Options(horizon_s=1e12)).allocation
    steps = neighbourhood_of(job)
    others = list(steps.of(allocation))
    assert [each.spares_slow for each in others if each.chains is allocation.chains] == [not allocation.spares_slow]
    both = {each.spares_slow for each in others if any(len(cut) > 1 for cut in each.chains[0].cuts)}
    whole = [each for each in others if all(len(cut) == 1 for chain in each.chains for cut in chain.cuts)]
    assert both == {False, True}
    assert whole
    assert not any(each.spares_slow for each in whole)


def test_a_search_makes_plans_better_and_has_a_bound(monkeypatch):
    job = random_job(394, 5)
    _, seconds = planned(job, monkeypatch)
    assert plan(*job, options=Options(horizon_s=1e12)).predicted_step_s < 0.97 * seconds
    monkeypatch.setattr(local_search, "ACTIONS_MAX", 0)
    assert plan(*job, options=Options(horizon_s=1e12)).predicted_step_s == seconds


@pytest.mark.parametrize("seed", (107, 151))
def test_a_plan_does_not_depend_on_what_was_planned_before(seed, monkeypatch):
    """Times of steps are remembered, and a plan that knows a step's time could go on from it though it is too long."""
    job, options = random_job(seed, 9), Options(horizon_s=1e12)
    for name in ("_PROGRAMS", "_TIMES", "_AT_LEAST"):
        monkeypatch.setattr(programs, name, programs._Memo(8192))
    first = plan(*job, options=options)
    assert plan(*job, options=options).to_json() == first.to_json()


def test_a_search_stops_at_its_bound(monkeypatch):
    job = random_job(636, 5)
    allocation, seconds = planned(job, monkeypatch)
    monkeypatch.setattr(local_search, "ACTIONS_MAX", 1)
    timed = []
    monkeypatch.setattr(local_search, "step_s", lambda *given, **_: timed.append(given) or float("inf"))
    found = LocalSearch(job.cluster, job.costs, neighbourhood_of(job), followers=1).improved(allocation, seconds)
    assert found == (allocation, seconds)
    assert len(timed) == 1


def test_what_may_not_be_done_is_no_step(monkeypatch):
    job = random_job(394, 5)
    allocation, _ = planned(job, monkeypatch)
    whole = neighbourhood_of(job, share_layers=False)
    stages = [set(share.workers.tolist()) for share in allocation.chains[0].stages]
    assert any(len(cut) > 1 for each in neighbourhood_of(job).of(allocation) for cut in each.chains[0].cuts)
    assert all(len(cut) == 1 for each in whole.of(allocation) for cut in each.chains[0].cuts)
    for may_move in (True, False):
        others = [
            [set(share.workers.tolist()) for share in each.chains[0].stages]
            for each in neighbourhood_of(job, move_workers=may_move).of(allocation)
        ]
        assert all(other == stages for other in others) is not may_move


def test_pipelines_exchange_micro_batches_and_workers(monkeypatch):
    job = random_job(554, 5)
    slow = job.cluster.ids[np.argmin(job.cluster.speed)]
    stage, pipeline = job.before.chains[0].stages[0], job.before.chains[0]
    fast = [worker for worker in job.cluster.ids.tolist() if worker != slow]
    last = job.costs.num_layers

    def chain(workers: list[list[int]], bounds: list[int], number: int):
        shares = [
            stage.__class__(
                start=start, stop=stop, workers=np.array(own), num_microbatches=np.array([number]),
                levels=np.array([0]),
            )
            for own, start, stop in zip(workers, bounds, bounds[1:])
        ]  # fmt: skip
        return pipeline.__class__(
            stages=tuple(shares), num_microbatches=number, cuts=tuple({bound: number} for bound in bounds[1:-1])
        )

    two = Allocation(chains=(chain([[fast[0]], [int(slow)]], [0, 3, last], 3), chain([[fast[1]]], [0, last], 1)),
                     schedule="1f1b")  # fmt: skip
    others = list(neighbourhood_of(job).of(two))
    assert [2, 2] in [[each.num_microbatches for each in other.chains] for other in others]
    assert [slow] in [other.chains[1].stages[0].workers.tolist() for other in others]
    for other in others:
        other.check()
