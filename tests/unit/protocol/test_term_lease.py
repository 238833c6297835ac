"""Which coordinator may write."""

from elaswave.protocol.events import StartRecord, TermRecord
from elaswave.protocol.leadership.store_position import TermLease


def test_the_newest_term_alone_may_write():
    fence = TermLease()
    assert fence.refusal_of(TermRecord(term=1)) is None
    fence.took(TermRecord(term=1))
    fence.took(StartRecord(term=1))
    assert fence.refusal_of(StartRecord(term=1)) is None
    assert fence.refusal_of(TermRecord(term=1)) == (
        "takes no second beginning of term 1: another coordinator has begun it; this must end"
    )
    fence.took(TermRecord(term=2))
    assert fence.refusal_of(StartRecord(term=1)) == fence.refusal(1)
    assert fence.refusal(1) == ("takes no record of term 1: a coordinator of term 2 has taken over; this must end")
    assert fence.refusal(2) is None


def test_a_record_without_a_term_is_its_writers():
    fence = TermLease()
    fence.took(TermRecord(term=3))
    fence.took(object())
    assert fence.refusal_of(object()) is None and fence.term == 3
