"""DT-FM's search for who forms which stage: a genetic algorithm over balanced partitions. Pure.

Source: Yuan et al. 2022, Decentralized Training of Foundation Models in Heterogeneous Environments (arXiv 2206.01288),
sections 3.1 to 3.3, with its code, DS3Lab/DT-FM at commit cda948f,
``scheduler/heuristic_evolutionary_solver/scheduler.py``: devices are alike and are parted into equally large groups,
one for each stage; the cost is that of data parallelism in the slowest group, and twice that of the best open path
through the groups, where a step between two groups costs what the slowest pair of the best perfect matching does.
Offspring: a crossover at five points, repaired to equal sizes, then cyclic moves by the gains of the code's "default"
mode. It replaces the worse parent if it is no worse than both.

Differs: 40 partitions and 160 offspring for each depth instead of 100 and 4,900, since each is evaluated here in
Python; sizes of this engine (exact sums of 8 bytes a parameter instead of half-precision gradients, coded activations).
"""

from typing import NamedTuple

import numpy as np

from elaswave.hashing import key64
from elaswave.planning.far_apart.objective import Model

POPULATION, OFFSPRING = 40, 160
CROSSOVER_POINTS = 5


class _Costs(NamedTuple):
    """Of each pair of devices, float64 [devices, devices], of both directions' mean."""

    activation_s: np.ndarray
    gradient_s: np.ndarray
    """Of a group's gradients over the number of its devices."""


def genetic_stages(
    model: Model, depth: int, *, population: int = POPULATION, offspring: int = OFFSPRING
) -> tuple[tuple[int, ...], ...]:
    """Finds the devices of each stage, in order.

    Args:
        model: of the job; its number of devices is a multiple of the depth.
        depth: number of stages, at least 2.
        population, offspring: how long the search goes on.
    """
    count = model.job.cluster.num_workers
    costs = _costs(model, depth)
    search = _Search(costs, model.job.site.tolist(), depth)
    equal = [device * depth // count for device in range(count)]
    known = [tuple(equal[place] for place in _shuffled(count, depth, number)) for number in range(population)]
    scores = [search.cost(labels) for labels in known]
    best = min(zip(scores, known))
    for number in range(offspring):
        first, second = (key64("parent", depth, number, which) % population for which in range(2))
        points = _shuffled(count, depth, population + number)[:CROSSOVER_POINTS]
        crossed = _crossed(known[first], known[second], depth, points)
        child = _moved_in_cycles(costs.activation_s, list(crossed), depth)
        score = search.cost(tuple(child))
        best = min(best, (score, tuple(child)))
        if score <= max(scores[first], scores[second]):
            replaced = first if scores[first] > scores[second] else second
            known[replaced], scores[replaced] = tuple(child), score
    groups = _groups(best[1], depth)
    return tuple(groups[stage] for stage in search.path(groups)[1])


def _shuffled(count: int, *key: int) -> list[int]:
    """Makes a permutation by a key: planners have no random sources."""
    return sorted(range(count), key=lambda place: key64("shuffle", *key, place))


def _costs(model: Model, depth: int) -> _Costs:
    job = model.job
    # The size of one boundary, coded since nearly all are fences, of the micro-batches of a worker.
    width = job.cluster.num_workers // depth
    each = job.num_microbatches / width
    size = float(np.median(job.coded_bytes[:-1])) * each if job.num_layers > 1 else 0.0
    gradients = float(model.sums[0, -1]) / depth
    latency = (model.latency + model.latency.T) / 2
    with np.errstate(divide="ignore"):
        per_byte = (1 / model.bandwidth + 1 / model.bandwidth.T) / 2
    return _Costs(latency + size * per_byte, latency + gradients * per_byte / width)


def _groups(labels: tuple[int, ...] | list[int], depth: int) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(depth)]
    for device, label in enumerate(labels):
        found[label].append(device)
    return [tuple(each) for each in found]


class _Search:
    """Costs of partitions; devices of one site are alike, so much is asked for again."""

    def __init__(self, costs: _Costs, site: list[int], depth: int) -> None:
        self._costs = costs
        self._site = site
        self._depth = depth
        self._matchings: dict[object, float] = {}

    def cost(self, labels: tuple[int, ...]) -> float:
        """Adds the cost of data parallelism and twice that of the pipeline."""
        groups = _groups(labels, self._depth)
        parallel = 0.0
        for group in groups:
            if len(group) > 1:
                block = self._costs.gradient_s[np.ix_(group, group)].copy()
                np.fill_diagonal(block, 0.0)
                parallel = max(parallel, 2 * float(block.sum(1).max()))
        return parallel + 2 * self.path(groups)[0]

    def path(self, groups: list[tuple[int, ...]]) -> tuple[float, list[int]]:
        """Finds the shortest open path through the groups, and its length (Held and Karp)."""
        depth = self._depth
        between = np.zeros((depth, depth))
        for first in range(depth):
            for second in range(first + 1, depth):
                between[first, second] = between[second, first] = self._matched(groups[first], groups[second])
        everything = (1 << depth) - 1
        shortest = np.full((1 << depth, depth), np.inf)
        came_from = np.zeros((1 << depth, depth), dtype=np.int64)
        bits = 1 << np.arange(depth)
        shortest[bits, np.arange(depth)] = 0.0
        for seen in range(1, everything):
            total = shortest[seen][:, None] + between
            source, value = total.argmin(0), total.min(0)
            new = np.flatnonzero(bits & ~seen)
            better = new[value[new] < shortest[seen | bits[new], new]]
            shortest[seen | bits[better], better] = value[better]
            came_from[seen | bits[better], better] = source[better]
        last = int(shortest[everything].argmin())
        length, order, seen = float(shortest[everything, last]), [last], everything
        while len(order) < depth:
            before = int(came_from[seen, order[-1]])
            seen ^= 1 << order[-1]
            order.append(before)
        return length, order[::-1]

    def _matched(self, first: tuple[int, ...], second: tuple[int, ...]) -> float:
        """Finds, of the perfect matching whose slowest pair is fastest, that pair."""
        key = (tuple(sorted(self._site[each] for each in first)), tuple(sorted(self._site[each] for each in second)))
        if key not in self._matchings:
            seconds = self._costs.activation_s[np.ix_(first, second)]
            bounds = np.unique(seconds)
            low, high = 0, len(bounds) - 1
            while low < high:
                middle = (low + high) // 2
                if _has_perfect_matching(seconds <= bounds[middle]):
                    high = middle
                else:
                    low = middle + 1
            self._matchings[key] = self._matchings[key[::-1]] = float(bounds[low])
        return self._matchings[key]


