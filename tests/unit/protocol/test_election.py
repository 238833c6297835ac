"""When a candidate claims the job, by its own clock alone."""

import pytest

from elaswave.protocol.coordinator.store_writes import NOBODY, Holder
from elaswave.protocol.leadership.election import BACKOFF_S, BACKOFF_S_MAX, GAP_S, POLL_S, STILL_S, Seen, Watch

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
