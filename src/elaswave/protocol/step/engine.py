"""What the worker machine stands on (`Ports`): an engine that has the numbers, links to the other workers, and the way
to the coordinator. The product has them with torch and sockets, the simulator with whole numbers on virtual time.

Engine and links never see each other, and neither decides an order: that is the machine's (`protocol.step`).
What travels is opaque to the machine; so are the places where it arrives.

Rules that the two sides keep:

- `Engine` and `Links` may raise an interrupt or the loss of a peer out of any call. Such an exception ends the
  machine's generator where it stands. So nothing that must survive it is kept in local variables, and where state
  changes that belongs together (a vote is learned) nothing can raise in between.
- `Links` stamps the generation. `Links.post` names memory before its frame can arrive; a frame that was posted for
  lands there by itself, others are handed over by `Links.take`.
- What was given to `Links.send` must not change until `SENT` has passed.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from elaswave.blocks.placement import Block, Placement, ReplicaRole
from elaswave.blocks.shapes import WIDE_BITS
from elaswave.protocol.messages import Decision, Evidence
from elaswave.protocol.step.ballot import BufferTensor, Environment, GridState, NonFinite, Request, Scores
from elaswave.protocol.step.salvage import AccumulatedUnits, InFlightMicrobatch, Keep
from elaswave.types import Action, ExecutionParameters, Layout, Program

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Hashes = Sequence[int] | npt.NDArray[np.uint64]
    """64 bits each, one of each copy or block that was asked for."""


class FrameKind(IntEnum):
    """First field of every frame's tag, one number per purpose; the comment gives the meaning of the last two."""

    ACTIVATION = 1  # micro-batch, stage of the receiver
    GRADIENT = 2  # micro-batch, stage of the receiver
    PARTIAL_SUM = 3  # layer, 0
    REDUCED = 4  # layer, 0
    VOTE = 5  # 0, turn of the all-reduce
    PARAMETERS = 6  # layer, 0
    DIAGNOSIS = 7  # part of the certificate, turn of the all-reduce
    EVALUATION = 8  # micro-batch, stage of the receiver
    EVALUATION_LOSS = 9  # 0, turn of the all-reduce
    BASE_COPY = 10  # block, 0
    DELIVERY = 11  # layer, 0
    CONSTANTS = 12  # layer, 0


class Key(NamedTuple):
    """Name of a frame: to a peer when it is sent, from a peer when it is waited for."""

    kind: FrameKind
    step: int
    attempt: int
    a: int
    b: int
    peer: int


class Pause(Enum):
    """What a machine's generator yields beside keys."""

    MOMENT = "moment"
    """It goes on at once; a place at which bytes move, and at which it can be interrupted."""
    SENT = "sent"
    """Until all that it has sent has left, and its memory may change."""
    DISK = "disk"
    """Until the part of a checkpoint that is being written is on the disk."""


Wait = tuple[Key, ...] | Pause
"""What a machine's generator yields: frames that must be here before it goes on, or a `Pause`."""

Phase = Literal["forward", "backward", "reduce", "vote", "apply", "gather"]
"""Named kinds of points inside a step."""
PHASES: tuple[Phase, ...] = ("forward", "backward", "reduce", "vote", "apply", "gather")


class Copy(Protocol):
    """A held copy of a block. Its numbers are the engine's, its role the machine's, which has the version beside it
    (`elaswave.protocol.step.ledger.HeldCopies`)."""

    block: Block
    role: ReplicaRole


C = TypeVar("C", bound=Copy)


class TrainingProgress(NamedTuple):
    """What training has come to; with the blocks, all that decides how it goes on."""

    num_updates: int
    grids: GridState


class Measured(NamedTuple):
    """What a worker's computation of an attempt brings to the ballot."""

    coverage: int
    """Sum of `coverage_key` over all that was added, modulo 2**64."""
    partial_sums: int
    """Words that were added and sent, less those that have come and were made totals of, modulo 2**64."""
    scores: Scores
    maxima: Mapping[int, float]
    """Largest absolute gradient by tensor index."""
    nonfinite: NonFinite | None
    determinism_hashes: Mapping[int, int] = {}
    """What this worker computes with, and what its layers make of made-up numbers, as far as it is known: 62-bit hashes
    by place (`elaswave.protocol.step.ballot`)."""
    writes: Mapping[int, tuple[int, int]] = {}
    """What micro-batches have left in buffers, by tensor index; see `elaswave.protocol.step.ballot.BufferTensor`."""
    duration_us: int = 0
    """Since the attempt began."""


