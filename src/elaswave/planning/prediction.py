"""What an allocation costs: seconds of a step, memory and power, in closed form or exactly. Pure.

`estimate` is vectorised over workers and has no events: it is used at any size, for ranking candidates and for memory
and power everywhere. `predict` compiles and times the programs where there are few enough actions, and falls back to
the closed form where there are more.

The closed form, for a chain of stages s with n(w) micro-batches on worker w and f, i, w the mean seconds of a
micro-batch's forward, input gradient and weight gradient in a stage:

- *busy*: a worker computes for the sum of its micro-batches' seconds over its speed. Where its stage shares layers with
  a neighbour, cuts are dealt such that workers of a stage end together, as far as whole layers permit.
- *step*: the largest over the stages of busy + the time in which a micro-batch passes all others there and back. That
  is (m + S - 1)(f + b) for equal stages under 1F1B and GPipe. With split backwards the others' w hides part of the way:
  m(f + b) + (S - 1)(f + i - w), the paper's ZB-H1, and not less than the way without any w.
- *jitter*: micro-batches that are cut in different places arrive at uneven intervals, and a worker that may hold only
  so many waits now and then: busy time is longer by `JITTER` times the spread of a hop's length, fitted to exact times.

Sources: Narayanan et al. 2021 (Efficient large-scale language model training on GPU clusters, section 2.2), Qi et al.
2024 (Zero bubble pipeline parallelism, table 1). Differs: stages of unequal width and time, shared layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster
from elaswave.costs.schedules import Schedule, in_flight, splits_backwards
from elaswave.costs.step_time.exact import time_programs
from elaswave.costs.step_time.work import durations_of, transfer_of
from elaswave.errors import InfeasiblePlan
from elaswave.planning.plan import Allocation, StageShare
from elaswave.planning.programs import compile_programs
from elaswave.planning.routes import make_routes
from elaswave.types import Stage

EXACT_ACTIONS = 20_000
"""`predict` times programs of at most so many actions."""
EXACT_WORKERS = 256
"""In larger jobs a planner judges candidates by the closed form alone: planning has to be quick."""
DEFAULT_FOLLOWERS = 1
"""Live copies of every block beside its owner's."""

JITTER: Mapping[Schedule, float] = {"1f1b": 0.42, "gpipe": 0.3, "zero-bubble": 0.3, "zero-bubble-h2": 0.2}
"""Share of the busy time lost per relative spread of a stage's hops, fitted on 12 x 8, 24 x 4 and 6 x 16 workers with
4 to 16 micro-batches each, 0 to 3 of them lost. There exact times are 0.97 to 1.04 of the closed form with whole layers
(median 1.02), 0.96 to 1.15 with shared ones (median 1.04). The last one was fitted with 0 to 5 lost: half of the exact
times are 0.98 to 1.01 of the closed form with whole layers, 0.94 to 1.03 with shared ones."""


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
    """Draw while everybody computes: what a power limit is about."""
    bottleneck_chain: int
    bottleneck_stage: int
    bottleneck_worker: int
    """The busiest worker, and where it is."""

    @property
    def energy_j(self) -> float:
        """Of a step."""
        return self.power_w * self.step_s


