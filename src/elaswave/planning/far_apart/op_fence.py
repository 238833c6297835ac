"""OP-Fence: clusters of devices by bandwidth, ordered; stages in clusters; layers cut along slow links. Pure.

The name and the idea (cluster devices by bandwidth, cut the graph of operators along slow links) are of FusionLLM's
abstract (arXiv 2410.12707), of which no more could be read; how it is done here is ours:

1. Ways to cluster the devices, and orders of the clusters (`elaswave.planning.far_apart.cuts`).
2. For several depths each cluster is given stages by its speed, its devices dealt over them, like beside like.
3. For each such chain of stages the cuts are found by dynamic programmes (`elaswave.planning.far_apart.cuts`).
4. The best chains are improved step by step: a device goes to another stage of its cluster, a stage is parted, two are
   joined, two change places, one is left out or taken in, both ends are made narrow. What the objective likes is kept.

A number of evaluations bounds the search, not a clock: equal jobs have equal plans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from itertools import combinations, product
from typing import Protocol

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.far_apart.cuts import Cluster, best_cuts, clusterings, orders
from elaswave.planning.far_apart.job import FarJob, FarPlan, StepParts
from elaswave.planning.far_apart.objective import FAR_SCHEDULES, Model

MAX_ORDERS = 4
SMALL = 8
"""Devices up to which clusters are given every number of stages, in more orders."""
STARTS = 14
"""Chains that are improved step by step, as long as the budget lasts, fewer and fewer of them."""
ALL_CHOICES = 4
"""Clusters up to which every choice of them is looked at."""
NARROWED = 12
"""Chains of which the ends are made narrow before the best ones are improved."""
SHALLOW = 4
"""Numbers of stages near this one are looked at first, since the budget may end."""
BUDGET = 5_000
"""Stages that the search may look at, over all chains: what its time depends on."""

Chain = tuple[tuple[int, ...], ...]


class FarPlanner(Protocol):
    """Plans a job on machines far apart."""

    def __call__(self, job: FarJob, *, schedules: Sequence[Schedule] = FAR_SCHEDULES) -> FarPlan:
        """Makes the plan.

        Raises:
            InfeasiblePlan: nothing that this planner would choose fits into memory.
        """


@dataclass(frozen=True)
class _Found:
    """A chain with its best cuts."""

    chain: Chain
    cuts: list[int]
    schedule: Schedule
    parts: StepParts
    clusters: tuple[Cluster, ...]
    """All of them, also those that the chain leaves out."""


@dataclass
class _Search:
    """Evaluates chains, each once.

    Args:
        model: of the job.
        schedules: that may be chosen.
        budget: stages that may still be looked at.
    """

    model: Model
    schedules: Sequence[Schedule]
    budget: float
    known: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster, job = self.model.cluster, self.model.job
        rows = zip(job.site.tolist(), cluster.device.tolist(), cluster.speed.tolist(), cluster.memory_bytes.tolist())
        numbers: dict[object, int] = {}
        self.alike = [numbers.setdefault(row, len(numbers)) for row in rows]
        """Of each device its number among those that differ."""

    def signature(self, chain: Chain) -> object:
        """Computes a key that is equal for chains that are alike."""
        return tuple(tuple(sorted(self.alike[device] for device in stage)) for stage in chain)

    def evaluate(self, chain: Chain, clusters: tuple[Cluster, ...]) -> _Found | None:
        """Finds the best cuts and schedule of a chain that has not been looked at before; returns None if there are
        none, or it has."""
        key = self.signature(chain)
        if key in self.known or self.budget <= 0 or len(chain) > self.model.job.num_layers:
            return None
        # A programme's work grows with the layers' number squared.
        self.budget -= len(chain) * max(1.0, (self.model.job.num_layers / 20) ** 2)
        groups = [self.model.group(stage) for stage in chain]
        best: _Found | None = None
        for schedule in self.schedules:
            found = best_cuts(self.model, groups, schedule)
            if found is not None and (best is None or found[1].step_s < best.parts.step_s):
                best = _Found(chain, found[0], schedule, found[1], clusters)
        self.known[key] = np.inf if best is None else best.parts.step_s
        return best


def op_fence(
    job: FarJob,
    *,
    use_all: bool = False,
    schedules: Sequence[Schedule] = FAR_SCHEDULES,
    budget: float = BUDGET,
    model: Model | None = None,
) -> FarPlan:
    """Plans a job on machines far apart.

    Args:
        job: what is planned for.
        use_all: every device is in a stage; otherwise sites and devices that cost more than they bring are left out.
        schedules: that may be chosen.
        budget: stages that the search may look at; more take longer and may find better plans.
        model: the job's, if there is one already.
    Raises:
        InfeasiblePlan: no chain that was looked at fits into memory.
    """
    model = model or Model(job)
    # The rest is kept for improving: the starts alone could spend it all.
    search = _Search(model, schedules, budget * 0.6)
    found = list(_starts(search, use_all=use_all))
    found.sort(key=lambda each: each.parts.step_s)
    if not found:
        raise InfeasiblePlan(
            f"memory: the {job.num_layers} layers do not fit on the {job.cluster.num_workers} devices in any chain of "
            "stages that was tried; add devices, or take those with more memory"
        )
    search.budget += budget * 0.4
    narrower = [_narrowed(search, start) for start in found[:NARROWED]]
    found = sorted([*found, *chained.from_iterable(narrower)], key=lambda each: each.parts.step_s)
    best = _best_improved(search, _different(found), use_all=use_all)
    groups = [model.group(stage) for stage in best.chain]
    return model.plan("op_fence", groups, best.cuts, best.schedule, best.parts)


def _best_improved(search: _Search, starts: list[_Found], *, use_all: bool) -> _Found:
    """Finds the best chain that can be reached from these: all of them are improved for a while, the better half goes
    on."""
    while True:
        rounds = len(starts).bit_length()
        for index, start in enumerate(starts):
            # Each round gets about the same share of what there is: the fewer starts it has, the more for each.
            turns = len(starts) * (rounds - 1) + len(starts) - index
            later, search.budget = search.budget * (1 - 1 / turns), search.budget / turns
            starts[index] = _improved(search, start, use_all=use_all)
            # What this one leaves over is for those that follow.
            search.budget += later
        starts.sort(key=lambda each: each.parts.step_s)
        if len(starts) == 1:
            return starts[0]
        del starts[len(starts) // 2 :]


def _narrowed(search: _Search, start: _Found) -> list[_Found]:
    """Evaluates the chain with narrow ends, where that fits."""
    of_device = _cluster_of_device(start)
    cluster_of = [of_device[stage[0]] for stage in start.chain]
    chains = _narrow_ends(search.model, start.chain, cluster_of)
    found = (search.evaluate(each, start.clusters) for each in chains)
    return [each for each in found if each is not None]


def _cluster_of_device(found: _Found) -> dict[int, int]:
    """Maps each device to the number of its cluster."""
    return {device: number for number, cluster in enumerate(found.clusters) for device in cluster}


def _different(found: list[_Found]) -> list[_Found]:
    """Chooses the best one, then the best of other devices, then of other depths."""
    by_devices: dict[object, _Found] = {}
    by_depth: dict[object, _Found] = {}
    for each in found:
        by_devices.setdefault(frozenset(device for stage in each.chain for device in stage), each)
        by_depth.setdefault((each.clusters, len(each.chain)), each)
    chosen = list(by_devices.values())[: STARTS // 2]
    chosen += [each for each in by_depth.values() if all(each is not other for other in chosen)]
    return chosen[:STARTS]


def _starts(search: _Search, *, use_all: bool) -> Iterator[_Found]:
    """Chains of stages that are as wide in each cluster as the depth asks for."""
    model = search.model
    is_small = model.job.cluster.num_workers <= SMALL
    tried: dict[tuple[Cluster, ...], tuple[Cluster, ...]] = {}
    for clusters in clusterings(model):
        known = orders(model, clusters, 6 * MAX_ORDERS if is_small else MAX_ORDERS)
        if not use_all:
            known += [order for some in _some_of(model, clusters) for order in orders(model, some, 1)]
        for order in known:
            tried.setdefault(order, clusters)
    chains: dict[Chain, tuple[Cluster, ...]] = {}
    for depth in _depths(min(model.job.num_layers, model.job.cluster.num_workers)):
        for order, clusters in tried.items():
            if depth >= len(order):
                for is_even in (True, False):
                    numbers = _stages_of_each(model, order, depth)
                    chains.setdefault(_dealt(model, order, numbers, is_even=is_even), clusters)
    if is_small:
        for order, clusters in tried.items():
            for choice in product(*(range(1, len(cluster) + 1) for cluster in order)):
                chains.setdefault(_dealt(model, order, choice, is_even=True), clusters)
    for chain, clusters in chains.items():
        found = search.evaluate(chain, clusters)
        if found is not None:
            yield found


def _some_of(model: Model, clusters: tuple[Cluster, ...]) -> list[tuple[Cluster, ...]]:
    """Clusters to do with: all choices of a few; of many the fastest ones."""
    if len(clusters) <= ALL_CHOICES:
        return [some for size in range(1, len(clusters)) for some in combinations(clusters, size)]
    by_rate = sorted(clusters, key=lambda cluster: (-float(model.rate[list(cluster)].sum()), cluster))
    return [*((each,) for each in by_rate[:3]), *(tuple(by_rate[:size]) for size in (2, 3))]


def _depths(most: int) -> list[int]:
    """Lists numbers of stages: all small ones, some large ones."""
    known = sorted({*range(1, min(most, 12) + 1), *(round(12 * 1.3**power) for power in range(1, 8)), most})
    depths = [depth for depth in known if depth <= most]
    return sorted(depths, key=lambda depth: (abs(depth - SHALLOW), depth))


def _stages_of_each(model: Model, order: Sequence[Cluster], depth: int) -> list[int]:
    """Computes how many of so many stages each cluster has: the next one goes where stages have most speed, and
    devices."""
    rates = [float(model.rate[list(cluster)].sum()) for cluster in order]
    numbers = [1] * len(order)
    for _ in range(depth - len(order)):
        room = [index for index, cluster in enumerate(order) if numbers[index] < len(cluster)]
        if not room:
            break
        numbers[max(room, key=lambda index: (rates[index] / numbers[index], -index))] += 1
    return numbers


def _dealt(model: Model, order: Sequence[Cluster], numbers: Sequence[int], *, is_even: bool) -> Chain:
    """Stages of each cluster in order.

    Args:
        model: of the job.
        order: the clusters.
        numbers: of stages of each.
        is_even: stages of a cluster have one speed together, slow devices beside fast ones; else like beside like.
    """
    chain: list[tuple[int, ...]] = []
    for cluster, number in zip(order, numbers):
        by_speed = sorted(cluster, key=lambda device: (-float(model.rate[device]), device))
        if is_even:
            bins: list[list[int]] = [[] for _ in range(number)]
            for device in by_speed:
                lightest = min(bins, key=lambda each: float(model.rate[each].sum()) if each else 0.0)
                lightest.append(device)
            chain += [tuple(sorted(each)) for each in bins]
        else:
            ends = [round(index * len(by_speed) / number) for index in range(number + 1)]
            chain += [tuple(sorted(by_speed[start:stop])) for start, stop in zip(ends, ends[1:])]
    return tuple(chain)


def _improved(search: _Search, start: _Found, *, use_all: bool) -> _Found:
    """Returns the chain after all steps that help."""
    best = start
    changed = True
    while changed and search.budget > 0:
        changed = False
        for chain in _neighbours(search, best, use_all=use_all):
            found = search.evaluate(chain, best.clusters)
            if found is not None and found.parts.step_s < best.parts.step_s * (1 - 1e-9):
                best, changed = found, True
                # Look at the better chain's own neighbours at once; those that are known already cost nothing.
                break
            if search.budget <= 0:
                break
    return best


def _neighbours(search: _Search, found: _Found, *, use_all: bool) -> Iterator[Chain]:
    """Chains that differ by one step."""
    chain = found.chain
    of_device = _cluster_of_device(found)
    cluster_of = [of_device[stage[0]] for stage in chain]
    used = {device for stage in chain for device in stage}
    yield from _other_depths(chain, cluster_of)
    yield from _narrow_ends(search.model, chain, cluster_of)
    yield from _moved_devices(search, chain, cluster_of)
    yield from _other_places(chain, cluster_of)
    # All that follows leaves devices out, or takes some in.
    if use_all:
        return
    for index in range(len(chain)):
        if len(chain) > 1:
            yield chain[:index] + chain[index + 1 :]
    for number in dict.fromkeys(cluster_of):
        rest = tuple(stage for stage, own in zip(chain, cluster_of) if own != number)
        if rest:
            yield rest
    for index, stage in enumerate(chain):
        for device in _one_of_each(search, stage):
            if len(stage) > 1:
                yield (*chain[:index], tuple(each for each in stage if each != device), *chain[index + 1 :])
    spare = _one_of_each(search, [device for device in range(len(search.alike)) if device not in used])
    for device in spare:
        for index, stage in enumerate(chain):
            if of_device.get(device) == cluster_of[index]:
                yield (*chain[:index], tuple(sorted((*stage, device))), *chain[index + 1 :])
        for index in range(len(chain) + 1):
            yield (*chain[:index], (device,), *chain[index:])


def _one_of_each(search: _Search, devices: Sequence[int]) -> list[int]:
    # Reversed, so that of devices that are alike the first one stays.
    return list({search.alike[device]: device for device in reversed(devices)}.values())


def _other_depths(chain: Chain, cluster_of: list[int]) -> Iterator[Chain]:
    """Yields chains with two stages of a cluster joined, or one parted."""
    for index in range(len(chain) - 1):
        if cluster_of[index] == cluster_of[index + 1]:
            joined = tuple(sorted((*chain[index], *chain[index + 1])))
            yield (*chain[:index], joined, *chain[index + 2 :])
    for index, stage in enumerate(chain):
        if len(stage) > 1:
            half = len(stage) // 2
            for first in dict.fromkeys((stage[:half], stage[::2])):
                second = tuple(device for device in stage if device not in first)
                yield (*chain[:index], first, second, *chain[index + 1 :])
                if first != second:
                    yield (*chain[:index], second, first, *chain[index + 1 :])


def _narrow_ends(model: Model, chain: Chain, cluster_of: list[int]) -> Iterator[Chain]:
    """Yields chains whose first stage, last one, or both at once have one device: the others form a stage beside it, or
    join it.

    Embedding and head have the most parameters and end the step. A stage of one device reduces nothing; but while the
    other end is wide nothing is gained by it, so both steps are one.
    """
    if len(chain) < 2:
        return
    for ends in ((True, True), (True, False), (False, True)):
        for joins in (False, True):
            stages, clusters = list(chain), list(cluster_of)
            # The last one first: positions before it stay.
            for is_wanted, at, beside in ((ends[1], len(chain) - 1, len(chain) - 2), (ends[0], 0, 1)):
                stage = stages[at]
                if not is_wanted or len(stage) < 2:
                    continue
                alone = max(stage, key=lambda device: (float(model.rate[device]), -device))
                others = tuple(device for device in stage if device != alone)
                stages[at] = (alone,)
                if joins and 0 <= beside < len(stages) and clusters[beside] == clusters[at]:
                    stages[beside] = tuple(sorted((*stages[beside], *others)))
                else:
                    # On the inner side of the end: behind the first stage, but before the last one.
                    place = max(at, 1)
                    stages.insert(place, others)
                    clusters.insert(place, clusters[at])
            yield tuple(stages)


def _moved_devices(search: _Search, chain: Chain, cluster_of: list[int]) -> Iterator[Chain]:
    """Yields chains with a device in another stage of its cluster, or two of them in each other's."""
    for index, stage in enumerate(chain):
        for other, target in enumerate(chain):
            if other == index or cluster_of[other] != cluster_of[index]:
                continue
            for device in _one_of_each(search, stage):
                rest = tuple(each for each in stage if each != device)
                stages = list(chain)
                stages[index], stages[other] = rest, tuple(sorted((*target, device)))
                # The stage of a lone device is gone when that moves.
                yield tuple(each for each in stages if each)
                for second in _one_of_each(search, target):
                    if other > index and search.alike[second] != search.alike[device]:
                        stages[index] = tuple(sorted((*rest, second)))
                        stages[other] = tuple(sorted((*(each for each in target if each != second), device)))
                        yield tuple(stages)


def _other_places(chain: Chain, cluster_of: list[int]) -> Iterator[Chain]:
    """Yields chains with two stages in each other's place, or a cluster elsewhere."""
    yield chain[::-1]
    for first in range(len(chain)):
        for second in range(first + 1, len(chain)):
            stages = list(chain)
            stages[first], stages[second] = stages[second], stages[first]
            yield tuple(stages)
    blocks = list(dict.fromkeys(cluster_of))
    for number in blocks:
        own = [stage for stage, cluster in zip(chain, cluster_of) if cluster == number]
        rest = [stage for stage, cluster in zip(chain, cluster_of) if cluster != number]
        for place in range(len(rest) + 1):
            yield (*rest[:place], *own, *rest[place:])
