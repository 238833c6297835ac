"""Where to cut the layers when it is known which workers form the stages, and in which order: dynamic programmes. Pure.

The first finds the smallest largest time of any stage or link (minimax). A step is that and the way of a micro-batch,
so the second one finds, for some bounds above the smallest, the shortest way of which no stage or link exceeds the
bound; the objective decides between them.

Devices clustered by bandwidth, and clusters ordered along fast links. Pure.

Louvain's community detection (Blondel et al. 2008, Fast unfolding of communities in large networks) is networkx's,
which torch brings along. What it finds depends on a resolution: at 1 it merges sites whose links are not much slower
than those inside. Several resolutions are tried, the sites themselves too, and the objective decides.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.far_apart.job import StepParts
from elaswave.planning.far_apart.objective import Boundary, Group, Model

CAPS = np.array([1.0, 1.05, 1.2, 1.6, 3.0, np.inf])
"""Bounds that are tried, as multiples of the smallest one."""


def best_cuts(model: Model, groups: list[Group], schedule: Schedule) -> tuple[list[int], StepParts] | None:
    """Returns the best cuts that are found for stages in order.

    Args:
        model: of the job.
        groups: the workers of each stage.
        schedule: of the programs.
    Returns:
        First layer of each stage but the first, and the objective; None: it does not fit, or there are fewer layers
        than stages.
    """
    if len(groups) > model.job.num_layers:
        return None
    busy, way = _stage_seconds(model, groups, schedule)
    boundaries = [model.boundary(*pair) for pair in zip(groups, groups[1:])]
    if schedule == "gpipe":
        links = [each.busy_ahead_s + each.busy_back_s for each in boundaries]
    else:
        links = [np.maximum(each.busy_ahead_s, each.busy_back_s) for each in boundaries]
    smallest = _smallest_bound(busy, links)
    if not smallest < np.inf:
        return None
    best: tuple[list[int], StepParts] | None = None
    choices = _shortest_ways(busy, way, links, boundaries, smallest * CAPS * (1 + 1e-12))
    for cuts, parts in zip(choices, model.evaluate_all(groups, choices, schedule), strict=True):
        if parts is not None and (best is None or parts.step_s < best[1].step_s):
            best = cuts, parts
    return best


def _stage_seconds(model: Model, groups: list[Group], schedule: Schedule) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Computes for each stage and range of layers what it takes of a step, infinite where it does not fit; and one
    way."""
    held = model.held(groups, schedule)
    busy, way = [], []
    for group, most in zip(groups, held.tolist()):
        fits = model.is_range & (group.holds >= (most if schedule == "gpipe" else 1))
        whole = group.busy_forward + group.busy_backward if schedule == "gpipe" else group.busy
        busy.append(np.where(fits, whole + group.reduce_s + group.gather_s, np.inf))
        way.append(group.forward + group.backward)
    return busy, way


def _smallest_bound(busy: list[np.ndarray], links: list[np.ndarray]) -> float:
    found = busy[0][0]
    for stage, link in zip(busy[1:], links):
        found = np.maximum(np.maximum(found, link)[:, None], stage).min(0)
    return float(found[-1])


def _shortest_ways(
    busy: list[np.ndarray],
    way: list[np.ndarray],
    links: list[np.ndarray],
    boundaries: list[Boundary],
    caps: np.ndarray,
) -> list[list[int]]:
    """Cuts of the shortest way under each bound, those that differ."""
    bounds = caps[:, None]
    found = np.where(busy[0][0] <= bounds, way[0][0], np.inf)
    choices = []
    for stage, one, link, boundary in zip(busy[1:], way[1:], links, boundaries):
        so_far = np.where(link <= bounds, found + boundary.ahead_s + boundary.back_s, np.inf)
        total = np.where(stage <= bounds[:, :, None], so_far[:, :, None] + one, np.inf)
        choice = total.argmin(1)
        choices.append(choice)
        found = np.take_along_axis(total, choice[:, None, :], 1)[:, 0, :]
    different: dict[tuple[int, ...], None] = {}
    for row in np.flatnonzero(found[:, -1] < np.inf).tolist():
        place = found.shape[1] - 1
        cuts = []
        for choice in reversed(choices):
            place = int(choice[row, place])
            cuts.append(place)
        different[tuple(reversed(cuts))] = None
    return [list(cuts) for cuts in different]


RESOLUTIONS = (0.8, 1.0, 1.2, 1.5)
ALL_ORDERS = 5
"""Clusters up to which every order is looked at."""
Cluster = tuple[int, ...]


