"""A coordinator on another host, or after another start of this one, reads the times of those before it."""

from elaswave.observability.processes import clock_here
from elaswave.protocol.events import NewGenerationRecord, TermRecord
from elaswave.store.store import ClockRead, JournalRecord, PlaceTaken, Published, by_own_clock


def done(step: int, at_s: float) -> Published:
    return Published(step=step, loss=1.0, finished_s=at_s)


def generation_at(at_s: float) -> NewGenerationRecord:
    return NewGenerationRecord(term=1, generation=2, members=(0,), lost=(1,), reason="", at_s=at_s)


def begins(clock: str, at_s: float) -> list[JournalRecord]:
    return [ClockRead(clock=clock, at_s=at_s), TermRecord(term=1)]


def times(records: list[JournalRecord]) -> list[float]:
    return [
        record.finished_s if isinstance(record, Published) else record.at_s
        for record in records
        if not isinstance(record, TermRecord)
    ]


def test_times_of_the_own_clock_stay() -> None:
    records = [*begins("mine", 100.0), done(1, 101.0), generation_at(102.0), *begins("mine", 110.0), done(2, 111.0)]
    assert times(by_own_clock(records, "mine", 120.0)) == [101.0, 102.0, 111.0]


def test_the_newest_time_of_another_clock_is_now() -> None:
    records = [*begins("a", 9e5), done(1, 9e5 + 1), PlaceTaken(worker=4, place=0, at_s=9e5 + 3), done(2, 9e5 + 2)]
    assert times(by_own_clock(records, "b", 50.0)) == [48.0, 50.0, 49.0]


def test_each_coordinator_begins_where_the_one_before_ended() -> None:
    first = [*begins("a", 1000.0), done(1, 1004.0), done(2, 1005.0)]
    second = [*begins("b", 7.0), done(3, 8.0), generation_at(9.0)]
    told = times(by_own_clock([*first, *second], "c", -100.0))
    assert told == [-103.0, -102.0, -101.0, -100.0]
    again = [*begins("a", 2000.0), done(4, 2001.0)]  # the first host once more
    told = times(by_own_clock([*first, *second, *again], "a", 2010.0))
    assert told[:2] == [1004.0, 1005.0] and told[2:] == [1999.0, 2000.0, 2001.0]


def test_coordinators_of_one_host_are_shifted_alike() -> None:
    """What passed between them is known there."""
    records = [*begins("a", 10.0), done(1, 11.0), *begins("a", 20.0), done(2, 25.0)]
    assert times(by_own_clock(records, "b", 1000.0)) == [986.0, 1000.0]


def test_one_that_has_recorded_nothing_took_no_time() -> None:
    records = [*begins("a", 10.0), done(1, 11.0), *begins("b", 500.0), *begins("c", 3.0), done(2, 4.0)]
    assert times(by_own_clock(records, "d", 100.0)) == [99.0, 100.0]
    assert by_own_clock([], "a", 1.0) == []


def test_a_clock_has_a_name() -> None:
    assert clock_here() == clock_here() and len(clock_here()) > 30
