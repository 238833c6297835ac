"""TrainMover: a warm standby takes the place of a machine that fails, is slow or is to leave.

    elaswave simulate --policy examples/policies/trainmover.py:plan --workers 64 --stages 4 --days 7

Lao, Gao and others: TrainMover: An Interruption-Resilient Runtime for ML Training, OSDI 2026 (arXiv 2412.12636, version
3). What is used stands in its abstract and in the authors' article of 5 May 2026, "When Your AI Training Cluster
Crashes at 3 AM: How We Cut Recovery Time to 20 Seconds"; the paper's sections were not read:

- One standby can take any role ("general standby design that enables failure recovery from any role"), so the layout
  stays, and with it the batch. It is warm: what remains is the exchange of connections, and the state, which it reads
  from surviving peers. Where a stage has none left, the job begins again from a checkpoint.
- The downtime depends little on the scale: 32 to 1,024 GPUs add less than 10 s (article, part 6).
- Whether the stated downtime has the detection of a failure in it could not be confirmed: nothing is added for it.

Without a standby the abstract names "elastic" machines and no more. Here, in its favour: the lost worker's pipeline
stops, its other workers become standbys, the others take over its micro-batches; workers that join form pipelines
again.

Not used to set a parameter: 97 % of effective training time with a rebalancing every 10 minutes (article, part 6).
tests/unit/planning/test_policy_plugins.py reproduces it.
"""

from dataclasses import replace

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, StageShare
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_metadata import replicates
from elaswave.planning.policy.policy_parts import base_levels, fallback_plan, fetch, is_in, make_plan, unused
from elaswave.planning.policy.replication import Replication
from elaswave_rivals import torchft

NAME = "trainmover"
REPLICATION = Replication(
    unit="stages",
    what="a standby reads its state from peers in memory; that each peer holds all of it is assumed in its favour",
    source="the authors' article of 5 May 2026, part 4: a replacement recovers state from in-memory peers",
)
UNEXPECTED_S = 21.1
"""Downtime after a failure, 1,024 GPUs: the article, part 6, "Downtime at Scale". The abstract says around 20 s."""
EXPECTED_S = 16.6
"""The same of a planned exchange."""


@replicates(REPLICATION)
def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Exchanges workers for standbys; without standbys, pipelines stop.

    Raises:
        InfeasiblePlan: neither a standby nor a whole pipeline is left, or memory.
    """
    pause_s = UNEXPECTED_S if event.kind == "lost" else EXPECTED_S
    times = RecoveryTimes(torchft_recover_s=pause_s, join_s=EXPECTED_S)
    if event.kind == "joined" or (event.kind == "slowed" and event.speed >= 1):
        return _readmit(cluster, costs, allocation, event, times)
    places = allocation.workers[is_in(allocation.workers, np.array(event.workers, dtype=np.int64))]
    if not len(places):
        return _stay(cluster, costs, allocation, "only standbys are concerned")
    if event.kind != "slowed" and not _has_peers(allocation, event):
        restarted = full_restart.restart(cluster, costs, allocation, RecoveryTimes(), planned=event.kind == "drained")
        return fallback_plan(restarted, NAME, "no worker is left from which a standby could read the state")
    standbys = np.setdiff1d(unused(cluster, allocation), np.array(event.workers, dtype=np.int64))
    number = min(len(places), len(standbys))
    if event.kind == "slowed" and number < len(places):
        return _stay(cluster, costs, allocation, "no standby is there for the straggler")
    swapped, missing = _exchange(cluster, allocation, dict(zip(places[:number].tolist(), standbys[:number].tolist())))
    widths = {(each.start, each.stop): each.width for chain in swapped.chains for each in chain.stages}
    if number == len(places):
        return make_plan(
            NAME,
            cluster,
            costs,
            swapped,
            pause_s=pause_s,
            lost_steps=0.5 if event.kind == "lost" else 0.0,  # of the step in hand
            transfers=fetch(costs, missing, widths),
            reason=f"{number} standbys take over",
        )
    rest = ClusterEvent(kind=event.kind, workers=tuple(places[number:].tolist()))
    stopped = torchft.plan_torchft(cluster, costs, swapped, rest, times=times, keep_batch=True, name=NAME)
    what = f"{number} standbys take over, {len(places) - number} more would be needed; {stopped.reason}"
    return replace(stopped, predicted_pause_s=pause_s, reason=what)


def _readmit(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, times: RecoveryTimes
) -> Plan:  # fmt: skip
    """Whole pipelines of standbys begin to work where that is faster; the others stay standbys."""
    found = torchft.plan_torchft(cluster, costs, allocation, event, times=times, keep_batch=True, name=NAME)
    now = _stay(cluster, costs, allocation, "workers that have joined are standbys")
    return found if found.predicted_step_s < now.predicted_step_s else now


def _stay(cluster: Cluster, costs: Costs, allocation: Allocation, reason: str) -> Plan:
    return make_plan(NAME, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason=reason)


def _has_peers(allocation: Allocation, event: ClusterEvent) -> bool:
    """Whether every stage keeps a worker."""
    lost = np.array(event.workers, dtype=np.int64)
    held = np.zeros(allocation.num_layers, dtype=bool)
    for chain in allocation.chains:
        for stage in chain.stages:
            held[stage.start : stage.stop] |= len(is_in(stage.workers, lost)) < stage.width
    return bool(held.all())


def _exchange(
    cluster: Cluster, allocation: Allocation, standbys: dict[int, int]
) -> tuple[Allocation, dict[tuple[int, int], list[int]]]:
    """The allocation with standbys in the places of workers, and the layers that each standby has to be sent."""
    missing: dict[tuple[int, int], list[int]] = {}
    leaving = np.array(sorted(standbys), dtype=np.int64)
    chains = []
    for chain in allocation.chains:
        stages = []
        for stage in chain.stages:
            if len(is_in(stage.workers, leaving)):
                workers = np.array([standbys.get(worker, worker) for worker in stage.workers.tolist()], dtype=np.int64)
                missing.setdefault((stage.start, stage.stop), []).extend(np.setdiff1d(workers, stage.workers).tolist())
                stage = _ordered(cluster, stage, workers)
            stages.append(stage)
        chains.append(replace(chain, stages=tuple(stages)))
    return replace(allocation, chains=tuple(chains)), missing


def _ordered(cluster: Cluster, stage: StageShare, workers: np.ndarray) -> StageShare:
    """The stage with these workers in the places of its own, ids ascending."""
    order = np.argsort(workers, kind="stable")
    levels = stage.levels.copy()
    new = ~np.isin(workers, stage.workers)
    levels[new] = base_levels(cluster, workers[new])
    return replace(
        stage, workers=workers[order], num_microbatches=stage.num_microbatches[order], levels=levels[order]
    )  # fmt: skip
