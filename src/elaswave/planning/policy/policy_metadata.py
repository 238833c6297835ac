"""What a policy says of itself beside its plans. Pure."""

from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from elaswave.planning.plan import Plan
from elaswave.planning.policy.replication import Replication

_Policy = TypeVar("_Policy", bound=Callable[..., Plan])

_ASSUMED = Replication(
    unit="stages", what="all workers of a stage hold the same, as in plain data parallelism", source="assumed"
)

Start = Literal["planned", "configured", "templates"]


class PolicyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy says of itself. Where it says nothing, it is a person's own that keeps replicas of stages."""

    replication: Replication = _ASSUMED
    """What of the state it holds more than once."""
    rolls_back: bool = False
    """Whether every loss costs everything since the last durable checkpoint; else a loss costs at most a step."""
    num_spares: int = 0
    """Workers that stand by from the beginning."""
    start: Start = "planned"
    """What it runs while no worker is lost: what it plans for all of them; what was configured; or that, or a
    combination of pipelines of several depths if it is faster."""
    own_steps: bool = False
    """Whether it runs the layout of a fault-free job in another way than the others."""
    runs_here: bool = True
    """Whether this engine can run all of its plans: others are predicted only."""
    is_candidate: bool = False
    """Whether its plans are candidates of ElasWave's: they keep the batch, and this engine can run them."""


def declares(metadata: PolicyMetadata) -> Callable[[_Policy], _Policy]:
    """Makes a decorator with which a policy says what it is.

    Args:
        metadata: of the policy.
    """

    def declare(planner: _Policy) -> _Policy:
        planner.metadata = metadata  # type: ignore[attr-defined]
        return planner

    return declare


def replicates(replication: Replication) -> Callable[[_Policy], _Policy]:
    """Makes a decorator with which a policy says what of the state it holds more than once.

    The simulated job goes back to its last durable checkpoint where a loss takes all of it, and ``plan`` and
    ``compare`` say which losses that is. Where ``unit`` is ``nothing``, it writes checkpoints as often as a job of
    `full_restart` does, others write them as backups only.

    Args:
        replication: of the policy.
    """
    return declares(PolicyMetadata(replication=replication))


def policy_metadata_of(planner: Callable[..., Plan]) -> PolicyMetadata:
    """Returns what a policy declares."""
    found = getattr(planner, "metadata", None)
    return found if isinstance(found, PolicyMetadata) else PolicyMetadata()