class Unfinished(NamedTuple):
    """What an engine has of a step (S1, S2)."""

    can_be_kept: bool
    """Whether the sums are exact, and all that was added to them was finite."""
    rows: tuple[AccumulatedUnits, ...] = ()
    losses: int = 0
    """Micro-batches whose losses it has, one bit each."""
    in_flight: tuple[InFlightMicrobatch, ...] = ()


class Imbalance(NamedTuple):
    """Where a worker's partial sums are not what they should be; all numbers modulo 2**64."""

    layers: Mapping[int, int]
    """Layer -> words of its partial sum, less what was added to it."""
    blocks: Mapping[int, int]
    """Block -> words that were sent, less those that have come; adds up to 0 over all workers."""
    totals: int
    """What was taken for the totals, less what they are made of."""


class MemoryKind(IntEnum):
    """What of a worker's memory is meant."""

    # No kind is 0: with zeros a worker fills up what it tells of changes (`elaswave.protocol.step.soundness.words_of`).
    WORKING = 1
    """The parameters of a block that RUN reads."""
    COPY = 2
    """The master of a held copy."""
    CONSTANT = 3
    """What no step writes: a layer's frozen parameters, and buffers that are not persistent."""
    MENDED = 4
    """The same, where it was made anew meanwhile."""


class Change(NamedTuple):
    """Memory that is not as it was written."""

    memory: MemoryKind
    place: int
    """The block; of constants, the layer."""
    was: int
    """Its seal: the hash that was taken as it was written, 64 bits."""
    now: int


