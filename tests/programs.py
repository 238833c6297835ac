"""Programs as text, so that a test can show them: ``worker 0: 0F0 0F1 0B0 0B1``, a line for each worker."""

import re
from collections.abc import Mapping

from elaswave.types import Action, Program


def parse_action(text: str) -> Action:
    """The action that prints as this text, such as ``2F0``."""
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
    assert match is not None, f"{text!r} is not an action: write stage, kind and micro-batch, such as 2F0"
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))


def parse_programs(text: str) -> dict[int, Program]:
    """The programs that print as this text; empty lines are skipped."""
    programs: dict[int, Program] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"worker (\d+):(.*)", line)
        assert match is not None, f'{line!r} is not a program: write "worker 0: 0F0 0B0"'
        assert int(match.group(1)) not in programs, f"worker {match.group(1)} has two programs"
        programs[int(match.group(1))] = tuple(map(parse_action, match.group(2).split()))
    return programs


def print_programs(programs: Mapping[int, Program]) -> str:
    """Programs as text, workers in ascending order."""
    return "".join(
        f"worker {worker}: {' '.join(map(str, programs[worker]))}".rstrip() + "\n" for worker in sorted(programs)
    )
