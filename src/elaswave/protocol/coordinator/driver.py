"""Feeds events to the coordinator's machine and carries out its effects, in their order.

The product's process and the simulated one are drivers: they differ in how something is made durable, sent, found,
planned or shown, not in what follows what.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from elaswave.protocol.coordinator.decisions import MemberEnd, all_have_ended
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    CheckpointFound,
    CoordinatorEvent,
    Decided,
    End,
    EvidenceSeen,
    FindCheckpoint,
    NewGeneration,
    Note,
    PendingWork,
    Persist,
    PlanningFailed,
    PlanRecovery,
    RecoveryPlan,
    RecoveryPlanned,
    Resumed,
    Send,
    Suspected,
    TellAddresses,
)
from elaswave.protocol.membership.effects import AnyRecord, Effect
from elaswave.protocol.messages import CoreToWorker, Evidence


class CoordinatorDriver(ABC):
    """Carries out what the machine asks for."""

    core: Coordinator

    def feed(self, event: CoordinatorEvent) -> None:
        """Tells the machine of an event, and does what it asks for."""
        self.carry_out(self.core.handle(event, self.now_s()))

    def suspect(self, suspicions: Sequence[Suspected]) -> None:
        """Tells the machine of suspicions that came together."""
        self.carry_out(self.core.suspect(suspicions, self.now_s()))

    def hears(self, worker: int) -> bool:
        """Tells whether what a worker says counts. An excluded one is told that it is no member."""
        if worker in self.core.members:
            return True
        self.send(worker, self.core.dismissal(worker))
        return False

    def hears_vote(self, worker: int, evidence: Evidence, generation: int) -> bool:
        """Tells the machine of a vote that a worker reports: until the decision also an excluded worker's counts.

        Returns:
            Whether the worker is a member, so that the step can be published.
        """
        self.feed(EvidenceSeen(evidence, generation))
        return self.hears(worker)

    def end_if_finished(self) -> None:
        """Ends the job if nothing is left to be done (W10); to be called whenever that may have changed.

        No worker may exit before every member's last apply is known here, in the present generation, nor before it is
        durable what became of every checkpoint.
        """
        core = self.core
        # A new generation withdraws all ends, and members may write parts of a checkpoint again.
        if core.state is not CoordinatorState.TRAINING:
            return
        if all_have_ended(core.members, core.generation, self.ends(), self.published_step()):
            self.give_up_missing_parts()
            if not self.is_committing():  # else the answer leads here again
                self.on_finished()

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries out effects in their order."""
        # A quick planner answers within its effect: what follows from that is carried out before the next effect.
        for effect in effects:
            self.carry_out_one(effect)

    def carry_out_one(self, effect: Effect) -> None:
        """Carries out one effect."""
        if isinstance(effect, Persist):
            self.persist(effect.record)
        elif isinstance(effect, Send):
            self.send(effect.worker, effect.message)
        elif isinstance(effect, TellAddresses):
            self.tell_addresses(effect.addresses)
        elif isinstance(effect, FindCheckpoint):
            self.find_checkpoint(effect)
        elif isinstance(effect, PlanRecovery):
            self.plan_recovery(effect)
        elif isinstance(effect, NewGeneration):
            self.on_new_generation(effect)
        elif isinstance(effect, Decided):
            self.on_decided(effect)
        elif isinstance(effect, Resumed):
            self.on_resumed(effect)
        elif isinstance(effect, End):
            self.on_end(effect)
        elif isinstance(effect, Note):
            self.note(effect)

    # ------------------------------------------------------------------------------------------- answers to the machine

    def answer_plan(self, question: PlanRecovery, plan: RecoveryPlan | str) -> None:
        """Answers a question of the machine's, in the same turn or later. An answer that is not awaited any more has
        no effect.

        Args:
            question: the effect.
            plan: the answer, or why there is none.
        """
        pending = self._pending(question)
        if isinstance(plan, str):
            self.feed(PlanningFailed(question.sequence, plan, pending))
        else:
            self.feed(RecoveryPlanned(question.sequence, plan, pending))

    def answer_checkpoint(self, question: FindCheckpoint, step: int | None) -> None:
        """Answers `FindCheckpoint`; as of `answer_plan`."""
        self.feed(CheckpointFound(question.sequence, step))

    def _pending(self, question: PlanRecovery) -> PendingWork:
        """Tells what is still to be done as of now, and not as of the question (P5): a checkpoint may have become
        durable while the planner was busy."""
        evidence = question.evidence
        return self.pending_work(question.base, evidence is not None and evidence.checkpoint == question.base)

    # -------------------------------------------------------------------------------------------- what differs

    @abstractmethod
    def now_s(self) -> float:
        """Reads the monotonic time."""

    @abstractmethod
    def persist(self, record: AnyRecord) -> None:
        """Makes a record durable."""

    @abstractmethod
    def send(self, worker: int, message: CoreToWorker) -> None:
        """Sends a message to a worker, if it is connected."""

    @abstractmethod
    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """Tells the members each other's addresses."""

    @abstractmethod
    def find_checkpoint(self, question: FindCheckpoint) -> None:
        """Begins to look for the newest checkpoint; `answer_checkpoint` follows."""

    @abstractmethod
    def plan_recovery(self, question: PlanRecovery) -> None:
        """Begins to plan; `answer_plan` follows, within a bound."""

    @abstractmethod
    def pending_work(self, step: int, asked: bool) -> PendingWork:
        """Tells what of a committed step is still to be done.

        Args:
            step: the newest committed one.
            asked: whether a vote asked for a durable checkpoint of it.
        """

    @abstractmethod
    def ends(self) -> Mapping[int, MemberEnd]:
        """Returns the workers that have said that they have made their last step."""

    @abstractmethod
    def published_step(self) -> int:
        """Returns the newest step whose loss is known."""

    @abstractmethod
    def give_up_missing_parts(self) -> None:
        """Gives up checkpoints whose missing parts will never come, see `Shards.end`."""

    @abstractmethod
    def is_committing(self) -> bool:
        """Tells whether a checkpoint is being committed."""

    @abstractmethod
    def on_finished(self) -> None:
        """All steps are made, and nothing is left to be done: ends the job."""

    @abstractmethod
    def on_new_generation(self, effect: NewGeneration) -> None:
        """Shows that workers were lost."""

    @abstractmethod
    def on_decided(self, effect: Decided) -> None:
        """Shows how survivors go on."""

    @abstractmethod
    def on_resumed(self, effect: Resumed) -> None:
        """Shows that all members compute again."""

    @abstractmethod
    def on_end(self, effect: End) -> None:
        """Ends the job."""

    @abstractmethod
    def note(self, effect: Note) -> None:
        """Logs what was ignored."""
