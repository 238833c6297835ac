"""Judges what coordinators do that follow each other: one of them writes, what it says is durable (H4, H5), and no
worker follows two histories (H9)."""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections.abc import Sequence

from elaswave.protocol.events import NewGenerationRecord, TermRecord
from elaswave.protocol.membership.effects import AnyRecord, MembershipRecord
from elaswave.protocol.messages import CoreToWorker, Decision, LayoutChange, Prepare
from verify.simulator.checkers import Violation
from verify.simulator.messages import CheckpointSettled
from verify.simulator.observer import Observer


class OneCoordinator(Observer):
    """Each claim raises the store's term. In each term one coordinator writes, each record once. Nothing is said
    that is not durable, and nothing at all by who knows that it was replaced."""

    def __init__(self) -> None:
        self._claimed = 0
        self._writers: dict[int, int] = {}
        self._newest = 0
        """Term that was begun last."""
        self._written: set[tuple[int, int]] = set()
        self._lease_lost: set[int] = set()
        self._gone: list[AnyRecord] = []
        """Were durable until the store went back."""

    def claimed(self, term: int) -> None:
        if term <= self._claimed:
            raise Violation(f"term {term} is claimed although {self._claimed} was")
        self._claimed = term

    def persisted(self, writer: int, number: int, record: AnyRecord) -> None:
        term = self._newest if isinstance(record, MembershipRecord) else record.term
        if isinstance(record, TermRecord):
            self._newest = max(self._newest, term)
        elif term < self._newest:
            raise Violation(f"a record of term {term} is written after term {self._newest} has begun")
        if not isinstance(record, MembershipRecord) and self._writers.setdefault(term, writer) != writer:
            raise Violation(f"two coordinators write in term {term}")
        if (writer, number) in self._written:
            raise Violation(f"{type(record).__name__} of term {term} is written twice")
        if number > 1 and (writer, number - 1) not in self._written:
            raise Violation(f"{type(record).__name__} of term {term} is written, and what was before it is not there")
        self._written.add((writer, number))

    def lease_lost(self, writer: int) -> None:
        self._lease_lost.add(writer)

    def spoke(self, writer: int, message: CoreToWorker | CheckpointSettled, durable: Sequence[AnyRecord]) -> None:
        if writer in self._lease_lost:
            raise Violation(f"a coordinator that was replaced, and knows it, sends {type(message).__name__}")
        if not _stands(message, durable) and not _stands(message, self._gone):
            raise Violation(f"{type(message).__name__} is sent before it is durable")

    def went_back(self, term: int, standing: Sequence[tuple[int, int, AnyRecord]], gone: Sequence[AnyRecord]) -> None:
        self._claimed = term
        self._writers = {
            record.term: writer for writer, _, record in standing if not isinstance(record, MembershipRecord)
        }
        self._written = {(writer, number) for writer, number, _ in standing}
        self._newest = max((record.term for _, _, record in standing if isinstance(record, TermRecord)), default=0)
        self._gone += gone


class OneHistory(Observer):
    """What a worker has once been told of the history, every coordinator has that it hears of later. That the store has
    gone back is said only if it has."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, bytes]] = {}
        """Worker -> how many entries the longest history has that it was told of, and the last one."""
        self._went_back = False

    def sent(self, worker: int, history: Sequence[bytes]) -> None:
        length, last = self._sent.get(worker, (0, b""))
        if length and (len(history) < length or history[length - 1] != last):
            raise Violation(
                f"worker {worker} was told of {length} entries, and now by a coordinator that has {len(history)}, "
                "without the last one of those"
            )
        if history:
            self._sent[worker] = len(history), history[-1]

    def went_back(self, term: int, standing: Sequence[tuple[int, int, AnyRecord]], gone: Sequence[AnyRecord]) -> None:
        self._went_back = True

    def gone_back(self, seen: str) -> None:
        if not self._went_back:
            raise Violation(f"the store has not gone back, and the job ends because it had: {seen}")


def _stands(message: CoreToWorker | CheckpointSettled, durable: Sequence[AnyRecord]) -> bool:
    """Whether what a message says is in the store."""
    if isinstance(message, Prepare):
        return any(
            isinstance(record, NewGenerationRecord) and record.generation == message.generation for record in durable
        )
    if isinstance(message, Decision):
        return any(
            isinstance(record, Decision)
            and (record.generation, record.resume_step, record.resume_attempt, record.placement)
            == (message.generation, message.resume_step, message.resume_attempt, message.placement)
            for record in durable
        )
    if isinstance(message, LayoutChange):
        return any(isinstance(record, LayoutChange) and record.number == message.number for record in durable)
    return True
