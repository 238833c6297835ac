"""torchft: a replica group that has lost a worker leaves as a whole; the others go on.

meta-pytorch/torchft (README and docs, "Assumptions and recommendations"): groups agree on a quorum every step; a group
whose member died is not in it until it is whole again and has healed from a live one. The step during which a group
died is not committed (``should_commit``). Each group works on its own micro-batches, so with fewer groups the global
batch shrinks: that is `plan`. ``keep_batch=True`` deals the lost groups' micro-batches to the others, which torchft
does not do, but which compares throughput at equal training.

Simplified, all in torchft's favour:

- A replica group is one pipeline; group number j is the j-th worker of every stage.
- The workers that are left of a broken group wait, and as soon as a worker joins, waiting and joining workers form
  whole groups together, without the minutes in which a scheduler starts them. Between joins they do not: hosts are not
  regrouped without a join.
- A group that comes back heals while the others go on.
- Half a step is lost to a failure; in truth the survivors notice only at the all-reduce at the step's end.
- The quorum itself costs nothing beyond `RecoveryTimes.torchft_recover_s`.
- A straggler's group is put out if more is done without it.
"""

from dataclasses import replace

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, StateTransfer
from elaswave.planning.policy.policy_parts import chain_of, fetch, gone_from, is_in, make_plan, unused
from elaswave.planning.policy.replication import Replication
from elaswave.planning.search.apportionment import evenly
from elaswave.planning.search.pipelines import ranges_of

NAME = "torchft"
REPLICATION = Replication(
    unit="groups",
    what="each replica group holds the whole state once; one that has lost a worker heals from a group that is whole",
    source="torchft, README (fault tolerance across the replicated dimension, any sharding within a group) and docs, "
    "Protocol (one that falls behind recovers from one that has taken most steps)",
)


def plan_torchft(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, *, times: RecoveryTimes | None = None,
    keep_batch: bool = False, name: str = NAME,
) -> Plan:  # fmt: skip
    """Takes out the groups of lost workers; lets whole groups in.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before the event; its first chain's shape is that of a group.
        event: what happened.
        times: of recovery; see `RecoveryTimes`.
        keep_batch: deal the micro-batches of groups that left to the others.
        name: of the policy.
    Raises:
        InfeasiblePlan: no whole group is left, or memory.
    """
    times = times or RecoveryTimes()
    groups = _Groups(cluster, costs, allocation)
    if event.kind == "slowed" and event.speed < 1:
        return _slowed(cluster, costs, allocation, event, times, keep_batch, name)
    broken = groups.drop(gone_from(event))
    comes = event.kind in ("joined", "slowed")
    formed = groups.form(unused(cluster, allocation)) if comes else 0
    if not groups.number:
        raise InfeasiblePlan(
            f"{name}: every replica group of {groups.depth} workers has lost one, so no group holds a whole model; "
            "1 whole group is needed: begin again from a checkpoint"
        )
    pause_s = times.torchft_recover_s if event.kind == "lost" and broken else times.join_s
    idle = cluster.num_workers - groups.number * groups.depth
    what = f"{formed} replica groups join" if comes else f"{broken} replica groups leave"
    return make_plan(
        name,
        cluster,
        costs,
        groups.allocation(allocation.num_microbatches if keep_batch else None),
        pause_s=pause_s,
        lost_steps=0.5 if event.kind == "lost" and broken else 0.0,
        transfers=groups.transfers,
        reason=f"{what}, {groups.number} groups of {groups.depth} workers go on, {idle} workers idle, the batch "
        f"{'is kept' if keep_batch else 'follows the number of groups'}",
    )


def _slowed(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    times: RecoveryTimes,
    keep_batch: bool,
    name: str,
) -> Plan:
    """All groups wait for a straggler, or its group leaves, whichever does more per second."""
    now = make_plan(
        name, cluster, costs, allocation, pause_s=0.0, lost_steps=0.0, reason="all groups go on, at the slowest's pace"
    )
    loss = ClusterEvent(kind="lost", workers=event.workers)
    try:
        without = plan_torchft(
            cluster.without(event.workers), costs, allocation, loss, times=times, keep_batch=keep_batch, name=name
        )
    except InfeasiblePlan:
        return now
    done = [each.allocation.num_microbatches / each.predicted_step_s for each in (without, now)]
    if done[0] <= done[1]:
        return now
    return replace(
        without, lost_work_s=0.0, predicted_pause_s=times.join_s, reason=f"put out as slow: {without.reason}"
    )


class _Groups:
    """Replica groups as columns of ids: group j is the j-th of every column."""

    def __init__(self, cluster: Cluster, costs: Costs, allocation: Allocation) -> None:
        chain = allocation.chains[0]
        self._cluster, self._costs, self._schedule = cluster, costs, allocation.schedule
        self._ranges = ranges_of(chain)
        self.number = min(stage.width for stage in chain.stages)
        self.depth = len(chain.stages)
        self._columns = [stage.workers[: self.number] for stage in chain.stages]
        self._per_group = -(-chain.num_microbatches // self.number)
        self.transfers: tuple[StateTransfer, ...] = ()

    def drop(self, gone: np.ndarray) -> int:
        """Takes out the groups of these workers; returns how many."""
        stays = np.ones(self.number, dtype=bool)
        for column in self._columns:
            stays[is_in(column, gone)] = False
        self._columns = [column[stays] for column in self._columns]
        broken = self.number - int(stays.sum())
        self.number -= broken
        return broken

    def form(self, waiting: np.ndarray) -> int:
        """Makes whole groups of workers that wait; returns how many."""
        formed = len(waiting) // self.depth
        if formed:
            missing = {}
            for stage, layers in enumerate(self._ranges):
                new = waiting[stage * formed : (stage + 1) * formed]
                self._columns[stage] = np.sort(np.concatenate([self._columns[stage], new]))
                missing[layers] = new.tolist()
            self.transfers = fetch(self._costs, missing, {})
            self.number += formed
        return formed

    def allocation(self, num_microbatches: int | None) -> Allocation:
        """Makes the allocation of the groups' pipelines; None means as many micro-batches as each group had."""
        total = self._per_group * self.number if num_microbatches is None else num_microbatches
        chain = chain_of(self._cluster, self._ranges, self._columns, evenly(total, self.number))
        return Allocation(chains=(chain,), schedule=self._schedule)
