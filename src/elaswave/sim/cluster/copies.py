"""State that travels in the background in a simulated job, and what training does until it is there. Pure.

Every policy's copies are treated alike. Until they have arrived the layout of before counts: after a loss what the
policy's plan says of the workers that are left (`Plan.interim_step_s`), after a join or a change of speed the step of
before. Copies take `RecoveryTimes.copy_share` of the links' bandwidth, and training has the rest. Copies for which
training stands still are in a plan's pause.
"""

from typing import NamedTuple

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.programs.prediction import stages_of, step_s
from elaswave.planning.state_moves.transfers import Sources, receiving_s, shared_links


class BackgroundTransfer(NamedTuple):
    """On their way."""

    seconds: float
    """Until all are there."""
    step_s: float
    """Of training meanwhile."""
    num_microbatches: int
    """Of such a step."""
    power_w: float
    """That it draws."""


def background_transfer_of(
    cluster: Cluster, costs: Costs, before: Plan, plan: Plan, event: ClusterEvent, times: RecoveryTimes
) -> BackgroundTransfer | None:
    """What a plan has copied in the background; None: nothing.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        before: in force until then.
        plan: made after the event.
        event: what happened.
        times: of recovery.
    """
    if plan.interim_step_s is not None:
        number = plan.allocation.num_microbatches
        return BackgroundTransfer(plan.copy_s, plan.interim_step_s, number, plan.power_w)
    # Baselines copy for those that come while the others go on; after a loss training stands still for it, and those
    # that begin again read a checkpoint.
    if not plan.transfers or event.kind not in ("joined", "slowed") or plan.predicted_pause_s >= times.restart_s:
        return None
    sources = Sources.of_stages(costs, stages_of(before.allocation))
    link = cluster.between_nodes
    seconds = max(receiving_s(link, plan.transfers), sources.sending_s(link, costs, plan.transfers)) / times.copy_share
    added_s = _slower_by(cluster, costs, before.allocation, times.copy_share)
    return BackgroundTransfer(
        seconds, before.predicted_step_s + added_s, before.allocation.num_microbatches, before.power_w
    )


def _slower_by(cluster: Cluster, costs: Costs, allocation: Allocation, share: float) -> float:
    """Seconds that a step takes longer, in closed form, while copies take a share of the links."""
    slower, with_less = shared_links(cluster, costs, share)
    return step_s(slower, with_less, allocation, "bound") - step_s(cluster, costs, allocation, "bound")
