"""Explicit routes for an allocation, and the allocation of a layout: the way from a plan to programs and back. Pure.

An allocation says how many micro-batches each worker runs and how many are cut where; routes say which ones. Which
workers share a route does not change what each has to compute, except where neighbouring stages share layers: there the
cuts are dealt such that the workers of a stage end together. A worker with one micro-batch more than the others then
runs its micro-batches with fewer layers.

Stages are gone through in order. What a micro-batch starts with in a stage was decided by the stage before; a worker
is given micro-batches that leave it room to even out with the cuts at the stage's other end, which are dealt last.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule, independent_parts
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.types import Hop, Layout, Stage

_SLACK = 1e-9
"""Relative; differences of rounding."""


class _RoutePiece(NamedTuple):
    """What a worker of some stage of a chain runs of one micro-batch."""

    worker: int
    start: int
    stop: int


def make_routes(allocation: Allocation, costs: Costs, cluster: Cluster, *, previous: Layout | None = None) -> Layout:
    """Makes the layout of an allocation.

    Args:
        allocation: who does how much.
        costs: of the model's layers.
        cluster: with all workers of the allocation.
        previous: a layout of the same micro-batches; each of them keeps its workers as far as the numbers permit.
            Chains of an allocation take their micro-batches in turns, so this is of use for a single chain.
    Raises:
        KeyError: a worker that is not in the cluster.
        ValueError: chains that cannot be one layout, since a stage of one lies inside a stage of another.
    """
    keys = sorted({(stage.start, stage.stop) for chain in allocation.chains for stage in chain.stages})
    members: dict[tuple[int, int], list[int]] = {key: [] for key in keys}
    for chain in allocation.chains:
        for share in chain.stages:
            members[share.start, share.stop] += share.workers.tolist()
    for before, after in pairwise(keys):
        if before[1] > after[1]:
            raise ValueError(
                f"layers [{after[0]}, {after[1]}) of one stage lie inside those of another, [{before[0]}, "
                f"{before[1]}): stages of a layout must begin and end in one order"
            )
    numbers = {key: number for number, key in enumerate(keys)}
    home = {} if previous is None else _homes(previous)
    routes: list[tuple[Hop, ...]] = [()] * allocation.num_microbatches
    for chain, microbatches in zip(allocation.chains, _take_turns([c.num_microbatches for c in allocation.chains])):
        stages = [numbers[share.start, share.stop] for share in chain.stages]
        homes = [home.get(number, frozenset()) for number in microbatches]
        pieces = _chain_routes(chain, costs, cluster, homes)
        for microbatch, route in zip(microbatches, pieces, strict=True):
            routes[microbatch] = tuple(
                Hop(piece.worker, stage, piece.start, piece.stop) for stage, piece in zip(stages, route, strict=True)
            )
    return Layout(
        stages=tuple(
            Stage(start=start, stop=stop, workers=tuple(sorted(members[start, stop]))) for start, stop in keys
        ),
        routes=tuple(routes),
    )


def allocation_of(layout: Layout, schedule: Schedule, levels: Mapping[int, int]) -> Allocation:
    """Returns what `make_routes` has made a layout of.

    Args:
        layout: one chain of stages, or several that share no workers (pipelines of different depth).
        schedule: of the job.
        levels: worker -> index of its frequency level; 0, the slowest, for those that are not in it.
    Raises:
        ValueError: routes that are neither.
    """
    everywhere = list(range(len(layout.stages)))
    if all([hop.stage for hop in route] == everywhere for route in layout.routes):
        groups = [(everywhere, list(range(layout.num_microbatches)))]
    else:
        groups = _components(layout)
    of_route: dict[int, int] = {
        hop.worker: group
        for group, (_, microbatches) in enumerate(groups)
        for microbatch in microbatches
        for hop in layout.routes[microbatch]
    }
    chains = []
    for group, (stages, microbatches) in enumerate(groups):
        given = Counter((hop.stage, hop.worker) for number in microbatches for hop in layout.routes[number])
        shares = []
        for index in stages:
            stage = layout.stages[index]
            # Idle workers of a stage that several chains have go to the first.
            first = next(number for number, (others, _) in enumerate(groups) if index in others)
            own = [worker for worker in stage.workers if of_route.get(worker, first) == group]
            shares.append(
                StageShare(
                    start=stage.start,
                    stop=stage.stop,
                    workers=np.array(own, dtype=np.int64),
                    num_microbatches=np.array([given[index, worker] for worker in own], dtype=np.int64),
                    levels=np.array([levels.get(worker, 0) for worker in own], dtype=np.int64),
                )
            )
        cuts = tuple(
            dict(sorted(Counter(layout.routes[number][position].start for number in microbatches).items()))
            for position in range(1, len(stages))
        )
        chains.append(Chain(stages=tuple(shares), num_microbatches=len(microbatches), cuts=cuts))
    return Allocation(chains=tuple(chains), schedule=schedule)


def _components(layout: Layout) -> list[tuple[list[int], list[int]]]:
    """Groups of micro-batches that share no workers: (stages, micro-batches) of each.

    Raises:
        ValueError: micro-batches of one group pass different stages.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for microbatches in independent_parts(layout):
        passed = {tuple(hop.stage for hop in layout.routes[microbatch]) for microbatch in microbatches}
        if len(passed) > 1:
            shown = " and ".join(map(str, sorted(passed)[:2]))
            raise ValueError(f"micro-batches that share workers pass different stages, {shown}: this is no chain")
        found.setdefault(passed.pop(), []).extend(microbatches)
    return [(list(stages), sorted(microbatches)) for stages, microbatches in found.items()]


