"""The agents of a job as its coordinator sees them: what follows for workers whose hosts are gone."""

from pathlib import Path

import msgspec
import pytest
from tests.integration.jobs import small_config

from elaswave.channel.messages.agent import AgentRefused, AskJob, JobSpec
from elaswave.channel.wire import agent_id
from elaswave.coordinator.agents import Agents
from elaswave.errors import NeedlessError, RetryError, UsageError
from elaswave.job.keys import JobKey
from elaswave.job.script import JobOptions
from elaswave.job.setup import AgentRole
from elaswave.launcher.launcher import run_job
from elaswave.launcher.local_job import error_of_refusal
from elaswave.protocol.events import Suspected
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.effects import HangUp, WorkerGone
from elaswave.protocol.membership.hosts import GONE_S, Hosts


class World:
    """Four workers that have begun on hosts a and b, and what their coordinator is told of ends."""

    def __init__(self, spec: JobSpec | None = None) -> None:
        self.hosts = Hosts((0, 1, 0, 1), ("a", "b"), home=11)
        self.sent: list[tuple[int, object]] = []
        self.keys: tuple[bytes, ...] = ()
        self.ended: list[int] = []
        self.hung_up: list[int] = []
        self.last_heartbeat_s = 0.0
        self.known = HostAgents(
            self.hosts, (), lambda incarnation: self.last_heartbeat_s, now_s=0.0, is_local=spec is None
        )
        self.agents = Agents(self.known, self._send, self.hung_up.append, spec=spec, checkpoint=None)
        self.come("a", 11)
        self.come("b", 22)

    def _send(self, peer: int, message: object) -> bool:
        self.sent.append((peer, message))
        return True

    def come(self, node: str, incarnation: int) -> None:
        self.known.came(node, incarnation, 3)
        assert self.known.takes_part(incarnation)

    def tick(self, registered: tuple[int, ...], now_s: float) -> None:
        for effect in self.known.tick(registered, now_s):
            if isinstance(effect, WorkerGone):
                self.ended.append(effect.worker)
                self.hosts.ended(effect.worker)

    def lost_with(self, suspicion: Suspected) -> list[int]:
        lost = self.known.with_their_hosts([suspicion], range(4))
        for effect in self.known.hang_up_on_lost(lost):
            assert isinstance(effect, HangUp)
            self.agents.tell(effect)
        return [each.worker for each in lost]

    def start_joiner_on(self, incarnation: int, worker: int) -> None:
        host = self.hosts.find(incarnation)
        assert host is not None
        self.hosts.placed(worker, host.number)


def test_joiners_of_a_host_whose_node_has_another_agent_have_ended() -> None:
    world = World()
    world.start_joiner_on(22, 4)
    world.known.went(22, 1.0)
    world.come("b", 23)  # sooner than the old one is given up
    world.tick((0, 1, 2, 3), 1.5)
    assert world.ended == [4], "of members it is known by their silence, of a joiner by nobody"
    world.tick((0, 1, 2, 3), 20.0)
    assert world.ended == [4]


def test_all_agents_are_waited_for_that_are_not_given_up_also_while_they_are_away() -> None:
    world = World()
    assert world.agents.present == [agent_id(11), agent_id(22)]
    world.known.went(22, 1.0)
    assert world.agents.present == [agent_id(11), agent_id(22)]
    world.tick((0, 1, 2), 1.1 + GONE_S)
    assert world.agents.present == [agent_id(11)]


def test_an_agent_that_asks_what_is_trained_is_told_by_which_keys() -> None:
    spec = JobSpec(
        job="j",
        config={},
        config_digest="",
        host="a",
        run_dir="",
        mark="",
        data={},
        faults=[],
        profile=False,
        checkpoint=None,
        job_generation=1,
    )
    world, ask = World(spec), AskJob(job="j", node="c", incarnation=33, config_digest="")
    world.sent.clear()
    world.agents.asked(agent_id(33), ask, world.keys)
    world.keys = (b"of those who take part", b"another one of theirs")
    world.agents.asked(agent_id(33), ask, world.keys)
    assert world.sent == [(agent_id(33), spec), (agent_id(33), msgspec.structs.replace(spec, keys=world.keys))]


def test_workers_that_have_not_registered_end_with_their_host() -> None:
    world = World()
    world.known.went(22, 1.0)
    world.tick((0, 1, 2), 1.0 + GONE_S)
    assert world.ended == []
    world.tick((0, 1, 2), 1.1 + GONE_S)
    assert world.ended == [3], "worker 1 has registered: it is heard, or not"


def test_connections_of_other_hosts_are_looked_at_and_never_those_of_the_coordinators_own() -> None:
    world = World()
    world.start_joiner_on(22, 4)
    assert world.agents.peers_beside([1]) == [agent_id(22), 1, 3, 4]
    assert world.agents.peers_beside([0, 1, 2, 3]) == [agent_id(22), 1, 3, 4]
    assert world.agents.peers_beside([0, 7]) == []
    world.hosts.give_up(world.hosts.numbered(1))
    assert world.agents.peers_beside([1]) == []


def test_a_local_job_goes_on_however_long_its_own_agent_is_away() -> None:
    world = World()
    world.known.went(11, 1.0)
    world.tick((), 1.1 + 10 * GONE_S)
    assert world.ended == [], "workers of the coordinator's own host have not ended with it"
    world.come("a", 11)
    world.last_heartbeat_s = 60.0
    assert world.lost_with(Suspected(0, "exit", "worker 0 has ended")) == [0]
    assert world.lost_with(Suspected(1, "exit", "worker 1 has ended")) == [1, 3]


def test_the_agent_of_a_lost_host_is_hung_up_on_and_that_of_a_lost_worker_is_not() -> None:
    world = World()
    assert world.lost_with(Suspected(1, "exit", "worker 1 has ended")) == [1] and world.hung_up == []
    world.last_heartbeat_s = 5.0
    assert world.lost_with(Suspected(1, "heartbeat", "worker 1 is silent")) == [1, 3]
    assert world.hung_up == [agent_id(22)]


def test_what_ends_an_agent_that_may_not_take_part() -> None:
    assert isinstance(error_of_refusal(AgentRefused(reason="another job", verdict="misused")), UsageError)
    assert isinstance(error_of_refusal(AgentRefused(reason="too late", verdict="again")), RetryError)
    assert isinstance(error_of_refusal(AgentRefused(reason="there is one", verdict="needless")), NeedlessError)


def test_hosts_with_agents_are_not_killed_by_the_workers_of_one(tmp_path: Path) -> None:
    config = small_config({"control.hosts": 2})
    options = JobOptions(run_dir=tmp_path / "run", fault_specs=("kill-host:host-0@2",))
    with pytest.raises(UsageError, match="kill the agent of a host instead"):
        run_job(config, options, key=JobKey(b"k" * 32, None), agent_role=AgentRole("a", 1, job="test"))
    assert not (tmp_path / "run").exists()
