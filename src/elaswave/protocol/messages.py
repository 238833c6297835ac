"""What coordinator and workers say to each other about membership and commits. Plain typed data.

Every message carries a generation; a receiver of one of an unexpected generation drops it or answers with its own
generation. Coordinators carry a term, which grows with every start of one.
"""

from typing import NamedTuple

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.protocol.step.salvage import Partial
from elaswave.types import ExecutionParameters, Layout

PROTOCOL_VERSION = 12
"""Both ends of a control connection must have the same."""
FIRST_GENERATION = 1
"""In which a job begins."""


class InForce(NamedTuple):
    """By what the members train."""

    layout: Layout
    placement: Placement
    """Owners; followers that were missing may have been added since."""
    execution: ExecutionParameters = ExecutionParameters()
    change: int = 0
    """The number of the planned change that all this is of; 0 for none."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A completed vote, as a worker that learned its result can pass it on."""

    step: int
    attempt: int
    commits: bool
    """Whether the vote committed the step (else it asked for another attempt, with grids that the vector tells)."""
    vector: bytes
    """The whole merged vote, as bytes: norm, losses, maxima, layout; enough to apply the step without having voted."""
    change: int = 0
    """Number of the planned change of layout that is in force after this vote; 0 for none since the start."""
    checkpoint: int = 0
    """The newest committed step whose vote, this one or an earlier one, asked for a durable checkpoint; 0 for none."""

    @property
    def order(self) -> tuple[int, int]:
        """Votes are ordered by this."""
        return (self.step, self.attempt)

    @property
    def committed_step(self) -> int:
        """The newest step that this vote proves committed: a vote on a step proves the step before it."""
        return self.step if self.commits else self.step - 1


