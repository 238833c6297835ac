"""Bounds on waiting for another process: neither a slow one nor a stopped waiter makes it look stopped."""

from elaswave.launcher.processes import Standstill
from elaswave.protocol.detection.active_time import ActiveTime


def test_time_in_which_the_waiter_was_stopped_does_not_count() -> None:
    active_time = ActiveTime(100.0)
    assert active_time.passed_s(100.2) == 100.2 - 100.0
    assert active_time.passed_s(4000.0) < 1.0
    assert active_time.passed_s(4000.4) < 1.5
    assert active_time.passed_s(3999.0) == active_time.seen_s == active_time.passed_s(4000.4), "no clock goes back"


def test_the_first_look_begins() -> None:
    active_time = ActiveTime()
    assert (active_time.seen_s, active_time.passed_s(4000.0), active_time.take_overslept()) == (0.0, 0.0, False)
    active_time.passed_s(5000.0)
    active_time.passed_s(5000.1)
    assert active_time.take_overslept() and not active_time.take_overslept(), "it is told once"


def test_a_process_that_uses_some_time_now_and_then_does_not_stand_still() -> None:
    standstill = Standstill(0.0)
    now_s = longest_s = 0.0
    for tick in range(3000):
        now_s += 0.2
        longest_s = max(longest_s, standstill.look(0.01 * (tick // 50), now_s))
    assert 9.0 < longest_s < 11.0


def test_a_process_that_uses_none_stands_still_from_then_on() -> None:
    standstill = Standstill(0.0)
    assert standstill.look(1.5, 0.2) == 0.0
    passed_s = [standstill.look(1.5, 0.2 + 0.25 * tick) for tick in range(1, 100)]
    assert passed_s[-1] > 24.0 and passed_s == sorted(passed_s)
    assert standstill.look(1.5, 1e6) < 26.0, "the waiter was stopped itself"
    assert standstill.look(1.51, 1e6 + 0.2) == 0.0
