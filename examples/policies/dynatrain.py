"""DynaTrain: the parallelism is switched while the job lives, to the best one for the workers that are there.

    elaswave compare --policy examples/policies/dynatrain.py:plan --lose 3

Wang, Zhang, Lin and others: DynaTrain: Fast Online Parallelism Switching for Elastic LLM Training (arXiv 2605.18815).
All that is used stands in its abstract; the sections were not read, and its code (ElasticMegatron) could not be had:

- It reconfigures "across arbitrary multi-dimensional parallelism": here the number of stages and of replicas; a worker
  is a tensor-parallel group, whose size stays.
- "A 70B dense model in under 2 s and a 235B MoE model in 4.36 s".
- New worlds are constructed while training goes on, "to mask topology-change cost".

Not stated there, and taken in its favour: that a loss without notice is such a switch too, as long as each stage keeps
a worker from which its state can be read (otherwise the job begins again from a checkpoint); that detection takes
nothing; that it switches whenever this is faster. The batch is kept.
"""

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.depths import best_of_depths
from elaswave.planning.policy.policy_metadata import replicates
from elaswave.planning.policy.policy_parts import fallback_plan, fetch, gone_from, is_in, make_plan
from elaswave.planning.policy.replication import Replication

NAME = "dynatrain"
REPLICATION = Replication(
    unit="stages",
    what="that every holder of a layer holds all of its state is assumed in its favour",
    source="not found stated: arXiv 2605.18815, abstract, has no loss without notice",
)
SWITCH_S = ((70e9, 2.0), (float("inf"), 4.36))
"""Parameters of the model up to which a switch takes so many seconds: arXiv 2605.18815, abstract. The second figure is
of 235 billion parameters; nothing is stated beyond, so larger models have it in its favour."""
BYTES_PER_PARAMETER = 2.0
"""bfloat16, as all described models have."""


@replicates(REPLICATION)
def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Switches after losses and leaves, and after anything else where it is faster then.

    Raises:
        InfeasiblePlan: no shape leaves the workers enough memory.
    """
    gone = gone_from(event)
    hit = len(is_in(allocation.workers, gone)) > 0
    if hit and not _is_covered(allocation, cluster):
        restarted = full_restart.restart(cluster, costs, allocation, RecoveryTimes(), planned=event.kind == "drained")
        return fallback_plan(restarted, NAME, "a stage has lost all of its workers")
    shape = best_of_depths(cluster, costs, allocation)
    stages = shape.chains[0].stages
    better = make_plan(
        NAME,
        cluster,
        costs,
        shape,
        pause_s=switch_s(costs),
        lost_steps=0.5 if event.kind == "lost" else 0.0,  # of the step in hand
        transfers=fetch(costs, _missing(allocation, shape), {(each.start, each.stop): each.width for each in stages}),
        reason=f"switches to {stages[0].width} pipelines of {len(stages)} stages",
    )
    if hit:
        return better
    now = make_plan(NAME, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason="no switch is faster")
    return better if better.predicted_step_s < now.predicted_step_s else now


def switch_s(costs: Costs) -> float:
    """Seconds that a switch of this model takes."""
    parameters = costs.between("parameter_bytes", 0, costs.num_layers) / BYTES_PER_PARAMETER
    return next(seconds for limit, seconds in SWITCH_S if parameters <= limit)


def _is_covered(allocation: Allocation, cluster: Cluster) -> bool:
    """Whether every layer has a worker that holds it still."""
    held = np.zeros(allocation.num_layers, dtype=bool)
    for chain in allocation.chains:
        for stage in chain.stages:
            held[stage.start : stage.stop] |= bool(np.isin(stage.workers, cluster.ids).any())
    return bool(held.all())


def _missing(before: Allocation, after: Allocation) -> dict[tuple[int, int], list[int]]:
    """Layers of the new stages -> workers that did not hold all of them."""
    held = {
        int(worker): (stage.start, stage.stop)
        for chain in before.chains
        for stage in chain.stages
        for worker in stage.workers
    }
    missing: dict[tuple[int, int], list[int]] = {}
    for stage in after.chains[0].stages:
        lacking = [
            worker
            for worker in stage.workers.tolist()
            if worker not in held or held[worker][0] > stage.start or held[worker][1] < stage.stop
        ]
        missing[stage.start, stage.stop] = lacking
    return missing
