"""The coordinator as a machine: who is a member, what is committed, who goes on with what. No IO.

`Coordinator.handle(event, now_s)` returns effects, to be carried out in their order. The order is part of the
contract: a `Persist` stands before every `Send` that depends on it, so that nobody can act on a decision that a new
coordinator would not know.

Its states and what leads from one to another are the table `TRANSITIONS`, which every change of state is held to.

One rise of the epoch is two records: `RaiseRecord` (who is left behind; from then on the old epoch can commit nothing
that survivors have not already learned) and `Decision`. A coordinator that dies between them is replaced by one that
reads the first, asks again, and gets the same answers, because answers are promises.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from elaswave.protocol.messages import (
    Copies,
    CoreToWorker,
    Decision,
    Evidence,
    Fenced,
    Installed,
    LayoutChange,
    Prepare,
    Registered,
    Report,
)
from elaswave.protocol.table import Transition, check_transition
from elaswave.state.placement import Block, Placement
from elaswave.types import ExecutionParameters, Layout


class State(Enum):
    """What the coordinator is waiting for."""

    STARTING = "starting"
    TRAINING = "training"
    COLLECTING = "collecting"
    ROLLING_BACK = "rolling back"
    ENDED = "ended"


REGISTERED = "every worker has registered"
SUSPECTED = "a member is suspected"
REPORTED = "every member has reported"
NO_COPY_LEFT = "every member has reported, and a block has no copy left, or the policy is to restart"
FOUND = "a checkpoint is found"
PLANNED = "a better layout is planned"
GIVEN_UP = "nothing is left to go on with, or a bound is exceeded"

_RAISE = "persist the rise, ask the members, fence the others"
_DECIDE = "persist the decision, send it"
TRANSITIONS = (
    Transition(State.STARTING, REGISTERED, State.TRAINING, "persist the start, tell the addresses"),
    Transition(State.TRAINING, PLANNED, State.TRAINING, "persist the change, send it"),
    Transition(State.STARTING, SUSPECTED, State.COLLECTING, _RAISE),
    Transition(State.TRAINING, SUSPECTED, State.COLLECTING, _RAISE),
    Transition(State.COLLECTING, SUSPECTED, State.COLLECTING, _RAISE),
    Transition(State.ROLLING_BACK, SUSPECTED, State.COLLECTING, _RAISE),
    Transition(State.COLLECTING, REPORTED, State.TRAINING, _DECIDE),
    Transition(State.COLLECTING, NO_COPY_LEFT, State.ROLLING_BACK, "look for a checkpoint"),
    Transition(State.ROLLING_BACK, FOUND, State.TRAINING, _DECIDE),
    *(
        Transition(before, GIVEN_UP, State.ENDED, "end the job with the reason")
        for before in (State.STARTING, State.TRAINING, State.COLLECTING, State.ROLLING_BACK)
    ),
)
"""All transitions. A coordinator that is started again begins in the state that its newest record tells: TRAINING after
a start or a decision, COLLECTING after a rise."""


# ------------------------------------------------------------------------------------------------------------- records


class TermRecord(msgspec.Struct, frozen=True, kw_only=True, tag="term"):
    """A coordinator has begun its work."""

    term: int


class StartRecord(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Every worker has registered and training begins."""

    term: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended with an error of its own."""

    worker: int
    signature: str
    summary: str


class RaiseRecord(msgspec.Struct, frozen=True, kw_only=True, tag="raise"):
    """The epoch has risen and left workers behind; no decision yet."""

    term: int
    epoch: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Lost since the last decision."""
    reason: str
    at_s: float = 0.0
    """Monotonic time of the coordinator's machine, for `Bounds.max_failures_per_hour`."""
    failure: "Failure | None" = None
    """The worker's own error, if that is what it was lost by."""


Record = TermRecord | StartRecord | RaiseRecord | LayoutChange | Decision
"""What a coordinator persists, in order."""


# -------------------------------------------------------------------------------------------------------------- events


class Suspected(NamedTuple):
    """A detector holds a worker for lost."""

    worker: int
    detected_by: str
    """One of exit, link, heartbeat, progress, vote."""
    reason: str
    by: int | None = None
    """The worker that holds it for lost; None for a detector of the coordinator's own."""
    epoch: int | None = None
    """The epoch that this worker was in. What it saw in an older one says nothing about the present: links are closed
    and made again when the epoch rises."""