class Engine(Protocol[C]):
    """The numbers of one worker: layers, sums of gradients, the content of copies."""

    def use_layout(self, layout: Layout, execution: ExecutionParameters, copies: Iterable[C]) -> frozenset[int]:
        """Makes room for exactly the layers of this worker's stage.

        Args:
            layout, execution: in force from now on.
            copies: all that the worker holds; those of a layer that goes must not keep its memory.
        Returns:
            The units that are new here, yet without values.
        """
        ...

    def prepare_layout(self, layout: Layout) -> None:
        """Begins to make room for the layers of a layout that comes into force later; called in every attempt until
        then, so that a little can be done each time. What is not done is `use_layout`'s."""
        ...

    def forget_layout(self) -> None:
        """The layout that was prepared does not come into force."""
        ...

    @property
    def layers(self) -> Iterable[int]:
        """The units that are here: layers, and what they share."""
        ...

    # RUN

    def begin(self, step: int, exponents: Sequence[int], keep: Keep | None = None) -> None:
        """Empties all sums for a new attempt.

        Args:
            exponents: of the grids, by tensor.
            keep: what stays of an earlier attempt, which had the same grids; None: nothing.
        """
        ...

    def run(
        self, action: Action, layers: range, step: int, value: Any, *, first: bool, last: bool, keeps: bool = True
    ) -> Any:
        """Runs an action of a training step and adds the gradients that it makes. Where an earlier attempt was
        interrupted in the midst of it, it goes on from there.

        An interrupt may come out of it after each layer; until then the layer has run, and is not run again.

        Args:
            layers: that it runs.
            value: activation or gradient that came in; None where there is none.
            first, last: whether the micro-batch begins, or ends, in these layers.
            keeps: whether a backward will need what a forward makes.
        Returns:
            What goes on to the next hop, or back to the one before; None where there is none.
        """
        ...

    def output(self, action: Action) -> Any:
        """Returns what an action that was run before has returned. A forward's is kept until its backward begins, a
        backward's until `release`, and all of it at most until `committed`."""
        ...

    def release(self, microbatch: int) -> None:
        """What the backward of a micro-batch has returned is needed no more."""
        ...

    def unfinished(self) -> Unfinished:
        """Returns what there is of the step of the last `begin`."""
        ...

    def evaluate(self, layers: range, step: int, microbatch: int, value: Any, *, first: bool, last: bool) -> Any:
        """Runs layers forward for a validation micro-batch; arguments and result as of `run`."""
        ...

    def scores(self) -> Scores:
        """Losses and metrics of the micro-batches that have ended here since `begin` or `forget_scores`."""
        ...

    def forget_scores(self) -> None:
        """An evaluation begins."""
        ...

    # REDUCE

    def partial_sums(self, layer: int, blocks: Sequence[int]) -> Any:
        """Returns the own partial sums of blocks of a layer, with their coverage, to be sent; called once for each
        frame."""
        ...

    def partial_sums_slot(self, layer: int, peer: int, blocks: Sequence[int]) -> Any:
        """Returns where a peer's partial sums of owned blocks of a layer arrive; `reduce` finds them there."""
        ...

    def reduce(self, layer: int, copies: Sequence[C], peers: Sequence[int]) -> None:
        """Makes the mean gradients of owned copies of a layer from the own partial sums and those of peers."""
        ...

    def gradients(self, copies: Sequence[C]) -> Any:
        """Returns the mean gradients of owned copies, to be sent."""
        ...

    def gradients_slot(self, copies: Sequence[C]) -> Any:
        """Returns where the mean gradients of followed copies arrive."""
        ...

    # VOTE

    def measured(self) -> Measured:
        """Returns what the computation of this attempt brings to the ballot."""
        ...

    def square_sums(self, copies: Sequence[C]) -> Sequence[float]:
        """Computes the sum of squares of each copy's mean gradient; not finite if that is not."""
        ...

    def gradient_hashes(self, copies: Sequence[C]) -> "Hashes":
        """Computes the hash of each copy's mean gradient, 64 bits."""
        ...

    def changes(self, copies: Collection[C], *, given_up: bool) -> Sequence[Change]:
        """Hashes all that RUN reads, and the masters of copies, and compares with what it was as it was written.
        Constants that have changed are made anew here, if that gives what they were.

        Args:
            copies: that this worker holds.
            given_up: also what had changed in layers that were given up since sums were begun that are kept.
        """
        ...

    def parameter_hashes(self, blocks: Sequence[int], copies: Mapping[int, C]) -> "Hashes":
        """Returns the hashes of the parameters of blocks as they were written into the layers here, when `changes` was
        asked last: what has changed since is its own finding.

        Args:
            copies: held ones by block; where the layer is not here, what they would serve counts.
        """
        ...

    def master_hashes(self, copies: Sequence[C]) -> "Hashes":
        """Does the same as `parameter_hashes`, but for the masters of copies."""
        ...

    def state_hashes(self, copies: Sequence[C]) -> "Hashes":
        """Computes for each copy a hash of all its states beside the master, and of their names. All of its 64 bits
        depend on all of these, since it is added to another hash."""
        ...

    def counts(self) -> Mapping[tuple[int, int], int]:
        """Counts how often each (layer, micro-batch) was added in this attempt; for a diagnosis."""
        ...

    def imbalance(self) -> Imbalance:
        """Finds where the partial sums are wrong; for a diagnosis."""
        ...

    def environment(self) -> Environment:
        """Describes what this worker computes with; for a diagnosis."""
        ...

    # APPLY, GATHER, delivery

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """A step is committed, and its APPLY comes next. Said again of the newest step, it changes nothing.

        Args:
            loss: of the step.
            updates: whether it is applied.
        """
        ...

    def batches(self, copies: Sequence[C]) -> Iterable[Sequence[C]]:
        """Groups copies in their order, as `apply` takes them. An interrupt takes effect between two batches, so that a
        batch is bounded: on a host it is one copy."""
        ...

    def apply(
        self,
        copies: Sequence[C],
        step: int,
        norm: float | None,
        scale: float,
        num_updates: int,
        written: Collection[int] = (),
    ) -> None:
        """Applies the mean gradients of a batch of copies and forgets them. An interrupt may come out of it, and then
        none of them has changed.

        Args:
            norm: of the loss's gradients of all blocks, before clipping; None to forget it only.
            scale: makes the mean gradient the loss's; 1 unless the loss has counts.
            num_updates: updates so far, this one included.
            written: tensors that are buffers, and that take the mean itself.
        """
        ...

    def publish(self, copies: Iterable[C]) -> None:
        """Copies the parameters of copies into the layers that are here."""
        ...

    def parameters_of(self, copies: Sequence[C]) -> Any:
        """Returns the parameters of copies, to be sent."""
        ...

    def parameters_slot(self, layer: int, blocks: Sequence[int]) -> Any:
        """Returns where parameters of blocks of a layer arrive: in the layer itself."""
        ...

    def parameters_arrived(self, layer: int, blocks: Sequence[int]) -> None:
        """Parameters of blocks of a layer have arrived in the layer."""
        ...

    def parameter_bytes(self, blocks: Iterable[int]) -> int:
        """Counts the bytes of the parameters of blocks, as they travel."""
        ...

    def constants(self, layer: int) -> Any:
        """Returns what no step writes of a layer that is here, to be sent."""
        ...

    def constants_slot(self, layer: int) -> Any:
        """Returns where another worker's constants arrive; `take_constants` finds them there."""
        ...

    def take_constants(self, layer: int) -> bool:
        """Takes over what has arrived. False: it is not what this worker's were; then nothing is taken over."""
        ...

    # copies

    def empty_copy(self, block: int, num_updates: int) -> C:
        """Makes a copy of a block for a new follower, after so many updates, yet without content."""
        ...

    def state(self, copy: C) -> Any:
        """Returns the whole state of a copy, to be sent."""
        ...

    def state_slot(self, copy: C) -> Any:
        """Returns where the whole state of a copy arrives."""
        ...

    def carried(self) -> str:
        """Returns what this engine keeps once, and not in blocks, of the steps that have been made (options of the
        optimizer that change from step to step)."""
        ...

    def carry_on(self, carried: str, step: int) -> None:
        """Takes over what another engine has kept.

        Args:
            carried: as `carried` says it there.
            step: the newest that is made.
        """
        ...

    def load(self, step: int, layout: Layout, placement: Placement) -> "Loaded[C]":
        """Forgets all and then loads what this worker needs from a durable checkpoint: there need not be room for two
        states. Nobody else refers to copies any more.

        Args:
            step: of the checkpoint; 0 for the beginning, which the seed has.
            layout, placement: to go on with.
        """
        ...


