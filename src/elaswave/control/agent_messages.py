"""What an agent (the process beside the workers, which has the terminal) and the coordinator say to each other."""

from elaswave.control.operator_messages import FromOperator
from elaswave.worker.messages import FromWorker, Message


class Exited(Message, frozen=True, kw_only=True):
    """A worker's process has ended."""

    worker: int
    text: str
    """How: "was killed by SIGKILL"."""


class CpuTimes(Message, frozen=True, kw_only=True):
    """How the processes get on that `Awaited` asks for. A lost one is made up for by the next."""

    cpu_s: dict[int, float]
    """By worker: processor time that its process has used."""


class StopJob(Message, frozen=True, kw_only=True):
    """A person wants the job to end after the step in hand, with a checkpoint of it."""


class CheckpointCommitted(Message, frozen=True, kw_only=True):
    """What became of the commit that `CommitCheckpoint` asks for."""

    number: int
    error: str | None
    """None: the checkpoint is durable. Else why it is not."""
    again: bool
    """Whether it is worth another try: not the checkpoint, but the process that committed it was to blame."""


class AgentHello(Message, frozen=True, kw_only=True):
    """The agent has connected; what every coordinator must know, the first as well as its successors."""

    exited: list[Exited]
    stop: bool
    """Whether the user wants the job to end; an earlier coordinator may have learned it and died before telling any
    member."""
    called_step: int = 0
    """The newest step that a script's callbacks were called for: of later ones that are committed already, the agent
    is told again."""


class EndJoiner(Message, frozen=True, kw_only=True):
    """A joiner that does not get on is to be killed, so that its place is free again."""

    worker: int


class Awaited(Message, frozen=True, kw_only=True):
    """These workers have not registered: until it is said otherwise, say how their processes get on."""

    workers: tuple[int, ...]


class CommitCheckpoint(Message, frozen=True, kw_only=True):
    """Have a checkpoint committed, by a process that has torch; the coordinator has none."""

    number: int
    """Of the request; said again when the agent has connected again."""
    request: bytes
    """An encoded `elaswave.control.template_messages.CommitRequest`."""


class BreakOffCommit(Message, frozen=True, kw_only=True):
    """Have the commit ended that takes too long; the answer is a `CheckpointCommitted` all the same."""

    number: int


class SpawnJoiner(Message, frozen=True, kw_only=True):
    """Start a worker that joins. Said again by every later coordinator; ids that were started before are ignored."""

    worker: int


class StopAsked(Message, frozen=True, kw_only=True):
    """The job is to end, with a checkpoint, though the agent has had no signal: it deals with it as with one."""

    cause: str
    """Why, for people."""


class ShowStep(Message, frozen=True, kw_only=True):
    """For the terminal: a committed step."""

    step: int
    total_steps: int
    loss: float
    rate: float
    """Of the last steps, per second: tokens, or samples of a script's own model."""
    counts_samples: bool
    data_pass: int
    epoch: int
    layout_name: str
    metrics: dict[str, float] = {}
    """By name."""


class StepLosses(Message, frozen=True, kw_only=True):
    """Committed steps that an agent may not have been shown."""

    first_step: int
    losses: list[float]
    metrics: list[dict[str, float]] = []
    """Of each of them, by name."""


class ShowEvaluation(Message, frozen=True, kw_only=True):
    """For the terminal: a validation loss."""

    step: int
    loss: float


class ShowText(Message, frozen=True, kw_only=True):
    """For the terminal: a line."""

    text: str
    is_error: bool = False


class Ended(Message, frozen=True, kw_only=True):
    """The job is over; the agent ends the processes that are left."""

    outcome: str
    """finished, stopped or failed."""
    reason: str = ""
    worker: int | None = None
    """The worker whose own error it is."""
    traceback_text: str = ""
    is_state_error: bool = False
    """Whether the state contradicts itself (a defect, or broken hardware)."""
    lost: list[int] = []
    """Workers that are no members, any more or yet: whatever they still do counts for nothing."""


FromAgent = AgentHello | Exited | StopJob | CpuTimes | CheckpointCommitted
ToAgent = (
    Awaited
    | CommitCheckpoint
    | BreakOffCommit
    | SpawnJoiner
    | StopAsked
    | EndJoiner
    | ShowStep
    | StepLosses
    | ShowEvaluation
    | ShowText
    | Ended
)
ToCoordinator = FromWorker | FromAgent | FromOperator
