"""The processes of a real job: named while they live, and which of them the kernel is to kill when memory is short."""

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.integration.jobs import run_job

from elaswave.observability.processes import PROCESSES_FILE, read_processes
from elaswave.system.processes import WORKER_SCORE

WAIT_S = 60.0
LAYOUT = {"layout.widths": [2], "run.steps": 6}


class Look:
    """In a late step, worker 0 writes down what it finds of the job's processes, once the others have been replaced."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.file = run_dir.with_suffix(".json")

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (0, 5, "forward", 0):
            deadline_s = time.monotonic() + WAIT_S
            while time.monotonic() < deadline_s:
                processes = read_processes(self.run_dir)
                if [process.role for process in processes] == ["launcher", "forkserver", "worker", "coordinator"]:
                    break
                time.sleep(0.01)  # the launcher writes the file when it has time
            found = [
                (process.role, process.id, process.pid, int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()))
                for process in processes
            ]
            self.file.write_text(json.dumps(found))


def test_the_processes_of_a_job_are_named_and_workers_are_killed_before_others(tmp_path: Path) -> None:
    look = Look(tmp_path / "run")
    run_job(look.run_dir, LAYOUT, probe=look, faults=["kill:1@2", "kill:coordinator@4"])
    own = int(Path("/proc/self/oom_score_adj").read_text())
    found = json.loads(look.file.read_text())
    assert [(role, number, score) for role, number, _, score in found] == [
        ("launcher", 0, own),
        ("forkserver", 0, own),
        ("worker", 0, max(own, WORKER_SCORE)),
        ("coordinator", 2, own),
    ]
    assert found[0][2] == os.getpid()
    assert len({pid for _, _, pid, _ in found}) == 4
    assert not (look.run_dir / PROCESSES_FILE).exists(), "there are none any more"
