"""Varuna: a job that has lost or gained machines is saved, stopped and begun again in the best shape for those there.

    elaswave compare --policy examples/policies/varuna.py:plan --lose 3

Athlur, Saran, Sivathanu, Ramjee, Kwatra: Varuna: Scalable, Low-cost Training of Massive Deep Learning Models, EuroSys
2022 (arXiv 2111.04007). What is modelled is what its published code says (github.com/microsoft/varuna, a2145cc; the
paper itself was not read beyond its abstract):

- README, "Changing resources: job morphing": on a change of resources it checkpoints, stops and relaunches the job.
- docs/morphing.rst: the total batch is spread again over pipeline stages and data-parallel replicas, whose numbers are
  chosen by an estimate of the best configuration; checkpoints should be frequent, since the one on demand "may fail if
  workers are lost during the call". So a loss costs the work since the last checkpoint here, and an announced leave
  none.
- docs/morphing.rst, "Slow GPU detection": slow machines are listed for the user, who may remove them. Not modelled:
  a straggler stays.

Simplified, in its favour: it does not morph for workers that would not make it faster. What a relaunch takes is stated
in neither; it is `RecoveryTimes.restart_s`, as for every policy that restarts. Micro-batches keep their size.
"""

from dataclasses import replace

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.depths import best_of_depths
from elaswave.planning.policy.policy_metadata import replicates
from elaswave.planning.policy.policy_parts import fetch, gone_from, is_in, make_plan
from elaswave.planning.policy.replication import Replication

NAME = "varuna"
REPLICATION = Replication(
    unit="nothing",
    what="the last durable checkpoint is what there is besides",
    source="github.com/microsoft/varuna (a2145cc), docs/morphing.rst: morphing is checkpointing and restarting",
)
TIMES = RecoveryTimes()
"""restart_s: from Llama 3, not from Varuna; see the module."""


@replicates(REPLICATION)
def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Morphs after losses and leaves, and for workers that have joined where it is faster then.

    Raises:
        InfeasiblePlan: no shape leaves the workers enough memory.
    """
    gone = gone_from(event)
    if event.kind == "slowed" or (len(gone) and not len(is_in(allocation.workers, gone))):
        return _stay(cluster, costs, allocation)
    shape = best_of_depths(cluster, costs, allocation)
    if event.kind == "joined":
        now, better = _stay(cluster, costs, allocation), _morph(cluster, costs, shape, planned=True)
        return better if better.predicted_step_s < now.predicted_step_s else now
    return _morph(cluster, costs, shape, planned=event.kind == "drained")


def _stay(cluster: Cluster, costs: Costs, allocation: Allocation) -> Plan:
    return make_plan(NAME, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason="the job goes on as it is")


def _morph(cluster: Cluster, costs: Costs, shape: Allocation, *, planned: bool) -> Plan:
    stages = shape.chains[0].stages
    plan = make_plan(
        NAME,
        cluster,
        costs,
        shape,
        pause_s=TIMES.restart_s + (TIMES.checkpoint_stall_s if planned else 0.0),
        lost_steps=0.0,
        transfers=fetch(
            costs,
            {(stage.start, stage.stop): stage.workers.tolist() for stage in stages},
            {(stage.start, stage.stop): stage.width for stage in stages},
        ),
        reason=f"morphs to {stages[0].width} pipelines of {len(stages)} stages, from "
        f"{'a new' if planned else 'the last'} checkpoint",
    )
    return plan if planned else replace(plan, from_checkpoint=True, lost_work_s=TIMES.checkpoint_interval_s / 2)
