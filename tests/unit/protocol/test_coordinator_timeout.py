"""An agent without a coordinator: when it looks for the outcome, and when it gives up (H12, H13)."""

from elaswave.protocol.membership.agent import (
    ORPHAN_S,
    SEEK_AFTER_S,
    SEEK_EVERY_S,
    CoordinatorTimeout,
    TimeoutAction,
)

TURN_S = 0.25


def watched(
    coordinator_timeout: CoordinatorTimeout, from_s: float, until_s: float, *, commits_until_s: float = 0.0
) -> list[tuple[float, TimeoutAction]]:
    """What is due in that time, and when, while there is no coordinator; a step is committed every second."""
    found, now_s = [], from_s
    while now_s <= until_s:
        due = coordinator_timeout.look(now_s, has_coordinator=False, num_commits=int(min(now_s, commits_until_s)))
        if due is not TimeoutAction.NOTHING:
            found.append((now_s, due))
        now_s += TURN_S
    return found


def test_it_looks_for_the_outcome_and_ends_after_its_patience() -> None:
    coordinator_timeout = CoordinatorTimeout()
    found = watched(coordinator_timeout, 0.0, ORPHAN_S + TURN_S)
    sought = [SEEK_AFTER_S + number * SEEK_EVERY_S for number in range(6)]
    assert found == [*((at_s, TimeoutAction.SEEK) for at_s in sought), (ORPHAN_S + TURN_S, TimeoutAction.END)]
    assert coordinator_timeout.without_s == ORPHAN_S + TURN_S


def test_it_stays_as_long_as_its_workers_commit() -> None:
    found = watched(CoordinatorTimeout(), 0.0, 90.0 + ORPHAN_S + TURN_S, commits_until_s=90.0)
    ends = [at_s for at_s, due in found if due is TimeoutAction.END]
    assert ends[:1] == [90.0 + ORPHAN_S + TURN_S], "the first look at that time was for the outcome"


def test_a_coordinator_ends_the_vigil() -> None:
    coordinator_timeout = CoordinatorTimeout()
    watched(coordinator_timeout, 0.0, ORPHAN_S - 1.0)
    assert coordinator_timeout.look(ORPHAN_S - 0.5, has_coordinator=True, num_commits=0) is TimeoutAction.NOTHING
    assert coordinator_timeout.without_s == 0.0
    assert [due for _, due in watched(coordinator_timeout, ORPHAN_S, ORPHAN_S + SEEK_AFTER_S - TURN_S)] == []


def test_time_in_which_the_host_was_stopped_does_not_count() -> None:
    coordinator_timeout = CoordinatorTimeout(patience_s=20.0)
    watched(coordinator_timeout, 0.0, 1.0)
    assert coordinator_timeout.look(1000.0, has_coordinator=False, num_commits=0) is TimeoutAction.NOTHING
    assert coordinator_timeout.without_s < 2.0


def test_a_job_that_waits_longer_for_its_store_waits_as_long_here() -> None:
    found = watched(CoordinatorTimeout(patience_s=60.0), 0.0, 60.0 + TURN_S)
    assert [at_s for at_s, due in found if due is TimeoutAction.END] == [60.0 + TURN_S]
