"""Who is lost: every rule of the detector, as a script of what is heard and when."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from elaswave.launcher import processes
from elaswave.protocol.detection import active_time, starvation
from elaswave.protocol.detection import detector as detection
from elaswave.protocol.detection.detector import Detector, Suspicion, WorkerActivity
from elaswave.protocol.detection.watched import GAP_HALF_LIFE_S, SPARED_MAX_S
from elaswave.protocol.step.activity import FIRST_S, blame

DOCS = Path(__file__).parents[2] / "docs" / "failures.md"
BEAT_S = 0.05


def activity(
    label: str = "0F0",
    *,
    step: int = 1,
    computing: bool = False,
    on: Sequence[int] = (),
    since_s: float = 0.0,
    **place: int,
) -> WorkerActivity:
    return WorkerActivity(
        place.get("generation", 1), step, place.get("attempt", 1), label, computing, tuple(on), since_s
    )


class Job:
    """A detector and its workers; time goes on as told, with heartbeats and ticks in between."""

    def __init__(
        self,
        num_workers: int,
        *,
        learned_steps: int = 0,
        takes_over: bool = False,
        hosts: str = "",
        held_up_s: Sequence[float] = (),
    ) -> None:
        held_up = dict(enumerate(held_up_s))
        self.detector = Detector(
            takes_over=takes_over,
            domains=dict(enumerate(hosts)),
            held_up_s=lambda worker: held_up.get(worker, 0.0),
        )
        self.now_s = 1000.0
        self.workers = tuple(range(num_workers))
        self.doing: dict[int, WorkerActivity] = {}
        self.entered_s: dict[int, float] = {}
        for worker in self.workers:
            self.detector.joined(worker, self.now_s)
            self.do(worker, activity("idle", step=0))
        for step in range(1, learned_steps + 2):
            for label in ("0F0", "0B0", "apply"):
                self.do_all(activity(label, step=step, computing=True))
                assert self.go_on(0.1) == []
            self.do_all(activity("gather", step=step))
            assert self.go_on(0.1) == []

    def silence_bound_s(self, worker: int) -> float:
        """For how long a worker may be silent while the others wait."""
        detector = self.detector
        return detector._bound_of(detector._watched[worker], detector._common_gap_s())

    def do(self, worker: int, doing: WorkerActivity) -> None:
        self.doing[worker] = doing
        self.entered_s[worker] = self.now_s

    def do_all(self, doing: WorkerActivity) -> None:
        for worker in self.workers:
            self.do(worker, doing)

    def beat(self, worker: int) -> None:
        doing = self.doing[worker]
        since_s = self.now_s - self.entered_s[worker]
        told = msgspec.structs.replace(doing, since_s=since_s)
        self.detector.heartbeat(worker, told, self.now_s)

    def go_on(self, duration_s: float, *, silent: Iterable[int] = ()) -> list[Suspicion]:
        """Lets time pass; all but the silent ones send heartbeats. Stops at the first suspicion."""
        end_s = self.now_s + duration_s
        silent = set(silent)
        while self.now_s < end_s - 1e-9:
            self.now_s += BEAT_S
            for worker in self.workers:
                if worker not in silent:
                    self.beat(worker)
            if found := self.detector.tick(self.now_s):
                return found
        return []

    def have_a_gap(self, worker: int, duration_s: float) -> None:
        """One worker is not heard for so long, and then is again."""
        assert self.go_on(duration_s - BEAT_S, silent=[worker]) == []
        assert self.go_on(BEAT_S) == []

    def tick(self, after_s: float = 0.0) -> list[Suspicion]:
        self.now_s += after_s
        return self.detector.tick(self.now_s)


def named(suspicions: Iterable[Suspicion]) -> list[tuple[int, str]]:
    return [(suspicion.worker, suspicion.detected_by) for suspicion in suspicions]


# ---------------------------------------------------------------------------------------------------------------- exit


def test_the_end_of_a_process_is_certain_and_cannot_wait():
    job = Job(3)
    job.detector.exited(2, "was killed by SIGKILL", job.now_s)
    assert job.detector.next_tick_s(job.now_s) == job.now_s
    assert job.tick() == [Suspicion(2, "exit", "worker 2 was killed by SIGKILL")]
    assert job.detector.workers == (0, 1)
    assert job.tick(0.05) == []


def test_several_ends_are_told_together_in_order():
    job = Job(4)
    for worker in (3, 1):
        job.detector.exited(worker, "ended with status 1", job.now_s)
    assert named(job.tick()) == [(1, "exit"), (3, "exit")]


def test_a_process_that_ends_before_it_has_joined_is_told_too():
    detector = Detector()
    detector.exited(0, "ended with status 1", 5.0)
    assert named(detector.tick(5.0)) == [(0, "exit")]


def test_the_end_of_who_has_left_or_is_lost_already_is_no_news():
    job = Job(3)
    job.detector.left(1)
    job.detector.exited(1, "ended with status 0", job.now_s)
    job.detector.exited(2, "was killed by SIGKILL", job.now_s)
    assert named(job.tick()) == [(2, "exit")]
    job.detector.exited(2, "was killed by SIGKILL", job.now_s)
    assert job.tick() == []


def test_who_leaves_before_the_tick_is_not_named():
    job = Job(2)
    job.detector.exited(1, "ended with status 0", job.now_s)
    job.detector.left(1)
    assert job.tick() == []


def test_nothing_is_heard_of_who_is_not_watched():
    job = Job(2)
    job.detector.left(1)
    job.beat(1)
    job.detector.disconnected(1, job.now_s)
    assert job.detector.workers == (0,)
    job.detector.joined(1, job.now_s)
    assert job.detector.workers == (0, 1)


# --------------------------------------------------------------------------------------------------------------- crowd


def test_a_coordinator_that_takes_over_learns_anew_what_a_busy_machine_is():
    """Seen: 24 workers on two cores, one of them silent for 1.6 s a few seconds after its coordinator was replaced."""

    def after_beats(number: int, *, takes_over: bool) -> Job:
        job = Job(3, takes_over=takes_over)
        job.do_all(activity("vote", step=1))
        assert job.go_on(number * BEAT_S) == []
        return job

    few, many = detection.LEARNED_GAPS_AGAIN // 2, detection.LEARNED_GAPS_AGAIN
    assert named(after_beats(few, takes_over=False).go_on(2.5, silent=[0])) == [(0, "heartbeat")]
    assert after_beats(few, takes_over=True).go_on(2.5, silent=[0]) == []
    assert named(after_beats(few, takes_over=True).go_on(5.5, silent=[0])) == [(0, "heartbeat")]
    assert named(after_beats(many, takes_over=True).go_on(2.5, silent=[0])) == [(0, "heartbeat")]


def test_a_slow_link_may_hold_back_what_a_worker_says():
    """Silence of who is at another site is borne for longer, by what its link may hold back; that of others is not."""
    near, far = Job(3, learned_steps=3), Job(3, learned_steps=3, held_up_s=[0.0, 0.0, 1.6])
    assert far.silence_bound_s(1) == near.silence_bound_s(1)
    bound_s = far.silence_bound_s(2)
    assert bound_s == near.silence_bound_s(2) + 1.6
    assert near.go_on(bound_s - 2 * BEAT_S, silent=[2]) and not far.go_on(bound_s - 2 * BEAT_S, silent=[2])
    assert named(far.go_on(3 * BEAT_S, silent=[2])) == [(2, "heartbeat")]


def test_when_most_are_silent_together_the_machine_is_suspected_first():
    """Seven of eight do not come to speak for six seconds, as when all begin anew on a few cores; then they do."""
    job = Job(8, learned_steps=3)
    for number in range(12):
        job.do(7, activity(f"0F{number}", step=5, computing=True))
        assert job.go_on(0.5, silent=range(7)) == []
    assert job.go_on(1.0) == []
    # Who is dead among them is found once the others speak again.
    for number in range(4):
        job.do(7, activity(f"0F{number}", step=6, computing=True))
        assert job.go_on(0.5, silent=range(7)) == []
    job.do(7, activity("gather", step=6))
    job.detector.pause(job.now_s)
    assert named(job.go_on(20.0, silent=[3])) == [(3, "heartbeat")]
    gone = Job(8, learned_steps=3)
    gone.detector.pause(gone.now_s)  # progress is another matter
    assert named(gone.go_on(30.0, silent=range(7))) == [(worker, "heartbeat") for worker in range(7)]
    fewer = Job(8, learned_steps=3)
    fewer.detector.pause(fewer.now_s)
    assert named(fewer.go_on(3.5, silent=range(4))) == [(worker, "heartbeat") for worker in range(4)]


def test_of_workers_on_several_hosts_most_hosts_must_be_silent():
    """Six of eight are on one host, and fall silent with it: the bound is that of a single worker."""
    lost = Job(8, learned_steps=3, hosts="aaaaaabc")
    lost.detector.pause(lost.now_s)
    assert named(lost.go_on(3.5, silent=range(6))) == [(worker, "heartbeat") for worker in range(6)]
    busy = Job(8, learned_steps=3, hosts="abcabcab")
    busy.detector.pause(busy.now_s)
    assert busy.go_on(3.5, silent=range(6)) == []


# ---------------------------------------------------------------------------------------------------------------- link


@pytest.mark.parametrize(("hosts", "lost"), [("abbb", [1, 2, 3]), ("", [0])])
def test_a_broken_network_between_two_hosts_leaves_the_side_of_the_coordinator(hosts, lost):
    """Worker 0 alone is beside the coordinator; without hosts it is the one that has lost most links."""
    job = Job(4, hosts=hosts)
    for other in (1, 2, 3):
        job.detector.link_lost(0, other, job.now_s)
        job.detector.link_lost(other, 0, job.now_s)
        job.detector.disconnected(other, job.now_s)
    assert sorted(named(job.tick(0.05))) == [(worker, "link") for worker in lost]


def test_an_exit_within_the_grace_explains_closed_links():
    job = Job(3)
    job.detector.link_lost(0, 2, job.now_s)
    job.detector.link_lost(1, 2, job.now_s)
    assert job.tick() == []
    assert job.now_s < job.detector.next_tick_s(job.now_s) <= job.now_s + detection.LINK_GRACE_S
    job.detector.exited(2, "was killed by SIGKILL", job.now_s + 0.01)
    assert named(job.tick(0.01)) == [(2, "exit")]
    assert job.tick(0.05) == []


def test_what_a_dying_worker_complained_about_is_forgotten():
    job = Job(3)
    job.detector.link_lost(2, 0, job.now_s)
    job.detector.exited(2, "was killed by SIGKILL", job.now_s)
    assert named(job.tick()) == [(2, "exit")]
    assert job.tick(0.05) == []


def test_what_was_said_of_links_is_of_its_generation():
    job = Job(3)
    job.detector.link_lost(0, 1, job.now_s)
    job.detector.new_generation(job.now_s)
    assert job.tick(0.05) == []
    job.detector.link_lost(0, 1, job.now_s)
    assert named(job.tick(0.05)) == [(1, "link")]


def test_after_the_grace_the_far_end_is_lost():
    job = Job(3)
    job.detector.link_lost(0, 2, job.now_s)
    assert job.tick(0.01) == []
    [suspicion] = job.tick(0.01)
    assert suspicion == Suspicion(
        2,
        "link",
        "worker 2 has lost its links to worker 0 (worker 0 says so), and no end of its process was reported within "
        "15 ms",
    )


def test_the_end_that_has_lost_most_links_is_blamed_whoever_complains_first():
    job = Job(4)
    for peer in (0, 1, 3):
        job.detector.link_lost(2, peer, job.now_s)
    job.detector.link_lost(0, 2, job.now_s)
    [suspicion] = job.tick(0.02)
    assert suspicion[:2] == (2, "link")
    assert "links to workers 0, 1, 3 (worker 0 says so)" in suspicion.reason
    assert job.tick(0.05) == []


def test_a_worker_that_nobody_complains_about_may_say_it_itself():
    job = Job(3)
    job.detector.link_lost(2, 0, job.now_s)
    job.detector.link_lost(2, 1, job.now_s)
    [suspicion] = job.tick(0.02)
    assert suspicion[:2] == (2, "link")
    assert "(it says so itself)" in suspicion.reason


@pytest.mark.parametrize("silent", [0, 1])
def test_of_two_that_accuse_each_other_the_one_not_heard_is_blamed(silent):
    job = Job(3, learned_steps=1)
    assert job.go_on(0.6 * detection.SILENCE_FLOOR_S, silent=[silent]) == []
    job.detector.link_lost(0, 1, job.now_s)
    job.detector.link_lost(1, 0, job.now_s)
    assert named(job.tick(0.02)) == [(silent, "link")]


@pytest.mark.parametrize("disconnected", [0, 1])
def test_of_two_that_accuse_each_other_the_one_without_control_connection_is_blamed(disconnected):
    job = Job(3)
    job.detector.link_lost(0, 1, job.now_s)
    job.detector.link_lost(1, 0, job.now_s)
    job.detector.disconnected(disconnected, job.now_s)
    assert named(job.tick(0.02)) == [(disconnected, "link")]


def test_a_tie_goes_to_the_larger_id():
    job = Job(3)
    job.detector.link_lost(1, 0, job.now_s)
    job.detector.link_lost(0, 1, job.now_s)
    assert named(job.tick(0.02)) == [(1, "link")]


def test_links_that_have_nothing_to_do_with_each_other_lose_one_worker_each():
    job = Job(5)
    job.detector.link_lost(0, 1, job.now_s)
    job.detector.link_lost(2, 3, job.now_s)
    assert named(sorted(job.tick(0.02))) == [(1, "link"), (3, "link")]


def test_complaints_by_or_about_workers_that_are_no_members_count_nothing():
    job = Job(3)
    job.detector.link_lost(7, 1, job.now_s)
    job.detector.link_lost(1, 7, job.now_s)
    job.detector.link_lost(1, 1, job.now_s)
    assert job.go_on(0.1) == []


def test_a_closed_control_connection_proves_nothing():
    job = Job(3, learned_steps=1)
    job.detector.disconnected(1, job.now_s)
    assert job.go_on(0.5, silent=[1]) == []
    job.detector.joined(1, job.now_s)
    assert job.go_on(5.0) == []


# ----------------------------------------------------------------------------------------------------------- heartbeat


def test_silence_on_a_quiet_machine():
    job = Job(3, learned_steps=1)
    start_s = job.now_s
    [suspicion] = job.go_on(5.0, silent=[1])
    assert suspicion[:2] == (1, "heartbeat")
    assert job.now_s - start_s <= detection.SILENCE_FLOOR_S + 2 * BEAT_S
    floor_s = detection.SILENCE_FLOOR_S
    assert suspicion.reason == (
        f"worker 1 has been silent for {floor_s + BEAT_S:.2f} s (bound {floor_s:.2f} s; its longest gap lately was "
        f"{BEAT_S:.2f} s)"
    )
    assert job.tick(0.05) == []


def test_a_worker_that_is_starting_may_be_silent_for_long_and_teaches_nothing():
    job = Job(3)
    job.detector = Detector()
    for worker in job.workers:
        job.detector.joined(worker, job.now_s)
        job.do(worker, activity("start", step=0))
    for _ in range(3):
        assert job.go_on(0.5) == []
        assert job.go_on(detection.SILENCE_STARTING_S - 0.1, silent=[1]) == []
    for worker in job.workers:
        job.do(worker, activity("vote", step=1))
    assert job.go_on(1.0) == []
    assert job.silence_bound_s(1) == detection.SILENCE_FLOOR_S
    job.do(1, activity("start", step=0))
    assert job.go_on(0.1) == []
    assert named(job.go_on(detection.SILENCE_STARTING_S + 0.1, silent=[1])) == [(1, "heartbeat")]


def test_a_new_coordinator_finds_who_is_lost_without_having_learned_anything():
    """It expects all members, hears those that dial again, and has more patience with the others."""
    job = Job(3)
    job.detector = Detector()
    for worker in job.workers:
        job.detector.joined(worker, job.now_s)
    assert job.silence_bound_s(1) == detection.SILENCE_UNLEARNED_S
    assert job.go_on(2.0, silent=job.workers) == []  # none has dialled again yet
    assert job.go_on(0.05, silent=[1]) == []
    assert job.go_on(detection.SILENCE_UNLEARNED_S - 0.05, silent=[1]) == []
    assert named(job.go_on(0.15, silent=[1])) == [(1, "heartbeat")]
    assert job.go_on(20.0) == []


def test_the_bound_is_four_times_the_longest_gap_that_turned_out_harmless():
    job = Job(3, learned_steps=1)
    gap_s = 0.6 * detection.SILENCE_FLOOR_S
    job.have_a_gap(1, gap_s)
    assert job.silence_bound_s(1) == pytest.approx(4 * gap_s, rel=0.01)
    assert job.silence_bound_s(0) == detection.SILENCE_FLOOR_S  # no other worker has had such a gap
    assert job.go_on(3.8 * gap_s, silent=[1]) == []
    [suspicion] = job.go_on(0.4 * gap_s, silent=[1])
    assert f"bound {4 * gap_s:.2f} s; its longest gap lately was {gap_s:.2f} s" in suspicion.reason


def test_a_gap_that_two_workers_have_had_counts_for_all():
    job = Job(4, learned_steps=1)
    gap_s = 0.6 * detection.SILENCE_FLOOR_S
    for worker in (1, 2):
        job.have_a_gap(worker, gap_s)
    assert job.silence_bound_s(0) == pytest.approx(4 * gap_s, rel=0.01)


def test_old_gaps_fade():
    job = Job(3, learned_steps=1)
    job.do_all(activity("idle", step=3))
    gap_s = 0.8 * detection.SILENCE_FLOOR_S
    job.have_a_gap(1, gap_s)
    assert job.silence_bound_s(1) == pytest.approx(4 * gap_s, rel=0.02)
    assert job.go_on(GAP_HALF_LIFE_S) == []
    assert job.silence_bound_s(1) == pytest.approx(2 * gap_s, rel=0.02)
    assert job.go_on(GAP_HALF_LIFE_S) == []
    assert job.silence_bound_s(1) == detection.SILENCE_FLOOR_S


def test_the_bound_is_never_far_above_the_longest_gap():
    job = Job(3, learned_steps=1)
    for _ in range(3):  # each bound permits a longer gap
        bound_s = job.silence_bound_s(1)
        assert job.go_on(bound_s - 2 * BEAT_S, silent=[1]) == []
        assert job.go_on(0.05) == []
    assert job.silence_bound_s(1) <= detection.GAP_MAX_S + detection.SILENCE_MARGIN_S
    for _ in range(5):
        assert job.go_on(job.silence_bound_s(1) - 2 * BEAT_S, silent=[1]) == []
        assert job.go_on(0.05) == []
    assert job.silence_bound_s(1) == pytest.approx(detection.GAP_MAX_S + detection.SILENCE_MARGIN_S, rel=0.01)


def test_the_time_without_a_control_connection_is_no_gap():
    job = Job(3, learned_steps=1)
    assert job.go_on(0.6 * detection.SILENCE_FLOOR_S, silent=[1]) == []
    job.detector.disconnected(1, job.now_s)
    assert job.go_on(0.1, silent=[1]) == []
    job.detector.joined(1, job.now_s)
    assert job.go_on(1.0) == []
    assert job.silence_bound_s(1) == detection.SILENCE_FLOOR_S


def test_a_disconnected_worker_that_stays_away_is_lost_by_its_silence():
    job = Job(3, learned_steps=1)
    job.detector.disconnected(1, job.now_s)
    [suspicion] = job.go_on(5.0, silent=[1])
    assert suspicion[:2] == (1, "heartbeat")
    assert suspicion.reason.endswith("; it is disconnected)")


def test_a_committed_step_is_a_sign_of_life_of_everybody():
    job = Job(3, learned_steps=1)
    for step in range(3, 13):
        for worker in (0, 2):
            job.do(worker, activity(step=step))
        assert job.go_on(0.8 * detection.SILENCE_FLOOR_S, silent=[1]) == []
    assert named(job.go_on(detection.SILENCE_FLOOR_S, silent=[1])) == [(1, "heartbeat")]


def test_there_is_no_hurry_while_others_compute():
    job = Job(3, learned_steps=1)
    start_s = job.now_s
    for index in range(40):
        for worker in (0, 2):
            job.do(worker, activity(f"0F{index}", step=3, computing=True))
        if found := job.go_on(0.4, silent=[1]):
            break
    assert named(found) == [(1, "heartbeat")]
    assert job.now_s - start_s == pytest.approx(detection.NO_HURRY * detection.SILENCE_FLOOR_S, abs=0.11)


def test_the_silent_ones_own_computing_is_no_reason_to_wait():
    job = Job(3, learned_steps=1)
    start_s = job.now_s
    job.do(1, activity("0F0", step=3, computing=True))
    assert job.go_on(0.05) == []
    assert named(job.go_on(5.0, silent=[1])) == [(1, "heartbeat")]
    assert job.now_s - start_s <= detection.SILENCE_FLOOR_S + 3 * BEAT_S


def test_the_start_of_a_new_generation_is_no_sign_of_life():
    job = Job(3, learned_steps=1)
    for generation in range(2, 4):
        for worker in (0, 2):
            job.do(worker, activity(step=2, generation=generation))
        found = job.go_on(0.6 * detection.SILENCE_FLOOR_S, silent=[1])
    assert named(found) == [(1, "heartbeat")]


def test_a_step_of_another_generation_is_no_sign_of_life():
    job = Job(3, learned_steps=1)
    for step in range(3, 5):
        for worker in (0, 2):  # 1 never came to generation 2, so no vote of generation 2 had it
            job.do(worker, activity(step=step, generation=2))
        found = job.go_on(0.6 * detection.SILENCE_FLOOR_S, silent=[1])
    assert named(found) == [(1, "heartbeat")]


def test_time_in_which_the_coordinator_slept_does_not_count():
    job = Job(3, learned_steps=1)
    assert job.go_on(0.5, silent=[1]) == []
    assert job.tick(60.0) == []  # it wakes up, and has not read what has come yet
    assert job.tick(0.01) == []
    assert job.go_on(5.0) == []
    assert job.silence_bound_s(1) == pytest.approx(4 * 0.66, rel=0.1)


def test_sleep_is_known_to_the_detector_whoever_looked_at_the_clock_first():
    """The connections and the hosts of a coordinator count by the same clock: what one has noticed counts for all."""
    clock = active_time.ActiveTime()
    detector = Detector(active_time=clock)
    for worker in (0, 1):
        detector.joined(worker, 10.0)
    detector.link_lost(0, 1, 10.0)
    before_s = clock.passed_s(10.0)
    assert clock.passed_s(70.0) - before_s < active_time.ASLEEP_S, "the sleep is nobody's silence"
    assert detector.tick(70.01) == [], "what has come in the meantime is read first"
    assert named(detector.tick(70.02)) == [(1, "link")]


def test_an_end_that_came_while_the_coordinator_slept_explains_closed_links():
    """The news of it waits to be read, as what the link's grace is for."""
    job = Job(3)
    job.detector.link_lost(0, 2, job.now_s)
    assert job.tick(60.0) == []
    job.detector.exited(2, "was killed by SIGKILL", job.now_s)
    assert named(job.tick(0.001)) == [(2, "exit")]
    job.detector.link_lost(0, 1, job.now_s)
    assert job.tick(60.0) == []
    assert named(job.tick(0.001)) == [(1, "link")]


