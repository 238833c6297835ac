"""Where to cut the layers when it is known which workers form the stages, and in which order: dynamic programmes. Pure.

The first finds the smallest largest time of any stage or link (minimax). A step is that and the way of a micro-batch,
so the second one finds, for some bounds above the smallest, the shortest way of which no stage or link exceeds the
bound; the objective decides between them.
"""

import numpy as np

from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.far_apart.job import StepParts
from elaswave.planning.far_apart.objective import Boundary, Group, Model

CAPS = np.array([1.0, 1.05, 1.2, 1.6, 3.0, np.inf])
"""Bounds that are tried, as multiples of the smallest one."""


def best_cuts(model: Model, groups: list[Group], schedule: Schedule) -> tuple[list[int], StepParts] | None:
    """The best cuts that are found for stages in order.

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
    """Of each stage and range of layers what it takes of a step, infinite where it does not fit; and one way."""
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
