"""When a candidate claims the job, by its own clock alone."""

import json

import pytest

from elaswave.protocol.coordinator.store_writes import (
    NOBODY,
    SPEC,
    TERM,
    Holder,
    KeyValue,
    TransactionResult,
    spec_value,
)
from elaswave.protocol.leadership.election import (
    ASK_AGAIN_S,
    BACKOFF_S,
    BACKOFF_S_MAX,
    GAP_S,
    POLL_S,
    STILL_S,
    Ask,
    CandidateAction,
    CoordinatorCandidate,
    NoJob,
    ReadEntries,
    Seen,
    StandBy,
    StoreAnswer,
    Watch,
    Won,
)

OTHER = Holder(3, "b/7", 40)


def look(watch: Watch, seen: Seen, at_s: float) -> bool:
    watch.looked(seen, at_s, at_s + 0.01)
    return watch.is_due(at_s + 0.01)


def looks(watch: Watch, seen: Seen, from_s: float, for_s: float) -> list[bool]:
    return [look(watch, seen, from_s + POLL_S * at) for at in range(round(for_s / POLL_S) + 1)]


def test_a_beat_that_stands_still_is_followed_after_two_seconds_and_not_before() -> None:
    watch = Watch("a/1")
    due = looks(watch, Seen(OTHER, 41), 100.0, STILL_S + POLL_S)
    assert due == [False] * round(STILL_S / POLL_S) + [False, True]
    assert watch.holder == OTHER and watch.since_s == 100.01