def test_sleep_delays_but_never_prevents():
    job = Job(2, learned_steps=1)
    for _ in range(40):
        job.now_s += 1.0
        job.beat(0)
        if found := job.detector.tick(job.now_s):
            break
        job.now_s += 0.01
        job.beat(0)
        if found := job.detector.tick(job.now_s):
            break
    assert named(found) == [(1, "heartbeat")]


def test_an_exit_is_told_also_after_sleep():
    job = Job(2)
    job.detector.exited(1, "was killed by SIGKILL", job.now_s + 30.0)
    assert named(job.tick(30.0)) == [(1, "exit")]


def test_a_clock_that_goes_back_is_taken_as_standing_still():
    job = Job(2, learned_steps=1)
    job.detector.tick(job.now_s - 100.0)
    assert job.go_on(2.0) == []


def test_nobody_is_lost_while_nobody_is_heard():
    job = Job(4, learned_steps=1)
    assert job.go_on(20.0, silent=job.workers) == []
    bound_s = detection.SILENCE_FLOOR_S
    assert job.go_on(bound_s, silent=[1, 2, 3]) == []  # one is back: the others get their whole bound again
    assert named(job.go_on(bound_s, silent=[2, 3])) == [(2, "heartbeat"), (3, "heartbeat")]
    assert job.silence_bound_s(0) == bound_s  # that they were all gone is not their gap


