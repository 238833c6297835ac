"""The coordinator as a machine: who is a member, what is committed, who goes on with what. No IO.

`Coordinator.handle(event, now_s)` returns effects, to be carried out in their order. The order is part of the
contract: a `Persist` stands before every `Send` that depends on it, so that no worker can act on a decision that a new
coordinator would not know.

Its states and what leads from one to another are `transitions.TRANSITIONS`: the machine finds out what has
happened, and looks up the next state and its responses.

One new generation is two records: `NewGenerationRecord` (who is left behind; from then on the old generation can commit
nothing that survivors have not already learned) and `Decision`. A coordinator that dies between them is replaced by one
that reads the first, asks again, and gets the same answers, because answers are promises.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from elaswave.blocks.placement import Block
from elaswave.protocol.coordinator.decisions import (
    newest_evidence,
)
from elaswave.protocol.coordinator.history import JobHistory
from elaswave.protocol.coordinator.report_collection import ReportCollection
from elaswave.protocol.coordinator.transitions import TRANSITIONS, Cause, CoordinatorState, Response
from elaswave.protocol.events import (
    CheckpointFound,
    CoordinatorEffect,
    CoordinatorEvent,
    Decided,
    End,
    EvidenceSeen,
    FindCheckpoint,
    JoinerCame,
    JoinerGone,
    LeaveWanted,
    LeavingRecord,
    NewGeneration,
    NewGenerationRecord,
    Note,
    Persist,
    PlanningFailed,
    Record,
    RecoveryPlanned,
    Resumed,
    Send,
    StartRecord,
    Suspected,
    TellAddresses,
    TermRecord,
    WorkerFailed,
    WorkerFailure,
)
from elaswave.protocol.messages import (
    FIRST_GENERATION,
    AskPause,
    Dial,
    GoOn,
    InForce,
    Installed,
    LayoutChange,
    Linked,
    Paused,
    Registered,
    Report,
    Unsound,
)


class Bounds(NamedTuple):
    """When to give up."""

    min_workers: int = 1
    max_failures_per_hour: int = 100


DEFAULT_BOUNDS = Bounds()


class Coordinator(JobHistory):
    """Decides who is a member, what is committed, and who goes on with what.

    Args:
        start: layout, placement and execution parameters of the start.
        blocks: of the model.
        scatter_width: over how many replica peers an owner's blocks are spread.
        bounds: when to give up.
        restarts: whether the policy is to go back to the newest checkpoint after every loss.
        first_step: the step that training begins with.
        records: what earlier coordinators of the job have persisted, in order.
    """

    collection_class = ReportCollection

    def __init__(
        self,
        start: InForce,
        *,
        blocks: Sequence[Block],
        scatter_width: int,
        bounds: Bounds = DEFAULT_BOUNDS,
        restarts: bool = False,
        first_step: int = 1,
        records: Sequence[Record] = (),
    ) -> None:
        super().__init__(
            start,
            blocks=blocks,
            scatter_width=scatter_width,
            restarts=restarts,
            first_step=first_step,
            records=records,
        )
        self.report_collection = self.collection_class(self)
        self._bounds = bounds
        self._has_called = self.term > 1
        """Whether members may have been told of joiners, perhaps by an earlier coordinator."""
        self._leaver = -1
        """The worker of the newest request to leave."""

        self._addresses: dict[int, str] = {}
        self._addresses_sent = False
        self._speaker = -1
        """The worker whose message is being dealt with."""
        self._new_generation: NewGenerationRecord | None = None
        self._suspicions: tuple[Suspected, ...] = ()
        """Those that the newest generation has begun with."""
        self._unsound: tuple[int, ...] = ()
        """Who has said that copies are wrong, if that is what the newest generation has begun with."""
        self._predicted_step_s: float | None = None
        self._installed: dict[int, Installed] = {}
        self._resumed = True
        self._end = End("")
        self._responses: Mapping[Response, Callable[[], list[CoordinatorEffect]]] = {
            Response.PERSIST_TERM: lambda: [Persist(TermRecord(term=self.term))],
            Response.DISMISS: lambda: [Send(self._speaker, self.dismissal(self._speaker))],
            Response.PERSIST_START: lambda: [Persist(StartRecord(term=self.term))],
            Response.TELL_ADDRESSES: self._tell_addresses,
            Response.TELL_UNTOLD_ADDRESSES: lambda: [] if self._addresses_sent else self._tell_addresses(),
            Response.ASK_AGAIN: lambda: [Send(self._speaker, self._prepare())],
            Response.SEND_DECISION_AGAIN: self._send_decision_again,
            Response.SEND_CHANGE_AGAIN: self._send_change_again,
            Response.PERSIST_CHANGE: lambda: [Persist(self._changes[self._num_changes])],
            Response.SEND_CHANGE: lambda: [Send(worker, self._changes[self._num_changes]) for worker in self.members],
            Response.PERSIST_LEAVE: lambda: [Persist(LeavingRecord(term=self.term, worker=self._leaver))],
            Response.CALL: self._call,
            Response.CALL_AGAIN: self._call_again,
            Response.ASK_PAUSE: self._ask_pause,
            Response.ASK_PAUSE_AGAIN: lambda: [
                Send(self._speaker, AskPause(term=self.term, generation=self.generation))
            ],
            Response.LET_GO_ON: self._let_go_on,
            Response.RELEASE: self._release,
            Response.PERSIST_GENERATION: self._persist_generation,
            Response.ASK: self._ask,
            Response.FENCE_OFF: self._fence_off,
            Response.SHOW_GENERATION: self._show_generation,
            Response.FIND_CHECKPOINT: lambda: [self.report_collection.ask_for_checkpoint()],
            Response.PLAN: lambda: [self.report_collection.ask_for_plan()],
            Response.PERSIST_DECISION: self._persist_decision,
            Response.SEND_DECISION: self._send_decision,
            Response.SHOW_DECISION: self._show_decision,
            Response.SHOW_RESUMED: lambda: [
                Resumed(self.generation, tuple(self._installed[worker] for worker in self.members))
            ],
            Response.END: lambda: [self._end],
        }

    def awaits(self, question: FindCheckpoint) -> bool:
        """Says whether an answer to a question still counts; another loss makes it void."""
        return self._awaits(question.sequence, CoordinatorState.ROLLING_BACK)

    # ----------------------------------------------------------------------------------------------------------- events

    def begin(self) -> list[CoordinatorEffect]:
        """Starts a new term; a generation that waits for a decision is taken up again (P6)."""
        return self._go(Cause.BEGUN)

    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorEffect]:
        """Takes one event.

        Args:
            now_s: monotonic time, for the failure rate only.
        Returns:
            Effects, to be carried out in this order.
        """
        if self.state is CoordinatorState.ENDED:
            return [Note(f"{type(event).__name__} after the end is ignored")]
        if isinstance(event, Registered):
            return self._on_registered(event)
        if isinstance(event, Report):
            return self._on_report(event)
        if isinstance(event, Installed):
            return self._on_installed(event, now_s)
        if isinstance(event, Suspected):
            return self.suspect([event], now_s)
        if isinstance(event, WorkerFailed):
            return self._on_failed(event, now_s)
        if isinstance(event, Unsound):
            return self._on_unsound(event, now_s)
        if isinstance(event, EvidenceSeen):
            # The vote may have brought a change into force for which a join or a leave has waited (J4).
            return self._on_evidence(event) or self._advance(now_s)
        if isinstance(event, LayoutChange):
            return self._on_change_planned(event)
        if isinstance(event, CheckpointFound):
            return self._on_checkpoint(event)
        if isinstance(event, RecoveryPlanned | PlanningFailed):
            return self._on_planned(event)
        return self._on_membership(event, now_s)

    def _go(self, cause: Cause) -> list[CoordinatorEffect]:
        """Does what the table says about a cause."""
        self.state, responses = TRANSITIONS.next(self.state, cause)
        return [effect for response in responses for effect in self._responses[response]()]

    # ----------------------------------------------------------------------------------------------------- registration

    def _on_registered(self, event: Registered) -> list[CoordinatorEffect]:
        worker = self._speaker = event.worker
        if worker not in self.member_set:
            return self._go(Cause.NO_MEMBER)
        self._addresses[worker] = event.address
        if self.state is CoordinatorState.STARTING:
            if event.generation != FIRST_GENERATION:
                return [Note(f"worker {worker} registers in generation {event.generation} at the start")]
            return [] if len(self._addresses) < len(self.members) else self._go(Cause.REGISTERED)
        # Its start may have been lost with a connection, or with the coordinator that was about to send it.
        effects = self._go(Cause.START_IN_DOUBT)
        # A worker registers with its report until it has carried out the decision that answers it.
        has_decision = event.generation >= self.generation and event.report is None
        if self.state is CoordinatorState.COLLECTING:
            # A report for an older generation is no promise for this one.
            report = event.report if event.generation == self.generation else None
            effects += self._go(Cause.NOT_ASKED) if report is None else self._on_report(report)
        elif self.state is CoordinatorState.TRAINING and self.decision is not None and not has_decision:
            # The question comes before the decision: a member takes that only once it has moved and reported (W1).
            effects += self._go(Cause.DECISION_MISSED)
        elif event.generation > self.generation:
            effects.append(
                Note(f"worker {worker} registers in generation {event.generation}, the newest is {self.generation}")
            )
        if self.state is CoordinatorState.TRAINING and self._changes:
            # It may have been lost with a connection; one that is in force already, or held, is ignored.
            effects += self._go(Cause.CHANGE_IN_DOUBT)
        if self.state is CoordinatorState.TRAINING:
            effects += self._go(Cause.CALL_IN_DOUBT)
        if self.state is CoordinatorState.TRAINING and self.admissions.is_asked:
            effects += self._go(Cause.PAUSE_IN_DOUBT)
        return effects

    def _tell_addresses(self) -> list[CoordinatorEffect]:
        """Tells them once all are known: also while a generation waits for reports, because a worker that does not know
        its peers cannot leave a generation. After a decision every member knows them."""
        if self.decision is not None or not self._addresses.keys() >= self.member_set:
            return []
        self._addresses_sent = True
        return [TellAddresses(dict(self._addresses))]

    def _send_decision_again(self) -> list[CoordinatorEffect]:
        """Sends it in this term: perhaps an earlier coordinator made it, in whose name a worker that has heard of us
        would not take it."""
        assert self.decision is not None
        return [Send(self._speaker, msgspec.structs.replace(self.decision, term=self.term))]

    def _send_change_again(self) -> list[CoordinatorEffect]:
        return [Send(self._speaker, msgspec.structs.replace(self._changes[self._num_changes], term=self.term))]

    # -------------------------------------------------------------------------------------------------- losing a worker

    def suspect(
        self, suspicions: Sequence[Suspected], now_s: float, failure: WorkerFailure | None = None
    ) -> list[CoordinatorEffect]:
        """Takes suspicions that came together: one new generation for all of them, also while a recovery is planned
        (P1).

        Args:
            now_s: as of `handle`.
            failure: the error with which the only one of them has ended itself.
        """
        fresh = tuple(suspicion for suspicion in suspicions if suspicion.worker in self.members)
        if not fresh or self.state is CoordinatorState.ENDED:
            return [Note(f"the suspicion of worker {suspicion.worker} does not count") for suspicion in suspicions]
        leaving = sorted({suspicion.worker for suspicion in fresh})
        members = tuple(worker for worker in self.members if worker not in leaving)
        recent = [at_s for at_s in self._loss_events_at_s if now_s - at_s < 3600.0]
        # Until the decision all losses are one event, whatever it was that took these workers (P8).
        self._loss_events_at_s = recent if self.lost else [*recent, now_s]
        if len(self._loss_events_at_s) > self._bounds.max_failures_per_hour:
            return self._give_up(
                Cause.TOO_MANY_LOSSES,
                f"workers were lost {len(self._loss_events_at_s)} times within an hour, elastic.max_failures_per_hour "
                f"allows {self._bounds.max_failures_per_hour}",
            )
        if len(members) < max(1, self._bounds.min_workers):
            lost = sorted({*self.lost, *leaving})
            return self._give_up(
                Cause.TOO_FEW_LEFT,
                f"{len(members)} workers are left after the loss of workers {lost}, elastic.min_workers asks for "
                f"{self._bounds.min_workers}",
            )
        # The next decision names all that were lost since the last one, however many generations came between.
        self.lost = (*self.lost, *leaving)
        self.joined = tuple(worker for worker in self.joined if worker not in leaving)
        self._suspicions = fresh
        self.doubts_step = self.doubts_step or (failure is not None and failure.is_wrong)
        reason = "; ".join(suspicion.reason for suspicion in fresh)
        self._begin_generation(members, reason, now_s, failure=failure)
        return self._go(Cause.SUSPECTED)

    def _on_unsound(self, event: Unsound, now_s: float) -> list[CoordinatorEffect]:
        """Begins a generation since copies are wrong: all members report what they have, and a right copy of each block
        is promoted. One that is under way already asks for the same."""
        if (
            event.worker not in self.member_set
            or event.generation != self.generation
            or self.state is not CoordinatorState.TRAINING
        ):
            return [Note(f"what worker {event.worker} says of copies in generation {event.generation} is not awaited")]
        self._begin_generation(self.members, event.reason, now_s)
        # After `_begin_generation`, which forgets who has said so before.
        self._suspicions, self._unsound = (), (event.worker,)
        return self._go(Cause.UNSOUND)

    def _begin_generation(
        self,
        members: tuple[int, ...],
        reason: str,
        now_s: float,
        *,
        joined: tuple[int, ...] = (),
        domains: Mapping[int, str] = MappingProxyType({}),
        left: tuple[int, ...] = (),
        failure: WorkerFailure | None = None,
    ) -> None:
        self.generation += 1
        self.members, self.reason = members, reason
        self._unsound = ()
        self.admissions.new_generation()
        self.admissions.leaving &= set(members)
        self.report_collection.new_generation()
        self._new_generation = NewGenerationRecord(
            term=self.term,
            generation=self.generation,
            members=members,
            # All of them: a successor takes the losses without a decision from the newest record alone.
            lost=self.lost,
            reason=reason,
            at_s=now_s,
            failure=failure,
            joined=joined,
            domains=dict(domains),
            left=left,
        )

    def _show_generation(self) -> list[CoordinatorEffect]:
        assert self._new_generation is not None
        record = self._new_generation
        # A join or a leave begins a generation of its own: what stands there is of an earlier loss.
        suspicions = () if record.joined or record.left else self._suspicions
        return [NewGeneration(self.generation, suspicions, record.joined, record.left, self._unsound)]

    def _persist_generation(self) -> list[CoordinatorEffect]:
        assert self._new_generation is not None
        return [Persist(self._new_generation)]

    def _fence_off(self) -> list[CoordinatorEffect]:
        leaving = sorted({suspicion.worker for suspicion in self._suspicions})
        return [Send(worker, self._fenced_off(self.reason)) for worker in leaving]

    def _on_failed(self, event: WorkerFailed, now_s: float) -> list[CoordinatorEffect]:
        """Takes an error of a worker's own: what fails twice at the same place will fail everywhere, and so will what a
        vote has shown. Who has not ended with that yet must not be asked to go on without those that have."""
        if event.is_common:
            return self._give_up(Cause.ERROR_COMMON, event.summary, event.worker)
        before = self._failures.get(event.signature)
        # A message may come twice: only another worker shows that the error strikes everywhere.
        if before is not None and before != event.worker:
            reason = f"{event.summary}; the same error has ended worker {before}"
            return self._give_up(Cause.ERROR_REPEATED, reason, event.worker)
        self._failures[event.signature] = event.worker
        self._errors[event.worker] = event.summary
        # Else `suspect` would name the lack of workers, which only follows from this error.
        if event.worker in self.members and len(self.members) <= max(1, self._bounds.min_workers):
            return self._give_up(Cause.LAST_FAILED, event.summary, event.worker)
        failure = WorkerFailure(
            worker=event.worker, signature=event.signature, summary=event.summary, is_wrong=event.is_wrong
        )
        return self.suspect([Suspected(event.worker, "exit", event.summary)], now_s, failure)

    def _give_up(
        self, cause: Cause, reason: str, worker: int | None = None, orphans: tuple[int, ...] = ()
    ) -> list[CoordinatorEffect]:
        if worker is None and self._errors:
            # An error that strikes all replicas at once, each at another micro-batch, is the reason of all the rest.
            worker, summary = next(iter(self._errors.items()))
            reason = f"{summary}; {reason}"
        self._end = End(reason, worker, orphans)
        return self._go(cause)

    # ------------------------------------------------------------------------------------------------ joins and leaves

    def _on_membership(
        self, event: JoinerCame | JoinerGone | LeaveWanted | Linked | Paused, now_s: float
    ) -> list[CoordinatorEffect]:
        """Takes what is told of joiners, and of members that are to leave."""
        worker, admissions = event.worker, self.admissions
        effects: list[CoordinatorEffect] = []
        if isinstance(event, JoinerCame):
            if worker in self.members:
                return [Note(f"worker {worker} is a member already")]
            admissions.came(worker, event.address, event.domain)
            if self.state is CoordinatorState.TRAINING:
                effects = self._go(Cause.CALLED)
        elif isinstance(event, JoinerGone):
            if admissions.gone(worker) and self.state is CoordinatorState.TRAINING:
                effects = self._go(Cause.CALLED)
        elif isinstance(event, LeaveWanted):
            if worker not in self.member_set or worker in admissions.leaving:
                return [Note(f"worker {worker} is no member, or is leaving already")]
            admissions.leaving.add(worker)
            self._leaver = worker
            effects = self._go(Cause.LEAVE_WANTED)
        elif isinstance(event, Linked):
            admissions.linked(worker, event.peers)
        elif worker not in self.member_set or event.generation != self.generation:
            return [
                Note(f"what worker {worker} says is of generation {event.generation}, the newest is {self.generation}")
            ]
        # The pause may have been asked for by an earlier coordinator: nobody else would end it (J8).
        elif event.is_over or event.step <= admissions.go_on_after or not admissions.is_asked:
            return self._pause_is_over(event)
        else:
            admissions.paused[worker] = event.step
        return effects + self._advance(now_s)

    def _advance(self, now_s: float) -> list[CoordinatorEffect]:
        """Does what is next on the way to another membership. It waits for a change that is under way: a new generation
        would make that void."""
        admissions = self.admissions
        if self.state is not CoordinatorState.TRAINING or not self._resumed or self.is_changing:
            return []
        in_force = self.in_force()
        joined = admissions.ready(self.members)
        left = admissions.released(self.members, in_force.layout, in_force.placement)
        # Who was to come may have gone since the pause was asked for: nobody may go on waiting for it.
        if not joined and not left:
            return self._go(Cause.PAUSED_IN_VAIN) if admissions.is_asked else []
        if not admissions.is_asked:
            return self._go(Cause.MEMBERSHIP_READY)
        if not admissions.paused.keys() >= self.member_set:
            return []
        members = tuple(sorted({*self.members, *joined} - set(left)))
        what = [f"worker {worker} joins" for worker in joined] + [f"worker {worker} leaves" for worker in left]
        self.joined, self.left = (*self.joined, *joined), (*self.left, *left)
        self._fresh.update(joined)
        self._gone_as_asked.update(left)
        domains = {worker: domain for worker in joined if (domain := admissions.domains[worker])}
        self.domains.update(domains)
        for worker in joined:
            self._addresses[worker] = admissions.joiners[worker]
            admissions.gone(worker)
        self._begin_generation(members, "; ".join(what), now_s, joined=joined, domains=domains, left=left)
        return self._go(Cause.ALL_PAUSED)

    def _call(self) -> list[CoordinatorEffect]:
        return [Send(worker, call) for worker, call in self._calls()]

    def _call_again(self) -> list[CoordinatorEffect]:
        """Tells a member once more, which may not have heard of the joiners, or that some are gone that an earlier
        coordinator has told it of; joiners may not know where it listens."""
        told = {self._speaker, *self.admissions.joiners}
        return [Send(worker, call) for worker, call in self._calls() if worker in told]

    def _calls(self) -> list[tuple[int, Dial]]:
        """Makes calls also when there are no joiners any more: then nobody is wanted."""
        self._has_called = self._has_called or bool(self.admissions.joiners)
        if not self._has_called:
            return []
        addresses = {worker: self._addresses[worker] for worker in self.members if worker in self._addresses}
        return self.admissions.calls(addresses, self.members, self.term, self.generation)

    def _ask_pause(self) -> list[CoordinatorEffect]:
        self.admissions.is_asked = True
        ask = AskPause(term=self.term, generation=self.generation)
        return [Send(worker, ask) for worker in self.members]

    def _pause_is_over(self, event: Paused) -> list[CoordinatorEffect]:
        """Lets all go on that wait after a step: this coordinator has thought better of it, or an earlier one has. Who
        has paused asks for no other pause, unless it is told to once more."""
        waiting = self.admissions.go_on(event.step)
        if not event.is_over:
            waiting.append(event.worker)
        # The new generation that is under way ends all pauses by itself.
        if self.state is not CoordinatorState.TRAINING:
            return []
        messages: list[GoOn | AskPause] = [GoOn(term=self.term, generation=self.generation)]
        if self.admissions.is_asked:
            messages.append(AskPause(term=self.term, generation=self.generation))
        return [Send(worker, message) for worker in waiting for message in messages]

    def _let_go_on(self) -> list[CoordinatorEffect]:
        admissions = self.admissions
        # The word of a member that pauses now may come after the next request: it is let go on then as well.
        admissions.go_on_after = max(admissions.go_on_after, *admissions.paused.values(), 0)
        admissions.is_asked = False
        admissions.paused.clear()
        return [Send(worker, GoOn(term=self.term, generation=self.generation)) for worker in self.members]

    def _release(self) -> list[CoordinatorEffect]:
        assert self._new_generation is not None
        return [Send(worker, self._released()) for worker in self._new_generation.left]

    # -------------------------------------------------------------------------------------------------- planned changes

    def _on_change_planned(self, event: LayoutChange) -> list[CoordinatorEffect]:
        if self.state is not CoordinatorState.TRAINING or event.generation != self.generation:
            return [
                Note(
                    f"a plan for generation {event.generation} comes in generation {self.generation}, "
                    f"{self.state.value}"
                )
            ]
        if event.layout.workers != self.members:
            return [Note(f"a plan for workers {event.layout.workers}, but the members are {self.members}")]
        # Each that follows relieves more than the one before: they come to an end.
        relieves_more = self.may_supersede and self._burdened(event) < self.unrelieved
        if self.is_changing and not relieves_more:
            return [Note(f"a plan comes while change {self._num_changes} is under way")]
        # The new generation that follows the pause would make the change void (M7).
        if self.admissions.is_asked:
            return [Note("a plan comes while the membership is about to change")]
        self._take_change(msgspec.structs.replace(event, term=self.term, number=self._num_changes + 1))
        return self._go(Cause.CHANGE_PLANNED)

    # ------------------------------------------------------------------------------------- from reports to the decision

    def _on_evidence(self, event: EvidenceSeen) -> list[CoordinatorEffect]:
        decided = FIRST_GENERATION if self.decision is None else self.decision.generation
        # Members go on from a decision that was made without this vote: it cannot count any more.
        if event.generation < decided:
            return [Note(f"a vote of generation {event.generation} comes after the decision of generation {decided}")]
        self.evidence = newest_evidence([self.evidence, event.evidence])
        if self.state is CoordinatorState.PLANNING and self.report_collection.is_outdated:  # P2
            return self._go(self.report_collection.assess(Cause.NEWER_EVIDENCE))
        return []

    def _on_report(self, report: Report) -> list[CoordinatorEffect]:
        self._speaker = report.worker
        if report.worker not in self.member_set:
            return self._go(Cause.NO_MEMBER)
        if report.generation != self.generation or self.state is not CoordinatorState.COLLECTING:
            return [Note(f"a report of worker {report.worker} for generation {report.generation} is not awaited")]
        return self._go(self.report_collection.assess(Cause.REPORTED)) if self.report_collection.add(report) else []

    def _on_checkpoint(self, event: CheckpointFound) -> list[CoordinatorEffect]:
        if not self._awaits(event.sequence, CoordinatorState.ROLLING_BACK):
            return [Note(f"the checkpoint that answers question {event.sequence} is not waited for")]
        problem = self.report_collection.take_checkpoint(event)
        if problem:
            return self._give_up(Cause.NO_CHECKPOINT, problem, orphans=self.report_collection.orphans)
        return self._go(Cause.FOUND)

    def _on_planned(self, event: RecoveryPlanned | PlanningFailed) -> list[CoordinatorEffect]:
        if self.report_collection.question is None or not self._awaits(event.sequence, CoordinatorState.PLANNING):
            return [Note(f"answer {event.sequence} of the planner is not awaited any more")]
        decision, self._predicted_step_s = self.report_collection.decide(event)
        self._take_over(decision)
        self._installed.clear()
        self._resumed = False
        return self._go(Cause.PLANNED if isinstance(event, RecoveryPlanned) else Cause.PLANNER_FAILED)

    def _awaits(self, sequence: int, state: CoordinatorState) -> bool:
        """Says whether an answer is to the newest question, asked in this state; another loss, or a newer vote, makes
        the one before void (P3)."""
        return self.state is state and sequence == self.report_collection.sequence

    def _ask(self) -> list[CoordinatorEffect]:
        prepare = self._prepare()
        return [Send(worker, prepare) for worker in self.members]

    def _persist_decision(self) -> list[CoordinatorEffect]:
        assert self.decision is not None
        return [Persist(self.decision)]

    def _send_decision(self) -> list[CoordinatorEffect]:
        assert self.decision is not None
        return [Send(worker, self.decision) for worker in self.members]

    def _show_decision(self) -> list[CoordinatorEffect]:
        assert self.decision is not None
        return [Decided(self.decision, self._predicted_step_s)]

    def _on_installed(self, event: Installed, now_s: float) -> list[CoordinatorEffect]:
        if event.generation != self.generation or event.worker not in self.member_set or self._resumed:
            return []
        self._installed[event.worker] = event
        self._fresh.discard(event.worker)
        if len(self._installed) < len(self.members):
            return []
        self._resumed = True
        # Joiners and leavers that were ready before have waited until all members compute again.
        return self._go(Cause.INSTALLED) + self._advance(now_s)
