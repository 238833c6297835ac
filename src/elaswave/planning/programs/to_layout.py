"""From a plan to a running layout: routes, what stands beside them, and the seconds of a step. Pure.

A plan's allocation says how much each worker does; `to_layout` is the one way from there to what a job runs. Workers
that the plan has nothing for stay members: they hold blocks and vote.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.work import durations_of
from elaswave.planning.plan import Allocation, levels_of
from elaswave.planning.programs.execution import compiled_by, execution_of, timed_step_s
from elaswave.planning.programs.layout import validate_layout
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.memory_limits import layout_limits
from elaswave.types import ExecutionParameters, Hop, Layout, Stage


class RunningLayout(NamedTuple):
    """What a job runs."""

    layout: Layout
    execution: ExecutionParameters
    predicted_step_s: float


class JobModel(NamedTuple):
    """What every layout of a job is judged by."""

    cluster: Cluster
    """All workers of the job, their speeds as known."""
    schedule: Schedule
    """As configured: of layouts whose execution parameters name none."""
    followers: int
    """Live copies of every block."""
    bytes_of: Costs | None = None
    """Costs by whose bytes memory is kept to; None where it is not planned with."""

    def step_s(self, layout: Layout, execution: ExecutionParameters, costs: Costs) -> float:
        """Seconds of a step: the very programs that the workers run, timed.

        Args:
            layout: of workers of the job.
            execution: beside it.
            costs: of the layers.
        """
        schedule, limits, known = compiled_by(layout, execution, self.schedule)
        durations = durations_of(costs.layer_s, self.cluster.speed_of(execution.levels))
        if self.cluster.network is not None:  # of which the programs know nothing, but steps are made of
            programs = compile_programs(layout, schedule, max_in_flight=limits, durations=known)
            return simulate_step(layout, programs, costs, self.cluster, durations=durations).step_s
        taken_s = timed_step_s(layout, schedule, durations, known=known, max_in_flight=limits)
        return taken_s + costs.overhead_s(layout.stages)

    def within_memory(self, layout: Layout, execution: ExecutionParameters) -> ExecutionParameters:
        """The parameters with what workers have room for under another layout, as far as it fits at all.

        Args:
            layout: from now on.
            execution: before.
        """
        if self.bytes_of is None:
            return execution
        schedule: Schedule = execution.schedule or self.schedule  # type: ignore[assignment]
        limits = layout_limits(
            self.cluster, self.bytes_of, layout, schedule, followers=self.followers, must_fit=False
        )  # fmt: skip
        return msgspec.structs.replace(execution, in_flight=limits)


def to_layout(allocation: Allocation, job: JobModel, costs: Costs, present: Layout) -> RunningLayout:
    """The running layout of a plan.

    Routes are made anew, and, if the batch stays what it is, also such that micro-batches stay with their workers;
    the faster ones are taken. (Those that stay are no faster for it, and now and then much slower: they meet in another
    order than in pipelines made anew.)

    Args:
        allocation: of the plan.
        job: the workers and their limits.
        costs: of the layers.
        present: the layout in force, of exactly the members.
    Returns:
        A valid layout of all members.
    Raises:
        ValueError: chains that cannot be one layout.
        KeyError: a worker that is not in the job.
    """
    layouts = [make_routes(allocation, costs, job.cluster)]
    if allocation.num_microbatches == present.num_microbatches:
        layouts.insert(0, make_routes(allocation, costs, job.cluster, previous=present))
    planned = levels_of(allocation)
    levels = {worker: level for worker, level in planned.items() if level != job.cluster.base_level(worker)}
    speed_of = job.cluster.speed_of(levels)
    speeds = {worker: speed_of(worker) for worker in job.cluster.ids.tolist()}
    execution = execution_of(costs, speeds, schedule=allocation.schedule, levels=levels)
    found = []
    same = {"shared": present.shared, "domains": present.domains, "copies": present.copies}
    for layout in (with_idle(msgspec.structs.replace(each, **same), present) for each in layouts):
        own = job.within_memory(layout, execution)
        found.append(RunningLayout(layout, own, job.step_s(layout, own, costs)))
    best = min(found, key=lambda each: each.predicted_step_s)
    validate_layout(best.layout)
    return best


def without_idle(layout: Layout) -> Layout:
    """A layout without the workers that no route passes; stages without any worker left are left out too."""
    busy = {hop.worker for route in layout.routes for hop in route}
    members = [tuple(worker for worker in stage.workers if worker in busy) for stage in layout.stages]
    numbers = {stage: number for number, stage in enumerate(index for index, each in enumerate(members) if each)}
    stages = tuple(
        Stage(start=layout.stages[stage].start, stop=layout.stages[stage].stop, workers=members[stage])
        for stage in numbers
    )
    routes = tuple(
        tuple(Hop(hop.worker, numbers[hop.stage], hop.start, hop.stop) for hop in route) for route in layout.routes
    )
    return Layout(stages=stages, routes=routes, shared=layout.shared, domains=layout.domains, copies=layout.copies)


def with_idle(layout: Layout, present: Layout) -> Layout:
    """A layout with the workers that it has nothing for.

    Those of a stage join the stage that is nearest to where they were, since they hold blocks of its layers; those that
    are idle stay so.

    Args:
        layout: as planned.
        present: of all members.
    """
    unused = sorted(set(present.workers) - set(layout.workers))
    if not unused:
        return layout
    middles = np.array([(stage.start + stage.stop) / 2 for stage in layout.stages])
    members = [list(stage.workers) for stage in layout.stages]
    idle = set(layout.idle)
    for worker in unused:
        if worker in present.idle:
            idle.add(worker)
            continue
        stage = present.stages[present.stage_of(worker)]
        members[int(np.argmin(abs(middles - (stage.start + stage.stop) / 2)))].append(worker)
    stages = tuple(
        Stage(start=stage.start, stop=stage.stop, workers=tuple(sorted(workers)))
        for stage, workers in zip(layout.stages, members, strict=True)
    )
    return msgspec.structs.replace(layout, stages=stages, idle=tuple(sorted(idle)))