def test_nobody_is_lost_while_nobody_is_heard_whoever_computes():
    """That one of them may be silent for twice as long says nothing about whether it is heard."""
    job = Job(2, learned_steps=1)
    job.do(0, activity("0F0", step=3, computing=True))
    assert job.go_on(2 * BEAT_S) == []
    assert job.go_on(BEAT_S, silent=[0]) == []
    assert job.go_on(20.0, silent=job.workers) == []


def test_a_job_of_which_nobody_is_heard_any_more_ends():
    job = Job(3, learned_steps=1)
    start_s = job.now_s
    assert named(job.go_on(100.0, silent=job.workers)) == [(worker, "heartbeat") for worker in job.workers]
    assert job.now_s - start_s == pytest.approx(detection.NOBODY_S, abs=0.2)


def test_the_only_worker_gets_the_longest_patience():
    job = Job(1, learned_steps=1)
    start_s = job.now_s
    assert named(job.go_on(100.0, silent=[0])) == [(0, "heartbeat")]
    assert job.now_s - start_s == pytest.approx(detection.NOBODY_S, abs=0.2)


def test_after_a_silence_of_all_nobody_is_lost_for_not_being_first_whatever_is_heard_first():
    def registers(job: Job) -> None:
        job.detector.joined(0, job.now_s)

    def complains(job: Job) -> None:
        registers(job)
        job.detector.link_lost(0, 1, job.now_s)

    def ends(job: Job) -> None:
        registers(job)
        job.detector.exited(0, "was killed by SIGKILL", job.now_s)

    for silence_s in (1.0, 1.45, 12.0):  # also one that has not outlasted any bound
        for first in (registers, complains, ends, lambda job: job.beat(0)):
            job = Job(4, learned_steps=1)
            assert job.go_on(silence_s, silent=job.workers) == [] and job.detector.are_together
            first(job)
            found = job.go_on(detection.SILENCE_FLOOR_S - 2 * BEAT_S, silent=[1, 2, 3])
            assert named(found) in ([], [(0, "exit")])
            assert job.go_on(BEAT_S, silent=[1, 2, 3]) == []
            if first is not complains:
                lost = named(job.go_on(10.0, silent=[2, 3]))
                assert lost == [(2, "heartbeat"), (3, "heartbeat")], "they are dead"


