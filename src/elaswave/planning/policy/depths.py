"""Equal pipelines of whatever depth is fastest: how systems begin again that choose their parallelism anew. Pure."""

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.plan import Allocation
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.programs.prediction import estimate, time_within_memory

TIMED = 3
"""Depths that are timed as plans are, of those that are best by the closed form."""


def best_of_depths(
    cluster: Cluster, costs: Costs, before: Allocation, *, workers: np.ndarray | None = None
) -> Allocation:
    """Finds the fastest split of workers into equal pipelines; the batch and the schedule stay.

    Args:
        cluster: the workers; what is left after the last whole pipeline stays unused.
        costs: of the model's layers.
        before: whose batch and schedule are kept.
        workers: use only these; None means all.
    Raises:
        InfeasiblePlan: no depth leaves room in the workers' memory, or there is no worker.
    """
    number = cluster.num_workers if workers is None else len(workers)
    tried = [
        rectangle(
            cluster,
            costs,
            num_stages=depth,
            num_microbatches=before.num_microbatches,
            schedule=before.schedule,
            workers=workers,
        )
        for depth in range(1, min(costs.num_layers, number) + 1)
    ]
    found: list[tuple[float, Allocation]] = []
    for allocation in sorted(tried, key=lambda each: estimate(cluster, costs, each).step_s):
        try:
            found.append((time_within_memory(cluster, costs, allocation).step_s, allocation))
        except InfeasiblePlan:
            continue
        if len(found) == TIMED:
            break
    if not found:
        raise InfeasiblePlan(f"{number} workers: no number of stages leaves each of them enough memory")
    return min(found, key=lambda each: each[0])[1]
