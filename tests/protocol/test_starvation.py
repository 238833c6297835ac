"""A worker whose process gets no processor is not held for hung; whoever hangs is, as soon as ever."""

from collections.abc import Callable

import msgspec
import pytest
from tests.protocol.test_detection import BEAT_S, Job, activity, named

from elaswave.protocol.detection import detector as detection
from elaswave.protocol.detection import starvation
from elaswave.protocol.detection.detector import Detector, Suspicion

FLOOR_S = detection.SILENCE_FLOOR_S


def watched_job() -> Job:
    """A job of three on a quiet machine, with an agent that can look at its processes."""
    job = Job(3, learned_steps=1)
    job.detector._can_look = lambda worker: True
    return job


def starve(job: Job, worker: int, duration_s: float, waits_s: Callable[[float], float] = lambda passed_s: passed_s):
    """Lets time pass in which a worker is silent, and its agent looks at it when it is asked to."""
    end_s = job.now_s + duration_s
    while job.now_s < end_s - 1e-9:
        if worker in job.detector.quiet:
            job.detector.looked(worker, waits_s(BEAT_S), job.now_s)
        if found := job.go_on(BEAT_S, silent=[worker]):
            return found
    return []


def test_who_waits_for_a_processor_is_not_lost_and_whoever_hangs_then_is_found_as_soon_as_ever():
    job = watched_job()
    assert starve(job, 1, 15.0) == []
    [excuse] = job.detector.take_excuses()
    assert "worker 1 has been silent for 1.55 s (bound 1.50 s), but for 1." in excuse
    assert job.detector.take_excuses() == []
    assert job.go_on(1.0) == []
    assert job.silence_bound_s(1) < 1.5 * FLOOR_S  # only what nobody had looked at has taught something
    start_s = job.now_s
    [suspicion] = starve(job, 1, 20.0, lambda passed_s: 0.0)
    assert suspicion[:2] == (1, "heartbeat")
    assert job.now_s - start_s <= 1.5 * FLOOR_S + 2 * BEAT_S


def test_a_look_that_sees_no_wait_delays_nothing():
    job = watched_job()
    start_s = job.now_s
    [suspicion] = starve(job, 1, 5.0, lambda passed_s: 0.0)
    assert job.now_s - start_s <= FLOOR_S + 2 * BEAT_S
    assert "processor" not in suspicion.reason


def test_who_waits_half_the_time_is_lost_later_and_the_reason_says_so():
    job = watched_job()
    start_s = job.now_s
    [suspicion] = starve(job, 1, 5.0, lambda passed_s: passed_s / 2)
    assert 1.4 * FLOOR_S < job.now_s - start_s < 1.9 * FLOOR_S
    assert "s of that time it waited for a processor" in suspicion.reason


def test_who_never_gets_a_processor_is_lost_in_the_end():
    job = watched_job()
    start_s = job.now_s
    assert named(starve(job, 1, 60.0)) == [(1, "heartbeat")]
    assert job.now_s - start_s <= FLOOR_S + starvation.EXCUSED_MAX_S + 2 * BEAT_S


def test_nobody_is_asked_about_while_all_are_heard():
    job = watched_job()
    assert job.go_on(3.0) == []
    assert job.detector.quiet == ()
    assert starve(job, 1, FLOOR_S / 4 + BEAT_S) == []
    assert job.detector.quiet == (1,)
    assert job.go_on(BEAT_S) == []
    assert job.detector.quiet == ()


@pytest.mark.parametrize("can_look", [True, False])
def test_an_agent_that_says_nothing_is_waited_for_but_not_for_long_and_not_if_it_is_away(can_look: bool):
    job = watched_job()
    job.detector._can_look = lambda worker: can_look
    start_s = job.now_s
    assert named(job.go_on(10.0, silent=[1])) == [(1, "heartbeat")]
    late_s = job.now_s - start_s - FLOOR_S
    assert late_s <= 2 * BEAT_S + (starvation.LOOK_GRACE_S if can_look else 0.0)
    assert can_look == (late_s > starvation.LOOK_GRACE_S)


