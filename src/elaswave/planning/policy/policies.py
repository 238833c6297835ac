"""All policies by name, as functions of one signature: ElasWave's planner, a restart, and those of other packages.

Other packages register theirs by an entry point (`elaswave.config.policy_code`), as `elaswave_rivals` does with other
systems'. Those of their plans that keep the batch and that this engine can run are candidates of ElasWave's own, so
that it is never slower than any of them; in jobs of more than `CANDIDATES_UP_TO` workers, where planning has to be
quick, ElasWave plans alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_metadata import PolicyMetadata, declares, policy_metadata_of
from elaswave.planning.policy.replication import Replication
from elaswave.planning.programs.prediction import EXACT_WORKERS
from elaswave.planning.search import planner
from elaswave.planning.search.candidates import Options
from elaswave.planning.state_moves.placed_blocks import num_blocks

__all__ = ["CANDIDATES_UP_TO", "ELASWAVE", "TimedPlanner", "make_policies"]

ELASWAVE = PolicyMetadata(
    replication=Replication(
        unit="blocks",
        what="each block has an owner and followers that apply the same updates",
        source="this engine (docs/protocol.md, docs/planning.md)",
        rolls_back_in_place=True,
    )
)

CANDIDATES_UP_TO = EXACT_WORKERS
"""Workers up to which others' plans are candidates of ElasWave's."""


class TimedPlanner(Protocol):
    """A policy that is told how long training stands still: what another package registers, by name. What it declares
    (`elaswave.planning.policy.policy_metadata.declares`) is known of the policy that is made of it."""

    def __call__(
        self,
        cluster: Cluster,
        costs: Costs,
        allocation: Allocation,
        event: ClusterEvent,
        *,
        times: RecoveryTimes,
    ) -> Plan:
        """Plans as `elaswave.planning.plan.Planner` does.

        Raises:
            InfeasiblePlan: there is no plan.
        """


_RESTARTS: Mapping[str, TimedPlanner] = {
    "full_restart": declares(full_restart.policy_metadata(is_candidate=True))(partial(full_restart.plan_full_restart)),
    "full_restart_spares": declares(full_restart.policy_metadata(num_spares=full_restart.NUM_SPARES))(
        partial(full_restart.plan_full_restart, num_spares=full_restart.NUM_SPARES, name="full_restart_spares")
    ),
}


def make_policies(
    times: RecoveryTimes | None = None,
    *,
    followers: int = DEFAULT_FOLLOWERS,
    others: Mapping[str, TimedPlanner] = MappingProxyType({}),
) -> Mapping[str, Planner]:
    """Makes the policies with these times of recovery.

    Args:
        times: how long training stands still; None means `RecoveryTimes`' defaults.
        followers: live copies of every block, which take memory from elaswave's plans.
        others: that other packages have registered.
    Returns:
        Name -> planner; elaswave first.
    """
    given = times or RecoveryTimes()
    known: dict[str, Planner] = {
        name: declares(policy_metadata_of(each))(partial(_by_number, planner=each, times=given))
        for name, each in {**others, **_RESTARTS}.items()
    }
    options = Options(
        followers=followers,
        move_pause_s=given.move_s,
        horizon_s=given.horizon_s,
        copy_share=given.copy_share,
    )
    candidates = tuple(each for each in known.values() if policy_metadata_of(each).is_candidate)
    own = declares(ELASWAVE)(partial(_elaswave, options=options, baselines=candidates, times=given))
    return {"elaswave": own, **known}


def _by_number(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    planner: TimedPlanner,
    times: RecoveryTimes,
) -> Plan:
    """Runs a policy with the pauses of as many workers, and as many blocks, as there are."""
    return planner(cluster, costs, allocation, event, times=times.at(cluster.num_workers, num_blocks(costs)))


def _elaswave(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    options: Options,
    baselines: tuple[Planner, ...],
    times: RecoveryTimes,
) -> Plan:
    """ElasWave's planner, with others' plans as candidates where there is time for them."""
    times = times.at(cluster.num_workers, num_blocks(costs))
    options = replace(options, pause_s=times.recover_s, join_pause_s=times.join_s)
    few = cluster.num_workers <= CANDIDATES_UP_TO
    return planner.plan(cluster, costs, allocation, event, options=options, baselines=baselines if few else ())
