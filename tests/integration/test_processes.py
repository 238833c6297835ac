"""The processes of a real job: named while they live, and which of them the kernel is to kill when memory is short."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.jobs import nothing_left, run_job
from tests.integration.waits import held_up, wait_until

from elaswave.engine.activity import Activity
from elaswave.observability.processes import PROCESSES_FILE, read_processes
from elaswave.protocol.step.activity import WRITE
from elaswave.system.processes import WORKER_SCORE

LAYOUT = {"layout.widths": [2], "run.steps": 6}


class Look:
    """In a late step, worker 0 writes down what it finds of the job's processes, once the others have been replaced."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.file = run_dir.with_suffix(".json")

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (0, 5, "forward", 0):
            with held_up(machine):  # the launcher writes the file when it has time
                wait_until(self._are_replaced)
            found = [
                (process.role, process.id, process.pid, int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()))
                for process in read_processes(self.run_dir)
            ]
            self.file.write_text(json.dumps(found))

    def _are_replaced(self) -> bool:
        roles = [process.role for process in read_processes(self.run_dir)]
        return roles == ["launcher", "forkserver", "worker", "coordinator"]


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


def test_what_a_job_leaves_behind_is_named_and_what_others_open_meanwhile_is_not(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(AssertionError, match=r"descriptor \d+': '/dev/null instead of None'"), nothing_left():
        left = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(AssertionError, match=r"descriptor \d+': 'None instead of /dev/null'"), nothing_left():
        os.close(left)

    def open_slowly() -> None:
        os.close(os.open(pipe, os.O_RDONLY))  # has a number, which no listing shows, until somebody writes
        is_open.set()
        is_over.wait(60.0)

    is_open, is_over = threading.Event(), threading.Event()
    thread, listed = threading.Thread(target=open_slowly), os.listdir("/proc/self/fd")
    thread.start()
    wait_until(lambda: os.listdir("/proc/self/fd") != listed)  # the listing has another number now
    with nothing_left():
        os.close(os.open(pipe, os.O_WRONLY))
        assert is_open.wait(60.0)
    is_over.set()
    thread.join()


def test_who_is_held_up_by_a_test_waits_for_its_disk_meanwhile() -> None:
    """Else it would pass for a hang, on a machine that is so slow that the coordinator sees its steps."""
    activity = Activity()
    machine = SimpleNamespace(observer=SimpleNamespace(activity=activity))
    for begin, computing in ((activity.compute, True), (activity.wait, False)):
        begin("2F0")
        with held_up(machine):
            assert (activity.doing.label, activity.doing.computing) == (WRITE, False)
        assert (activity.doing.label, activity.doing.computing) == ("2F0", computing)
