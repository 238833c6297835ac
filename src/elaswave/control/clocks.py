"""Times that earlier coordinators have recorded, by the clock of the one that reads them. No IO.

Each coordinator first records which clock it has and what that shows (`ClockRead`). Where that is another host's, its
readings mean nothing here, but their differences do. So a successor shifts them: the newest time that is known of a
coordinator is taken for the moment at which the next one began. What passed in between is left out.
"""

from collections.abc import Sequence

import msgspec

from elaswave.control.journal import ClockRead, JournalRecord, LeaveAsked, PlaceTaken, Published
from elaswave.protocol.events import NewEpochRecord


def by_own_clock(records: Sequence[JournalRecord], clock: str, now_s: float) -> list[JournalRecord]:
    """Records with times of the reader's clock.

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
    if isinstance(record, ClockRead | PlaceTaken | LeaveAsked | NewEpochRecord):
        return record.at_s
    return None


def _shifted(record: JournalRecord, shift_s: float) -> JournalRecord:
    if isinstance(record, Published):
        return msgspec.structs.replace(record, finished_s=record.finished_s + shift_s)
    if isinstance(record, PlaceTaken | LeaveAsked | NewEpochRecord):
        return msgspec.structs.replace(record, at_s=record.at_s + shift_s)
    return record
