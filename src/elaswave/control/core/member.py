"""A worker's side of the membership, as a machine: when to leave an epoch, when to report, what to install. No IO.

    TRAINING ── Prepare of a newer epoch ──▶ REPORTED ── its Decision ──▶ TRAINING
        │                                      │  ▲
        │                                      └──┘ Prepare of a still newer epoch
        └────────── Fenced, or a Prepare without this worker ──▶ FENCED

Whatever belongs to an older epoch or an older coordinator's term is ignored. The commit state that reports are made
of is the `ledger`'s.
"""

from enum import Enum
from typing import NamedTuple

from elaswave.control.core.messages import CoreToWorker, Decision, Fenced, Prepare


class MemberState(Enum):
    """What the worker is doing."""

    TRAINING = "training"
    REPORTED = "reported"
    FENCED = "fenced"


class MoveAndReport(NamedTuple):
    """Move the data plane to the new epoch, then promise and send the report, in this order."""

    epoch: int
    members: tuple[int, ...]


class ReportAgain(NamedTuple):
    """Send the same report once more: the coordinator asks again."""


class Install(NamedTuple):
    """Carry out a decision."""

    decision: Decision


class Leave(NamedTuple):
    """End this worker; nothing of it counts any more."""

    reason: str


class Ignored(NamedTuple):
    """Nothing to do, and why."""

    reason: str


Action = MoveAndReport | ReportAgain | Install | Leave | Ignored


class Member:
    """A worker's membership.

    Args:
        worker: its id.
        epoch: the epoch that it starts in.
    """

    def __init__(self, worker: int, epoch: int) -> None:
        self.worker = worker
        self.epoch = epoch
        self.term = 0
        self.state = MemberState.TRAINING

    def handle(self, message: CoreToWorker) -> Action:
        """Takes a message of the coordinator."""
        if self.state is MemberState.FENCED:
            return Ignored("this worker is fenced")
        if message.term < self.term:
            return Ignored(f"it is of term {message.term}, the coordinator's is {self.term}")
        self.term = message.term
        if isinstance(message, Fenced):
            self.state = MemberState.FENCED
            return Leave(message.reason)
        if isinstance(message, Prepare):
            return self._on_prepare(message)
        if self.state is MemberState.REPORTED and message.epoch == self.epoch:
            self.state = MemberState.TRAINING
            return Install(message)
        return Ignored(f"a decision of epoch {message.epoch} in epoch {self.epoch}, {self.state.value}")

    def _on_prepare(self, message: Prepare) -> Action:
        if message.epoch < self.epoch:
            return Ignored(f"epoch {message.epoch} is older than {self.epoch}")
        if self.worker not in message.members:
            self.state = MemberState.FENCED
            return Leave(f"epoch {message.epoch} goes on without this worker: {message.reason}")
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            self.state = MemberState.REPORTED
            return MoveAndReport(message.epoch, message.members)
        if self.state is MemberState.REPORTED:
            return ReportAgain()
        return Ignored(f"epoch {message.epoch} is installed already")
