"""What the rules about members and hosts make durable, and what they ask for. Plain typed data.

Effects are carried out in their order, as those of the coordinator's machine (`elaswave.protocol.events`): a record
stands before whatever a successor that lacks it would do again.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from elaswave.protocol.events import CoordinatorEffect, CoordinatorEvent, Record, Suspected
from elaswave.protocol.membership.admissions import Founders

Verdict = Literal["misused", "needless", "again"]
"""Why an agent may not take part: a person's mistake; the node has another one; it is too late for this one, and a
later one may."""

BACKOFF_S_MIN = 1.0
"""From the first death in a place to the next process."""

# ------------------------------------------------------------------------------------------------------------- records


class PlaceTaken(msgspec.Struct, frozen=True, kw_only=True, tag="place"):
    """A worker that joins is about to be started, in a place of the job; see `elaswave.protocol.membership.joiners`."""

    worker: int
    place: int
    at_s: float
    """By the coordinator's monotonic clock."""
    request: int = 0
    """Number of the request of a person that wants it; 0: of nobody's."""
    backoff_s: float = BACKOFF_S_MIN
    """From its end to the next process of the place."""
    host: int = 0
    """Number of the host on which it is started."""


class HostCame(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """An agent takes part from now on; see `elaswave.protocol.membership.hosts`."""

    number: int
    node: str
    incarnation: int
    slots: int
    num_fruitless: int = 0
    """Agents of this node before it, in a row, that had no part in a committed step."""


class LeaveAsked(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """A member is to leave, or a joiner is not to come in: nobody takes its place."""

    worker: int
    within_s: float
    """After which a member is lost. The newest record of a worker counts."""
    at_s: float
    """From when on, by the coordinator's monotonic clock."""


class StepPublished(NamedTuple):
    """Among the records of earlier coordinators: a step was committed and published."""


MembershipRecord = PlaceTaken | LeaveAsked | HostCame | Founders
AnyRecord = Record | MembershipRecord
"""What the coordinator's machine and the rules about members make durable."""

# ------------------------------------------------------------------------------------------------------------- effects


class WriteDown(NamedTuple):
    """Make a record durable before going on to the next effect."""

    record: MembershipRecord


class TellCore(NamedTuple):
    """Tell the coordinator's machine of an event, and carry out what it asks for, before the next effect."""

    event: CoordinatorEvent


class Suspect(NamedTuple):
    """Members are lost: as if a detector had said so."""

    suspicions: Sequence[Suspected]


class SpawnJoiner(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Start a worker that joins: it begins without state.

    The same message goes all the way, from coordinator to agent and from agent to forkserver. Every later coordinator
    sends it again (J1), and an agent may send it twice: ids that were started before are ignored.
    """

    worker: int
    """An id that no process has had."""


class EndJoiner(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A joiner that does not get on is to be killed, so that its place is free again."""

    worker: int


class TellAgent(NamedTuple):
    """Send an agent a message."""

    incarnation: int
    message: SpawnJoiner | EndJoiner


class StartFirst(NamedTuple):
    """Have an agent start the workers with which the job begins there."""

    incarnation: int
    workers: tuple[int, ...]


class TurnAway(NamedTuple):
    """Tell an agent that it may not take part."""

    incarnation: int
    reason: str
    verdict: Verdict


class HangUp(NamedTuple):
    """End the connection of an agent."""

    incarnation: int


class Refuse(NamedTuple):
    """Tell a joiner that it is not let in, and whoever has asked for it why."""

    worker: int
    problem: str


class AwaitMembers(NamedTuple):
    """All hosts have come with which the job begins: from now on its members are awaited."""


class WorkerGone(NamedTuple):
    """A worker has ended, and no agent will ever say so."""

    worker: int
    text: str


class StopTraining(NamedTuple):
    """Stop the job, with a checkpoint."""

    cause: str


class GiveUpJob(NamedTuple):
    """End the job: it cannot begin."""

    reason: str


class Say(NamedTuple):
    """Tell people."""

    text: str


AgentEffect = TellAgent | StartFirst | TurnAway | HangUp
"""Those that are told to an agent."""
_OwnEffect = WriteDown | TellCore | Suspect | Refuse | AwaitMembers | WorkerGone | StopTraining | GiveUpJob | Say
MembershipEffect = AgentEffect | _OwnEffect
Effect = CoordinatorEffect | MembershipEffect
"""All that a coordinator's driver carries out."""