def estimate(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    where: np.ndarray | None = None,
) -> Estimate:
    """The closed form; see the module.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        followers: live copies of every block, for memory.
        where: positions of the allocation's workers in the cluster, if they are known, in the order of the result.
    Raises:
        KeyError: a worker that is not in the cluster.
    """
    tables = [
        StageTable.of([(share.start, share.stop) for share in chain.stages], chain.cuts, chain.num_microbatches, costs)
        for chain in allocation.chains
    ]
    shares = [stage for chain in allocation.chains for stage in chain.stages]
    widths = np.array([share.width for share in shares])
    workers = np.concatenate([share.workers for share in shares])
    if where is None:
        where = _positions(cluster, workers)
    counts = np.concatenate([share.num_microbatches for share in shares]).astype(np.float64)
    levels = np.concatenate([share.levels for share in shares])
    speeds, draw, idle = worker_speeds(cluster, where, levels)
    shortest, longest, quantum, work = (
        np.concatenate([getattr(table, name) for table in tables])
        for name in ("shortest", "longest", "quantum", "work")
    )
    stage = np.repeat(np.arange(len(shares)), widths)
    busy, rounded = _busy(stage, counts, speeds, shortest, longest, quantum, work)
    slowest = np.maximum.reduceat(rounded, np.concatenate([[0], np.cumsum(widths)[:-1]]))
    mean_speed = np.bincount(stage, speeds) / widths

    step, bottleneck_chain, bottleneck_stage, first = 0.0, 0, 0, 0
    for number, table in enumerate(tables):
        last = first + len(table.forward)
        ends = step_per_stage(
            table, slowest[first:last], mean_speed[first:last], allocation.schedule, travel_s(cluster, costs, table)
        )
        index = int(np.argmax(slowest[first:last]))
        if float(ends.max()) > step:
            step, bottleneck_chain, bottleneck_stage = float(ends.max()), number, index
        first = last
    step += costs.step_overhead_s
    memory = _memory(costs, allocation, shares, stage, counts, followers)
    power = float(np.sum(busy * draw + (step - np.minimum(busy, step)) * idle) / step) if step else float(idle.sum())
    return Estimate(
        step_s=step,
        pace_s=float(rounded.max()),
        workers=workers,
        busy_s=busy,
        memory_bytes=memory,
        power_w=power,
        peak_power_w=float(draw.sum()),
        bottleneck_chain=bottleneck_chain,
        bottleneck_stage=bottleneck_stage,
        bottleneck_worker=int(workers[int(np.argmax(rounded))]),
    )


def predict(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    exact_actions: int = EXACT_ACTIONS,
    max_in_flight: Mapping[int, int] | None = None,
) -> float:
    """Seconds of a step: exact where there are few enough actions, else the closed form.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        exact_actions: the most actions (forward, backward or its two halves, per micro-batch and stage) for which
            programs are compiled and timed.
        max_in_flight: worker -> the most micro-batches it may hold, if exact; None means what the schedule wants.
    Raises:
        KeyError: a worker that is not in the cluster.
    """
    if num_actions(allocation) > exact_actions:
        return estimate(cluster, costs, allocation).step_s
    durations, transfer_s = (
        durations_of(costs.layer_s, cluster.speed_of(levels_of(allocation))),
        transfer_of(costs, cluster),
    )
    seconds = 0.0
    for chain in allocation.chains:  # they share no workers, so each is timed by itself
        if not chain.num_microbatches:
            continue
        layout = make_routes(replace(allocation, chains=(chain,)), costs, cluster)
        bounds = None if max_in_flight is None else {worker: max_in_flight[worker] for worker in layout.workers}
        programs = compile_programs(
            layout, allocation.schedule, max_in_flight=bounds, durations=durations, transfer_s=transfer_s
        )
        seconds = max(seconds, time_programs(layout, programs, durations, transfer_s).step_s)
    return seconds + costs.step_overhead_s


def num_actions(allocation: Allocation) -> int:
    """Actions of a step."""
    kinds = 3 if splits_backwards(allocation.schedule) else 2
    return kinds * sum(chain.num_microbatches * len(chain.stages) for chain in allocation.chains)


def levels_of(allocation: Allocation) -> dict[int, int]:
    """Worker -> index of its frequency level."""
    return {
        worker: level
        for chain in allocation.chains
        for stage in chain.stages
        for worker, level in zip(stage.workers.tolist(), stage.levels.tolist(), strict=True)
    }


