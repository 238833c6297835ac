"""A member that lies: whom it may speak for is compared with whom its connection is of, for every kind of message."""

import logging
from types import SimpleNamespace, UnionType
from typing import Any, get_args
from unittest.mock import MagicMock

import pytest

from elaswave.channel.messages import agent as agent_messages
from elaswave.channel.messages.agent import (
    AgentHello,
    AgentKeysTaken,
    AgentLeaving,
    AskJob,
    CheckpointCommitted,
    CpuTimes,
    Exited,
    FilesCut,
    FromAgent,
    LogPart,
    StopJob,
    TermTaken,
)
from elaswave.channel.messages.operator import FromOperator
from elaswave.channel.messages.worker import FromWorker
from elaswave.channel.wire import agent_id, operator_id
from elaswave.coordinator.agents import Agents
from elaswave.coordinator.process import CoordinatorProcess
from elaswave.errors import SupersededError
from elaswave.job.keys import JobKey, KeyRole
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.hosts import Hosts
from elaswave.store.seal import proof_of_term
from elaswave.transport.handshake import Secrets

pytestmark = pytest.mark.security

HOME, OTHER, UNKNOWN = agent_id(11), agent_id(22), agent_id(33)
"""Agents: of the coordinator's host with the workers 0 and 1, of another with 2 and 3, and one that has not come."""


def kinds(union: UnionType) -> list[Any]:
    return sorted(get_args(union), key=lambda kind: kind.__name__)


def said_by(kind: Any, **fields: object) -> Any:
    """A message of a kind, of which nothing but these fields is there: a check that looks at others fails."""
    return kind(**{name: fields.get(name) for name in kind.__struct_fields__})


@pytest.fixture
def agents() -> Agents:
    hosts = Hosts([0, 0, 1, 1], ["site/a", "site/b"], home=11)
    known = HostAgents(hosts, (), lambda incarnation: 0.0, now_s=0.0)
    found = Agents(known, lambda peer, message: True, lambda peer: None, spec=None, checkpoint=None)
    for node, incarnation in (("a", 11), ("b", 22)):
        hello = AgentHello(node=node, incarnation=incarnation, slots=2, exited=[], stop=False)
        assert found.may_say(agent_id(incarnation), hello) == ""
        known.came(node, incarnation, 2)
    return found


@pytest.fixture
def coordinator(agents: Agents) -> MagicMock:
    """A coordinator whose parts only note what is asked of them."""
    found = MagicMock()
    found._agents = agents
    found.core.members = {0, 1, 2, 3}
    found._end.is_there = False
    found._on_agent = lambda peer, message: CoordinatorProcess._on_agent(found, peer, message)
    return found


def is_untouched(coordinator: MagicMock) -> bool:
    return not [call for call in coordinator.mock_calls if call[0] != "core.members.__contains__"]


# ------------------------------------------------------------------------------------------------------------- workers


@pytest.mark.parametrize("kind", kinds(FromWorker))
def test_a_worker_speaks_for_itself_alone(kind: Any, coordinator: MagicMock, caplog: pytest.LogCaptureFixture) -> None:
    assert "worker" in kind.__struct_fields__, "say here what else it names, and what checks that"
    CoordinatorProcess._on_message(coordinator, 1, said_by(kind, worker=2))
    assert is_untouched(coordinator)
    assert "worker 1 says that it is worker 2" in caplog.text


@pytest.mark.parametrize("kind", kinds(FromWorker))
@pytest.mark.parametrize("peer", [HOME, OTHER])
def test_an_agent_is_no_worker(kind: Any, peer: int, coordinator: MagicMock) -> None:
    CoordinatorProcess._on_message(coordinator, peer, said_by(kind, worker=2))
    assert is_untouched(coordinator)


@pytest.mark.parametrize("kind", kinds(FromAgent))
def test_a_worker_is_no_agent(kind: Any, coordinator: MagicMock, caplog: pytest.LogCaptureFixture) -> None:
    CoordinatorProcess._on_message(coordinator, 2, said_by(kind, worker=2))
    assert is_untouched(coordinator) and "says what agents say" in caplog.text


@pytest.mark.parametrize("kind", [*kinds(FromWorker), *kinds(FromAgent)])
def test_an_operator_is_neither(kind: Any, coordinator: MagicMock) -> None:
    CoordinatorProcess._on_message(coordinator, operator_id(1), said_by(kind, worker=2))
    assert [call[0] for call in coordinator.mock_calls] in (["_operator_sessions.received"],)


@pytest.mark.parametrize("kind", kinds(FromOperator))
def test_what_operators_ask_goes_to_their_desk(kind: Any, coordinator: MagicMock) -> None:
    CoordinatorProcess._on_message(coordinator, 2, said_by(kind))
    assert [call[0] for call in coordinator.mock_calls] == ["_operator_sessions.received"]


# -------------------------------------------------------------------------------------------------------------- agents

