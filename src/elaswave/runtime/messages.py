"""What a worker and the coordinator say to each other: plain typed data, never pickled."""

import msgspec

from elaswave.state.checkpoint_format import WrittenItem


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, frozen=True, kw_only=True):
    """A worker listens and can be connected to."""

    worker: int
    address: str


class Start(Message, frozen=True, kw_only=True):
    """Everybody listens: connect and train."""

    addresses: dict[int, str]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker holds, in elements."""

    num_parameters: int
    num_owned_blocks: int
    num_owned_parameters: int
    num_followed_blocks: int
    num_followed_parameters: int


class Ready(Message, frozen=True, kw_only=True):
    """A worker is connected, holds its state and begins the first step."""

    worker: int
    holding: Holding


class StepReport(Message, frozen=True, kw_only=True):
    """A worker has finished a committed step."""

    worker: int
    step: int
    attempt: int
    loss: float
    norm: float
    learning_rate: float
    duration_s: float
    phases_s: dict[str, float]
    retries: list[str]
    """Why earlier attempts of the step did not commit."""
    skipped: str | None = None
    """Why the step was committed without an update."""
    skipped_microbatch: int | None = None
    skipped_layer: str | None = None


class EvaluationReport(Message, frozen=True, kw_only=True):
    """A worker has finished an evaluation."""

    worker: int
    step: int
    loss: float
    num_tokens: int
    duration_s: float


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stands after a step; equal on all workers."""

    step: int
    num_updates: int
    exponents: list[int]
    """Grid exponents, one per tensor."""
    calibrated: bool


class ShardWritten(Message, frozen=True, kw_only=True):
    """A worker's part of a durable checkpoint is on the disk."""

    worker: int
    standing: Standing
    items: list[WrittenItem]


class ShardFailed(Message, frozen=True, kw_only=True):
    """A worker could not write its part of a durable checkpoint; training goes on."""

    worker: int
    step: int
    reason: str


class Stop(Message, frozen=True, kw_only=True):
    """End after the step whose vote carries it, with or without a durable checkpoint."""

    checkpoint: bool


class Finished(Message, frozen=True, kw_only=True):
    """A worker has made its last step and written its last checkpoint."""

    worker: int
    standing: Standing
    owner_digests: dict[str, int]
    """Parts of the digests per tensor and slot, from the blocks that it owns."""
    follower_digests: dict[str, int]
    """The same from the blocks that it follows (with one follower per block, together the whole)."""
    optimizer_bytes: int
    peak_bytes: int
    bytes_sent: int


class Exit(Message, frozen=True, kw_only=True):
    """Everybody has finished; a worker may end."""


class Failed(Message, frozen=True, kw_only=True):
    """A worker has ended with an error."""

    worker: int
    kind: str
    """Class name of the error."""
    summary: str
    """One line with the step, micro-batch and layer where known."""
    traceback_text: str
    lost_peer: int | None = None
    """Set where the error is only the consequence of another worker's end."""


FromWorker = Hello | Ready | StepReport | EvaluationReport | ShardWritten | ShardFailed | Finished | Failed
ToWorker = Start | Stop | Exit
