"""A worker that gets no processor is waited for; the same worker, stopped, is lost."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import run_job
from tests.integration.waits import log_of
from tests.starving import busy_core, feed, starve

STEPS = 8
SETTINGS = {"layout.stages": 2, "layout.replicas": 2, "run.steps": STEPS}
EXCUSED = "waited for a processor, which does not count"
PATIENCE_S = 60.0


def _wait_for_excuse(run_dir: Path) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if log_of(run_dir).exists() and EXCUSED in log_of(run_dir).read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_who_gets_no_processor_is_waited_for_and_who_is_stopped_is_lost(tmp_path: Path) -> None:
    """Worker 1 is silent for longer than its bound, in the middle of a step; three steps later it hangs.

    What the kernel gives to whom decides here: beside other work a slow test, not one of every change."""
    undisturbed = run_job(tmp_path / "undisturbed", SETTINGS)

    class Starves:
        def reached(self, phase: str, index: int, machine: Any) -> None:
            if (machine.worker, machine.step, phase, index) == (1, 3, "backward", 1):
                (tmp_path / "pid").write_text(str(os.getpid()))
                starve(os.getpid(), busy.core)

    def feed_again() -> None:
        is_excused.append(_wait_for_excuse(tmp_path / "run"))
        feed(int((tmp_path / "pid").read_text()))
        busy.rest()
        over.wait(PATIENCE_S)  # `run_job` counts threads before and after

    is_excused: list[bool] = []
    over = threading.Event()
    feeder = threading.Thread(target=feed_again, daemon=True)
    with busy_core() as busy:
        feeder.start()
        job = run_job(tmp_path / "run", SETTINGS, probe=Starves(), faults=["hang:1@6:backward"])
        over.set()
        feeder.join()
    assert is_excused == [True]
    [lost] = job.result.recoveries
    assert (lost.worker, lost.step, lost.detected_by) == (1, 6, "heartbeat")
    assert job.computation == undisturbed.computation
    log = log_of(tmp_path / "run").read_text()
    assert re.search(r"worker 1 has been silent for .* s \(bound .* s\), but for .* s of that time it " + EXCUSED, log)
