"""Workers that are started while a job runs: compared with those that began, and refused if they differ."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import Job, run_job

from elaswave.faults.injection import FAULTS_FILE, read_fault_records
from elaswave.worker import process

SETTINGS = {"layout.widths": [1, 1], "run.steps": 12}
PATIENCE_S = 60.0


class WaitsForLog:
    """A probe: at a step worker 0 waits until a log says something.

    Args:
        path: of the log.
        text: that is waited for.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) != (0, 6, "forward", 0):
            return
        deadline_s = time.monotonic() + PATIENCE_S
        while not (self.path.exists() and self.text in self.path.read_text()):
            assert time.monotonic() < deadline_s, f"{self.path} never says {self.text!r}"
            time.sleep(0.01)  # a turn of the wait, which has a bound


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def test_a_joiner_of_the_same_kind_is_let_in(undisturbed: Job, tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        SETTINGS,
        faults=["join@3"],
        probe=WaitsForLog(tmp_path / "logs" / "coordinator.log", "worker 2 at unix:"),
    )
    assert job.computation == undisturbed.computation
    (record,) = read_fault_records(tmp_path / FAULTS_FILE)
    assert (record.fault, record.worker) == ("join@3", None)


def test_a_joiner_that_differs_is_refused_and_both_sides_say_why(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = process.first_words
    monkeypatch.setattr(
        process, "first_words", lambda setup, address: msgspec.structs.replace(own(setup, address), data_hash=1)
    )
    problem = "its data are others: give it the files that the run trains on"
    log = tmp_path / "logs" / "worker-2.log"
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsForLog(log, problem))
    assert job.computation == undisturbed.computation
    assert f"worker 2 is not admitted and ends itself: {problem}" in log.read_text()
    assert f"worker 2 is not admitted: {problem}" in job.messages
    assert f"worker 2 is not admitted: {problem}" in (tmp_path / "logs" / "coordinator.log").read_text()


def test_a_joiner_that_cannot_prepare_itself_disturbs_nobody(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(setup: object, address: str) -> None:
        raise OSError("there is no data here")

    monkeypatch.setattr(process, "first_words", fails)
    log = tmp_path / "logs" / "coordinator.log"
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsForLog(log, "worker 2 ended with status 1"))
    assert job.computation == undisturbed.computation
    assert "there is no data here" in (tmp_path / "logs" / "worker-2.log").read_text()
    assert job.result.recoveries == []
