"""A job on machines far apart, and a plan for it: the values that all planners here share. Pure.

A plan is one chain of stages: contiguous layers, each on the workers of one stage, which share its micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from elaswave.fences import Codec, codec_in_force, coded_bytes
from elaswave.planning.costs.layers import Costs, fenced_costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.costs.step_time.exact import Durations, durations_of
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.types import Hop, Kind

Copies = Literal["inside", "outside"]
"""Where the first follower of a block is: in its owner's site, so that nothing slow is sent but a site that is lost
takes state with it; or in another site."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FarJob:
    """What is planned for. Devices are meant by their position in the cluster's columns."""

    cluster: Cluster
    """With a network."""
    costs: tuple[Costs, ...]
    """For each kind of device of the cluster: the same layers, with the seconds of that kind at speed 1."""
    num_microbatches: int
    element_bytes: int
    """Of the activations between layers, as the costs count them."""
    codec: Codec = "none"
    """At the fences: the boundaries between stages in different sites."""
    memory_bandwidth_bytes_per_s: float | None = None
    """Of the slowest kind of device: what coding takes. None: coding takes no time."""
    copies: Copies = "inside"
    followers: int = 1
    sum_bytes: int = 8
    """Of a parameter's sum of gradients, as the costs count it."""
    ratios: Mapping[int, int] = field(default_factory=dict)
    """Of an adaptive codec, by position of the layer before the boundary; the largest for those that are not in it."""

    def __post_init__(self) -> None:
        """Checks what does not fit together.

        Raises:
            ValueError: with every fault that was found.
        """
        problems = []
        if self.cluster.network is None:
            problems.append("the cluster has no network")
        if not self.cluster.num_workers:
            problems.append("there is no worker")
        if len(self.costs) != len(self.cluster.devices):
            problems.append(f"costs are given for {len(self.costs)} of {len(self.cluster.devices)} kinds of devices")
        if len({costs.num_layers for costs in self.costs}) > 1:
            problems.append(f"kinds of devices have {[costs.num_layers for costs in self.costs]} layers: one model")
        if self.num_microbatches < 1:
            problems.append(f"there are {self.num_microbatches} micro-batches, needed: at least 1")
        if self.followers < 0:
            problems.append(f"there are {self.followers} followers, needed: at least 0")
        if problems:
            raise ValueError("the job cannot be planned: " + "; ".join(problems))

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.costs[0].num_layers

    @cached_property
    def site(self) -> np.ndarray:
        """Of each device."""
        assert self.cluster.site is not None
        return self.cluster.site

    @cached_property
    def raw_bytes(self) -> np.ndarray:
        """Of the tensor behind each layer: float64 [num_layers]."""
        return np.array([layer.boundary_bytes for layer in self.costs[0].layers])

    @cached_property
    def coded_bytes(self) -> np.ndarray:
        """The same where there is a fence."""
        sizes = [round(each / self.element_bytes) for each in self.raw_bytes.tolist()]
        codecs = [codec_in_force(self.codec, self.ratios.get(layer)) for layer in range(len(sizes))]
        return np.array(
            [float(coded_bytes(codec, (size,), self.element_bytes)) for codec, size in zip(codecs, sizes, strict=True)]
        )

    @cached_property
    def coding_s(self) -> np.ndarray:
        """Seconds of coding or decoding behind each layer, as `fenced_costs` has them."""
        if self.memory_bandwidth_bytes_per_s is None:
            return np.zeros(self.num_layers)
        moved = np.where(self.coded_bytes < self.raw_bytes, self.raw_bytes + self.coded_bytes, 0.0)
        seconds: np.ndarray = moved / self.memory_bandwidth_bytes_per_s
        return seconds


@dataclass(frozen=True, kw_only=True)
class FarStage:
    """One stage of a plan."""

    start: int
    stop: int
    devices: tuple[int, ...]
    """Positions in the cluster's columns, ascending."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The seconds of a step by the objective, and what bounds it."""

    run_s: float
    """Until the last backward has ended."""
    reduce_s: float
    """REDUCE and REDUCED, what computing does not hide."""
    vote_s: float
    gather_s: float
    bound: str
    """What takes longest: "stage 3 computes", "the link from stage 3 to 4", or "what stage 3 may hold"."""

    @property
    def step_s(self) -> float:
        """All together."""
        return self.run_s + self.reduce_s + self.vote_s + self.gather_s


@dataclass(frozen=True, kw_only=True)
class FarPlan:
    """Who runs what, and what the objective says of it."""

    planner: str
    stages: tuple[FarStage, ...]
    num_microbatches: tuple[tuple[int, ...], ...]
    """Of each device of each stage."""
    schedule: Schedule
    parts: StepParts
    fences: tuple[int, ...]
    """Layers before which the codec applies."""
    codec: str
    in_flight: tuple[int, ...]
    """What a worker of each stage may hold."""

    @property
    def step_s(self) -> float:
        """Seconds of a step by the objective."""
        return self.parts.step_s


def fences_of(job: FarJob, stages: tuple[FarStage, ...] | list[FarStage]) -> tuple[int, ...]:
    """Finds the boundaries at which some tensor goes from one site to another: gives the first layer behind each."""
    found = []
    for before, after in zip(stages, stages[1:]):
        if len(set(job.site[[*before.devices, *after.devices]].tolist())) > 1:
            found.append(after.start)
    return tuple(found)


def costs_of_kind(job: FarJob, kind: int, fences: tuple[int, ...]) -> Costs:
    """Costs of a kind of device with coded boundaries, and the seconds of coding in the layers beside them."""
    return fenced_costs(
        job.costs[kind],
        {fence - 1: codec_in_force(job.codec, job.ratios.get(fence - 1)) for fence in fences},
        element_bytes=job.element_bytes,
        memory_bandwidth_bytes_per_s=job.memory_bandwidth_bytes_per_s,
    )


def allocation_of_plan(job: FarJob, plan: FarPlan) -> Allocation:
    """Returns the same plan as an allocation, of which `elaswave.planning.programs.routes` makes a layout."""
    shares = []
    for stage, counts in zip(plan.stages, plan.num_microbatches, strict=True):
        ids = job.cluster.ids[list(stage.devices)]
        order = np.argsort(ids)
        levels = [job.cluster.base_level(int(worker)) for worker in ids[order]]
        shares.append(
            StageShare(
                start=stage.start,
                stop=stage.stop,
                workers=ids[order],
                num_microbatches=np.array(counts, dtype=np.int64)[order],
                levels=np.array(levels, dtype=np.int64),
            )
        )
    cuts = tuple({stage.start: job.num_microbatches} for stage in plan.stages[1:])
    chain = Chain(stages=tuple(shares), num_microbatches=job.num_microbatches, cuts=cuts)
    return Allocation(chains=(chain,), schedule=plan.schedule)


def durations_on(job: FarJob, fences: tuple[int, ...]) -> Durations:
    """Makes the seconds of every action, by the kind of the worker's device and its speed."""
    kinds: Mapping[int, Durations] = {
        kind: durations_of(costs_of_kind(job, kind, fences).layer_s, job.cluster.speed_of())
        for kind in range(len(job.costs))
    }
    kind_of = dict(zip(job.cluster.ids.tolist(), job.cluster.device.tolist(), strict=True))

    def durations(hop: Hop, kind: Kind) -> float:
        return kinds[kind_of[hop.worker]](hop, kind)

    return durations


def without_devices(job: FarJob, workers: tuple[int, ...]) -> FarJob:
    """Returns the job after these workers are gone."""
    return replace(job, cluster=job.cluster.without(workers))
