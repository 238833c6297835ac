"""What an allocation takes: seconds of a step at a named fidelity, memory and power. Pure.

`estimate` is the fidelity ``bound`` with memory and power, vectorised over workers: for ranking candidates, at any
size. `step_s` asks for a fidelity by name. `time_within_memory` is how every plan is judged: exactly where there are
few enough actions, by the bound where there are more, with fewer micro-batches in flight where memory is short.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, worker_power, worker_speeds
from elaswave.planning.costs.schedules import bounds_within
from elaswave.planning.costs.step_time import Fidelity
from elaswave.planning.costs.step_time.bound import StageTable, busy_s, least_s, limited_s, step_per_stage, travel_s
from elaswave.planning.costs.step_time.contended import SimulatedStep, simulate_step
from elaswave.planning.costs.step_time.exact import durations_of, transfer_of
from elaswave.planning.plan import Allocation, Chain, StageShare, levels_of, num_actions
from elaswave.planning.programs.execution import timed_step_s
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.memory_limits import MemoryLimits, layout_limits, memory_limits, memory_of

EXACT_ACTIONS = 20_000
"""Steps of at most so many actions are timed exactly."""
_CLOSE = 1 + 1e-9
"""Differences of rounding."""
EXACT_WORKERS = 256
"""In larger jobs a planner judges candidates by the bound alone: planning has to be quick."""


class Load(NamedTuple):
    """What the workers of an allocation compute, whatever the schedule and the links. Arrays as of `Estimate`."""

    chains: tuple[Chain, ...]
    """Of the allocation."""
    tables: list[StageTable]
    """Of each chain."""
    workers: np.ndarray
    busy_s: np.ndarray
    draw_w: np.ndarray
    idle_w: np.ndarray
    slowest_s: np.ndarray
    """Seconds for which the busiest worker of each stage computes."""
    mean_speed: np.ndarray
    """Of each stage."""
    fastest: np.ndarray
    """Highest speed of a worker of each stage."""
    least_busy_s: np.ndarray
    """As `slowest_s`, if layers were shared in any proportion."""
    pace_s: float
    busiest: int
    """The worker that computes for so long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """What one step of an allocation takes. Arrays have one entry per worker of `workers`."""

    step_s: float
    """Seconds of a step, with its overhead."""
    pace_s: float
    """Seconds for which the busiest worker computes."""
    workers: np.ndarray
    """int64 ids, in the order of chains, stages, and workers within them."""
    busy_s: np.ndarray
    """Seconds of computing."""
    memory_bytes: np.ndarray
    """The most that it holds during a step."""
    power_w: float
    """Mean draw of all workers together."""
    peak_power_w: float
    """Draw while all workers compute: what a power limit bounds."""
    bottleneck_chain: int
    bottleneck_stage: int
    bottleneck_worker: int
    """The busiest worker, and where it is."""
    load: Load


def estimate(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    where: np.ndarray | None = None,
    known: Estimate | None = None,
) -> Estimate:
    """Estimates what a step takes by `elaswave.planning.costs.step_time.bound`, and memory and power.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block, for memory.
        where: positions of the allocation's workers in the cluster, if they are known, in the order of the result.
        known: of the same workers and speeds. Where its chains are this allocation's, what they compute is not worked
            out again.
    Raises:
        KeyError: a worker that is not in the cluster.
    """
    load = known.load if known is not None and known.load.chains is allocation.chains else None
    if load is None:
        load = _load_of(cluster, costs, allocation, where)
    step, bottleneck_chain, bottleneck_stage, first = 0.0, 0, 0, 0
    for number, table in enumerate(load.tables):
        last = first + len(table.forward)
        slowest, mean_speed = load.slowest_s[first:last], load.mean_speed[first:last]
        ends = step_per_stage(table, slowest, mean_speed, allocation.schedule, travel_s(cluster, costs, table))
        index = int(np.argmax(slowest))
        if float(ends.max()) > step:
            step, bottleneck_chain, bottleneck_stage = float(ends.max()), number, index
        first = last
    step += costs.overhead_s(stages_of(allocation))
    memory = memory_of(costs, allocation, followers)
    busy, draw, idle = load.busy_s, load.draw_w, load.idle_w
    power = float(np.sum(busy * draw + (step - np.minimum(busy, step)) * idle) / step) if step else float(idle.sum())
    return Estimate(
        step_s=step,
        pace_s=load.pace_s,
        workers=load.workers,
        busy_s=busy,
        memory_bytes=memory.wanted_bytes,
        power_w=power,
        peak_power_w=float(draw.sum()),
        bottleneck_chain=bottleneck_chain,
        bottleneck_stage=bottleneck_stage,
        bottleneck_worker=load.busiest,
        load=load,
    )