class Failed(NamedTuple):
    """A worker has ended itself with an error and said so."""

    worker: int
    signature: str
    """Equal for the same error at the same step and micro-batch."""
    summary: str


class EvidenceSeen(NamedTuple):
    """A worker has reported a committed step with its vote."""

    evidence: Evidence
    epoch: int
    """The epoch in which the vote was held."""


class CheckpointFound(NamedTuple):
    """The answer to `FindCheckpoint`."""

    step: int | None
    """None: there is none. If no step has been committed, everybody then begins again from the seed."""


class ChangePlanned(NamedTuple):
    """The planner has a better layout for the members of an epoch."""

    epoch: int
    layout: Layout
    execution: ExecutionParameters
    reason: str
    predicted_step_s: float | None = None


class PendingWork(NamedTuple):
    """What of the last committed step is still to be done, asked when a decision is made."""

    evaluate: bool
    checkpoint: bool
    published: int = 0
    """The newest step whose loss is known."""


Event = Registered | Report | Installed | Suspected | Failed | EvidenceSeen | CheckpointFound | ChangePlanned


# ------------------------------------------------------------------------------------------------------------- effects


class Persist(NamedTuple):
    """Write a record durably before going on to the next effect."""

    record: Record


class Send(NamedTuple):
    """Send a message to a worker; if it is not connected, it gets the state again when it registers."""

    worker: int
    message: CoreToWorker


class FindCheckpoint(NamedTuple):
    """Find the newest valid checkpoint and come back with `CheckpointFound`."""


class Start(NamedTuple):
    """Every worker has registered: tell them each other's addresses. Whoever trains already ignores it."""

    addresses: dict[int, str]


class Raised(NamedTuple):
    """For the report: the epoch has risen because of these suspicions."""

    epoch: int
    suspicions: tuple[Suspected, ...]


class Decided(NamedTuple):
    """For the report: survivors go on with this decision."""

    decision: Decision


class Resumed(NamedTuple):
    """For the report: every member of the epoch computes again."""

    epoch: int
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


Effect = Persist | Send | FindCheckpoint | Start | Raised | Decided | Resumed | End | Note


class Planned(NamedTuple):
    """What the planner says after a loss."""

    layout: Layout
    placement: Placement
    promoted: int
    orphans: tuple[int, ...]
    """Blocks of which no valid copy is left."""
    execution: ExecutionParameters | None = None
    """None: as it was."""
    plan: str = ""
    """Why this layout, if that needs saying."""
    restart: bool = False
    """Whether everybody starts over from the last checkpoint, though no state may be lost (a policy of restarting)."""


class Planner(NamedTuple):
    """The pure functions that the coordinator plans with; the simulator and the product use the same."""

    survive: Callable[[Layout, Placement, Collection[int], Callable[[int, int], bool]], Planned]
    """(layout, placement, lost, valid(block, worker)) -> how the survivors go on."""
    replace: Callable[[Layout], Placement]
    """A fresh placement under a layout, for a rollback."""


class Bounds(NamedTuple):
    """When to give up."""

    min_workers: int = 1
    max_failures_per_hour: int = 100


DEFAULT_BOUNDS = Bounds()


