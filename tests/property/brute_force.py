"""The best layout of a small job by trying all: chains of any widths and layers, and sets of single-file pipelines."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from tests.property.clusters import make_cluster, make_costs

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Chain, StageShare
from elaswave.planning.policy.fault_free_policies import fault_free
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.search.apportionment import apportion


class Job(NamedTuple):
    """What is left of a small job."""

    cluster: Cluster
    costs: Costs
    before: Allocation
    event: ClusterEvent


def random_job(seed: int, most: int) -> Job:
    """A job of at most so many workers after a loss: some slow, layers of unequal cost, memory scarce or not."""
    rng = random.Random(seed)
    stages, replicas = rng.choice([(2, 2), (2, 3), (3, 2), (3, 3), (2, 4), (4, 2), (2, 5), (5, 2), (1, 4), (3, 4)])
    number = stages * replicas
    num_layers = rng.randint(max(stages, 4), 8)
    costs = make_costs(
        [rng.choice([0.25, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0]) for _ in range(num_layers)],
        parameter_bytes=10.0,
        activation_bytes=rng.choice([1.0, 5.0]),
    )
    speeds = [1.0] * number
    for worker in rng.sample(range(number), rng.randint(1, 2)):
        speeds[worker] = rng.choice([0.5, 0.7, 0.7, 0.9])
    schedule = rng.choice(["1f1b", "zero-bubble-h2"])
    num_microbatches = rng.choice([1, 2, 4]) * replicas
    before = fault_free(make_cluster([1.0] * number), costs, stages, replicas, num_microbatches, schedule)
    least = max(1, number - most)
    lost = tuple(sorted(rng.sample(range(number), rng.randint(least, max(least, min(3, number - 2))))))
    memory_bytes = num_layers * 60 / stages * rng.choice([1.1, 1.4, 2.0]) if rng.random() < 0.4 else 1e9
    cluster = make_cluster(speeds, memory_bytes=memory_bytes).without(lost)
    return Job(cluster, costs, before, ClusterEvent(kind="lost", workers=lost))


def best_step_s(job: Job) -> float:
    """Seconds of a step of the best layout there is; infinite if none fits.

    All are tried in the order of a lower bound, the busiest worker's seconds, until that is above the best time.
    """
    cluster, costs, number = job.cluster, job.costs, job.before.num_microbatches
    best = float("inf")
    for bound, chains in sorted(itertools.chain(_chains(cluster, costs, number), _pipelines(cluster, costs, number)),
                                key=lambda each: each[0]):  # fmt: skip
        if bound >= best * (1 - 1e-9):
            break
        for schedule in ("zero-bubble-h2", "1f1b"):
            allocation = Allocation(chains=tuple(_built(cluster, *each) for each in chains), schedule=schedule)
            try:
                best = min(best, time_within_memory(cluster, costs, allocation).step_s)
            except (InfeasiblePlan, ValueError):
                continue
    return best


Described = tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[tuple[int, ...], ...]]
"""A chain: positions of each stage's workers, boundaries of layers, micro-batches of each stage's workers."""


def _divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, total), parts - 1):
        yield (0, *inner, total)


def _built(cluster: Cluster, members, bounds, counts) -> Chain:
    shares = []
    for own, (start, stop), given in zip(members, itertools.pairwise(bounds), counts, strict=True):
        order = np.argsort(own)
        shares.append(
            StageShare(
                start=start, stop=stop, workers=cluster.ids[np.array(own)[order]],
                num_microbatches=np.array(given)[order], levels=np.zeros(len(own), dtype=np.int64),
            )
        )  # fmt: skip
    total = int(sum(counts[0]))
    return Chain(stages=tuple(shares), num_microbatches=total, cuts=tuple({bound: total} for bound in bounds[1:-1]))


def _numbers(cluster: Cluster) -> dict[float, list[int]]:
    """Speed -> positions of the workers that have it, fastest first."""
    return {
        speed: np.flatnonzero(cluster.speed == speed).tolist()
        for speed in sorted(set(cluster.speed.tolist()), reverse=True)
    }


def _chains(cluster: Cluster, costs: Costs, number: int) -> Iterator[tuple[float, list[Described]]]:
    """Every way to put the workers, alike ones alike, into the stages of one chain, times every split of the layers."""
    kinds = _numbers(cluster)
    counts = [len(own) for own in kinds.values()]
    parts = {
        own: apportion(number, 1.0 / np.repeat(list(kinds), own))
        for own in itertools.product(*(range(count + 1) for count in counts))
        if sum(own)
    }
    paces = {own: float(np.max(given / np.repeat(list(kinds), own))) for own, given in parts.items()}
    prefix = costs.prefix["busy_s"]

    def rows(num_stages: int, left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not num_stages:
            yield ()
            return
        for own in parts:
            rest = tuple(b - a for a, b in zip(own, left))
            if min(rest) >= 0:
                yield from ((own, *others) for others in rows(num_stages - 1, rest))

    for num_stages in range(1, min(costs.num_layers, cluster.num_workers) + 1):
        splits = list(_divisions(costs.num_layers, num_stages))
        seconds = np.diff(prefix[np.array(splits)], axis=1)
        for row in rows(num_stages, tuple(counts)):
            pools = [iter(own) for own in kinds.values()]
            members = tuple(tuple(next(pool) for pool, count in zip(pools, own) for _ in range(count)) for own in row)
            given = tuple(tuple(parts[own].tolist()) for own in row)
            bounds = (seconds * [paces[own] for own in row]).max(axis=1)
            yield from ((float(bound), [(members, split, given)]) for bound, split in zip(bounds, splits, strict=True))


def _pipelines(
    cluster: Cluster, costs: Costs, number: int, deepest: int = 5
) -> Iterator[tuple[float, list[Described]]]:
    """Every set of pipelines of one worker per stage, each with the split of layers that suits its speeds best."""
    kinds = _numbers(cluster)
    prefix = costs.prefix["busy_s"]
    offers = []
    for depth in range(1, min(deepest, costs.num_layers, cluster.num_workers) + 1):
        splits = list(_divisions(costs.num_layers, depth))
        seconds = np.diff(prefix[np.array(splits)], axis=1)
        for speeds in itertools.product(kinds, repeat=depth):
            if all(speeds.count(speed) <= len(own) for speed, own in kinds.items()):
                paces = (seconds / np.array(speeds)).max(axis=1)
                offers.append((speeds, float(paces.min()), splits[int(np.argmin(paces))]))

    def sets(first: int, left: dict[float, int], chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if chosen:
            yield chosen
        for index in range(first, len(offers)):
            rest = {speed: count - offers[index][0].count(speed) for speed, count in left.items()}
            if min(rest.values()) >= 0:
                yield from sets(index, rest, (*chosen, index))

    for chosen in sets(0, {speed: len(own) for speed, own in kinds.items()}, ()):
        paces = np.array([offers[index][1] for index in chosen])
        given = apportion(number, paces)
        pools = {speed: iter(own) for speed, own in kinds.items()}
        members = [[next(pools[speed]) for speed in offers[index][0]] for index in chosen]
        chains = []
        for index in dict.fromkeys(chosen):
            own = [place for place, other in enumerate(chosen) if other == index and given[place]]
            if own:
                stages = tuple(tuple(members[place][stage] for place in own) for stage in range(len(offers[index][0])))
                chains.append((stages, offers[index][2], (tuple(given[own].tolist()),) * len(stages)))
        yield float(np.max(given * paces)), chains


def losing(job: Job, worker: int) -> Job:
    """The same job after the loss of one more worker."""
    lost = tuple(sorted((*job.event.workers, worker)))
    return job._replace(cluster=job.cluster.without([worker]), event=ClusterEvent(kind="lost", workers=lost))


def slowing(job: Job, worker: int, speed: float) -> Job:
    """The same job with a slower worker."""
    speeds = np.where(job.cluster.ids == worker, speed, job.cluster.speed)
    return job._replace(cluster=replace(job.cluster, speed=speeds))
