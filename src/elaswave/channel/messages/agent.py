"""What an agent (the process beside a host's workers, which has a terminal) and the coordinator say to each other."""

from typing import Any, Literal

from elaswave.channel.messages.operator import FromOperator
from elaswave.channel.messages.worker import FromWorker, KeysNow, Message
from elaswave.job.plan import StartingPoint
from elaswave.protocol.membership.effects import EndJoiner, SpawnJoiner

Verdict = Literal["misused", "needless", "again"]
"""Why an agent may not take part: a person's mistake; the node has another one; or it is too late for this one, and a
later one may."""


class AskJob(Message, frozen=True, kw_only=True):
    """An agent wants to take part, and asks what is trained; the answer is a `JobSpec` or a `AgentRefused`."""

    job: str
    node: str
    incarnation: int
    config_digest: str
    """Of the configuration that it was given; empty: of none."""


class JobSpec(Message, frozen=True, kw_only=True):
    """What an agent has to know before it can start anything."""

    job: str
    config: dict[str, Any]
    """The resolved configuration: values by key, by section."""
    config_digest: str
    host: str
    """Where the coordinator runs, for people."""
    run_dir: str
    mark: str
    """What stands in `agents.json` in the folder of checkpoints: who reads the same there has the same folder."""
    data: dict[str, Any]
    """What is known of the data there; see `elaswave.data.fingerprint`."""
    faults: list[str]
    profile: bool
    checkpoint: StartingPoint | None
    """Where the job has begun; None: at the seed."""
    job_generation: int
    """Which job generation this is, see `elaswave.protocol.leadership.store_position.StorePosition`."""
    keys: tuple[bytes, ...] = ()
    """As of `KeysNow`; none: the job's key is the one that it began with."""


class AgentRefused(Message, frozen=True, kw_only=True):
    """An agent may not take part."""

    reason: str
    verdict: Verdict


class Exited(Message, frozen=True, kw_only=True):
    """A worker's process has ended."""

    worker: int
    text: str
    """How: "was killed by SIGKILL"."""


class FilesCut(Message, frozen=True, kw_only=True):
    """A process was killed since files that it had mapped have become shorter: whoever reads there next is too."""

    text: str
    """Which process, and which files."""


class CpuTimes(Message, frozen=True, kw_only=True):
    """How the processes get on that `Awaited` asks for."""

    cpu_s: dict[int, float]
    """By worker that is awaited: processor time that its process has used. A lost one is made up for by the next."""
    waited_s: dict[int, float] = {}
    """By worker that is silent: seconds since the message before in which its process has waited for a processor."""


class LogPart(Message, frozen=True, kw_only=True):
    """The next part of a worker's log, of a host whose run folder is not the coordinator's."""

    worker: int
    text: str


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

    node: str
    """Its host's name."""
    incarnation: int
    """Drawn when it was started."""
    slots: int
    """Workers that may run there; 0: as many as are asked for."""
    exited: list[Exited]
    stop: bool
    """Whether the user wants the job to end; an earlier coordinator may have learned it and died before telling any
    member."""
    called_step: int = 0
    """The newest step that a script's callbacks were called for: of later ones that are committed already, the agent
    is told again."""
    folder: str = ""
    """The mark of its run folder, as `JobSpec.mark`: where it is not the coordinator's own, the logs of its workers are
    wanted."""
    leaving_s: float | None = None
    """Seconds within which its workers are to leave, if it has had a notice."""


class AgentLeaving(Message, frozen=True, kw_only=True):
    """The agent has had a notice: its host will be taken away, and its workers are to leave."""

    left_s: float
    """Seconds that they have."""


class TermTaken(Message, frozen=True, kw_only=True):
    """Said to a coordinator that may not know it: its agent's one has the job now."""

    term: int
    proof: bytes
    """See `elaswave.store.seal.proof_of_term`."""


class AgentKeysTaken(Message, frozen=True, kw_only=True):
    """An agent goes by the secrets of a `KeysNow`, and so do all processes that it has forked from now on."""

    ring: bytes
    """As of `KeysTaken`; empty: it cannot."""
    problem: str = ""
    """Why not."""


class Awaited(Message, frozen=True, kw_only=True):
    """Until it is said otherwise, say how the processes of some workers get on."""

    workers: tuple[int, ...]
    """These have not registered."""
    silent: tuple[int, ...] = ()
    """These have been silent for a while: whether they wait for a processor has to be known quickly."""


class SendLogs(Message, frozen=True, kw_only=True):
    """From now on send what workers print: the coordinator has another run folder."""


class CommitCheckpoint(Message, frozen=True, kw_only=True):
    """Have a checkpoint committed, by a process that has torch; the coordinator has none."""

    number: int
    """Of the request; said again when the agent has connected again."""
    request: bytes
    """An encoded `elaswave.launcher.forkserver.messages.CommitRequest`."""


class BreakOffCommit(Message, frozen=True, kw_only=True):
    """Have the commit ended that takes too long; the answer is a `CheckpointCommitted` all the same."""

    number: int


class SpawnFirst(Message, frozen=True, kw_only=True):
    """Start the workers with which the job begins on this host. Said again on every connection; those that were started
    before are ignored."""

    workers: tuple[int, ...]
    checkpoint: StartingPoint | None
    """Where they begin; None: at the seed."""


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
    generation: int
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
    again: bool = False
    """Whether the job may be tried again as it is: too few hosts have come, or its store cannot be reached."""


FromAgent = (
    AskJob
    | AgentHello
    | AgentLeaving
    | FilesCut
    | Exited
    | StopJob
    | CpuTimes
    | LogPart
    | CheckpointCommitted
    | TermTaken
    | AgentKeysTaken
)
ToAgent = (
    JobSpec
    | AgentRefused
    | Awaited
    | SendLogs
    | CommitCheckpoint
    | BreakOffCommit
    | SpawnFirst
    | SpawnJoiner
    | StopAsked
    | EndJoiner
    | ShowStep
    | StepLosses
    | ShowEvaluation
    | ShowText
    | KeysNow
    | Ended
)
ToCoordinator = FromWorker | FromAgent | FromOperator
