"""The fidelity ``bound``: the seconds of a step in closed form, vectorised over stages and workers. Pure.

For a chain of stages s with n(w) micro-batches on worker w and f, i, w the mean seconds of a micro-batch's forward,
input gradient and weight gradient in a stage:

- *busy*: a worker computes for the sum of its micro-batches' seconds over its speed. Where its stage shares layers with
  a neighbour, cuts are dealt such that workers of a stage end together, as far as whole layers permit.
- *step*: the largest over the stages of busy + the time in which a micro-batch passes all others there and back. That
  is (m + S - 1)(f + b) for equal stages under 1F1B and GPipe. With split backwards the others' w hides part of the way:
  m(f + b) + (S - 1)(f + i - w), the paper's ZB-H1, and not less than the way without any w.
- *jitter*: micro-batches that are cut in different places arrive at uneven intervals, and a worker that may hold only
  so many waits now and then: busy time is longer by `JITTER` times the spread of a hop's length, fitted to exact times.
- *limits*: where memory lets a worker hold fewer micro-batches than the schedule wants, it is no faster than they come
  back (`limited_s`).

For one pipeline of one worker per stage the step is linear in its micro-batches (`pipeline_line`).

Sources: Narayanan et al. 2021 (Efficient large-scale language model training on GPU clusters, section 2.2), Qi et al.
2024 (Zero bubble pipeline parallelism, table 1). Differs: stages of unequal width and time, shared layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule, splits_backwards

JITTER: Mapping[Schedule, float] = {"1f1b": 0.42, "gpipe": 0.3, "zero-bubble": 0.3, "zero-bubble-h2": 0.2}
"""Share of the busy time lost per relative spread of a stage's hops, fitted on 12 x 8, 24 x 4 and 6 x 16 workers with
4 to 16 micro-batches each, 0 to 3 of them lost. There exact times are 0.97 to 1.04 of the closed form with whole layers
(median 1.02), 0.96 to 1.15 with shared ones (median 1.04). The last one was fitted with 0 to 5 lost: half of the exact
times are 0.98 to 1.01 of the closed form with whole layers, 0.94 to 1.03 with shared ones."""


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
        """Makes the table of a chain whose stages hold these layers, with these cuts."""
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


def busy_s(
    stage: np.ndarray,
    counts: np.ndarray,
    speeds: np.ndarray,
    shortest: np.ndarray,
    longest: np.ndarray,
    quantum: np.ndarray,
    work: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the seconds for which workers compute: evened out in each stage, and the same rounded up to whole
    layers.

    Args:
        stage: of each worker, ascending.
        counts, speeds: of each worker.
        shortest, longest, quantum, work: of each stage, as in `StageTable`.
    """
    widths = np.bincount(stage, minlength=len(work))
    most = counts * np.repeat(longest, widths) / speeds
    if not bool(np.any(quantum > 0)):
        return most, most
    least = counts * np.repeat(shortest, widths) / speeds
    end = work / np.bincount(stage, speeds)
    evened = np.repeat(end, widths)
    outside = (evened < least * (1 - 1e-9)) | (evened > most * (1 + 1e-9))
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
        evened = np.repeat(end, widths)
    busy = np.clip(evened, least, most)
    step = np.repeat(np.where(quantum > 0, quantum, 1.0), widths) / speeds
    rounded = np.minimum(most, least + np.ceil((busy - least) / step * (1 - 1e-9) - 1e-9) * step)
    return busy, np.where(np.repeat(quantum > 0, widths), rounded, busy)