def test_after_a_silence_of_most_neither():
    job = Job(7, learned_steps=1)
    assert job.go_on(4.0, silent=[3, 4, 5, 6]) == []
    assert job.go_on(detection.SILENCE_FLOOR_S, silent=[4, 5, 6]) == [], "a minority by now"
    assert named(job.go_on(0.2, silent=[4, 5, 6])) == [(worker, "heartbeat") for worker in (4, 5, 6)]


def test_one_that_may_be_silent_for_longer_is_no_sign_that_others_are_heard():
    job = Job(3, learned_steps=1)
    job.do(0, activity("evaluate", step=3))
    assert job.go_on(0.5) == []
    assert job.go_on(2.2, silent=job.workers) == []
    assert job.go_on(5.0) == []


@pytest.mark.parametrize("was_seen", [False, True])
def test_a_silence_of_all_is_one_while_a_worker_is_being_started_too(was_seen: bool):
    job = Job(3, learned_steps=3)
    if was_seen:
        job.detector.expect(3, job.now_s)
        job.detector.used(3, 0.5, job.now_s)
    assert job.go_on(1.0, silent=job.workers if not was_seen else ()) == []
    if was_seen:
        job.detector.used(3, 0.6, job.now_s)
    else:
        job.detector.expect(3, job.now_s)  # the silence has begun, and the word to its agent waits too
    assert job.go_on(4.0, silent=job.workers) == []
    assert job.go_on(1.0) == []


