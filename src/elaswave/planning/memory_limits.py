"""Schedules that hold fewer micro-batches in flight than they would, because memory is short. Pure.

A schedule wants so many micro-batches in flight (`elaswave.planning.programs.in_flight_bounds`); a worker without the
memory for them can still run it with fewer, and waits sometimes instead. A plan counts with what regular pipelines of
its stages' widths hold; whoever compiles the programs knows the routes, and limits what these programs would hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster
from elaswave.costs.schedules import Schedule, bounds_within, in_flight, in_flight_bounds
from elaswave.costs.step_time.contended import SimulatedStep, simulate_step
from elaswave.costs.step_time.work import durations_of, transfer_of
from elaswave.errors import InfeasiblePlan
from elaswave.planning.plan import Allocation
from elaswave.planning.prediction import (
    DEFAULT_FOLLOWERS,
    EXACT_ACTIONS,
    Estimate,
    check_memory,
    estimate,
    held_state,
    levels_of,
    num_actions,
    predict,
)
from elaswave.planning.programs import compile_programs
from elaswave.planning.routes import make_routes
from elaswave.types import Layout


class MemoryBudget:
    """Whether layers fit into the memory of a stage's workers.

    Args:
        cluster: the workers.
        costs: of the layers.
        members: of each stage, as in `Shape`.
        num_microbatches: of the step.
        schedule: says how many micro-batches are in flight.
        followers: live copies of every block.
        short: be content with one micro-batch in flight: such a job runs, if slower.
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
        short: bool = False,
    ) -> None:
        self._prefix = costs.prefix
        widths = np.array([len(own) for own in members], dtype=np.int64)
        self._limits = [float(cluster.memory_bytes[own].min()) for own in members]
        most = -(-num_microbatches // widths)
        self._in_flight = np.ones_like(most) if short else np.minimum(in_flight(widths, schedule), most)
        self._copies = np.minimum(1 + followers, int(widths.sum())) / widths
        self._totals: dict[int, list[float]] = {}
        self.was_short = False
        """Whether anything that was asked for did not fit."""

    def needed_bytes(self, stage: int, start: int, stop: int) -> float:
        """Bytes that the fullest worker of a stage would hold with layers [start, stop)."""
        totals = self._totals.get(stage)
        if totals is None:
            totals = self._totals[stage] = self._held(stage).tolist()
        return totals[stop] - totals[start]

    def _held(self, stage: int) -> np.ndarray:
        """Bytes of a stage's worker, as sums over the layers before each one."""
        prefix = self._prefix
        held = prefix["parameter_bytes"] + prefix["accumulator_bytes"] + prefix["optimizer_bytes"] * self._copies[stage]
        return held + prefix["activation_bytes"] * self._in_flight[stage]

    def fits(self, stage: int, start: int, stop: int) -> bool:
        """Whether a stage's workers can hold layers [start, stop)."""
        fits = self.needed_bytes(stage, start, stop) <= self._limits[stage]
        self.was_short = self.was_short or not fits
        return fits

    def earliest_starts(self) -> list[list[int]]:
        """For `split_layers`: for each stage and each layer at which it ends the first at which it may begin."""
        found = []
        for stage, limit in enumerate(self._limits):
            total = self._held(stage)
            found.append(np.searchsorted(total, total - limit * (1 + 1e-12), side="left").tolist())
        return found

    def lacking(self, bounds: Sequence[int]) -> tuple[int, float, float]:
        """The stage that lacks most, what it needs and what it has, in bytes."""
        needed = [self.needed_bytes(stage, bounds[stage], bounds[stage + 1]) for stage in range(len(self._limits))]
        worst = max(range(len(needed)), key=lambda stage: needed[stage] - self._limits[stage])
        return worst, needed[worst], self._limits[worst]


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryLimits:
    """For each worker the most micro-batches it may hold. Arrays in the order of the allocation's estimate."""

    workers: np.ndarray
    """int64 ids."""
    bounds: np.ndarray
    """int64, at least 1."""
    memory_bytes: np.ndarray
    """What the worker holds then."""
    num_limited: int
    """Workers that hold fewer than the schedule would."""

    def as_mapping(self) -> dict[int, int]:
        """Worker -> bound, as `compile_programs` takes it."""
        return dict(zip(self.workers.tolist(), self.bounds.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Timed:
    """What a step of an allocation takes with the memory that there is."""

    step_s: float
    found: Estimate
    """Its memory is what workers hold within their limits."""
    num_limited: int = 0
    """Workers that hold fewer micro-batches than the schedule would."""


def time_within_memory(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    exact_actions: int = EXACT_ACTIONS,
    where: np.ndarray | None = None,
) -> Timed:
    """What a step takes, with fewer micro-batches in flight where memory is short: how every plan is judged.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block, for memory.
        exact_actions: the most actions for which programs are compiled and timed.
        where: positions of the allocation's workers in the cluster, if they are known, as `estimate` takes them.
    Raises:
        InfeasiblePlan: it does not fit into memory even so.
        KeyError: a worker that is not in the cluster.
    """
    found = estimate(cluster, costs, allocation, followers=followers, where=where)
    limits = memory_limits(cluster, costs, allocation, found, followers=followers, where=where)
    if limits is not None:
        seconds, memory = predict_limited(cluster, costs, allocation, found, limits, exact_actions=exact_actions)
        return Timed(step_s=seconds, found=replace(found, memory_bytes=memory), num_limited=limits.num_limited)
    if num_actions(allocation) > exact_actions:
        return Timed(step_s=found.step_s, found=found)
    return Timed(step_s=predict(cluster, costs, allocation, exact_actions=exact_actions), found=found)


def time_as_it_is(
    cluster: Cluster, costs: Costs, allocation: Allocation, *, followers: int = DEFAULT_FOLLOWERS, exact: bool = True
) -> Timed:
    """What a step of a job takes that runs, whether the description says that it fits into memory or not.

    Args:
        cluster, costs, allocation, followers: as of `time_within_memory`.
        exact: else the closed form will do.
    """
    exact_actions = EXACT_ACTIONS if exact else 0
    try:
        return time_within_memory(cluster, costs, allocation, followers=followers, exact_actions=exact_actions)
    except InfeasiblePlan:
        found = estimate(cluster, costs, allocation, followers=followers)
        return Timed(step_s=predict(cluster, costs, allocation, exact_actions=exact_actions), found=found)


def memory_limits(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    found: Estimate | None = None,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    where: np.ndarray | None = None,
) -> MemoryLimits | None:
    """What memory permits.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        found: its estimate, if it is known.
        followers: live copies of every block; the estimate's, if there is one.
        where: positions of the estimate's workers in the cluster, if they are known.
    Returns:
        None if memory suffices for what the schedule wants.
    Raises:
        InfeasiblePlan: a worker has no room for a single micro-batch, or gpipe, which holds all of them, does not fit.
        KeyError: a worker that is not in the cluster.
    """
    found = found or estimate(cluster, costs, allocation, followers=followers, where=where)
    room = cluster.memory_bytes[cluster.index_of(found.workers) if where is None else where]
    if not bool(np.any(found.memory_bytes > room)):
        return None
    if allocation.schedule == "gpipe":
        check_memory(cluster, found)
    shares = [stage for chain in allocation.chains for stage in chain.stages]
    idle = tuple(
        replace(chain, stages=tuple(replace(each, num_microbatches=0 * each.num_microbatches) for each in chain.stages))
        for chain in allocation.chains
    )
    fixed = estimate(cluster, costs, replace(allocation, chains=idle), followers=followers, where=where).memory_bytes
    each = np.repeat(
        [costs.between("activation_bytes", share.start, share.stop) for share in shares],
        [share.width for share in shares],
    )
    counts = np.concatenate([share.num_microbatches for share in shares])
    held = np.divide(found.memory_bytes - fixed, each, out=counts.astype(np.float64), where=each > 0).round()
    fits = np.floor(np.divide(room - fixed, each, out=np.full(len(each), np.inf), where=each > 0) * (1 + 1e-12))
    if bool(np.any((fits < 1) & (counts > 0))) or bool(np.any(fixed > room)):
        check_memory(cluster, found)
    bounds = np.maximum(1, np.minimum(held, fits)).astype(np.int64)
    return MemoryLimits(
        workers=found.workers,
        bounds=bounds,
        memory_bytes=fixed + np.minimum(bounds, counts) * each,
        num_limited=int(np.sum(fits < held)),
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
    """What memory permits the workers of a layout, where that is less than its programs would hold.

    Args:
        cluster: with all workers of the layout.
        costs: of the model's layers.
        layout: whoever is in a stage holds its layers, whether a route passes or not.
        schedule: of the programs.
        followers: live copies of every block.
        must_fit: else whoever has no room for a single micro-batch is held to one.
    Returns:
        Worker -> the most micro-batches that it may hold; empty if everything fits.
    Raises:
        InfeasiblePlan: a worker has no room for a single micro-batch, or gpipe, which holds all of them, does not fit.
        KeyError: a worker that is not in the cluster.
    """
    wanted = in_flight_bounds(layout, schedule)
    busy = {hop.worker for route in layout.routes for hop in route}
    fixed = costs.prefix["parameter_bytes"] + costs.prefix["accumulator_bytes"]
    fixed = fixed + held_state(costs, layout.stages, followers)
    limits = {}
    for stage in layout.stages:
        own = float(fixed[stage.stop] - fixed[stage.start])
        each = costs.between("activation_bytes", stage.start, stage.stop)
        rooms = cluster.memory_bytes[cluster.index_of(stage.workers)].tolist()
        for worker, room in zip(stage.workers, rooms, strict=True):
            fits = (room - own) / each * (1 + 1e-12) if each else float("inf")
            least = wanted[worker] if schedule == "gpipe" else 1
            needed = own + each * (least if worker in busy else 0)
            if must_fit and needed > room * (1 + 1e-12):
                raise InfeasiblePlan(
                    f"memory: worker {worker} would hold {needed / 1e9:.2f} GB, but has {room / 1e9:.2f} GB: "
                    f"{(needed - room) / 1e9:.2f} GB too much; use more stages or workers, or smaller micro-batches"
                )
            if worker in busy and fits < wanted[worker]:
                limits[worker] = max(1, int(fits))
    return limits


def predict_limited(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    found: Estimate,
    limits: MemoryLimits,
    *,
    exact_actions: int = EXACT_ACTIONS,
) -> tuple[float, np.ndarray]:
    """Seconds of a step within these limits, exact where there are few enough actions, and each worker's memory.

    In closed form a stage's worker is no faster than its micro-batches come back: as many as it may hold are on their
    way to the last stage and back at a time. That is an upper bound of what the limit costs.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        found: its estimate.
        limits: from `memory_limits`.
        exact_actions: the most actions for which programs are compiled and timed.
    """
    if num_actions(allocation) > exact_actions:
        return _closed_form(costs, allocation, found, limits.bounds), limits.memory_bytes
    bounds = limits.as_mapping()
    seconds = predict(cluster, costs, allocation, exact_actions=exact_actions, max_in_flight=bounds)
    return seconds, limits.memory_bytes


def _closed_form(costs: Costs, allocation: Allocation, found: Estimate, bounds: np.ndarray) -> float:
    slowest, first = found.step_s, 0
    busy = costs.prefix["busy_s"]
    for chain in allocation.chains:
        for stage in chain.stages:
            own = bounds[first : first + stage.width]
            way_s = float(busy[chain.stages[-1].stop] - busy[stage.start])
            rounds = float(np.max(stage.num_microbatches / own)) if stage.width else 0.0
            slowest = max(slowest, rounds * way_s + costs.step_overhead_s)
            first += stage.width
    return slowest


def simulate_allocation(
    cluster: Cluster, costs: Costs, allocation: Allocation, *, followers: int = DEFAULT_FOLLOWERS
) -> SimulatedStep:
    """Runs a step of what a planner decided: its routes, and the programs that workers would compile for them.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block: where memory is short, less is in flight.
    Raises:
        KeyError: a worker that the cluster lacks.
    """
    layout = make_routes(allocation, costs, cluster)
    levels = levels_of(allocation)
    limits = layout_limits(cluster, costs, layout, allocation.schedule, followers=followers, must_fit=False)
    programs = compile_programs(
        layout,
        allocation.schedule,
        max_in_flight=bounds_within(layout, allocation.schedule, limits),
        durations=durations_of(costs.layer_s, cluster.speed_of(levels)),
        transfer_s=transfer_of(costs, cluster),
    )
    return simulate_step(layout, programs, costs, cluster, levels=levels)
