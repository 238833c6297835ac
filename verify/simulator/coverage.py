"""Counts what the schedules have led through, so that a search can show that it went where it matters."""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from elaswave.blocks.placement import Placement
from elaswave.protocol.events import PlanRecovery
from elaswave.protocol.membership.effects import MembershipRecord, PlaceTaken
from elaswave.protocol.messages import Decision
from elaswave.types import Layout
from verify.simulator.job import BlockState, Exponents
from verify.simulator.observer import Observer


class CoverageCounter(Observer):
    """Counts of one run or, added up, of many."""

    def __init__(self, num_steps: int, num_workers: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self._num_steps = num_steps
        self._places = set(range(num_workers))
        self._committing: set[int] = set()
        self._known: dict[int, tuple[int, int]] = {}
        self._installing: set[int] = set()
        self._switched: dict[int, int] = {}
        """Worker -> newest step whose vote has brought a planned change into force there."""
        self._moving = False
        """Whether a worker has adopted a planned change that is not in force."""
        self._asked: tuple[int, PlanRecovery] | None = None
        """Term and question that the planner was asked and that no decision has followed."""

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        self._known[worker] = (step, attempt)
        if not commits:
            self.counts["votes that asked for another attempt"] += 1

    def wrote_down(self, record: MembershipRecord) -> None:
        if isinstance(record, PlaceTaken):
            is_new = record.place not in self._places
            self.counts["workers started to join" if is_new else "places taken again"] += 1
            self._places.add(record.place)

    def held_for_lost(self, worker: int, detected_by: str) -> None:
        self.counts[f"workers held for lost by: {detected_by}"] += 1

    def stopping(self, members: Collection[int], leaving: Collection[int]) -> None:
        self.counts["jobs stopped because too few would stay"] += 1

    def claimed(self, term: int) -> None:
        if term > 1:
            self.counts["coordinators followed by a candidate"] += 1

    def gone_back(self, seen: str) -> None:
        self.counts["stores that were seen to have gone back"] += 1

    def lease_lost(self, writer: int) -> None:
        self.counts["coordinators that learned that they were replaced"] += 1

    def adopted(self, worker: int) -> None:
        self._moving = True

    def switched(self, worker: int, generation: int, step: int, layout: Layout, placement: Placement) -> None:
        self._moving = False
        if step not in self._switched.values():
            self.counts["planned changes of the layout"] += 1
        self._switched[worker] = step

    def asked_planner(self, term: int, question: PlanRecovery) -> None:
        if self._asked is not None:
            before, unanswered = self._asked
            if term != before:
                self.counts["coordinators lost while a recovery was planned"] += 1
            elif question.generation != unanswered.generation:
                self.counts["losses while a recovery was planned"] += 1
            else:
                self.counts["newer votes while a recovery was planned"] += 1
        self._asked = (term, question)

    def committing(self, step: int) -> None:
        self._committing.add(step)

    def checkpointed(self, step: int, states: Mapping[int, BlockState], grid: Exponents) -> None:
        self._committing.discard(step)

    def decided(self, decision: Decision) -> None:
        counts = self.counts
        if self._committing:
            counts["losses while a checkpoint was committed"] += 1
        self._asked = None
        if decision.plan:
            counts["planners that took too long"] += 1
        newest = max(self._switched.values(), default=-1)
        if self._moving:
            counts["losses while blocks moved towards a planned change"] += 1
            self._moving = False
        if newest == decision.resume_step - 1 and decision.rollback is None:
            switched = sum(self._switched.get(worker) == newest for worker in decision.members)
            if switched < len(decision.members):
                counts["losses while a planned change came into force"] += 1
        counts["decisions"] += 1
        if len(decision.lost) > 1:
            counts["decisions about several losses"] += 1
        if self._installing & set(decision.members):
            counts["decisions while an earlier one was being carried out"] += 1
        self._installing = set(decision.members)
        if decision.rollback is not None:
            counts["returns to a checkpoint"] += 1
        elif decision.evidence is not None:
            knowing = sum(self._known.get(worker) == decision.evidence.order for worker in decision.members)
            if 0 < knowing < len(decision.members):
                counts["votes that only some survivors knew"] += 1
            elif not knowing and decision.evidence.order > max(self._known.get(w, (0, 0)) for w in decision.members):
                counts["votes that no survivor knew"] += 1
        if decision.deliver:
            counts["decisions that send parameters"] += 1
        if decision.resume_attempt > 1:
            counts["steps tried again"] += 1
        if decision.kept:
            counts["steps of which something is kept"] += 1
            if any(partial.root < decision.resume_attempt - 1 for partial in decision.kept):
                counts["steps of which something is kept twice"] += 1
            if any(partial.in_flight for partial in decision.kept):
                counts["micro-batches kept on their way"] += 1
            if len({partial.root for partial in decision.kept}) > 1:
                counts["steps kept from several attempts"] += 1

    def installed(self, worker: int, decision: Decision, versions: Iterable[int], grid: Exponents) -> None:
        self._installing.discard(worker)
        if decision.evidence is not None:
            self._known[worker] = decision.evidence.order

    def ended(self, reason: str, members: Sequence[int], lost: Sequence[int], orphans: Sequence[int]) -> None:
        self.counts["jobs given up"] += 1

    def finished(self, members: Sequence[int], states: dict[int, dict[int, tuple[bool, int, BlockState]]]) -> None:
        self.counts["jobs finished"] += 1
        if any(version < self._num_steps for held in states.values() for _, version, _ in held.values()):
            self.counts["jobs that were asked to stop"] += 1
