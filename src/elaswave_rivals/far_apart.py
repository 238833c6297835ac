"""What OP-Fence is compared with: equal numbers of layers, equal computing, DT-FM's genetic search. Pure.

All take the devices of the job, all of them, in stages of equal width, and share the objective, the codec, and where
copies are; of the depths that divide the number of devices each takes the one that is best for it. The first two go
through the devices in the order of the file, so that neighbours are usually in one site. FusionLLM's abstract (arXiv
2410.12707) does not say with what it compares; these are what its reader would try first.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.far_apart.job import FarJob, FarPlan
from elaswave.planning.far_apart.objective import FAR_SCHEDULES, Group, Model
from elaswave.planning.far_apart.op_fence import FarPlanner
from elaswave_rivals.genetic import genetic_stages

GENETIC_DEPTH_MAX = 8
"""Stages up to which DT-FM's search is asked, as many as its code has: it looks at every path through them."""
GENETIC_DEPTHS = 2
"""Numbers of stages that are tried, the largest ones: each takes seconds."""


def equal_number(job: FarJob, *, schedules: Sequence[Schedule] = FAR_SCHEDULES) -> FarPlan:
    """Puts as many layers in each stage, and as many devices, in the order of the file."""
    model = Model(job)
    return _best(model, "equal_number", ((each, _equal_cuts(model, len(each))) for each in _in_order(model)), schedules)


def equal_compute(job: FarJob, *, schedules: Sequence[Schedule] = FAR_SCHEDULES) -> FarPlan:
    """Takes the same devices as `equal_number`, and layers such that the stage that computes longest computes as short
    as it can."""
    model = Model(job)
    chains = ((each, _balanced_cuts(model, [model.group(stage) for stage in each])) for each in _in_order(model))
    return _best(model, "equal_compute", chains, schedules)


def dtfm_genetic(job: FarJob, *, schedules: Sequence[Schedule] = FAR_SCHEDULES) -> FarPlan:
    """Assigns devices to stages as DT-FM's genetic search finds them, with as many layers in each."""
    model = Model(job)
    depths = [depth for depth in _depths(model) if 1 < depth <= GENETIC_DEPTH_MAX][-GENETIC_DEPTHS:]
    chains = ((genetic_stages(model, depth), _equal_cuts(model, depth)) for depth in depths)
    return _best(model, "dtfm_genetic", chains, schedules)


PLANNERS: Mapping[str, FarPlanner] = {
    "equal_number": equal_number,
    "equal_compute": equal_compute,
    "dtfm_genetic": dtfm_genetic,
}


def _depths(model: Model) -> list[int]:
    count = model.job.cluster.num_workers
    return [depth for depth in range(1, min(count, model.job.num_layers) + 1) if count % depth == 0]


def _in_order(model: Model) -> Iterator[tuple[tuple[int, ...], ...]]:
    for depth in _depths(model):
        width = model.job.cluster.num_workers // depth
        yield tuple(tuple(range(stage * width, (stage + 1) * width)) for stage in range(depth))


def _equal_cuts(model: Model, depth: int) -> list[int]:
    return [round(stage * model.job.num_layers / depth) for stage in range(1, depth)]


def _balanced_cuts(model: Model, groups: list[Group]) -> list[int]:
    """Cuts with the smallest largest time of computing."""
    busy = [np.where(model.is_range, group.busy, np.inf) for group in groups]
    found, choices = busy[0][0], []
    for stage in busy[1:]:
        total = np.maximum(found[:, None], stage)
        choices.append(total.argmin(0))
        found = total.min(0)
    place, cuts = len(found) - 1, []
    for choice in reversed(choices):
        place = int(choice[place])
        cuts.append(place)
    return cuts[::-1]


def _best(
    model: Model,
    name: str,
    chains: Iterator[tuple[tuple[tuple[int, ...], ...], list[int]]],
    schedules: Sequence[Schedule],
) -> FarPlan:
    """Finds the plan of the chain and schedule with the shortest step.

    Raises:
        InfeasiblePlan: none fits into memory.
    """
    best: FarPlan | None = None
    for chain, cuts in chains:
        groups = [model.group(stage) for stage in chain]
        for schedule in schedules:
            parts = model.evaluate(groups, cuts, schedule)
            if parts is not None and (best is None or parts.step_s < best.step_s):
                best = model.plan(name, groups, cuts, schedule, parts)
    if best is None:
        raise InfeasiblePlan(
            f"memory: {name} has no stages of equal width for {model.job.cluster.num_workers} devices into which the "
            f"{model.job.num_layers} layers fit; add devices, or take those with more memory"
        )
    return best