def _homes(layout: Layout) -> dict[int, frozenset[int]]:
    return {number: frozenset(hop.worker for hop in route) for number, route in enumerate(layout.routes)}


def _take_turns(shares: Sequence[int]) -> list[list[int]]:
    """Deals the micro-batch numbers of each chain, each spread evenly over all of them."""
    turns = sorted(((2 * k + 1) / (2 * share), chain) for chain, share in enumerate(shares) for k in range(share))
    numbers: list[list[int]] = [[] for _ in shares]
    for number, (_, chain) in enumerate(turns):
        numbers[chain].append(number)
    return numbers


def _chain_routes(
    chain: Chain, costs: Costs, cluster: Cluster, homes: Sequence[frozenset[int]]
) -> list[list[_RoutePiece]]:
    """Pieces of every micro-batch of a chain, in order of stages."""
    prefix = costs.prefix["busy_s"].tolist()
    routes: list[list[_RoutePiece]] = [[] for _ in range(chain.num_microbatches)]
    starts = [chain.stages[0].start] * chain.num_microbatches
    for index, share in enumerate(chain.stages):
        last = index + 1 == len(chain.stages)
        cut = {share.stop: chain.num_microbatches} if last else chain.cuts[index]
        speeds = _speeds(cluster, share)
        workers = _deal_microbatches(share, speeds, prefix, starts, cut, homes)
        stops = _deal_cuts(workers, speeds, prefix, starts, cut)
        _exchange(workers, speeds, prefix, starts, stops)
        ids = share.workers.tolist()
        for route, worker, start, stop in zip(routes, workers, starts, stops, strict=True):
            route.append(_RoutePiece(ids[worker], start, stop))
        starts = stops
    return routes


def _speeds(cluster: Cluster, share: StageShare) -> list[float]:
    where = cluster.index_of(share.workers)
    return [
        float(cluster.speed[position]) * cluster.devices[int(cluster.device[position])].levels[level].speed
        for position, level in zip(where.tolist(), share.levels.tolist(), strict=True)
    ]


