"""What a person's command (`elaswave ctl`) and the coordinator of a running job say to each other.

An operator asks; every request has a number of its own and is answered by one last `Answer` (or a `StatusAnswer`), with
others before it that say how it gets on. It may ask again over a new connection, of another coordinator: all requests
mean the same when they come twice.
"""

from typing import Annotated, Literal

import msgspec

from elaswave.channel.messages.worker import Message
from elaswave.observability.result import JsonFloat
from elaswave.types import Gauges

# ------------------------------------------------------------------------------------------------------------ requests


class OperatorHello(Message, frozen=True, kw_only=True):
    """The first words of an operator."""

    version: str
    """Of its elaswave."""


class AskStatus(Message, frozen=True, kw_only=True):
    """How does the job get on?"""

    request: int


class AskCheckpoint(Message, frozen=True, kw_only=True):
    """Write a durable checkpoint of the state after one of the next steps."""

    request: int
    wait: bool
    """Whether the last answer is to come when it is durable; else when a vote has asked for it."""


class AskStop(Message, frozen=True, kw_only=True):
    """End after the step in hand, with a checkpoint, as after a signal."""

    request: int


class AskRebalance(Message, frozen=True, kw_only=True):
    """Look for a better layout of the present workers now, and change to it if there is one."""

    request: int


class AskMigrate(Message, frozen=True, kw_only=True):
    """Change to this layout."""

    request: int
    layers: tuple[int, ...] | None = None
    """Number of layers of each stage; None: as they are."""
    widths: tuple[int, ...] | None = None
    """Number of workers of each stage; None: as they are."""


class AskJoin(Message, frozen=True, kw_only=True):
    """Take in new workers."""

    request: int
    num_workers: int


class AskDrain(Message, frozen=True, kw_only=True):
    """Let a worker go at a step boundary."""

    request: int
    worker: int
    deadline_s: float | None = None
    """After which it is lost; None: as configured."""
    begun: bool = False
    """Whether an earlier coordinator has had it leave for this request: it may be gone since."""


class AskKey(Message, frozen=True, kw_only=True):
    """Change the job's key, and go on with that for as long as the asking operator stays."""

    request: int
    key: Annotated[bytes, msgspec.Meta(min_length=16)]
    """The new one, as it stands in its file."""


Request = AskStatus | AskCheckpoint | AskStop | AskRebalance | AskMigrate | AskJoin | AskDrain | AskKey
FromOperator = OperatorHello | Request

# ------------------------------------------------------------------------------------------------------------- answers

Decided = Literal[
    "refused",
    "stopping",
    "asked",
    "taken",
    "written",
    "failed",
    "planning",
    "kept",
    "planned",
    "in force",
    "void",
    "joining",
    "joined",
    "draining",
    "drained",
    "offered",
    "retiring",
    "changed",
]
"""What was decided about a request:

- refused: nothing is done;
- stopping: the job ends after the step in hand;
- asked, taken, written: the workers are told, a vote has asked for the checkpoint, it is durable;
- failed: what was begun does not come to its end;
- planning, kept: a layout is planned or looked for, the present one stays;
- joining, joined: a worker's process is started, it is a member;
- draining, drained: a worker is asked to leave, it has left;
- offered, retiring, changed: the new key of the job is good too, it alone is and all are told, all have taken it;
- planned, in force, void: workers are told of a change of the layout, it is in force, it never will be.
"""
FAILURES: frozenset[Decided] = frozenset({"refused", "failed", "void"})
"""What was asked for does not happen."""


class Answer(Message, frozen=True, kw_only=True):
    """What was decided about a request, and why."""

    request: int
    is_last: bool
    decided: Decided
    reason: str
    step: int | None = None
    """The checkpoint's; the first one under a new layout."""
    layout: str | None = None
    """The new one."""
    workers: tuple[int, ...] = ()
    """That join or leave."""
    predicted_step_s: float | None = None
    """Under the new layout, or the best that was found."""
    present_step_s: float | None = None
    """Predicted for the present layout."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member."""

    worker: int
    role: str
    """trains, or idle: a member that runs no micro-batch."""
    stage: int | None
    layers: tuple[int, int] | None
    """[start, stop)."""
    num_microbatches: int
    speed: float
    """That plans count with, at the base level; 1 for one that is as fast as its device should be."""
    level: int
    """Index of its frequency level."""
    step: int | None
    """That it was trying when it was heard last; as all that follows None before the first heartbeat."""
    doing: str | None
    """Such as forward, reduce, vote."""
    waiting_on: tuple[int, ...]
    """The workers whose part it waits for in that, where that is known."""
    last_heartbeat_s: float | None
    """Seconds since its last heartbeat."""
    num_owned_blocks: int | None
    num_followed_blocks: int | None
    device: Gauges | None = None
    """What its device has told of itself last; None: nothing."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the layout in force."""

    layers: tuple[int, int]
    workers: tuple[int, ...]


class CopiesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many live copies of the state there are beside the owners', as the members' last heartbeats say."""

    num_blocks: int
    num_wanted: int
    """Blocks x followers, as far as there are members for them."""
    num_held: int | None
    """None before all members were heard."""


class RecoveryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the job has dealt with."""

    kind: str
    worker: int | None
    step: int
    generation: int
    outcome: str
    total_s: float


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint."""

    step: int
    path: str
    """Relative to the run folder."""
    num_bytes: int


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running job at one instant."""

    state: str
    """starting, training, or where a recovery stands: collecting, rolling back, planning."""
    step: int
    """The newest that is committed; 0 before the first."""
    total_steps: int
    loss: JsonFloat | None
    """Of that step; "nan" and "inf" as in result.json."""
    rate: float | None
    """Per second, in the mean of the last steps."""
    rate_unit: str
    step_s: float | None
    """Seconds of a step, in the mean of the last ones."""
    predicted_step_s: float | None
    """What the planner predicts for the layout in force."""
    left_s: float | None
    """Until the last step, at this pace."""
    layout: str
    stages: list[StageStatus]
    num_microbatches: int
    generation: int
    term: int
    """Number of the coordinator."""
    workers: list[WorkerStatus]
    copies: CopiesStatus
    num_recoveries: int
    recoveries: list[RecoveryStatus]
    """The newest ones."""
    checkpoints: list[CheckpointStatus]
    """Durable and not pruned, of this process."""
    writing: list[int]
    """Steps whose checkpoints are being written or committed."""
    under_way: list[str]
    """What is planned or asked for and not done yet; nothing: empty."""


class StatusAnswer(Message, frozen=True, kw_only=True):
    """To `AskStatus`."""

    request: int
    status: JobStatus


class TurnedAway(Message, frozen=True, kw_only=True):
    """This operator is not served."""

    reason: str


class JobOver(Message, frozen=True, kw_only=True):
    """The job has ended; nothing more is answered."""

    outcome: str
    """finished, stopped or failed."""
    reason: str


ToOperator = Answer | StatusAnswer | TurnedAway | JobOver
