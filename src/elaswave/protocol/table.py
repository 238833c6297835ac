"""States and transitions of the machines: tables that they are held to and that the documentation is made from."""

from collections.abc import Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S", bound=Enum)


class Transition(NamedTuple, Generic[S]):
    """One way out of a state."""

    before: S
    cause: str
    after: S
    does: str
    """What the machine does, in the order in which it does it."""


def check_transition(table: Sequence[Transition[S]], before: S, cause: str, after: S) -> None:
    """Asserts that a transition is in the table."""
    assert any(row[:3] == (before, cause, after) for row in table), (
        f"{before.value} -> {after.value} because {cause}: not in the table"
    )


def markdown_table(table: Sequence[Transition[S]]) -> str:
    """The table for people."""
    lines = ["| state | what happens | next state | what it does |", "|---|---|---|---|"]
    lines += [f"| {row.before.value} | {row.cause} | {row.after.value} | {row.does} |" for row in table]
    return "\n".join(lines)


def mermaid_diagram(table: Sequence[Transition[S]], first: S) -> str:
    """The table as a state diagram, in the language of Mermaid; several causes of one arrow share it."""
    arrows: dict[tuple[S, S], list[str]] = {}
    for row in table:
        arrows.setdefault((row.before, row.after), []).append(row.cause)
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [f"    {before.name} --> {after.name}: {' / '.join(causes)}" for (before, after), causes in arrows.items()]
    leavable = {before for before, _ in arrows}
    lines += [
        f"    {after.name} --> [*]" for after in dict.fromkeys(after for _, after in arrows) if after not in leavable
    ]
    return "\n".join(lines)
