"""What planners of policies share: who is gone, chains of equal pipelines, bytes of state, the plan around it. Pure.

Many equal pipelines are one `Chain`: pipeline number j is the j-th worker of each of its stages. Since ids ascend in a
stage, workers that come later can shift who is paired with whom; workers of one stage hold the same layers, so nothing
has to be moved for that.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs, MemoryModel
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.frequency import check_power, common_levels
from elaswave.planning.plan import Allocation, Chain, Plan, StageShare, StateTransfer, at_levels
from elaswave.planning.programs.layout import partition_layers
from elaswave.planning.programs.prediction import Prediction, time_within_memory
from elaswave.planning.search.apportionment import evenly
from elaswave.planning.search.pipelines import Ranges
from elaswave.planning.state_moves.transfers import Sources, receiving_s

PeriodOf = Callable[[Cluster, Costs, Allocation, Prediction, float], float]
"""Seconds from step to step: of a cluster, costs, an allocation, what is predicted of a step by itself, and the seconds
from which on it need not be known exactly."""


def gone_from(event: ClusterEvent) -> np.ndarray:
    """Lists the ids of the workers that an event takes away, ascending: int64."""
    return np.array(event.workers if event.kind in ("lost", "drained") else (), dtype=np.int64)


def is_in(workers: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Finds the positions in `workers` (ascending) of those of `some` that are there, ascending."""
    if not len(workers) or not len(some):
        return np.zeros(0, dtype=np.int64)
    found = np.searchsorted(workers, some)
    found = found[(found < len(workers)) & (workers[np.minimum(found, len(workers) - 1)] == some)]
    return found if bool(np.all(found[1:] > found[:-1])) else np.unique(found)


def unused(cluster: Cluster, allocation: Allocation) -> np.ndarray:
    """Lists the ids of the workers that compute nothing and are no slower than the slowest that does, ascending.

    Workers that were put out as stragglers so stay out until they are as fast as the others.
    """
    used = allocation.workers
    spare = np.setdiff1d(cluster.ids, used, assume_unique=True)
    if not len(spare) or bool(np.all(cluster.speed == cluster.speed[0])):
        return spare
    there = used[is_in(used, cluster.ids)]
    slowest = float(cluster.speed[cluster.index_of(there)].min()) if len(there) else 0.0
    return spare[cluster.speed[cluster.index_of(spare)] >= slowest]


def base_levels(cluster: Cluster, workers: np.ndarray) -> np.ndarray:
    """Finds the base frequency level of each worker: these policies change no clocks."""
    if len(cluster.devices) == 1:
        return np.full(len(workers), cluster.devices[0].base_level, dtype=np.int64)
    table = np.array([device.base_level for device in cluster.devices], dtype=np.int64)
    return table[cluster.device[cluster.index_of(workers)]]


def balanced_ranges(costs: Costs, num_stages: int) -> Ranges:
    """Divides layers over stages of one worker each, the slowest as fast as possible.

    Raises:
        InfeasiblePlan: more stages than layers.
    """
    if num_stages > costs.num_layers:
        raise InfeasiblePlan(f"{num_stages} stages need a layer each, but there are {costs.num_layers} layers")
    busy_s = np.diff(costs.prefix["busy_s"]).tolist()
    bounds = [0, *np.cumsum(partition_layers(busy_s, [1] * num_stages)).tolist()]
    return tuple(pairwise(bounds))


def chain_of(
    cluster: Cluster, ranges: Ranges, columns: Sequence[np.ndarray], counts: Sequence[np.ndarray] | np.ndarray
) -> Chain:
    """Makes a chain without shared layers.

    Args:
        cluster: of the workers, for their levels.
        ranges: layers of each stage.
        columns: ids of each stage's workers, ascending.
        counts: micro-batches of each stage's workers; one array if it is the same for every stage.
    """
    each = [counts] * len(columns) if isinstance(counts, np.ndarray) else list(counts)
    total = int(each[0].sum())
    stages = tuple(
        StageShare(start=start, stop=stop, workers=column, num_microbatches=own, levels=base_levels(cluster, column))
        for (start, stop), column, own in zip(ranges, columns, each, strict=True)
    )
    return Chain(stages=stages, num_microbatches=total, cuts=tuple({start: total} for start, _ in ranges[1:]))


