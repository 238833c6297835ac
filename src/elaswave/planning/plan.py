"""What a planner decides: an allocation, compact enough for a million workers, and a plan around it. Pure values.

An allocation says which workers form which stages, how many micro-batches each of them runs, where micro-batches are
cut and at which frequency level each worker computes. `elaswave.planning.programs.routes` turns a small one into a
`Layout` with a route for every micro-batch; nothing is lost by that, and nothing added but who meets whom.

Every policy is a `Planner`: ElasWave's own and the baselines' share the signature.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from elaswave.errors import UsageError
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.schedules import SCHEDULES, Schedule, splits_backwards


@dataclass(frozen=True, kw_only=True, eq=False)
class StageShare:
    """One stage of a chain: its layers, its workers and what each of them does. Arrays have one entry per worker."""

    start: int
    """First layer that its workers hold."""
    stop: int
    """One past the last layer that they hold; beyond the next stage's start where the two share layers."""
    workers: np.ndarray
    """int64 ids, ascending."""
    num_microbatches: np.ndarray
    """int64, at least 0, adding up to the chain's."""
    levels: np.ndarray
    """int64: index of the frequency level in the worker's device."""

    @property
    def width(self) -> int:
        """Number of workers."""
        return len(self.workers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chain:
    """Stages that together hold every layer once (shared layers twice) and run some of the micro-batches."""

    stages: tuple[StageShare, ...]
    num_microbatches: int
    cuts: tuple[Mapping[int, int], ...]
    """For each boundary between stages: first layer of the later stage -> number of micro-batches cut there. More than
    one entry where layers are shared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Allocation:
    """Who does how much of what. Usually one chain; pipelines of different depth (Oobleck) are several."""

    chains: tuple[Chain, ...]
    schedule: Schedule

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the step."""
        return sum(chain.num_microbatches for chain in self.chains)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.chains[0].stages[-1].stop

    @property
    def workers(self) -> np.ndarray:
        """Ids of all workers that compute, ascending."""
        return np.sort(np.concatenate([stage.workers for chain in self.chains for stage in chain.stages]))

    def check(self) -> None:
        """Checks what construction does not, since planners make many: that every micro-batch passes every layer once.

        Raises:
            ValueError: with every fault that was found.
        """
        problems = [
            f"chain {number}: {fault}" for number, chain in enumerate(self.chains) for fault in _faults_of(chain)
        ]
        if not self.chains:
            problems.append("there is no chain")
        elif not problems:
            if len({chain.stages[-1].stop for chain in self.chains}) > 1:
                problems.append("chains end at different layers")
            workers = self.workers
            if len(twice := workers[1:][workers[1:] == workers[:-1]]):
                problems.append(f"worker {twice[0]} is in two stages")
        if self.schedule not in SCHEDULES:
            problems.append(f"the schedule is {self.schedule!r}, needed: one of {', '.join(SCHEDULES)}")
        if problems:
            raise ValueError("the allocation is impossible: " + "; ".join(problems))


def num_actions(allocation: Allocation) -> int:
    """Actions of a step."""
    kinds = 3 if splits_backwards(allocation.schedule) else 2
    return kinds * sum(chain.num_microbatches * len(chain.stages) for chain in allocation.chains)


def levels_of(allocation: Allocation) -> dict[int, int]:
    """Maps worker to the index of its frequency level."""
    return {
        worker: level
        for chain in allocation.chains
        for stage in chain.stages
        for worker, level in zip(stage.workers.tolist(), stage.levels.tolist(), strict=True)
    }


def at_levels(allocation: Allocation, levels: np.ndarray) -> Allocation:
    """Returns the same allocation with these levels, in the order of chains, stages and workers."""
    first = 0
    chains = []
    for chain in allocation.chains:
        stages: list[StageShare] = []
        for share in chain.stages:
            stages.append(replace(share, levels=levels[first : first + share.width]))
            first += share.width
        chains.append(replace(chain, stages=tuple(stages)))
    return replace(allocation, chains=tuple(chains))


@dataclass(frozen=True, kw_only=True)
class StateTransfer:
    """State that goes to workers which did not hold it: layers [start, stop), to each of `workers`."""

    start: int
    stop: int
    workers: tuple[int, ...]
    num_bytes: float
    """All together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What to do after an event, what it will bring, and why."""

    policy: str
    allocation: Allocation
    predicted_step_s: float
    predicted_pause_s: float
    """Of training, from the event until all workers compute again."""
    lost_work_s: float = 0.0
    """Computation that is thrown away and done again, in seconds of the steps that this plan predicts."""
    from_checkpoint: bool = False
    """Begins again from the last durable checkpoint: everything since is lost, `lost_work_s` what is expected of it."""
    transfers: tuple[StateTransfer, ...] = ()
    copy_s: float = 0.0
    """For which the transfers travel in the background, beside the pause; the allocation counts from then on. 0:
    nothing is copied, or training stands still for it, which is in the pause, or the policy does not say."""
    interim_step_s: float | None = None
    """Until then: the workers that are left where they are, their links shared with the copies."""
    memory_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Of each worker of `allocation.workers`: the most it holds during a step."""
    power_w: float = 0.0
    """Mean draw of the job's workers during a step; 0 where devices state none."""
    contributions: Mapping[str, str] = field(default_factory=dict)
    """Axis (dataflow, graph, frequency, randomness) -> one line on what it brought."""
    reason: str = ""
    """One line: what was chosen over what, and what bounds it."""

    def to_json(self) -> dict[str, Any]:
        """Describes the plan as plain data."""
        return {
            "policy": self.policy,
            "predicted_step_s": self.predicted_step_s,
            "predicted_pause_s": self.predicted_pause_s,
            "lost_work_s": self.lost_work_s,
            "from_checkpoint": self.from_checkpoint,
            "num_microbatches": self.allocation.num_microbatches,
            "schedule": self.allocation.schedule,
            "chains": [
                {
                    "num_microbatches": chain.num_microbatches,
                    "cuts": [{str(layer): int(count) for layer, count in cut.items()} for cut in chain.cuts],
                    "stages": [
                        {
                            "start": stage.start,
                            "stop": stage.stop,
                            "workers": stage.workers.tolist(),
                            "num_microbatches": stage.num_microbatches.tolist(),
                            "levels": stage.levels.tolist(),
                        }
                        for stage in chain.stages
                    ],
                }
                for chain in self.allocation.chains
            ],
            "transfers": [
                {"layers": [each.start, each.stop], "workers": list(each.workers), "num_bytes": each.num_bytes}
                for each in self.transfers
            ],
            "copy_s": self.copy_s,
            "interim_step_s": self.interim_step_s,
            "memory_bytes": self.memory_bytes.tolist(),
            "power_w": self.power_w,
            "contributions": dict(self.contributions),
            "reason": self.reason,
        }


def _faults_of(chain: Chain) -> Iterator[str]:
    """Yields what is wrong with a chain by itself."""
    stages = chain.stages
    if not stages or len(chain.cuts) != len(stages) - 1:
        yield f"{len(stages)} stages with {len(chain.cuts)} cuts, needed: at least one stage, a cut between each two"
        return
    if stages[0].start != 0:
        yield f"it begins at layer {stages[0].start}, needed: 0"
    for number, stage in enumerate(stages):
        if not stage.width or not len(stage.num_microbatches) == len(stage.levels) == stage.width:
            yield (
                f"stage {number} has {stage.width} workers, micro-batches of {len(stage.num_microbatches)} and levels "
                f"of {len(stage.levels)}, needed: of as many, at least one"
            )
            continue
        if stage.start >= stage.stop:
            yield f"stage {number} holds layers [{stage.start}, {stage.stop}), needed: at least one"
        if not bool(np.all(stage.workers[1:] > stage.workers[:-1])):
            yield f"the workers of stage {number} do not ascend"
        if int(min(stage.num_microbatches.min(), stage.levels.min())) < 0:
            yield f"stage {number} has a number of micro-batches or a level below 0"
        if (total := int(stage.num_microbatches.sum())) != chain.num_microbatches:
            yield f"stage {number} runs {total} micro-batches of {chain.num_microbatches}"
    for number, (cut, before, after) in enumerate(zip(chain.cuts, stages, stages[1:], strict=False)):
        if not cut or min(cut) < after.start or max(cut) > before.stop or min(cut.values()) < 0:
            yield (
                f"micro-batches are cut at layers {dict(cut)} behind stage {number}, which ends at {before.stop}, and "
                f"the next one begins at {after.start}"
            )
        elif sum(cut.values()) != chain.num_microbatches:
            yield f"{sum(cut.values())} micro-batches of {chain.num_microbatches} are cut behind stage {number}"


class Planner(Protocol):
    """A recovery policy, built in or a person's own: a pure function from what there is to a plan.

    Called after every event, by `elaswave plan`, `compare`, `simulate`, and by the coordinator of a training job. It is
    pure: no clock, no chance, nothing kept from one call to the next, none of its arguments changed; what it decided
    before is in `allocation`. It needs numpy at most.

    What it returns is checked (`checked`): a `Plan`, whose allocation passes every micro-batch through every layer
    once, has no worker in two stages and none that is not in `cluster`, and whose predicted step is above 0. In a
    training job it must also run: it keeps the number of micro-batches, its chains are one layout, its programs come to
    their end within the memory bounds. A plan that does not pass is not used: `plan`, `compare` and `simulate` end with
    an error, a training job goes on with its survivors' layout and says why.

    A training job takes the allocation only. Pauses, lost work and transfers are predictions, for the other commands:
    the job's own state never goes back to a checkpoint because of a policy.

    `elaswave.planning.policy.policy_metadata.replicates` is for what cannot be seen from a plan: what the policy keeps
    copies of.
    """

    def __call__(self, cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
        """Plans what to do after an event.

        Args:
            cluster: after the event: lost workers are gone, joined ones are there, slowed ones have their new speed.
                Workers that `allocation` does not use may be in it too.
            costs: of the model's layers, measured or analytic.
            allocation: before the event, with the workers that are lost.
            event: what happened: workers ``lost``, ``joined``, ``drained`` (to be relieved of work, then gone) or
                ``slowed`` (or as fast as before: its speed says).
        Raises:
            InfeasiblePlan: there is no plan; names the violated limit and by how much.
        """
        ...


def checked(found: Any, name: str, cluster: Cluster) -> Plan:
    """Returns what a policy has returned, if it is a plan of workers that are there.

    Args:
        found: by the policy.
        name: of the policy.
        cluster: that it was asked for.
    Raises:
        UsageError: it is none.
    """
    if not isinstance(found, Plan):
        raise UsageError(f"policy {name} returned {type(found).__name__}, needed: elaswave.planning.plan.Plan")
    try:
        found.allocation.check()
        cluster.index_of(found.allocation.workers)
    except Exception as error:  # columns of any kind may be in it
        raise UsageError(f"policy {name} returned an allocation that cannot be: {error}") from error
    if not 0 < found.predicted_step_s < float("inf"):
        raise UsageError(f"policy {name} predicts steps of {found.predicted_step_s} s, needed: above 0")
    if not 0 <= found.predicted_pause_s < float("inf"):
        raise UsageError(f"policy {name} predicts a pause of {found.predicted_pause_s} s, needed: at least 0")
    if not 0 <= found.copy_s < float("inf"):
        raise UsageError(f"policy {name} copies for {found.copy_s} s, needed: at least 0")
    return found
