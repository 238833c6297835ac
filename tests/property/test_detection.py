"""The detector in simulated jobs: in hours of noise no live worker is lost, each stopped one is; and in any script."""

import itertools
import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.fleet import Fleet, Noise, Stop

from elaswave.protocol.detection import active_time
from elaswave.protocol.detection import detector as detection
from elaswave.protocol.detection.detector import Detector, WorkerActivity
from elaswave.protocol.step.activity import IDLE, blame


def rarely(probability: float, low_s: float, high_s: float) -> Callable[[Random], float]:
    return lambda rng: rng.uniform(low_s, high_s) if rng.random() < probability else 0.0


RECORDED = ((0.0, 0.0), (0.5, 0.007), (0.9, 0.038), (0.99, 0.127), (0.999, 0.245), (1.0, 0.33))
"""Share of heartbeats and their delay at most, in seconds: 16 processes that train on 2 cores which others use too."""


def recorded(rng: Random) -> float:
    share = rng.random()
    for (low, low_s), (high, high_s) in itertools.pairwise(RECORDED):
        if share <= high:
            return low_s + (share - low) / (high - low) * (high_s - low_s)
    raise AssertionError


NOISES = {
    "quiet": Noise(),
    "as recorded": Noise(recorded),
    "saturated cores": Noise(lambda rng: rng.expovariate(1 / 0.03) + rarely(0.01, 0.1, 0.25)(rng)),
    "log-normal delays": Noise(lambda rng: rng.lognormvariate(math.log(0.01), 1.0)),
    "Pareto delays": Noise(lambda rng: 0.03 * (rng.paretovariate(4) - 1)),
    "rare pauses of a thread": Noise(lambda rng: rng.expovariate(1 / 0.002) + rarely(0.0005, 0.3, 0.54)(rng)),
    "slow steps": Noise(
        action=lambda rng: rng.lognormvariate(0, 0.5), slow_step=lambda rng: 8.0 if rng.random() < 0.002 else 1.0
    ),
    "a coordinator that sleeps": Noise(coordinator_s=rarely(0.01, 0.3, 20.0)),
    "a network that goes away": Noise(machine_s=rarely(0.01, 0.3, 10.0)),
    "workers that get no processor": Noise(recorded, starved_s=rarely(0.003, 0.5, 15.0)),
}
LATEST_S = {
    "silent": detection.SILENCE_FLOOR_S + 0.25,
    "loops": detection.BUSY_FLOOR_S + 1.1,
    "stuck": detection.STALL_FLOOR_S + 1.0,
}
"""When a stop is noticed on a quiet machine, in virtual time: the floors and some heartbeats."""


def false_alarms(noise: str, seed: int, *, num_workers: int, action_s: float, duration_s: float) -> list[str]:
    fleet = Fleet(num_workers, seed, NOISES[noise], action_s=action_s)
    return [f"after {at_s:.1f} s: {suspicion}" for at_s, suspicion in fleet.run(duration_s)]


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("num_workers", "action_s"), [(2, 0.03), (4, 1.0), (12, 0.1)])
def test_no_false_alarm(noise: str, num_workers: int, action_s: float):
    duration_s = 2000.0 / num_workers
    assert false_alarms(noise, 1, num_workers=num_workers, action_s=action_s, duration_s=duration_s) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("num_workers", "action_s"), [(2, 0.03), (4, 0.3), (8, 5.0), (16, 0.1)])
def test_no_false_alarm_in_hours(noise: str, num_workers: int, action_s: float):
    duration_s = 8 * 3600.0 / num_workers
    assert false_alarms(noise, 2, num_workers=num_workers, action_s=action_s, duration_s=duration_s) == []


def test_the_simulation_shows_false_alarms_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detection, "SILENCE_FACTOR", 1.1)
    monkeypatch.setattr(detection, "SILENCE_FLOOR_S", 0.1)
    monkeypatch.setattr(detection, "NO_HURRY", 1.0)
    [alarm, *_] = false_alarms("log-normal delays", 1, num_workers=4, action_s=1.0, duration_s=900.0)
    assert "has been silent" in alarm


