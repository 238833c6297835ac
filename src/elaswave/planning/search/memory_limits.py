"""What memory permits: layers for stages, micro-batches in flight for workers. Pure; the formula is `costs.layers`'.

A schedule wants so many micro-batches in flight (`elaswave.planning.costs.schedules.in_flight_bounds`); a worker
without the memory for them can still run it with fewer, and waits sometimes instead. A plan counts with what regular
pipelines of its stages' widths hold; programs are compiled for routes, and `layout_limits` says what these would hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs, MemoryModel, MemoryParts, fitting, num_copies
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule, in_flight, in_flight_bounds
from elaswave.planning.plan import Allocation
from elaswave.types import Layout


class MemoryBudget:
    """Whether layers fit into the memory of a stage's workers.

    Args:
        cluster: the workers.
        costs: of the layers.
        members: positions of each stage's workers in the cluster.
        num_microbatches: of the step.
        schedule: says how many micro-batches are in flight.
        followers: live copies of every block.
        at_most: be content with so many micro-batches in flight: such a job runs, if slower.
    """

    def __init__(
        self,
        cluster: Cluster,
        costs: Costs,
        members: Sequence[np.ndarray],
        num_microbatches: int,
        schedule: Schedule,
        followers: int = DEFAULT_FOLLOWERS,
        *,
        at_most: int | None = None,
    ) -> None:
        self._costs = costs
        self._widths = np.array([len(own) for own in members], dtype=np.int64)
        self._limits = [float(cluster.memory_bytes[own].min()) for own in members]
        most = -(-num_microbatches // self._widths)
        self._in_flight = np.minimum(in_flight(self._widths, schedule), most)
        if at_most is not None:
            self._in_flight = np.minimum(self._in_flight, at_most)
        self._copies = num_copies(followers, int(self._widths.sum()))
        self._ends: dict[int, tuple[list[float], list[float]]] = {}
        """By stage, see `MemoryModel.ends`."""
        self.was_short = False
        """Whether anything that was asked for did not fit."""

    def needed_bytes(self, stage: int, start: int, stop: int) -> float:
        """Computes the bytes that the fullest worker of a stage would hold with layers [start, stop)."""
        ends = self._ends.get(stage)
        if ends is None:
            stops, starts = self._held(stage)
            ends = self._ends[stage] = stops.tolist(), starts.tolist()
        return ends[0][stop] - ends[1][start]

    def _held(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        model = MemoryModel.of_width(self._costs, int(self._widths[stage]), self._copies)
        return model.ends(int(self._in_flight[stage]))

    def fits(self, stage: int, start: int, stop: int, shared_before: int = 0, shared_behind: int = 0) -> bool:
        """Tells whether a stage's workers can hold layers [start, stop).

        Args:
            stage: by index.
            start, stop: its layers.
            shared_before, shared_behind: of these, how many the stage before holds as well, and the stage behind: their
                state is sliced over the workers of both.
        """
        needed, limit = self.needed_bytes(stage, start, stop), self._limits[stage]
        if needed > limit and (shared_before or shared_behind):
            needed -= self._elsewhere(stage, stage - 1, start, min(stop, start + shared_before))
            # Layers of three stages count as those of two, which is more.
            needed -= self._elsewhere(stage, stage + 1, max(start + shared_before, stop - shared_behind), stop)
        fits = needed <= limit
        self.was_short = self.was_short or not fits
        return fits

    def _elsewhere(self, stage: int, neighbour: int, start: int, stop: int) -> float:
        """Computes the bytes of the state of layers that a worker of a stage does not hold, since its neighbour's
        workers do."""
        if start >= stop:
            return 0.0
        state, own = self._costs.prefix["optimizer_bytes"], int(self._widths[stage])
        part = self._copies / own - self._copies / (own + int(self._widths[neighbour]))
        return float(state[stop] - state[start]) * part

    def earliest_starts(self) -> list[list[int]]:
        """Finds for `split_layers`, for each stage and each layer at which it ends, the first at which it may begin; it
        may begin at any later one too. A stage that ends later may not begin earlier."""
        found = []
        for stage, limit in enumerate(self._limits):
            stops, starts = self._held(stage)
            # What is handed on is not the same everywhere, so that a layer less may take more.
            most = np.maximum.accumulate(stops)
            least = np.minimum.accumulate(starts[::-1])[::-1]
            found.append(np.searchsorted(least, most - limit * (1 + 1e-12), side="left").tolist())
        return found

    def lacking(self, bounds: Sequence[int]) -> tuple[int, MemoryParts, float]:
        """Finds the stage that lacks most, what one of its workers needs, and the bytes that it has."""
        needed = [self.needed_bytes(stage, bounds[stage], bounds[stage + 1]) for stage in range(len(self._limits))]
        worst = max(range(len(needed)), key=lambda stage: needed[stage] - self._limits[stage])
        model = MemoryModel.of_width(self._costs, int(self._widths[worst]), self._copies)
        parts = model.parts(bounds[worst], bounds[worst + 1], int(self._in_flight[worst]))
        return worst, parts, self._limits[worst]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocatedMemory:
    """Bytes of an allocation's workers, in the order of chains, stages, and workers within them."""

    fixed_bytes: np.ndarray
    """With nothing in flight."""
    each_bytes: np.ndarray
    """Of a micro-batch in flight."""
    counts: np.ndarray
    """int64: micro-batches of the worker."""
    wanted: np.ndarray
    """int64: micro-batches that the schedule wants in flight, at most `counts`."""

    @property
    def wanted_bytes(self) -> np.ndarray:
        """With as much in flight as the schedule wants."""
        return self.fixed_bytes + self.wanted * self.each_bytes


