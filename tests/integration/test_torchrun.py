"""Agents that the real torchrun starts, with the rendezvous that it finds by our entry point."""

import os
import signal
import sys
import tomllib
from pathlib import Path

import pytest
from tests.agents import Agents, free_port
from tests.integration.jobs import SMALL, Calm
from tests.integration.test_agents import finished, recoveries

from elaswave.observability.processes import children_of

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {**SMALL, "layout.widths": "[2, 2]", "elastic.num_followers": 3, "run.steps": 40}


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes find the entry points that an installation of this checkout would have."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    folder = tmp_path / "site" / "entry_points_of_elaswave-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points-of-elaswave\nVersion: 0\n")
    lines = "".join(f"{name} = {place}\n" for name, place in declared.items())
    (folder / "entry_points.txt").write_text(f"[torchrun.handlers]\n{lines}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(tmp_path / "site")]))


def torchrun(max_restarts: int) -> list[str]:
    options = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=elaswave", "--rdzv-id=test"]
    first = [sys.executable, "-m", "torch.distributed.run", *options, f"--max-restarts={max_restarts}"]
    return [*first, "-m", "elaswave.agent"]


def is_agent(pid: int) -> bool:
    return b"elaswave.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("entry_points")
def test_an_agent_that_is_killed_is_started_again_and_the_other_nodes_agents_go_on(tmp_path: Path, calm: Calm) -> None:
    with Agents(tmp_path, {**SETTINGS, "control.hosts": 2}, f"127.0.0.1:{free_port()}") as agents:
        first = agents.start("a", creates_job=True, launcher=torchrun(0))
        second = agents.start("b", launcher=torchrun(1))
        agents.wait_for_step(3)
        (agent,) = (
            pid for pid in children_of(second.pid) if b"elaswave.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(agent, signal.SIGKILL)
        assert (first.end(), second.end()) == (0, 0), (first.text, second.text)
    assert {each["worker"] for each in recoveries(agents, "lost")} == {1, 3}
    assert finished(agents.run_dir).computation == calm(SETTINGS).computation


@pytest.mark.usefixtures("entry_points")
def test_what_another_try_would_meet_again_is_no_failure_to_torchrun(tmp_path: Path) -> None:
    settings = {"run.steps": -1}
    with Agents(tmp_path, settings, f"127.0.0.1:{free_port()}") as agents:
        agent = agents.start("a", creates_job=True, launcher=torchrun(3))
        assert agent.end() == 0, agent.text
    assert agent.text.count("run.steps: ") == 1, "it is not tried again"
    assert "exit code 2; torchrun is told 0" in agent.text
