"""Jobs of several hosts, whose agents are processes on this machine: they meet at a loopback address, by TCP."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.agents import Agents, free_port
from tests.etcd_processes import cluster, needs_etcd
from tests.integration.jobs import SMALL, Job, run_job

from elaswave.cli.main import main
from elaswave.observability.result import read_digests, read_result

FOUR = {**SMALL, "layout.widths": "[2, 2]", "elastic.num_followers": 3}


def finished(run_dir: Path) -> Job:
    digests = read_digests(run_dir)
    assert digests is not None
    return Job(run_dir, read_result(run_dir), digests, [])


def recoveries(agents: Agents, kind: str) -> list[dict[str, Any]]:
    found = [event["recovery"] for event in agents.events("recovery")]
    return [each for each in found if each["kind"] == kind]


def test_agents_compute_what_one_launcher_does(tmp_path: Path) -> None:
    settings = {**FOUR, "run.steps": 30}
    with Agents(tmp_path, {**settings, "control.hosts": 3}, f"127.0.0.1:{free_port()}") as agents:
        # Before anybody creates the job: they wait, and both hear what is trained before either says that it is there.
        pair = [agents.start("b", joins=True), agents.start("b", joins=True)]
        founder = agents.start("a", creates_job=True)
        needless = agents.wait_for(lambda: [one for one in pair if "nothing to do" in one.text], "the end of one")[0]
        (follower,) = (one for one in pair if one is not needless)
        assert needless.end() == 0, needless.text
        first = free_port()
        third = agents.start("d", "--set", f"net.ports={first}-{first + 1}", joins=True)  # two workers
        agents.wait_for_step(2)
        narrow = agents.start("e", "--set", f"net.ports={first}-{first}")
        twin = agents.start("b")
        other = agents.start("c", "--set", "run.steps=31")
        assert twin.end() == 0 and "node b has an agent of this job already" in twin.text
        assert other.end() == 2 and "was given another configuration" in other.text, other.text
        assert narrow.end() == 2 and "has 1 beside the coordinator's, but 2 workers may run" in narrow.text, narrow.text
        assert (founder.end(), follower.end(), third.end()) == (0, 0, 0), (founder.text, follower.text, third.text)
        late = agents.start("a", creates_job=True)
        assert late.end() == 0 and "the job is finished already" in late.text
    assert "finished 30 steps" in founder.text and "finished 30 steps" in follower.text
    job = finished(agents.run_dir)
    assert job.result.recoveries == []
    assert job.computation == run_job(tmp_path / "reference", settings).computation
    logs = {path.name for path in (agents.run_dir / "logs").iterdir()}
    assert {"forkserver.log", "forkserver-b.log", *(f"worker-{worker}.log" for worker in range(4))} <= logs
    assert not list(agents.run_dir.glob("processes*.json"))


@needs_etcd
@pytest.mark.slow
def test_the_host_of_the_coordinator_is_lost_and_another_candidate_goes_on(tmp_path: Path) -> None:
    settings = {**FOUR, "run.steps": 40, "control.hosts": 2}
    ports = free_port(), free_port()
    with (
        cluster(1) as members,
        Agents(
            tmp_path,
            {**settings, "control.store": f"etcd://{members[0].endpoint}"},
            ",".join(f"127.0.0.1:{port}" for port in ports),
        ) as agents,
    ):
        first = agents.start("a", creates_job=True)
        agents.wait_for(lambda: (agents.run_dir / "config.toml").exists(), "the creator")
        second = agents.start("b")
        agents.wait_for_step(4)
        first.signal(signal.SIGKILL)
        assert second.end() == 0, second.text
    assert "this host has the job's coordinator from now on" in second.text
    assert {each["worker"] for each in recoveries(agents, "lost")} == {0, 2}
    restarts = recoveries(agents, "coordinator")  # a starved machine may let a lease heartbeat stand still once more
    assert restarts and min(each["total_s"] for each in restarts) > 0
    assert (
        finished(agents.run_dir).computation
        == run_job(tmp_path / "reference", {**settings, "control.hosts": 1}).computation
    )


@pytest.mark.slow
def test_hosts_that_are_lost_come_and_leave_change_no_bit(tmp_path: Path) -> None:
    settings = {**FOUR, "run.steps": 100_000, "optimizer.schedule": "constant"}
    with Agents(tmp_path, {**settings, "control.hosts": 2}, f"127.0.0.1:{free_port()}") as agents:
        founder = agents.start("a", creates_job=True)
        lost = agents.start("b")
        agents.wait_for_step(3)
        lost.signal(signal.SIGKILL)
        agents.wait_for(lambda: len(recoveries(agents, "lost")) == 2, "the loss of host b")
        comer = agents.start("c")
        agents.wait_for(lambda: len(recoveries(agents, "joined")) == 2, "host c's workers")
        comer.signal(signal.SIGTERM)
        assert comer.end() == 75 and "this host's workers have left" in comer.text, comer.text
        founder.signal(signal.SIGTERM)
        assert founder.end() == 143, founder.text
    losses, joins, leaves = (recoveries(agents, kind) for kind in ("lost", "joined", "drained"))
    assert {each["worker"] for each in losses} == {1, 3} and len({each["generation"] for each in losses}) == 1, (
        "one event"
    )
    assert {each["worker"] for each in joins} == {each["worker"] for each in leaves} == {4, 5}
    steps = max(event["step"] for event in agents.events("step"))
    settings["run.steps"] = steps
    resumed = run_job(agents.run_dir, settings, resume=True)
    assert "nothing is trained" in "".join(resumed.messages)
    assert resumed.computation == run_job(tmp_path / "reference", settings).computation


@pytest.mark.slow
@pytest.mark.parametrize("comes", ["at the beginning", "later"])
def test_a_host_whose_address_does_not_answer_is_refused_with_words_on_both_sides(tmp_path: Path, comes: str) -> None:
    """As behind a NAT that changes addresses or ports: its agent and workers dial others, and nobody can dial them."""
    hosts = 2 if comes == "at the beginning" else 1
    settings = {**FOUR, "layout.widths": "[2]", "elastic.num_followers": 1, "run.steps": 100_000}
    with Agents(tmp_path, {**settings, "control.hosts": hosts}, f"127.0.0.1:{free_port()}") as agents:
        founder = agents.start("a", creates_job=True)
        if comes == "later":
            agents.wait_for_step(3)
        # A worker takes connections at 127.0.0.1, and says 127.0.0.9, where nobody listens.
        stranger = agents.start("b", "--set", "net.bind=127.0.0.1", "--set", "net.advertise=127.0.0.9")
        words = "does not answer at tcp:127.0.0.9:"
        agents.wait_for(lambda: words in founder.text, "the refusal")
        agents.wait_for(lambda: words in stranger.text, "the refusal on the other side")
        agents.wait_for_step(max((event["step"] for event in agents.events("step")), default=0) + 3)
        founder.signal(signal.SIGTERM)
        assert founder.end() == 143, founder.text
        stranger.end()
    assert "net.advertise" in founder.text
    assert recoveries(agents, "joined") == []


@pytest.mark.slow
def test_hosts_share_only_checkpoints_and_one_folder_tells_of_all_workers(tmp_path: Path) -> None:
    settings = {**FOUR, "run.steps": 100_000, "optimizer.schedule": "constant", "control.hosts": 2}
    shared = ("--checkpoints", str(tmp_path / "shared"))
    own = ("--run-dir", str(tmp_path / "own"))
    with Agents(tmp_path, settings, f"127.0.0.1:{free_port()}") as agents:
        founder, other = agents.start("a", *shared, creates_job=True), agents.start("b", *own, *shared)
        agents.wait_for_step(3)
        (log,) = (tmp_path / "own" / "logs").glob("worker-1.log")
        with log.open("a") as file:
            file.write("this is\nthe end\n")
        copy = agents.run_dir / "logs" / "worker-1.log"
        agents.wait_for(lambda: copy.exists() and "the end" in copy.read_text(), "the log of worker 1")
        processes = json.loads((tmp_path / "own" / "processes-b.json").read_text())["processes"]
        os.kill(next(each["pid"] for each in processes if (each["role"], each["id"]) == ("worker", 1)), signal.SIGKILL)
        agents.wait_for(lambda: recoveries(agents, "lost"), "the loss of worker 1")
        stranger = agents.start("c", "--run-dir", str(tmp_path / "stranger"))
        assert stranger.end() == 2 and "has no agents.json, so it is not the folder" in stranger.text, stranger.text
        founder.signal(signal.SIGTERM)
        assert (founder.end(), other.end()) == (143, 143), (founder.text, other.text)
        (loss,) = recoveries(agents, "lost")
        assert loss["last_lines"] == ["this is", "the end"]
        steps = max(event["step"] for event in agents.events("step"))
    assert (tmp_path / "shared" / f"step-{steps:08d}").is_dir()
    settings["run.steps"] = steps + 5
    again = Agents(tmp_path / "again", settings, f"127.0.0.1:{free_port()}", run_dir=agents.run_dir)
    with again:
        founder, other = again.start("a", *shared, creates_job=True), again.start("b", *own, *shared)
        assert (founder.end(), other.end()) == (0, 0), (founder.text, other.text)
    assert "its result is in the run folder of the coordinator's host" in other.text
    reference = run_job(tmp_path / "reference", {**settings, "control.hosts": 1})
    assert finished(agents.run_dir).computation == reference.computation


@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("ctl", 143, marks=pytest.mark.slow),
        pytest.param("SIGTERM", 143, marks=pytest.mark.slow),
        pytest.param("SIGINT", 130, marks=pytest.mark.slow),
        pytest.param("SIGUSR1", 138, marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_waits_for_others_stops_when_it_is_told_to(tmp_path: Path, how: str, code: int) -> None:
    with Agents(tmp_path, {**SMALL, "control.hosts": 2, "net.trusted": True}, f"127.0.0.1:{free_port()}") as agents:
        agent = agents.start("h1", creates_job=True)
        agents.wait_for(lambda: "host h1 has come: 1 of 2" in agent.text, "the coordinator")
        if how == "ctl":
            assert main(["ctl", str(agents.run_dir), "stop"]) == 0
        else:
            agent.signal(getattr(signal, how))
        assert agent.end(60.0) == code, agent.text
        assert "nothing was trained" in agent.text and "Traceback" not in agent.text