class Loaded(NamedTuple, Generic[C]):
    """What a worker goes on with from a durable checkpoint."""

    copies: dict[int, C]
    """That it holds, by block."""
    progress: TrainingProgress
    num_bytes: int
    """Of layers and copies."""


class Links(Protocol):
    """The data plane of one worker. Nothing here blocks, but for `connect`."""

    def connect(self, layout: Layout, placement: Placement) -> None:
        """Makes the links that a layout and a placement need and that are not there."""
        ...

    def want(self, addresses: Mapping[int, str]) -> None:
        """Makes links to these peers in the background, and gives up others that are wanted and not there."""
        ...

    def has(self, peer: int) -> bool:
        """Tells whether there is a link to a peer."""
        ...

    @property
    def broken(self) -> tuple[int, str] | None:
        """A peer whose link has ended in this generation though frames of it were sent there, and how it ended
        (W11)."""
        ...

    def edit(self, generation: int, members: tuple[int, ...]) -> None:
        """Moves to a newer generation: all that is pending is void, and nothing of the old one can be learned any
        more."""
        ...

    def post(self, key: Key, slot: Any) -> None:
        """Names the memory in which a frame arrives."""
        ...

    def send(self, key: Key, payload: Any) -> None:
        """Begins to send a frame. Sequences of whole numbers travel by kind `VOTE`, `DIAGNOSIS`, `EVALUATION_LOSS`."""
        ...

    def take(self, key: Key) -> Any:
        """Takes a frame that is here: returns what was sent, or None if it has landed where `post` said."""
        ...


class Committed(NamedTuple):
    """A committed step, as one worker knows it; equal on all workers but for the last two."""

    step: int
    attempt: int
    """The number of the attempt that committed."""
    loss: float
    norm: float
    nonfinite: NonFinite | None
    """Why no update was made, or None."""
    request: Request
    evidence: Evidence
    metrics: Mapping[str, float] = {}
    """By name."""
    retries: tuple[str, ...] = ()
    """Why earlier attempts of this worker did not commit."""
    was_run: bool = True
    """Whether this worker ran it to its end; else it learned from a decision that it is committed."""


class Outbox(Protocol):
    """The way to the coordinator. Messages are made here, since the product and the simulator have their own."""

    def send(self, message: Any, *, durable: bool = False) -> object:
        """Sends a message. A durable one is said again until a coordinator has handled it."""
        ...

    def ready(self) -> Any:
        """The worker holds its state, and its first links are there."""
        ...

    def link_lost(self, peer: int, detail: str) -> Any:
        """The link to a peer has ended."""
        ...

    def committed(self, committed: Committed) -> Any:
        """A step is committed."""
        ...

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float]) -> Any:
        """An evaluation has been made."""
        ...

    def installed(self, received_bytes: int) -> Any:
        """A decision is installed.

        Args:
            received_bytes: state that came in before this worker could go on, the step's own gather not counted.
        """
        ...

    def finished(self, stopped: bool) -> Any:
        """All steps are made.

        Args:
            stopped: whether the job was asked to stop before its last step.
        """
        ...

    def request(self) -> Request:
        """Returns what the coordinator has told this worker to ask for."""
        ...


