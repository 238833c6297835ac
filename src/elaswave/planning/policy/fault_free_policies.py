"""What each policy would run without a failure, and the best of it: the one start and denominator of comparisons. Pure.

Two starts are compared. *The same start*: stages of equal width, as a job is configured, for every policy. *Each its
own*: the layout that a policy's published system would choose of all workers without a failure:

- every system is configured by somebody, who can try numbers of stages: the fastest equal stages of any depth;
- a system that plans is asked what it makes of those workers, and does so if it is faster (ElasWave's planner, and any
  planner of one's own); those that declare so keep what was configured;
- a job that keeps spares runs so many pipelines fewer;
- Oobleck chooses the combination of pipeline templates that uses all workers and is fastest (SOSP 2023, section 4.2);
- ElasWave's planner has the others' plans among its candidates as far as it has them after a loss, so their own starts
  too.

All choose among the same schedules, in favour of the systems that were published with 1F1B alone. The *healthy time* is
the shortest step of all these layouts, whoever chooses it: what is left of the capacity of a cluster after a loss does
not depend on who asks.

The fault-free job: what plans start from, and what the capacity that is left is measured by. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.schedules import SCHEDULES, Schedule
from elaswave.planning.frequency import check_power, common_levels
from elaswave.planning.plan import Allocation, Planner
from elaswave.planning.policy.full_restart import num_pipelines
from elaswave.planning.policy.policies import CANDIDATES_UP_TO
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.programs.prediction import EXACT_ACTIONS, EXACT_WORKERS, time_as_it_is, time_within_memory
from elaswave.planning.programs.shared_layers import Cut
from elaswave.planning.search.memory_limits import MemoryBudget
from elaswave.planning.search.pipelines import PipelineWorkers, mixed_pipelines, ranges_of
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
    """Finds the best allocation of a fault-free job: stages of equal width, workers stage by stage in order of ids.

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
    """Finds the best allocation of a fault-free job under the schedule that makes it fastest, of those that fit.

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
    """Finds the fastest of these schedules; takes of those that are as fast the one that holds least.

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
    """Lists where the model may be cut: with all in flight that the schedule wants, and with less where memory is
    short.

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


TIMED = 2
"""Numbers of stages that are timed as plans are, of those that the closed form finds fastest."""
MIXES = 2
"""Combinations of templates that are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FaultFreeStart:
    """A fault-free job."""

    allocation: Allocation
    step_s: float


def own_starts(
    cluster: Cluster,
    costs: Costs,
    configured: Allocation,
    planners: Mapping[str, Planner],
    *,
    schedules: Sequence[Schedule] = SCHEDULES,
    followers: int = DEFAULT_FOLLOWERS,
) -> dict[str, FaultFreeStart]:
    """Finds what each policy would run on these workers.

    Args:
        cluster: all workers, none lost.
        costs: of the model's layers.
        configured: the job as it is configured, which everyone may keep.
        planners: policies by name; what each declares says how it begins.
        schedules: that the job may run.
        followers: live copies of every block, for memory.
    Returns:
        Policy -> its start; each runs as many micro-batches as the job is configured for.
    """
    equal = best_equal_stages(cluster, costs, configured, schedules=schedules, followers=followers)
    found: dict[str, FaultFreeStart] = {}
    metadata = {name: policy_metadata_of(planner) for name, planner in planners.items()}
    use_templates = any(each.start == "templates" for each in metadata.values())
    mixed = _templates(cluster, costs, equal, followers) if use_templates else []
    for name, planner in planners.items():
        offers = [equal]
        if metadata[name].start == "planned":
            offers += _asked(cluster, costs, equal.allocation, planner)
            if configured is not equal.allocation and np.ptp(cluster.speed) > 0:
                # A planner looks at depths near that of before, and slow workers are left out best at another one.
                offers += _asked(cluster, costs, configured, planner)
        elif num_spares := metadata[name].num_spares:
            offers = [_with_spares(cluster, costs, equal, num_spares, schedules, followers)]
        elif metadata[name].start == "templates":
            offers += mixed
        found[name] = min(offers, key=lambda start: start.step_s)
    if "elaswave" in found and cluster.num_workers <= CANDIDATES_UP_TO:
        found["elaswave"] = min([found["elaswave"], *found.values()], key=lambda start: start.step_s)
    return found


def fault_free_step_s(
    cluster: Cluster,
    costs: Costs,
    configured: Allocation,
    planners: Mapping[str, Planner],
    *,
    schedules: Sequence[Schedule] = SCHEDULES,
    followers: int = DEFAULT_FOLLOWERS,
) -> float:
    """Computes the seconds of the shortest step that any policy is known to make of these workers: see the module.

    A policy that runs the same layout in another way than the others (ReCycle, without a barrier between steps) is
    asked how long its steps take: else it would do more than what goodput is measured by.

    Args: as of `own_starts`.
    """
    starts = own_starts(cluster, costs, configured, planners, schedules=schedules, followers=followers)
    as_configured = FaultFreeStart(
        allocation=configured, step_s=time_as_it_is(cluster, costs, configured, followers=followers).step_s
    )
    known = [as_configured, *starts.values()]
    for name in sorted(name for name, planner in planners.items() if policy_metadata_of(planner).own_steps):
        for start in (as_configured, starts[name]):
            known += _asked(cluster, costs, start.allocation, planners[name])
    return min(start.step_s for start in known)


