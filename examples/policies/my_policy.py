"""A policy of one's own: the lost workers' micro-batches go to the others of their stage, evenly.

    elaswave compare --policy examples/policies/my_policy.py:plan --lose 3

`plan` is an `elaswave.planning.plan.Planner`: a pure function from a cluster, the layers' costs, the allocation before
and an event to a plan. `make_plan` times the allocation as every other policy's, and keeps to memory and power.
"""

from dataclasses import replace

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Chain, Plan, StageShare
from elaswave.planning.policy.policy_parts import make_plan
from elaswave.planning.search.apportionment import evenly

PAUSE_S = 1.0
"""Of training, after every event: what one's own system takes."""


def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Plans what to do after an event; workers that join stay unused.

    Raises:
        InfeasiblePlan: a stage is left without workers, or memory or power do not suffice.
    """
    chains = tuple(without(chain, cluster) for chain in allocation.chains)
    return make_plan(
        "my policy",
        cluster,
        costs,
        replace(allocation, chains=chains),
        pause_s=PAUSE_S,
        lost_steps=0.5 if event.kind == "lost" else 0.0,  # of the step in hand
        reason="each stage goes on with the workers that it has left",
    )


def without(chain: Chain, cluster: Cluster) -> Chain:
    """The chain with those workers only that are still there."""
    stages: list[StageShare] = []
    for number, stage in enumerate(chain.stages):
        stays = np.isin(stage.workers, cluster.ids)
        if not stays.any():
            raise InfeasiblePlan(f"workers: stage {number} has lost all {stage.width} of its workers, needed: one")
        counts = evenly(chain.num_microbatches, int(stays.sum()))
        stages.append(replace(stage, workers=stage.workers[stays], levels=stage.levels[stays], num_microbatches=counts))
    return replace(chain, stages=tuple(stages))
