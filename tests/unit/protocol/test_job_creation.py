"""Who creates a job, what becomes of what an earlier one has left, and what its end leaves (H1, H13)."""

import pytest

from elaswave.protocol.coordinator.store_writes import (
    OUTCOME,
    SPEC,
    TERM,
    Claim,
    KeyValue,
    TransactionResult,
    holder_of,
    spec_value,
)
from elaswave.protocol.leadership.job_creation import (
    RUNS_S,
    STARTS_S,
    CreationResult,
    CreatorAction,
    JobCreation,
    JobCreator,
    Left,
    ending,
    left_of,
)

SPEC_STANDS_AT_3 = KeyValue(SPEC, spec_value(7), 3)
LEFT = Left(7, 3, 5, 9, "rec/2")
ENDED = KeyValue(OUTCOME, b"finished", 12)
DONE, SPEC_STANDS, GONE = (
    TransactionResult(True, 20),
    TransactionResult(False, 20, (SPEC_STANDS_AT_3,)),
    TransactionResult(False, 20, (None,)),
)


def founder(*, has_others: bool = True) -> JobCreator:
    return JobCreator(has_others=has_others, patience_s=60.0, now_s=100.0)


def test_what_was_left_is_told_by_its_revisions() -> None:
    spec, term, lease_heartbeat = SPEC_STANDS_AT_3, KeyValue(TERM, b"", 5), KeyValue("lease_heartbeat", b"", 9)
    assert left_of(spec, term, lease_heartbeat, "rec/2") == LEFT
    assert left_of(None, term, lease_heartbeat, "rec/2") is None
    assert left_of(spec, None, None, "rec/0") == Left(7, 3, 0, 0, "rec/0")
    forged = left_of(spec._replace(is_genuine=False, value=b""), term, lease_heartbeat, "rec/2")
    assert forged is not None and forged.job_generation == 0
    stranger = KeyValue("rec/2", b"", 40, is_genuine=False)
    beside = left_of(spec, term, lease_heartbeat, "rec/2", stranger)
    assert beside is not None and ("rec/2", 40) in beside.removal().unwritten_since, "it hinders nobody"
    written = left_of(spec, term, lease_heartbeat, "rec/2", stranger._replace(is_genuine=True))
    assert written == LEFT, "a coordinator has written since"
    removal = LEFT.removal()
    assert set(removal.unwritten_since) == {(SPEC, 3), (TERM, 5), ("lease_heartbeat", 9), ("rec/2", 0)}
    assert removal.clears and not removal.puts


def test_where_nothing_is_left_the_job_is_founded_once_no_coordinator_answers() -> None:
    agent = founder()
    assert agent.looked(None, None) is CreatorAction.ASK and agent.ask_s == RUNS_S
    assert agent.unanswered() is CreatorAction.FOUND
    assert founder().looked(None, ENDED) is CreatorAction.ASK, (
        "an earlier job's end says nothing of the one that is to begin"
    )
    assert founder(has_others=False).looked(None, None) is CreatorAction.FOUND


def test_what_is_left_is_removed_once_nobody_answers_or_writes_and_the_job_is_founded_again() -> None:
    agent = founder()
    assert agent.looked(LEFT, None) is CreatorAction.ASK and agent.ask_s == STARTS_S
    assert agent.unanswered() is CreatorAction.REMOVE and agent.left == LEFT
    assert agent.removed(DONE, 120.0) is CreatorAction.FOUND
    assert founder(has_others=False).looked(LEFT, None) is CreatorAction.REMOVE


def test_a_job_that_lives_is_asked_for_until_patience_ends() -> None:
    agent = founder()
    agent.looked(LEFT, None)
    agent.unanswered()
    assert agent.removed(SPEC_STANDS, 160.0) is CreatorAction.LOOK
    assert agent.removed(SPEC_STANDS, 160.1) is CreatorAction.GIVE_UP


def test_a_job_that_ends_while_it_is_asked_for_is_over() -> None:
    agent = founder()
    agent.looked(LEFT, None)
    agent.unanswered()
    assert agent.removed(GONE, 500.0) is CreatorAction.LOOK
    assert agent.looked(None, ENDED) is CreatorAction.END and agent.outcome == ENDED
    again = founder()
    again.looked(LEFT, None)
    assert again.looked(None, None) is CreatorAction.ASK, "its own removal had arrived"


def test_what_a_stranger_has_written_is_neither_removed_nor_taken_for_the_end() -> None:
    agent = founder()
    foreign = LEFT._replace(job_generation=0)
    assert agent.looked(foreign, None) is CreatorAction.ASK, "a coordinator of this job may live"
    assert agent.unanswered() is CreatorAction.FOREIGN
    agent = founder()
    agent.looked(LEFT, None)
    agent.looked(foreign, None)
    assert agent.job_generation == 7
    assert agent.looked(None, ENDED._replace(is_genuine=False)) is CreatorAction.ASK


@pytest.mark.parametrize("seen", [None, ENDED])
def test_a_founding_is_made_once_however_often_it_is_said(seen: KeyValue | None) -> None:
    creation = JobCreation(b"mine", seen)
    asked = creation.transaction()
    assert set(asked.unwritten_since) == {(SPEC, 0), (OUTCOME, 0 if seen is None else 12)}
    assert asked.puts == ((SPEC, b"mine"),) and asked.deletes == (() if seen is None else (OUTCOME,))
    assert creation.judge(GONE) is CreationResult.CHANGED, "a job has ended since"
    assert creation.judge(TransactionResult(True, 21)) is CreationResult.YES
    assert creation.judge(TransactionResult(False, 30, (KeyValue(SPEC, b"mine", 22),))) is CreationResult.YES
    assert creation.judge(TransactionResult(False, 30, (KeyValue(SPEC, b"other", 22),))) is CreationResult.HELD
    stranger = KeyValue(SPEC, b"", 22, is_genuine=False)
    assert creation.judge(TransactionResult(False, 30, (stranger,))) is CreationResult.FOREIGN


def test_who_has_the_job_at_its_end_removes_it_and_leaves_the_outcome() -> None:
    spec = SPEC_STANDS_AT_3
    claim = Claim("a/1", "nonce", holder_of(None), spec, 7)
    term = KeyValue(TERM, claim.transaction().puts[0][1], 5)
    asked = ending("a/1", 7, spec, term, b"finished")
    assert asked is not None and asked.clears and asked.puts == ((OUTCOME, b"finished"),)
    assert set(asked.unwritten_since) == {(SPEC, 3), (TERM, 5)}
    unclaimed = ending("a/1", 0, spec, None, None)
    assert unclaimed is not None and not unclaimed.puts and set(unclaimed.unwritten_since) == {(SPEC, 3), (TERM, 0)}
    assert ending("", 7, spec, term, None) is not None, "there is one candidate"
    assert ending("b/2", 7, spec, term, b"finished") is None, "another one has it"
    foreign = term._replace(value=b"", is_genuine=False)
    assert ending("a/1", 2, spec, foreign, b"finished") is None, "it was created again"
    assert ending("a/1", 7, spec, foreign, b"finished") is None, "its spec was put back beside another one's claim"
    assert ending("a/1", 7, None, None, b"finished") is None, "it is gone"
    for there in (None, spec._replace(value=b"", is_genuine=False)):
        kept = ending("a/1", 7, there, term, b"finished")
        assert kept is not None and (SPEC, 0 if there is None else 3) in kept.unwritten_since, "its claim is there"
        assert ending("a/1", 7, there, None, b"finished") is None, "nothing there is known to be its"