def test_who_is_being_started_and_is_looked_at_shows_that_the_others_are_silent_alone():
    job = Job(3, learned_steps=3)
    job.detector.expect(3, job.now_s)
    found: list[Suspicion] = []
    for second in range(4):
        job.detector.used(3, 0.5 + second, job.now_s)
        found += job.go_on(1.0, silent=job.workers)
    assert {suspicion.worker for suspicion in found} == {0, 1, 2}


def test_silence_of_all_again_and_again_does_not_hide_the_dead_for_ever():
    job = Job(3, learned_steps=1)
    start_s, found = job.now_s, []
    while not found and job.now_s < start_s + 200.0:
        found = job.go_on(3.0, silent=job.workers) or job.go_on(2 * BEAT_S, silent=[2])
    assert named(found) == [(2, "heartbeat")]
    assert job.now_s - start_s < SPARED_MAX_S + 10.0


def test_of_links_that_broke_while_all_were_silent_it_is_decided_when_all_are_heard():
    job = Job(3, learned_steps=1)
    assert job.go_on(3.0, silent=job.workers) == []
    for peer in (0, 2):  # it has lost its network longer than they have
        job.detector.joined(1, job.now_s)
        job.detector.link_lost(1, peer, job.now_s)
    assert job.go_on(1.0, silent=[0, 2]) == []
    job.detector.joined(0, job.now_s)
    job.detector.joined(2, job.now_s)
    assert named(job.tick(0.1)) == [(1, "link")], "not one of those that could not contradict it"


def test_what_stood_still_while_all_were_silent_has_its_whole_time_again():
    job = Job(3, learned_steps=3)
    job.do_all(activity("reduce", step=5, on=[1]))
    assert job.go_on(2 * BEAT_S) == []
    assert job.go_on(10.0, silent=job.workers) == []
    assert job.go_on(detection.STALL_FLOOR_S - BEAT_S) == []
    assert named(job.go_on(1.0)) == [(1, "progress")]


# ------------------------------------------------------------------------------------------------------------ progress


@pytest.mark.parametrize("computing", [False, True])
def test_a_pause_of_a_process_that_its_silence_permits_is_no_lack_of_progress(computing):
    """A whole process that was not scheduled: its heartbeats come late, and what it does takes that much longer."""
    job = Job(3, learned_steps=3)
    job.do_all(activity("gather", step=4))
    job.do(1, activity("0F3", step=5, computing=computing))
    assert job.go_on(0.2) == []
    assert job.go_on(detection.SILENCE_FLOOR_S - BEAT_S, silent=[1]) == []
    assert job.go_on(0.2) == []


def test_an_endless_loop():
    job = Job(3, learned_steps=3)
    job.do_all(activity("reduce", step=4))
    job.do(1, activity("0F3", step=5, computing=True))
    start_s = job.now_s
    [suspicion] = job.go_on(60.0)
    assert suspicion[:2] == (1, "progress")
    assert job.now_s - start_s <= detection.BUSY_FLOOR_S + 2 * BEAT_S
    assert suspicion.reason.startswith("worker 1 has been computing 0F3 of step 5 for 2.0 s (bound 2.0 s, 10 times ")


