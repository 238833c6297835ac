"""Faults that the coordinator carries out itself, and what is said of those that never struck anything."""

from collections.abc import Sequence
from pathlib import Path

from elaswave.faults.injection import (
    FAULTS_FILE,
    Fault,
    Requests,
    away_until_s,
    coordinator_fault,
    never_struck,
    read_fault_records,
    strike_coordinator,
)


class CoordinatorFaults:
    """The injected faults of one run, as a coordinator sees them.

    Args:
        faults: all that were asked for.
        run_dir: where those that have struck leave a record, for every later coordinator too.
        requests: to the coordinator.
    """

    def __init__(self, faults: Sequence[Fault], run_dir: Path, requests: Requests) -> None:
        self._faults = faults
        self._requests = requests
        self._record = run_dir / FAULTS_FILE

    def strike(self, step: int) -> None:
        """Carries out the coordinator's own faults that are due when a step begins."""
        if not self._faults:
            return
        struck = {entry.position for entry in read_fault_records(self._record)}
        while (due := coordinator_fault(self._faults, step, struck)) is not None:
            struck.add(due.position)
            strike_coordinator(due, self._requests, step=step, record=self._record)

    def away_until_s(self, worker: int) -> float:
        """When a worker's site is back that a fault has cut off, or was; 0 if none has."""
        return away_until_s(self._faults, read_fault_records(self._record), worker) if self._faults else 0.0

    def never_struck(self) -> list[str]:
        """One line for each that has not struck."""
        return [
            f"--fault {fault} never struck: its worker was gone, or had no such action in step {fault.step} of this run"
            for fault in never_struck(self._faults, read_fault_records(self._record))
        ]
