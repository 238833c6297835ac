"""A host that is cut off is found soon, by what is acknowledged; one that is busy, or that nobody looked at, is not."""

from collections.abc import Callable, Sequence

import pytest
from tests.protocol.test_detection import BEAT_S, DOCS, Job, named

from elaswave.protocol.detection import detector
from elaswave.protocol.detection.detector import Suspicion
from elaswave.protocol.detection.host_silence import HOST_SILENT_S, LOOK_S, UNACKNOWLEDGED_S, Counters

Look = Callable[[float], Sequence[Counters]]


def job_of(hosts: str) -> Job:
    """A job in its first steps, whose workers have had long gaps: a silent one alone is not lost for ten seconds."""
    job = Job(len(hosts), hosts=hosts)
    for watched in job.detector._watched.values():
        watched.gaps.add(5.0, job.detector._now_s)
    return job


def cut(job: Job, silent: str, duration_s: float, look: Look) -> tuple[list[Suspicion], float]:
    """Lets time pass in which some hosts are silent, and their connections are looked at after each tick, as asked for.

    Returns:
        The first suspicions, and after how long they have come.
    """
    workers = [worker for worker, host in job.detector._domains.items() if host in silent]
    start_s = job.now_s
    while job.now_s < start_s + duration_s - 1e-9:
        if found := job.go_on(BEAT_S, silent=workers):
            return found, job.now_s - start_s
        for host in job.detector.quiet_hosts:
            if host in silent:
                job.detector.looked_at_host(host, look(job.now_s - start_s), job.now_s)
    return [], duration_s


def dead(after_s: float) -> list[Counters]:
    """Three connections on which something is outstanding, and nothing changes."""
    return [Counters(number, 500, 300, True) for number in range(3)]


def test_a_host_that_acknowledges_nothing_is_lost_with_all_its_workers():
    job = job_of("aabb")
    found, after_s = cut(job, "b", 10.0, dead)
    assert named(found) == [(2, "host"), (3, "host")]
    assert HOST_SILENT_S < after_s <= HOST_SILENT_S + 3 * BEAT_S
    assert "worker 2 is on host b, which is cut off: nothing has come from it for 2." in found[0].reason
    assert cut(job, "b", 1.0, dead)[0] == [] and job.detector.quiet_hosts == {}


def test_a_host_whose_kernel_acknowledges_is_starved_and_not_lost():
    job = job_of("aabb")
    acknowledging = lambda after_s: [Counters(0, 500, 300 + int(1000 * after_s), True)]  # noqa: E731
    assert cut(job, "b", 6.0, acknowledging)[0] == []
    found, after_s = cut(job, "b", 10.0, dead)  # and then it is cut off
    assert named(found) == [(2, "host"), (3, "host")] and after_s <= HOST_SILENT_S + 3 * BEAT_S


@pytest.mark.parametrize(
    "look",
    [
        lambda after_s: [Counters(0, 500, 300, True), Counters(1, int(1000 * after_s), 300, True)],
        lambda after_s: [Counters(0, 500, 300, True), Counters(1, 500, int(1000 * after_s), True)],
        lambda after_s: [Counters(int(1000 * after_s), 500, 300, True)],
        lambda after_s: [Counters(0, 500, 300, False)],
        lambda after_s: [],
    ],
    ids=["the agent is heard", "one is acknowledged", "it connects again", "nothing is outstanding", "no connection"],
)
def test_one_sign_of_life_is_enough_and_without_knowledge_the_usual_bounds_count(look):
    assert cut(job_of("aabb"), "b", 6.0, look)[0] == []


def test_a_starved_host_is_borne_with_as_long_as_a_busy_machine_and_not_for_ever():
    job = Job(4, hosts="aabb")
    acknowledging = lambda after_s: [Counters(0, 500, 300 + int(1000 * after_s), True)]  # noqa: E731
    found, after_s = cut(job, "b", 60.0, acknowledging)
    assert named(found) == [(2, "heartbeat"), (3, "heartbeat")]
    bound_s = detector.CROWD_FACTOR * detector.SILENCE_FLOOR_S
    assert bound_s < after_s <= bound_s + 3 * BEAT_S


def test_workers_that_hang_while_their_agent_is_heard_are_lost_as_soon_as_ever():
    found, after_s = cut(Job(4, hosts="aabb"), "b", 60.0, lambda after_s: [Counters(0, int(10 * after_s), 300, False)])
    assert named(found) == [(2, "heartbeat"), (3, "heartbeat")]
    assert after_s <= detector.SILENCE_FLOOR_S + 3 * BEAT_S


