"""What the toy engine and the links of a simulated worker know of it."""

from typing import Any, Protocol

from elaswave.protocol.step.machine import WorkerMachine
from verify.simulator.job import Job, Model
from verify.simulator.world import WorkerActor, World


class Host(WorkerActor, Protocol):
    """A simulated worker: an `verify.simulator.worker.SimWorker`."""

    job: Job
    model: Model
    world: World

    def between_layers(self) -> None:
        """A layer of an action has run."""

    def handed_on(self, value: int) -> int:
        """What an action's output is on the way to the next worker."""

    def check(self) -> None:
        """Looks whether the processor is right."""

    @property
    def is_voting(self) -> bool:
        """Whether it makes its ballot."""

    @property
    def machine(self) -> WorkerMachine[Any]:
        """The machine that it drives."""
