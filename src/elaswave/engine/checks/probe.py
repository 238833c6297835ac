"""Named points inside a step, for fault injection and tests; they cost one call each and decide nothing."""

from typing import Any, Protocol

from elaswave.protocol.step.engine import Phase


class Probe(Protocol):
    """Is told when a worker reaches a point of a step."""

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Called just before the index-th action (from 0) of a phase.

        Args:
            phase: where the step is.
            index: counts the phase's actions in this attempt.
            machine: the `elaswave.protocol.step.machine.WorkerMachine`; has the worker's id, the step and the attempt.
        """
        ...


class NoProbe:
    """The probe of an ordinary run."""

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Does nothing."""


class Probes:
    """Several probes as one, told in their order.

    Args:
        probes: each is told of every point.
    """

    def __init__(self, *probes: Probe) -> None:
        self._probes = probes

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        """Tells all of them."""
        for probe in self._probes:
            probe.reached(phase, index, machine)
