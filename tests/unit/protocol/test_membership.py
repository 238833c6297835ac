"""Joins and leaves as a coordinator deals with them: what is told, and what is ended in time."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.protocol.test_joiners import Job

from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.active_time import ActiveTime
from elaswave.protocol.events import (
    JoinerCame,
    JoinerGone,
    LeaveWanted,
    LeavingRecord,
    NewGeneration,
    Record,
    StartRecord,
)
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.effects import (
    EndJoiner,
    LeaveAsked,
    MembershipEffect,
    PlaceTaken,
    Refuse,
    Say,
    SpawnJoiner,
    StopTraining,
    Suspect,
    TellAgent,
    TellCore,
)
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.membership.joiners import AdmissionResult, Joiners, MembershipTerms
from elaswave.protocol.membership.membership import (
    JOIN_TIMEOUT_S,
    JOINER_SILENT_S,
    JOINER_STILL_S,
    Membership,
)
from elaswave.protocol.messages import InForce, Joining


class FakeJoiners:
    """Starts whom it is told to, and lets in everybody."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.started: list[int] = []
        self.with_places = self.started
        self.asked: dict[int, list[int]] = {}
        self.over: list[int] = []
        self.closed: list[int] = []
        self.num_open = 0
        self.next_s = float("inf")
        self.leave_at_s: dict[int, float] = {}

    def take_over(self, members: tuple[int, ...], now_s: float) -> list[str]:
        return []

    def request(self, count: int, now_s: float, request: int = 0) -> list[PlaceTaken]:
        new = [3 + len(self.started) + number for number in range(count)]
        self.started += new
        self.asked[request] = new
        for worker in new:
            self.hosts.placed(worker, 0)
        return [PlaceTaken(worker=worker, place=worker, at_s=now_s, request=request) for worker in new]

    def started_for(self, request: int) -> list[int]:
        return self.asked.get(request, []) if request else []

    def was_member(self, worker: int) -> bool:
        return worker < 3

    def joined(self, workers: tuple[int, ...]) -> None:
        pass

    def domain_of(self, worker: int) -> str:
        return f"host-{worker}"

    def received(self, joining: Joining) -> list[AdmissionResult]:
        return [AdmissionResult(joining, None)]

    def ended(self, worker: int, now_s: float) -> list[str]:
        self.over.append(worker)
        return []

    def due(self, now_s: float) -> list[PlaceTaken]:
        return []

    def left(self, worker: int, within_s: float, now_s: float) -> LeaveAsked:
        self.closed.append(worker)
        return LeaveAsked(worker=worker, within_s=within_s, at_s=now_s)

    def was_asked_to_leave(self, worker: int) -> bool:
        return worker in self.closed

    def stop(self) -> None:
        pass


class World:
    """A job of three members with one host, and what its membership asks for."""

    def __init__(self) -> None:
        self.fed: list[Any] = []
        self.ended: list[int] = []
        self.told: list[str] = []
        self.refused: list[tuple[int, str]] = []
        self.suspected: list[Any] = []
        self.effects: list[Any] = []
        self.now_s = 0.0
        self.spoke_s: dict[int, float] = {}
        """When anything came last from a worker that is connected."""
        self.leaving: set[int] = set()
        core = SimpleNamespace(members=(0, 1, 2), admissions=SimpleNamespace(leaving=self.leaving))
        agents = one_host()
        self.joiners = FakeJoiners(agents.hosts)
        self.membership = membership_of(cast(Coordinator, core), cast(Joiners, self.joiners), agents)

    def do(self, effects: list[Any]) -> None:
        """Carries out effects."""
        self.effects += effects
        for effect in effects:
            match effect:
                case TellCore(event):
                    self.fed.append(event)
                case TellAgent(_, EndJoiner(worker=worker)):
                    self.ended.append(worker)
                case Refuse(worker, problem):
                    self.refused.append((worker, problem))
                    self.told.append(f"worker {worker} is not admitted: {problem}")
                case Suspect(suspicions):
                    self.suspected += suspicions
                case Say(text):
                    self.told.append(text)

    def join(self, count: int, now_s: float, request: int = 0) -> list[int]:
        """Who is started."""
        effects = self.membership.join(count, now_s, request)
        self.do(effects)
        return [effect.message.worker for effect in effects if isinstance(effect, TellAgent)]

    def tick(self, now_s: float, step_s: float = 0.1) -> None:
        """What is due by the clock."""
        last_heartbeat_s = {worker: now_s - spoke_s for worker, spoke_s in self.spoke_s.items()}
        self.do(self.membership.tick(last_heartbeat_s, now_s, step_s))

    def pass_time(self, until_s: float, *speakers: int) -> None:
        """Five turns a second, in each of which something comes from the speakers."""
        while self.now_s < until_s:
            self.now_s += 0.2
            self.spoke_s.update(dict.fromkeys(speakers, self.now_s - 0.1))
            self.tick(self.now_s)


