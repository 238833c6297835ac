"""The pace of an emulated device and the measuring of actions."""

import time

import pytest

from elaswave.engine import activity
from elaswave.engine.activity import ActionTimer, ActionTimes, Pace
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.types import Action

LAYERS = [(1.0, 2.0, 3.0), (10.0, 20.0, 30.0)]


def sleep_until(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def make_pace(speed=1.0):
    rests = []
    return Pace(LAYERS, speed, rests.append), rests


@pytest.mark.parametrize(("kind", "layers", "seconds"), [
    ("F", range(1), 1.0), ("F", range(2), 11.0), ("B", range(2), 55.0), ("I", range(1, 2), 20.0),
    ("W", range(1), 3.0),
])  # fmt: skip
def test_an_action_lasts_as_its_layers_do(kind, layers, seconds):
    pace, _ = make_pace()
    assert pace.seconds(kind, layers) == seconds


def test_speed_and_level_act_on_it():
    pace, _ = make_pace(speed=0.5)
    assert pace.seconds("F", range(1)) == 2.0
    pace.set_level_speed(0.8)
    assert pace.seconds("F", range(1)) == 2.5


def test_a_fault_leaves_a_share_of_the_speed_and_can_end():
    pace, rests = make_pace(speed=0.5)
    timer = ActionTimer(0, pace, rests.append)
    timer.slow_down(0.5)
    assert pace.seconds("F", range(1)) == 4.0
    timer.slow_down(1.0)
    assert pace.seconds("F", range(1)) == 2.0
    assert rests == []


def test_a_real_device_is_slowed_by_a_rest_after_each_action(monkeypatch):
    now_s = 5.0
    monkeypatch.setattr(activity.time, "monotonic", lambda: now_s)

    def rest(until_s):
        nonlocal now_s
        now_s = until_s

    timer = ActionTimer(7, None, rest)
    timer.slow_down(0.25)
    timer.on_computed(Action(1, "F", 0), range(2, 4), 4_000_000_000)
    assert now_s == 8.0 and timer.times.take() == [timing("F", 4.0, 1)]
    timer.slow_down(1.0)
    timer.on_computed(Action(1, "F", 0), range(2, 4), 6_000_000_000)
    assert now_s == 8.0 and timer.times.take() == [timing("F", 2.0, 1)]


def test_an_action_ends_when_the_device_would_have_done_it():
    pace, rests = make_pace()
    assert pace.hold("F", range(1), 100.0) == 100.0
    assert rests == [101.0]


def test_what_the_processor_needs_between_two_actions_is_not_the_devices_time():
    pace, rests = make_pace()
    pace.hold("F", range(1), 100.0)
    assert pace.hold("F", range(1), 101.001) == 101.0  # woke up 1 ms late
    assert pace.hold("F", range(1), 102.5) == 102.5  # waited for its input
    assert rests == [101.0, 102.0, 103.5]


def test_a_short_action_forgives_little():
    pace = Pace([(0.001, 0.0, 0.0)], 1.0, lambda until_s: None)
    pace.hold("F", range(1), 100.0)
    assert pace.hold("F", range(1), 100.002) == 100.002


def timing(kind, seconds, count):
    return ActionTiming(worker=7, stage=1, start=2, stop=4, kind=kind, seconds=seconds, count=count)


def test_times_are_medians_of_what_was_added_since():
    times = ActionTimes(7)
    for seconds in (1.0, 100.0, 2.0):
        times.add(Action(1, "B", 0), range(2, 4), seconds)
    times.add(Action(1, "F", 0), range(2, 4), 0.5)
    assert times.take() == [timing("B", 2.0, 3), timing("F", 0.5, 1)]
    assert times.take() == []


def test_under_a_quota_the_few_actions_that_stand_still_count():
    timer = ActionTimer(7, None, sleep_until, has_quota=True)
    for seconds in (1.0, 1.0, 1.0, 5.0):
        timer.times.add(Action(1, "B", 0), range(2, 4), seconds)
    assert timer.times.take() == [timing("B", 2.0, 4)]


def test_only_the_newest_times_are_kept():
    times = ActionTimes(7)
    for seconds in range(1000):
        times.add(Action(1, "F", seconds), range(2, 4), float(seconds))
    assert times.take() == [timing("F", 871.5, 256)]


def test_the_clockwork_measures_what_the_pace_made_of_it():
    pace = Pace([(0.01, 0.0, 0.0)], 1.0, sleep_until)
    paced = ActionTimer(0, pace, sleep_until)
    paced.on_computed(Action(0, "F", 0), range(1), time.monotonic_ns())
    (taken,) = paced.times.take()
    assert taken.seconds >= 0.0099
    plain = ActionTimer(0, None, sleep_until)
    plain.on_computed(Action(0, "F", 0), range(1), time.monotonic_ns())
    (taken,) = plain.times.take()
    assert taken.seconds >= 0