def _load_of(cluster: Cluster, costs: Costs, allocation: Allocation, where: np.ndarray | None) -> Load:
    """Computes what workers compute; takes arguments as `estimate` does."""
    tables = [
        StageTable.of([(share.start, share.stop) for share in chain.stages], chain.cuts, chain.num_microbatches, costs)
        for chain in allocation.chains
    ]
    shares = stages_of(allocation)
    widths = np.array([share.width for share in shares])
    workers = np.concatenate([share.workers for share in shares])
    if where is None:
        where = cluster.index_of(workers)
    counts = np.concatenate([share.num_microbatches for share in shares]).astype(np.float64)
    levels = np.concatenate([share.levels for share in shares])
    speeds, (draw, idle) = worker_speeds(cluster, where, levels), worker_power(cluster, where, levels)
    shortest, longest, quantum, work = (
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("shortest", "longest", "quantum", "work")
    )
    stage = np.repeat(np.arange(len(shares)), widths)
    firsts = np.concatenate([[0], np.cumsum(widths)[:-1]])
    busy, rounded = busy_s(stage, counts, speeds, shortest, longest, quantum, work)
    busiest = int(np.argmax(rounded))
    return Load(
        chains=allocation.chains,
        tables=tables,
        workers=workers,
        busy_s=busy,
        draw_w=draw,
        idle_w=idle,
        slowest_s=np.maximum.reduceat(rounded, firsts),
        mean_speed=np.bincount(stage, speeds) / widths,
        fastest=np.maximum.reduceat(speeds, firsts),
        least_busy_s=np.maximum.reduceat(busy, firsts),
        pace_s=float(rounded[busiest]),
        busiest=int(workers[busiest]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """What a step of an allocation takes with the memory that there is."""

    step_s: float
    found: Estimate
    """Its memory is what workers hold within their limits."""
    num_limited: int = 0
    """Workers that hold fewer micro-batches than the schedule would."""


def fidelity_for(allocation: Allocation, exact_actions: int = EXACT_ACTIONS) -> Fidelity:
    """Chooses ``exact`` where a step has at most so many actions, else ``bound``."""
    return "bound" if num_actions(allocation) > exact_actions else "exact"


def step_s(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    fidelity: Fidelity,
    *,
    max_in_flight: Mapping[int, int] | None = None,
    within_s: float = float("inf"),
) -> float:
    """Computes the seconds of a step.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        fidelity: see `elaswave.planning.costs.step_time`. ``contended`` keeps to the workers' memory as far as it fits.
        max_in_flight: of ``exact``: worker -> the most micro-batches it may hold; None means what the schedule wants.
        within_s: of ``exact``: steps that are not shorter need not be timed.
    Returns:
        Infinity, or the seconds, where they are not below `within_s`.
    Raises:
        KeyError: a worker that is not in the cluster.
    """
    if fidelity == "bound":
        return estimate(cluster, costs, allocation).step_s
    if fidelity == "contended":
        return simulate_allocation(cluster, costs, allocation).step_s
    durations = durations_of(costs.layer_s, cluster.speed_of(levels_of(allocation)))
    transfer_s = transfer_of(costs, cluster)
    seconds, overhead_s = 0.0, costs.overhead_s(stages_of(allocation))
    for chain in allocation.chains:  # they share no workers, so each is timed by itself
        if not chain.num_microbatches:
            continue
        layout = make_routes(replace(allocation, chains=(chain,)), costs, cluster)
        bounds = None if max_in_flight is None else {worker: max_in_flight[worker] for worker in layout.workers}
        alone_s = timed_step_s(
            layout, allocation.schedule, durations, known=durations, max_in_flight=bounds, transfer_s=transfer_s,
            within_s=within_s - overhead_s,
        )  # fmt: skip
        seconds = max(seconds, alone_s)
        if seconds + overhead_s >= within_s:
            break
    return seconds + overhead_s


def stages_of(allocation: Allocation) -> list[StageShare]:
    """Lists all stages of all chains."""
    return [stage for chain in allocation.chains for stage in chain.stages]


def time_within_memory(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    exact_actions: int = EXACT_ACTIONS,
    where: np.ndarray | None = None,
    within_s: float = float("inf"),
    known: Estimate | None = None,
) -> Prediction:
    """Computes what a step takes, with fewer micro-batches in flight where memory is short: how every plan is judged.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block, for memory.
        exact_actions: the most actions for which programs are compiled and timed.
        where: positions of the allocation's workers in the cluster, if they are known, as `estimate` takes them.
        within_s: as of `step_s`.
        known: as of `estimate`.
    Raises:
        InfeasiblePlan: it does not fit into memory even so.
        KeyError: a worker that is not in the cluster.
    """
    found = estimate(cluster, costs, allocation, followers=followers, where=where, known=known)
    fidelity = fidelity_for(allocation, exact_actions)
    room = cluster.memory_bytes[cluster.index_of(found.workers) if where is None else where]
    limits = None
    if bool(np.any(found.memory_bytes > room)):
        limits = memory_limits(cluster, costs, allocation, followers=followers, where=where)
    if fidelity == "exact" and within_s < float("inf") and _least_s(costs, allocation, found) >= within_s * _CLOSE:
        if limits is not None:
            found = replace(found, memory_bytes=limits.memory_bytes)
        num_limited = 0 if limits is None else limits.num_limited
        return Prediction(step_s=float("inf"), found=found, num_limited=num_limited)
    if limits is None:
        seconds = found.step_s
        if fidelity == "exact":
            seconds = step_s(cluster, costs, allocation, fidelity, within_s=within_s)
        return Prediction(step_s=seconds, found=found)
    if fidelity == "bound":
        waiting_s = _limited_step_s(costs, allocation, limits)
        seconds = max(found.step_s, waiting_s + costs.overhead_s(stages_of(allocation)))
    else:
        seconds = step_s(
            cluster, costs, allocation, fidelity, max_in_flight=limits.as_mapping(), within_s=within_s
        )  # fmt: skip
    found = replace(found, memory_bytes=limits.memory_bytes)
    return Prediction(step_s=seconds, found=found, num_limited=limits.num_limited)


def _least_s(costs: Costs, allocation: Allocation, found: Estimate) -> float:
    """Computes the seconds that no order of a step's actions gets below: see
    `elaswave.planning.costs.step_time.bound.least_s`."""
    longest, first, load = 0.0, 0, found.load
    for chain, table in zip(allocation.chains, load.tables, strict=True):
        own = slice(first, first + len(chain.stages))
        widths = np.array([share.width for share in chain.stages])
        starts = np.array([share.start for share in chain.stages])
        alone_s = least_s(
            table, starts, chain.num_microbatches, load.least_busy_s[own], load.mean_speed[own] * widths,
            load.fastest[own], costs, allocation.schedule,
        )  # fmt: skip
        longest, first = max(longest, alone_s), own.stop
    return longest + costs.overhead_s(stages_of(allocation))


def time_as_it_is(
    cluster: Cluster, costs: Costs, allocation: Allocation, *, followers: int = DEFAULT_FOLLOWERS, exact: bool = True
) -> Prediction:
    """Computes what a step of a job takes that runs, whether the description says that it fits into memory or not.

    Args:
        cluster, costs, allocation, followers: as of `time_within_memory`.
        exact: else the bound will do.
    """
    exact_actions = EXACT_ACTIONS if exact else 0
    try:
        return time_within_memory(cluster, costs, allocation, followers=followers, exact_actions=exact_actions)
    except InfeasiblePlan:
        found = estimate(cluster, costs, allocation, followers=followers)
        seconds = step_s(cluster, costs, allocation, fidelity_for(allocation, exact_actions))
        return Prediction(step_s=seconds, found=found)


def _limited_step_s(costs: Costs, allocation: Allocation, limits: MemoryLimits) -> float:
    """Computes the bound of the stage whose workers wait longest for micro-batches to come back."""
    longest, first = 0.0, 0
    for chain in allocation.chains:
        for stage in chain.stages:
            own = limits.bounds[first : first + stage.width]
            rounds = float(np.max(stage.num_microbatches / own)) if stage.width else 0.0
            longest = max(longest, limited_s(costs, stage.start, chain.stages[-1].stop, rounds))
            first += stage.width
    return longest


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
