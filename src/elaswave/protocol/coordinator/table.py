"""States and transitions of the machines: tables that drive them, and that the documentation is made from.

A machine finds out what has happened (a *cause*), looks up what follows from it in its state, takes the next state, and
carries out the *responses* in the order in which the row names them. It can do nothing that is not in its table.
"""

from enum import Enum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Enum)
C = TypeVar("C", bound=Enum)
R = TypeVar("R", bound=Enum)


class Transition(NamedTuple, Generic[S, C, R]):
    """What follows from a cause."""

    before: tuple[S, ...]
    """In which states."""
    cause: C
    after: S | None
    """The next state; None if it stays as it is."""
    does: tuple[R, ...] = ()
    """The responses, in their order."""


class TransitionTable(Generic[S, C, R]):
    """All that a machine can do.

    Args:
        first: the state that it begins in.
        rows: at most one for each state and cause.
    """

    def __init__(self, first: S, *rows: Transition[S, C, R]) -> None:
        self.first = first
        self.rows = rows
        self._rows: dict[tuple[S, C], Transition[S, C, R]] = {}
        for row in rows:
            for state in row.before:
                assert (state, row.cause) not in self._rows, f"{state.value}: two rows for: {row.cause.value}"
                self._rows[state, row.cause] = row

    def next(self, state: S, cause: C) -> tuple[S, tuple[R, ...]]:
        """Looks up what follows from a cause.

        Args:
            state: the present one.
            cause: what has happened.
        Returns:
            The next state, and the responses in their order.
        """
        row = self._rows.get((state, cause))
        assert row is not None, f"{state.value}: {cause.value}: not in the table"
        return state if row.after is None else row.after, row.does