def clusterings(model: Model) -> list[tuple[Cluster, ...]]:
    """Ways to part the devices: by site, and communities of the graph whose weights are bandwidths.

    Args:
        model: of the job.
    Returns:
        Those that differ; each with clusters of ascending positions, by their first.
    """
    site = model.job.site
    by_site = tuple(tuple(np.flatnonzero(site == each).tolist()) for each in np.unique(site).tolist())
    found = dict.fromkeys([_sorted(by_site)])
    if len(by_site) > 1:
        for resolution in RESOLUTIONS:
            found[_sorted(_communities(model, by_site, resolution))] = None
    return list(found)


def _communities(model: Model, by_site: Sequence[Cluster], resolution: float) -> list[Cluster]:
    """Runs Louvain over sites: devices of one site are alike to it, so a site is a node whose own weight is that
    inside."""
    import networkx

    graph = networkx.Graph()
    graph.add_nodes_from(range(len(by_site)))
    for first, devices in enumerate(by_site):
        for second in range(first, len(by_site)):
            others = by_site[second]
            number = len(devices) * len(others)
            if first == second:
                number = len(devices) * (len(devices) - 1) // 2
                if not number:
                    continue
                one, two = devices[0], devices[1]
            else:
                one, two = devices[0], others[0]
            slower = min(model.bandwidth[one, two], model.bandwidth[two, one])
            graph.add_edge(first, second, weight=float(slower) / 1e9 * number)
    communities = networkx.algorithms.community.louvain_communities(graph, resolution=resolution, seed=0)
    return [tuple(sorted(device for site in sites for device in by_site[site])) for sites in communities]


def _sorted(clusters: Sequence[Cluster]) -> tuple[Cluster, ...]:
    return tuple(sorted(clusters))


def orders(model: Model, clusters: Sequence[Cluster], most: int) -> list[tuple[Cluster, ...]]:
    """Orders of clusters in which neighbours have fast links, the best first.

    Args:
        model: of the job.
        clusters: to be ordered.
        most: how many orders at most.
    """
    seconds = _distances(model, clusters)

    def length(order: Sequence[int]) -> float:
        return sum(float(seconds[pair]) for pair in zip(order, order[1:]))

    def slowest(order: Sequence[int]) -> float:
        return max((float(seconds[pair]) for pair in zip(order, order[1:])), default=0.0)

    numbers = range(len(clusters))
    if len(clusters) <= ALL_ORDERS:
        known = [tuple(order) for order in permutations(numbers)]
    else:
        known = [_improved(_nearest(seconds, start), length) for start in numbers]
        known += [_improved(order, slowest) for order in known[:3]]
        known += [order[::-1] for order in known]
    known = list(dict.fromkeys(known))
    by_length = sorted(known, key=length)
    by_slowest = sorted(known, key=lambda order: (slowest(order), length(order)))
    chosen = dict.fromkeys(order for pair in zip(by_length, by_slowest) for order in pair)
    return [tuple(clusters[index] for index in order) for order in list(chosen)[:most]]


def _distances(model: Model, clusters: Sequence[Cluster]) -> np.ndarray:
    """Computes the seconds of an ordinary boundary between each two clusters, by their slowest pair."""
    size = float(np.median(model.job.coded_bytes[:-1])) if model.job.num_layers > 1 else 0.0
    count = len(clusters)
    found = np.zeros((count, count))
    for first in range(count):
        for second in range(count):
            if first != second:
                block = np.ix_(clusters[first], clusters[second])
                found[first, second] = (model.latency[block] + size / model.bandwidth[block]).max()
    both: np.ndarray = found + found.T
    return both


def _nearest(seconds: np.ndarray, start: int) -> tuple[int, ...]:
    order, left = [start], set(range(len(seconds))) - {start}
    while left:
        order.append(min(left, key=lambda each: (float(seconds[order[-1], each]), each)))
        left.remove(order[-1])
    return tuple(order)


def _improved(order: tuple[int, ...], value: object) -> tuple[int, ...]:
    """Pieces turned around as long as that helps (2-opt)."""
    assert callable(value)
    best = value(order)
    changed = True
    while changed:
        changed = False
        for first in range(len(order) - 1):
            for last in range(first + 2, len(order) + 1):
                turned = order[:first] + order[first:last][::-1] + order[last:]
                if (other := value(turned)) < best * (1 - 1e-12):
                    order, best, changed = turned, other, True
    return order