def test_without_an_agent_that_looks_who_gets_no_processor_is_lost():
    fleet = Fleet(4, 1, NOISES["workers that get no processor"], agent_looks=False)
    _, suspicion = next(iter(fleet.run(500.0)))
    assert suspicion.detected_by == "heartbeat"


@pytest.mark.parametrize("how", LATEST_S)
@pytest.mark.parametrize("seed", range(4))
def test_whoever_stops_is_found_on_a_quiet_machine(how: str, seed: int):
    at_s = 20.0 + seed * 0.137
    fleet = Fleet(5, seed, Noise(), stops={seed: Stop(at_s, how)})
    seen_s, suspicion = next(iter(fleet.run(60.0)))
    assert suspicion.worker == seed
    assert suspicion.detected_by == ("heartbeat" if how == "silent" else "progress")
    assert at_s < seen_s <= at_s + LATEST_S[how] + 0.1


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("how", LATEST_S)
@pytest.mark.parametrize("action_s", [0.03, 1.0])
def test_whoever_stops_is_found_in_noise(noise: str, how: str, action_s: float):
    """Later, but the right one and no other."""
    fleet = Fleet(4, 5, NOISES[noise], action_s=action_s, stops={2: Stop(100.0, how)})
    seen_s, suspicion = next(iter(fleet.run(900.0)))
    assert suspicion.worker == 2
    assert seen_s > 100.0


def test_two_that_stop_at_once_are_both_found():
    fleet = Fleet(5, 1, Noise(), stops={1: Stop(20.0, "silent"), 3: Stop(20.1, "silent")})
    found = [suspicion[:2] for _, suspicion in itertools.islice(fleet.run(30.0), 2)]
    assert sorted(found) == [(1, "heartbeat"), (3, "heartbeat")]


# ------------------------------------------------------------------------------------------------------ silence of all


def first_word(detector: Detector, worker: int, what: str, now_s: float) -> None:
    """What a worker says first; its heartbeats follow."""
    if what == "it was disconnected":
        detector.disconnected(worker, now_s)
    if what != "a heartbeat":
        detector.joined(worker, now_s)
    if what == "it has lost a link":
        detector.link_lost(worker, (worker + 1) % 5, now_s)


@settings(max_examples=25)
@given(
    order=st.permutations(range(5)),
    words=st.lists(
        st.sampled_from(["a heartbeat", "it registers", "it was disconnected", "it has lost a link"]),
        min_size=5,
        max_size=5,
    ),
    later_s=st.lists(st.sampled_from([0.0, 0.01, 0.15, 0.3]), min_size=5, max_size=5),
    silence_s=st.floats(1.2, 12.0),
    hosts=st.sampled_from(["", "aaaaa", "aabbb", "abcde"]),
)
def test_after_a_silence_of_all_nobody_is_lost_by_silence_in_any_order_of_first_words(
    order: list[int], words: list[str], later_s: list[float], silence_s: float, hosts: str
):
    detector, now_s, cut_s = Detector(domains=dict(enumerate(hosts))), 0.0, 3.0
    back_s = dict(zip(order, itertools.accumulate(later_s, initial=cut_s + silence_s), strict=False))
    next_beat_s: dict[int, float] = {}
    for worker in order:
        detector.joined(worker, now_s)
        next_beat_s[worker] = 0.25
    found, has_spoken = [], set()
    while now_s < max(back_s.values()) + 4.0:
        now_s += 0.125
        for worker in order:
            if now_s >= back_s[worker] and worker not in has_spoken:
                has_spoken.add(worker)
                first_word(detector, worker, words[worker], now_s)
                next_beat_s[worker] = now_s if words[worker] == "a heartbeat" else now_s + 0.25
            if (now_s <= cut_s or worker in has_spoken) and now_s >= next_beat_s[worker]:
                next_beat_s[worker] = now_s + 0.25
                detector.heartbeat(worker, WorkerActivity(1, 1 + int(now_s), 1, "vote", False, (), 0.01), now_s)
        found += detector.tick(now_s)
    assert {suspicion.detected_by for suspicion in found} <= {"link"}, found
    if "it has lost a link" not in words:
        assert found == []