def test_ten_times_the_longest_is_still_slow_and_not_lost():
    job = Job(3, learned_steps=3)
    job.do_all(activity("0B1", step=5, computing=True))
    assert job.go_on(1.0) == []
    job.do_all(activity("reduce", step=5))
    assert job.go_on(0.1) == []
    assert 9.99 <= job.detector.busy_bound_s("1B7") <= 11.0  # of any stage and micro-batch
    job.do(1, activity("0B0", step=6, computing=True))
    assert job.go_on(9.9) == []
    assert named(job.go_on(2.0)) == [(1, "progress")]


@pytest.mark.parametrize("label", ["recover", "checkpoint", "evaluate", "data", "foreign"])
def test_what_is_no_part_of_a_step_may_take_long(label):
    job = Job(2, learned_steps=3)
    assert job.detector.busy_bound_s(label) == detection.UNLEARNED_S
    job.do(1, activity(label, step=5, computing=True))
    assert job.go_on(detection.UNLEARNED_S - 1.0) == []
    assert named(job.go_on(2.0)) == [(1, "progress")]


def test_the_first_steps_may_take_long():
    job = Job(2)
    job.do_all(activity("0F1", step=3, computing=True))
    assert job.go_on(60.0) == []


def first_run(job: Job, label: str, duration_s: float, still_since_s: float = math.inf) -> list[Suspicion]:
    """Worker 1 does something for the first time; from some time on neither it nor its children use a processor."""
    job.do_all(activity("reduce", step=5, on=[1]))
    job.workers, silent = (0, 2), job.workers
    begin_s = job.now_s
    while job.now_s - begin_s < duration_s:
        first_s = job.now_s - begin_s
        told = activity(label, step=5, computing=True, since_s=max(0.0, first_s - still_since_s))
        job.detector.heartbeat(1, msgspec.structs.replace(told, first_s=max(first_s, 1e-3)), job.now_s)
        if found := job.go_on(5 * BEAT_S):
            return found
    job.workers = silent
    return []


@pytest.mark.parametrize(
    ("label", "learned_steps"), [("0F3", 0), ("0F3", 3), ("apply", 3), ("evaluate", 3), ("data", 3), ("start", 0)]
)
def test_what_runs_for_the_first_time_may_take_long_but_not_stand_still(label: str, learned_steps: int):
    job = Job(3, learned_steps=learned_steps)
    bounds_s = [job.detector.busy_bound_s(kind) for kind in ("1F1", label)]
    assert first_run(job, label, 140.0) == []
    assert [job.detector.busy_bound_s(kind) for kind in ("1F1", label)] == pytest.approx(bounds_s, rel=0.5)
    (found,) = first_run(job, label, 1000.0, still_since_s=20.0)
    assert found[:2] == (1, "progress")
    assert re.search(r"for 14\d\.\d s, for the first time .* used a processor for 120\.\d s \(bound 120", found.reason)


def test_nor_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detection, "FIRST_S", 30.0)
    (found,) = first_run(Job(3), "0F3", 100.0)
    assert found[:2] == (1, "progress") and "for the first time (bound 30 s)" in found.reason


def test_only_what_a_worker_says_itself_counts_as_computing():
    """Its last word was that it computes; that it is silent since is for the bound on silence."""
    job = Job(3, learned_steps=3)
    job.do(1, activity("0F3", step=5, computing=True))
    assert job.go_on(1.0) == []
    assert named(job.go_on(5.0, silent=[1])) == [(1, "heartbeat")]


def test_the_same_action_again_is_a_new_stay():
    job = Job(2, learned_steps=3)
    for _ in range(10):
        job.do(1, activity("0F3", step=5, computing=True))
        assert job.go_on(1.5) == []


def test_a_long_gap_between_heartbeats_is_not_taken_for_a_long_action():
    job = Job(3, learned_steps=3)
    job.do(1, activity("0F0", step=5, computing=True))
    assert job.go_on(0.1) == []
    assert job.go_on(0.5, silent=[1]) == []
    job.do(1, activity("0B0", step=5, computing=True))
    assert job.go_on(0.1) == []
    assert job.detector.busy_bound_s("0F0") <= 10 * (0.15 + detection.UNSEEN_S)


def test_all_wait_and_nothing_moves():
    job = Job(4, learned_steps=3)
    job.do_all(activity("reduce", step=5, on=[2]))
    job.do(2, activity("0B3", step=5, on=[3]))
    job.do(3, activity("reduce", step=5, on=[2]))
    start_s = job.now_s
    [suspicion] = job.go_on(60.0)
    assert job.now_s - start_s <= detection.STALL_FLOOR_S + 2 * BEAT_S
    assert suspicion == Suspicion(
        2,
        "progress",
        "nothing has moved for 3.0 s (bound 3.0 s): 3 of 4 workers wait for worker 2, which is in 0B3 of step 5 and "
        "waits for worker 3",
    )


def test_a_standstill_is_over_when_its_cause_is_gone():
    job = Job(4, learned_steps=3)
    job.do_all(activity("reduce", step=5, on=[2]))
    assert named(job.go_on(60.0)) == [(2, "progress")]
    assert job.go_on(2.9) == []


def test_nobody_is_to_blame_while_everybody_waits_for_the_coordinator():
    """A policy may let minutes pass before it says how to go on."""
    job = Job(2, learned_steps=2)
    job.do_all(activity("recover"))
    job.detector.pause(job.now_s)
    assert job.go_on(detection.UNLEARNED_S + 20) == []
    job.detector.resume(job.now_s)
    assert job.go_on(detection.UNLEARNED_S - 1) == []
    assert named(job.go_on(20)) == [(1, "progress")]


def test_who_computes_holds_up_no_standstill():
    job = Job(3, learned_steps=3)
    job.do_all(activity("reduce", step=5, on=[1]))
    for index in range(8):
        job.do(1, activity(f"0B{index}", step=5, computing=True))
        assert job.go_on(1.5) == []


def test_a_standstill_of_which_nothing_is_known():
    job = Job(3, learned_steps=3)
    job.do_all(activity("vote", step=5))
    job.do(1, activity("reduce", step=5))
    [suspicion] = job.go_on(10.0)
    assert suspicion[:2] == (1, "progress")
    assert suspicion.reason.endswith("nothing is known, and worker 1 is the furthest behind, in reduce of step 5")


def test_frames_that_still_come_are_movement():
    job = Job(3, learned_steps=3)
    for waiting in ([1, 2], [2], [1], [1, 2]):
        job.do_all(activity("reduce", step=5, on=waiting))
        assert job.go_on(2.5) == []


