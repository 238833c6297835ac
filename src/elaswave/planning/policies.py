"""All policies by name: ElasWave's planner and the baselines, as functions of one signature.

The baselines' plans that keep the batch and that this engine can run are candidates of ElasWave's own, so that it is
never slower than any of them; in jobs of more than `BASELINES_UP_TO` workers, where planning has to be quick, ElasWave
plans alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster, ClusterEvent
from elaswave.costs.memory import DEFAULT_FOLLOWERS
from elaswave.costs.recovery_times import RecoveryTimes
from elaswave.errors import UsageError
from elaswave.planning import planner
from elaswave.planning.baselines import full_restart, oobleck, recycle, torchft
from elaswave.planning.declared import declared_replication
from elaswave.planning.options import Options
from elaswave.planning.placed_blocks import num_blocks
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.prediction import EXACT_WORKERS
from elaswave.planning.replication import Replication

__all__ = [
    "CANDIDATES",
    "OWN_STEPS",
    "POLICIES",
    "PREDICTED_ONLY",
    "REPLICATION",
    "ROLL_BACK",
    "SPARES",
    "make_policies",
    "policy_named",
    "replication_of",
]

ROLL_BACK = frozenset({"full_restart", "full_restart_spares"})
"""Policies that lose everything since the last durable checkpoint with every loss; the others at most a step."""

SPARES: Mapping[str, int] = {"full_restart_spares": full_restart.NUM_SPARES}
"""Policies that keep workers as spares from the beginning -> how many."""

OWN_STEPS = frozenset({"recycle"})
"""Policies that run the layout of a fault-free job in another way than the others: ReCycle without a barrier."""

PREDICTED_ONLY = frozenset({"recycle", "oobleck"})
"""Policies some of whose plans this engine cannot run: `plan`, `compare` and `simulate` predict them. What runs of them
are `recycle_normalized`, `recycle_rerouting` and `oobleck_aligned`."""

CANDIDATES = frozenset(
    {"recycle_normalized", "recycle_rerouting", "torchft_batch_kept", "oobleck_aligned", "full_restart"}
)  # fmt: skip
"""Baselines whose plans are candidates of ElasWave's: they keep the batch, and this engine can run them."""

REPLICATION: Mapping[str, Replication] = {
    "elaswave": Replication(
        unit="blocks",
        what="each block has an owner and followers that apply the same updates",
        source="this engine (docs/protocol.md, docs/planning.md)",
        rolls_back_in_place=True,
    ),
    "recycle": recycle.REPLICATION,
    "recycle_normalized": recycle.REPLICATION,
    "recycle_rerouting": recycle.REPLICATION,
    "torchft": torchft.REPLICATION,
    "torchft_batch_kept": torchft.REPLICATION,
    "oobleck": oobleck.REPLICATION,
    "oobleck_aligned": oobleck.REPLICATION,
    "full_restart": full_restart.REPLICATION,
    "full_restart_spares": full_restart.REPLICATION,
}
"""What of the state each policy holds more than once."""

_OF_OWN = Replication(
    unit="stages", what="all workers of a stage hold the same, as in plain data parallelism", source="assumed"
)

BASELINES_UP_TO = EXACT_WORKERS
"""Workers up to which the baselines' plans are candidates of ElasWave's."""


def make_policies(
    times: RecoveryTimes | None = None, *, followers: int = DEFAULT_FOLLOWERS, local_search: bool = True
) -> Mapping[str, Planner]:
    """The policies with these times of recovery.

    Args:
        times: how long training stands still; None means `RecoveryTimes`' defaults.
        followers: live copies of every block, which take memory from elaswave's plans.
        local_search: whether elaswave's plans may take the time that is asked of `Options.local_search`.
    Returns:
        Name -> planner; elaswave first.
    """
    given = times or RecoveryTimes()
    baselines: dict[str, Planner] = {
        "recycle": partial(recycle.plan, times=given),
        "recycle_normalized": partial(recycle.plan, times=given, staggered_optimizer=False, name="recycle_normalized"),
        "recycle_rerouting": partial(
            recycle.plan, times=given, normalize=False, staggered_optimizer=False, name="recycle_rerouting"
        ),
        "torchft": partial(torchft.plan, times=given),
        "torchft_batch_kept": partial(torchft.plan, times=given, keep_batch=True, name="torchft_batch_kept"),
        "oobleck": partial(oobleck.plan, times=given),
        "oobleck_aligned": partial(oobleck.plan, times=given, aligned=True, name="oobleck_aligned"),
        "full_restart": partial(full_restart.plan, times=given),
        "full_restart_spares": partial(
            full_restart.plan, times=given, num_spares=SPARES["full_restart_spares"], name="full_restart_spares"
        ),
    }
    baselines = {name: partial(_by_number, planner=each, times=given) for name, each in baselines.items()}
    options = Options(
        followers=followers,
        move_pause_s=given.move_s,
        horizon_s=given.horizon_s,
        copy_share=given.copy_share,
        local_search=local_search,
    )
    candidates = tuple(baseline for name, baseline in baselines.items() if name in CANDIDATES)
    return {"elaswave": partial(_elaswave, options=options, baselines=candidates, times=given), **baselines}


def _by_number(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    event: ClusterEvent,
    *,
    planner: Callable[..., Plan],
    times: RecoveryTimes,
) -> Plan:
    """A baseline with the pauses of as many workers, and as many blocks, as there are."""
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
    """ElasWave's planner, with the baselines' plans as candidates where there is time for them."""
    times = times.at(cluster.num_workers, num_blocks(costs))
    options = replace(options, pause_s=times.recover_s, join_pause_s=times.join_s)
    few = cluster.num_workers <= BASELINES_UP_TO
    return planner.plan(cluster, costs, allocation, event, options=options, baselines=baselines if few else ())


POLICIES: Mapping[str, Planner] = make_policies()
"""With `RecoveryTimes`' defaults."""


def policy_named(name: str, policies: Mapping[str, Planner] = POLICIES) -> Planner:
    """The policy of this name.

    Raises:
        UsageError: there is none.
    """
    if name not in policies:
        raise UsageError(
            f"unknown policy {name!r}: choose one of {', '.join(policies)}, or name your own as module:function or "
            "path/to/file.py:function"
        )
    return policies[name]


def replication_of(name: str, planner: Planner | None = None) -> Replication:
    """What of the state a policy holds more than once; for a person's own that says nothing, replicas of stages.

    Args:
        name: of the policy.
        planner: it; None where it is one of those that have a name.
    """
    return declared_replication(planner) or REPLICATION.get(name, _OF_OWN)
