"""A job that is created again while agents and workers of its last job generation are still there."""

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.agents import Agents, free_port
from tests.etcd_processes import cluster, needs_etcd
from tests.integration.jobs import SMALL, run_job
from tests.integration.test_agents import finished

FOUR = {
    **SMALL,
    "layout.widths": "[2, 2]",
    "elastic.num_followers": 3,
    "run.steps": 60,
    "run.checkpoint_every": 5,
}


def killed_and_started_again(folder: Path, settings: dict[str, Any], coordinator: str) -> None:
    """A launcher starts the creator's agent again at once; those of other hosts wait for a coordinator then."""
    with Agents(folder, {**FOUR, "control.hosts": 2, **settings}, coordinator) as agents:
        founder = agents.start("a", creates_job=True)
        agents.wait_for(lambda: (agents.run_dir / "config.toml").exists(), "the creator")
        other = agents.start("c")
        agents.wait_for_step(12)
        founder.signal(signal.SIGKILL)
        founder.process.wait()
        again = agents.start("a", creates_job=True)
        assert other.end() == 75, other.text
        assert "the job was created again since this agent has come" in other.text, other.text
        later = agents.start("c")
        assert (again.end(), later.end()) == (0, 0), (again.text, later.text)
    assert finished(agents.run_dir).computation == run_job(folder / "one", FOUR).computation


@pytest.mark.slow
def test_who_is_left_of_a_job_has_no_part_in_the_next_one_of_its_name(tmp_path: Path) -> None:
    killed_and_started_again(tmp_path, {}, f"127.0.0.1:{free_port()}")


@needs_etcd
@pytest.mark.slow
def test_nor_has_it_with_a_store_that_outlives_the_founder(tmp_path: Path) -> None:
    """The other candidate's host is not there."""
    with cluster(1) as members:
        store = f"etcd://{members[0].endpoint}"
        coordinator = f"127.0.0.1:{free_port()},192.0.2.1:7077"
        killed_and_started_again(tmp_path, {"control.store": store, "control.store_patience_s": 120.0}, coordinator)