LIES: list[tuple[int, Any, str]] = [
    (OTHER, AgentHello(node="a", incarnation=11, slots=2, exited=[], stop=True), "that of agent 11"),
    (OTHER, AskJob(job="j", node="a", incarnation=11, config_digest=""), "that of agent 11"),
    (OTHER, Exited(worker=1, text="was killed"), "worker 1 is not of its host"),
    (HOME, Exited(worker=2, text="was killed"), "worker 2 is not of its host"),
    (OTHER, Exited(worker=99, text="was killed"), "worker 99 is not of its host"),
    (OTHER, LogPart(worker=0, text="\x1b"), "worker 0 is not of its host"),
    (OTHER, CpuTimes(cpu_s={2: 1.0, 1: 1.0}), "worker 1 is not of its host"),
    (OTHER, CpuTimes(cpu_s={}, waited_s={0: 1.0}), "worker 0 is not of its host"),
    (OTHER, CheckpointCommitted(number=1, error=None, again=False), "the agent of the coordinator's host"),
    (UNKNOWN, StopJob(), "it has not come"),
    (UNKNOWN, FilesCut(text="gone"), "it has not come"),
    (UNKNOWN, AgentLeaving(left_s=1.0), "it has not come"),
    (UNKNOWN, CheckpointCommitted(number=1, error=None, again=False), "it has not come"),
    (UNKNOWN, Exited(worker=2, text="was killed"), "it has not come"),
    (UNKNOWN, AgentKeysTaken(ring=b"a name"), "it has not come"),
]
"""Who says what, and why it does not count."""
TRUE: list[tuple[int, Any]] = [
    (HOME, Exited(worker=1, text="has ended")),
    (OTHER, Exited(worker=3, text="has ended")),
    (OTHER, LogPart(worker=2, text="a line")),
    (OTHER, CpuTimes(cpu_s={2: 1.0}, waited_s={3: 1.0})),
    (HOME, CheckpointCommitted(number=1, error=None, again=False)),
    (OTHER, StopJob()),
    (OTHER, FilesCut(text="gone")),
    (OTHER, AgentLeaving(left_s=1.0)),
    (OTHER, AgentKeysTaken(ring=b"a name")),
    (UNKNOWN, AskJob(job="j", node="c", incarnation=33, config_digest="")),
    (UNKNOWN, AgentHello(node="c", incarnation=33, slots=2, exited=[], stop=False)),
    (UNKNOWN, TermTaken(term=3, proof=b"")),
]


def test_every_message_of_an_agent_is_known_here() -> None:
    assert {type(message) for _, message in TRUE} == set(kinds(FromAgent))
    assert {type(message) for _, message, _ in LIES} == set(kinds(FromAgent)) - {TermTaken}


@pytest.mark.parametrize(("peer", "message", "why"), LIES)
def test_a_lie_of_an_agent_is_never_acted_upon(
    peer: int, message: Any, why: str, coordinator: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    CoordinatorProcess._on_message(coordinator, peer, message)
    assert is_untouched(coordinator)
    assert f"{type(message).__name__} of agent" in caplog.text and why in caplog.text


@pytest.mark.parametrize(("peer", "message"), TRUE)
def test_what_an_agent_may_say_counts(peer: int, message: Any, agents: Agents) -> None:
    assert agents.may_say(peer, message) == ""


def test_ends_that_an_agent_tells_when_it_comes_are_of_its_own_workers(
    coordinator: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    exited = [Exited(worker=1, text="was killed"), Exited(worker=3, text="has ended")]
    hello = AgentHello(node="b", incarnation=22, slots=2, exited=exited, stop=False)
    coordinator._state.losses = []
    CoordinatorProcess._on_message(coordinator, OTHER, hello)
    coordinator.worker_ended.assert_called_once_with(3, "has ended")
    assert "worker 1 is not of its host" in caplog.text


def test_only_who_has_the_jobs_key_can_say_that_another_coordinator_has_the_job(
    coordinator: MagicMock, caplog: pytest.LogCaptureFixture
) -> None:
    key, job_generation = b"the job's key, of this test alone", 7
    joining = JobKey(key, None).held(KeyRole.JOINING)
    claimed = SimpleNamespace(term=SimpleNamespace(term=2))
    coordinator._setup = SimpleNamespace(
        claimed=claimed, keys=Secrets((key,)), job=SimpleNamespace(job_generation=job_generation)
    )
    for term, proof in (
        (3, b""),
        (3, proof_of_term(joining, job_generation, 3)),
        (3, proof_of_term(key, job_generation, 4)),
        (3, proof_of_term(key, job_generation - 1, 3)),
        (2, proof_of_term(key, job_generation, 2)),
    ):
        CoordinatorProcess._on_agent(coordinator, OTHER, TermTaken(term=term, proof=proof))
    assert caplog.text.count("says that another coordinator has the job, and proves nothing") == 4
    with pytest.raises(SupersededError, match="has the job's coordinator number 3"):
        CoordinatorProcess._on_agent(coordinator, OTHER, TermTaken(term=3, proof=proof_of_term(key, job_generation, 3)))


def test_the_fields_that_name_somebody_are_known() -> None:
    """A new message with such a field has to be looked at here."""
    naming = {
        f"{name}.{field}"
        for name, kind in vars(agent_messages).items()
        if isinstance(kind, type) and kind in kinds(FromAgent)
        for field in kind.__struct_fields__
        if field in ("worker", "workers", "peer", "agent", "host", "node", "incarnation", "cpu_s", "waited_s", "exited")
    }
    assert naming == {
        "AgentHello.exited", "AgentHello.incarnation", "AgentHello.node", "AskJob.incarnation", "AskJob.node",
        "CpuTimes.cpu_s", "CpuTimes.waited_s", "Exited.worker", "LogPart.worker",
    }  # fmt: skip
