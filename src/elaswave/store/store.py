"""Where a coordinator makes durable what it decides: what every store promises. No IO here.

A store holds records of one typed union in the order in which they were given to it. Two implementations:
`elaswave.store.file_store` (a journal in a file, the default) and `elaswave.store.etcd_store`. The suite
`tests/conformance/test_store_conformance.py` is the definition: both pass it.

*Persist before send*: `append` returns when records are durable, so whoever calls it before it sends never acts on what
a successor would not know. What is only reported (losses, checkpoints, recoveries) is given to `add`, which does not
wait; whatever must not be forgotten by others before that is durable is put off with `when_durable`.

At most one coordinator writes: opening a store either ends the right of the one before to write, or is refused. A
coordinator that has been replaced is refused with `SupersededError`, and nothing of it is written.

What a coordinator makes durable, in one journal: the records of the protocol's machine and of the run recorder.

`events.jsonl` is for people and tools; it may be incomplete (a full disk, a death between two writes). Whatever a new
coordinator must know to go on, and to write the result, stands here. A published step takes some 90 bytes and 15 us of
the coordinator; a successor reads a million of them in about 4 s.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from elaswave.errors import StoreError, SupersededError
from elaswave.observability.events import AnyEvent
from elaswave.protocol import events
from elaswave.protocol.leadership.store_position import StorePosition, TermLease
from elaswave.protocol.membership.effects import LeaveAsked, MembershipRecord, PlaceTaken, StepPublished

_T = TypeVar("_T")


class Store(Protocol[_T]):
    """Records of a job's coordinators."""

    def append(self, *records: _T) -> None:
        """Appends records, all of them or none; returns when they, and all before them, are durable.

        Raises:
            SupersededError: another coordinator has taken over. They are not written.
            StoreError: they may or may not be durable, or the store is closed. It takes no more records: open it again.
        """

    def add(self, *records: _T) -> None:
        """Appends records, all of them or none, without waiting: they are durable soon, in the order given.

        Raises:
            SupersededError, StoreError: as of `append`; also for what was given earlier.
        """

    def when_durable(self, call: Callable[[], None]) -> None:
        """Calls back on the caller's thread once all that was given so far is durable; at once if it is. Never if that
        fails."""

    def records(self) -> list[_T]:
        """Lists all durable records, oldest first: those found at the opening and those since."""

    @property
    def store_position(self) -> StorePosition | None:
        """Where the durable history stands; None: the store cannot go back while a job runs."""

    def check(self, reported: StorePosition) -> bool:
        """Compares what a member has heard of the history with what is there (H9).

        Returns:
            Whether it is a member of this job, and of no other job generation of it.
        Raises:
            SupersededError: another coordinator has taken over.
            StoreError: the store has lost what was durable.
        """

    def close(self) -> None:
        """Gives up the store; another process may open it. What was added is written first, within a bound."""


class Owner(NamedTuple):
    """How a store that works in a thread of its own reaches the thread that uses it."""

    post: Callable[[Callable[[], None]], object]
    """Has a call made on the owner's thread, soon. Called by the store's thread."""
    turn: Callable[[], None]
    """Called again and again while the owner waits in `Store.append`: its peers must not take it for dead."""
    say: Callable[[str], None]
    """Says to people what is waited for. Called on the owner's thread."""
    broken: Callable[[StoreError], None]
    """The store takes no more records, and nobody waits who could be told so. Called on the owner's thread."""


class WriterLease:
    """Refuses what a coordinator gives to a store that has been replaced.

    Args:
        name: of the store, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lease = TermLease()

    def check(self, records: Iterable[object]) -> None:
        """Records are to be written.

        Raises:
            SupersededError: see `TermLease`.
        """
        for record in records:
            refusal = self._lease.refusal_of(record)
            if refusal is not None:
                raise SupersededError(f"{self._name} {refusal}")

    def took(self, records: Iterable[object]) -> None:
        """Records stand in the store, or will before all later ones."""
        for record in records:
            self._lease.took(record)


class Published(msgspec.Struct, frozen=True, kw_only=True, tag="published"):
    """The loss of a committed step is known to the coordinator; it may be shown."""

    step: int
    loss: float
    finished_s: float
    """When it was done, by the coordinator's monotonic clock; see `ClockRead`."""
    metrics: dict[str, float] = {}
    """By name."""


