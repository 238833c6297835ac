"""What a planner chooses between: shapes of a job, made of stages' workers and cuts, and what becomes of them. Pure.

A shape says who is in which stage and where micro-batches are cut; everything else of an allocation follows from it.
Shapes are scored by stage (`score`), which takes no longer for a million workers than for a hundred, and only the best
are built worker by worker (`build`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, worker_speeds
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.costs.step_time.bound import StageTable, busiest_s, step_per_stage, travel_s
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.planning.programs.shared_layers import Cut, cuts_of, held_ranges, share_layers, widen_cuts
from elaswave.planning.search.apportionment import apportion
from elaswave.planning.search.memory_limits import MemoryBudget, held_microbatches
from elaswave.planning.search.partition import choose_widths, split_layers, split_layers_and_workers

JOINT_SIZE = 50_000
"""`split_layers_and_workers` is tried where stages x layers**2 is at most this."""


class _Held(NamedTuple):
    """A stage's layers and its number of workers."""

    start: int
    stop: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Shape:
    """Stages of one chain."""

    members: tuple[np.ndarray, ...]
    """For each stage the positions of its workers in the cluster, ascending."""
    cuts: tuple[Cut, ...]
    num_microbatches: int
    origin: str
    """How it came about: a few words for a plan's reason."""

    @property
    def widths(self) -> np.ndarray:
        """Workers of each stage."""
        return np.array([len(own) for own in self.members], dtype=np.int64)

    def held(self, num_layers: int) -> list[tuple[int, int]]:
        """Lists the layers that the workers of each stage hold."""
        return held_ranges(self.cuts, num_layers)


def whole_layers(
    cluster: Cluster, costs: Costs, members: Sequence[np.ndarray], num_microbatches: int, budget: MemoryBudget
) -> tuple[Cut, ...]:
    """Cuts between whole layers: the smallest slowest stage that memory permits.

    Raises:
        InfeasiblePlan: no split fits; says which stage lacks how much at the least.
    """
    prefix = costs.prefix["busy_s"].tolist()
    rates = [float(cluster.speed[own].sum()) for own in members]
    if len(members) > costs.num_layers:
        raise InfeasiblePlan(
            f"layers: {len(members)} stages for {costs.num_layers} layers, {len(members) - costs.num_layers} stages "
            "too many; every stage needs a layer"
        )
    bounds = split_layers(prefix, [1.0 / rate for rate in rates])
    assert bounds is not None  # without limits there is always a split
    if all(budget.fits(stage, bounds[stage], bounds[stage + 1]) for stage in range(len(members))):
        return cuts_of(bounds, num_microbatches)
    limited = split_layers(prefix, [1.0 / rate for rate in rates], budget.earliest_starts())
    if limited is None:
        stage, parts, has = budget.lacking(bounds)
        needed = parts.total
        listed = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in parts.by_name.items())
        raise InfeasiblePlan(
            f"memory: no split of {costs.num_layers} layers over {len(members)} stages fits; stage {stage} of the "
            f"fastest one needs {needed / 1e9:.2f} GB per worker and has {has / 1e9:.2f} GB: "
            f"{(needed - has) / 1e9:.2f} GB too little ({listed}); use more stages or workers, or smaller micro-batches"
        )
    return cuts_of(limited, num_microbatches)


def shared_layers(
    cluster: Cluster,
    costs: Costs,
    members: Sequence[np.ndarray],
    num_microbatches: int,
    budget: MemoryBudget,
    *,
    widen: bool,
) -> tuple[Cut, ...] | None:
    """Cuts with shared boundary layers; None if memory does not permit any."""
    prefix = costs.prefix["busy_s"]
    capacities = np.array([float(cluster.speed[own].sum()) for own in members])
    cuts = share_layers(prefix, capacities, num_microbatches, budget.fits)
    if cuts is None or not widen:
        return cuts
    speeds = [cluster.speed[own] for own in members]
    counts = [apportion(num_microbatches, 1.0 / own) for own in speeds]
    return widen_cuts(prefix, cuts, counts, speeds, budget.fits)


