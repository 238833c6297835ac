"""What a policy says of itself beside its plans. Pure."""

from collections.abc import Callable
from typing import TypeVar

from elaswave.planning.plan import Plan, Planner
from elaswave.planning.replication import Replication

_Policy = TypeVar("_Policy", bound=Callable[..., Plan])


def replicates(replication: Replication) -> Callable[[_Policy], _Policy]:
    """A decorator with which a policy says what of the state it holds more than once.

    The simulated job goes back to its last durable checkpoint where a loss takes all of it, and ``plan`` and
    ``compare`` say which losses that is. Where ``unit`` is ``nothing``, it writes checkpoints as often as a job of
    `full_restart` does, others write them as backups only.

    Args:
        replication: of the policy.
    """

    def declare(planner: _Policy) -> _Policy:
        planner.replication = replication  # type: ignore[attr-defined]
        return planner

    return declare


def declared_replication(planner: Planner | None) -> Replication | None:
    """What a policy declares; None where it declares nothing."""
    found = getattr(planner, "replication", None)
    return found if isinstance(found, Replication) else None