def _deal_microbatches(
    share: StageShare,
    speeds: Sequence[float],
    prefix: Sequence[float],
    starts: Sequence[int],
    cut: Mapping[int, int],
    homes: Sequence[frozenset[int]],
) -> list[int]:
    """Chooses the worker of each micro-batch, as a position in the stage.

    Workers take micro-batches in turns, each at its own pace. Micro-batches that begin earlier than the latest start
    (long ones) go only to workers that can even them out.
    """
    counts = share.num_microbatches.tolist()
    longest_start = max(starts)
    extra = [prefix[longest_start] - prefix[start] for start in starts]
    long = [value > 0 for value in extra]
    long_left, short_left = _room_for_long(counts, speeds, prefix, longest_start, extra, cut)
    left = list(counts)
    taken = [0] * len(counts)
    chosen = [-1] * len(starts)
    position = {worker: index for index, worker in enumerate(share.workers.tolist())}

    def take(microbatch: int, worker: int) -> None:
        chosen[microbatch] = worker
        left[worker] -= 1
        taken[worker] += 1
        (long_left if long[microbatch] else short_left)[worker] -= 1

    for microbatch, home in enumerate(homes):
        for worker in (position[each] for each in home if each in position):
            if left[worker] and (long_left if long[microbatch] else short_left)[worker] > 0:
                take(microbatch, worker)
                break
    taken = [0] * len(counts) if not any(homes) else taken
    queue = [((2 * taken[worker] + 1) / (2 * count), worker) for worker, count in enumerate(counts) if left[worker]]
    heapq.heapify(queue)
    for microbatch, is_long in enumerate(long):
        if chosen[microbatch] >= 0:
            continue
        room = long_left if is_long else short_left
        passed = []
        while queue and room[queue[0][1]] <= 0:
            passed.append(heapq.heappop(queue))
        # If no worker has room for one of this kind, the worker whose turn it is takes it all the same.
        _, worker = heapq.heappop(queue) if queue else passed.pop(0)
        take(microbatch, worker)
        for entry in passed:
            heapq.heappush(queue, entry)
        if left[worker]:
            heapq.heappush(queue, ((2 * taken[worker] + 1) / (2 * counts[worker]), worker))
    return chosen


def _room_for_long(
    counts: Sequence[int],
    speeds: Sequence[float],
    prefix: Sequence[float],
    longest_start: int,
    extra: Sequence[float],
    cut: Mapping[int, int],
) -> tuple[list[int], list[int]]:
    """Computes how many long and how many short micro-batches each worker of a stage can take so that all end
    together."""
    num_long = sum(value > 0 for value in extra)
    if num_long in (0, len(extra)):
        return list(counts), list(counts)
    unit = sum(extra) / num_long
    shortest, longest = min(cut), max(cut)
    core, beyond = prefix[shortest] - prefix[longest_start], prefix[longest] - prefix[shortest]
    if beyond == 0:  # nothing at the other end can even anything out: it must come out even here
        given = _even_out(
            [count * core / speed for count, speed in zip(counts, speeds)], counts, speeds, unit, num_long
        )
        return given, [count - each for count, each in zip(counts, given)]
    more = sum((prefix[stop] - prefix[shortest]) * number for stop, number in cut.items())
    end = _common_end(counts, speeds, core, core + unit + beyond, sum(extra) + more)
    long_room, short_room = [], []
    for count, speed in zip(counts, speeds):
        room = end * speed - count * core
        most = min(count, int(room / unit + 1e-6)) if room > 0 else 0
        least = max(0, min(most, ceil((room - count * beyond) / unit - 1e-6)))
        long_room.append(most)
        short_room.append(count - least)
    if sum(long_room) < num_long or sum(short_room) < len(extra) - num_long:
        return list(counts), list(counts)
    return long_room, short_room


def _common_end(counts: Sequence[int], speeds: Sequence[float], least: float, most: float, more: float) -> float:
    """Computes when the workers of a stage end if its work can be divided as its cuts permit.

    Args:
        counts: micro-batches of each worker.
        speeds: of each worker.
        least: seconds of the shortest hop.
        most: seconds of the longest hop.
        more: seconds by which all hops together are longer than the shortest.
    """
    work = sum(counts) * least + more
    low, high = 0.0, max(count * most / speed for count, speed in zip(counts, speeds))
    for _ in range(50):
        end = (low + high) / 2
        done = sum(min(max(end * speed, count * least), count * most) for count, speed in zip(counts, speeds))
        low, high = (low, end) if done >= work else (end, high)
    return high


def _even_out(
    ends: Sequence[float], room: Sequence[int], speeds: Sequence[float], unit: float, number: int
) -> list[int]:
    """Deals pieces of work of one size such that the last worker ends as early as possible.

    Args:
        ends: seconds that each worker computes already.
        room: the most pieces that each can take; together at least `number`.
        speeds: of each worker.
        unit: seconds of a piece on a worker of speed 1.
        number: of pieces.
    """
    given = [0] * len(ends)
    queue = [(ends[worker] + unit / speeds[worker], worker) for worker in range(len(ends)) if room[worker]]
    heapq.heapify(queue)
    for _ in range(number):
        end, worker = heapq.heappop(queue)
        given[worker] += 1
        if given[worker] < room[worker]:
            heapq.heappush(queue, (end + unit / speeds[worker], worker))
    return given


