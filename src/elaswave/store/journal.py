"""What a coordinator makes durable, in one journal: the records of the protocol's machine and of the run recorder.

`events.jsonl` is for people and tools; it may be incomplete (a full disk, a death between two writes). Whatever a new
coordinator must know to go on, and to write the result, stands here. A published step takes some 90 bytes and 5 us of
the coordinator; a successor reads a million of them in about 4 s.
"""

from collections.abc import Sequence

import msgspec

from elaswave.observability.events import AnyEvent
from elaswave.protocol import events
from elaswave.protocol.membership.effects import LeaveAsked, MembershipRecord, PlaceTaken, StepPublished


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
    """Which, see `elaswave.observability.clock`."""
    at_s: float
    """What it shows."""


RecorderRecord = Published | Entered | CheckpointGivenUp
"""Records of the run recorder."""
JournalRecord = events.Record | RecorderRecord | MembershipRecord | ClockRead
"""All records."""


def core_records(records: list[JournalRecord]) -> list[events.Record]:
    """Those of the protocol's core, in order."""
    return [record for record in records if not isinstance(record, RecorderRecord | MembershipRecord | ClockRead)]


def membership_records(records: Sequence[JournalRecord]) -> list[object]:
    """All, as the rules about members read them."""
    published = StepPublished()
    return [published if isinstance(record, Published) else record for record in records]


def by_own_clock(records: Sequence[JournalRecord], clock: str, now_s: float) -> list[JournalRecord]:
    """Records with times of the reader's clock.

    Each coordinator first records which clock it has and what that shows (`ClockRead`). Where that is another host's,
    its readings mean nothing here, but their differences do. So a successor shifts them: the newest time that is known
    of a coordinator is taken for the moment at which the next one began. What passed in between is left out.

    Args:
        records: of earlier coordinators, in order.
        clock: the reader's, see `elaswave.observability.clock`.
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
    """The records of one after the other, each beginning with its clock's."""
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