class BlockReplicas(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks that a worker holds, three lists of equal length."""

    blocks: list[int]
    owned: list[bool]
    versions: list[int]
    """The last step applied to each."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A worker's answer to `Prepare`. It is a promise: the worker has left the old generation's data plane before it
    sends this, can learn nothing more of it, and discards nothing until the decision."""

    worker: int
    generation: int
    """The generation that is being answered."""
    evidence: Evidence | None
    """The newest completed vote that this worker knows, of any generation."""
    step: int
    attempt: int
    """What it was trying."""
    prepared: bool
    """Whether it holds every gradient it needs to apply that step."""
    parameters_step: int
    """The step up to which all parameters of its layers are complete; -1 while it has none."""
    layers: tuple[int, int]
    """The layers [start, stop) whose parameters it has."""
    copies: BlockReplicas
    decided: int = 0
    """The generation of the newest decision that it has taken; 0 for none."""
    partial: Partial | None = None
    """What it has of the step that it was trying."""
    wrong: tuple[tuple[int, int], ...] = ()
    """(block, worker) of copies that are known to be wrong, whoever holds them."""
    proven: int | None = None
    """If copies or parameters are wrong, the newest step of which a checkpoint can be trusted. Then the parameters of
    all workers are sent again."""
    progress: "Progress | None" = None
    """Where training stands, if `Prepare.with_progress` asks for it and this worker knows."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker without state needs to know of the steps that have been made, beside the blocks."""

    num_updates: int
    exponents: tuple[int, ...]
    """Of the grids, by tensor."""
    calibrated: bool
    exact: bool
    determinism_hashes: dict[int, int]
    """That all workers have agreed on in votes, by place."""
    engine: str
    """What the engine keeps once, as it says it itself."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """A new generation begins: leave the old one, report, and wait for the decision."""

    term: int
    generation: int
    members: tuple[int, ...]
    """Workers of the new generation; all others are fenced off."""
    lost: tuple[int, ...]
    """Workers that the new generation leaves behind."""
    reason: str
    with_progress: bool = False
    """Whether a member has no state yet, so that the reports are to tell where training stands."""


class LayoutChange(msgspec.Struct, frozen=True, kw_only=True, tag="change"):
    """A planned change of layout and placement. The planner makes it; the coordinator numbers it, persists it, and only
    then sends it.

    A worker that holds it says so in its vote. The first vote that commits a step and in which all workers hold it
    adopts it: from then on blocks move to those that will hold them. The first that also proves all of them in their
    places brings it into force: the step's GATHER already runs under it.
    """

    term: int = 0
    """Of the coordinator that has numbered it; 0: none has."""
    generation: int
    """It is void in any other."""
    number: int = 0
    """Grows over the whole job; the newest one that a worker holds counts. 0: the coordinator has not numbered it."""
    layout: Layout
    """Of exactly the members of the generation."""
    placement: Placement
    """Who holds what from then on."""
    execution: ExecutionParameters
    reason: str
    predicted_step_s: float | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True, tag="decision"):
    """What all members of a generation do next. Persisted before it is sent."""

    term: int
    generation: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Workers lost since the last decision."""
    evidence: Evidence | None
    """The newest vote that a member or the coordinator knows; members that have not seen it act on it now."""
    resume_step: int
    """The step to run next."""
    resume_attempt: int
    """The number of its next attempt, larger than every earlier one."""
    layout: Layout
    placement: Placement
    deliver: tuple[tuple[int, int], ...]
    """(worker, layer): parameters that must be sent before any worker computes."""
    rollback: int | None
    """The checkpoint's step, if all members start over from it; None if no state was lost."""
    evaluate: bool
    """The evaluation of the step before `resume_step` is still to be made."""
    checkpoint: bool
    """The checkpoint of the step before `resume_step` is still to be written."""
    published: int
    """The newest step whose loss the coordinator has; a member that knows later ones sends them again."""
    promoted: int
    """Number of blocks that got a new owner."""
    reason: str
    change: int = 0
    """Number of the newest planned change that the layout follows from. Later ones of older generations are void."""
    execution: ExecutionParameters = ExecutionParameters()
    plan: str = ""
    """Why this layout, if a policy other than ElasWave's has chosen it."""
    kept: tuple[Partial, ...] = ()
    """What members keep of `resume_step` (S3)."""
    num_microbatches_recomputed: int = 0
    """Micro-batches of `resume_step` of which a layer that had run runs again (S6)."""
    joined: tuple[int, ...] = ()
    """Members since this generation; they run and hold nothing yet."""
    left: tuple[int, ...] = ()
    """Workers that have left on request with this generation."""
    progress: Progress | None = None
    """For members that have no state yet."""


class Dial(msgspec.Struct, frozen=True, kw_only=True, tag="dial"):
    """Have links to these peers, beside those to the members; made in the background."""

    term: int
    generation: int
    addresses: dict[int, str]
    """Peer -> where its data plane listens; of all that are wanted from now on."""


class AskPause(msgspec.Struct, frozen=True, kw_only=True, tag="ask pause"):
    """Ask in the next vote for a pause: the membership is about to change at a boundary between two steps."""

    term: int
    generation: int
    """It is void in any other."""


class GoOn(msgspec.Struct, frozen=True, kw_only=True, tag="go on"):
    """The membership stays as it is: do not pause, or pause no longer."""

    term: int
    generation: int


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """To a worker that has left on request: nothing of it is needed any more."""

    term: int
    generation: int
    reason: str


class Linked(msgspec.Struct, frozen=True, kw_only=True, tag="linked"):
    """A worker has links to these of the peers that it is to be linked to (`Dial`)."""

    worker: int
    peers: tuple[int, ...]


class Paused(msgspec.Struct, frozen=True, kw_only=True, tag="paused"):
    """A worker waits before its next step, as a vote has asked for, with the duties of the last one done."""

    worker: int
    generation: int
    step: int
    """The last one that is made."""
    is_over: bool = False
    """Whether it was let go on since, perhaps by an earlier coordinator, who may not have told the others."""


class Unsound(msgspec.Struct, frozen=True, kw_only=True, tag="unsound"):
    """A worker waits for a new generation: copies of the state are wrong, and its report will say what it lacks."""

    worker: int
    generation: int
    step: int
    """That it was trying, or that it has made last."""
    reason: str
    """What is wrong, for people."""


class FencedOff(msgspec.Struct, frozen=True, kw_only=True, tag="fenced off"):
    """To a worker that is no member any more: it must end itself and change nothing."""

    term: int
    generation: int
    reason: str


class Registered(msgspec.Struct, frozen=True, kw_only=True, tag="registered"):
    """The first thing that a worker says on a new control connection."""

    worker: int
    address: str
    """Where its data plane listens."""
    generation: int
    """The generation it is in; that of its last report if it waits for a decision."""
    report: Report | None
    """Its last report, if it waits for a decision."""


class Installed(msgspec.Struct, frozen=True, kw_only=True, tag="installed"):
    """A worker has installed a decision and computes again."""

    worker: int
    generation: int
    edit_s: float
    """Seconds for moving to the new generation and making missing links."""
    promote_s: float
    """Seconds for catching up, changing roles and building the new program."""
    critical_bytes: int
    """Bytes of state that it received before it could go on, the step's own gather not counted."""


class Joining(msgspec.Struct, frozen=True, kw_only=True, tag="joining"):
    """The first thing that a worker says that is no member yet; said again on every new connection until it is one."""

    worker: int
    address: str
    """Where its data plane listens."""
    protocol: int
    """Its `PROTOCOL_VERSION`."""
    libraries: str
    """Their versions, for people: `elaswave.protocol.membership.admissions.libraries`."""
    environment: str
    """Processor and kernels, for people; empty where bits are not compared (elastic.verify)."""
    config_hash: int
    model_hash: int
    """Of the shapes of model and optimizer."""
    data_hash: int
    domain: str = ""
    """Where it runs, see `elaswave.blocks.domains`; empty: it cannot say."""
    foreign: tuple[str, ...] = ()
    """``LAYER: KIND`` of each foreign part, as its server is there (`Config.model.foreign`)."""
    determinism_hashes: dict[int, int]
    """By place, see `elaswave.protocol.step.ballot`: of the environment, and of the first layer of each kind. None
    where foreign parts are of other kinds."""


CoreToWorker = Prepare | Decision | FencedOff | LayoutChange | Dial | AskPause | GoOn | Released
