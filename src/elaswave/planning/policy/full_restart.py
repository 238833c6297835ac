"""Stop, and start again from the last durable checkpoint: what most jobs do today.

The job begins again with as many equal pipelines as the workers that are left give; the batch is kept. A job that
needs all of its pipelines would wait for a replacement instead; going on with fewer, and using spares that have come
meanwhile, is the better form of it.

*Hot spares* (``num_spares``, the policy ``full_restart_spares``): so many workers stand by from the beginning. A job
that has lost no more of them begins again with as many pipelines as before, without a replacement. With 10 workers or
fewer none stands by.

Simplified:

- The number of stages stays; the layer split stays where it fits. Another depth might use more of the workers.
- Work since the last checkpoint is lost: half an interval is expected (the simulator counts what is really lost).
- A worker that joins waits for the next restart, unless restarting for it repays within the horizon. Before such a
  restart, and before a drained worker leaves, a checkpoint is written, so nothing is lost.
- A straggler is put out if the job without it, restart included, is ahead within the horizon (common practice,
  FALCON, arXiv 2410.12588, section 1).
"""

from dataclasses import replace

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.policy_metadata import PolicyMetadata
from elaswave.planning.policy.policy_parts import fetch, gone_from, is_in, make_plan, rectangle, unused
from elaswave.planning.policy.replication import Replication
from elaswave.planning.search.pipelines import ranges_of

NAME = "full_restart"
NUM_SPARES = 8
"""Of ``full_restart_spares``: one host of eight. An assumption, and a parameter: what a job needs depends on how many
workers are lost before one is repaired."""
SPARE_SHARE = 0.1
"""The most of all workers that stand by."""
_REPLICATION = Replication(
    unit="nothing", what="the last durable checkpoint is what there is besides", source="by definition of this policy"
)


def policy_metadata(*, num_spares: int = 0, is_candidate: bool = False) -> PolicyMetadata:
    """Describes what this policy is.

    Args:
        num_spares: workers that stand by.
        is_candidate: whether its plans are candidates of ElasWave's.
    """
    return PolicyMetadata(
        replication=_REPLICATION,
        rolls_back=True,
        num_spares=num_spares,
        start="configured",
        is_candidate=is_candidate,
    )


def plan_full_restart(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, *, times: RecoveryTimes | None = None,
    num_spares: int = 0, name: str = NAME,
) -> Plan:  # fmt: skip
    """Restarts after a loss; after anything else only where it repays.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before the event.
        event: what happened.
        times: of recovery; see `RecoveryTimes`.
        num_spares: workers that stand by, at most `SPARE_SHARE` of all.
        name: of the policy.
    Raises:
        InfeasiblePlan: fewer workers than stages are left, or memory.
    """
    made = _plan(cluster, costs, allocation, event, times or RecoveryTimes(), num_spares)
    return made if name == NAME else replace(made, policy=name)


def num_pipelines(num_workers: int, num_stages: int, num_spares: int) -> int:
    """Pipelines of a job that keeps so many spares, but no more than `SPARE_SHARE` of the workers."""
    spares = min(num_spares, int(SPARE_SHARE * num_workers))
    return min(num_workers // num_stages, max(1, (num_workers - spares) // num_stages))


def _plan(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, times: RecoveryTimes, num_spares: int
) -> Plan:
    used = sum(stage.width for chain in allocation.chains for stage in chain.stages)
    present = used // len(allocation.chains[0].stages)
    most = present if num_spares else None
    if event.kind in ("lost", "drained"):
        gone = gone_from(event)
        if not any(len(is_in(stage.workers, gone)) for chain in allocation.chains for stage in chain.stages):
            return keep(cluster, costs, allocation, "only spare workers are gone")
        return restart(cluster, costs, allocation, times, planned=event.kind == "drained", most=most)
    if event.kind == "slowed" and event.speed < 1:
        now = keep(cluster, costs, allocation, "the straggler stays")
        try:
            better = restart(cluster, costs, allocation, times, planned=True, shunned=event.workers, most=most)
        except InfeasiblePlan:
            return now
        return better if _repays(better, now, times.horizon(cluster.num_workers)) else now
    now = keep(cluster, costs, allocation, "spares wait for the next restart")
    wanted = num_pipelines(len(_usable(cluster, allocation)), len(allocation.chains[0].stages), num_spares)
    if wanted <= present:
        return now
    better = restart(cluster, costs, allocation, times, planned=True, most=wanted)
    return better if _repays(better, now, times.horizon(cluster.num_workers)) else now


def keep(cluster: Cluster, costs: Costs, allocation: Allocation, reason: str) -> Plan:
    """Changes nothing."""
    return make_plan(NAME, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason=reason)


def restart(
    cluster: Cluster, costs: Costs, allocation: Allocation, times: RecoveryTimes, *, planned: bool,
    shunned: tuple[int, ...] = (), most: int | None = None,
) -> Plan:  # fmt: skip
    """Begins again with the workers that are there.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before; its stages, layers and batch are kept.
        times: of recovery.
        planned: a checkpoint is written first, so that no work is lost.
        shunned: workers that are not to be used.
        most: pipelines, so that further workers stand by; None means as many as there can be.
    Raises:
        InfeasiblePlan: fewer workers than stages, or memory.
    """
    chain = max(allocation.chains, key=lambda each: sum(stage.width for stage in each.stages))
    again = rectangle(
        cluster,
        costs,
        num_stages=len(chain.stages),
        num_microbatches=allocation.num_microbatches,
        schedule=allocation.schedule,
        ranges=ranges_of(chain),
        workers=np.setdiff1d(_usable(cluster, allocation), np.array(shunned, dtype=np.int64)),
        most=most,
    )
    stages = again.chains[0].stages
    missing = {(stage.start, stage.stop): stage.workers.tolist() for stage in stages}
    shards = {(stage.start, stage.stop): stage.width for stage in stages}
    width, spare = stages[0].width, cluster.num_workers - sum(stage.width for stage in stages)
    made = make_plan(
        NAME,
        cluster,
        costs,
        again,
        pause_s=times.restart_s + (times.checkpoint_stall_s if planned else 0.0),
        lost_steps=0.0,
        transfers=fetch(costs, missing, shards),
        reason=f"begins again from {'a new' if planned else 'the last'} checkpoint with {width} pipelines of "
        f"{len(stages)} stages, {spare} workers spare",
    )
    if planned:
        return made
    return replace(made, lost_work_s=times.checkpoint_interval_s / 2, from_checkpoint=True)


def _usable(cluster: Cluster, allocation: Allocation) -> np.ndarray:
    """Lists all workers that are there, except those that were excluded and are still slow."""
    used = allocation.workers
    return np.union1d(used[np.isin(used, cluster.ids, assume_unique=True)], unused(cluster, allocation))


def _repays(better: Plan, now: Plan, horizon_s: float) -> bool:
    """Tells whether more steps are done within the horizon in spite of the pause."""
    return (horizon_s - better.predicted_pause_s) / better.predicted_step_s > horizon_s / now.predicted_step_s