def busiest_s(table: StageTable, num_microbatches: int, speeds: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Computes `busy_s` of each stage's busiest worker from what its workers have in common: takes no longer for more
    workers.

    Args:
        table: of the chain.
        num_microbatches: of the chain.
        speeds: of the workers of each stage.
    Returns:
        Seconds, and the mean speed, of each stage.
    """
    widths = np.array([len(own) for own in speeds])
    capacity = np.array([float(own.sum()) for own in speeds])
    mean = capacity / widths
    slowest = np.array([float(own.min()) for own in speeds])
    end = table.work / capacity
    # A worker has whole micro-batches; where speeds differ they are dealt by speed, which is about as even.
    whole = np.ceil(num_microbatches / widths)
    by_speed = (mean > slowest * (1 + 1e-9)) & (table.longest > 0)
    most = np.where(by_speed, end / np.where(by_speed, table.longest, 1.0) * mean, whole)
    least = most * table.shortest / mean
    quantum = np.where(table.quantum > 0, table.quantum, 1.0)
    steps = np.ceil((end - least) * mean / quantum - 1e-9)
    rounded = np.where(table.quantum > 0, least + steps * table.quantum / mean, least)
    return np.maximum(rounded, least), mean


def step_per_stage(
    table: StageTable, slowest: np.ndarray, speeds: np.ndarray, schedule: Schedule, links_s: float
) -> np.ndarray:
    """Computes the seconds of the step if each stage were the one that bounds it."""
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


def least_s(
    table: StageTable,
    starts: np.ndarray,
    num_microbatches: int,
    busiest_each_s: np.ndarray,
    capacity: np.ndarray,
    fastest: np.ndarray,
    costs: Costs,
    schedule: Schedule,
) -> float:
    """Computes the seconds that no order of a chain's actions gets below, whatever the routes: not an estimate, as all
    else here.

    A worker waits for its first input and does all its work, or all but its weight gradients (with split backwards)
    before the last gradient goes back to the first stage. What links take is left out.

    Args:
        table: of the chain.
        starts: int64 [stages]: first layer that each stage holds.
        num_microbatches: of the chain.
        busiest_each_s: [stages]: seconds for which each stage's busiest worker computes at least.
        capacity: [stages]: summed speed of the workers.
        fastest: [stages]: highest speed of a worker.
        costs: of the layers.
        schedule: of the job.
    """
    forward, first, second = (
        costs.prefix[f"{name}_s"] for name in ("forward", "input_gradient", "weight_gradient")
    )  # fmt: skip
    before = np.maximum.accumulate(np.concatenate([fastest[:1], fastest[:-1]]))  # of the workers of earlier stages
    arrives = (forward[starts] - forward[starts[0]]) / before
    returns = (first[starts] - first[starts[0]]) / before
    if not splits_backwards(schedule):
        returns += (second[starts] - second[starts[0]]) / before
        return float((arrives + busiest_each_s + returns).max())
    if len(starts) > 1:  # the first stage's weight gradient comes after the last gradient
        returns[1:] += (second[starts[1]] - second[starts[0]]) / fastest[0]
    ways = table.forward + table.input_gradient
    alone = ways * num_microbatches / capacity
    whole = ways + table.weight_gradient
    is_whole = (table.quantum == 0) & (whole > 0)
    share = np.divide(ways, whole, out=np.zeros_like(ways), where=is_whole)
    alone = np.maximum(alone, share * busiest_each_s)
    return float((arrives + np.maximum(busiest_each_s, alone + returns)).max())


def travel_s(cluster: Cluster, costs: Costs, table: StageTable) -> float:
    """Computes the seconds that a micro-batch's tensors travel on their way through all stages and back."""
    if len(table.stops) < 2:
        return 0.0
    same = len(cluster.node) > 0 and bool(cluster.node[0] == cluster.node[-1])
    link = cluster.within_node if same else cluster.between_nodes
    sizes = [costs.layers[int(stop) - 1].boundary_bytes for stop in table.stops[:-1]]
    return 2 * sum(link.transfer_s(size) for size in sizes)


def limited_s(costs: Costs, start: int, stop: int, rounds: float) -> float:
    """Computes the seconds of computing of a step of which a stage's workers hold only some micro-batches at a time.

    As many as a worker may hold are on their way to the last stage and back at a time. That is an upper bound of what
    the limit costs.

    Args:
        costs: of the layers.
        start: first layer of the stage.
        stop: one past the last layer of the chain.
        rounds: micro-batches over those that may be held, of the worker that has most.
    """
    busy = costs.prefix["busy_s"]
    return rounds * float(busy[stop] - busy[start])


def pipeline_line(stages: Sequence[tuple[float, float, float]], *, split: bool) -> tuple[float, float]:
    """Computes the seconds of a pipeline of one worker per stage: with m micro-batches first + m x second.

    Args:
        stages: seconds of forward, input gradient and weight gradient of each stage.
        split: whether backwards are split, so that weight gradients hide part of the way.
    """
    paces = [forward + first + second for forward, first, second in stages]
    ways = [max(0.0, forward + first - second) for forward, first, second in stages] if split else paces
    slowest = paces.index(max(paces))
    return sum(ways) - ways[slowest], paces[slowest] or 1e-12  # layers may cost nothing
