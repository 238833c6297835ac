"""A worker's side of the membership, as a machine: when to leave an epoch, when to report, what to install. No IO.

Its states and what leads from one to another are the table `TRANSITIONS`, which every change of state is held to.

Whatever belongs to an older epoch or an older coordinator's term is ignored. The commit state that reports are made
of is the `ledger`'s.
"""

from enum import Enum
from typing import NamedTuple

from elaswave.protocol.messages import CoreToWorker, Decision, Fenced, LayoutChange, Prepare
from elaswave.protocol.table import Transition, check_transition


class MemberState(Enum):
    """What the worker is doing."""

    TRAINING = "training"
    REPORTED = "reported"
    FENCED = "fenced"


ASKED = "it is asked to report for a newer epoch"
DECIDED = "the decision of that epoch comes"
OFFERED = "a planned change of that epoch comes"
LEFT_BEHIND = "it is told that the epoch goes on without it"

_REPORT = "move the data plane to the new epoch, promise, report"
TRANSITIONS = (
    Transition(MemberState.TRAINING, ASKED, MemberState.REPORTED, _REPORT),
    Transition(MemberState.REPORTED, ASKED, MemberState.REPORTED, _REPORT),
    Transition(MemberState.REPORTED, DECIDED, MemberState.TRAINING, "catch up, take over roles, complete parameters"),
    Transition(MemberState.TRAINING, OFFERED, MemberState.TRAINING, "hold it, and say so in the next vote"),
    Transition(MemberState.TRAINING, LEFT_BEHIND, MemberState.FENCED, "end itself"),
    Transition(MemberState.REPORTED, LEFT_BEHIND, MemberState.FENCED, "end itself"),
)
"""All transitions."""


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


class Hold(NamedTuple):
    """Hold a planned change of layout, and say so in the next vote."""

    change: LayoutChange


Action = MoveAndReport | ReportAgain | Install | Hold | Leave | Ignored


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
            self._go(LEFT_BEHIND, MemberState.FENCED)
            return Leave(message.reason)
        if isinstance(message, Prepare):
            return self._on_prepare(message)
        if isinstance(message, LayoutChange):
            if self.state is MemberState.TRAINING and message.epoch == self.epoch:
                self._go(OFFERED, MemberState.TRAINING)
                return Hold(message)
            return Ignored(f"change {message.number} of epoch {message.epoch} in epoch {self.epoch}")
        if self.state is MemberState.REPORTED and message.epoch == self.epoch:
            self._go(DECIDED, MemberState.TRAINING)
            return Install(message)
        return Ignored(f"a decision of epoch {message.epoch} in epoch {self.epoch}, {self.state.value}")

    def _go(self, cause: str, after: MemberState) -> None:
        """Changes the state, as the table allows."""
        check_transition(TRANSITIONS, self.state, cause, after)
        self.state = after

    def _on_prepare(self, message: Prepare) -> Action:
        if message.epoch < self.epoch:
            return Ignored(f"epoch {message.epoch} is older than {self.epoch}")
        if self.worker not in message.members:
            self._go(LEFT_BEHIND, MemberState.FENCED)
            return Leave(f"epoch {message.epoch} goes on without this worker: {message.reason}")
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            self._go(ASKED, MemberState.REPORTED)
            return MoveAndReport(message.epoch, message.members)
        if self.state is MemberState.REPORTED:
            return ReportAgain()
        return Ignored(f"epoch {message.epoch} is installed already")