class Disk(Protocol):
    """Writes the worker's part of durable checkpoints in the background, one at a time."""

    @property
    def is_busy(self) -> bool:
        """Whether a part is still being written."""
        ...

    def is_due(self) -> bool:
        """Tells whether a durable checkpoint is due by this worker's clock."""
        ...

    def restart_clock(self) -> None:
        """A checkpoint has been noted: the clock of `is_due` begins anew."""
        ...

    def write(self, step: int) -> None:
        """Begins to write the owned copies as they are now. Once they are written, or could not be, a message about it
        is given to `WorkerMachine.wrote`."""
        ...


class StepObserver:
    """Is told what the machine does; decides nothing. Every call may be ignored."""

    def step_begins(self, step: int, attempt: int) -> None:
        """Notes that the next step begins, at its first attempt here."""

    def evaluation_begins(self) -> None:
        """An evaluation begins."""

    def began(self) -> None:
        """An attempt begins."""

    def doing(self, label: str, *, computing: bool) -> None:
        """The worker computes, or waits for others, in what is called `label`."""

    def acting(self, action: Action) -> None:
        """An action of the program is next."""

    def computing(self, action: Action) -> None:
        """What it needs is here."""

    def acted(self, action: Action) -> None:
        """It is done, and its output is on its way."""

    def point(self, phase: Phase) -> None:
        """Runs just before the next action of a phase: faults and tests strike here."""

    def enter(self, phase: str) -> None:
        """One of run, reduce, vote, apply, gather begins."""

    def leave(self, phase: str) -> None:
        """It has ended, undisturbed."""

    def learned(self, evidence: Evidence) -> None:
        """The own vote is complete, and what follows from it is taken over."""

    def switched(self) -> None:
        """A planned change of layout is in force, and the copies that it does not need have been dropped."""

    def moved(self) -> None:
        """The worker has left its generation and made its promise."""

    def installed(self, decision: Decision) -> None:
        """A decision is carried out."""


class JobTerms(NamedTuple):
    """What every worker knows of the job beforehand."""

    blocks: tuple[Block, ...]
    num_layers: int
    num_tensors: int
    num_microbatches: int
    """Of the global batch."""
    num_steps: int
    scatter_width: int
    """Over how many replica peers an owner's blocks are spread (`elaswave.blocks.replica_peers`)."""
    copy_elements: int
    """The most elements of new copies that one owner sends, and one worker receives, in one step, to make up for
    missing followers."""
    move_elements: int
    """The same towards the placement of a planned change, to begin with."""
    move_bounds: tuple[int, int]
    """The least and the most that it becomes by what is measured."""
    compile: "Compile"
    layer_name: Callable[[int], str] = str
    metrics: tuple[str, ...] = ()
    """Names of what is measured beside the loss."""
    verify: bool = True
    """Whether the ballot proves what happened (``elastic.verify``)."""
    skip_nonfinite: bool = False
    salvage: bool = True
    """Whether survivors keep what they have of a step that a loss has interrupted (``elastic.salvage``)."""
    eval_every: int = 0
    """An evaluation after every so many steps; 0 for none."""
    eval_microbatches: int = 0
    checkpoint_every: int = 0
    """A durable checkpoint after every so many steps; 0 for none but the one after the last step."""
    lowest_trained: int = 0
    """The first layer with a parameter that is trained: no gradient goes to layers below it."""
    uses: Mapping[int, int] = {}
    """Tensor -> how often each micro-batch adds to it, where that is not once."""
    buffers: tuple[BufferTensor, ...] = ()
    """The tensors that are no parameters, but buffers which a forward may write."""
    tensor_name: Callable[[int], str] = str
    accumulator_bits: int = WIDE_BITS
    """Width of an exact sum of gradients (``elastic.accumulator_bits``)."""


class Ports(NamedTuple, Generic[C]):
    """What one worker's machine stands on."""

    worker: int
    """Its id."""
    terms: JobTerms
    engine: Engine[C]
    """Has the layers of the layout in force."""
    links: Links
    observer: StepObserver
    outbox: Outbox
    disk: Disk


class Compile(Protocol):
    """The program of one worker under a layout, the same function in every process."""

    def __call__(
        self, worker: int, layout: Layout, execution: ExecutionParameters, *, forward_only: bool = False
    ) -> Program:
        """Compiles it."""
        ...