def check_memory(cluster: Cluster, found: Estimate, *, where: np.ndarray | None = None) -> None:
    """Refuses what does not fit.

    Args:
        cluster: with all workers of the estimate.
        found: as `estimate` says.
        where: positions of its workers in the cluster, if they are known.
    Raises:
        InfeasiblePlan: names the worst worker and how much it lacks.
    """
    room = cluster.memory_bytes[_positions(cluster, found.workers) if where is None else where]
    over = found.memory_bytes - room
    worst = int(np.argmax(over))
    if over[worst] > 0:
        raise InfeasiblePlan(
            f"memory: worker {found.workers[worst]} would hold {found.memory_bytes[worst] / 1e9:.2f} GB, but has "
            f"{room[worst] / 1e9:.2f} GB: {over[worst] / 1e9:.2f} GB too much; use more stages or workers, or smaller "
            "micro-batches"
        )


def check_power(cluster: Cluster, found: Estimate) -> None:
    """Refuses what draws too much.

    Raises:
        InfeasiblePlan: names the limit and by how much it is exceeded.
    """
    limit = cluster.power_limit_w
    if limit is not None and found.peak_power_w > limit * (1 + 1e-9):
        raise InfeasiblePlan(
            f"power: the workers would draw {found.peak_power_w:.1f} W while all of them compute, but may draw "
            f"{limit:.1f} W together: {found.peak_power_w - limit:.1f} W too much"
        )


def common_levels(cluster: Cluster, where: np.ndarray) -> np.ndarray:
    """Levels of workers for whom nobody chooses clocks one by one: the base ones, or lower ones under a power limit.

    Then all are held to one speed, the highest up to the base level's at which they keep within the limit together, as
    an operator's cap does.

    Args:
        cluster: with the limit.
        where: positions of the workers.
    Returns:
        int64, in the order of `where`; the lowest levels if even those draw too much (`check_power` refuses them).
    """
    devices, kind = cluster.devices, cluster.device[where]
    number = np.bincount(kind, minlength=len(devices))
    speeds = sorted({level.speed for device in devices for level in device.levels if level.speed <= 1.0})
    chosen: list[int] = []
    for speed in reversed(speeds):
        chosen = [max(sum(level.speed <= speed for level in device.levels) - 1, 0) for device in devices]
        draw = sum(
            device.levels[level].power_w * int(count)
            for device, level, count in zip(devices, chosen, number, strict=True)
        )
        if cluster.power_limit_w is None or draw <= cluster.power_limit_w * (1 + 1e-9):
            break
    return np.array(chosen, dtype=np.int64)[kind]


