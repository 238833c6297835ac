"""What an agent finds out before it takes part: whether its job runs already, and whose coordinator is there."""

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agents import free_port
from tests.fake_etcd import KEY, STRANGERS, FakeEtcd, FakeGateway, Written

from elaswave.channel.messages.agent import AskJob
from elaswave.channel.server import ControlServer
from elaswave.config.load import load_config
from elaswave.errors import RetryError, UsageError
from elaswave.job.keys import JobKey, KeyRole, role_key
from elaswave.launcher import agent
from elaswave.launcher.agent import AgentOptions, Seed
from elaswave.protocol.leadership.job_creation import RUNS_S, STARTS_S
from elaswave.store import opening
from elaswave.store.opening import JobStore
from elaswave.store.store import ClockRead, Owner

OWNER = Owner(post=lambda call: call(), turn=lambda: None, say=print, broken=print)
SEEDS = (Seed("10.0.0.1", 7077, "10.0.0.1"), Seed("10.0.0.2", 7077, "10.0.0.2"))


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setattr(opening, "HttpGateway", lambda security: FakeGateway(etcd))
    return etcd


def host_of(wait_s: float = 600.0, seeds: tuple[Seed, ...] = SEEDS) -> agent._Host:
    options = AgentOptions("demo", "10.0.0.1:7077,10.0.0.2:7077", "a", Path("/"), wait_s=wait_s)
    config = load_config(None, ("net.transport=tcp", "control.store=etcd://a:1", "net.trusted=true"))
    return agent._Host(options, config, True, seeds, 0, JobKey(KEY, None), 1)


def test_a_job_is_founded_again_only_once_none_of_its_coordinators_writes(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The creator's agent is started again, and can reach the store but no other host."""
    host = host_of()
    JobStore(host.config.control, tmp_path, tmp_path, KEY, job="demo")
    store = opening.open_store(host.config.control, tmp_path, tmp_path, OWNER, KEY, job="demo")
    waits: list[float] = []

    def nobody_answers(asked: agent._Host, wait_s: float, *, hopeless_s: float) -> None:
        assert hopeless_s == math.inf, "who turns it away is nobody either"
        waits.append(wait_s)
        if len(waits) < 3:  # the coordinator that is not reached from here
            store.append(ClockRead(clock="c", at_s=1.0 * len(waits)))
        raise RetryError("nobody")

    monkeypatch.setattr(agent, "_ask", nobody_answers)
    with pytest.raises(RetryError, match="job demo runs, for its coordinator writes to etcd://a:1, but there is none"):
        agent._ask_whether_it_runs(host_of(wait_s=0.0))
    assert etcd.keys
    assert agent._ask_whether_it_runs(host) is None
    store.close()
    assert waits == [STARTS_S] * 3 and not etcd.keys
    assert agent._ask_whether_it_runs(host) is None
    assert waits[3:] == [RUNS_S], "nothing is left of it"


def test_the_only_candidate_removes_what_its_earlier_agent_has_left(tmp_path: Path, etcd: FakeEtcd) -> None:
    host = host_of(seeds=SEEDS[:1])
    JobStore(host.config.control, tmp_path, tmp_path, KEY, job="demo")
    assert agent._ask_whether_it_runs(host) is None and not etcd.keys


@contextlib.contextmanager
def coordinator_with(key: bytes) -> Iterator[Seed]:
    """A control server on this host."""
    server: ControlServer[AskJob] = ControlServer()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(10.0)

    def ignore(*_: object) -> None:
        pass

    try:
        do(server.start("tcp:127.0.0.1:0", key, AskJob, ignore, ignore, ignore))
        yield Seed("127.0.0.1", int(server.address.rpartition(":")[2]), "127.0.0.1")
    finally:
        do(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_who_has_another_key_is_worth_another_try_though_other_candidates_refuse_connections(is_first: bool) -> None:
    """It may be a coordinator of another key, or a stranger: a launcher that is told 0 would not start it again."""
    nobody = Seed("127.0.0.1", free_port(), "127.0.0.1")
    with coordinator_with(b"another key of this length, or so") as seed:
        seeds = (seed, nobody) if is_first else (nobody, seed)
        host = host_of(seeds=seeds)._replace(own=None)
        with pytest.raises(RetryError, match="is not this job's coordinator .*AuthenticationError.* give all agents"):
            agent._ask(host, 30.0, hopeless_s=1.0)


def test_a_coordinator_that_nobody_has_is_waited_for() -> None:
    seeds = tuple(Seed("127.0.0.1", free_port(), "127.0.0.1") for _ in range(2))
    with pytest.raises(RetryError, match="no coordinator at .* within 0.1 s"):
        agent._ask(host_of(seeds=seeds)._replace(own=None), 0.1)


def test_a_stranger_who_has_founded_a_job_of_this_name_is_named_and_removed_by_nobody(
    tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, waits = host_of(), list[float]()

    def nobody_answers(asked: agent._Host, wait_s: float, *, hopeless_s: float) -> None:
        waits.append(wait_s)
        raise RetryError("nobody")

    monkeypatch.setattr(agent, "_ask", nobody_answers)
    JobStore(host.config.control, tmp_path, tmp_path, STRANGERS, job="demo")
    before = dict(etcd.keys)
    with pytest.raises(UsageError, match="/elaswave/demo/ holds what was not written with this job's key"):
        agent._ask_whether_it_runs(host)
    assert etcd.keys == before and waits == [STARTS_S], "a coordinator of this job could have answered"


def test_a_forged_outcome_ends_no_founder(tmp_path: Path, etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    host, waits = host_of(), list[float]()
    JobStore(host.config.control, tmp_path, tmp_path, KEY, job="demo")

    def ends_meanwhile(asked: agent._Host, wait_s: float, *, hopeless_s: float) -> None:
        waits.append(wait_s)
        etcd.keys.clear()
        etcd.keys[b"/elaswave/demo/outcome"] = Written(b'{"outcome": "finished"}', 99, 1)
        raise RetryError("nobody")

    monkeypatch.setattr(agent, "_ask", ends_meanwhile)
    assert agent._ask_whether_it_runs(host) is None


@pytest.mark.parametrize(
    ("role", "coordinator", "seen"),
    [
        (KeyRole.READING, "127.0.0.1:{port}", "is a reading key of the job"),
        (KeyRole.STEERING, "127.0.0.1:{port}", "is a steering key of the job"),
        (KeyRole.JOINING, "127.0.0.1:{port}", "is a joining key of the job"),
        (KeyRole.JOINING, "127.0.0.1:{port},10.0.0.2:7077", "is a joining key of the job"),
    ],
)
def test_an_agent_has_a_key_for_what_it_does(tmp_path: Path, role: KeyRole, coordinator: str, seen: str) -> None:
    """The last two may start coordinators."""
    port = free_port()
    options = AgentOptions(
        "demo",
        coordinator.format(port=port),
        "a",
        tmp_path,
        overrides=("control.store=etcd://127.0.0.1:1",),
        run_dir=tmp_path / "run",
    )
    with pytest.raises(UsageError, match=seen):
        agent.run_agent(options, role_key(JobKey(KEY, None), role), lambda: None)
    with socket.create_server(("127.0.0.1", port)):
        pass  # nothing is left that has it
    assert not (tmp_path / "run").exists()
