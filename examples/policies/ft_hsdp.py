"""FT-HSDP: a replica that has lost a GPU is taken offline and restarted; the other replicas go on.

    elaswave compare --policy examples/policies/ft_hsdp.py:plan --lose 3

Salpekar and others: Training LLMs with Fault Tolerant HSDP on 100,000 GPUs (arXiv 2602.00277). All that is used stands
in its abstract; the sections were not read:

- Data-parallel replicas are the units of fault tolerance: "only a single data-parallel replica containing the failed
  GPU or server is taken offline and restarted, while the other replicas continue training".
- The stall of a failure is 3 minutes, where fully synchronous training takes 10.
- A recovering replica joins "with minimal stall" (its non-blocking catch-up): none here, in its favour.

So it is torchft's planner with another pause (`elaswave_rivals.torchft` says what is simplified): a replica
is a pipeline, and the batch follows the number of replicas. `plan_batch_kept` keeps the batch, which FT-HSDP does not:
it compares throughput at equal training, and a training job refuses `plan`, whose bits would differ.

Not used to set a parameter: 80 % of effective training time at O(100,000) GPUs, where synchronous training has 44 %.
tests/unit/planning/test_policy_plugins.py reproduces it.
"""

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.policy_metadata import replicates
from elaswave.planning.policy.replication import Replication
from elaswave_rivals import torchft

STALL_S = 180.0
"""Of all replicas, after a failure: arXiv 2602.00277, abstract ("from 10 minutes to 3 minutes")."""
REPLICATION = Replication(
    unit="groups",
    what="each replica holds the whole state once, sharded within; one that comes back catches up from the others",
    source="arXiv 2602.00277, abstract",
)
TIMES = RecoveryTimes(torchft_recover_s=STALL_S, join_s=0.0)


@replicates(REPLICATION)
def plan(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """Takes out the replicas of lost workers; lets whole ones in.

    Raises:
        InfeasiblePlan: no whole replica is left, or memory.
    """
    return torchft.plan_torchft(cluster, costs, allocation, event, times=TIMES, name="ft_hsdp")


@replicates(REPLICATION)
def plan_batch_kept(cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent) -> Plan:
    """The same, the micro-batches of missing replicas dealt to the others.

    Raises:
        InfeasiblePlan: no whole replica is left, or memory.
    """
    return torchft.plan_torchft(
        cluster, costs, allocation, event, times=TIMES, keep_batch=True, name="ft_hsdp_batch_kept"
    )  # fmt: skip
