"""The examples for Slurm, run by real daemons of Slurm: a controller and two nodes, all on this machine."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents import free_port
from tests.integration.jobs import SMALL, as_toml, run_job
from tests.integration.test_agents import finished

from elaswave.observability.events import Recovered, StepCommitted, read_events
from elaswave.observability.processes import facts_of

ROOT = Path(__file__).resolve().parents[2]
LACKING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="daemons of Slurm need root"),
    pytest.mark.skipif(bool(LACKING), reason=f"no Slurm here: needs {', '.join(LACKING)}"),
]
SETTINGS = {**SMALL, "layout.widths": "[2, 2]", "elastic.num_followers": 3, "optimizer.schedule": "constant"}
NODES = ("n1", "n2")
WAIT_S = 500.0


class Cluster:
    """A controller and its nodes n1 and n2."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        name, ports = socket.gethostname(), [free_port() for _ in range(3)]
        key, munge = folder / "munge.key", folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._conf = folder / "slurm.conf"
        self._conf.write_text(
            f"ClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nSlurmctldPort={ports[0]}\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={munge}\nCredType=cred/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/linear\nReturnToService=2\n"
            "MpiDefault=none\nSwitchType=switch/none\nJobAcctGatherType=jobacct_gather/none\n"
            f"NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1\n"
            f"NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1\n"
            "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n"
        )
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf)}
        for part in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / part).mkdir()
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}", *files)
        wait_for(munge.exists, "munge's socket")
        self._start("slurmctld", "-D", "-f", str(self._conf))
        for node in NODES:
            self._start("slurmd", "-D", "-f", str(self._conf), "-N", node)
        wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "idle nodes")

    def _start(self, *command: str) -> None:
        with (self._folder / f"daemon-{len(self._daemons)}.log").open("wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment)
        self._daemons.append(daemon)

    def run(self, *command: str) -> str:
        """The output of a command."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        return done.stdout.strip()

    def lose_node(self, node: str) -> None:
        """Kills all processes of a node, in one instant as far as can be: its daemon, its step, what the step runs."""
        agents = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _is_agent(pid, node)]
        steps = {facts.parent for pid in agents if (facts := facts_of(pid)) is not None}
        daemon = self._daemons[2 + NODES.index(node)]
        assert agents, f"{node} runs no agent"
        for pid in (daemon.pid, *steps, *agents):
            os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def give_up(self, node: str) -> None:
        """Has the controller notice that a node is lost, which it does by itself after `SlurmdTimeout` (5 min)."""

        def is_down() -> bool:
            self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")  # may time out
            return self.run("sinfo", "-h", "-n", node, "-t", "down", "-o", "%D") == "1"

        wait_for(is_down, "the loss of the node")

    def end(self) -> None:
        """Ends all jobs, then the daemons."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--user=root")
            wait_for(lambda: not self.run("squeue", "-h"), "the end of all jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _is_agent(pid: int, node: str) -> bool:
    """Whether a process is the agent of a node; its workers have its command line too, and are its descendants."""
    words = _words(pid)
    if "agent" not in words or f"--node-name {node} " not in " ".join(words):
        return False
    facts = facts_of(pid)
    return facts is not None and "agent" not in _words(facts.parent)


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def wait_for(what: Callable[[], Any], name: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, f"{name} never came"
        time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.end()


class Submitted:
    """A job of Slurm that one of the examples makes.

    Args:
        cluster: that runs it.
        folder: for everything.
        example: name of its file.
        options: of sbatch.
        settings: of the configuration, by dotted key.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, example: str, options: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        command = folder / "bin" / "elaswave"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {shutil.which("python")} -m elaswave "$@"\n')
        command.chmod(0o755)
        key = folder / "job.key"
        key.write_text("5a" * 32)
        key.chmod(0o600)
        self.run_dir = folder / "runs" / "demo"
        self.events = self.run_dir / "events.jsonl"
        cluster.environment |= {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "ELASWAVE_KEY_FILE": str(key),
            "ADVERTISE": "127.0.0.1",
            "PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={as_toml(value)}")]
        script = str(ROOT / "examples" / "slurm" / example)
        self.number = cluster.run("sbatch", "--parsable", *options, f"--chdir={folder}", script, *words)
        assert self.number.isdecimal()

    def told(self, text: str) -> bool:
        """Whether the log of the run has these words."""
        return self.events.exists() and text in self.events.read_text()

    @property
    def steps(self) -> int:
        """That are committed."""
        return max((event.step for event in read_events(self.events) if isinstance(event, StepCommitted)), default=0)


def test_an_array_trains_and_an_element_that_had_a_notice_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.steps": 100_000, "control.hosts": 2}
    job = Submitted(cluster, tmp_path, "array.sbatch", ["--array=0-1"], settings)
    number, run_dir, told = job.number, job.run_dir, job.told
    wait_for(lambda: told('"step":3'), "step 3")
    cluster.run("scancel", "--signal=TERM", "--batch", f"{number}_1")
    wait_for(lambda: told('"kind":"drained"'), "the leave of the element's workers")
    state = ("squeue", "-h", "-j", f"{number}_1", "-o", "%T")
    wait_for(lambda: cluster.run(*state) == "PENDING", "the element in the queue")
    cluster.run("scancel", "--signal=TERM", "--batch", f"{number}_0")
    wait_for(lambda: told('"kind":"run_finished"'), "the end of the job")
    output = (tmp_path / f"slurm-{number}_1.out").read_text()
    assert "this host's workers have left" in output, output
    founder = (tmp_path / f"slurm-{number}_0.out").read_text()
    assert "ending after this step, with a checkpoint" in founder, founder
    wait_for(lambda: not cluster.run("squeue", "-h", "-t", "RUNNING"), "the end of the creator")
    founder = (tmp_path / f"slurm-{number}_0.out").read_text()
    assert list(run_dir.glob("checkpoints/step-*")), founder
    settings = {**SETTINGS, "run.steps": job.steps}
    run_job(run_dir, settings, resume=True)
    assert finished(run_dir).computation == run_job(tmp_path / "reference", settings).computation


def test_one_allocation_goes_on_without_a_node_that_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    settings = {**SETTINGS, "run.steps": 100_000, "control.hosts": 2}
    job = Submitted(cluster, tmp_path, "allocation.sbatch", ["--nodes=2"], settings)
    wait_for(lambda: job.told('"step":3'), "step 3")
    cluster.lose_node("n2")
    wait_for(lambda: job.told('"kind":"lost"'), "the loss of the node's workers")
    wait_for(
        lambda: cluster.run("sinfo", "-h", "-n", "n2", "-t", "down", "-o", "%D") == "1", "Slurm's notice of the loss"
    )
    seen = job.steps
    wait_for(lambda: job.steps > seen + 3, "steps without the node")
    assert cluster.run("squeue", "-h", "-j", job.number, "-o", "%T") == "RUNNING"
    cluster.run("scancel", "--signal=TERM", job.number)
    wait_for(lambda: job.told('"kind":"run_finished"'), "the end of the job")
    wait_for(lambda: not cluster.run("squeue", "-h", "-j", job.number), "the end of the allocation")
    output = (tmp_path / f"slurm-{job.number}.out").read_text()
    assert list(job.run_dir.glob("checkpoints/step-*")), output
    settings = {**SETTINGS, "run.steps": job.steps}
    losses = [event.recovery for event in read_events(job.events) if isinstance(event, Recovered)]
    assert len({each.generation for each in losses}) == 1 and {each.worker for each in losses} == {1, 3}, losses
    run_job(job.run_dir, settings, resume=True)
    assert finished(job.run_dir).computation == run_job(tmp_path / "reference", settings).computation