# -------------------------------------------------------------------------------------------------------------- scripts

WORKERS = st.integers(0, 4)
POSITIONS = st.builds(
    WorkerActivity,
    generation=st.integers(1, 2),
    step=st.integers(0, 3),
    attempt=st.integers(1, 2),
    label=st.sampled_from(["0F0", "1B1", "reduce", "vote", "apply", "gather", "recover", "idle", "start"]),
    computing=st.booleans(),
    waiting_on=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    since_s=st.floats(0, 10),
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.02, 0.05, 0.2, 0.3, 5.0]),
        st.one_of(
            st.tuples(st.just("joined"), WORKERS),
            st.tuples(st.just("left"), WORKERS),
            st.tuples(st.just("heartbeat"), WORKERS, POSITIONS),
            st.tuples(st.just("link_lost"), WORKERS, WORKERS),
            st.tuples(st.just("exited"), WORKERS, st.just("was killed by SIGKILL")),
            st.tuples(st.just("disconnected"), WORKERS),
            st.tuples(st.just("tick")),
        ),
    ),
    max_size=150,
)


def play(calls: list) -> list[tuple[float, object]]:
    """All suspicions of a script; checks what must hold after every call."""
    detector, now_s, told = Detector(), 0.0, []
    watched: set[int] = set()
    for pause_s, (name, *arguments) in calls:
        now_s += pause_s
        if name == "tick":
            for suspicion in detector.tick(now_s):
                assert (
                    suspicion.reason.startswith(f"worker {suspicion.worker} ")
                    or "nothing has moved" in suspicion.reason
                )
                assert suspicion.worker in watched or suspicion.detected_by == "exit"
                watched.discard(suspicion.worker)
                told.append((now_s, suspicion))
        elif name == "left":
            detector.left(arguments[0])
            watched.discard(arguments[0])
        else:
            getattr(detector, name)(*arguments, now_s)
            if name == "joined":
                watched.add(arguments[0])
        assert detector.workers == tuple(sorted(watched))
        assert now_s <= detector.next_tick_s(now_s) <= now_s + active_time.TICK_S
    return told


@given(CALLS)
def test_scripts_give_the_same_answers_again_and_name_nobody_twice(calls: list):
    assert play(calls) == play(calls)


@given(CALLS, st.lists(WORKERS, min_size=1, unique=True))
def test_an_end_is_told_at_the_next_tick_whatever_else_was_heard(calls: list, ended: list[int]):
    joins = [(0.0, ("joined", worker)) for worker in ended]
    ends = [(0.0, ("exited", worker, "ended with status 1")) for worker in ended]
    before, after = play([*calls, *joins]), play([*calls, *joins, *ends, (0.0, ("tick",))])
    told = {suspicion.worker: suspicion.detected_by for _, suspicion in after[len(before) :]}
    assert {told[worker] for worker in ended} == {"exit"}


@given(st.permutations([(0, 2), (2, 0), (1, 2), (3, 2), (3, 1)]))
def test_complaints_that_come_together_give_one_answer_in_any_order(pairs: list[tuple[int, int]]):
    detector = Detector()
    for worker in range(4):
        detector.joined(worker, 0.0)
    for reporter, peer in pairs:
        detector.link_lost(reporter, peer, 0.0)
    assert [suspicion[:2] for suspicion in detector.tick(0.02)] == [(2, "link"), (1, "link")]


@given(st.lists(POSITIONS, min_size=1, max_size=6))
def test_blame_names_an_end_of_the_chains(activities: list[WorkerActivity]):
    workers = dict(enumerate(activities))
    if all(activity.label in IDLE for activity in activities):
        return
    worker = blame(workers)
    assert worker == blame(dict(reversed(workers.items())))
    # A worker that can be reached from the one named can also reach it: that one waits only for its own circle.
    edges = {
        own: {other for other in activity.waiting_on if other in workers and other != own}
        for own, activity in workers.items()
    }

    def reach(start: int) -> set[int]:
        seen, todo = {start}, [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    assert all(worker in reach(other) for other in reach(worker))
    if workers[worker].label in IDLE:
        assert any(worker in targets for targets in edges.values())
