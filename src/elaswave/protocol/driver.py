"""Feeds events to the coordinator's machine and carries out its effects, in their order.

The product's process and the simulated one are drivers: they differ in how something is made durable, sent, found,
planned or shown, not in what follows what.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from elaswave.protocol.coordinator import Coordinator
from elaswave.protocol.events import (
    CheckpointFound,
    CoordinatorEffect,
    CoordinatorEvent,
    Decided,
    End,
    FindCheckpoint,
    NewEpoch,
    Note,
    PendingWork,
    Persist,
    PlanningFailed,
    PlanRecovery,
    Record,
    RecoveryPlan,
    RecoveryPlanned,
    Resumed,
    Send,
    TellAddresses,
)
from elaswave.protocol.messages import CoreToWorker


class CoordinatorDriver(ABC):
    """Carries out what the machine asks for."""

    core: Coordinator

    def feed(self, event: CoordinatorEvent) -> None:
        """Tells the machine of an event, and does what it asks for."""
        self.carry_out(self.core.handle(event, self.now_s()))

    def carry_out(self, effects: Sequence[CoordinatorEffect]) -> None:
        """Carries out effects in their order."""
        for effect in effects:
            self.carry_out_one(effect)

    def carry_out_one(self, effect: CoordinatorEffect) -> None:
        """Carries out one effect."""
        if isinstance(effect, Persist):
            self.persist(effect.record)
        elif isinstance(effect, Send):
            self.send(effect.worker, effect.message)
        elif isinstance(effect, TellAddresses):
            self.tell_addresses(effect.addresses)
        elif isinstance(effect, FindCheckpoint):
            self.find_checkpoint()
        elif isinstance(effect, PlanRecovery):
            self.plan_recovery(effect)
        elif isinstance(effect, NewEpoch):
            self.on_new_epoch(effect)
        elif isinstance(effect, Decided):
            self.on_decided(effect)
        elif isinstance(effect, Resumed):
            self.on_resumed(effect)
        elif isinstance(effect, End):
            self.on_end(effect)
        else:
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

    def answer_checkpoint(self, step: int | None) -> None:
        """Answers `FindCheckpoint`."""
        self.feed(CheckpointFound(step))

    def _pending(self, question: PlanRecovery) -> PendingWork:
        """As of now, and not as of the question: a checkpoint may have become durable while the planner was busy."""
        evidence = question.evidence
        return self.pending_work(question.base, evidence is not None and evidence.checkpoint == question.base)

    # -------------------------------------------------------------------------------------------- what differs

    @abstractmethod
    def now_s(self) -> float:
        """Monotonic time."""

    @abstractmethod
    def persist(self, record: Record) -> None:
        """Makes a record durable."""

    @abstractmethod
    def send(self, worker: int, message: CoreToWorker) -> None:
        """Sends a message to a worker, if it is connected."""

    @abstractmethod
    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """Tells the members each other's addresses."""

    @abstractmethod
    def find_checkpoint(self) -> None:
        """Begins to look for the newest checkpoint; `answer_checkpoint` follows."""

    @abstractmethod
    def plan_recovery(self, question: PlanRecovery) -> None:
        """Begins to plan; `answer_plan` follows, within a bound."""

    @abstractmethod
    def pending_work(self, step: int, asked: bool) -> PendingWork:
        """What of a committed step is still to be done.

        Args:
            step: the newest committed one.
            asked: whether a vote asked for a durable checkpoint of it.
        """

    @abstractmethod
    def on_new_epoch(self, effect: NewEpoch) -> None:
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
