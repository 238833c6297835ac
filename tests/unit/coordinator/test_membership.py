"""Joins and leaves as a coordinator's process deals with them: what is told, and what is ended in time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.coordinator.test_joiners import Job

from elaswave.coordinator.joiners import Answer, Joiners
from elaswave.coordinator.membership import JOIN_TIMEOUT_S, JOINER_SILENT_S, JOINER_STILL_S, Membership
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.awake import AwakeTime
from elaswave.protocol.events import JoinerCame, JoinerGone, LeaveWanted, LeavingRecord, Record, StartRecord
from elaswave.protocol.messages import InForce, Joining


class FakeJoiners:
    """Starts whom it is told to, and lets in everybody."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.with_places = self.started
        self.asked: dict[int, list[int]] = {}
        self.over: list[int] = []
        self.closed: list[int] = []
        self.next_s = self.room = float("inf")
        self.leave_at_s: dict[int, float] = {}

    def take_over(self, members: tuple[int, ...], now_s: float) -> None:
        pass

    def request(self, count: int, now_s: float, request: int = 0) -> list[int]:
        new = [3 + len(self.started) + number for number in range(count)]
        self.started += new
        self.asked[request] = new
        return new

    def started_for(self, request: int) -> list[int]:
        return self.asked.get(request, []) if request else []

    def was_member(self, worker: int) -> bool:
        return worker < 3

    def domain_of(self, worker: int) -> str:
        return f"host-{worker}"

    def heard(self, joining: Joining) -> list[Answer]:
        return [Answer(joining, None)]

    def ended(self, worker: int, now_s: float) -> None:
        self.over.append(worker)

    def due(self, now_s: float) -> list[int]:
        return []

    def left(self, worker: int, within_s: float, now_s: float) -> None:
        self.closed.append(worker)

    def stop(self) -> None:
        pass


class World:
    """A job of three members, as `Membership` sees it."""

    def __init__(self) -> None:
        self.fed: list[Any] = []
        self.ended: list[int] = []
        self.told: list[str] = []
        self.refused: list[tuple[int, str]] = []
        self.suspected: list[Any] = []
        self.now_s = 0.0
        self.spoke_s: dict[int, float] = {}
        """When anything came last from a worker that is connected."""
        self.leaving: set[int] = set()
        core = SimpleNamespace(members=(0, 1, 2), admissions=SimpleNamespace(leaving=self.leaving), term=1, epoch=1)
        self.joiners = FakeJoiners()
        self.membership = membership_of(
            cast(Coordinator, core),
            cast(Joiners, self.joiners),
            feed=self.fed.append,
            suspect=self.suspected.extend,
            end=self.ended.append,
            say=self.told.append,
            heard_s=lambda worker: self.now_s - self.spoke_s[worker] if worker in self.spoke_s else None,
            refused=lambda worker, problem: self.refused.append((worker, problem)),
        )

    def pass_time(self, until_s: float, *speakers: int) -> None:
        """Five turns a second, in each of which something comes from the speakers."""
        while self.now_s < until_s:
            self.now_s += 0.2
            self.spoke_s.update(dict.fromkeys(speakers, self.now_s - 0.1))
            self.membership.tick(self.now_s, 0.1)


def membership_of(core: Coordinator, joiners: Joiners, **calls: Any) -> Membership:
    ignored = dict.fromkeys(("feed", "suspect", "spawn", "end", "send", "say"), lambda *told: None)
    calls = {**ignored, "heard_s": lambda worker: None, **calls}
    return Membership(core, joiners, **calls, awake=AwakeTime(), drain_deadline_s=30.0, workers_min=1, workers_max=6)


@pytest.fixture
def world() -> World:
    return World()


def joining(worker: int) -> Joining:
    return Joining(
        worker=worker,
        address=f"unix:/{worker}",
        protocol=1,
        libraries="",
        environment="",
        config_hash=1,
        model_hash=1,
        data_hash=1,
        canaries={},
    )


def look(world: World, worker: int, seconds: int, *, begin_s: float = 0.0, uses: bool = False) -> None:
    """The agent tells of a process, three times a second."""
    for tick in range(3 * seconds):
        now_s = begin_s + tick / 3
        world.membership.used(worker, now_s if uses else 1.0, now_s)


def test_a_joiner_that_hangs_before_its_first_word_is_ended(world: World) -> None:
    assert world.membership.join(1, 0.0) == [3] and world.membership.silent == (3,)
    look(world, 3, 100, uses=True)
    look(world, 3, int(JOINER_STILL_S) - 1, begin_s=100.0)
    assert world.ended == []
    look(world, 3, 3, begin_s=99.0 + JOINER_STILL_S)
    assert world.ended == [3] and world.membership.silent == ()
    assert "worker 3 is ended: it was to join, has not said a word" in world.told[-1]
    ((worker, problem),) = world.refused
    assert worker == 3 and problem.startswith("it has not said a word, and has used no processor time for ")
    world.membership.ended(3, 200.0)
    assert world.joiners.over == [3], "its place is free again"