def test_standstills_that_ended_by_themselves_raise_the_bound():
    job = Job(3, learned_steps=3)
    job.do_all(activity("gather", step=5))
    assert job.go_on(1.0) == []
    job.do_all(activity("0F0", step=6, computing=True))
    assert job.go_on(0.1) == []
    assert job.detector.stall_bound_s() == pytest.approx(10.0, rel=0.15)


def test_a_standstill_may_last_as_long_as_a_step_does():
    job = Job(2)
    for step in range(3, 6):
        for index in range(10):
            job.do_all(activity(f"0F{index}", step=step, computing=True))
            assert job.go_on(1.5) == []
    assert job.detector.stall_bound_s() == pytest.approx(15.0, rel=0.05)


def test_recovering_workers_may_wait_long():
    job = Job(3, learned_steps=3)
    job.do_all(activity("recover", step=5, on=[1]))
    assert job.go_on(detection.UNLEARNED_S) == []
    assert named(job.go_on(1.0)) == [(1, "progress")]


def test_a_worker_whose_disk_is_slow_holds_up_everybody_and_is_no_worse_for_it():
    """It bounds that wait itself, and what the others have waited for it teaches nothing."""
    job = Job(3, learned_steps=3)
    bound_s = job.detector.stall_bound_s()
    job.do_all(activity("0F0", step=5, on=[1]))
    job.do(1, activity("write", step=4))
    assert job.go_on(5 * detection.UNLEARNED_S) == []
    job.do(1, activity("checkpoint", step=4, computing=True))
    assert job.go_on(0.1) == []
    job.do_all(activity("0F0", step=5, computing=True))
    assert job.go_on(0.1) == []
    assert job.detector.stall_bound_s() == pytest.approx(bound_s, rel=0.1)


@pytest.mark.parametrize("label", ["idle", "end", "start"])
def test_idle_workers_wait_for_ever(label):
    job = Job(3, learned_steps=3)
    job.do_all(activity(label, step=5))
    assert job.go_on(1000.0) == []


def test_an_idle_worker_that_another_one_needs():
    job = Job(3, learned_steps=3)
    job.do_all(activity("idle", step=5))
    job.do(2, activity("gather", step=5, on=[0]))
    assert named(job.go_on(10.0)) == [(0, "progress")]


def test_a_standstill_is_what_all_have_said():
    """While a worker is not heard, the coordinator does not know whether anything moves."""
    job = Job(4, learned_steps=3)
    job.do_all(activity("vote", step=5))
    assert job.go_on(20.0, silent=job.workers) == []


def test_no_workers_no_suspicion():
    detector = Detector()
    assert detector.tick(0.0) == []
    assert detector.tick(100.0) == []
    assert detector.next_tick_s(100.0) == 100.0 + active_time.TICK_S


# --------------------------------------------------------------------------------------------------------------- blame

BLAMED = {
    "the end of a chain, not whom most wait for": (
        {0: ("reduce", [2]), 1: ("reduce", [2]), 2: ("1F0", [3]), 3: ("0F4", [])},
        3,
    ),
    "in a circle, whom most wait for": ({0: ("reduce", [1]), 1: ("1B0", [2]), 2: ("1F0", [1])}, 1),
    "the one that no worker waits for is not blamed": ({0: ("vote", []), 1: ("vote", [0]), 2: ("1F0", [])}, 0),
    "nothing known: the one furthest behind": ({0: ("vote", []), 1: ("reduce", []), 2: ("vote", [])}, 1),
    "actions come before phases": ({0: ("reduce", []), 1: ("0W3", []), 2: ("reduce", [])}, 1),
    "forward or backward is no order": ({0: ("0F3", []), 1: ("0B0", []), 2: ("vote", [])}, 1),
    "all alike: the largest id": ({0: ("vote", []), 1: ("vote", []), 2: ("vote", [])}, 2),
    "a circle of two: the larger id": ({0: ("reduce", [1]), 1: ("reduce", [0])}, 1),
    "a circle of two, one behind": ({0: ("1F3", [1]), 1: ("reduce", [0])}, 0),
    "workers that are no members and oneself do not count": ({0: ("reduce", [0, 9]), 1: ("vote", [9])}, 0),
    "idle, but waited for": ({0: ("gather", [1]), 1: ("idle", []), 2: ("idle", [])}, 1),
    "idle and not waited for": ({0: ("gather", []), 1: ("idle", []), 2: ("idle", [])}, 0),
    "recovering comes before any phase": ({0: ("0F0", []), 1: ("recover", []), 2: ("vote", [])}, 1),
}


@pytest.mark.parametrize("case", BLAMED)
def test_blame(case):
    activities, worker = BLAMED[case]
    assert blame({who: activity(label, on=on) for who, (label, on) in activities.items()}) == worker


def test_blame_looks_at_generation_step_and_attempt_first():
    places = [
        activity("reduce", step=5, generation=2),
        activity("vote", step=4, generation=2),
        activity("vote", step=9, generation=1),
    ]
    assert blame(dict(enumerate(places))) == 2
    assert blame(dict(enumerate(places[:2]))) == 1
    assert blame({0: activity("0F0", attempt=2), 1: activity("vote", attempt=1)}) == 1


# ----------------------------------------------------------------------------------------------- before registration