def at_levels(allocation: Allocation, levels: np.ndarray) -> Allocation:
    """The same allocation with these levels, in the order of chains, stages and workers."""
    first = 0
    chains = []
    for chain in allocation.chains:
        stages: list[StageShare] = []
        for share in chain.stages:
            stages.append(replace(share, levels=levels[first : first + share.width]))
            first += share.width
        chains.append(replace(chain, stages=tuple(stages)))
    return replace(allocation, chains=tuple(chains))


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTable:
    """What one micro-batch costs in each stage of a chain, on a worker of speed 1. Arrays [stages]."""

    forward: np.ndarray
    """Mean over the chain's micro-batches; so are the next two."""
    input_gradient: np.ndarray
    weight_gradient: np.ndarray
    shortest: np.ndarray
    """Seconds of the hop with the fewest layers, forward and backward together."""
    longest: np.ndarray
    """Of the hop with the most."""
    quantum: np.ndarray
    """Seconds of the cheapest shared layer: in such steps can workers be evened out; 0 if none is shared."""
    work: np.ndarray
    """Of all micro-batches together."""
    stops: np.ndarray
    """float64: mean layer at which hops end."""

    @classmethod
    def of(
        cls, held: Sequence[tuple[int, int]], cuts: Sequence[Mapping[int, int]], num_microbatches: int, costs: Costs
    ) -> "StageTable":
        """Of a chain whose stages hold these layers, with these cuts."""
        num_stages = len(held)
        least, most = np.zeros((2, num_stages + 1), dtype=np.int64)
        least[-1] = most[-1] = held[-1][1]
        least[0] = most[0] = held[0][0]
        prefix = costs.prefix
        names = ("forward_s", "input_gradient_s", "weight_gradient_s")
        reached = np.zeros((3, num_stages + 1))
        for row, name in enumerate(names):
            reached[row, [0, -1]] = prefix[name][[least[0], least[-1]]]
        mean_stop = np.full(num_stages + 1, float(least[-1]))
        total = num_microbatches
        for index, cut in enumerate(cuts, start=1):
            least[index], most[index] = min(cut), max(cut)
            if len(cut) == 1:
                where = least[index]
                mean_stop[index] = where
                reached[:, index] = [prefix[name][where] for name in names]
            else:
                layers = np.fromiter(cut, dtype=np.int64)
                share = np.fromiter(cut.values(), dtype=np.float64) / max(1, total)
                mean_stop[index] = float(share @ layers)
                reached[:, index] = [float(share @ prefix[name][layers]) for name in names]
        busy = prefix["busy_s"]
        forward, input_gradient, weight_gradient = np.diff(reached, axis=1)
        layer_s = np.diff(busy)
        cheapest = np.array(
            [0.0, *(layer_s[a:b].min() if b > a else 0.0 for a, b in zip(least[1:-1], most[1:-1], strict=True)), 0.0]
        )
        pair = np.stack([cheapest[:-1], cheapest[1:]])
        quantum = np.where(pair > 0, pair, np.inf).min(axis=0)
        return cls(
            forward=forward,
            input_gradient=input_gradient,
            weight_gradient=weight_gradient,
            shortest=np.maximum(0.0, busy[least[1:]] - busy[most[:-1]]),
            longest=busy[most[1:]] - busy[least[:-1]],
            quantum=np.where(np.isfinite(quantum), quantum, 0.0),
            work=(forward + input_gradient + weight_gradient) * total,
            stops=mean_stop[1:],
        )


