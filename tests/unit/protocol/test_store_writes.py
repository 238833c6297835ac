"""What answers of a store mean to who has asked."""

import json

from elaswave.protocol.coordinator.store_writes import (
    NOBODY,
    SPEC,
    TERM,
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    TransactionResult,
    Written,
    holder_of,
    is_there,
    job_generation_of,
    lease_heartbeat_of,
    lease_heartbeat_value,
    spec_value,
)

SPEC_1 = KeyValue(SPEC, spec_value(7), 1)
SEEN = Holder(2, "a/1", 17, b"a's claim")
MINE = Holder(3, "b/2", 20, b'{"term": 3, "holder": "b/2", "nonce": "n1"}')


def term_of(claim: Claim, revision: int) -> KeyValue:
    ((key, value),) = claim.transaction().puts
    return KeyValue(key, value, revision)


def test_a_claim_compares_with_what_was_seen_and_raises_the_term() -> None:
    claim = Claim("b/2", "n1", SEEN, SPEC_1, 7)
    asked = claim.transaction()
    assert asked.unwritten_since == ((TERM, 17), (SPEC, 1)) and asked.reads == (TERM,)
    assert asked.values == ((TERM, b"a's claim"),)
    assert json.loads(asked.puts[0][1]) == {"term": 3, "holder": "b/2", "nonce": "n1"}
    assert claim.judge(TransactionResult(True, 20)) == MINE
    first = Claim("b/2", "n1", NOBODY, SPEC_1, 7).transaction()
    assert (first.unwritten_since, first.values) == (((TERM, 0), (SPEC, 1)), ())


def test_a_claim_knows_itself_by_its_nonce() -> None:
    claim = Claim("b/2", "n1", SEEN, SPEC_1, 7)
    assert claim.judge(TransactionResult(False, 25, (term_of(claim, 20),))) == MINE, "an earlier request had arrived"
    other = term_of(Claim("b/2", "n2", SEEN, SPEC_1, 7), 20)
    assert claim.judge(TransactionResult(False, 25, (other,))) is None
    assert claim.judge(TransactionResult(False, 25, (None,))) is None
    own = term_of(claim, 20)
    assert holder_of(own) == MINE != holder_of(other) and holder_of(None) == NOBODY
    assert MINE.has_lost_lease(other), "a store that was put back comes to a revision twice"


def test_an_entry_compares_term_and_absence() -> None:
    entry = EntryWrite(MINE, "rec/5", b"value", ["blob/1"])
    asked = entry.transaction()
    assert asked.unwritten_since == ((TERM, 20), ("rec/5", 0)) and asked.exist == ("blob/1",)
    assert asked.values == ((TERM, MINE.value),)
    assert asked.puts == (("rec/5", b"value"),) and asked.reads == (TERM, "rec/5")


def test_what_stands_there_tells_what_became_of_an_entry() -> None:
    entry = EntryWrite(MINE, "rec/5", b"value")
    own = KeyValue(TERM, MINE.value, 20)
    assert entry.judge(TransactionResult(True, 30)) is Written.YES
    assert entry.judge(TransactionResult(False, 30, (own, KeyValue("rec/5", b"value", 21)))) is Written.YES
    assert entry.judge(TransactionResult(False, 30, (own, KeyValue("rec/5", b"other", 21)))) is Written.TAKEN
    assert entry.judge(TransactionResult(False, 30, (own, None))) is Written.INCOMPLETE
    for term in (None, KeyValue(TERM, MINE.value, 22), KeyValue(TERM, b"another's", 20)):
        assert entry.judge(TransactionResult(False, 30, (term, KeyValue("rec/5", b"value", 21)))) is Written.LEASE_LOST
        assert MINE.has_lost_lease(term)
    assert not MINE.has_lost_lease(own)


# ------------------------------------------------------------------------------------------------------ strangers (H14)

FORGED = KeyValue(TERM, b"", 23, is_genuine=False)