def test_what_is_outstanding_only_since_shortly_condemns_nobody():
    began_s = 5.0
    look = lambda after_s: [Counters(0, 500, 300, after_s >= began_s)]  # noqa: E731
    found, after_s = cut(job_of("aabb"), "b", 10.0, look)
    assert named(found) == [(2, "host"), (3, "host")]
    assert began_s + UNACKNOWLEDGED_S < after_s <= began_s + UNACKNOWLEDGED_S + 3 * BEAT_S


def test_one_worker_that_is_heard_keeps_its_host_from_being_looked_at():
    job = job_of("aabb")
    assert job.go_on(LOOK_S + 3 * BEAT_S, silent=[2]) == []
    assert job.detector.quiet_hosts == {}
    job.go_on(LOOK_S + 3 * BEAT_S, silent=[2, 3])
    assert job.detector.quiet_hosts == {"b": (2, 3)}
    job.go_on(BEAT_S)
    assert job.detector.quiet_hosts == {}


def test_a_job_of_one_machine_has_no_hosts_to_look_at():
    job = Job(3, learned_steps=1)
    job.go_on(1.0, silent=[1])
    assert job.detector.quiet_hosts == {}


def test_a_coordinator_that_slept_holds_nobody_for_cut_off():
    job = job_of("aabb")
    found, _ = cut(job, "b", LOOK_S + 4 * BEAT_S, dead)
    assert found == [] and job.detector.quiet_hosts == {"b": (2, 3)}
    assert job.tick(after_s=30.0) == []
    job.detector.looked_at_host("b", dead(0.0), job.now_s)
    assert job.tick(BEAT_S) == [], "of 30 s it was awake for one tick"
    assert job.go_on(1.0) == []


def test_an_old_look_condemns_nobody():
    job = job_of("aabb")
    found, _ = cut(job, "b", 1.0, dead)
    assert found == []
    workers = [2, 3]
    assert job.go_on(3.0, silent=workers) == [], "nobody has looked meanwhile"
    job.detector.looked_at_host("b", dead(0.0), job.now_s)
    assert named(job.go_on(BEAT_S, silent=workers)) == [(2, "host"), (3, "host")]


def test_where_most_hosts_are_silent_together_it_takes_longer():
    found, after_s = cut(job_of("aabbcc"), "bc", 20.0, dead)
    assert named(found) == [(worker, "host") for worker in (2, 3, 4, 5)]
    bound_s = detector.CROWD_FACTOR * HOST_SILENT_S
    assert bound_s < after_s <= bound_s + 3 * BEAT_S


@pytest.mark.parametrize(("hosts", "silent"), [("abc", "bc"), ("abcde", "cde"), ("aabbcc", "bc")])
def test_a_network_that_is_gone_for_three_seconds_loses_nobody_whoever_is_heard_first(hosts: str, silent: str):
    """Of the coordinator's host, in a job of which most hosts are others. The next one is heard 3 s later than the
    first: its kernel waits that much longer before it sends again."""
    job = Job(len(hosts), hosts=hosts, learned_steps=2)
    assert cut(job, silent, 3.0, dead)[0] == []
    assert cut(job, silent[1:], 2.9, dead)[0] == []
    assert cut(job, "", 3.0, dead)[0] == []


def test_most_hosts_have_the_longer_bound_however_few_workers_they_have():
    job = Job(3, hosts="abc", learned_steps=2)
    found, after_s = cut(job, "bc", 20.0, dead)
    assert named(found) == [(1, "host"), (2, "host")]
    bound_s = detector.CROWD_FACTOR * HOST_SILENT_S
    assert bound_s < after_s <= bound_s + 3 * BEAT_S


def test_a_host_that_stays_away_when_the_others_are_back_is_lost():
    job = Job(3, hosts="abc", learned_steps=2)
    assert cut(job, "bc", 3.0, dead)[0] == []
    found, after_s = cut(job, "c", 20.0, dead)
    assert named(found) == [(2, "host")] and after_s <= 3.0 + 4 * BEAT_S


def test_where_nobody_is_heard_no_host_is_cut_off():
    job = job_of("bb")
    assert cut(job, "b", 10.0, dead)[0] == []


def test_docs_say_the_bounds():
    assert f"acknowledges nothing | {HOST_SILENT_S:.0f} s; {detector.CROWD_FACTOR:.0f} times that" in DOCS.read_text()
    assert f"silent for {LOOK_S} s, the coordinator looks" in DOCS.read_text()