def rectangle(
    cluster: Cluster, costs: Costs, *, num_stages: int, num_microbatches: int, schedule: Schedule,
    ranges: Ranges | None = None, workers: np.ndarray | None = None, most: int | None = None,
) -> Allocation:  # fmt: skip
    """Makes as many equal pipelines as the workers give: this is how a job begins, and begins again.

    Args:
        cluster: the workers; what is left after the last whole pipeline stays unused.
        costs: of the model's layers.
        num_stages: stages of a pipeline.
        num_microbatches: of the step, over all pipelines.
        schedule: of the pipelines.
        ranges: layers of the stages; None means balanced.
        workers: use only these; None means all.
        most: pipelines; None means as many as there can be.
    Raises:
        InfeasiblePlan: too few workers for one pipeline.
    """
    ids = cluster.ids if workers is None else workers
    width = len(ids) // num_stages
    if width < 1:
        raise InfeasiblePlan(
            f"a pipeline of {num_stages} stages needs {num_stages} workers, but {len(ids)} are there: "
            f"{num_stages - len(ids)} too few"
        )
    width = min(width, num_microbatches, width if most is None else max(1, most))
    columns = [ids[stage * width : (stage + 1) * width] for stage in range(num_stages)]
    chosen = balanced_ranges(costs, num_stages) if ranges is None else ranges
    return Allocation(chains=(chain_of(cluster, chosen, columns, evenly(num_microbatches, width)),), schedule=schedule)


def fetch(
    costs: Costs, missing: Mapping[tuple[int, int], Collection[int]], shards: Mapping[tuple[int, int], int]
) -> tuple[StateTransfer, ...]:
    """Transfers of whole ranges of layers.

    Args:
        costs: of the model's layers.
        missing: layers [start, stop) -> workers that lack them.
        shards: over how many workers the optimizer state of those layers is spread; 1 where it is not said.
    """
    return tuple(
        StateTransfer(
            start=start, stop=stop, workers=tuple(sorted(workers)),
            num_bytes=len(workers)
            * MemoryModel.of_width(costs, shards.get((start, stop), 1), copies=1).sent_bytes(start, stop),
        )
        for (start, stop), workers in sorted(missing.items())
        if workers
    )  # fmt: skip


def copy_s(cluster: Cluster, costs: Costs, before: Allocation, transfers: Sequence[StateTransfer]) -> float:
    """Computes the seconds until every worker has what it is sent while training stands still, over links between
    nodes: of the worker that receives most, or of the holder of layers that sends most, as ElasWave's copies take.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        before: who has run what.
        transfers: of state.
    """
    held = [
        (stage.start, stage.stop, len(is_in(cluster.ids, stage.workers)))
        for chain in before.chains
        for stage in chain.stages
    ]
    holders = np.zeros(costs.num_layers, dtype=np.int64)
    for start, stop, width in held:
        holders[start:stop] += width
    sources = Sources(holders, tuple(sorted({(start, stop) for start, stop, _ in held})))
    link = cluster.between_nodes
    return max(receiving_s(link, transfers), sources.sending_s(link, costs, transfers))


def make_plan(
    policy: str, cluster: Cluster, costs: Costs, allocation: Allocation, *, pause_s: float, lost_steps: float,
    reason: str, transfers: tuple[StateTransfer, ...] = (), within_s: float = float("inf"),
    period_of: PeriodOf | None = None,
) -> Plan:  # fmt: skip
    """Makes the plan around an allocation: timed as ElasWave's own are, within the workers' memory and power.

    These policies choose no clocks, but have to keep within the power limit: where all workers at the base level would
    exceed it, they are held to one lower speed.

    Args:
        policy: its name.
        cluster: after the event.
        costs: of the model's layers.
        allocation: what was decided.
        pause_s: of training.
        lost_steps: computation that is done again, in steps of the new allocation.
        reason: one line.
        transfers: of state.
        within_s: a step that is not shorter need not be timed exactly: the plan says any time from there on.
        period_of: how long it is from step to step where that is not how long a step takes.
    Raises:
        InfeasiblePlan: a worker would need more memory than it has, or all of them more power.
    """
    if cluster.power_limit_w is not None:
        workers = np.concatenate([stage.workers for chain in allocation.chains for stage in chain.stages])
        allocation = at_levels(allocation, common_levels(cluster, cluster.index_of(workers)))
    timed = time_within_memory(cluster, costs, allocation, within_s=within_s)
    found, step_s, power_w = timed.found, timed.step_s, timed.found.power_w
    check_power(cluster, found.peak_power_w)
    if timed.num_limited:
        reason += f", {timed.num_limited} workers with fewer micro-batches in flight since memory is short"
    if period_of is not None:
        step_s = period_of(cluster, costs, allocation, timed, within_s)
        devices = cluster.device[cluster.index_of(found.workers)]
        idle_w = float(np.array([device.idle_power_w for device in cluster.devices])[devices].sum())
        power_w = idle_w + (power_w - idle_w) * (found.step_s / step_s if step_s else 1.0)
    return Plan(
        policy=policy,
        allocation=allocation,
        predicted_step_s=step_s,
        predicted_pause_s=pause_s,
        lost_work_s=lost_steps * step_s,
        transfers=transfers,
        memory_bytes=found.memory_bytes[np.argsort(found.workers, kind="stable")],
        power_w=power_w,
        reason=reason,
    )


def fallback_plan(plan: Plan, policy: str, why: str) -> Plan:
    """Makes the plan that another policy has fallen back to."""
    return replace(plan, policy=policy, reason=f"{why}; {plan.reason}")
