"""What a worker and the coordinator say to each other beside the protocol's core messages: plain typed data.

What a worker says must survive the coordinator's death. Durable messages (`StepReport`, `EvaluationReport`,
`Installed`, `Failed`) are kept by its control client until the coordinator has handled them, and the coordinator makes
durable what a successor needs of them. Standing facts (`Ready`, `LinkLost`, `Leaving`, `ShardWritten`, `ShardFailed`,
`Finished`) are said again on every new connection, see `protocol.facts`. The coordinator takes a message that it has
seen before as a repetition.
"""

from typing import Annotated

import msgspec

from elaswave.checkpoints.format import WrittenItem
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.protocol.messages import (
    CoreToWorker,
    Installed,
    Joining,
    Linked,
    Paused,
    Registered,
    Report,
    Unsound,
)
from elaswave.types import Gauges


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Start(Message, frozen=True, kw_only=True):
    """All workers listen: connect and train."""

    addresses: dict[int, str]


class Ready(Message, frozen=True, kw_only=True):
    """A worker is connected, holds its state and begins the first step."""

    worker: int
    environment: str = ""
    """Processor and kernels, for people; empty where bits are not compared."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """A worker's process is alive; where its main thread is."""

    worker: int
    generation: int
    step: int
    attempt: int
    label: str
    computing: bool
    waiting_on: tuple[int, ...]
    since_s: float
    """Seconds in this position."""
    num_owned: int = 0
    """Blocks that it owned when its newest step began."""
    num_followed: int = 0
    moved_bytes: int = 0
    starved_s: float = 0.0
    first_s: float = 0.0
    """All as of `Position`."""


class LinkLost(Message, frozen=True, kw_only=True):
    """The data-plane link to a peer has ended."""

    worker: int
    peer: int
    generation: int
    detail: str


class Unreached(Message, frozen=True, kw_only=True):
    """A worker dials others, and nobody answers at their addresses as they. Said again while it lasts; the newest one
    counts."""

    worker: int
    peers: dict[int, str]
    """Those -> where it dials, and what it sees there."""


class StepReport(Message, frozen=True, kw_only=True):
    """A committed step. Sent by the member with the lowest id; after a loss the next one sends what may be missing."""

    worker: int
    generation: int
    step: int
    attempt: int
    loss: float
    norm: float
    learning_rate: float
    duration_s: float
    phases_s: dict[str, float]
    vector: bytes
    """The merged vote: evidence that the step is committed."""
    change: int
    """Number of the planned change of layout that is in force after the step."""
    checkpoint: int
    """The newest committed step whose vote asked for a durable checkpoint; 0 for none."""
    retries: list[str]
    """Why earlier attempts of the step did not commit."""
    skipped: str | None = None
    """Why the step was committed without an update."""
    skipped_microbatch: int | None = None
    skipped_layer: str | None = None
    metrics: dict[str, float] = {}
    """By name, auxiliary losses among them."""
    num_in_place: int = 0
    """Copies that are where a change will have them which is not in force yet."""
    num_moving: int = 0
    """Copies that it asks for; 0 if blocks do not move."""
    ago_s: float = 0.0
    """Seconds from the end of the step until this was said. What passes from then until it is sent the frame tells."""


class Timings(Message, frozen=True, kw_only=True):
    """What a worker has measured lately. Sent now and then; a lost one is made up for by the next."""

    worker: int
    generation: int
    step: int
    """The newest step that is in it."""
    level: int
    """Index of the frequency level at which the device ran."""
    actions: list[ActionTiming]
    run_s: float = 0.0
    """Median of its RUN phases since it told so last; 0 if it had none."""
    data_wait_s: float = 0.0
    """Seconds that it has waited for micro-batches since it told so last."""
    elapsed_s: float = 0.0
    """Seconds since then."""
    device: Gauges | None = None
    """What its device tells of itself now; None: nothing."""


class Leaving(Message, frozen=True, kw_only=True):
    """A worker has had a notice that its machine will be taken away. Until it is told to end it goes on training."""

    worker: int
    left_s: float
    """Seconds from when this is said until the machine is gone."""


class EvaluationReport(Message, frozen=True, kw_only=True):
    """An evaluation has been made. Sent by the member with the lowest id."""

    worker: int
    step: int
    loss: float
    num_tokens: int | None
    """None for a script's own model."""
    duration_s: float
    metrics: dict[str, float] = {}
    """By name."""


class TrainingStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stands after a step; equal on all workers."""

    generation: int
    step: int
    num_updates: int
    exponents: list[int]
    """Grid exponents, one per tensor."""
    calibrated: bool
    optimizer: str = ""
    """What an optimizer of a script keeps beside the tensors' states, see `Updater.state`."""


class ShardWritten(Message, frozen=True, kw_only=True):
    """A worker's part of a durable checkpoint is on the disk."""

    worker: int
    standing: TrainingStanding
    items: list[WrittenItem]


class ShardFailed(Message, frozen=True, kw_only=True):
    """A worker could not write its part of a durable checkpoint; training goes on."""

    worker: int
    generation: int
    step: int
    reason: str
    again: bool = False
    """It tries again for a while, since there is no later checkpoint; says so once."""


class Settled(Message, frozen=True, kw_only=True):
    """The checkpoint of a step is durable, or given up: a worker need not say again what became of its part."""

    step: int


class TakeCheckpoint(Message, frozen=True, kw_only=True):
    """Ask in the votes for a durable checkpoint, until one that has asked for it commits a step later than `after`. It
    may come twice, and late."""

    generation: int
    """The coordinator's. Steps of an older generation, which a rollback may have made void, are no answer."""
    after: int


class Stop(Message, frozen=True, kw_only=True):
    """End, with a durable checkpoint, after the step whose vote carries it."""


class Finished(Message, frozen=True, kw_only=True):
    """A worker has made its last step and written its last checkpoint."""

    worker: int
    standing: TrainingStanding
    stopped: bool
    """Whether it was asked to stop before the run's last step."""
    owner_digests: dict[str, int]
    """Parts of the digests per tensor and slot, from the blocks that it owns."""
    followed_digests: dict[str, int]
    """The same from the blocks that it owns, each as often as it has followers in the placement in force: what the
    digests of its followers must add up to. Their number differs while blocks are copied."""
    follower_digests: dict[str, int]
    """The same from the blocks that it follows in that placement."""
    optimizer_bytes: int
    peak_bytes: int
    bytes_sent: int
    data_wait_s: float = 0.0
    """Seconds that it has waited for micro-batches of training."""
    fence_bypasses: dict[str, int] = {}
    """Tensors that it has let pass a fence as they were, since they were not finite, by fence and direction."""


class Exit(Message, frozen=True, kw_only=True):
    """All workers have finished; a worker may end."""


class Failed(Message, frozen=True, kw_only=True):
    """A worker has ended with an error of its own."""

    worker: int
    kind: str
    """Class name of the error."""
    signature: str
    """Equal for the same error at the same step and micro-batch."""
    summary: str
    """One line with the step, micro-batch and layer where known."""
    traceback_text: str
    is_common: bool = False
    """Whether a vote has shown it, so that every member comes to it."""
    is_wrong: bool = False
    """Whether what it has computed of the step may be wrong: a check has found other bits."""


class KeysNow(Message, frozen=True, kw_only=True):
    """To workers and agents: which secrets count from now on among those who take part. Said on each connection once
    the job's key is, or was, changed; the answer is a `KeysTaken` or an `AgentKeysTaken`."""

    keys: Annotated[tuple[Annotated[bytes, msgspec.Meta(min_length=16)], ...], msgspec.Meta(min_length=1)]
    """Made of the job's keys for this purpose; the preferred one first. See
    `elaswave.protocol.coordinator.key_change`."""


class KeysTaken(Message, frozen=True, kw_only=True):
    """A worker goes by these secrets."""

    worker: int
    ring: bytes
    """Their `elaswave.transport.handshake.Secrets.name`."""


FromWorker = (
    Joining
    | Registered
    | Report
    | Installed
    | Ready
    | Heartbeat
    | LinkLost
    | Unreached
    | Leaving
    | Linked
    | Paused
    | Unsound
    | StepReport
    | Timings
    | EvaluationReport
    | ShardWritten
    | ShardFailed
    | Finished
    | Failed
    | KeysTaken
)
ToWorker = Start | Settled | TakeCheckpoint | Stop | Exit | KeysNow | CoreToWorker
