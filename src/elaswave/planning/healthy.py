"""The undisturbed job: what plans start from, and what the capacity that is left is measured by. Pure."""

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.candidates import Room, Shape, build, shared_layers, whole_layers
from elaswave.planning.cluster import Cluster
from elaswave.planning.costs import Costs
from elaswave.planning.estimate import (
    DEFAULT_FOLLOWERS,
    EXACT_ACTIONS,
    EXACT_WORKERS,
    check_memory,
    check_power,
    common_levels,
    estimate,
    predict,
)
from elaswave.planning.graph import Cut
from elaswave.planning.plan import Allocation
from elaswave.planning.schedule import SCHEDULES, Schedule


def healthy(
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
    """The best allocation of an undisturbed job: stages of equal width, workers stage by stage in order of ids.

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
    room = Room(cluster, costs, members, num_microbatches, schedule, followers)
    cuts: list[tuple[Cut, ...]] = [whole_layers(cluster, costs, members, num_microbatches, room)]
    if share_layers:
        for widen in (False, True):
            shared = shared_layers(cluster, costs, members, num_microbatches, room, widen=widen)
            if shared is not None and shared not in cuts:
                cuts.append(shared)
    levels = common_levels(cluster, np.arange(cluster.num_workers))
    found = []
    for own in cuts:
        shape = Shape(members=members, cuts=own, num_microbatches=num_microbatches, origin="healthy")
        found.append(build(cluster, costs, shape, schedule, levels, followers=followers))
    for allocation in found:
        needed = estimate(cluster, costs, allocation, followers=followers)
        check_memory(cluster, needed)
        check_power(cluster, needed)
    exact = EXACT_ACTIONS if cluster.num_workers <= EXACT_WORKERS else 0
    return min(found, key=lambda each: predict(cluster, costs, each, exact_actions=exact))


def fastest_healthy(
    cluster: Cluster,
    costs: Costs,
    num_stages: int,
    num_replicas: int,
    num_microbatches: int,
    *,
    followers: int = DEFAULT_FOLLOWERS,
) -> Allocation:
    """The best allocation of an undisturbed job under the schedule that makes it fastest, of those that fit.

    What policies are compared by: otherwise one that changes the schedule after a loss would gain by that alone, which
    any job could have had before.

    Args and errors: as of `healthy`.
    """
    found: list[tuple[float, Allocation]] = []
    refused: InfeasiblePlan | None = None
    exact = EXACT_ACTIONS if cluster.num_workers <= EXACT_WORKERS else 0
    for schedule in SCHEDULES:
        try:
            each = healthy(cluster, costs, num_stages, num_replicas, num_microbatches, schedule, followers=followers)
        except InfeasiblePlan as error:
            refused = refused or error
            continue
        found.append((predict(cluster, costs, each, exact_actions=exact), each))
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda pair: pair[0])[1]
