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
        """What follows from a cause.

        Args:
            state: the present one.
            cause: what has happened.
        Returns:
            The next state, and the responses in their order.
        """
        row = self._rows.get((state, cause))
        assert row is not None, f"{state.value}: {cause.value}: not in the table"
        return state if row.after is None else row.after, row.does


def markdown_table(table: TransitionTable[S, C, R]) -> str:
    """The table for people."""
    lines = ["| state | what happens | next state | what it does |", "|---|---|---|---|"]
    for row in table.rows:
        before = ", ".join(state.value for state in row.before)
        after = "the same" if row.after is None else row.after.value
        does = ", ".join(response.value for response in row.does) or "nothing"
        lines.append(f"| {before} | {row.cause.value} | {after} | {does} |")
    return "\n".join(lines)


def mermaid_diagram(table: TransitionTable[S, C, R]) -> str:
    """The changes of state as a diagram, in the language of Mermaid; several causes of one arrow share it.

    What leaves every state as it is stands in the table only.
    """
    arrows: dict[tuple[S, S], list[str]] = {}
    for row in table.rows:
        if row.after is not None:
            for state in row.before:
                arrows.setdefault((state, row.after), []).append(row.cause.value)
    lines = ["stateDiagram-v2", f"    [*] --> {table.first.name}"]
    lines += [f"    {before.name} --> {after.name}: {' / '.join(causes)}" for (before, after), causes in arrows.items()]
    leavable = {before for before, _ in arrows}
    lines += [
        f"    {after.name} --> [*]" for after in dict.fromkeys(after for _, after in arrows) if after not in leavable
    ]
    return "\n".join(lines)
