"""Judges what coordinators do that follow each other: one of them writes, and what it says is durable (H4, H5)."""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections.abc import Sequence

from elaswave.protocol.events import NewEpochRecord, Record, TermRecord
from elaswave.protocol.messages import CoreToWorker, Decision, LayoutChange, Prepare
from elaswave.sim.protocol.checkers import Violation
from elaswave.sim.protocol.messages import CheckpointSettled
from elaswave.sim.protocol.observer import Observer


class OneCoordinator(Observer):
    """Each claim raises the store's term. In each term one coordinator writes, each record once. Nothing is said
    that is not durable, and nothing at all by who knows that it was replaced."""

    def __init__(self) -> None:
        self._claimed = 0
        self._writers: dict[int, int] = {}
        self._newest = 0
        """Term that was begun last."""
        self._written: set[tuple[int, int]] = set()
        self._fenced: set[int] = set()

    def claimed(self, term: int) -> None:
        if term <= self._claimed:
            raise Violation(f"term {term} is claimed although {self._claimed} was")
        self._claimed = term

    def persisted(self, writer: int, number: int, record: Record) -> None:
        term = record.term
        if isinstance(record, TermRecord):
            self._newest = max(self._newest, term)
        elif term < self._newest:
            raise Violation(f"a record of term {term} is written after term {self._newest} has begun")
        if self._writers.setdefault(term, writer) != writer:
            raise Violation(f"two coordinators write in term {term}")
        if (writer, number) in self._written:
            raise Violation(f"{type(record).__name__} of term {term} is written twice")
        self._written.add((writer, number))

    def fenced(self, writer: int) -> None:
        self._fenced.add(writer)

    def spoke(self, writer: int, message: CoreToWorker | CheckpointSettled, durable: Sequence[Record]) -> None:
        if writer in self._fenced:
            raise Violation(f"a coordinator that was replaced, and knows it, sends {type(message).__name__}")
        if not _stands(message, durable):
            raise Violation(f"{type(message).__name__} is sent before it is durable")


def _stands(message: CoreToWorker | CheckpointSettled, durable: Sequence[Record]) -> bool:
    """Whether what a message says is in the store."""
    if isinstance(message, Prepare):
        return any(isinstance(record, NewEpochRecord) and record.epoch == message.epoch for record in durable)
    if isinstance(message, Decision):
        return any(
            isinstance(record, Decision)
            and (record.epoch, record.resume_step, record.resume_attempt, record.placement)
            == (message.epoch, message.resume_step, message.resume_attempt, message.placement)
            for record in durable
        )
    if isinstance(message, LayoutChange):
        return any(isinstance(record, LayoutChange) and record.number == message.number for record in durable)
    return True