def best_equal_stages(
    cluster: Cluster,
    costs: Costs,
    configured: Allocation,
    *,
    schedules: Sequence[Schedule] = SCHEDULES,
    followers: int = DEFAULT_FOLLOWERS,
) -> FaultFreeStart:
    """Finds the fastest job of stages of equal width, of any number of stages, and at least as fast as it is
    configured.

    Jobs of more than `EXACT_WORKERS` workers are tried with half to twice as many stages as configured.

    Args: as of `own_starts`.
    """
    number, usual = configured.num_microbatches, len(configured.chains[0].stages)
    most = min(costs.num_layers, cluster.num_workers)
    depths = range(1, most + 1)
    if cluster.num_workers > EXACT_WORKERS:
        depths = range(max(1, usual // 2), min(most, 2 * usual) + 1)

    def timed(
        num_stages: int, tried: Sequence[Schedule] = schedules, exact_actions: int = EXACT_ACTIONS
    ) -> FaultFreeStart | None:
        replicas = min(cluster.num_workers // num_stages, number)
        try:
            step_s, allocation = timed_fault_free(
                cluster, costs, num_stages, replicas, number, tried, followers=followers, exact_actions=exact_actions
            )
        except InfeasiblePlan:
            return None
        return FaultFreeStart(allocation=allocation, step_s=step_s)

    # In closed form gpipe is no faster than 1f1b, with which it has all actions in common.
    known = [schedule for schedule in schedules if schedule != "gpipe"] or schedules
    rough = {depth: start for depth in depths if (start := timed(depth, known, exact_actions=0)) is not None}
    chosen = sorted(rough, key=lambda num_stages: rough[num_stages].step_s)[:TIMED]
    own_s = time_as_it_is(
        cluster, costs, configured, followers=followers, exact=cluster.num_workers <= EXACT_WORKERS
    ).step_s
    starts = [FaultFreeStart(allocation=configured, step_s=own_s), *filter(None, map(timed, chosen))]
    return min(starts, key=lambda start: start.step_s)


def _with_spares(
    cluster: Cluster,
    costs: Costs,
    equal: FaultFreeStart,
    num_spares: int,
    schedules: Sequence[Schedule],
    followers: int,
) -> FaultFreeStart:
    """Plans as many stages as the fastest job of equal stages has, and leaves so many workers over."""
    depth, number = len(equal.allocation.chains[0].stages), equal.allocation.num_microbatches
    width = min(number, num_pipelines(cluster.num_workers, depth, num_spares))
    try:
        step_s, allocation = timed_fault_free(cluster, costs, depth, width, number, schedules, followers=followers)
    except InfeasiblePlan:
        return equal
    return FaultFreeStart(allocation=allocation, step_s=step_s)


def _asked(cluster: Cluster, costs: Costs, allocation: Allocation, planner: Planner) -> list[FaultFreeStart]:
    """Returns what a planner makes of a job to which nothing has happened; returns nothing where it would shrink the
    batch."""
    fastest = int(np.argmax(cluster.speed))
    nothing = ClusterEvent(
        kind="slowed", workers=(int(cluster.ids[fastest]),), speed=float(cluster.speed[fastest])
    )  # fmt: skip
    try:
        found = planner(cluster, costs, allocation, nothing)
    except InfeasiblePlan:
        return []
    if found.allocation.num_microbatches != allocation.num_microbatches:
        return []
    return [FaultFreeStart(allocation=found.allocation, step_s=found.predicted_step_s)]


def _templates(cluster: Cluster, costs: Costs, start: FaultFreeStart, followers: int) -> list[FaultFreeStart]:
    """Combinations of pipelines of several depths that use all workers, where steps are timed exactly."""
    if cluster.num_workers > EXACT_WORKERS:
        return []
    chain = max(start.allocation.chains, key=lambda chain: len(chain.stages))
    members = [cluster.index_of(share.workers) for share in chain.stages]
    everybody = np.arange(cluster.num_workers)
    pipeline_workers = PipelineWorkers(
        usual=ranges_of(chain),
        members=members,
        free=np.setdiff1d(everybody, np.concatenate(members)),
        held=np.zeros((cluster.num_workers, 2), dtype=np.int64),
        levels=common_levels(cluster, everybody),
    )
    mixes = mixed_pipelines(
        cluster, costs, pipeline_workers, start.allocation.num_microbatches, start.allocation.schedule,
        followers=followers, most=MIXES, leave_out=False,
    )  # fmt: skip
    found = []
    for allocation, _ in mixes:
        try:
            timed = time_within_memory(cluster, costs, allocation, followers=followers)
            check_power(cluster, timed.found.peak_power_w)
        except InfeasiblePlan:
            continue
        found.append(FaultFreeStart(allocation=allocation, step_s=timed.step_s))
    return found
