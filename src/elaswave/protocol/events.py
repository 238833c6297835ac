"""What the coordinator's machine is told, what it asks to be done, and what it makes durable. Plain typed data.

A driver (a process of the product, or a simulated one) turns what it sees into events, and carries out effects in their
order. What the machine asks for with an effect is answered by an event: `FindCheckpoint` by `CheckpointFound`,
`PlanRecovery` by `RecoveryPlanned` or `PlanningFailed`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import (
    CoreToWorker,
    Decision,
    Evidence,
    Installed,
    LayoutChange,
    Linked,
    Paused,
    Registered,
    Report,
    Unsound,
)
from elaswave.types import ExecutionParameters, Layout

# ------------------------------------------------------------------------------------------------------------- records


class TermRecord(msgspec.Struct, frozen=True, kw_only=True, tag="term"):
    """A coordinator has begun its work."""

    term: int


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Every worker has registered and training begins."""

    term: int


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended with an error of its own."""

    worker: int
    signature: str
    summary: str
    is_wrong: bool = False
    """Whether what it has computed of the step may be wrong."""


class NewGenerationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="new generation"):
    """A new generation has begun, without the workers that were lost; no decision yet."""

    term: int
    generation: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Lost since the last decision."""
    reason: str
    at_s: float = 0.0
    """Monotonic time of the coordinator's machine, for `Bounds.max_failures_per_hour`."""
    failure: WorkerFailure | None = None
    """The worker's own error, if that is what it was lost by."""
    joined: tuple[int, ...] = ()
    """Members that were none before."""
    domains: dict[int, str] = {}
    """Where those run, of each that has said it, see `elaswave.blocks.domains`."""
    left: tuple[int, ...] = ()
    """Members that have left on request."""


class LeavingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """A member is asked to leave."""

    term: int
    worker: int


Record = TermRecord | StartRecord | NewGenerationRecord | LeavingRecord | LayoutChange | Decision
"""What a coordinator persists, in order."""


# -------------------------------------------------------------------------------------------------------------- events


class Suspected(NamedTuple):
    """A detector holds a worker for lost."""

    worker: int
    detected_by: str
    """One of exit, link, heartbeat, progress, vote, drain, host."""
    reason: str


class WorkerFailed(NamedTuple):
    """A worker has ended itself with an error and said so."""

    worker: int
    signature: str
    """Equal for the same error at the same step and micro-batch."""
    summary: str
    is_common: bool = False
    """Whether a vote has shown it: then every member comes to it, sooner or later."""
    is_wrong: bool = False
    """Whether what it has computed of the step may be wrong: nobody keeps anything of that attempt (S5)."""


class EvidenceSeen(NamedTuple):
    """A worker has reported a committed step with its vote."""

    evidence: Evidence
    generation: int
    """The generation in which the vote was held."""


class CheckpointFound(NamedTuple):
    """The answer to `FindCheckpoint`."""

    sequence: int
    """Of the question."""
    step: int | None
    """None: there is none. If no step has been committed, all members then begin again from the seed."""


class PendingWork(NamedTuple):
    """What of the step that a recovery goes on from is still to be done, and which losses are known."""

    evaluate: bool
    checkpoint: bool
    published: int = 0
    """The newest step whose loss is known."""


class RecoveryPlan(NamedTuple):
    """How the members of a generation go on."""

    layout: Layout
    """Of exactly these members."""
    placement: Placement
    promoted: int = 0
    """Number of blocks that get a new owner."""
    execution: ExecutionParameters | None = None
    """None: as it was."""
    reason: str = ""
    """Why this layout, if that needs saying."""
    predicted_step_s: float | None = None


class RecoveryPlanned(NamedTuple):
    """The planner's answer to `PlanRecovery`."""

    sequence: int
    """Of the question."""
    plan: RecoveryPlan
    pending: PendingWork


