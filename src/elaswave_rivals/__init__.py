"""Other systems' ways to go on after a failure, as planners of the same signature as ElasWave's own.

All of them run on this engine, with the same detection, the same communicator and the same timing of a step, so a
comparison shows the policies alone. Each module says what of its paper it models and what was simplified; where the
simplification could matter it is in the baseline's favour. A package of its own: an entry point registers it
(``elaswave.policies``, ``elaswave.far_planners``), and nothing of `elaswave` imports it.

``recycle`` and ``oobleck`` are as published, and some of their plans this engine cannot run: ``plan``, ``compare`` and
``simulate`` predict them. What runs of them are ``recycle_normalized``, ``recycle_rerouting`` and ``oobleck_aligned``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elaswave.planning.plan import Plan
from elaswave.planning.policy.policies import TimedPlanner
from elaswave.planning.policy.policy_metadata import PolicyMetadata, Start, declares
from elaswave.planning.policy.replication import Replication
from elaswave_rivals import oobleck, recycle, torchft

__all__ = ["POLICIES"]


def _policy(
    plan: Callable[..., Plan], replication: Replication, *, start: Start = "configured", own_steps: bool = False,
    runs_here: bool = True, is_candidate: bool = False, **settings: Any,
) -> TimedPlanner:  # fmt: skip
    declared = PolicyMetadata(
        replication=replication, start=start, own_steps=own_steps, runs_here=runs_here, is_candidate=is_candidate
    )
    return declares(declared)(partial(plan, **settings))


POLICIES: Mapping[str, TimedPlanner] = {
    "recycle": _policy(recycle.plan_recycle, recycle.REPLICATION, own_steps=True, runs_here=False),
    "recycle_normalized": _policy(
        recycle.plan_recycle, recycle.REPLICATION, is_candidate=True, staggered_optimizer=False,
        name="recycle_normalized"
    ),
    "recycle_rerouting": _policy(
        recycle.plan_recycle, recycle.REPLICATION, is_candidate=True, normalize=False, staggered_optimizer=False,
        name="recycle_rerouting",
    ),
    "torchft": _policy(torchft.plan_torchft, torchft.REPLICATION),
    "torchft_batch_kept": _policy(
        torchft.plan_torchft, torchft.REPLICATION, is_candidate=True, keep_batch=True, name="torchft_batch_kept"
    ),
    "oobleck": _policy(oobleck.plan_oobleck, oobleck.REPLICATION, start="templates", runs_here=False),
    "oobleck_aligned": _policy(
        oobleck.plan_oobleck, oobleck.REPLICATION, start="templates", is_candidate=True, aligned=True,
        name="oobleck_aligned"
    ),
}  # fmt: skip
"""By name, in the order in which tables show them."""
