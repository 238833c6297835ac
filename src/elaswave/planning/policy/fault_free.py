"""The fault-free job: what plans start from, and what the capacity that is left is measured by. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.memory import DEFAULT_FOLLOWERS
from elaswave.planning.costs.schedules import SCHEDULES, Schedule
from elaswave.planning.frequency import check_power, common_levels
from elaswave.planning.plan import Allocation
from elaswave.planning.programs.prediction import EXACT_ACTIONS, EXACT_WORKERS, time_within_memory
from elaswave.planning.programs.shared_layers import Cut
from elaswave.planning.search.memory_limits import MemoryBudget
from elaswave.planning.search.shapes import Shape, build, shared_layers, whole_layers

_HOLDS: Mapping[Schedule, int] = {"1f1b": 0, "zero-bubble": 1, "zero-bubble-h2": 2, "gpipe": 3}
"""Schedules by how much they hold in flight."""


def fault_free(
    cluster: Cluster,
    costs: Costs,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    *,
    share_layers: bool = False,
    followers: int = DEFAULT_FOLLOWERS,
) -> Allocation:
    """The best allocation of a fault-free job: stages of equal width, workers stage by stage in order of ids.

    Args:
        cluster: with num_stages x num_replicas workers or more; the first ones are used.
        costs: of the model's layers.
        num_stages: of the job.
        num_replicas: workers of each stage.
        num_microbatches: of a step.
        schedule: of the job.
        share_layers: whether neighbouring stages may share layers where that is faster; else each holds whole layers.
        followers: live copies of every block, for memory.
    Raises:
        InfeasiblePlan: too few workers or layers, or too little memory or power; by how much.
        ValueError: a number below 1.
    """
    return timed_fault_free(
        cluster, costs, num_stages, num_replicas, num_microbatches, (schedule,),
        share_layers=share_layers, followers=followers,
    )[1]  # fmt: skip


def fastest_fault_free(
    cluster: Cluster,
    costs: Costs,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    *,
    share_layers: bool = False,
    followers: int = DEFAULT_FOLLOWERS,
) -> Allocation:
    """The best allocation of a fault-free job under the schedule that makes it fastest, of those that fit.

    What policies are compared by: otherwise one that changes the schedule after a loss would gain by that alone, which
    any job could have had before.

    Args and errors: as of `fault_free`.
    """
    return timed_fault_free(
        cluster, costs, num_stages, num_replicas, num_microbatches, SCHEDULES,
        share_layers=share_layers, followers=followers,
    )[1]  # fmt: skip


def timed_fault_free(
    cluster: Cluster,
    costs: Costs,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    schedules: Sequence[Schedule],
    *,
    share_layers: bool = False,
    followers: int = DEFAULT_FOLLOWERS,
    exact_actions: int = EXACT_ACTIONS,
) -> tuple[float, Allocation]:
    """Of these schedules the fastest; of those that are as fast the one that holds least.

    Args and errors: as of `fault_free`, and

    Args:
        schedules: to choose from.
        exact_actions: the most actions of a step that is timed exactly, in jobs of at most `EXACT_WORKERS` workers.
    Returns:
        Seconds of a step, and the allocation.
    """
    if min(num_stages, num_replicas, num_microbatches) < 1:
        raise ValueError(
            f"{num_stages} stages, {num_replicas} replicas, {num_microbatches} micro-batches: all must be at least 1"
        )
    if (wanted := num_stages * num_replicas) > cluster.num_workers:
        raise InfeasiblePlan(
            f"workers: {num_stages} stages of {num_replicas} workers need {wanted}, but there are "
            f"{cluster.num_workers}: {wanted - cluster.num_workers} too few"
        )
    members = tuple(np.split(np.arange(wanted), num_stages))
    levels = common_levels(cluster, np.arange(cluster.num_workers))
    exact = exact_actions if cluster.num_workers <= EXACT_WORKERS else 0
    found: list[tuple[float, Allocation]] = []
    failure: InfeasiblePlan | None = None
    for schedule in schedules:
        try:
            offers = _cuts(cluster, costs, members, num_microbatches, schedule, share_layers, followers)
        except InfeasiblePlan as error:
            failure = failure or error
            continue
        for cuts in offers:
            shape = Shape(members=members, cuts=cuts, num_microbatches=num_microbatches, origin="fault-free")
            try:
                allocation = build(cluster, costs, shape, schedule, levels, followers=followers)
                timed = time_within_memory(cluster, costs, allocation, followers=followers, exact_actions=exact)
                check_power(cluster, timed.found.peak_power_w)
            except InfeasiblePlan as error:
                failure = failure or error
                continue
            found.append((timed.step_s, allocation))
    if not found:
        assert failure is not None
        raise failure
    bound = min(step_s for step_s, _ in found) * (1 + 1e-6)
    return min((pair for pair in found if pair[0] <= bound), key=lambda pair: _HOLDS[pair[1].schedule])


def _cuts(
    cluster: Cluster,
    costs: Costs,
    members: Sequence[np.ndarray],
    num_microbatches: int,
    schedule: Schedule,
    share_layers: bool,
    followers: int,
) -> list[tuple[Cut, ...]]:
    """Where the model may be cut: with all in flight that the schedule wants, and with less where memory is short.

    Raises:
        InfeasiblePlan: not even the least that the schedule can do with fits.
    """
    found: list[tuple[Cut, ...]] = []
    failure: InfeasiblePlan | None = None
    for at_most in (None, 1):
        budget = MemoryBudget(cluster, costs, members, num_microbatches, schedule, followers, at_most=at_most)
        try:
            found.append(whole_layers(cluster, costs, members, num_microbatches, budget))
        except InfeasiblePlan as error:
            failure = error
        for widen in (False, True) if share_layers else ():
            shared = shared_layers(cluster, costs, members, num_microbatches, budget, widen=widen)
            if shared is not None:
                found.append(shared)
        if not budget.was_short or schedule == "gpipe":
            break
    if not found:
        assert failure is not None
        raise failure
    return [cuts for index, cuts in enumerate(found) if cuts not in found[:index]]