class Coordinator:
    """The coordinator's machine.

    Args:
        layout, placement: of the start.
        blocks: of the model.
        planner: how survivors go on.
        bounds: when to give up.
        first_step: the step that training begins with.
        records: what earlier coordinators of the job have persisted, in order.
        books: asked at each decision for the committed step's unfinished work; told the step, and whether a vote
            asked for a durable checkpoint of it.
        execution: of the start.
    """

    FIRST_EPOCH = 1

    def __init__(
        self,
        *,
        layout: Layout,
        placement: Placement,
        blocks: Sequence[Block],
        planner: Planner,
        bounds: Bounds = DEFAULT_BOUNDS,
        first_step: int = 1,
        records: Sequence[Record] = (),
        books: Callable[[int, bool], PendingWork] = lambda step, asked: PendingWork(False, asked),
        execution: ExecutionParameters | None = None,
    ) -> None:
        self.state = State.STARTING
        self.epoch = self.FIRST_EPOCH
        self.term = 1 + max((record.term for record in records), default=0)
        self.members: tuple[int, ...] = layout.workers
        self.layout = layout
        self.placement = placement
        self.decision: Decision | None = None
        """The newest decision."""
        self._blocks = blocks
        self._planner = planner
        self._bounds = bounds
        self._first_step = first_step
        self._books = books
        self._evidence: Evidence | None = None
        self._lost: tuple[int, ...] = ()
        """Lost since the newest decision."""
        self._reason = ""
        self._addresses: dict[int, str] = {}
        self._start_said = False
        self._reports: dict[int, Report] = {}
        self._installed: dict[int, Installed] = {}
        self._resumed = True
        self._losses_at_s: list[float] = []
        self._failures: dict[str, int] = {}
        """Signature of an error -> the worker that ended with it."""
        self._errors: dict[int, str] = {}
        """Workers that have ended with an error of their own since the newest decision -> what it was."""
        self._orphans: tuple[int, ...] = ()
        self._restart_is_policy = False
        """Whether the policy is why a checkpoint is sought."""
        self._seed_is_enough = False
        """Whether nothing was committed when a checkpoint was sought: what is lost can be made again from the seed."""
        self._changes: dict[int, LayoutChange] = {}
        """Planned changes since the newest decision, by number; each may have come into force, or may yet."""
        self._num_changes = 0
        """The largest number that was ever given to one."""
        self.execution = execution or ExecutionParameters()
        """Of the newest decision."""
        self._rollback_epoch = 0
        """The epoch of the newest decision that went back to a checkpoint."""
        for record in records:
            self._replay(record)

    def _replay(self, record: Record) -> None:
        if isinstance(record, StartRecord):
            self.state = State.TRAINING
        elif isinstance(record, RaiseRecord):
            self._losses_at_s += [record.at_s] * (len(self.members) - len(record.members))
            self.epoch, self.members, self._lost, self._reason = (
                record.epoch,
                record.members,
                record.lost,
                record.reason,
            )
            if record.failure is not None:
                self._failures[record.failure.signature] = record.failure.worker
                self._errors[record.failure.worker] = record.failure.summary
            self.state = State.COLLECTING
        elif isinstance(record, LayoutChange):
            self._take_change(record)
        elif isinstance(record, Decision):
            self._take_over(record)
            self.state = State.TRAINING

    def _take_over(self, decision: Decision) -> None:
        self.decision = decision
        self.epoch, self.members = decision.epoch, decision.members
        self.layout, self.placement = decision.layout, decision.placement
        self.execution = decision.execution
        self._changes.clear()
        self._lost = ()
        self._errors.clear()
        if decision.rollback is not None:
            self._evidence = None
            self._rollback_epoch = decision.epoch
        elif decision.evidence is not None:
            self._evidence = decision.evidence

    def _take_change(self, change: LayoutChange) -> None:
        self._changes[change.number] = change
        self._num_changes = change.number

    def in_force(self) -> tuple[Layout, ExecutionParameters, int]:
        """Layout and execution in force by the newest vote that is known here, and the number of their change."""
        return self._in_force(self._evidence)

    def _in_force(self, evidence: Evidence | None) -> tuple[Layout, ExecutionParameters, int]:
        number = 0 if self.decision is None else self.decision.change
        if evidence is not None:
            number = max(number, evidence.change)
        change = self._changes.get(number)
        return (self.layout, self.execution, number) if change is None else (change.layout, change.execution, number)

    @property
    def has_planned(self) -> bool:
        """Whether a change has been planned since the newest decision, perhaps by an earlier coordinator."""
        return bool(self._changes)

    def change_in_force(self, number: int) -> LayoutChange | None:
        """The planned change of this number, if it belongs to the present epoch."""
        return self._changes.get(number)

    @property
    def raised(self) -> Raised:
        """The rise that waits for a decision, as far as its record tells: how the losses were noticed it does not."""
        return Raised(self.epoch, tuple(Suspected(worker, "exit", self._reason) for worker in self._lost))

    def begin(self) -> list[Effect]:
        """The effects of starting: a new term; a rise that was begun is taken up again."""
        effects: list[Effect] = [Persist(TermRecord(term=self.term))]
        if self.state is State.COLLECTING:
            effects += [Send(worker, self._prepare()) for worker in self.members]
        return effects

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Takes one event.

        Args:
            now_s: monotonic time, for the failure rate only.
        Returns:
            Effects, to be carried out in this order.
        """
        if self.state is State.ENDED:
            return [Note(f"{type(event).__name__} after the end is ignored")]
        if isinstance(event, Registered):
            return self._on_registered(event)
        if isinstance(event, Report):
            return self._on_report(event)
        if isinstance(event, Installed):
            return self._on_installed(event)
        if isinstance(event, Suspected):
            return self.suspect([event], now_s)
        if isinstance(event, Failed):
            return self._on_failed(event, now_s)
        if isinstance(event, EvidenceSeen):
            return self._on_evidence(event)
        if isinstance(event, ChangePlanned):
            return self._on_change_planned(event)
        return self._on_checkpoint(event)

    def _go(self, cause: str, after: State) -> None:
        """Changes the state, as the table allows."""
        check_transition(TRANSITIONS, self.state, cause, after)
        self.state = after

    # ------------------------------------------------------------------------------------------------- registration

    def _on_registered(self, event: Registered) -> list[Effect]:
        worker = event.worker
        if worker not in self.members:
            return [Send(worker, self.fence(worker))]
        self._addresses[worker] = event.address
        if self.state is State.STARTING:
            if event.epoch != self.FIRST_EPOCH:
                return [Note(f"worker {worker} registers in epoch {event.epoch} at the start")]
            if len(self._addresses) < len(self.members):
                return []
            self._go(REGISTERED, State.TRAINING)
            return [Persist(StartRecord(term=self.term)), *self._start_again()]
        effects: list[Effect] = []
        # Its `Start` may have been lost with a connection, or with the coordinator that was about to send it.
        effects += self._start_again()
        if event.epoch == self.epoch and event.report is not None and self.state is State.COLLECTING:
            effects += self._on_report(event.report)
        elif self.state is State.COLLECTING:
            effects.append(Send(worker, self._prepare()))
        elif self.decision is not None and (event.epoch < self.epoch or event.report is not None):
            # It has missed the decision, and perhaps the question before it: both are sent again, in order. Perhaps an
            # earlier coordinator made the decision; in its name a worker that has heard of us would not take it.
            effects.append(Send(worker, self._prepare()))
            effects.append(Send(worker, msgspec.structs.replace(self.decision, term=self.term)))
        elif event.epoch > self.epoch:
            effects.append(Note(f"worker {worker} registers in epoch {event.epoch}, the newest is {self.epoch}"))
        if self.state is State.TRAINING and self._changes:
            # It may have been lost with a connection; one that is in force already, or held, is ignored.
            newest = self._changes[self._num_changes]
            effects.append(Send(worker, msgspec.structs.replace(newest, term=self.term)))
        return effects

    def _start_again(self) -> list[Effect]:
        """The addresses once more, once all are known: also while a rise waits for reports, because a worker that does
        not know its peers cannot leave an epoch. After a decision everybody knows them."""
        if self.decision is not None or not self._addresses.keys() >= set(self.members):
            return []
        self._start_said = True
        return [Start(dict(self._addresses))]

    def fence(self, worker: int) -> Fenced:
        """What a worker is told that is no member any more."""
        return self._fenced(f"worker {worker} is no member of epoch {self.epoch}")

    def _fenced(self, reason: str) -> Fenced:
        return Fenced(term=self.term, epoch=self.epoch, reason=reason)

    def _prepare(self) -> Prepare:
        lost = self._lost if self.state is State.COLLECTING or self.decision is None else self.decision.lost
        return Prepare(term=self.term, epoch=self.epoch, members=self.members, lost=lost, reason=self._reason)

    # ---------------------------------------------------------------------------------------------- losing a worker

    def suspect(self, suspicions: Sequence[Suspected], now_s: float, failure: Failure | None = None) -> list[Effect]:
        """Takes suspicions that came together: the epoch rises once for all of them.

        Args:
            now_s: as of `handle`.
            failure: the error with which the only one of them has ended itself.
        """
        fresh = [suspicion for suspicion in suspicions if self._counts(suspicion)]
        if not fresh or self.state is State.ENDED:
            return [
                Note(f"the suspicion of worker {suspicion.worker} is not of this epoch") for suspicion in suspicions
            ]
        leaving = sorted({suspicion.worker for suspicion in fresh})
        members = tuple(worker for worker in self.members if worker not in leaving)
        self._losses_at_s = [at for at in self._losses_at_s if now_s - at < 3600.0] + [now_s] * len(leaving)
        if len(self._losses_at_s) > self._bounds.max_failures_per_hour:
            return self._end(
                f"{len(self._losses_at_s)} workers were lost within an hour, elastic.max_failures_per_hour allows "
                f"{self._bounds.max_failures_per_hour}"
            )
        if len(members) < max(1, self._bounds.min_workers):
            lost = sorted({*self._lost, *leaving})
            return self._end(
                f"{len(members)} workers are left after the loss of workers {lost}, elastic.min_workers asks for "
                f"{self._bounds.min_workers}"
            )
        self.epoch += 1
        self.members = members
        self._lost = (*self._lost, *leaving)
        self._reason = "; ".join(suspicion.reason for suspicion in fresh)
        self._go(SUSPECTED, State.COLLECTING)
        self._reports.clear()
        record = RaiseRecord(
            term=self.term,
            epoch=self.epoch,
            members=members,
            lost=self._lost,
            reason=self._reason,
            at_s=now_s,
            failure=failure,
        )
        fences: list[Effect] = [Send(worker, self._fenced(self._reason)) for worker in leaving]
        return [
            Persist(record),
            *([] if self._start_said else self._start_again()),
            *(Send(worker, self._prepare()) for worker in members),
            *fences,
            Raised(self.epoch, tuple(fresh)),
        ]

    def _counts(self, suspicion: Suspected) -> bool:
        """Whether a suspicion is of a member, and made by a detector or by a member in the present epoch."""
        if suspicion.worker not in self.members:
            return False
        return suspicion.by is None or (suspicion.by in self.members and suspicion.epoch == self.epoch)

    def _on_failed(self, event: Failed, now_s: float) -> list[Effect]:
        """An error of a worker's own: what fails twice at the same place will fail everywhere."""
        before = self._failures.get(event.signature)
        if before is not None and before != event.worker:
            return self._end(f"{event.summary}; the same error has ended worker {before}", event.worker)
        self._failures[event.signature] = event.worker
        self._errors[event.worker] = event.summary
        if event.worker in self.members and len(self.members) <= max(1, self._bounds.min_workers):
            return self._end(event.summary, event.worker)
        failure = Failure(worker=event.worker, signature=event.signature, summary=event.summary)
        return self.suspect([Suspected(event.worker, "exit", event.summary)], now_s, failure)

    def _end(self, reason: str, worker: int | None = None, orphans: tuple[int, ...] = ()) -> list[Effect]:
        self._go(GIVEN_UP, State.ENDED)
        if worker is None and self._errors:
            # An error that strikes all replicas at once, each at another micro-batch, is the reason of all the rest.
            worker, summary = next(iter(self._errors.items()))
            reason = f"{summary}; {reason}"
        return [End(reason, worker, orphans)]

    # ---------------------------------------------------------------------------------------------- planned changes

    def _on_change_planned(self, event: ChangePlanned) -> list[Effect]:
        if self.state is not State.TRAINING or event.epoch != self.epoch:
            return [Note(f"a plan for epoch {event.epoch} comes in epoch {self.epoch}, {self.state.value}")]
        if event.layout.workers != self.members:
            return [Note(f"a plan for workers {event.layout.workers}, but the members are {self.members}")]
        change = LayoutChange(
            term=self.term,
            epoch=self.epoch,
            number=self._num_changes + 1,
            layout=event.layout,
            execution=event.execution,
            reason=event.reason,
            predicted_step_s=event.predicted_step_s,
        )
        self._go(PLANNED, State.TRAINING)
        self._take_change(change)
        return [Persist(change), *(Send(worker, change) for worker in self.members)]

    # -------------------------------------------------------------------------------------------------- the decision

    def _on_evidence(self, event: EvidenceSeen) -> list[Effect]:
        decided = self.FIRST_EPOCH if self.decision is None else self.decision.epoch
        if event.epoch < decided:
            return [Note(f"a vote of epoch {event.epoch} comes after the decision of epoch {decided}")]
        self._evidence = newest_evidence([self._evidence, event.evidence])
        return []

    def _on_report(self, report: Report) -> list[Effect]:
        if report.worker not in self.members:
            return [Send(report.worker, self.fence(report.worker))]
        if report.epoch != self.epoch or self.state is not State.COLLECTING:
            return [Note(f"a report of worker {report.worker} for epoch {report.epoch} is not awaited")]
        self._reports[report.worker] = report
        if len(self._reports) < len(self.members):
            return []
        return self._decide()

    def _decide(self) -> list[Effect]:
        reports = [self._reports[worker] for worker in self.members]
        if any(report.decided < self._rollback_epoch for report in reports):
            # Somebody has not gone back to the checkpoint yet: its votes and versions are of steps that do not count
            # any more. No vote can have passed without it since, so nothing is lost by going back once more.
            assert self.decision is not None
            return self._seek_checkpoint((), base=self.decision.resume_step - 1)
        evidence = newest_evidence([self._evidence, *(report.evidence for report in reports)])
        base = self._base_step(evidence)
        held = {report.worker: _versions(report.copies) for report in reports}

        def valid(block: int, worker: int) -> bool:
            version = held.get(worker, {}).get(block)
            return version is not None and can_reach(version, self._reports[worker], evidence, base)

        layout, execution, change = self._in_force(evidence)
        lost = tuple(sorted(set(layout.workers) - set(self.members)))
        planned = self._planner.survive(layout, self._merged_placement(), lost, valid)
        if planned.orphans or planned.restart:
            return self._seek_checkpoint(planned.orphans, base=base, is_policy=not planned.orphans)
        attempt = 1 + max((report.attempt for report in reports if report.step == base + 1), default=0)
        if evidence is not None and not evidence.commits:
            attempt = max(attempt, evidence.attempt + 1)
        books = self._books(base, evidence is not None and evidence.checkpoint == base)
        decision = Decision(
            term=self.term,
            epoch=self.epoch,
            members=self.members,
            lost=self._lost,
            evidence=evidence,
            resume_step=base + 1,
            resume_attempt=attempt,
            layout=planned.layout,
            placement=planned.placement,
            deliver=tuple(_deliveries(planned.layout, reports, base)),
            rollback=None,
            evaluate=books.evaluate,
            checkpoint=books.checkpoint,
            published=books.published,
            promoted=planned.promoted,
            reason=self._reason,
            change=change,
            execution=execution if planned.execution is None else planned.execution,
            plan=planned.plan,
        )
        return self._issue(decision)

    def _seek_checkpoint(self, orphans: tuple[int, ...], *, base: int, is_policy: bool = False) -> list[Effect]:
        self._go(NO_COPY_LEFT, State.ROLLING_BACK)
        self._orphans, self._restart_is_policy = orphans, is_policy
        self._seed_is_enough = base == 0
        return [FindCheckpoint()]

    def _base_step(self, evidence: Evidence | None) -> int:
        """The newest step that is committed."""
        decided = self._first_step - 1 if self.decision is None else self.decision.resume_step - 1
        return decided if evidence is None else max(decided, evidence.committed_step)

    def _merged_placement(self) -> Placement:
        """The last decision's placement, with the followers that have been filled since, as the survivors report."""
        owner = list(self.placement.owner)
        followers: list[list[int]] = [[] for _ in owner]
        for worker in self.members:
            for block in self._reports[worker].copies.blocks:
                if owner[block] != worker:
                    followers[block].append(worker)
        return Placement(tuple(owner), tuple(map(tuple, followers)))

    def _what_helps(self) -> str:
        """What a person can set so that a loss like this one is survived."""
        now = max(map(len, self.placement.followers), default=0)
        together = max(now + 1, len(self._lost))
        survived = f"any {now} at one instant, and any number with some steps between them" if now else "no loss"
        return (
            f"elastic.num_followers = {now} survives {survived}; {together} would survive any {together} at one "
            "instant. With run.checkpoint_every or run.checkpoint_every_s the job goes back to its newest checkpoint "
            "by itself, and --resume continues from it later"
        )

    def _on_checkpoint(self, event: CheckpointFound) -> list[Effect]:
        if self.state is not State.ROLLING_BACK:
            return [Note("a checkpoint that nobody waits for")]
        orphans = ", ".join(map(str, self._orphans[:8])) + (" ..." if len(self._orphans) > 8 else "")
        what = (
            f"all copies of {len(self._orphans)} of {len(self._blocks)} blocks ({orphans}) were lost with workers "
            f"{list(self._lost)}"
        )
        if self._restart_is_policy:
            what = "everybody starts over, as the policy is"
        elif not self._orphans:
            what = f"workers {list(self._lost)} were lost before everybody had gone back to the last checkpoint"
        step = 0 if event.step is None and self._seed_is_enough else event.step
        if step is None:
            return self._end(
                f"{what}, and there is no valid durable checkpoint to go back to. {self._what_helps()}",
                orphans=self._orphans,
            )
        layout, execution, change = self.in_force()
        lost = tuple(sorted(set(layout.workers) - set(self.members)))
        planned = self._planner.survive(layout, self.placement, lost, lambda block, worker: True)
        layout = planned.layout
        decision = Decision(
            term=self.term,
            epoch=self.epoch,
            members=self.members,
            lost=self._lost,
            evidence=None,
            resume_step=step + 1,
            resume_attempt=1,
            layout=layout,
            placement=self._planner.replace(layout),
            deliver=(),
            rollback=step,
            evaluate=False,
            checkpoint=False,
            published=step,
            promoted=0,
            reason=f"{self._reason}; {what}",
            change=change,
            execution=execution if planned.execution is None else planned.execution,
            plan=planned.plan,
        )
        return self._issue(decision)

    def _issue(self, decision: Decision) -> list[Effect]:
        self._take_over(decision)
        self._go(REPORTED if self.state is State.COLLECTING else FOUND, State.TRAINING)
        self._reports.clear()
        self._installed.clear()
        self._resumed = False
        return [
            Persist(decision),
            *(Send(worker, decision) for worker in self.members),
            Decided(decision),
        ]

    def _on_installed(self, event: Installed) -> list[Effect]:
        if event.epoch != self.epoch or event.worker not in self.members or self._resumed:
            return []
        self._installed[event.worker] = event
        if len(self._installed) < len(self.members):
            return []
        self._resumed = True
        return [Resumed(self.epoch, tuple(self._installed[worker] for worker in self.members))]


