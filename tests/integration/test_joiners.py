"""Workers that are started while a job runs: compared with those that began, and refused if they differ."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import Job, run_job
from tests.integration.waits import WaitsFor, log_of

from elaswave.faults.injection import FAULTS_FILE, read_fault_records
from elaswave.worker import process

SETTINGS = {"layout.widths": [1, 1], "run.steps": 60}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("undisturbed"), SETTINGS)


def test_a_joiner_of_the_same_kind_is_let_in(undisturbed: Job, tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        SETTINGS,
        faults=["join@3"],
        probe=WaitsFor(log_of(tmp_path), "worker 2 at unix:"),
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
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsFor(log, problem))
    assert job.computation == undisturbed.computation
    assert f"worker 2 is not admitted and ends itself: {problem}" in log.read_text()
    assert f"worker 2 is not admitted: {problem}" in job.messages
    assert f"worker 2 is not admitted: {problem}" in log_of(tmp_path).read_text()


def test_a_joiner_that_cannot_prepare_itself_disturbs_nobody(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(setup: object, address: str) -> None:
        raise OSError("there is no data here")

    monkeypatch.setattr(process, "first_words", fails)
    log = log_of(tmp_path)
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsFor(log, "worker 2 ended with status 1"))
    assert job.computation == undisturbed.computation
    assert "there is no data here" in (tmp_path / "logs" / "worker-2.log").read_text()
    assert job.result.recoveries == []


def test_joiners_that_end_with_the_same_error_do_not_end_the_job(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = process.Worker.__init__

    def fails(self: process.Worker, setup: process.WorkerSetup, *arguments: Any) -> None:
        if setup.joins:  # it has a connection already, over which it says so
            raise OSError("there is no data here")
        own(self, setup, *arguments)

    monkeypatch.setattr(process.Worker, "__init__", fails)
    job = run_job(
        tmp_path,
        SETTINGS,
        faults=["join@3", "join@3"],
        probe=WaitsFor(log_of(tmp_path), "worker 3 ended with status 1"),
    )
    assert job.computation == undisturbed.computation
    assert job.result.recoveries == []
    for worker in (2, 3):
        problem = "it has ended with an error: OSError: there is no data here"
        assert f"worker {worker} is not admitted: {problem}" in job.messages
