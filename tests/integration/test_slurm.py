"""The example for Slurm, run by real daemons of Slurm: a controller and two nodes, all on this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agents import free_port
from tests.integration.jobs import SMALL, as_toml, run_job
from tests.integration.test_agents import finished

from elaswave.observability.events import StepCommitted, read_events

ROOT = Path(__file__).resolve().parents[2]
LACKING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="daemons of Slurm need root"),
    pytest.mark.skipif(bool(LACKING), reason=f"no Slurm here: needs {', '.join(LACKING)}"),
]
SETTINGS = {**SMALL, "layout.widths": "[2, 2]", "elastic.num_followers": 3, "optimizer.schedule": "constant"}
WAIT_S = 200.0


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
        for part in ("state", "spool-n1", "spool-n2"):
            (folder / part).mkdir()
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}", *files)
        wait_for(munge.exists, "munge's socket")
        self._start("slurmctld", "-D", "-f", str(self._conf))
        for node in ("n1", "n2"):
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


def test_an_array_trains_and_an_element_that_had_a_notice_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "elaswave"
    command.write_text(f'#!/bin/sh\nexec {shutil.which("python")} -m elaswave "$@"\n')
    command.chmod(0o755)
    key = tmp_path / "job.key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    run_dir = tmp_path / "runs" / "demo"
    exported = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "ELASWAVE_KEY_FILE": str(key),
        "ADVERTISE": "127.0.0.1",
        "PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    settings = {**SETTINGS, "run.steps": 100_000, "control.hosts": 2}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={as_toml(value)}")]
    cluster.environment |= exported
    script = str(ROOT / "examples" / "slurm" / "array.sbatch")
    number = cluster.run("sbatch", "--parsable", "--array=0-1", f"--chdir={tmp_path}", script, *options)
    assert number.isdecimal()
    events = run_dir / "events.jsonl"

    def told(text: str) -> bool:
        return events.exists() and text in events.read_text()

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
    wait_for(lambda: not cluster.run("squeue", "-h", "-t", "RUNNING"), "the end of the founder")
    founder = (tmp_path / f"slurm-{number}_0.out").read_text()
    assert list(run_dir.glob("checkpoints/step-*")), founder
    steps = max(event.step for event in read_events(events) if isinstance(event, StepCommitted))
    settings = {**SETTINGS, "run.steps": steps}
    run_job(run_dir, settings, resume=True)
    assert finished(run_dir).computation == run_job(tmp_path / "reference", settings).computation
