"""How long the programs of a plan take: run in virtual time, each transfer alone or with links that are shared. Pure.

What the objective of a plan promises stands beside it. Behind the programs come REDUCE, VOTE and GATHER as the
objective says: they are no actions of a program.

Which losses a plan's job survives: where the engine would put the copies of its blocks. Pure.
"""

from math import ceil
from typing import NamedTuple

import msgspec

from elaswave.blocks.placement import default_block_size, make_blocks, place_blocks
from elaswave.blocks.survival import Survival, survival_of
from elaswave.planning.costs.schedules import bounds_within
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.exact import time_programs
from elaswave.planning.costs.step_time.work import transfer_of
from elaswave.planning.far_apart.job import FarJob, FarPlan, allocation_of_plan, costs_of_kind, durations_on
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.state_moves.scatter_width import DEFAULT_SCATTER_WIDTH


class FarTiming(NamedTuple):
    """Seconds of a step by three ways."""

    objective_s: float
    alone_s: float
    """By `time_programs`: each transfer has its link to itself."""
    shared_s: float
    """By `simulate_step`: what a worker sends to one site waits for what it has sent there before."""

    @property
    def gap(self) -> float:
        """By how much the objective is off `time_programs`: positive if it promises a longer step."""
        return self.objective_s / self.alone_s - 1


def time_plan(job: FarJob, plan: FarPlan) -> FarTiming:
    """Compiles the programs of a plan and runs them in virtual time.

    Args:
        job: for which it was planned.
        plan: by any planner.
    """
    costs = msgspec.structs.replace(costs_of_kind(job, 0, plan.fences), end_link=None, step_overhead_s=0.0)
    layout = make_routes(allocation_of_plan(job, plan), costs, job.cluster)
    durations, transfer_s = durations_on(job, plan.fences), transfer_of(costs, job.cluster)
    held = {
        int(job.cluster.ids[device]): most
        for stage, most in zip(plan.stages, plan.in_flight, strict=True)
        for device in stage.devices
    }
    programs = compile_programs(
        layout,
        plan.schedule,
        max_in_flight=bounds_within(layout, plan.schedule, held),
        durations=durations,
        transfer_s=transfer_s,
    )
    end_s = plan.step_s - plan.parts.run_s
    alone_s = time_programs(layout, programs, durations, transfer_s).step_s
    shared_s = simulate_step(layout, programs, costs, job.cluster, durations=durations).timeline.step_s
    return FarTiming(plan.step_s, alone_s + end_s, shared_s + end_s)


BLOCKS_MAX = 4096
"""Who holds copies together does not depend on more."""


def survival_of_plan(job: FarJob, plan: FarPlan) -> Survival | None:
    """What the loss of workers and of sites leaves; None for a model without parameters.

    Args:
        job: for which it was planned.
        plan: by any planner.
    """
    network = job.cluster.network
    assert network is not None
    layout = make_routes(allocation_of_plan(job, plan), costs_of_kind(job, 0, plan.fences), job.cluster)
    names = {worker: network.sites[site] for worker, site in zip(job.cluster.ids.tolist(), job.site.tolist())}
    layout = msgspec.structs.replace(
        layout, domains=tuple((worker, names[worker]) for worker in layout.workers), copies=job.copies
    )
    sizes = [ceil(layer.parameter_bytes / job.element_bytes) for layer in job.costs[0].layers]
    size = max(default_block_size(sum(sizes)), sum(sizes) // BLOCKS_MAX)
    blocks = make_blocks(sizes, size)
    placement = place_blocks(layout, blocks, num_followers=job.followers, scatter_width=DEFAULT_SCATTER_WIDTH)
    return survival_of(placement, layout)