class Start:
    """Workers that have not registered; time goes on with a look at their processes every second."""

    def __init__(self, num_workers: int) -> None:
        self.detector = Detector()
        self.now_s = 1000.0
        self.cpu_s = dict.fromkeys(range(num_workers), 0.0)
        for worker in self.cpu_s:
            self.detector.expect(worker, self.now_s)

    def go_on(self, duration_s: float, *, still: Iterable[int] = (), looks: bool = True) -> list[Suspicion]:
        """Lets time pass; all but those that stand still use a hundredth of a second in each."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s - 1e-9:
            self.now_s += active_time.TICK_S
            if looks and self.now_s % 1.0 < active_time.TICK_S:
                for worker in self.detector.awaited:
                    self.cpu_s[worker] += 0.01 * (worker not in still)
                    self.detector.used(worker, self.cpu_s[worker], self.now_s)
            if found := self.detector.tick(self.now_s):
                return found
        return []


def test_who_stands_still_before_it_has_registered_is_lost_like_any_other():
    start = Start(4)
    assert start.go_on(5.0) == []
    for worker in (0, 1):
        start.detector.joined(worker, start.now_s)
    begin_s = start.now_s
    found: list[Suspicion] = []
    while not found and start.now_s < begin_s + 60.0:
        for worker in (0, 1):
            start.detector.heartbeat(worker, activity("start", step=0), start.now_s)
        found = start.go_on(0.25, still=[3])
    assert named(found) == [(3, "heartbeat")]
    assert re.fullmatch(
        r"worker 3 has not registered, and its process has used no processor time for 2\d\.\d s \(bound 20\.0 s\)",
        found[0].reason,
    )
    assert start.now_s - begin_s < detection.SILENCE_STARTING_S + 3.0
    assert start.detector.awaited == (2,)


def test_who_uses_processor_time_gets_on_however_slowly():
    start = Start(2)
    for _ in range(50):
        assert start.go_on(detection.SILENCE_STARTING_S - 2.0, still=[0, 1]) == []
        assert start.go_on(2.0) == []


def test_that_nobody_looks_is_no_standing_still_but_has_an_end():
    start = Start(1)
    assert start.go_on(2.0) == []
    assert start.go_on(detection.UNSEEN_START_S - 3.0, looks=False) == []
    assert named(start.go_on(6.0, looks=False)) == [(0, "heartbeat")]


def test_time_without_a_look_is_no_standing_still():
    detector, now_s = Detector(), 1000.0
    detector.expect(0, now_s)
    for second in range(45):
        for quarter in range(4):
            assert detector.tick(now_s + second + quarter / 4) == []
        if second < 3 or second > 40:
            detector.used(0, 0.5, now_s + second + 0.75)


def test_who_has_just_registered_may_be_silent_as_long_as_who_starts():
    start = Start(2)
    start.detector.joined(0, start.now_s)
    start.detector.used(0, 0.0, start.now_s)  # it was looked at before that was known
    assert start.go_on(detection.SILENCE_STARTING_S - 1.0) == []
    assert named(start.go_on(3.0)) == [(0, "heartbeat")]


def test_the_end_of_a_process_that_was_awaited():
    start = Start(2)
    start.detector.exited(1, "was killed by SIGKILL", start.now_s)
    assert named(start.go_on(1.0)) == [(1, "exit")]
    start.detector.left(0)
    assert start.detector.awaited == ()
    assert start.go_on(200.0) == []


def test_a_starting_worker_that_computes_is_given_as_long_as_it_gets_on():
    job = Job(2)
    for _ in range(40):  # its main thread uses the processor now and then
        job.do_all(activity("start", step=0, computing=True))
        assert job.go_on(detection.UNLEARNED_S / 20) == []
    job.do(1, activity("link", step=0, on=[0]))
    found = job.go_on(detection.UNLEARNED_S + 1.0)
    assert named(found) == [(0, "progress")]
    assert "computing start of step 0" in found[0].reason


def test_a_link_that_is_never_made_is_a_standstill():
    job = Job(3)
    job.do(0, activity("link", step=0, on=[2]))
    job.do(1, activity("link", step=0, on=[2]))
    job.do(2, activity("start", step=0))
    found = job.go_on(detection.UNLEARNED_S + 5.0)
    assert named(found) == [(2, "progress")]
    assert "2 of 3 workers wait for worker 2" in found[0].reason


# ---------------------------------------------------------------------------------------------------------------- docs


def test_the_page_about_failures_gives_the_numbers_of_the_code():
    text = re.sub(r"\s+", " ", DOCS.read_text())
    for number in (
        f"{detection.LINK_GRACE_S * 1000:.0f} ms",
        f"min({detection.SILENCE_FACTOR:.0f} x longest, longest + {detection.SILENCE_MARGIN_S:.0f} s)",
        f"{detection.SILENCE_FLOOR_S} s",
        {2.0: "twice that"}[detection.NO_HURRY],
        f"Before its first step a worker may be silent for {detection.SILENCE_STARTING_S:.0f} s",
        f"{detection.SILENCE_UNLEARNED_S:.0f} s until {detection.LEARNED_GAPS} heartbeats have come",
        f"({detection.LEARNED_GAPS_AGAIN} to a coordinator that takes over",
        f"{detection.NOBODY_S:.0f} s",
        f"{detection.PROGRESS_FACTOR:.0f} times",
        f"{detection.BUSY_FLOOR_S:.0f} s",
        f"{detection.STALL_FLOOR_S:.0f} s",
        f"{detection.UNLEARNED_S:.0f} s until {detection.LEARNED_STEPS} steps",
        f"{detection.UNLEARNED_S:.0f} s without processor time, and {FIRST_S / 3600:.0f} hour in all",
        f"{GAP_HALF_LIFE_S / 60:.0f} minutes",
        f"{detection.DURATION_HALF_LIFE_S / 60:.0f} minutes",
        f"{active_time.ASLEEP_S} s",
        f"at most {starvation.FRESH_LOOK_S} s old; the coordinator waits up to {starvation.LOOK_GRACE_S:.0f} s for one",
        f"lost after its bound and {starvation.EXCUSED_MAX_S:.0f} s",
        f"looks at the process every {processes.TICK_S} s",
    ):
        assert number in text, number


# ---------------------------------------------------------------------------------------------------------- slow links


def crawl(job: Job, duration_s: float, moving: Iterable[int]) -> list[Suspicion]:
    """Lets time pass in which bytes move over the links of some workers."""
    for _ in range(round(duration_s / BEAT_S)):
        for worker in moving:
            doing = job.doing[worker]
            job.doing[worker] = msgspec.structs.replace(doing, moved_bytes=doing.moved_bytes + 1)
        if found := job.go_on(BEAT_S):
            return found
    return []


def test_a_link_that_slows_down_hundredfold_loses_nobody_and_one_that_stops_does():
    job = Job(3, learned_steps=3)
    job.do(0, activity("1F0", step=5, on=[1]))
    job.do(1, activity("gather", step=4, on=[2]))
    job.do(2, activity("1F0", step=5, on=[0]))
    assert job.detector.stall_bound_s() < 10
    assert crawl(job, 100.0, [1]) == []
    assert named(job.go_on(20.0)) == [(1, "progress")]


def test_bytes_that_move_do_not_excuse_who_computes_for_too_long():
    job = Job(2, learned_steps=3)
    job.do(0, activity("0F0", step=5, computing=True))
    job.do(1, activity("1F0", step=5, on=[0]))
    assert named(crawl(job, 60.0, [0, 1])) == [(0, "progress")]
