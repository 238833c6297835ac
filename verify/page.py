"""The parts of ``docs/protocol.md`` that are made from the code: diagrams, tables of transitions, planted bugs.

``scripts/protocol-page`` writes them anew; a test compares them.
"""

import re
from inspect import cleandoc
from types import ModuleType

from elaswave.protocol.coordinator import transitions
from elaswave.protocol.coordinator.table import C, R, S, TransitionTable
from elaswave.protocol.membership import agent
from elaswave.protocol.step import loop, member
from verify.planted_bugs.lifetimes import LIFETIME_MUTANTS
from verify.planted_bugs.mutants import MUTANTS
from verify.simulator.lifetime_search import parse_lifetime, run_lifetime
from verify.simulator.run import run_schedule
from verify.simulator.schedule import KINDS, parse_schedule
from verify.simulator.search import SPACES

_SECTION = re.compile(r"(<!-- from the code: (\w+) -->\n).*?(<!-- until here -->)", re.DOTALL)


def fill(text: str) -> str:
    """A page with its sections made anew.

    Args:
        text: the page; a section stands between ``<!-- from the code: NAME -->`` and ``<!-- until here -->``.
    Raises:
        KeyError: a section of an unknown name.
    """
    return _SECTION.sub(lambda match: f"{match[1]}{_SECTIONS[match[2]]()}\n{match[3]}", text)


def _step() -> str:
    return _theory(loop)


def _loss() -> str:
    return _theory(transitions)


def _theory(module: ModuleType) -> str:
    """What a module's docstring says behind its first paragraph, as a page has it."""
    return cleandoc((module.__doc__ or "").partition("\n\n")[2]).replace("``", "`")


def _coordinator() -> str:
    return _machine(transitions.TRANSITIONS)


def _member() -> str:
    return _machine(member.TRANSITIONS)


def _agent() -> str:
    return _machine(agent.TRANSITIONS)


def _machine(table: TransitionTable[S, C, R]) -> str:
    return f"```mermaid\n{mermaid_diagram(table)}\n```\n\n{markdown_table(table)}"


def _faults() -> str:
    return "\n".join(
        ["| fault | what it does |", "|---|---|", *(f"| `{kind}` | {what} |" for kind, what in KINDS.items())]
    )


def _spaces() -> str:
    lines = ["| space | stages | steps | faults, first; second | conditions |", "|---|---|---|---|---|"]
    for space in SPACES.values():
        kinds = "; ".join(", ".join(names) for names in space.kinds)
        widths = "[" + ",".join(map(str, space.job.widths)) + "]"
        lines.append(f"| {space.name} | {widths} | {space.job.steps} | {kinds} | {len(space.conditions)} |")
    return "\n".join(lines)


def _mutants() -> str:
    lines = ["| bug | what is wrong | what is seen | schedule |", "|---|---|---|---|"]
    for mutant in MUTANTS.values():
        seen = run_schedule(parse_schedule(mutant.example), mutant.build).violation or "not shown by its example"
        seen = seen.partition(", and there is no valid")[0]
        real = " (the core once had it)" if mutant.real else ""
        lines.append(f"| `{mutant.name}` | {mutant.what}{real} | {seen} | `{mutant.example}` |")
    return "\n".join(lines)


def _lifetimes() -> str:
    lines = ["| bug | what is wrong | what is seen | schedule |", "|---|---|---|---|"]
    for mutant in LIFETIME_MUTANTS.values():
        schedule = parse_lifetime(mutant.example)
        seen = run_lifetime(schedule, mutant.build).violation or "not shown by its example"
        real = " (the product once had it)" if mutant.real else ""
        lines.append(f"| `{mutant.name}` | {mutant.what}{real} | {seen} | `{mutant.example or 'seed=0'}` |")
    return "\n".join(lines)


_SECTIONS = {
    "step": _step,
    "loss": _loss,
    "coordinator": _coordinator,
    "member": _member,
    "agent": _agent,
    "faults": _faults,
    "spaces": _spaces,
    "mutants": _mutants,
    "lifetimes": _lifetimes,
}


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