def test_looks_at_a_joiner_are_as_rare_as_the_agents(world: World) -> None:
    """It hangs from the beginning; the agent looks once a second."""
    world.membership.join(1, 0.0)
    ended = []
    for second in range(int(JOINER_STILL_S) + 3):
        world.pass_time(float(second))
        world.membership.used(3, 0.25, world.now_s)
        ended.append(bool(world.ended))
    assert ended.index(True) >= JOINER_STILL_S, "and not much later either"


@pytest.mark.parametrize("speaks", [True, False])
def test_a_joiner_that_has_spoken_or_ended_is_not_watched(world: World, speaks: bool) -> None:
    world.membership.join(1, 0.0)
    if speaks:
        world.membership.heard(joining(3), 1.0)
        assert world.fed == [JoinerCame(3, "unix:/3", "host-3")]
    else:
        world.membership.ended(3, 1.0)
    assert world.membership.silent == ()
    look(world, 3, 200)
    assert world.ended == []


def test_no_more_join_than_have_room_and_a_request_that_comes_again_starts_nobody(world: World) -> None:
    assert world.membership.join(2, 0.0, 7) == world.membership.join(2, 1.0, 7) == [3, 4]
    assert world.membership.joining == (3, 4)
    refused = world.membership.join(2, 2.0, 8)
    assert isinstance(refused, str) and "5 workers are there or on their way, and 7 may need more" in refused
    assert world.membership.join(1, 3.0, 9) == [5] and world.joiners.started == [3, 4, 5]
    assert world.membership.join(2, 4.0, 7) == [3, 4], "there is no room for others, but these are there"


def test_an_error_of_a_joiners_own_is_nobodys_loss(world: World) -> None:
    world.membership.join(1, 0.0)
    assert world.membership.failed(3, "OSError: no such file") and not world.membership.failed(2, "KeyError")
    problem = "it has ended with an error: OSError: no such file"
    assert (world.told, world.refused) == ([f"worker 3 is not admitted: {problem}"], [(3, problem)])


def test_a_joiner_that_has_had_a_notice_does_not_come_in_and_nobody_takes_its_place(world: World) -> None:
    world.membership.join(2, 0.0)
    world.membership.heard(joining(3), 1.0)
    assert world.membership.withdraws(3, 2.0) and world.membership.withdraws(4, 2.0)
    assert world.membership.withdraws(3, 3.0) and not world.membership.withdraws(2, 3.0)
    assert world.fed == [JoinerCame(3, "unix:/3", "host-3"), JoinerGone(3)]
    assert world.joiners.closed == [3, 4]
    assert (
        world.told[0] == "worker 3 is not admitted: it has had a notice that its machine will be taken away (SIGTERM)"
    )


def test_a_successor_watches_all_that_are_no_members(world: World) -> None:
    world.joiners.with_places += [2, 3, 4]
    world.membership.spawn_again()
    assert world.membership.silent == (3, 4)
    world.membership.ended(4, 0.0)
    assert world.membership.silent == (3,)


def test_a_joiner_that_has_ended_is_not_waited_for_when_another_agent_comes() -> None:
    joiners = Job().joiners
    joiners.ended(1, 0.0)
    (first,) = joiners.due(100.0)
    joiners.ended(first, 101.0)
    (second,) = joiners.due(200.0)
    membership = membership_of(cast(Coordinator, SimpleNamespace(members=(0,))), joiners)
    membership.spawn_again()
    assert joiners.started == [first, second] and membership.silent == (second,)


def test_a_joiner_to_which_no_links_are_made_is_ended_too(world: World) -> None:
    world.membership.join(1, 0.0)
    world.membership.heard(joining(3), 1.0)
    world.membership.tick(1.0 + JOIN_TIMEOUT_S, 0.1)
    assert world.ended == []
    world.membership.tick(1.5 + JOIN_TIMEOUT_S, 0.1)
    assert world.fed[-1] == JoinerGone(3) and world.ended == [3]


