"""The best plan of a small job on machines far apart, by trying all: orders of stages, their devices, and cuts."""

import itertools
from collections.abc import Iterator

from elaswave.planning.far_apart.job import FarJob
from elaswave.planning.far_apart.objective import FAR_SCHEDULES, Model

Stage = tuple[int, ...]


def kinds_of(job: FarJob) -> dict[tuple[object, ...], list[int]]:
    """Devices that are alike."""
    cluster = job.cluster
    found: dict[tuple[object, ...], list[int]] = {}
    for device in range(cluster.num_workers):
        key = int(job.site[device]), float(cluster.speed[device]), float(cluster.memory_bytes[device])
        found.setdefault(key, []).append(device)
    return found


def chains(job: FarJob, *, use_all: bool) -> Iterator[list[Stage]]:
    """All sequences of stages that differ, each within a site."""
    kinds = list(kinds_of(job).items())
    sites = sorted({key[0] for key, _ in kinds}, key=str)

    def stages(left: list[int]) -> Iterator[list[int]]:
        """How many of each kind a stage has."""
        for site in sites:
            ranges = [range(count + 1) if key[0] == site else range(1) for (key, _), count in zip(kinds, left)]
            yield from (list(counts) for counts in itertools.product(*ranges) if any(counts))

    def continued(left: list[int], chain: list[Stage]) -> Iterator[list[Stage]]:
        if chain and (not use_all or not any(left)):
            yield chain
        if len(chain) == job.num_layers:
            return
        for counts in stages(left):
            devices: list[int] = []
            for (_, known), have, count in zip(kinds, left, counts):
                devices += known[len(known) - have : len(known) - have + count]
            yield from continued([a - b for a, b in zip(left, counts)], [*chain, tuple(sorted(devices))])

    yield from continued([len(known) for _, known in kinds], [])


def best_step_s(job: FarJob, *, use_all: bool) -> float | None:
    """The shortest step by the objective; None: nothing fits."""
    model, best = Model(job), None
    for chain in chains(job, use_all=use_all):
        groups = [model.group(stage) for stage in chain]
        for cuts in itertools.combinations(range(1, job.num_layers), len(chain) - 1):
            for schedule in FAR_SCHEDULES:
                parts = model.evaluate(groups, list(cuts), schedule)
                if parts is not None and (best is None or parts.step_s < best):
                    best = parts.step_s
    return best
