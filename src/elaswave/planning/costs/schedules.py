"""Schedules by name, and how many micro-batches workers hold in flight under each: what memory depends on. Pure.

How a schedule orders actions is `elaswave.planning.programs.programs`.
"""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from elaswave.types import Layout

Schedule = Literal["1f1b", "gpipe", "zero-bubble", "zero-bubble-h2"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zero-bubble", "zero-bubble-h2")
IN_FLIGHT: Mapping[Schedule, int] = {"zero-bubble": 1, "zero-bubble-h2": 2}
"""Schedules with split backwards: how many times the micro-batches of the fullest worker under ``1f1b`` they hold."""


def splits_backwards(schedule: Schedule) -> bool:
    """Tells whether a schedule has I and W instead of B."""
    return schedule in IN_FLIGHT


def check_schedule(schedule: str) -> None:
    """Refuses a name that is none.

    Raises:
        ValueError: an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")


def in_flight(widths: np.ndarray, schedule: Schedule) -> np.ndarray:
    """Micro-batches that a worker of each stage of a chain may hold; see `elaswave.planning.programs.programs`."""
    needed = np.ones(len(widths), dtype=np.int64)
    following = 0
    for index in reversed(range(len(widths))):
        width = int(widths[index])
        needed[index] = 1 - (-following // width)
        following = int(needed[index]) * width
    if schedule == "gpipe":
        needed[:] = np.iinfo(np.int64).max
    elif splits_backwards(schedule):
        needed[:] = IN_FLIGHT[schedule] * needed.max()
    return needed


def in_flight_bounds(layout: Layout, schedule: Schedule) -> dict[int, int]:
    """Computes the most micro-batches whose activations each worker may hold at once.

    Under ``1f1b`` a worker of stage s, of width w(s), needs ``n(s) = 1 + ceil(n(s + 1) * w(s + 1) / w(s))`` and one in
    the last stage needs 1. That is the least with which a gapless periodic schedule exists if stages are balanced: in
    it a forward takes w(s), a backward 2 w(s), and a worker starts one of each every 3 w(s) units of time. The backward
    starts right after the forward of n(s) - 1 micro-batches later (the worker's window is full, so it has no other
    place), and not before the next stage's backward has ended, 3 w(s + 1) n(s + 1) after its forward began; hence
    the rounding up at every stage. For equal widths it is num_stages - s, the textbook's.

    Where routes do not all pass the same stages (pipelines of different depth), what follows a stage is what follows
    it on the routes, each next stage counted by its share of micro-batches that come from here. Pipelines that share no
    workers are taken one by one, and workers that no route passes do not count. Under ``zero-bubble``
    every worker may hold what the fullest one holds under ``1f1b``, and twice that under ``zero-bubble-h2``.

    Args:
        layout: stages and routes.
        schedule: ``gpipe`` holds everything that the worker is given.
    Returns:
        For each worker at least 1, and at most its number of micro-batches if it has any.
    Raises:
        ValueError: an unknown schedule.
    """
    check_schedule(schedule)
    bounds = dict.fromkeys(sorted(layout.workers), 1)
    for part, _ in independent_pipelines(layout):
        bounds.update(bounds_of_part(part, schedule))
    return bounds


def bounds_of_part(part: Layout, schedule: Schedule) -> dict[int, int]:
    """Computes `in_flight_bounds` of pipelines that share workers."""
    given = Counter(hop.worker for route in part.routes for hop in route)
    if schedule == "gpipe":
        return dict(given)
    needed = _needed_in_flight(part)
    if splits_backwards(schedule):
        needed = [IN_FLIGHT[schedule] * max(needed)] * len(needed)
    return {
        worker: min(bound, given[worker])
        for stage, bound in zip(part.stages, needed, strict=True)
        for worker in stage.workers
    }


def independent_pipelines(layout: Layout) -> list[tuple[Layout, list[int]]]:
    """Pipelines that run side by side: each with the workers that it keeps busy, and the numbers of its micro-batches.

    Their stages are those of the layout, some without workers.
    """
    parts = []
    for numbers in independent_parts(layout):
        routes = tuple(layout.routes[number] for number in numbers)
        busy = {hop.worker for route in routes for hop in route}
        stages = tuple(
            msgspec.structs.replace(stage, workers=tuple(worker for worker in stage.workers if worker in busy))
            for stage in layout.stages
        )
        parts.append((Layout(stages=stages, routes=routes), numbers))
    return parts


def bounds_within(layout: Layout, schedule: Schedule, limits: Mapping[int, int]) -> dict[int, int]:
    """Computes `in_flight_bounds`, but gives no more than these limits for the workers that are in them, as where
    memory is short."""
    bounds = in_flight_bounds(layout, schedule)
    return {worker: min(bound, limits.get(worker, bound)) for worker, bound in bounds.items()}


def _needed_in_flight(layout: Layout) -> list[int]:
    """Computes for each stage the micro-batches that one of its workers must hold for full throughput under
    ``1f1b``."""
    stages = layout.stages
    is_chain = all(stage.workers for stage in stages) and all(
        before.start < after.start and before.stop < after.stop for before, after in pairwise(stages)
    )
    passes: Counter[tuple[int, int]] = Counter()
    if is_chain:  # as good as every route passes every stage
        passes.update(pairwise(range(len(stages))))
    else:
        for route in layout.routes:
            passes.update(pairwise(hop.stage for hop in route))
    return list(_needed_by(tuple(stage.width for stage in stages), tuple(sorted(passes.items()))))


@lru_cache(maxsize=4096)
def _needed_by(widths: tuple[int, ...], passes: tuple[tuple[tuple[int, int], int], ...]) -> tuple[int, ...]:
    """Computes the same by the stages' widths and by how many micro-batches go from one stage to another: ((before,
    after), number). A planner asks for the same few again and again."""
    needed = [1] * len(widths)
    arriving: Counter[int] = Counter()
    for (_, after), count in passes:
        arriving[after] += count
    for stage in reversed(range(len(widths))):
        following = sum(
            (
                Fraction(needed[after] * widths[after] * count, arriving[after])
                for (before, after), count in passes
                if before == stage
            ),
            Fraction(0),
        )
        needed[stage] = 1 - (-following // widths[stage]) if following else 1
    return tuple(needed)


def independent_parts(layout: Layout) -> list[list[int]]:
    """Parts the micro-batches such that no worker runs any of two parts: pipelines that run side by side.

    Args:
        layout: routes whose hops are there; nothing else is looked at.
    Returns:
        Numbers of micro-batches, ascending; parts in the order of their first ones.
    """
    parent: dict[int, int] = {}

    def root(worker: int) -> int:
        while parent.setdefault(worker, worker) != worker:
            parent[worker] = worker = parent[parent[worker]]
        return worker

    for route in layout.routes:
        for hop in route[1:]:
            parent[root(hop.worker)] = root(route[0].worker)
    parts: dict[int, list[int]] = {}
    for microbatch, route in enumerate(layout.routes):
        parts.setdefault(root(route[0].worker), []).append(microbatch)
    return list(parts.values())