def test_a_joiner_that_members_cannot_reach_is_told_why_and_ended(world: World) -> None:
    world.membership.join(1, 0.0)
    world.membership.unreachable(3, "worker 3 does not answer")
    assert world.refused == [], "it has not come"
    world.membership.heard(joining(3), 1.0)
    world.membership.unreachable(3, "worker 3 does not answer")
    assert world.fed[-1] == JoinerGone(3) and world.ended == [3]
    assert world.refused == [(3, "worker 3 does not answer")] and world.membership.joining == ()
    world.membership.unreachable(0, "worker 0 does not answer")
    assert world.ended == [3], "a member is the detector's"


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_joiner_that_falls_silent_before_it_is_a_member_is_given_up(world: World, is_connected: bool) -> None:
    world.membership.join(2, 0.0)
    world.pass_time(1.0)
    for worker in (3, 4):
        world.membership.heard(joining(worker), world.now_s)
    world.pass_time(10.0, 3, 4)
    if not is_connected:
        del world.spoke_s[4]
    world.pass_time(9.0 + JOINER_SILENT_S, 3)
    assert world.refused == [] and world.membership.joining == (3, 4)
    world.pass_time(11.0 + JOINER_SILENT_S, 3)
    assert world.refused == [(4, "nothing has been heard of it for 20 s")] and world.ended == [4]
    assert world.fed[-1] == JoinerGone(4) and world.membership.joining == (3,)
    world.pass_time(100.0, 3)
    assert world.ended == [4]


def test_joiners_do_not_fall_silent_alone_while_nobody_is_heard(world: World) -> None:
    world.membership.join(1, 0.0)
    world.membership.heard(joining(3), 0.0)
    for _ in range(4):
        world.pass_time(world.now_s + JOINER_SILENT_S - 1.0)
        world.membership.nobody_is_heard(world.now_s)
    assert world.ended == []
    world.pass_time(world.now_s + JOINER_SILENT_S + 1.0)
    assert world.ended == [3]


def test_joiners_do_not_fall_silent_while_the_coordinator_sleeps(world: World) -> None:
    world.membership.join(1, 0.0)
    world.membership.heard(joining(3), 0.0)
    world.pass_time(1.0, 3)
    world.now_s = 60.0
    world.membership.tick(world.now_s, 0.1)
    assert world.ended == [] and world.membership.joining == (3,)


def test_who_is_no_member_cannot_leave_and_is_not_lost_for_it_later(world: World) -> None:
    world.membership.leave(3, 5.0, 0.0)
    assert world.fed == [] and world.told == ["worker 3 is to leave, but is no member: nothing is done"]
    world.membership.tick(10.0, 0.1)
    assert world.suspected == []


def test_the_time_of_those_that_leave_does_not_count_once_the_job_stops(world: World) -> None:
    world.membership.leave(1, 5.0, 0.0)
    world.membership.leave(2, 5.0, 0.0)
    assert world.fed == [LeaveWanted(1), LeaveWanted(2)]
    world.membership.stop()
    world.membership.tick(10.0, 0.1)
    assert world.suspected == []


def test_a_successor_loses_who_does_not_leave_in_what_is_left_of_its_time(world: World) -> None:
    world.leaving.update({1, 2})
    world.joiners.leave_at_s = {1: 102.0}
    world.membership.take_over(100.0)
    assert world.membership.tick(101.0, 0.1) == 102.0
    world.membership.tick(102.0, 0.1)
    assert [suspicion.worker for suspicion in world.suspected] == [1], "of worker 2 nothing is known: it has 30 s"
    world.membership.tick(130.0, 0.1)
    assert [suspicion.worker for suspicion in world.suspected] == [1, 2]


def test_a_successor_stops_the_job_if_the_last_was_asked_to_leave_before_it_came() -> None:
    """Its predecessor has made the last leave durable, and could not say any more that the job is to end."""
    job = Job()
    founders = job.plan.layout.workers
    records: list[Record] = [StartRecord(term=1), *(LeavingRecord(term=1, worker=worker) for worker in founders)]

    def cause_after(num_records: int) -> str | None:
        core = Coordinator(
            InForce(job.plan.layout, job.plan.placement),
            blocks=job.plan.blocks,
            num_followers=1,
            scatter_width=1,
            records=records[:num_records],
        )
        return membership_of(core, cast(Joiners, FakeJoiners())).cause_to_stop()

    assert len(founders) == 2 and cause_after(1) is cause_after(2) is None
    assert cause_after(3) == "all workers are to leave, and the job needs 1"


def test_who_comes_is_known_from_its_start_to_its_end_also_before_it_is_answered(world: World) -> None:
    world.membership.join(2, 0.0)
    assert world.membership.coming == {3, 4}
    world.joiners.heard = lambda joining: []  # type: ignore[method-assign]  # nothing to compare it with yet
    world.membership.heard(joining(3), 0.0)
    assert world.membership.joining == (4,) and world.membership.coming == {3, 4}
    world.membership.answer([Answer(joining(3), None)], 0.0)
    assert world.membership.coming == {3, 4}
    world.membership.answer([Answer(joining(4), "other libraries")], 0.0)
    world.membership.ended(4, 0.0)
    world.membership.ended(3, 0.0)
    assert world.membership.coming == set()