def test_an_old_look_is_no_reason_and_the_next_one_may_be_late():
    job = watched_job()
    assert starve(job, 1, FLOOR_S / 2 + 2 * BEAT_S, lambda passed_s: 0.0) == []
    assert job.go_on(1.2, silent=[1]) == []  # above the bound, but the agent has not been heard for a second
    job.detector.looked(1, 1.2, job.now_s)
    assert job.go_on(0.5, silent=[1]) == []


def test_a_look_excuses_no_more_than_the_time_that_it_covers():
    job = watched_job()
    assert job.go_on(1.0, silent=[1]) == []
    job.detector.looked(1, 100.0, job.now_s)
    assert job.go_on(BEAT_S, silent=[1]) == []
    job.detector.looked(1, 100.0, job.now_s)
    assert named(job.go_on(5.0, silent=[1])) == [(1, "heartbeat")]


def test_who_got_no_processor_has_not_computed_meanwhile():
    job = Job(3, learned_steps=3)
    job.do(0, activity("reduce", step=5, on=[1]))
    job.do(1, activity("0F0", step=5, computing=True))
    job.do(2, activity("reduce", step=5, on=[1]))
    assert job.go_on(1.0) == []
    assert starve(job, 1, 12.0) == []
    job.doing[1] = msgspec.structs.replace(job.doing[1], starved_s=12.0)  # as the worker itself has seen
    assert job.go_on(0.5) == []
    assert named(job.go_on(10.0)) == [(1, "progress")]  # it does now, and for too long


def test_a_worker_that_is_heard_and_computes_without_a_processor_is_not_looping_but_not_for_ever():
    job = Job(2, learned_steps=3)
    job.do(0, activity("0F0", step=5, computing=True))
    job.do(1, activity("reduce", step=5, on=[0]))
    start_s = job.now_s
    while not (found := job.go_on(BEAT_S)):
        job.doing[0] = msgspec.structs.replace(job.doing[0], starved_s=job.now_s - start_s)
    assert named(found) == [(0, "progress")]
    assert job.now_s - start_s == pytest.approx(starvation.EXCUSED_MAX_S + job.detector.busy_bound_s("0F0"), abs=0.3)


def test_a_time_without_a_processor_is_no_longer_action():
    job = Job(2, learned_steps=3)
    bound_s = job.detector.busy_bound_s("0F0")
    job.do(0, activity("0F0", step=5, computing=True))
    job.do(1, activity("reduce", step=5, on=[0]))
    start_s = job.now_s
    for _ in range(100):
        job.doing[0] = msgspec.structs.replace(job.doing[0], starved_s=job.now_s - start_s)
        assert job.go_on(BEAT_S) == []
    job.do_all(activity("reduce", step=5))
    assert job.go_on(BEAT_S) == []
    assert job.detector.busy_bound_s("0F0") == pytest.approx(bound_s, abs=detection.PROGRESS_FACTOR * 2 * BEAT_S)


def test_a_standstill_that_was_a_wait_for_a_processor_is_none():
    job = Job(3, learned_steps=3)
    job.do(0, activity("reduce", step=5, on=[1]))
    job.do(1, activity("vote", step=5, on=[2]))
    job.do(2, activity("reduce", step=5, on=[1]))
    assert job.go_on(1.0) == []
    assert starve(job, 1, 12.0) == []
    assert job.go_on(0.5) == []
    assert [suspicion.detected_by for suspicion in job.go_on(10.0)] == ["progress"]


def test_nothing_is_seen_of_who_is_not_watched():
    detector = Detector()
    detector.looked(7, 1.0, 5.0)
    found: list[Suspicion] = detector.tick(5.1)
    assert found == []
