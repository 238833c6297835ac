"""What a policy says of itself beside its plans. Pure."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from elaswave.planning.plan import Plan, Planner


class Declared(NamedTuple):
    """What cannot be seen from a plan."""

    rolls_back: bool = False
    """Every loss leads back to the last durable checkpoint, so the simulated job writes them as often as a job of
    `full_restart` does. Others write them as backups only."""


_Policy = TypeVar("_Policy", bound=Callable[..., Plan])


def declared(*, rolls_back: bool = False) -> Callable[[_Policy], _Policy]:
    """A decorator with which a policy says what cannot be seen from a plan.

    Args:
        rolls_back: as of `Declared`.
    """

    def declare(planner: _Policy) -> _Policy:
        planner.declared = Declared(rolls_back)  # type: ignore[attr-defined]
        return planner

    return declare


def declaration_of(planner: Planner) -> Declared:
    """What a policy declares; `Declared`'s defaults where it declares nothing."""
    found = getattr(planner, "declared", None)
    return found if isinstance(found, Declared) else Declared()
