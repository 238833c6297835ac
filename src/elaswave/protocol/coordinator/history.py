"""Where a job stands, as a coordinator knows it: folded from the records of all coordinators. No IO.

A coordinator that is started again reads the records in their order and stands where the last one stood. What members,
joiners and the agent say again by themselves is not here (`elaswave.protocol.membership.admissions`,
`elaswave.protocol.coordinator.report_collection`).
"""

from collections.abc import Sequence

from elaswave.blocks.placement import Block
from elaswave.protocol.coordinator.decisions import base_step
from elaswave.protocol.coordinator.transitions import TRANSITIONS, CoordinatorState
from elaswave.protocol.events import (
    LeavingRecord,
    NewGeneration,
    NewGenerationRecord,
    Record,
    StartRecord,
    Suspected,
)
from elaswave.protocol.membership.admissions import Admissions
from elaswave.protocol.messages import (
    FIRST_GENERATION,
    Decision,
    Evidence,
    FencedOff,
    InForce,
    LayoutChange,
    Prepare,
    Released,
    Report,
)

SUPERSEDE_MAX = 128
"""In a job of more members a change is not superseded: they have no links to all others, but to those that the change
in force and the one that they hold ask for (`elaswave.worker.links`)."""


class JobHistory:
    """Knows members, the newest decision, planned changes, losses, joins and leaves.

    Args:
        start: layout, placement and execution parameters of the start.
        blocks: of the model.
        scatter_width: over how many replica peers an owner's blocks are spread.
        restarts: whether the policy is to go back to the newest checkpoint after every loss.
        first_step: the step that training begins with.
        records: what earlier coordinators of the job have persisted, in order.
    """

    admissions_class = Admissions

    def __init__(
        self,
        start: InForce,
        *,
        blocks: Sequence[Block],
        scatter_width: int,
        restarts: bool,
        first_step: int,
        records: Sequence[Record],
    ) -> None:
        self.state = TRANSITIONS.first
        self.generation = FIRST_GENERATION
        # Above that of every predecessor: members ignore older terms, and no term is begun twice.
        self.term = 1 + max((record.term for record in records), default=0)
        self.members = start.layout.workers
        self.layout = start.layout
        self.placement = start.placement
        self.execution = start.execution
        """Of the newest decision."""
        self.decision: Decision | None = None
        """The newest decision."""
        self.blocks = blocks
        self.scatter_width = scatter_width
        self.restarts = restarts
        self.first_step = first_step
        self.founders = frozenset(start.layout.workers)

        self.admissions = self.admissions_class()
        self.evidence: Evidence | None = None
        """The newest vote that is known here."""
        self.rollback_generation = 0
        """The generation of the newest decision that went back to a checkpoint."""
        self.lost: tuple[int, ...] = ()
        """Lost since the newest decision."""
        self.domains: dict[int, str] = dict(start.layout.domains)
        """Where members run, and those that were members."""
        self.joined: tuple[int, ...] = ()
        """Members since the newest decision."""
        self.left: tuple[int, ...] = ()
        """Have left on request since the newest decision."""
        self.reason = ""
        """Why the newest generation has begun."""
        self._gone_as_asked: set[int] = set()
        """Have ever left on request."""
        self._fresh: set[int] = set()
        """Joiners that are not known to have installed a decision."""
        self._loss_events_at_s: list[float] = []
        """When losses have begun: those until the decision that answers the first of them are one event."""
        self._failures: dict[str, int] = {}
        """Signature of an error -> the worker that ended with it."""
        self._errors: dict[int, str] = {}
        """Workers that have ended with an error of their own since the newest decision -> what it was."""
        self.doubts_step = False
        """Whether a worker that was lost since the newest decision may have computed its step wrongly."""
        self._changes: dict[int, LayoutChange] = {}
        """Planned changes since the newest decision, by number; each may have come into force, or may yet."""
        self._num_changes = 0
        """The largest number that was ever given to one."""
        for record in records:
            self._replay(record)

    def _replay(self, record: Record) -> None:
        if isinstance(record, StartRecord):
            self.state = CoordinatorState.TRAINING
        elif isinstance(record, NewGenerationRecord):
            gone = set(self.members) - set(record.members)
            # Who has left as it was asked to is not among the lost: it does not count against what an hour may have.
            if record.lost and not self.lost:
                self._loss_events_at_s.append(record.at_s)
            self.generation, self.members = record.generation, record.members
            self.admissions.leaving -= gone
            # No record says who has installed a decision since. To ask once more where training stands does no harm.
            self._fresh |= set(record.joined)
            self.domains.update(record.domains)
            # A joiner that was lost again before the decision has not joined.
            self.joined = tuple(worker for worker in (*self.joined, *record.joined) if worker in record.members)
            self.left = (*self.left, *record.left)
            self._gone_as_asked.update(record.left)
            self.lost, self.reason = record.lost, record.reason
            # A successor must know the error when it ends a second worker, and what a wrong worker has spoilt (S5).
            if record.failure is not None:
                self._failures[record.failure.signature] = record.failure.worker
                self._errors[record.failure.worker] = record.failure.summary
                self.doubts_step = self.doubts_step or record.failure.is_wrong
            self.state = CoordinatorState.COLLECTING
        elif isinstance(record, LeavingRecord):
            self.admissions.leaving.add(record.worker)
        elif isinstance(record, LayoutChange):
            self._take_change(record)
        elif isinstance(record, Decision):
            self._take_over(record)
            self.state = CoordinatorState.TRAINING

    def _take_over(self, decision: Decision) -> None:
        self.decision = decision
        self.generation, self.members = decision.generation, decision.members
        self.layout, self.placement = decision.layout, decision.placement
        self.execution = decision.execution
        # A change in force is the layout of the decision from now on; any other one is void (M7).
        self._changes.clear()
        self.lost = self.joined = self.left = ()
        self._errors.clear()
        self.doubts_step = False
        if decision.rollback is not None:
            # Votes on steps after the checkpoint would outrank those with which these steps are made again.
            self.evidence = None
            self.rollback_generation = decision.generation
        elif decision.evidence is not None:
            self.evidence = decision.evidence

    def _take_change(self, change: LayoutChange) -> None:
        self._changes[change.number] = change
        self._num_changes = change.number

    # ------------------------------------------------------------------------------------------------ what is in force

    def in_force(self) -> InForce:
        """Finds what is in force by the newest vote that is known here."""
        return self.in_force_by(self.evidence)

    def in_force_by(self, evidence: Evidence | None) -> InForce:
        """Finds what is in force if this is the newest vote."""
        number = 0 if self.decision is None else self.decision.change
        if evidence is not None:
            # The newest vote may be older than the decision, and name an older change.
            number = max(number, evidence.change)
        change = self._changes.get(number)
        # A change of before the decision is forgotten: the decision has its layout.
        found = self if change is None else change
        return InForce(found.layout, found.placement, found.execution, number)

    @property
    def has_planned(self) -> bool:
        """Says whether a change has been planned since the newest decision, perhaps by an earlier coordinator."""
        return bool(self._changes)

    @property
    def is_changing(self) -> bool:
        """Says whether a planned change is not known to be in force yet (M1)."""
        return bool(self._changes) and self._num_changes > self.in_force().change

    @property
    def unrelieved(self) -> frozenset[int]:
        """Finds the members that are to leave and that run or hold something, whatever change is under way."""
        found = self.newest_change if self.is_changing else None
        return self._burdened(self.in_force() if found is None else found)

    @property
    def may_supersede(self) -> bool:
        """Says whether a change that relieves more leaving members may follow the one that is under way (M9)."""
        return self.is_changing and len(self.members) <= SUPERSEDE_MAX and bool(self.unrelieved)

    def _burdened(self, planned: InForce | LayoutChange) -> frozenset[int]:
        active = set(planned.layout.active)
        leaving = self.admissions.leaving.intersection(self.members)
        return frozenset(each for each in leaving if each in active or planned.placement.holds(each))

    @property
    def newest_change(self) -> LayoutChange | None:
        """Finds the newest change that was planned since the newest decision, in force or not."""
        return self._changes.get(self._num_changes)

    def change_in_force(self, number: int) -> LayoutChange | None:
        """Finds the planned change of this number, if it belongs to the present generation."""
        return self._changes.get(number)

    @property
    def members(self) -> tuple[int, ...]:
        """Workers of the newest generation, ascending."""
        return self._members

    @members.setter
    def members(self, members: tuple[int, ...]) -> None:
        self._members = members
        self.member_set = frozenset(members)
        """The same, for those of whom there are thousands."""

    # ----------------------------------------------------------------------------------------------- what is to be said

    def believes(self, worker: int, peer: int, generation: int) -> bool:
        """Says whether it counts that a worker says that its link to a peer has ended.

        Args:
            generation: in which it says so. Links are closed and made again with every new generation, so what was seen
                in an older one says nothing about the present.
        """
        return worker in self.member_set and peer in self.member_set and generation == self.generation

    @property
    def undecided(self) -> NewGeneration:
        """Tells of the generation that waits for a decision, as far as its record does: not how the losses were
        noticed."""
        return NewGeneration(self.generation, tuple(Suspected(worker, "exit", self.reason) for worker in self.lost))

    def is_new(self, report: Report) -> bool:
        """Says whether it is of a member that has no state yet."""
        # Founders have taken no decision either before the first loss, and have their state from the start.
        return report.decided == 0 and report.worker not in self.founders

    def base_step(self, evidence: Evidence | None) -> int:
        """Finds the newest committed step, if this is the newest vote."""
        decided = self.first_step - 1 if self.decision is None else self.decision.resume_step - 1
        return base_step(decided, evidence)

    def dismissal(self, worker: int) -> FencedOff | Released:
        """Makes what a worker is told that is no member any more."""
        # Its release may have been lost with a connection: it is no loss, and is let go once more.
        if worker in self._gone_as_asked:
            return self._released()
        return self._fenced_off(f"worker {worker} is no member of generation {self.generation}")

    def _released(self) -> Released:
        return Released(term=self.term, generation=self.generation, reason="it has left, as it was asked to")

    def _fenced_off(self, reason: str) -> FencedOff:
        return FencedOff(term=self.term, generation=self.generation, reason=reason)

    def _prepare(self) -> Prepare:
        # A decision empties `lost`: who has missed it, and is asked again, hears whom the decision leaves behind.
        lost = self.lost if self.decision is None or self.decision.generation < self.generation else self.decision.lost
        return Prepare(
            term=self.term,
            generation=self.generation,
            members=self.members,
            lost=lost,
            reason=self.reason,
            with_progress=not self._fresh.isdisjoint(self.members),
        )