class PlanningFailed(NamedTuple):
    """The planner has no answer to `PlanRecovery`: it failed, or took longer than it may."""

    sequence: int
    """Of the question."""
    reason: str
    pending: PendingWork


class JoinerCame(NamedTuple):
    """A worker that may join is there; may be said again."""

    worker: int
    address: str
    """Where its data plane listens."""
    domain: str = ""
    """Where it runs, see `elaswave.blocks.domains`."""


class JoinerGone(NamedTuple):
    """A worker that was to join has ended, or takes too long."""

    worker: int


class LeaveWanted(NamedTuple):
    """A member is to leave."""

    worker: int


CoordinatorEvent = (
    Registered
    | Report
    | Installed
    | Suspected
    | WorkerFailed
    | EvidenceSeen
    | CheckpointFound
    | LayoutChange
    | RecoveryPlanned
    | PlanningFailed
    | JoinerCame
    | JoinerGone
    | LeaveWanted
    | Linked
    | Paused
    | Unsound
)


# ------------------------------------------------------------------------------------------------------------- effects


class Persist(NamedTuple):
    """Write a record durably before going on to the next effect."""

    record: Record


class Send(NamedTuple):
    """Send a message to a worker; if it is not connected, it gets the state again when it registers."""

    worker: int
    message: CoreToWorker


class TellAddresses(NamedTuple):
    """Every worker has registered: tell them each other's addresses. Those that train already ignore it."""

    addresses: dict[int, str]


class FindCheckpoint(NamedTuple):
    """Find the newest valid checkpoint and come back with `CheckpointFound`.

    Another loss may make the question void meanwhile; the answer to it is then ignored.
    """

    sequence: int
    """Of the question; the answer bears it."""
    newest: int | None = None
    """Later checkpoints may hold what was found wrong since: they do not count any more."""


class PlanRecovery(NamedTuple):
    """Plan how the members go on and come back with `RecoveryPlanned` or `PlanningFailed`, in the same turn or later.

    Another loss or newer evidence may make the question void meanwhile; the machine then asks anew, with a larger
    sequence, and ignores the answer to this one.
    """

    sequence: int
    """Of the question; the answer bears it."""
    generation: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Workers of the layout that are no members any more."""
    layout: Layout
    """In force by the newest evidence."""
    execution: ExecutionParameters
    """In force with it."""
    change: int
    """Number of the planned change that the layout is of."""
    placement: Placement
    """The last decision's, with the followers that the members have reported."""
    valid: Mapping[int, frozenset[int]]
    """Member -> blocks of which it has a valid copy: at the base step, or at once brought to it."""
    base: int
    """The step to go on after."""
    evidence: Evidence | None = None
    """The newest vote that is known; None also for a return to a checkpoint."""
    rollback: bool = False
    """Whether all members go back to the checkpoint of the base step: then blocks are placed afresh."""


class NewGeneration(NamedTuple):
    """For the report: a new generation has begun, because of these suspicions, as members join and leave, or since
    copies are wrong."""

    generation: int
    suspicions: tuple[Suspected, ...]
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    unsound: tuple[int, ...] = ()
    """Who has said that copies are wrong."""


class Decided(NamedTuple):
    """For the report: survivors go on with this decision."""

    decision: Decision
    predicted_step_s: float | None = None
    """Seconds of a step under it, if the planner has said."""


class Resumed(NamedTuple):
    """For the report: every member of the generation computes again."""

    generation: int
    installed: tuple[Installed, ...]


class End(NamedTuple):
    """The job cannot go on."""

    reason: str
    worker: int | None = None
    """The worker whose own error it is."""
    orphans: tuple[int, ...] = ()
    """Blocks of which no copy is left, if that is why."""


class Note(NamedTuple):
    """Something was ignored or refused, and why."""

    text: str


CoordinatorEffect = (
    Persist | Send | TellAddresses | FindCheckpoint | PlanRecovery | NewGeneration | Decided | Resumed | End | Note
)
