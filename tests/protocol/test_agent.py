"""The agent's machine: ends of workers are reported, ends of coordinators answered, and nothing goes on for ever."""

from elaswave.protocol.membership.agent import (
    MAX_COORDINATORS,
    Agent,
    AgentState,
    CoordinatorEnded,
    GiveUp,
    JobEnded,
    ReportEnd,
    StartCoordinator,
    WorkerEnded,
)
from elaswave.protocol.membership.effects import SpawnJoiner


def test_a_workers_end_is_reported_and_kept_for_the_next_coordinator() -> None:
    agent = Agent()
    end = WorkerEnded(3, "was killed by SIGKILL", 1.5)
    assert agent.handle(end) == [ReportEnd(end)]
    assert agent.worker_ends == [end]


def test_a_coordinator_that_dies_is_followed_by_another() -> None:
    agent = Agent()
    assert agent.handle(CoordinatorEnded("was killed by SIGKILL", False, 2.0)) == [StartCoordinator()]
    assert agent.coordinator_ends_s == [2.0]


def test_a_coordinator_that_gives_up_ends_the_job() -> None:
    agent = Agent()
    assert agent.handle(CoordinatorEnded("ended with status 1", True, 2.0)) == [
        GiveUp("the coordinator ended with status 1")
    ]
    assert agent.state is AgentState.ENDED


def test_coordinators_that_cannot_live_are_not_started_for_ever() -> None:
    agent = Agent()
    effects = [agent.handle(CoordinatorEnded("was killed by SIGSEGV", False, at)) for at in range(MAX_COORDINATORS)]
    assert effects[:-1] == [[StartCoordinator()]] * (MAX_COORDINATORS - 1)
    assert effects[-1] == [GiveUp("100 coordinators have ended, the last one was killed by SIGSEGV")]


def test_a_joiner_is_started_once_however_many_coordinators_ask() -> None:
    agent = Agent()
    assert agent.handle(SpawnJoiner(worker=4)) == [SpawnJoiner(worker=4)]
    assert agent.handle(SpawnJoiner(worker=4)) == []
    agent.handle(WorkerEnded(4, "was killed by SIGKILL", 1.0))
    assert agent.handle(SpawnJoiner(worker=4)) == [], "also after its end, of which every coordinator is told"
    assert agent.handle(SpawnJoiner(worker=5)) == [SpawnJoiner(worker=5)]


def test_after_the_end_nothing_is_started_or_reported() -> None:
    agent = Agent()
    assert agent.handle(JobEnded()) == []
    assert agent.handle(SpawnJoiner(worker=4)) == []
    assert agent.handle(CoordinatorEnded("ended with status 0", False, 3.0)) == []
    assert agent.handle(WorkerEnded(0, "ended with status 0", 3.0)) == []
