"""What a planner decides: an allocation, compact enough for a million workers, and a plan around it. Pure values.

An allocation says which workers form which stages, how many micro-batches each of them runs, where micro-batches are
cut and at which frequency level each worker computes. `elaswave.planning.routes` turns a small one into a `Layout`
with a route for every micro-batch; nothing is lost by that, and nothing added but who meets whom.

Every policy is a `Planner`: ElasWave's own and its rivals share the signature.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from elaswave.planning.cluster import Cluster, Event
from elaswave.planning.costs import Costs
from elaswave.planning.schedule import Schedule


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


@dataclass(frozen=True, kw_only=True)
class Transfer:
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
    """Of training, from the event until everybody computes again."""
    lost_work_s: float = 0.0
    """Computation that is thrown away and done again, in seconds of the steps that this plan predicts."""
    from_checkpoint: bool = False
    """Begins again from the last durable checkpoint: everything since is lost, `lost_work_s` what is expected of it."""
    transfers: tuple[Transfer, ...] = ()
    memory_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Of each worker of `allocation.workers`: the most it holds during a step."""
    power_w: float = 0.0
    """Mean draw of the job's workers during a step; 0 where devices state none."""
    contributions: Mapping[str, str] = field(default_factory=dict)
    """Axis (dataflow, graph, frequency, randomness) -> one line on what it brought."""
    reason: str = ""
    """One line: what was chosen over what, and what bounds it."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
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
            "memory_bytes": self.memory_bytes.tolist(),
            "power_w": self.power_w,
            "contributions": dict(self.contributions),
            "reason": self.reason,
        }


class Planner(Protocol):
    """A recovery policy: a pure function."""

    def __call__(self, cluster: Cluster, costs: Costs, allocation: Allocation, event: Event) -> Plan:
        """Plans what to do after an event.

        Args:
            cluster: after the event: lost workers are gone, joined ones are there, slowed ones have their new speed.
            costs: of the model's layers.
            allocation: before the event.
            event: what happened.
        Raises:
            InfeasiblePlan: names the violated limit and by how much.
        """
        ...