def _deal_cuts(
    workers: Sequence[int],
    speeds: Sequence[float],
    prefix: Sequence[float],
    starts: Sequence[int],
    cut: Mapping[int, int],
) -> list[int]:
    """Chooses the layer at which each micro-batch leaves the stage, so that its workers end together.

    Layer by layer: those that leave later than it are dealt to the workers that would end first with it, and within a
    worker to its shortest micro-batches, evenly over its step.
    """
    lowest, highest = min(cut), max(cut)
    stops = [lowest] * len(workers)
    if lowest == highest:
        return stops
    own: list[list[int]] = [[] for _ in speeds]
    for microbatch, worker in enumerate(workers):
        own[worker].append(microbatch)
    ends = [
        sum(prefix[lowest] - prefix[starts[microbatch]] for microbatch in own[worker]) / speeds[worker]
        for worker in range(len(speeds))
    ]
    further = sum(cut.values()) - cut[lowest]
    for layer in range(lowest, highest):
        unit = prefix[layer + 1] - prefix[layer]
        there = [[microbatch for microbatch in mine if stops[microbatch] == layer] for mine in own]
        # Whatever begins here must run this layer here: nothing would be left of its hop.
        must = [sum(starts[microbatch] == layer for microbatch in mine) for mine in there]
        ends = [end + number * unit / speed for end, number, speed in zip(ends, must, speeds, strict=True)]
        may = [len(mine) - number for mine, number in zip(there, must, strict=True)]
        more = _even_out(ends, may, speeds, unit, max(0, further - sum(must)))
        given = [number + extra for number, extra in zip(must, more, strict=True)]
        for worker, (number, mine) in enumerate(zip(given, there, strict=True)):
            for microbatch in _spread(mine, number, starts):
                stops[microbatch] = layer + 1
            ends[worker] += more[worker] * unit / speeds[worker]
        further -= cut.get(layer + 1, 0)
    return stops


def _exchange(
    workers: list[int], speeds: Sequence[float], prefix: Sequence[float], starts: Sequence[int], stops: Sequence[int]
) -> None:
    """Lets the last worker of a stage exchange a micro-batch with another while both then end earlier than it did."""
    lengths = [prefix[stop] - prefix[start] for start, stop in zip(starts, stops, strict=True)]
    if max(lengths) - min(lengths) <= _SLACK * max(lengths):
        return
    own: list[dict[float, list[int]]] = [{} for _ in speeds]  # micro-batches of each worker by length
    loads = [0.0] * len(speeds)
    for microbatch, worker in enumerate(workers):
        own[worker].setdefault(lengths[microbatch], []).append(microbatch)
        loads[worker] += lengths[microbatch]
    for _ in range(4 * len(speeds)):
        last = max(range(len(speeds)), key=lambda worker: loads[worker] / speeds[worker])
        end = loads[last] / speeds[last]
        best: tuple[float, int, float, float] | None = None
        for worker in range(len(speeds)):
            for long in own[last]:
                for short in own[worker]:
                    if worker == last or long <= short:
                        continue
                    less = long - short
                    later = max((loads[last] - less) / speeds[last], (loads[worker] + less) / speeds[worker])
                    if later < end * (1 - _SLACK) and (best is None or later < best[0]):
                        best = (later, worker, long, short)
        if best is None:
            return
        _, worker, long, short = best
        pairs = ((abs(a - b), a, b) for a in own[last][long] for b in own[worker][short])
        _, given, taken = min(pairs)
        for source, target, microbatch in ((last, worker, given), (worker, last, taken)):
            length = lengths[microbatch]
            own[source][length].remove(microbatch)
            if not own[source][length]:
                del own[source][length]
            own[target].setdefault(length, []).append(microbatch)
            loads[source] -= length
            loads[target] += length
            workers[microbatch] = target


def _spread(microbatches: Sequence[int], number: int, starts: Sequence[int]) -> list[int]:
    """Chooses so many of these micro-batches: those that begin last, evenly among equals."""
    chosen: list[int] = []
    for start in sorted({starts[microbatch] for microbatch in microbatches}, reverse=True):
        equal = [microbatch for microbatch in microbatches if starts[microbatch] == start]
        wanted = min(len(equal), number - len(chosen))
        chosen += [equal[(2 * k + 1) * len(equal) // (2 * wanted)] for k in range(wanted)]
    return chosen
