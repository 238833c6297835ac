"""Which losses a plan's job survives: where the engine would put the copies of its blocks. Pure."""

from math import ceil

import msgspec

from elaswave.blocks.placement import default_block_size, make_blocks, place_blocks
from elaswave.blocks.survival import Survival, survival_of
from elaswave.planning.far_apart.job import FarJob, FarPlan, allocation_of_plan, costs_of_kind
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.state_moves.scatter_width import DEFAULT_SCATTER_WIDTH

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