def balanced_widths(
    cluster: Cluster, costs: Costs, members: Sequence[np.ndarray], num_workers: int, num_microbatches: int
) -> list[np.ndarray]:
    """Widths of stages worth trying, if workers may change stage: best with whole layers, and even ones."""
    num_stages = len(members)
    current = [len(own) for own in members]
    prefix = costs.prefix["busy_s"]
    if num_workers < num_stages or num_stages > costs.num_layers:
        return []
    found = []
    even = choose_widths(np.ones(num_stages), num_workers, num_workers, current)
    assert even is not None
    found.append(even)
    bounds = None
    if num_stages * costs.num_layers**2 <= JOINT_SIZE:
        bounds = split_layers_and_workers(prefix, num_stages, num_workers, num_microbatches)
    for _ in range(3):
        if bounds is None:
            bounds = split_layers(prefix.tolist(), [1.0 / width for width in found[-1].tolist()])
        assert bounds is not None
        widths = choose_widths(np.diff(prefix[list(bounds)]), num_workers, num_microbatches, current)
        assert widths is not None
        if any(np.array_equal(widths, known) for known in found):
            break
        found.append(widths)
        bounds = None
    return found


def move_workers(
    cluster: Cluster, members: Sequence[np.ndarray], free: np.ndarray, widths: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Stages of these widths with as few workers as possible changing stage; workers in no stage come first.

    Args:
        cluster: the workers.
        members: of each stage, as in `Shape`.
        free: positions of workers that are in no stage.
        widths: wanted; together as many as there are workers, in stages and free.
    """
    kept = []
    moving = [free]
    for own, width in zip(members, widths.tolist(), strict=True):
        if len(own) > width:
            leaves = np.arange(len(own)) >= width
            speeds = cluster.speed[own]
            if float(speeds.min()) < float(speeds.max()):
                # Workers nearest to the others' speed leave, so that stages keep theirs.
                away = np.abs(speeds - np.median(speeds))
                order = np.argsort(away, kind="stable")
                even = order[away[order] <= 1e-12]
                leaves[:] = False
                leaves[np.concatenate([even[::-1], order[len(even) :]])[: len(own) - width]] = True
            moving.append(own[leaves])
            own = own[~leaves]
        kept.append(own)
    pool = np.concatenate(moving)
    stages, first = [], 0
    for own, width in zip(kept, widths.tolist(), strict=True):
        lacking = width - len(own)
        stages.append(np.sort(np.concatenate([own, pool[first : first + lacking]])) if lacking else own)
        first += lacking
    return tuple(stages)


def build(
    cluster: Cluster,
    costs: Costs,
    shape: Shape,
    schedule: Schedule,
    levels: np.ndarray,
    *,
    by_speed: bool = True,
    followers: int = DEFAULT_FOLLOWERS,
) -> Allocation:
    """Makes the allocation of a shape: micro-batches are split over the workers of each stage.

    Args:
        cluster: the workers.
        costs: of the layers.
        shape: of the job.
        schedule: of the job.
        levels: frequency level of every worker of the cluster.
        by_speed: split so that workers end together, and no worker is given more than its memory holds; else evenly.
        followers: live copies of every block, for memory.
    Raises:
        InfeasiblePlan: the workers of a stage cannot hold its micro-batches.
    """
    held = shape.held(costs.num_layers)
    shares = []
    limits = None
    if by_speed:
        number = shape.num_microbatches
        limits = held_microbatches(cluster, costs, held, shape.members, number, schedule, followers)
    for stage, ((start, stop), own) in enumerate(zip(held, shape.members, strict=True)):
        if by_speed:
            speeds = worker_speeds(cluster, own, levels[own])
            caps = None if limits is None else limits[stage]
            counts = apportion(shape.num_microbatches, 1.0 / speeds, caps)
        else:
            counts = apportion(shape.num_microbatches, np.ones(len(own)))
        shares.append(
            StageShare(start=start, stop=stop, workers=cluster.ids[own], num_microbatches=counts, levels=levels[own])
        )
    chain = Chain(stages=tuple(shares), num_microbatches=shape.num_microbatches, cuts=shape.cuts)
    return Allocation(chains=(chain,), schedule=schedule)


def score(cluster: Cluster, costs: Costs, shape: Shape, schedule: Schedule) -> float:
    """Computes the seconds of a step in closed form, from what stages have in common: for choosing between shapes."""
    held = shape.held(costs.num_layers)
    table = StageTable.of(held, shape.cuts, shape.num_microbatches, costs)
    busiest_each_s, mean = busiest_s(table, shape.num_microbatches, [cluster.speed[own] for own in shape.members])
    ends = step_per_stage(table, busiest_each_s, mean, schedule, travel_s(cluster, costs, table))
    stages = [_Held(start, stop, len(own)) for (start, stop), own in zip(held, shape.members, strict=True)]
    return float(ends.max()) + costs.overhead_s(stages)