def worker_speeds(cluster: Cluster, where: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Speed, draw while computing and draw while idle, in watts, of workers at these positions and levels."""
    if len(cluster.devices) == 1:
        known = cluster.devices[0]
        speed = np.array([level.speed for level in known.levels])[levels]
        draw = np.array([level.power_w for level in known.levels])[levels]
        return cluster.speed[where] * speed, draw, np.full(len(where), known.idle_power_w)
    most = max(len(device.levels) for device in cluster.devices)
    table = np.zeros((len(cluster.devices), most, 2))
    for index, device in enumerate(cluster.devices):
        table[index, : len(device.levels)] = [(level.speed, level.power_w) for level in device.levels]
    own = cluster.device[where]
    idle = np.array([device.idle_power_w for device in cluster.devices])[own]
    return cluster.speed[where] * table[own, levels, 0], table[own, levels, 1], idle


def _positions(cluster: Cluster, workers: np.ndarray) -> np.ndarray:
    ids = cluster.ids
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1 and len(workers):  # no gaps: nothing to search
        where = workers - ids[0]
        if where.min() >= 0 and where.max() < len(ids):
            return where
    return cluster.index_of(workers)


def _busy(
    stage: np.ndarray,
    counts: np.ndarray,
    speeds: np.ndarray,
    shortest: np.ndarray,
    longest: np.ndarray,
    quantum: np.ndarray,
    work: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds for which workers compute: evened out in each stage, and the same rounded up to whole layers."""
    least = counts * shortest[stage] / speeds
    most = counts * longest[stage] / speeds
    if not bool(np.any(quantum > 0)):
        return most, most
    end = work / np.bincount(stage, speeds)
    outside = (end[stage] < least * (1 - 1e-9)) | (end[stage] > most * (1 + 1e-9))
    uneven = (np.bincount(stage, outside) > 0) & (quantum > 0)
    if bool(uneven.any()):
        here = uneven[stage]
        of = (np.cumsum(uneven) - 1)[stage[here]]
        low, high = np.zeros(int(uneven.sum())), np.maximum(end[uneven], np.bincount(of, most[here]))
        for _ in range(50):
            middle = (low + high) / 2
            done = np.bincount(of, np.clip(middle[of], least[here], most[here]) * speeds[here])
            enough = done >= work[uneven]
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        end[uneven] = high
    busy = np.clip(end[stage], least, most)
    step = np.where(quantum > 0, quantum, 1.0)[stage] / speeds
    rounded = np.minimum(most, least + np.ceil((busy - least) / step * (1 - 1e-9) - 1e-9) * step)
    return busy, np.where(quantum[stage] > 0, rounded, busy)


def step_per_stage(
    table: StageTable, slowest: np.ndarray, speeds: np.ndarray, schedule: Schedule, links_s: float
) -> np.ndarray:
    """Seconds of the step if each stage were the one that bounds it."""
    forward, first, second = (each / speeds for each in (table.forward, table.input_gradient, table.weight_gradient))
    mean = table.forward + table.input_gradient + table.weight_gradient
    spread = np.divide(table.longest - table.shortest, 2 * mean, out=np.zeros_like(mean), where=mean > 0)
    slowest = slowest * (1 + JITTER[schedule] * min(1.0, float(spread.mean())))
    if not splits_backwards(schedule):
        way = forward + first + second
        return slowest + way.sum() - way + links_s
    hidden = np.maximum(0.0, forward + first - second)
    way = forward + first
    share = np.divide(way, way + second, out=np.ones_like(way), where=way + second > 0)
    return np.maximum(slowest + hidden.sum() - hidden, way.sum() - way + slowest * share + second) + links_s


def travel_s(cluster: Cluster, costs: Costs, table: StageTable) -> float:
    """Seconds that a micro-batch's tensors travel on their way through all stages and back."""
    if len(table.stops) < 2:
        return 0.0
    same = len(cluster.node) > 0 and bool(cluster.node[0] == cluster.node[-1])
    link = cluster.within_node if same else cluster.between_nodes
    sizes = [costs.layers[int(stop) - 1].boundary_bytes for stop in table.stops[:-1]]
    return 2 * sum(link.transfer_s(size) for size in sizes)


def held_state(costs: Costs, shares: Sequence[StageShare | Stage], followers: int) -> np.ndarray:
    """Bytes of masters and optimizer slots that a worker holds, as sums over the layers before each one.

    A layer's are sliced over all workers that run it, and each slice has live copies.

    Args:
        costs: of the layers.
        shares: all stages.
        followers: live copies of every block beside its owner's.
    """
    holders = np.zeros(costs.num_layers)
    for share in shares:
        holders[share.start : share.stop] += share.width
    copies = min(1 + followers, sum(share.width for share in shares))
    slices = np.diff(costs.prefix["optimizer_bytes"]) / np.maximum(1.0, holders)
    return np.concatenate([[0.0], np.cumsum(slices)]) * copies


def _memory(
    costs: Costs,
    allocation: Allocation,
    shares: Sequence[StageShare],
    stage: np.ndarray,
    counts: np.ndarray,
    followers: int,
) -> np.ndarray:
    """Bytes that each worker holds: what it computes with, its part of the state, and what is in flight."""
    prefix = costs.prefix
    fixed = prefix["parameter_bytes"] + prefix["accumulator_bytes"] + held_state(costs, shares, followers)
    starts, stops = (np.array([getattr(share, name) for share in shares]) for name in ("start", "stop"))
    busy = np.maximum(1, np.bincount(stage, counts > 0, minlength=len(shares))).astype(np.int64)
    bounds, first = [], 0
    for chain in allocation.chains:
        bounds.append(in_flight(busy[first : first + len(chain.stages)], allocation.schedule))
        first += len(chain.stages)
    held = np.minimum(np.concatenate(bounds)[stage], counts)
    activations = prefix["activation_bytes"]
    return (fixed[stops] - fixed[starts])[stage] + held * (activations[stops] - activations[starts])[stage]
