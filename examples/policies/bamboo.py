"""Bamboo: the neighbour of a lost worker takes over its layers, which it has computed redundantly all along.

    elaswave compare --policy examples/policies/bamboo.py:plan --lose 3

Thorpe, Zhao, Eyolfson and others: Bamboo: Making Preemptible Instances Resilient for Affordable Training of Large DNNs,
NSDI 2023 (arXiv 2204.12013). The abstract says the principle: "one node performs computations over not only its own
layers but also over some layers in its neighbor", in the bubbles of the pipeline. The rest is as its published
simulator has it (github.com/uclasystem/bamboo, 8080929, project_pactum/simulation/simulator.py); the sections were not
read:

- The worker of the stage before has a lost worker's redundant layers (for the first stage the last worker), and runs
  both from then on. It has no redundancy itself then (`simulate_spot_instance_remove`): a second loss beside it, or of
  it, is fatal, and the job begins again from a checkpoint (`simulate_fatal_failure`).
- When the step is over, the job is reconfigured into whole pipelines of the first depth if waiting workers can relieve
  those that run two stages, if another pipeline can be added, or if a further loss would be fatal with a chance above
  5 % (`simulate_should_reconfigure`). Workers that are left over wait.
- The batch is kept, the pipelines share it evenly (`samples_per_step` does not depend on them).

How it is modelled:

- The redundant forward passes of the next stage lengthen a step as far as they do not fit into its bubbles: a step is
  at least as long as the busiest worker with them. Memory for them is not counted: in its favour.
- A first stage's worker is replaced by that of the second stage, not by the last one: layers of one worker are one run
  here. It is as much work.
- A straggler stays: nothing about one was found.

Not reproduced: 3.7 times the throughput of checkpointing, 2.4 times less cost (abstract): the preemptions and models
behind them were not read. The simulator takes 1.5 times a step while a worker runs two stages (`fallback_slowdown`),
which is not used here; docs/policies.md has what is predicted instead.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Chain, Plan
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_metadata import replicates
from elaswave.planning.policy.policy_parts import chain_of, fallback_plan, fetch, gone_from, make_plan, unused
from elaswave.planning.policy.replication import Replication
from elaswave.planning.search.apportionment import evenly
from elaswave.planning.search.pipelines import Ranges, ranges_of

NAME = "bamboo"
REPLICATION = Replication(
    unit="stages",
    what="each pipeline holds the whole state, a worker also its successor's; that the loss of two neighbours is fatal "
    "all the same is in the plan",
    source="github.com/uclasystem/bamboo (8080929), project_pactum/simulation/simulator.py",
)
RECONFIGURE_S = 20.0
"""Of standing still for a reconfiguration: the simulator's `local_rendezvous_timeout_delta` for BERT and GPT-2 (10 s
for ResNet and GNMT, 5 s for VGG and AlexNet)."""
FATAL_S = 30.0
"""Of standing still after a fatal failure: the simulator's `global_rendezvous_timeout_delta`."""
FATAL_CHANCE_MAX = 0.05
"""The simulator's `simulate_should_reconfigure`: above this share of workers whose loss would be fatal."""