def one_host() -> HostAgents:
    agents = HostAgents(Hosts(home=11), (), lambda incarnation: 0.0, now_s=0.0)
    agents.came("a", 11, 0)
    return agents


def membership_of(core: Coordinator, joiners: Joiners, agents: HostAgents | None = None) -> Membership:
    terms = MembershipTerms(make_layout(widths=[3], layers_per_stage=[1], num_microbatches=3), workers_max=6)
    return Membership(core, joiners, agents or one_host(), terms, ActiveTime())


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
        determinism_hashes={},
    )


def look(world: World, worker: int, seconds: int, *, begin_s: float = 0.0, uses: bool = False) -> None:
    """The agent tells of a process, three times a second."""
    for tick in range(3 * seconds):
        now_s = begin_s + tick / 3
        world.do(world.membership.used(worker, now_s if uses else 1.0, now_s))


def test_a_joiner_that_hangs_before_its_first_word_is_ended(world: World) -> None:
    assert world.join(1, 0.0) == [3] and world.membership.silent == (3,)
    look(world, 3, 100, uses=True)
    look(world, 3, int(JOINER_STILL_S) - 1, begin_s=100.0)
    assert world.ended == []
    look(world, 3, 3, begin_s=99.0 + JOINER_STILL_S)
    assert world.ended == [3] and world.membership.silent == ()
    assert "worker 3 is not admitted: it has not said a word" in world.told[-1]
    ((worker, problem),) = world.refused
    assert worker == 3 and problem.startswith("it has not said a word, and has used no processor time for ")
    world.do(world.membership.ended(3, 200.0))
    assert world.joiners.over == [3], "its place is free again"


def test_looks_at_a_joiner_are_as_rare_as_the_agents(world: World) -> None:
    """It hangs from the beginning; the agent looks once a second."""
    world.join(1, 0.0)
    ended = []
    for second in range(int(JOINER_STILL_S) + 3):
        world.pass_time(float(second))
        world.do(world.membership.used(3, 0.25, world.now_s))
        ended.append(bool(world.ended))
    assert ended.index(True) >= JOINER_STILL_S, "and not much later either"


@pytest.mark.parametrize("speaks", [True, False])
def test_a_joiner_that_has_spoken_or_ended_is_not_watched(world: World, speaks: bool) -> None:
    world.join(1, 0.0)
    if speaks:
        world.do(world.membership.received(joining(3), 1.0))
        assert world.fed == [JoinerCame(3, "unix:/3", "host-3")]
    else:
        world.do(world.membership.ended(3, 1.0))
    assert world.membership.silent == ()
    look(world, 3, 200)
    assert world.ended == []


def test_no_more_join_than_have_room_and_a_request_that_comes_again_starts_nobody(world: World) -> None:
    assert (world.join(2, 0.0, 7), world.join(2, 1.0, 7)) == ([3, 4], [])
    assert world.membership.joining == (3, 4)
    obstacle = world.membership.obstacle_to_join(2)
    assert obstacle is not None and "5 workers are there or on their way, and 7 may need more" in obstacle
    assert world.join(2, 2.0, 8) == []
    assert world.join(1, 3.0, 9) == [5] and world.joiners.started == [3, 4, 5]


def test_an_error_of_a_joiners_own_is_nobodys_loss(world: World) -> None:
    world.join(1, 0.0)
    assert world.membership.is_joiner(3) and not world.membership.is_joiner(2)
    world.do(world.membership.failed(3, "OSError: no such file"))
    problem = "it has ended with an error: OSError: no such file"
    assert (world.told, world.refused) == ([f"worker 3 is not admitted: {problem}"], [(3, problem)])


def test_a_joiner_that_has_had_a_notice_does_not_come_in_and_nobody_takes_its_place(world: World) -> None:
    world.join(2, 0.0)
    world.do(world.membership.received(joining(3), 1.0))
    for worker, now_s in ((3, 2.0), (4, 2.0), (3, 3.0)):
        world.do(world.membership.withdraws(worker, now_s))
    assert world.fed == [JoinerCame(3, "unix:/3", "host-3"), JoinerGone(3)]
    assert world.joiners.closed == [3, 4]
    assert (
        world.told[0] == "worker 3 is not admitted: it has had a notice that its machine will be taken away (SIGTERM)"
    )