class Entered(msgspec.Struct, frozen=True, kw_only=True, tag="entered"):
    """An event that is part of the result: layouts, evaluations, checkpoints, recoveries, the outcome."""

    event: AnyEvent


class CheckpointGivenUp(msgspec.Struct, frozen=True, kw_only=True, tag="given up"):
    """The checkpoint of a step will never be complete."""

    step: int


class ClockRead(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """A coordinator begins: the times in all records from here to the next one of this kind are by its clock."""

    clock: str
    """Which, see `elaswave.observability.processes`."""
    at_s: float
    """What it shows."""


RecorderRecord = Published | Entered | CheckpointGivenUp
"""Records of the run recorder."""
JournalRecord = events.Record | RecorderRecord | MembershipRecord | ClockRead
"""All records."""


def core_records(records: list[JournalRecord]) -> list[events.Record]:
    """Lists those of the protocol's core, in order."""
    return [record for record in records if not isinstance(record, RecorderRecord | MembershipRecord | ClockRead)]


def membership_records(records: Sequence[JournalRecord]) -> list[object]:
    """Lists all, as the rules about members read them."""
    published = StepPublished()
    return [published if isinstance(record, Published) else record for record in records]


def by_own_clock(records: Sequence[JournalRecord], clock: str, now_s: float) -> list[JournalRecord]:
    """Converts records to times of the reader's clock.

    Each coordinator first records which clock it has and what that shows (`ClockRead`). Where that is another host's,
    its readings mean nothing here, but their differences do. So a successor shifts them: the newest time that is known
    of a coordinator is taken for the moment at which the next one began. What passed in between is left out.

    Args:
        records: of earlier coordinators, in order.
        clock: the reader's, see `elaswave.observability.processes`.
        now_s: what it shows.
    Returns:
        The records, without those that name clocks.
    """
    lives = _by_coordinator(records)
    told: list[JournalRecord] = []
    next_clock, next_begin_s, next_shift_s = clock, now_s, 0.0
    for life in reversed(lives):
        read = life[0] if isinstance(life[0], ClockRead) else None
        if read is None or read.clock == clock:
            shift_s = 0.0
        elif read.clock == next_clock:
            shift_s = next_shift_s
        else:
            shift_s = next_begin_s - max(at_s for record in life if (at_s := _time_of(record)) is not None)
        told = [_shifted(record, shift_s) for record in life if not isinstance(record, ClockRead)] + told
        if read is not None:
            next_clock, next_begin_s, next_shift_s = read.clock, read.at_s + shift_s, shift_s
    return told


def _by_coordinator(records: Sequence[JournalRecord]) -> list[list[JournalRecord]]:
    """Splits the records into those of one coordinator after the other, each beginning with its clock's."""
    lives: list[list[JournalRecord]] = []
    for record in records:
        if isinstance(record, ClockRead) or not lives:
            lives.append([])
        lives[-1].append(record)
    return lives


def _time_of(record: JournalRecord) -> float | None:
    if isinstance(record, Published):
        return record.finished_s
    if isinstance(record, ClockRead | PlaceTaken | LeaveAsked | events.NewGenerationRecord):
        return record.at_s
    return None


def _shifted(record: JournalRecord, shift_s: float) -> JournalRecord:
    if isinstance(record, Published):
        return msgspec.structs.replace(record, finished_s=record.finished_s + shift_s)
    if isinstance(record, PlaceTaken | LeaveAsked | events.NewGenerationRecord):
        return msgspec.structs.replace(record, at_s=record.at_s + shift_s)
    return record
