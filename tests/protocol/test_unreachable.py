"""Workers that do not answer at their addresses: with whom a job goes on."""

import pytest

from elaswave.protocol.detection.unreachable import FRESH_S, REACH_S, Unreachable


def told(reports: dict[int, list[int]], *, seconds: float = REACH_S, turn_s: float = 5.0) -> dict[int, str]:
    """What follows, at last, if workers say whom they cannot reach, again and again for some time."""
    unreachable, now_s, found = Unreachable(), 0.0, {}
    while now_s <= seconds:
        for worker, peers in reports.items():
            found |= unreachable.received(worker, {peer: f"at tcp:h{peer}: refused" for peer in peers}, now_s)
        now_s += turn_s
    return found


def test_a_worker_whom_nobody_reaches_is_given_up_after_a_while() -> None:
    assert told({0: [1]}, seconds=REACH_S - 5.0) == {}
    ((worker, reason),) = told({0: [1]}).items()
    assert worker == 1, "of two that do not meet who is dialled"
    assert "worker 1 does not answer at tcp:h1: refused (dialled by 0)" in reason and "net.advertise" in reason


@pytest.mark.parametrize(
    ("reports", "lost"),
    [
        ({0: [1, 4], 2: [4], 3: [4]}, {1, 4}),
        ({0: [1, 2, 3]}, {0}),
        ({0: [3], 1: [3, 2], 2: [3]}, {2, 3}),
        ({0: [5, 6], 1: [5, 6], 5: [6]}, {5, 6}),
    ],
)
def test_as_few_are_given_up_as_explain_all(reports: dict[int, list[int]], lost: set[int]) -> None:
    assert set(told(reports)) == lost


def test_who_reaches_nobody_is_told_so() -> None:
    assert told({0: [1, 2]}) == {
        0: "worker 0 reaches nobody of workers 1, 2 (worker 1 at tcp:h1: refused), which others reach"
    }


def test_what_has_passed_does_not_count() -> None:
    unreachable = Unreachable()
    assert unreachable.received(0, {1: "at a: refused"}, 0.0) == {}
    assert unreachable.received(0, {2: "at b: refused"}, REACH_S) == {}, "worker 1 has been reached meanwhile"
    assert unreachable.received(0, {1: "at a: refused"}, REACH_S + 1.0) == {}
    assert unreachable.received(0, {1: "at a: refused"}, REACH_S + 2.0 + FRESH_S) == {}, "nothing was said for long"


def test_who_was_given_up_is_not_given_up_again() -> None:
    unreachable = Unreachable()
    unreachable.received(0, {1: "at a: refused"}, 0.0)
    assert set(unreachable.received(0, {1: "at a: refused"}, REACH_S)) == {1}
    for seconds in range(1, 60):
        assert unreachable.received(0, {1: "at a: refused"}, REACH_S + seconds) == {}


def test_what_was_said_of_a_network_that_is_gone_is_forgotten() -> None:
    unreachable = Unreachable()
    unreachable.received(0, {1: "at a: refused"}, 0.0)
    unreachable.forget()
    assert unreachable.received(0, {1: "at a: refused"}, REACH_S) == {}
    assert set(unreachable.received(0, {1: "at a: refused"}, 2 * REACH_S)) == {1}