def test_a_joiner_whose_agent_had_a_notice_before_its_first_word_does_not_come_in_afterwards(world: World) -> None:
    world.join(1, 0.0)
    world.do(world.membership.agent_leaves(11, 30.0, 1.0))
    problem = "it has had a notice that its machine will be taken away (SIGTERM)"
    assert world.refused == [(3, problem)], "which has no connection to go by yet"
    world.do(world.membership.received(joining(3), 2.0))
    assert world.fed == [] and world.refused == 2 * [(3, problem)]
    assert world.membership.joining == () == tuple(world.membership.spoken)


def test_a_successor_does_not_let_a_joiner_in_that_was_withdrawn() -> None:
    job = Job()
    (worker,) = job.request(1, 0.0)
    job.journal.append(job.joiners.left(worker, 0.0, 1.0))
    membership = membership_of(cast(Coordinator, SimpleNamespace(members=(0, 1))), job.take_over())
    assert [type(effect) for effect in membership.received(joining(worker), 2.0)] == [Refuse]
    (other,) = job.request(1, 3.0)
    assert not any(isinstance(effect, Refuse) for effect in membership.received(joining(other), 4.0))


def test_a_successor_watches_all_that_are_no_members(world: World) -> None:
    world.joiners.with_places += [2, 3, 4]
    world.do(world.membership.agent_came("a", 11, 0, 0.0))
    assert world.membership.silent == (3, 4)
    world.do(world.membership.ended(4, 0.0))
    assert world.membership.silent == (3,)


def test_a_joiner_that_has_ended_is_not_waited_for_when_another_agent_comes() -> None:
    job = Job()
    job.ended(1, 0.0)
    (first,) = job.due(100.0)
    job.ended(first, 101.0)
    (second,) = job.due(200.0)
    membership = membership_of(cast(Coordinator, SimpleNamespace(members=(0,))), job.joiners)
    membership.agent_came("a", 11, 0, 200.0)
    assert job.joiners.started == [first, second] and membership.silent == (second,)


def test_a_joiner_to_which_no_links_are_made_is_ended_too(world: World) -> None:
    world.join(1, 0.0)
    world.do(world.membership.received(joining(3), 1.0))
    world.tick(1.0 + JOIN_TIMEOUT_S)
    assert world.ended == []
    world.tick(1.5 + JOIN_TIMEOUT_S)
    assert world.fed[-1] == JoinerGone(3) and world.ended == [3]


def test_a_joiner_that_members_cannot_reach_is_told_why_and_ended(world: World) -> None:
    world.join(1, 0.0)
    world.do(world.membership.unreachable(3, "worker 3 does not answer"))
    assert world.refused == [], "it has not come"
    world.do(world.membership.received(joining(3), 1.0))
    world.do(world.membership.unreachable(3, "worker 3 does not answer"))
    assert world.fed[-1] == JoinerGone(3) and world.ended == [3]
    assert world.refused == [(3, "worker 3 does not answer")] and world.membership.joining == ()
    world.do(world.membership.unreachable(0, "worker 0 does not answer"))
    assert world.ended == [3], "a member is the detector's"


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_joiner_that_falls_silent_before_it_is_a_member_is_given_up(world: World, is_connected: bool) -> None:
    world.join(2, 0.0)
    world.pass_time(1.0)
    for worker in (3, 4):
        world.do(world.membership.received(joining(worker), world.now_s))
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
    world.join(1, 0.0)
    world.do(world.membership.received(joining(3), 0.0))
    for _ in range(4):
        world.pass_time(world.now_s + JOINER_SILENT_S - 1.0)
        world.membership.all_are_silent(world.now_s)
    assert world.ended == []
    world.pass_time(world.now_s + JOINER_SILENT_S + 1.0)
    assert world.ended == [3]


def test_joiners_do_not_fall_silent_while_the_coordinator_sleeps(world: World) -> None:
    world.join(1, 0.0)
    world.do(world.membership.received(joining(3), 0.0))
    world.pass_time(1.0, 3)
    world.now_s = 60.0
    world.tick(world.now_s)
    assert world.ended == [] and world.membership.joining == (3,)


def test_who_is_no_member_cannot_leave_and_is_not_lost_for_it_later(world: World) -> None:
    world.do(world.membership.leave(3, 5.0, 0.0))
    assert world.fed == [] and world.told == ["worker 3 is to leave, but is no member: nothing is done"]
    world.tick(10.0)
    assert world.suspected == []