def test_a_beat_that_goes_on_is_not_followed() -> None:
    watch = Watch("a/1")
    assert not any(look(watch, Seen(OTHER, 41 + at // 2), 0.25 * at) for at in range(100))


def test_another_coordinator_is_given_its_time() -> None:
    watch = Watch("a/1")
    looks(watch, Seen(OTHER, 41), 0.0, STILL_S - POLL_S)
    assert not any(looks(watch, Seen(Holder(4, "c/2", 60), 3), STILL_S, STILL_S - POLL_S))


def test_without_reads_nobody_is_elected() -> None:
    """The holder may have been kept from its lease heartbeat by what keeps the store from answering."""
    watch = Watch("a/1")
    looks(watch, Seen(OTHER, 41), 0.0, 1.0)
    watch.missed()
    assert not watch.is_due(1.2)
    assert not any(looks(watch, Seen(OTHER, 41), 1.25, STILL_S - POLL_S))


def test_who_was_stopped_begins_anew() -> None:
    watch = Watch("a/1")
    looks(watch, Seen(OTHER, 41), 0.0, 1.0)
    assert not look(watch, Seen(OTHER, 41), 1.0 + GAP_S + STILL_S)


def test_the_term_of_an_earlier_process_of_the_same_agent_is_free_at_once() -> None:
    assert look(Watch("b/7"), Seen(OTHER, 41), 0.0)
    assert not look(Watch("b/8"), Seen(OTHER, 41), 0.0), "another incarnation"


@pytest.mark.parametrize("creates_job", [True, False])
def test_a_job_that_nobody_has_claimed_is_its_founders(creates_job: bool) -> None:
    watch = Watch("a/1", creates_job=creates_job)
    assert look(watch, Seen(NOBODY, 0), 0.0) is creates_job
    assert looks(watch, Seen(NOBODY, 0), POLL_S, STILL_S)[-1], "it may have died before"


def test_failed_claims_are_repeated_after_a_bounded_time() -> None:
    watch = Watch("b/7")
    waits = []
    for at in range(12):
        now_s = 100.0 * at
        watch.failed(now_s)
        tenths = next(tenth for tenth in range(100) if look(watch, Seen(OTHER, 41), now_s + tenth / 10))
        waits.append(tenths / 10)
    assert waits[0] == pytest.approx(BACKOFF_S) and max(waits) <= BACKOFF_S_MAX


def test_beats_that_are_put_back_or_forged_keep_nobody_alive() -> None:
    watch = Watch("a/1")
    beats = (41, 0, 40, 41, 7, 41, 0, 39, 41, 40)
    due = [look(watch, Seen(OTHER, lease_heartbeat), POLL_S * at) for at, lease_heartbeat in enumerate(beats)]
    assert due == [False] * 9 + [True]


@pytest.mark.parametrize("standing", [NOBODY, NOBODY._replace(revision=77), Holder(2, "c/3", 78, b"an older claim")])
def test_a_claim_that_is_taken_away_is_followed_as_it_was_known(standing: Holder) -> None:
    watch = Watch("a/1")
    look(watch, Seen(OTHER, 41), 0.0)
    assert looks(watch, Seen(standing, 0), POLL_S, STILL_S)[-1]
    assert watch.holder == Holder(3, "b/7", standing.revision, b""), "so the claim compares what stands there"
    assert not look(watch, Seen(OTHER._replace(term=4), 1), STILL_S + 2 * POLL_S), "another one was quicker"


# ------------------------------------------------------------------------------------------------ a candidate's process

CREATED = KeyValue(SPEC, spec_value(7), 1)
TERM_3 = KeyValue(TERM, b'{"term": 3, "holder": "b/7", "nonce": "x"}', 40)


class Process:
    """A candidate, and what it is told, by a clock that goes on while it waits."""

    def __init__(self, *, creates_job: bool = False) -> None:
        self.now_s = 100.0
        self.candidate = CoordinatorCandidate("a/1", 7, lambda: "nonce", creates_job=creates_job)
        self.action = self.candidate.begin()

    def told(self, *found: KeyValue | None, newest_term: int | None = None, succeeded: bool = False) -> CandidateAction:
        """The store has answered; without arguments it has not."""
        result = TransactionResult(succeeded, 50, found) if found or succeeded else None
        return self._next(StoreAnswer(self.now_s, self.now_s, result, newest_term))

    def until_due(self, *found: KeyValue | None) -> CandidateAction:
        """The same is found at each look."""
        while isinstance(self.told(*found), StandBy):
            assert isinstance(self.action, StandBy)
            self.now_s += self.action.wait_s
            assert isinstance(self._next(StoreAnswer(self.now_s, self.now_s)), Ask) and self.now_s < 110.0
        return self.action

    def _next(self, answer: StoreAnswer) -> CandidateAction:
        self.action = self.candidate.next(answer)
        return self.action


def claimed_term(action: CandidateAction) -> int:
    assert isinstance(action, Ask) and action.claims
    return int(json.loads(action.transaction.puts[0][1])["term"])


def test_a_claim_is_said_in_the_same_words_until_there_is_an_answer() -> None:
    process = Process()
    asked = process.until_due(CREATED, TERM_3, None)
    assert claimed_term(asked) == 4
    assert process.told() == StandBy(ASK_AGAIN_S) and process.told() == asked
    won = process.told(succeeded=True)
    assert isinstance(won, Won) and (won.term.term, won.term.name, won.missed_s) == (4, "a/1", 100.0)


def test_a_claim_that_comes_second_watches_who_was_quicker() -> None:
    process = Process()
    process.until_due(CREATED, TERM_3, None)
    look = process.told(TERM_3._replace(value=b'{"term": 4, "holder": "c/1", "nonce": "y"}', revision=51))
    assert isinstance(look, Ask) and not look.claims and "quicker" in look.news
    assert process.told(CREATED, TERM_3, None) == StandBy(POLL_S)


@pytest.mark.parametrize("standing", [None, KeyValue(TERM, b"", 60, is_genuine=False)])
def test_who_finds_no_term_claims_above_all_entries_whatever_it_has_seen_there_before(
    standing: KeyValue | None,
) -> None:
    """Another one may have had the job since (H14)."""
    process = Process(creates_job=True)
    assert process.told(CREATED, TERM_3, None) == StandBy(POLL_S)
    process.told()
    assert process.until_due(CREATED, standing, None) == ReadEntries()
    assert process.told() == StandBy(ASK_AGAIN_S) and process.told() == ReadEntries()
    assert claimed_term(process.told(newest_term=5)) == 6


@pytest.mark.parametrize(
    ("spec", "term", "entries", "outcome", "why"),
    [
        (None, None, 0, None, NoJob.REMOVED),
        (CREATED._replace(value=spec_value(8)), None, 0, None, NoJob.CREATED_AGAIN),
        (CREATED._replace(value=b"", is_genuine=False), None, 0, None, NoJob.FOREIGN),
        (None, None, 3, KeyValue("outcome", b"finished", 9), NoJob.REMOVED),
        (None, None, 3, KeyValue("outcome", b"", 9, is_genuine=False), None),
    ],
)
def test_what_is_no_job_of_this_candidate_is_not_claimed(
    spec: KeyValue | None, term: KeyValue | None, entries: int, outcome: KeyValue | None, why: NoJob | None
) -> None:
    process = Process()
    assert process.told(spec, term, None) == ReadEntries()
    assert isinstance(process.told(newest_term=entries), Ask)
    assert process.told() == StandBy(ASK_AGAIN_S)
    process.told()
    assert process.told(outcome) == (why or StandBy(POLL_S))