@replicates(REPLICATION)
def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Has neighbours take over, or reconfigures, or begins again.

    Raises:
        InfeasiblePlan: too few workers for a pipeline, or memory.
    """
    job = _Job.of(allocation)
    spare = unused(cluster, allocation)
    is_hit = False
    if event.kind in ("lost", "drained"):
        gone = set(gone_from(event).tolist())
        is_hit = job.loses(gone)
        if is_hit and not job.take_over(gone):
            times = RecoveryTimes(restart_s=FATAL_S)
            restarted = full_restart.restart(cluster, costs, allocation, times, planned=event.kind == "drained")
            if event.kind == "lost":
                restarted = replace(restarted, lost_work_s=times.backup_interval_s / 2)
            return fallback_plan(restarted, NAME, "a worker is lost whose layers no neighbour has")
    lost_steps = 0.5 if is_hit and event.kind == "lost" else 0.0  # of the step in hand
    if event.kind != "slowed" and job.should_reconfigure(len(spare)):
        columns, missing = job.reconfigured(cluster)
        after = Allocation(chains=(_shared(cluster, job.ranges, columns, allocation),), schedule=allocation.schedule)
        width = len(columns[0])
        made = make_plan(
            NAME,
            cluster,
            costs,
            after,
            pause_s=RECONFIGURE_S,
            lost_steps=lost_steps,
            transfers=fetch(costs, missing, dict.fromkeys(job.ranges, 1)),
            reason=f"reconfigured to {width} pipelines of {len(columns)} workers, "
            f"{cluster.num_workers - width * len(columns)} wait",
        )
    else:
        after = job.allocation(cluster, allocation)
        made = make_plan(
            NAME, cluster, costs, after, pause_s=0.0, lost_steps=lost_steps,
            reason=f"{job.num_overloaded} workers run two stages",
        )  # fmt: skip
    return _with_redundancy(made, cluster, costs, job.ranges)


def _shared(cluster: Cluster, ranges: Ranges, columns: list[np.ndarray], allocation: Allocation) -> Chain:
    return chain_of(cluster, ranges, columns, evenly(allocation.num_microbatches, len(columns[0])))


class _Place(NamedTuple):
    """What a worker of a pipeline runs: stages [first, stop) of a whole one."""

    first: int
    stop: int
    worker: int


@dataclass
class _Job:
    """Whole pipelines as columns of ids, those with a neighbour that has taken over one by one."""

    ranges: Ranges
    """Layers of the stages of a whole pipeline."""
    columns: list[np.ndarray]
    broken: list[list[_Place]]

    @classmethod
    def of(cls, allocation: Allocation) -> "_Job":
        """The pipelines of an allocation; workers beyond the narrowest stage of a chain wait."""
        usual = max(allocation.chains, key=lambda chain: (len(chain.stages), sum(each.width for each in chain.stages)))
        ranges = ranges_of(usual)
        width = min(stage.width for stage in usual.stages)
        starts = {start: number for number, (start, _) in enumerate(ranges)}
        stops = {stop: number + 1 for number, (_, stop) in enumerate(ranges)}
        broken = [
            [
                _Place(starts[start], stops[stop], int(stage.workers[row]))
                for (start, stop), stage in zip(ranges_of(chain), chain.stages, strict=True)
            ]
            for chain in allocation.chains
            if chain is not usual
            for row in range(min(stage.width for stage in chain.stages))
        ]
        return cls(ranges, [stage.workers[:width] for stage in usual.stages], broken)

    @property
    def num_overloaded(self) -> int:
        return sum(place.stop - place.first > 1 for pipeline in self.broken for place in pipeline)

    def loses(self, gone: set[int]) -> bool:
        """Takes the pipelines of lost workers out of the whole ones; whether any worker is one of them."""
        lost = np.array(sorted(gone), dtype=np.int64)
        hit = np.zeros(len(self.columns[0]), dtype=bool)
        for column in self.columns:
            hit |= np.isin(column, lost)
        for row in np.flatnonzero(hit).tolist():
            self.broken.append([_Place(s, s + 1, int(column[row])) for s, column in enumerate(self.columns)])
        self.columns = [column[~hit] for column in self.columns]
        return any(place.worker in gone for pipeline in self.broken for place in pipeline)

    def take_over(self, gone: set[int]) -> bool:
        """Has neighbours run the stages of lost workers; False: a loss is fatal."""
        for pipeline in self.broken:
            for lost in [place for place in pipeline if place.worker in gone]:
                index = pipeline.index(lost)
                if len(pipeline) == 1 or lost.stop - lost.first > 1:
                    return False
                beside = index - 1 if index else 1
                neighbour = pipeline[beside]
                if neighbour.worker in gone or neighbour.stop - neighbour.first > 1:
                    return False
                first, stop = min(lost.first, neighbour.first), max(lost.stop, neighbour.stop)
                pipeline[beside] = _Place(first, stop, neighbour.worker)
                del pipeline[index]
        return True

    def should_reconfigure(self, num_waiting: int) -> bool:
        """As of the simulator's `simulate_should_reconfigure`."""
        depth, overloaded = len(self.ranges), self.num_overloaded
        number = len(self.columns[0]) + len(self.broken)
        active = number * depth - overloaded
        if overloaded and (num_waiting >= overloaded or 2 * overloaded / active > FATAL_CHANCE_MAX):
            return True
        return (active + num_waiting) // depth > number

    def reconfigured(self, cluster: Cluster) -> tuple[list[np.ndarray], dict[tuple[int, int], list[int]]]:
        """Whole pipelines of all workers that are there, and the layers that workers have to be sent.

        As many as can keep their stage; a worker has the layers of the next stage too.
        """
        depth = len(self.ranges)
        width = max(1, cluster.num_workers // depth)
        held = [set(column.tolist()) for column in self.columns]
        for pipeline in self.broken:
            for place in pipeline:
                held[place.first].add(place.worker)
        there = set(cluster.ids.tolist())
        kept = [sorted(workers & there)[:width] for workers in held]
        free = sorted(there.difference(*kept))
        columns, missing = [], {}
        for stage, own in enumerate(kept):
            more = [free.pop(0) for _ in range(min(width - len(own), len(free)))]
            redundant = held[stage - 1] if stage else set()
            missing[self.ranges[stage]] = [worker for worker in more if worker not in redundant]
            columns.append(np.array(sorted([*own, *more]), dtype=np.int64))
        return columns, missing

    def allocation(self, cluster: Cluster, before: Allocation) -> Allocation:
        """The pipelines as they are, each with its share of the batch."""
        whole = len(self.columns[0])
        counts = evenly(before.num_microbatches, whole + len(self.broken))
        chains = []
        if whole:
            chains.append(chain_of(cluster, self.ranges, self.columns, counts[:whole]))
        for pipeline, count in zip(self.broken, counts[whole:].tolist(), strict=True):
            layers = tuple((self.ranges[place.first][0], self.ranges[place.stop - 1][1]) for place in pipeline)
            workers = [np.array([place.worker], dtype=np.int64) for place in pipeline]
            chains.append(chain_of(cluster, layers, workers, np.array([count], dtype=np.int64)))
        return Allocation(chains=tuple(chains), schedule=before.schedule)


def _with_redundancy(plan: Plan, cluster: Cluster, costs: Costs, ranges: Ranges) -> Plan:
    """The plan with the redundant forward passes, where its step has no room for them."""
    next_start = {start: ranges[(number + 1) % len(ranges)] for number, (start, _) in enumerate(ranges)}
    busiest_s = 0.0
    for chain in plan.allocation.chains:
        for (start, stop), stage in zip(ranges_of(chain), chain.stages, strict=True):
            seconds = costs.between("busy_s", start, stop)
            if (start, stop) in ranges:  # a worker that runs two stages has no redundancy
                seconds += costs.between("forward_s", *next_start[start])
            speed = cluster.speed[cluster.index_of(stage.workers)]
            busiest_s = max(busiest_s, float((stage.num_microbatches / speed).max()) * seconds)
    stages = [stage for chain in plan.allocation.chains for stage in chain.stages]
    step_s = max(plan.predicted_step_s, busiest_s + costs.overhead_s(stages))
    lost_steps = 0.0 if plan.from_checkpoint else plan.lost_work_s / plan.predicted_step_s
    return replace(plan, predicted_step_s=step_s, lost_work_s=lost_steps * step_s)
