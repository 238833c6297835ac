"""Pipelines of several depths beside each other: what a planner may make of a number of workers that is no rectangle.

With few micro-batches per pipeline a stage cannot share out a lost worker's part evenly: one worker gets one
micro-batch more, which is much. Then it may be better to let most pipelines go on as they are, and to make of all other
workers pipelines that are a stage longer or shorter. Deeper ones also need less memory per worker, so that more fits in
flight.

Mixes are ranked by what a pipeline of each depth would take if layers could be split at will; the best ones get real
stages (`template_beside`) and micro-batches (`apportion_pipelines`), and one pipeline of each depth is compiled and
timed. Pure.

Source: Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125, section 4), whose templates these are. Differs: chosen by
the time of the step, after every event, among all that the workers can be made into; Oobleck mends what is broken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster, worker_speeds
from elaswave.costs.memory import MemoryModel, num_copies
from elaswave.costs.schedules import Schedule, splits_backwards
from elaswave.costs.step_time.bound import pipeline_line
from elaswave.errors import InfeasiblePlan
from elaswave.planning.apportionment import apportion, apportion_pipelines
from elaswave.planning.memory_limits import memory_limits
from elaswave.planning.partition import template_beside
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.planning.prediction import fidelity_for, step_s

Ranges = tuple[tuple[int, int], ...]
"""Layers [start, stop) of each stage."""
SHORTER, LONGER = 2, 3
"""A pipeline may have so many stages fewer, or more, than those before; one more where workers are left over."""
RANKED = 16
"""Mixes that get real stages."""


@dataclass(frozen=True, kw_only=True)
class _Mix:
    """Depth -> number of pipelines, the usual depth first."""

    groups: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{number} x {depth}" for depth, number in self.groups)


@dataclass(frozen=True, kw_only=True, eq=False)
class Crew:
    """Who is left of a job, by position in the cluster, and what they hold."""

    usual: Ranges
    """Layers of the stages of before."""
    members: Sequence[np.ndarray]
    """Of each of these stages, ascending."""
    free: np.ndarray
    """Those in no stage."""
    held: np.ndarray
    """int64 [workers of the cluster, 2]: layers [start, stop) that each has held."""
    levels: np.ndarray
    """Frequency level of every worker of the cluster."""

    @property
    def whole(self) -> int:
        """Pipelines that still have a worker in every stage."""
        return min(map(len, self.members))


def mixed_pipelines(
    cluster: Cluster,
    costs: Costs,
    crew: Crew,
    num_microbatches: int,
    schedule: Schedule,
    *,
    followers: int,
    most: int,
) -> list[tuple[Allocation, str]]:
    """The best mixes.

    Args:
        cluster: after the event, with workers of one speed, levels included: pipelines of equal depth get equal
            work.
        costs: of the layers.
        crew: all of its workers.
        num_microbatches: of the step.
        schedule: of the job.
        followers: live copies of every block, for memory.
        most: how many are wanted.
    Returns:
        Allocations, the fastest first, and how they came about; none if speeds differ or nothing fits.
    """
    speeds = worker_speeds(cluster, np.arange(cluster.num_workers), crew.levels)[0]
    if not np.all(speeds == speeds[0]):
        return []
    found = []
    ideal = _Ideal(cluster, costs, schedule, followers)
    mixes = _mixes(crew, costs.num_layers)
    for mix in sorted(mixes, key=lambda each: ideal.step_s(each, num_microbatches))[:RANKED]:
        try:
            allocation = _allocation(cluster, costs, mix, crew, num_microbatches, schedule)
            if allocation is not None:
                found.append((_one_of_each_s(cluster, costs, allocation, followers), allocation, str(mix)))
        except InfeasiblePlan:
            continue
    found.sort(key=lambda each: each[0])
    return [(allocation, f"pipelines x workers of each: {mix}") for _, allocation, mix in found[:most]]


def _mixes(crew: Crew, num_layers: int) -> list[_Mix]:
    """Everything that gives all workers a place: pipelines of the usual depth, and others of one depth or two."""
    depth, number = len(crew.usual), sum(map(len, crew.members)) + len(crew.free)
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for kept in range(crew.whole, -1, -1):
        rest = number - kept * depth
        for other in range(max(1, depth - SHORTER), min(depth + LONGER, num_layers) + 1):
            shorter, longer = (rest // other) - rest % other, rest % other
            if shorter < 0 or rest < other or (longer and other == num_layers):
                continue
            counts = {depth: kept}
            for key, more in ((other, shorter), (other + 1, longer)):
                counts[key] = counts.get(key, 0) + more
            groups = tuple((key, count) for key, count in counts.items() if count)
            if len(groups) > 1 or groups[0][0] != depth:
                found[groups] = None
    return [_Mix(groups=groups) for groups in found]


class _Ideal:
    """Pipelines whose layers are split at will: for ranking."""

    def __init__(self, cluster: Cluster, costs: Costs, schedule: Schedule, followers: int) -> None:
        self._costs = costs
        self._seconds = [
            float(costs.prefix[f"{name}_s"][-1]) for name in ("forward", "input_gradient", "weight_gradient")
        ]
        self._memory_bytes = cluster.memory_bytes.min(keepdims=True)
        self._num_workers = cluster.num_workers
        self._copies = num_copies(followers, cluster.num_workers)
        self._schedule: Schedule = schedule

    def linear(self, depth: int) -> tuple[float, float]:
        """A pipeline with m micro-batches takes first + m x second seconds; infinitely long if it does not fit."""
        # A stage is a depth-th of all layers, which are held by as many workers as there are pipelines.
        model = MemoryModel.of_width(self._costs, self._num_workers / depth, self._copies)
        fits = float(model.most_in_flight(0, self._costs.num_layers, self._memory_bytes * depth)[0])
        if fits < 1:
            return float("inf"), float("inf")
        forward, first, second = (seconds / depth for seconds in self._seconds)
        return pipeline_line(
            ((forward, first, second),) * depth, split=splits_backwards(self._schedule) and fits >= depth
        )

    def step_s(self, mix: _Mix, num_microbatches: int) -> float:
        """Of a mix, if micro-batches could be dealt out in parts."""
        rate = done = 0.0
        for depth, number in mix.groups:
            fixed, pace = self.linear(depth)
            rate += number / pace
            done += number * fixed / pace if np.isfinite(fixed) else float("inf")
        return (num_microbatches + done) / rate if rate else float("inf")


def _allocation(
    cluster: Cluster, costs: Costs, mix: _Mix, crew: Crew, num_microbatches: int, schedule: Schedule
) -> Allocation | None:
    """A mix with real stages, workers and micro-batches; None if its depths cannot be one layout."""
    templates: dict[int, Ranges] = {}
    if dict(mix.groups).get(len(crew.usual)):
        templates[len(crew.usual)] = crew.usual
    for depth, _ in mix.groups:
        if depth not in templates:
            others = frozenset(layers for ranges in templates.values() for layers in ranges)
            ranges = template_beside(costs, depth, others)
            if ranges is None:
                return None
            templates[depth] = ranges
    columns = _columns(mix, templates, crew)
    times = [linear_s(costs, templates[depth], schedule) for depth, _ in mix.groups]
    totals = apportion_pipelines(num_microbatches, [number for _, number in mix.groups], times)
    chains = []
    for (depth, number), total in zip(mix.groups, totals, strict=True):
        if not total:
            continue
        counts = apportion(total, np.ones(number))
        shares = tuple(
            StageShare(
                start=start, stop=stop, workers=cluster.ids[where], num_microbatches=counts, levels=crew.levels[where]
            )
            for (start, stop), where in zip(templates[depth], columns[depth], strict=True)
        )
        cuts = tuple({start: total} for start, _ in templates[depth][1:])
        chains.append(Chain(stages=shares, num_microbatches=total, cuts=cuts))
    return Allocation(chains=tuple(chains), schedule=schedule)


def _columns(mix: _Mix, templates: dict[int, Ranges], crew: Crew) -> dict[int, list[np.ndarray]]:
    """Positions of each depth's workers, stage by stage: workers that held early layers get early ones again.

    Pipelines of the usual depth keep their workers as long as there are enough in every stage.
    """
    usual, held = len(crew.usual), crew.held
    kept = min(dict(mix.groups).get(usual, 0), crew.whole)
    columns: dict[int, list[list[int]]] = {depth: [[] for _ in range(depth)] for depth, _ in mix.groups}
    pool: list[int] = crew.free.tolist()
    for stage, own in enumerate(crew.members):
        if kept:
            start, stop = templates[usual][stage]
            lacks = (held[own, 0] > start) | (held[own, 1] < stop)
            own = own[np.argsort(lacks, kind="stable")]
            columns[usual][stage] = own[:kept].tolist()
        pool += own[kept:].tolist()
    pool.sort(key=lambda worker: (int(held[worker].sum()), worker))
    places = sorted(
        (start + stop, depth, stage)
        for depth, number in mix.groups
        for stage, (start, stop) in enumerate(templates[depth])
        for _ in range(number - (kept if depth == usual else 0))
    )
    for worker, (_, depth, stage) in zip(pool, places, strict=True):
        columns[depth][stage].append(worker)
    return {depth: [np.sort(np.array(own, dtype=np.int64)) for own in stages] for depth, stages in columns.items()}


def _one_of_each_s(cluster: Cluster, costs: Costs, allocation: Allocation, followers: int) -> float:
    """Seconds of the slowest pipeline: one of each depth, with the most micro-batches, within the memory there is."""
    limits = memory_limits(cluster, costs, allocation, followers=followers)
    bounds = None if limits is None else limits.as_mapping()
    slowest = 0.0
    for chain in allocation.chains:
        most = int(chain.stages[0].num_microbatches[0])
        stages = tuple(
            replace(
                share, workers=share.workers[:1], num_microbatches=share.num_microbatches[:1], levels=share.levels[:1]
            )
            for share in chain.stages
        )
        one = replace(chain, stages=stages, num_microbatches=most, cuts=tuple({min(cut): most} for cut in chain.cuts))
        alone = replace(allocation, chains=(one,))
        slowest = max(slowest, step_s(cluster, costs, alone, fidelity_for(alone), max_in_flight=bounds))
    return slowest


def linear_s(costs: Costs, ranges: Ranges, schedule: Schedule) -> tuple[float, float]:
    """Seconds of a pipeline beside its micro-batches, and of each of them at the slowest stage."""
    fields = ("forward_s", "input_gradient_s", "weight_gradient_s")
    stages = [tuple(costs.between(field, start, stop) for field in fields) for start, stop in ranges]
    return pipeline_line(stages, split=splits_backwards(schedule))  # type: ignore[arg-type]  # three fields each


def ranges_of(chain: Chain) -> Ranges:
    """Layers that each stage runs, shared ones counted where most micro-batches run them."""
    bounds = [0, *(max(sorted(cut), key=lambda layer: cut[layer]) for cut in chain.cuts), chain.stages[-1].stop]
    return tuple(pairwise(bounds))