def _has_perfect_matching(may: np.ndarray) -> bool:
    """Tells whether every row has a column of its own (augmenting paths)."""
    partner: dict[int, int] = {}
    columns = [np.flatnonzero(row).tolist() for row in may]

    def finds(row: int, seen: set[int]) -> bool:
        for column in columns[row]:
            if column not in seen:
                seen.add(column)
                if column not in partner or finds(partner[column], seen):
                    partner[column] = row
                    return True
        return False

    return all(finds(row, set()) for row in range(len(may)))


def _crossed(first: tuple[int, ...], second: tuple[int, ...], depth: int, points: list[int]) -> list[int]:
    """Returns the second parent with some labels of the first, repaired to groups of equal size."""
    labels = list(second)
    for point in points:
        labels[point] = first[point]
    size = len(labels) // depth
    sizes = np.bincount(labels, minlength=depth)
    for device, label in enumerate(labels):
        if sizes[label] > size:
            target = int(np.argmax(sizes < size))
            sizes[label] -= 1
            sizes[target] += 1
            labels[device] = target
    return labels


def _moved_in_cycles(seconds: np.ndarray, labels: list[int], depth: int) -> list[int]:
    """Makes one pass of cyclic moves: each cycle moves a device from group to group until one comes back to the first
    group; of each cycle, and of the cycles, the beginning with the largest sum of gains is kept."""
    locked = np.zeros(len(labels), dtype=bool)
    touched: set[int] = set()
    stages = [labels]
    sums = [0.0]
    for _ in range(depth):
        current, gained = _cycle(seconds, stages[-1], depth, locked, touched)
        if current is None:
            break
        stages.append(current)
        sums.append(gained)
        if len(touched) == depth:
            break
    totals = np.cumsum(sums)
    return stages[int(totals.argmax())]


def _cycle(
    seconds: np.ndarray, labels: list[int], depth: int, locked: np.ndarray, touched: set[int]
) -> tuple[list[int] | None, float]:
    """Makes one cycle, and returns it with the gains of the part that is kept; None: no device can move."""
    current = list(labels)
    moves: list[tuple[int, int, int]] = []
    gains: list[float] = []
    closing: list[float] = []
    gain, chosen = _gains(seconds, current, depth, locked)
    best = gain.max(1)
    start = here = int(best.argmax())
    if not np.isfinite(best[start]):
        return None, 0.0
    for _ in range(len(labels)):
        if chosen[here] < 0 or not np.isfinite(best[here]):
            break
        device, target = int(chosen[here]), int(gain[here].argmax())
        closing.append(float(gain[here, start]) if here != start else 0.0)
        gains.append(float(best[here]))
        current[device] = target
        locked[device] = True
        touched.add(target)
        moves.append((device, here, target))
        here = target
        if here == start:
            break
        gain, chosen = _gains(seconds, current, depth, locked)
        best = gain.max(1)
    # The cycle is closed after the move from which on it brings most: that device goes to the first group instead.
    most, last = 0.0, 0
    for index in range(1, len(gains)):
        if (total := sum(gains[:index]) + closing[index]) > most:
            most, last = total, index
    for device, source, _ in moves[:last:-1]:
        current[device] = source
    current[moves[last][0]] = start
    return current, most


def _gains(seconds: np.ndarray, labels: list[int], depth: int, locked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes what moving a device from each group to each other one brings, float64 [depth, depth], and finds which
    device it is: the one that is nearest to another one of its group (the code's "default" gain); -1: all are
    locked."""
    own = np.array(labels)
    member = own[None, :] == np.arange(depth)[:, None]
    sizes = np.maximum(member.sum(1), 1)
    to_group = (seconds @ member.T) / sizes
    same = np.where((own[:, None] == own[None, :]) & ~np.eye(len(own), dtype=bool), seconds, np.inf)
    nearest = same.min(1)
    gain, chosen = np.full((depth, depth), -np.inf), np.full(depth, -1)
    for group in range(depth):
        free = np.flatnonzero(member[group] & ~locked)
        if len(free):
            device = int(free[nearest[free].argmin()])
            if np.isfinite(nearest[device]):
                chosen[group] = device
                gain[group] = to_group[device] - nearest[device]
                gain[group, group] = -np.inf
    return gain, chosen