def test_the_time_of_those_that_leave_does_not_count_once_the_job_stops(world: World) -> None:
    world.do(world.membership.leave(1, 5.0, 0.0))
    world.do(world.membership.leave(2, 5.0, 0.0))
    assert world.fed == [LeaveWanted(1), LeaveWanted(2)]
    world.membership.stop()
    world.tick(10.0)
    assert world.suspected == []


def test_a_successor_loses_who_does_not_leave_in_what_is_left_of_its_time(world: World) -> None:
    world.leaving.update({1, 2})
    world.joiners.leave_at_s = {1: 102.0}
    world.do(world.membership.begin(100.0))
    assert world.membership.next_s == 102.0
    world.tick(101.0)
    world.tick(102.0)
    assert [suspicion.worker for suspicion in world.suspected] == [1], "of worker 2 nothing is known: it has 30 s"
    world.tick(130.0)
    assert [suspicion.worker for suspicion in world.suspected] == [1, 2]


def test_a_successor_stops_the_job_if_the_last_was_asked_to_leave_before_it_came() -> None:
    """Its predecessor has made the last leave durable, and could not say any more that the job is to end."""
    job = Job()
    founders = job.plan.layout.workers
    records: list[Record] = [StartRecord(term=1), *(LeavingRecord(term=1, worker=worker) for worker in founders)]

    def asked_after(num_records: int) -> list[MembershipEffect]:
        core = Coordinator(
            InForce(job.plan.layout, job.plan.placement),
            blocks=job.plan.blocks,
            scatter_width=1,
            records=records[:num_records],
        )
        return membership_of(core, job.joiners).stop_if_none_stay()

    assert len(founders) == 2 and asked_after(1) == asked_after(2) == []
    assert asked_after(3) == [StopTraining("all workers are to leave, and the job needs 1")]


def test_who_comes_is_known_from_its_start_to_its_end_also_before_it_is_answered(world: World) -> None:
    world.join(2, 0.0)
    assert world.membership.coming == {3, 4}
    world.joiners.received = lambda joining: []  # type: ignore[method-assign]  # nothing to compare it with yet
    world.do(world.membership.received(joining(3), 0.0))
    assert world.membership.joining == (4,) and world.membership.coming == {3, 4}
    world.joiners.received = lambda joining: [AdmissionResult(joining, None)]  # type: ignore[method-assign]
    world.do(world.membership.received(joining(3), 0.0))
    assert world.membership.coming == {3, 4}
    world.joiners.received = lambda joining: [AdmissionResult(joining, "other libraries")]  # type: ignore[method-assign]
    world.do(world.membership.received(joining(4), 0.0))
    world.do(world.membership.ended(4, 0.0))
    world.do(world.membership.ended(3, 0.0))
    assert world.membership.coming == set()


def test_a_joiner_that_has_spoken_is_not_taken_for_a_silent_one_when_its_agent_comes_again(world: World) -> None:
    """Nor is it once it is a member: its process may then wait for others for a minute, and use no processor time."""
    world.join(1, 0.0)
    world.do(world.membership.received(joining(3), 1.0))
    world.joiners.with_places = [3]
    world.do(world.membership.agent_came("a", 11, 0, 2.0))
    assert world.membership.silent == () and world.effects[-1] == TellAgent(11, SpawnJoiner(worker=3))
    world.do(world.membership.new_generation(NewGeneration(2, (), joined=(3,)), 3.0))
    look(world, 3, 200)
    assert world.ended == [] and world.membership.joining == ()


def test_a_joiner_that_becomes_a_member_is_no_joiner_whatever_was_heard_of_it(world: World) -> None:
    """A successor asks for it again before it has found that successor, and it joins by the words of others."""
    world.joiners.with_places = [3]
    world.do(world.membership.agent_came("a", 11, 0, 0.0))
    assert world.membership.joining == (3,)
    world.do(world.membership.new_generation(NewGeneration(2, (), joined=(3,)), 3.0))
    assert world.membership.joining == () and world.membership.obstacle_to_join(3) is None


def test_nobody_is_asked_to_leave_once_the_job_stops(world: World) -> None:
    world.membership.stop()
    world.do(world.membership.leave(1, 5.0, 0.0))
    world.do(world.membership.has_notice(2, 5.0, 0.0))
    world.tick(10.0)
    assert world.fed == world.suspected == world.told == []
