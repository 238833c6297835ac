"""Actions and programs: the one form that the executor runs, the trace draws and the validator checks.

An action is a stage, a kind and a micro-batch, and prints as ``2F0``. A worker's program is the list of its actions
in the order in which it runs them. What an action computes (which layers) and where its input comes from stand in
the layout's routes, not in the program.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; or backward in two halves: the input's gradient, then the weights'."""

KIND_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_LINE = re.compile(r"worker (\d+):(.*)", re.ASCII)


class Action(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One piece of work of one worker: a stage's layers, forward or backward, for one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Program = tuple[Action, ...]
"""What one worker does in a step, in order."""


def parse_action(text: str) -> Action:
    """The action that prints as this text.

    Args:
        text: such as ``"2F0"``: stage 2, forward, micro-batch 0.
    Raises:
        ValueError: the text is no action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not an action: write stage, kind (F, B, I or W) and micro-batch without spaces, such as 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))  # type: ignore[arg-type]  # the pattern admits no other letter


def print_programs(programs: Mapping[int, Program]) -> str:
    """Programs as text, one line per worker in ascending order: ``worker 0: 0F0 0F1 0B0 0B1``."""
    lines = (f"worker {worker}: {' '.join(map(str, programs[worker]))}".rstrip() for worker in sorted(programs))
    return "".join(line + "\n" for line in lines)


def parse_programs(text: str) -> dict[int, Program]:
    """The programs that print as this text; empty lines are skipped.

    Args:
        text: what `print_programs` returns.
    Raises:
        ValueError: a line that is no program (its number is named), or a worker that occurs twice.
    """
    programs: dict[int, Program] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f'line {number}, {line!r}, is not a program: write "worker 0: 0F0 0B0"')
        worker = int(match.group(1))
        if worker in programs:
            raise ValueError(f"line {number}: worker {worker} has a program already; give each worker one line")
        try:
            programs[worker] = tuple(map(parse_action, match.group(2).split()))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return programs
