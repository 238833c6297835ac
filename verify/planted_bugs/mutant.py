"""What a planted bug is, and how one is planted in a part of the worker's machine."""

from typing import Any, NamedTuple

from elaswave.protocol.step.blocks import PlannedChange, WorkerBlocks
from elaswave.protocol.step.due_work import WorkBetweenSteps
from elaswave.protocol.step.execution import Execution
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.soundness import CopyChecks
from verify.simulator.run import Build
from verify.simulator.worker import SimMachine

_PARTS_OF_STEPS = {
    Execution: "execution_class",
    WorkerBlocks: "blocks_class",
    PlannedChange: "planned_class",
    CopyChecks: "checks_class",
}


class Mutant(NamedTuple):
    """A planted bug."""

    name: str
    what: str
    """What is wrong."""
    build: Build
    example: str
    """A schedule that shows it, as short as the search could make it."""
    real: bool = False
    """Whether the core once had it."""


def with_part(part: type[Any], machine: type[SimMachine] = WorkerMachine) -> type[SimMachine]:
    """A worker's machine one part of which is replaced.

    Args:
        part: a class that is derived from one of the machine's parts.
        machine: whose part it becomes.
    """
    if issubclass(part, WorkBetweenSteps):
        return type(part.__name__, (machine,), {"between_class": part})
    for base, place in _PARTS_OF_STEPS.items():
        if issubclass(part, base):
            part = type(part.__name__, (StepLoop,), {place: part})
            break
    return type(part.__name__, (machine,), {"steps_class": part})