def test_what_is_not_genuine_tells_nothing() -> None:
    assert holder_of(FORGED) == (0, "", 23, b"")
    assert (
        job_generation_of(SPEC_1) == 7
        and job_generation_of(SPEC_1._replace(value=b"", is_genuine=False)) == job_generation_of(None) == 0
    )
    lease_heartbeat = KeyValue("lease_heartbeat", lease_heartbeat_value(3, 5), 9)
    assert (
        lease_heartbeat_of(lease_heartbeat, MINE),
        lease_heartbeat_of(lease_heartbeat, SEEN),
        lease_heartbeat_of(None, MINE),
    ) == (5, 0, 0)
    assert lease_heartbeat_of(lease_heartbeat._replace(value=b"", is_genuine=False), MINE) == 0


def test_a_founding_is_there_while_one_of_its_two_keys_is() -> None:
    mine, forged_spec = KeyValue(TERM, MINE.value, 20), SPEC_1._replace(value=b"", is_genuine=False)
    assert is_there(SPEC_1, None, 7) and not is_there(SPEC_1, FORGED, 7), "another job generation may have claimed it"
    assert is_there(SPEC_1, FORGED, 7, creates_job=True), (
        "nobody but its creator's coordinator can have claimed it before"
    )
    assert is_there(None, mine, 7) and is_there(forged_spec, mine, 7)
    assert not any(is_there(spec, term, 7) for spec in (None, forged_spec) for term in (None, FORGED))
    assert not is_there(SPEC_1, None, 8, creates_job=True) and not is_there(None, None, 0), "it was created again"
    assert is_there(SPEC_1, mine, 8), "an older spec was put back: the claim is of this job generation"


def test_a_claim_replaces_what_strangers_have_written_and_never_takes_a_smaller_term() -> None:
    claim = Claim("b/2", "n1", holder_of(FORGED), None, 7, above=9)
    asked = claim.transaction()
    assert asked.unwritten_since == ((TERM, 23), (SPEC, 0)) and asked.values == ()
    (_, term), (key, spec) = asked.puts
    assert json.loads(term)["term"] == claim.term == 10
    assert key == SPEC and job_generation_of(KeyValue(SPEC, spec, 30)) == 7
    assert claim.judge(TransactionResult(False, 30, (FORGED,))) is None


def test_only_a_newer_claim_follows_a_coordinator() -> None:
    older, newer = (KeyValue(TERM, json.dumps({"term": n, "holder": "c"}).encode(), 30) for n in (2, 4))
    twin = KeyValue(TERM, json.dumps({"term": 3, "holder": "c"}).encode(), 30)
    own = KeyValue(TERM, MINE.value, 40)
    assert [MINE.is_followed(found) for found in (newer, twin, older, own, FORGED, None)] == [True, True, *[False] * 4]
    assert all(MINE.has_lost_lease(found) for found in (newer, twin, older, own, FORGED, None))


def test_an_entry_takes_its_place_from_a_stranger() -> None:
    entry, own = EntryWrite(MINE, "rec/5", b"value", previous="rec/4"), KeyValue(TERM, MINE.value, 20)
    before = KeyValue("rec/4", b"before", 4)
    forged = KeyValue("rec/5", b"", 31, is_genuine=False)
    assert entry.judge(TransactionResult(False, 32, (own, forged, before))) is Written.FOREIGN
    assert ("rec/5", 31) in entry.transaction().unwritten_since
    assert entry.judge(TransactionResult(False, 32, (own, forged, before))) is Written.INCOMPLETE
    assert entry.judge(TransactionResult(False, 33, (own, forged._replace(revision=33), before))) is Written.FOREIGN
    assert entry.judge(TransactionResult(False, 34, (own, None, before))) is Written.FOREIGN
    assert ("rec/5", 0) in entry.transaction().unwritten_since
    assert entry.judge(TransactionResult(False, 34, (own, forged, None))) is Written.GONE_BACK