def memory_of(costs: Costs, allocation: Allocation, followers: int = DEFAULT_FOLLOWERS) -> AllocatedMemory:
    """Computes the bytes that each worker holds: what it computes with, its part of the state, and what is in flight.

    Args:
        costs: of the layers.
        allocation: who does how much.
        followers: live copies of every block.
    """
    shares = [stage for chain in allocation.chains for stage in chain.stages]
    counts = np.concatenate([share.num_microbatches for share in shares])
    widths = [share.width for share in shares]
    starts, stops = (np.array([getattr(share, name) for share in shares]) for name in ("start", "stop"))
    model = MemoryModel.of_stages(costs, shares, followers)
    busy = np.array([max(1, int(np.count_nonzero(share.num_microbatches))) for share in shares], dtype=np.int64)
    bounds, first = [], 0
    for chain in allocation.chains:
        bounds.append(in_flight(busy[first : first + len(chain.stages)], allocation.schedule))
        first += len(chain.stages)
    return AllocatedMemory(
        fixed_bytes=np.repeat(model.fixed_bytes(starts, stops), widths),
        each_bytes=np.repeat(model.activation_bytes(starts, stops), widths),
        counts=counts,
        wanted=np.minimum(np.repeat(np.concatenate(bounds), widths), counts),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimits:
    """For each worker the most micro-batches it may hold. Arrays in the order of the allocation's workers."""

    workers: np.ndarray
    """int64 ids."""
    bounds: np.ndarray
    """int64, at least 1."""
    memory_bytes: np.ndarray
    """What the worker holds then."""
    num_limited: int
    """Workers that hold fewer than the schedule would."""

    def as_mapping(self) -> dict[int, int]:
        """Maps worker to bound, as `compile_programs` takes it."""
        return dict(zip(self.workers.tolist(), self.bounds.tolist(), strict=True))


def memory_limits(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    where: np.ndarray | None = None,
) -> MemoryLimits | None:
    """Computes what memory permits the workers of an allocation.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block.
        where: positions of the allocation's workers in the cluster, if they are known.
    Returns:
        None if memory suffices for what the schedule wants.
    Raises:
        InfeasiblePlan: a worker has no room for a single micro-batch, or gpipe, which holds all of them, does not fit.
        KeyError: a worker that is not in the cluster.
    """
    workers = np.concatenate([stage.workers for chain in allocation.chains for stage in chain.stages])
    memory = memory_of(costs, allocation, followers)
    room = cluster.memory_bytes[cluster.index_of(workers) if where is None else where]
    fixed, each, counts = memory.fixed_bytes, memory.each_bytes, memory.counts
    if not bool(np.any(memory.wanted_bytes > room)):
        return None
    held = np.where(each > 0, memory.wanted, counts)  # what takes no memory is not limited
    fits = fitting(room - fixed, each)
    if allocation.schedule == "gpipe" or bool(np.any((fits < 1) & (counts > 0))) or bool(np.any(fixed > room)):
        check_worker_memory(workers, memory.wanted_bytes, room)
    bounds = np.maximum(1, np.minimum(held, fits)).astype(np.int64)
    return MemoryLimits(
        workers=workers,
        bounds=bounds,
        memory_bytes=fixed + np.minimum(bounds, counts) * each,
        num_limited=int(np.sum(fits < held)),
    )


def check_worker_memory(workers: np.ndarray, needed_bytes: np.ndarray, memory_bytes: np.ndarray) -> None:
    """Refuses what does not fit.

    Args:
        workers: ids.
        needed_bytes: of each.
        memory_bytes: that each has.
    Raises:
        InfeasiblePlan: names the worst worker and how much it lacks.
    """
    over = needed_bytes - memory_bytes
    worst = int(np.argmax(over))
    if over[worst] > 0:
        raise InfeasiblePlan(
            f"memory: worker {workers[worst]} would hold {needed_bytes[worst] / 1e9:.2f} GB, but has "
            f"{memory_bytes[worst] / 1e9:.2f} GB: {over[worst] / 1e9:.2f} GB too much; use more stages or workers, or "
            "smaller micro-batches"
        )


def layout_limits(
    cluster: Cluster,
    costs: Costs,
    layout: Layout,
    schedule: Schedule,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    must_fit: bool = True,
) -> dict[int, int]:
    """Computes what memory permits the workers of a layout, where that is less than its programs would hold.

    Args:
        cluster: with all workers of the layout.
        costs: of the model's layers.
        layout: the workers of a stage hold its layers, whether a route passes or not.
        schedule: of the programs.
        followers: live copies of every block.
        must_fit: else a worker without room for a single micro-batch is held to one.
    Returns:
        Worker -> the most micro-batches that it may hold; empty if everything fits.
    Raises:
        InfeasiblePlan: a worker has no room for a single micro-batch, or gpipe, which holds all of them, does not fit.
        KeyError: a worker that is not in the cluster.
    """
    wanted = in_flight_bounds(layout, schedule)
    busy = {hop.worker for route in layout.routes for hop in route}
    model = MemoryModel.of_stages(costs, layout.stages, followers)
    limits = {}
    for stage in layout.stages:
        own = float(model.fixed_bytes(stage.start, stage.stop))
        each = float(model.activation_bytes(stage.start, stage.stop))
        room = cluster.memory_bytes[cluster.index_of(stage.workers)]
        fits = model.most_in_flight(stage.start, stage.stop, room)
        members = np.array(stage.workers)
        working = np.array([worker in busy for worker in stage.workers])
        wants = np.array([wanted[worker] for worker in stage.workers])
        if must_fit:
            least = wants if schedule == "gpipe" else np.ones_like(wants)
            needed = own + each * np.where(working, least, 0)
            tight = needed > room * (1 + 1e-12)
            if tight.any():
                check_worker_memory(members[tight], needed[tight], room[tight])
        for index in np.flatnonzero(working & (fits < wants)).tolist():
            limits[stage.workers[index]] = max(1, int(fits[index]))
    return limits


def held_microbatches(
    cluster: Cluster,
    costs: Costs,
    held: Sequence[tuple[int, int]],
    members: Sequence[np.ndarray],
    num_microbatches: int,
    schedule: Schedule,
    followers: int,
) -> list[np.ndarray | None]:
    """Computes for each stage the most micro-batches that its workers can be given; gives None where memory does not
    matter.

    What counts is how many a worker holds at once. gpipe holds all of them; under other schedules a worker that can
    hold one can be given any number, with fewer in flight than it should.

    Args:
        cluster: the workers.
        costs: of the layers.
        held: layers of each stage.
        members: positions of each stage's workers in the cluster.
        num_microbatches: of the step.
        schedule: of the job.
        followers: live copies of every block.
    """
    widths = np.array([len(own) for own in members], dtype=np.int64)
    copies = num_copies(followers, int(widths.sum()))
    limits: list[np.ndarray | None] = []
    for (start, stop), own, wanted in zip(held, members, in_flight(widths, schedule).tolist(), strict=True):
        fits = MemoryModel.of_width(costs, len(own), copies).most_in_flight(start, stop, cluster.memory_bytes[own])
        least = float(fits.min())
        if least >= min(wanted, num_microbatches) or (least >= 1 and schedule != "gpipe"):
            limits.append(None)
        elif schedule == "gpipe":
            limits.append(np.clip(fits, 0, num_microbatches).astype(np.int64))
        else:
            limits.append(np.where(fits >= 1, num_microbatches, 0))
    return limits
