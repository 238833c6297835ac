"""A worker's side of the membership, as a machine: when to leave a generation, when to report, what to install. No IO.

Its states and what leads from one to another are the table `TRANSITIONS`, which drives it.

Whatever belongs to an older generation or an older coordinator's term is ignored. The commit state that reports are
made of is the `ledger`'s.
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
    FencedOff,
    GoOn,
    LayoutChange,
    Prepare,
    Released,
)


class MemberState(Enum):
    """What the worker is doing."""

    TRAINING = "training"
    REPORTED = "reported"
    FENCED_OFF = "fenced off"


class MemberCause(Enum):
    """What has happened."""

    ASKED = "it is asked to report for a newer generation"
    ASKED_AGAIN = "it is asked to report for its generation once more"
    DECIDED = "the decision of that generation comes"
    OFFERED = "a planned change of that generation comes"
    CALLED = "it is told which joiners there are"
    PAUSE_WANTED = "in that generation the membership is about to change"
    PAUSE_OVER = "in that generation the membership stays as it is"
    LEFT_BEHIND = "it is told that the generation goes on without it"
    RELEASED = "it is told that it may leave, as it was asked to"


class MemberResponse(Enum):
    """What the worker does about it: the names of the actions below."""

    MOVE_AND_REPORT = "move the data plane to the new generation, promise, report"
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
    Transition(_ANSWERING, MemberCause.LEFT_BEHIND, MemberState.FENCED_OFF, (MemberResponse.LEAVE,)),
    Transition((MemberState.TRAINING,), MemberCause.RELEASED, MemberState.FENCED_OFF, (MemberResponse.LEAVE,)),
)
"""All that the machine can do; everything else is ignored."""


class MoveAndReport(NamedTuple):
    """Move the data plane to the new generation, then promise and send the report, in this order."""

    generation: int
    members: tuple[int, ...]
    with_progress: bool = False
    """Whether the report is to tell where training stands."""


class ReportAgain(NamedTuple):
    """Send the same report once more: the coordinator asks again."""


class Install(NamedTuple):
    """Carry out a decision."""

    decision: Decision


class DialPeers(NamedTuple):
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


Action = MoveAndReport | ReportAgain | Install | Hold | DialPeers | AskForPause | GoOnTraining | Leave | Ignored


def _leave(message: Any) -> Leave:
    if isinstance(message, Prepare):
        return Leave(f"generation {message.generation} goes on without this worker: {message.reason}")
    return Leave(message.reason, as_asked=isinstance(message, Released))


_ACTIONS: Mapping[MemberResponse, Callable[[Any], Action]] = {
    MemberResponse.MOVE_AND_REPORT: lambda asked: MoveAndReport(asked.generation, asked.members, asked.with_progress),
    MemberResponse.REPORT_AGAIN: lambda message: ReportAgain(),
    MemberResponse.INSTALL: Install,
    MemberResponse.HOLD: Hold,
    MemberResponse.DIAL: lambda message: DialPeers(message.addresses),
    MemberResponse.ASK_PAUSE: lambda message: AskForPause(),
    MemberResponse.GO_ON: lambda message: GoOnTraining(),
    MemberResponse.LEAVE: _leave,
}
"""How each response is made from the message that has caused it."""


_IN_GENERATION: Mapping[type[CoreToWorker], MemberCause] = {
    LayoutChange: MemberCause.OFFERED,
    AskPause: MemberCause.PAUSE_WANTED,
    GoOn: MemberCause.PAUSE_OVER,
}
"""What counts in the generation that it is of, and only while its member trains."""


class Member:
    """A worker's membership.

    Args:
        worker: its id.
        generation: the generation that it starts in.
    """

    def __init__(self, worker: int, generation: int) -> None:
        self.worker = worker
        self.generation = generation
        self.term = 0
        self.state = MemberState.TRAINING

    def handle(self, message: CoreToWorker) -> Action:
        """Takes a message of the coordinator."""
        if self.state is MemberState.FENCED_OFF:
            return Ignored("this worker is fenced off")
        if message.term < self.term:
            # A coordinator that was replaced may not know it yet; its successor decides without it.
            return Ignored(f"it is of term {message.term}, the coordinator's is {self.term}")
        self.term = message.term
        if isinstance(message, FencedOff):
            return self._go(MemberCause.LEFT_BEHIND, message)
        if isinstance(message, Prepare):
            return self._on_prepare(message)
        if isinstance(message, Released | Dial):
            if self.state is MemberState.REPORTED:
                # It is of the generation that this worker has left.
                return Ignored(f"{type(message).__name__} comes while the decision is waited for")
            return self._go(MemberCause.RELEASED if isinstance(message, Released) else MemberCause.CALLED, message)
        cause = _IN_GENERATION.get(type(message))
        if cause is not None:
            if self.state is MemberState.TRAINING and message.generation == self.generation:
                return self._go(cause, message)
            return Ignored(
                f"{type(message).__name__} of generation {message.generation} in generation {self.generation}"
            )
        if self.state is MemberState.REPORTED and message.generation == self.generation:
            return self._go(MemberCause.DECIDED, message)
        return Ignored(
            f"a decision of generation {message.generation} in generation {self.generation}, {self.state.value}"
        )

    def _go(self, cause: MemberCause, message: CoreToWorker) -> Action:
        """Does what the table says about a cause."""
        self.state, (response,) = TRANSITIONS.next(self.state, cause)
        return _ACTIONS[response](message)

    def _on_prepare(self, message: Prepare) -> Action:
        if message.generation < self.generation:
            return Ignored(f"generation {message.generation} is older than {self.generation}")
        if self.worker not in message.members:
            return self._go(MemberCause.LEFT_BEHIND, message)
        if message.generation > self.generation:
            self.generation = message.generation
            return self._go(MemberCause.ASKED, message)
        if self.state is MemberState.REPORTED:
            return self._go(MemberCause.ASKED_AGAIN, message)
        # The decision is made: a report would come too late.
        return Ignored(f"generation {message.generation} is installed already")
