"""Jobs on hosts that die, are cut off, slow down and come back: namespaces with a network of their own each."""

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agents import WAIT_S, AgentProcess, Agents
from tests.etcd_processes import Member, cluster, needs_etcd
from tests.hosts.world import Host, World, lacking
from tests.integration.jobs import SMALL, run_job

from elaswave.job.keys import make_keys
from elaswave.observability.result import read_digests, read_result

REASON = lacking()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(REASON), reason=REASON or "hosts can be made")]

SIX = {
    **SMALL,
    "layout.widths": "[3, 3]",
    "elastic.num_followers": 5,
    "net.trusted": True,
    "run.steps": 60,
}
"""Six workers, two on each of three hosts, and copies of everything on all of them."""


def lost(agents: Agents) -> list[dict[str, Any]]:
    return recoveries(agents, "lost")


def joined(agents: Agents) -> list[dict[str, Any]]:
    return recoveries(agents, "joined")


def recoveries(agents: Agents, kind: str) -> list[dict[str, Any]]:
    found = [event["recovery"] for event in agents.events("recovery")]
    return [each for each in found if each["kind"] == kind]


def computation(run_dir: Path) -> tuple[list[Any], str, dict[str, str] | None]:
    result = read_result(run_dir)
    return result.losses, result.state_digest, read_digests(run_dir)


@contextmanager
def job_of_three(folder: Path, **settings: Any) -> Iterator[tuple[World, Agents, list[AgentProcess]]]:
    """A job on three hosts that has begun.

    The same command is given on each host: who creates the job follows from where the coordinator is dialled.
    """
    with World(3) as world:
        values = {**SIX, "control.hosts": 3, **settings}
        with Agents(folder, values, f"{world.hosts[0].address}:7077") as agents:
            started = [start(agents, host) for host in world.hosts]
            agents.wait_for_step(3)
            yield world, agents, started


def start(agents: Agents, host: Host, *options: str) -> AgentProcess:
    return agents.start(f"h{host.number}", *options, creates_job=True, before=host.enter())


