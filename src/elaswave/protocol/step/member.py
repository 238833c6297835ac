"""A worker's side of the membership, as a machine: when to leave an epoch, when to report, what to install. No IO.

Its states and what leads from one to another are the table `TRANSITIONS`, which drives it.

Whatever belongs to an older epoch or an older coordinator's term is ignored. The commit state that reports are made
of is the `ledger`'s.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from elaswave.protocol.coordinator.table import Transition, TransitionTable
from elaswave.protocol.messages import (
    AskPause,
    CoreToWorker,
    Decision,
    Dial,
    Fenced,
    GoOn,
    LayoutChange,
    Prepare,
    Released,
)


class MemberState(Enum):
    """What the worker is doing."""

    TRAINING = "training"
    REPORTED = "reported"
    FENCED = "fenced"


class MemberCause(Enum):
    """What has happened."""

    ASKED = "it is asked to report for a newer epoch"
    ASKED_AGAIN = "it is asked to report for its epoch once more"
    DECIDED = "the decision of that epoch comes"
    OFFERED = "a planned change of that epoch comes"
    CALLED = "it is told which joiners there are"
    PAUSE_WANTED = "in that epoch the membership is about to change"
    PAUSE_OVER = "in that epoch the membership stays as it is"
    LEFT_BEHIND = "it is told that the epoch goes on without it"
    RELEASED = "it is told that it may leave, as it was asked to"


class MemberResponse(Enum):
    """What the worker does about it: the names of the actions below."""

    MOVE_AND_REPORT = "move the data plane to the new epoch, promise, report"
    REPORT_AGAIN = "send the same report"
    INSTALL = "catch up, take over roles, complete parameters"
    HOLD = "hold it, and say so in the next vote"
    DIAL = "make links to them in the background, and say when they stand"
    ASK_PAUSE = "ask for a pause in the next vote"
    GO_ON = "ask for no pause, or begin the next step"
    LEAVE = "end itself"


_ANSWERING = (MemberState.TRAINING, MemberState.REPORTED)
TRANSITIONS: TransitionTable[MemberState, MemberCause, MemberResponse] = TransitionTable(
    MemberState.TRAINING,
    Transition(_ANSWERING, MemberCause.ASKED, MemberState.REPORTED, (MemberResponse.MOVE_AND_REPORT,)),
    Transition((MemberState.REPORTED,), MemberCause.ASKED_AGAIN, None, (MemberResponse.REPORT_AGAIN,)),
    Transition((MemberState.REPORTED,), MemberCause.DECIDED, MemberState.TRAINING, (MemberResponse.INSTALL,)),
    Transition((MemberState.TRAINING,), MemberCause.OFFERED, None, (MemberResponse.HOLD,)),
    Transition((MemberState.TRAINING,), MemberCause.CALLED, None, (MemberResponse.DIAL,)),
    Transition((MemberState.TRAINING,), MemberCause.PAUSE_WANTED, None, (MemberResponse.ASK_PAUSE,)),
    Transition((MemberState.TRAINING,), MemberCause.PAUSE_OVER, None, (MemberResponse.GO_ON,)),
    Transition(_ANSWERING, MemberCause.LEFT_BEHIND, MemberState.FENCED, (MemberResponse.LEAVE,)),
    Transition((MemberState.TRAINING,), MemberCause.RELEASED, MemberState.FENCED, (MemberResponse.LEAVE,)),
)
"""All that the machine can do; everything else is ignored."""


class MoveAndReport(NamedTuple):
    """Move the data plane to the new epoch, then promise and send the report, in this order."""

    epoch: int
    members: tuple[int, ...]
    with_progress: bool = False
    """Whether the report is to tell where training stands."""


class ReportAgain(NamedTuple):
    """Send the same report once more: the coordinator asks again."""


class Install(NamedTuple):
    """Carry out a decision."""

    decision: Decision


class Call(NamedTuple):
    """Make links in the background to these peers, and give up all others that are wanted and not there."""

    addresses: Mapping[int, str]


class AskForPause(NamedTuple):
    """Ask for a pause in the next vote."""


class GoOnTraining(NamedTuple):
    """Ask for no pause; if it has begun, end it."""


class Leave(NamedTuple):
    """End this worker; nothing of it counts any more."""

    reason: str
    as_asked: bool = False
    """Whether it leaves because it was asked to: then that is no error."""


class Ignored(NamedTuple):
    """Nothing to do, and why."""

    reason: str


class Hold(NamedTuple):
    """Hold a planned change of layout, and say so in the next vote."""

    change: LayoutChange


Action = MoveAndReport | ReportAgain | Install | Hold | Call | AskForPause | GoOnTraining | Leave | Ignored


def _leave(message: Any) -> Leave:
    if isinstance(message, Prepare):
        return Leave(f"epoch {message.epoch} goes on without this worker: {message.reason}")
    return Leave(message.reason, as_asked=isinstance(message, Released))


_ACTIONS: Mapping[MemberResponse, Callable[[Any], Action]] = {
    MemberResponse.MOVE_AND_REPORT: lambda asked: MoveAndReport(asked.epoch, asked.members, asked.with_progress),
    MemberResponse.REPORT_AGAIN: lambda message: ReportAgain(),
    MemberResponse.INSTALL: Install,
    MemberResponse.HOLD: Hold,
    MemberResponse.DIAL: lambda message: Call(message.addresses),
    MemberResponse.ASK_PAUSE: lambda message: AskForPause(),
    MemberResponse.GO_ON: lambda message: GoOnTraining(),
    MemberResponse.LEAVE: _leave,
}
"""How each response is made from the message that has caused it."""


_IN_EPOCH: Mapping[type[CoreToWorker], MemberCause] = {
    LayoutChange: MemberCause.OFFERED,
    AskPause: MemberCause.PAUSE_WANTED,
    GoOn: MemberCause.PAUSE_OVER,
}
"""What counts in the epoch that it is of, and only while its member trains."""


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
            return self._go(MemberCause.LEFT_BEHIND, message)
        if isinstance(message, Prepare):
            return self._on_prepare(message)
        if isinstance(message, Released | Dial):
            if self.state is MemberState.REPORTED:
                return Ignored(f"{type(message).__name__} comes while the decision is waited for")
            return self._go(MemberCause.RELEASED if isinstance(message, Released) else MemberCause.CALLED, message)
        cause = _IN_EPOCH.get(type(message))
        if cause is not None:
            if self.state is MemberState.TRAINING and message.epoch == self.epoch:
                return self._go(cause, message)
            return Ignored(f"{type(message).__name__} of epoch {message.epoch} in epoch {self.epoch}")
        if self.state is MemberState.REPORTED and message.epoch == self.epoch:
            return self._go(MemberCause.DECIDED, message)
        return Ignored(f"a decision of epoch {message.epoch} in epoch {self.epoch}, {self.state.value}")

    def _go(self, cause: MemberCause, message: CoreToWorker) -> Action:
        """Does what the table says about a cause."""
        self.state, (response,) = TRANSITIONS.next(self.state, cause)
        return _ACTIONS[response](message)

    def _on_prepare(self, message: Prepare) -> Action:
        if message.epoch < self.epoch:
            return Ignored(f"epoch {message.epoch} is older than {self.epoch}")
        if self.worker not in message.members:
            return self._go(MemberCause.LEFT_BEHIND, message)
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            return self._go(MemberCause.ASKED, message)
        if self.state is MemberState.REPORTED:
            return self._go(MemberCause.ASKED_AGAIN, message)
        return Ignored(f"epoch {message.epoch} is installed already")