def newest_evidence(found: Sequence[Evidence | None]) -> Evidence | None:
    """The newest of several votes."""
    known = [evidence for evidence in found if evidence is not None]
    return max(known, key=lambda evidence: evidence.order, default=None)


def can_reach(version: int, report: Report, evidence: Evidence | None, base: int) -> bool:
    """Whether a copy at a version is, or can at once be brought, to the committed step.

    One step behind is enough where the worker holds that step's complete gradients: every voter does.
    """
    if version == base:
        return True
    return (
        version == base - 1
        and evidence is not None
        and evidence.commits
        and evidence.step == base
        and (
            (report.evidence is not None and report.evidence.order == evidence.order) or _is_prepared(report, evidence)
        )
    )


def _is_prepared(report: Report, evidence: Evidence) -> bool:
    return report.prepared and (report.step, report.attempt) == evidence.order


def _versions(copies: Copies) -> Mapping[int, int]:
    return dict(zip(copies.blocks, copies.versions, strict=True))


def _deliveries(layout: Layout, reports: Sequence[Report], base: int) -> list[tuple[int, int]]:
    """(worker, layer) of all parameters that are not where they are needed, or not of the committed step."""
    by_worker = {report.worker: report for report in reports}
    deliveries = []
    for stage in layout.stages:
        for worker in stage.workers:
            report = by_worker[worker]
            has = range(*report.layers) if report.parameters_step == base else range(0)
            deliveries += [(worker, layer) for layer in range(stage.start, stage.stop) if layer not in has]
    return deliveries