def one_event(losses: Sequence[dict[str, Any]], num_workers: int) -> bool:
    return len(losses) == num_workers and len({each["generation"] for each in losses}) == 1


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one machine computes."""
    return run_job(tmp_path_factory.mktemp("reference"), {**SIX, "net.trusted": False}).computation


def test_a_host_is_killed_and_survivors_go_on_to_the_same_bits(tmp_path: Path, reference: Any) -> None:
    with job_of_three(tmp_path) as (world, agents, (first, _, third)):
        world.hosts[1].kill()
        assert (first.end(), third.end()) == (0, 0)
    losses = lost(agents)
    assert one_event(losses, 2), losses
    assert {each["critical_bytes"] for each in losses} == {0}
    assert computation(agents.run_dir) == reference


def test_the_coordinators_host_of_three_with_one_worker_each_is_cut_off_for_three_seconds(tmp_path: Path) -> None:
    """Both others come back, one after the other, and nobody is lost."""
    three = {"layout.widths": "[1, 2]", "elastic.num_followers": 2, "run.steps": 400, "optimizer.schedule": "constant"}
    with job_of_three(tmp_path, **three) as (world, agents, started):
        world.cut(world.hosts[0])
        time.sleep(3.0)  # the fault is that long
        for other in world.hosts[2:0:-1]:
            for wire in world.wires([world.hosts[0]], [other]) + world.wires([other], [world.hosts[0]]):
                wire.is_cut = False
        assert [agent.end() for agent in started] == [0, 0, 0]
    assert lost(agents) == []


@pytest.mark.parametrize("direction", ["both", "to it", "from it"])
def test_a_host_that_is_cut_off_is_one_loss_and_may_not_come_back_as_it_was(
    tmp_path: Path, reference: Any, direction: str
) -> None:
    with job_of_three(tmp_path) as (world, agents, (first, second, third)):
        host = world.hosts[1]
        others = world.beside(host)
        to_it, from_it = world.wires(others, [host]), world.wires([host], others)
        for wire in {"both": to_it + from_it, "to it": to_it, "from it": from_it}[direction]:
            wire.is_cut = True
        agents.wait_for(lambda: len(lost(agents)) == 2, "the loss of the host")
        world.heal()
        assert (first.end(), third.end()) == (0, 0)
        assert second.end() in (75, 0), second.text
    losses = lost(agents)
    assert one_event(losses, 2), losses
    assert {each["detected_by"] for each in losses} <= {"host", "heartbeat"}, losses
    assert computation(agents.run_dir) == reference


def test_a_host_that_loses_half_of_its_packets_changes_no_bit(tmp_path: Path, reference: Any) -> None:
    with job_of_three(tmp_path) as (world, agents, (first, second, third)):
        for wire in world.around(world.hosts[2]):
            wire.loss = 0.5
        agents.wait_for(lambda: first.process.poll() is not None or lost(agents), "the loss of the host, or the end")
        world.heal()
        assert (first.end(), second.end()) == (0, 0)
        assert third.end() in (75, 0), third.text
    assert len({each["worker"] % 3 for each in lost(agents)}) <= 1, "of one host"
    assert computation(agents.run_dir) == reference


def test_a_host_behind_a_slow_network_is_waited_for(tmp_path: Path, reference: Any) -> None:
    with job_of_three(tmp_path) as (world, agents, started):
        slow = world.around(world.hosts[2])
        for wire in slow:
            wire.delay_s, wire.rate_bytes_per_s = 0.03, 2e6
        agents.wait_for_step(10)
        for wire in slow:
            wire.delay_s, wire.rate_bytes_per_s = 0.0, float("inf")
        assert [agent.end() for agent in started] == [0, 0, 0]
    assert lost(agents) == []
    assert computation(agents.run_dir) == reference


def test_a_host_comes_back_with_another_address(tmp_path: Path) -> None:
    settings = {"run.steps": 100_000, "optimizer.schedule": "constant"}
    with job_of_three(tmp_path, **settings) as (world, agents, (first, second, third)):
        host = world.hosts[1]
        world.cut(host)
        agents.wait_for(lambda: "h2 is gone: its agent has not been connected" in first.text, "the host to be given up")
        host.take_address("10.77.0.99")
        world.heal()
        assert second.end() == 75, second.text
        again = start(agents, host)
        agents.wait_for(lambda: len(joined(agents)) == 2, "its workers")
        first.signal(15)
        assert first.end() == 143, first.text
        assert third.end() == again.end() == 143, (third.text, again.text)
    assert one_event(lost(agents), 2)
    steps = max(event["step"] for event in agents.events("step"))
    resumed = run_job(agents.run_dir, {**SIX, **settings, "net.trusted": False, "run.steps": steps}, resume=True)
    one = run_job(tmp_path / "one", {**SIX, **settings, "net.trusted": False, "run.steps": steps})
    assert resumed.computation == one.computation


def test_the_coordinators_side_goes_on_even_if_it_is_the_smaller_one(tmp_path: Path, reference: Any) -> None:
    with job_of_three(tmp_path) as (world, agents, (first, *others)):
        world.cut(world.hosts[0])
        agents.wait_for(lambda: len(lost(agents)) == 4, "the loss of both other hosts")
        world.heal()
        assert first.end() == 0, first.text
        assert all(agent.end() in (75, 0) for agent in others), [agent.text for agent in others]
    assert computation(agents.run_dir) == reference


def test_a_partition_that_heals_within_a_second_costs_nobody(tmp_path: Path, reference: Any) -> None:
    with job_of_three(tmp_path) as (world, agents, started):
        for host in world.hosts:
            world.cut(host)
            time.sleep(0.5)  # the network's, which no event ends
            world.heal()
        assert [agent.end() for agent in started] == [0, 0, 0]
    assert lost(agents) == []
    assert computation(agents.run_dir) == reference


@pytest.mark.parametrize("network", ["IPv6", "TLS"])
def test_hosts_meet_by_ipv6_and_inside_tls(tmp_path: Path, reference: Any, network: str) -> None:
    settings = {**SIX, "control.hosts": 3, "run.steps": 60}
    with World(3) as world:
        founder = world.hosts[0]
        coordinator, options = f"[{founder.address6}]:7077", {host.number: () for host in world.hosts}
        if network == "TLS":
            del settings["net.trusted"]
            settings["net.tls"] = "required"
            make_keys(tmp_path / "keys", [[host.address] for host in world.hosts], 1)
            coordinator = f"{founder.address}:7077"
            folders = {host.number: tmp_path / "keys" / host.address for host in world.hosts}
            options = {number: ("--set", f"net.keys={folder}") for number, folder in folders.items()}
        with Agents(tmp_path / "job", settings, coordinator) as agents:
            started = [start(agents, host, *options[host.number]) for host in world.hosts]
            assert [agent.end() for agent in started] == [0, 0, 0], [agent.text for agent in started]
        addresses = (agents.run_dir / "logs" / "coordinator.log").read_text()
        assert ("are authenticated but not encrypted" in addresses) == (network == "IPv6")
        assert computation(agents.run_dir) == reference


@pytest.mark.parametrize("network", ["IPv4", "IPv6 inside TLS"])
def test_a_host_is_cut_off_and_another_one_killed(tmp_path: Path, network: str) -> None:
    """Where the machine is busy the relay may be late, and a host be given up for it: that is allowed here.

    The job ends when it is told to, however late what is done to it comes.
    """
    settings = {**SIX, "run.steps": 100_000, "optimizer.schedule": "constant"}
    security, founding = {"net.trusted": settings.pop("net.trusted")}, {"control.hosts": 3}
    with World(3) as world:
        founder, cut_off, killed = world.hosts
        coordinator, options = f"{founder.address}:7077", dict.fromkeys(world.hosts, ())
        if network == "IPv6 inside TLS":
            security = {"net.tls": "required"}
            make_keys(tmp_path / "keys", [[host.address6] for host in world.hosts], 1)
            coordinator = f"[{founder.address6}]:7077"
            options = {host: ("--set", f"net.keys={tmp_path / 'keys' / host.address6}") for host in world.hosts}
        with Agents(tmp_path / "job", {**settings, **founding, **security}, coordinator) as agents:
            first, second, third = [start(agents, host, *options[host]) for host in world.hosts]
            agents.wait_for_step(3)
            world.cut(cut_off)
            agents.wait_for(lambda: len(lost(agents)) >= 2, "the loss of the host")
            killed.kill()
            agents.wait_for(lambda: len(lost(agents)) >= 4, "the other loss")
            assert third.process.wait(WAIT_S) != 0
            world.heal()
            first.signal(15)
            assert first.end() == 143, first.text
            assert second.end() in (75, 143), second.text  # whether it was given up before it heard of the stop
        assert {each["worker"] for each in lost(agents)} == {1, 2, 4, 5}
        assert {each["critical_bytes"] for each in lost(agents)} == {0}
    settings["run.steps"] = max(event["step"] for event in agents.events("step"))
    resumed = run_job(agents.run_dir, settings, resume=True)
    assert resumed.computation == run_job(tmp_path / "one", settings).computation


@needs_etcd
def test_the_coordinators_host_is_cut_off_and_another_candidate_goes_on(tmp_path: Path, reference: Any) -> None:
    with World(4) as world:
        *hosts, keeper = world.hosts
        before = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"]
        with cluster(1, places=[(keeper.address, before)]) as (member,):
            settings = {**SIX, "control.hosts": 3, "control.store": f"etcd://{member.endpoint}"}
            candidates = ",".join(f"{host.address}:7077" for host in hosts[:2])
            with Agents(tmp_path, settings, candidates) as agents:
                first, second, third = [start(agents, host) for host in hosts]
                agents.wait_for_step(3)
                world.cut(hosts[0])
                assert (second.end(), third.end()) == (0, 0), (second.text, third.text)
                world.heal()
                assert first.end() in (75, 0), first.text
            losses = lost(agents)
            assert {each["worker"] for each in losses} == {0, 3}, losses
            assert computation(agents.run_dir) == reference


@contextmanager
def job_with_etcd_on_three(
    folder: Path, num_hosts: int = 3, **values: Any
) -> Iterator[tuple[World, Agents, list[AgentProcess], list[Member]]]:
    """A job that has begun, three of whose hosts have a member of etcd too; two of these are candidates."""
    with World(num_hosts) as world:
        places = [(host.address, ["nsenter", f"--net=/proc/{host.pid}/ns/net", "--"]) for host in world.hosts[:3]]
        with cluster(3, places=places) as members:
            store = "etcd://" + ",".join(member.endpoint for member in members)
            settings = {**SIX, "control.hosts": 3, "control.store": store, **values}
            candidates = ",".join(f"{host.address}:7077" for host in world.hosts[:2])
            with Agents(folder, settings, candidates) as agents:
                started = [start(agents, host) for host in world.hosts]
                agents.wait_for_step(3)
                yield world, agents, started, members


@needs_etcd
def test_a_candidate_that_comes_back_with_another_address_is_found_by_its_name(tmp_path: Path) -> None:
    """One agent is there all the time, and in the end it has nobody but this candidate."""
    names = tmp_path / "names"
    names.write_text("10.77.0.1 first\n10.77.0.2 second\n")
    with World(4) as world:
        *hosts, keeper = world.hosts
        for host in hosts:
            host.mount(names, Path("/etc/hosts"))
        before = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net", "--"]
        with cluster(1, places=[(keeper.address, before)]) as (member,):
            settings = {**SIX, "run.steps": 100_000, "optimizer.schedule": "constant", "control.hosts": 3}
            settings["control.store"] = f"etcd://{member.endpoint}"
            with Agents(tmp_path / "job", settings, "first:7077,second:7077") as agents:
                _, _, third = [start(agents, host) for host in hosts]
                agents.wait_for_step(3)
                hosts[0].kill()
                agents.wait_for(lambda: len(lost(agents)) == 2, "the loss of the first candidate")
                again = world.boot(hosts[0])
                again.take_address("10.77.0.99")
                names.write_text("10.77.0.99 first\n10.77.0.2 second\n")
                again.mount(names, Path("/etc/hosts"))
                first = start(agents, again)
                agents.wait_for(lambda: len(joined(agents)) == 2, "its workers")
                hosts[1].kill()
                agents.wait_for(lambda: len(lost(agents)) == 4, "the loss of the second candidate")
                agents.wait_for_step(max(event["step"] for event in agents.events("step")) + 3)
                assert "this host has the job's coordinator from now on, its number 3" in first.text
                for agent in (first, third):
                    agent.signal(15)
                assert [agent.end() for agent in (first, third)] == [143, 143], (first.text, third.text)


@needs_etcd
def test_the_side_with_etcds_quorum_goes_on_though_the_coordinator_is_on_the_other_one(
    tmp_path: Path, reference: Any
) -> None:
    with job_with_etcd_on_three(tmp_path) as (world, agents, (first, second, third), _):
        world.cut(world.hosts[0])
        assert (second.end(), third.end()) == (0, 0), (second.text, third.text)
        world.heal()
        assert first.end() in (75, 0), first.text
    losses = lost(agents)
    assert {each["worker"] for each in losses} == {0, 3} and one_event(losses, 2), losses
    assert computation(agents.run_dir) == reference


@needs_etcd
def test_a_host_is_lost_while_etcd_has_no_quorum_for_ten_seconds(tmp_path: Path, reference: Any) -> None:
    with job_with_etcd_on_three(tmp_path) as (world, agents, (first, second, _), members):
        members[2].kill()
        members[1].stop()
        world.hosts[2].kill()
        agents.wait_for(lambda: "waits for its store" in first.text, "the wait for the store")
        assert lost(agents) == []
        time.sleep(10.0)  # etcd's, which no event ends
        assert lost(agents) == [], "nothing is decided without a quorum"
        members[1].go_on()
        assert (first.end(), second.end()) == (0, 0), (first.text, second.text)
    losses = lost(agents)
    assert one_event(losses, 2), losses
    assert computation(agents.run_dir) == reference


@needs_etcd
def test_a_host_that_is_cut_off_at_the_end_learns_from_the_store_how_the_job_has_ended(
    tmp_path: Path, reference: Any
) -> None:
    """Its run folder is its own, and it is no candidate: nothing but the store can tell it."""
    with World(3) as world:
        places = [(host.address, ["nsenter", f"--net=/proc/{host.pid}/ns/net", "--"]) for host in world.hosts]
        with cluster(3, places=places) as members:
            store = "etcd://" + ",".join(member.endpoint for member in members)
            settings = {**SIX, "control.hosts": 3, "control.store": store, "control.store_patience_s": 300.0}
            candidates = ",".join(f"{host.address}:7077" for host in world.hosts[:2])
            with Agents(tmp_path, settings, candidates) as agents:
                first, second = [start(agents, host) for host in world.hosts[:2]]
                folders = ["--run-dir", str(tmp_path / "own"), "--checkpoints", str(agents.run_dir / "checkpoints")]
                options = [*folders, "--set", "net.trusted=true"]
                third = agents.start("h9", *options, before=world.hosts[2].enter())
                agents.wait_for_step(3)
                world.cut(world.hosts[2])
                assert (first.end(), second.end()) == (0, 0), (first.text, second.text)
                world.heal()
                assert third.end() == 0, third.text
            assert "its result is in the run folder of the coordinator's host" in third.text
            assert one_event(lost(agents), 2), lost(agents)
            assert computation(agents.run_dir) == reference


@needs_etcd
@pytest.mark.parametrize("loses", ["a host", "the coordinator's host"])
def test_an_older_copy_of_etcd_is_put_back_on_all_hosts_and_ends_the_job(tmp_path: Path, loses: str) -> None:
    """What the copy lacks is a loss of a host. The coordinator that wrote it finds out with the next loss; another
    candidate by what the members tell it."""
    settings = {"control.hosts": 4, "layout.widths": "[4, 4]", "elastic.num_followers": 7, "run.steps": 100_000}
    with job_with_etcd_on_three(tmp_path / "job", num_hosts=4, **settings) as (world, agents, started, members):
        for member in members:
            member.kill()
        for member in members:
            shutil.copytree(member.folder, tmp_path / member.folder.name)
            member.start()
        world.hosts[3].kill()
        agents.wait_for(lambda: len(lost(agents)) == 2, "the loss of the fourth host")
        for member in members:
            member.kill()
        index = 0 if loses == "the coordinator's host" else 2
        world.hosts[index].kill()
        for member in members:  # that of the host that is lost is put back elsewhere, with its address
            shutil.rmtree(member.folder)
            shutil.copytree(tmp_path / member.folder.name, member.folder)
            member.start()
        left = [agent for at, agent in enumerate(started) if at not in (index, 3)]
        assert [agent.end() for agent in left] == [1, 1], [agent.text for agent in left]
    which = "a member has heard of" if index == 0 else "there were .* is not there"
    told = [re.search(f"has gone back, as if an older copy .* the job ran: {which}", agent.text) for agent in left]
    assert all(told), [agent.text for agent in left]
