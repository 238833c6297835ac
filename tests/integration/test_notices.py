"""SIGTERM to a worker of a running job: every coordinator is told, and training goes on."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.integration.jobs import run_job

from elaswave.observability.processes import read_processes

SETTINGS = {"layout.widths": [1, 1], "run.steps": 12}
PATIENCE_S = 60.0
TOLD = "worker 1 is to leave within"


class Notice:
    """A probe: worker 0 sends worker 1 a notice in step 4, and goes on when coordinators have heard of it.

    Args:
        run_dir: of the job.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if machine.worker != 0 or (phase, index) != ("forward", 0):
            return
        if machine.step == 4:
            (pid,) = [each.pid for each in read_processes(self._run_dir) if (each.role, each.id) == ("worker", 1)]
            os.kill(pid, signal.SIGTERM)
            self._wait_for(1)
        elif machine.step == 9:
            self._wait_for(2)

    def _wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while (self._run_dir / "logs" / "coordinator.log").read_text().count(TOLD) < count:
            assert time.monotonic() < deadline_s, f"{count} coordinators should have heard of the notice"
            time.sleep(0.01)  # a turn of the wait, which has a bound


def test_a_notice_reaches_every_coordinator_and_the_worker_goes_on(tmp_path: Path) -> None:
    undisturbed = run_job(tmp_path / "undisturbed", SETTINGS)
    run_dir = tmp_path / "noticed"
    job = run_job(run_dir, SETTINGS, probe=Notice(run_dir), faults=["kill:coordinator@7"])
    assert job.computation == undisturbed.computation
    said = [line for line in job.messages if "has had a notice" in line]
    assert said and all("worker 1 has had a notice that its machine will be taken away (SIGTERM)" in x for x in said)
    left_s = [
        float(line.split(TOLD)[1].split()[0])
        for line in (run_dir / "logs" / "coordinator.log").read_text().splitlines()
        if TOLD in line
    ]
    assert 30.0 >= left_s[0] > left_s[1] > 0.0, "the deadline counts from the notice on, whoever hears of it"
