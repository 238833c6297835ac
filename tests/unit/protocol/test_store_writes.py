"""What answers of a store mean to who has asked."""

import json

from elaswave.protocol.store_writes import (
    NOBODY,
    SPEC,
    TERM,
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    Outcome,
    Written,
    holder_of,
)

SEEN = Holder(2, "a/1", 17, b"a's claim")
MINE = Holder(3, "b/2", 20, b'{"term": 3, "holder": "b/2", "nonce": "n1"}')


def term_of(claim: Claim, revision: int) -> KeyValue:
    ((key, value),) = claim.transaction().puts
    return KeyValue(key, value, revision)


def test_a_claim_compares_with_what_was_seen_and_raises_the_term() -> None:
    claim = Claim("b/2", "n1", SEEN, 1)
    asked = claim.transaction()
    assert asked.unwritten_since == ((TERM, 17), (SPEC, 1)) and asked.reads == (TERM,)
    assert asked.values == ((TERM, b"a's claim"),)
    assert json.loads(asked.puts[0][1]) == {"term": 3, "holder": "b/2", "nonce": "n1"}
    assert claim.judge(Outcome(True, 20)) == MINE
    first = Claim("b/2", "n1", NOBODY, 1).transaction()
    assert (first.unwritten_since, first.values) == (((TERM, 0), (SPEC, 1)), ())


def test_a_claim_knows_itself_by_its_nonce() -> None:
    claim = Claim("b/2", "n1", SEEN, 1)
    assert claim.judge(Outcome(False, 25, (term_of(claim, 20),))) == MINE, "an earlier request had arrived"
    other = term_of(Claim("b/2", "n2", SEEN, 1), 20)
    assert claim.judge(Outcome(False, 25, (other,))) is None
    assert claim.judge(Outcome(False, 25, (None,))) is None
    own = term_of(claim, 20)
    assert holder_of(own) == MINE != holder_of(other) and holder_of(None) == NOBODY
    assert MINE.is_fenced(other), "a store that was put back comes to a revision twice"


def test_an_entry_compares_term_and_absence() -> None:
    entry = EntryWrite(MINE, "rec/5", b"value", ["blob/1"])
    asked = entry.transaction()
    assert asked.unwritten_since == ((TERM, 20), ("rec/5", 0)) and asked.exist == ("blob/1",)
    assert asked.values == ((TERM, MINE.value),)
    assert asked.puts == (("rec/5", b"value"),) and asked.reads == (TERM, "rec/5")


def test_what_stands_there_tells_what_became_of_an_entry() -> None:
    entry = EntryWrite(MINE, "rec/5", b"value")
    own = KeyValue(TERM, MINE.value, 20)
    assert entry.judge(Outcome(True, 30)) is Written.YES
    assert entry.judge(Outcome(False, 30, (own, KeyValue("rec/5", b"value", 21)))) is Written.YES
    assert entry.judge(Outcome(False, 30, (own, KeyValue("rec/5", b"other", 21)))) is Written.TAKEN
    assert entry.judge(Outcome(False, 30, (own, None))) is Written.INCOMPLETE
    for term in (None, KeyValue(TERM, MINE.value, 22), KeyValue(TERM, b"another's", 20)):
        assert entry.judge(Outcome(False, 30, (term, KeyValue("rec/5", b"value", 21)))) is Written.FENCED
        assert MINE.is_fenced(term)
    assert not MINE.is_fenced(own)
