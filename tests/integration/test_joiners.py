"""Workers that are started while a job runs: compared with those that began, and refused if they differ."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import Job, run_job
from tests.integration.waits import WaitsFor, log_of

from elaswave.channel.client import ControlClient
from elaswave.faults.injection import read_fault_records
from elaswave.models.gpt import GPTMLP
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.protocol.messages import PROTOCOL_VERSION, Joining
from elaswave.protocol.step.ballot import ENVIRONMENT
from elaswave.worker import process
from elaswave.worker.setup import WorkerSetup

SETTINGS = {"layout.widths": [1, 1], "run.steps": 44}


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


def _other(words: Joining, **changes: Any) -> Joining:
    return msgspec.structs.replace(words, **changes)


def _other_determinism_hash(words: Joining, place: int, **changes: Any) -> Joining:
    return _other(
        words, determinism_hashes={**words.determinism_hashes, place: words.determinism_hashes[place] + 1}, **changes
    )


DIFFERENCES: list[Any] = [
    pytest.param(
        lambda words: _other(words, data_hash=1),
        "its data are others: give it the files that the run trains on",
        id="data",
    ),
    pytest.param(
        lambda words: _other(words, config_hash=1),
        "its configuration is another one: start it with the config.toml of the run's folder",
        id="configuration",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda words: _other(words, model_hash=1),
        "its model or optimizer has other tensors: give it the script that the run was started with",
        id="model",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda words: _other(words, libraries="numpy 1.0, torch 1.0"),
        "it has numpy 1.0, torch 1.0, and the job ",
        id="libraries",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda words: _other(words, protocol=words.protocol + 1),
        f"it speaks protocol {PROTOCOL_VERSION + 1} and the job {PROTOCOL_VERSION}: install the job's elaswave",
        id="protocol",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda words: _other_determinism_hash(words, ENVIRONMENT, environment="Processor B"),
        "it computes other bits: it has Processor B, and the job ",
        id="processor",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        lambda words: _other_determinism_hash(words, ENVIRONMENT + 1),
        "layers of the same kind as embedding give other bits there, forward or backward",
        id="a layer",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("differ", "problem"), DIFFERENCES)
def test_a_joiner_that_differs_is_refused_and_both_sides_say_why(
    undisturbed: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    differ: Callable[[Joining], Joining],
    problem: str,
) -> None:
    own = process.first_words
    monkeypatch.setattr(process, "first_words", lambda setup, address: differ(own(setup, address)))
    log = tmp_path / "logs" / "worker-2.log"
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsFor(log, problem))
    assert job.computation == undisturbed.computation
    assert job.result.recoveries == []
    assert f"worker 2 is not admitted and ends itself: {problem}" in log.read_text()
    assert any(message.startswith(f"worker 2 is not admitted: {problem}") for message in job.messages)
    assert f"worker 2 is not admitted: {problem}" in log_of(tmp_path).read_text()


@pytest.mark.slow
def test_a_joiner_whose_layers_compute_other_bits_is_refused(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of itself is what it has computed."""
    own = process.first_words

    def with_another_code(setup: WorkerSetup, address: str) -> Joining:
        with pytest.MonkeyPatch.context() as here:
            forward = GPTMLP.forward
            here.setattr(GPTMLP, "forward", lambda layer, x: 2 * forward(layer, x))
            return own(setup, address)

    monkeypatch.setattr(process, "first_words", with_another_code)
    log, problem = tmp_path / "logs" / "worker-2.log", "layers of the same kind as block.0"
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsFor(log, problem))
    assert job.computation == undisturbed.computation
    assert f"worker 2 is not admitted and ends itself: {problem}" in log.read_text()
    assert any(message.startswith(f"worker 2 is not admitted: {problem}") for message in job.messages)


@pytest.mark.slow
def test_a_joiner_with_another_key_gets_no_connection_and_says_why(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ControlClient.__init__

    def with_another_key(self: Any, targets: Any, key: bytes, peer: int, *arguments: Any, **options: Any) -> None:
        own(self, targets, key if peer != 2 else b"another key" * 3, peer, *arguments, **options)

    monkeypatch.setattr(ControlClient, "__init__", with_another_key)
    # As outside of pytest, which has handlers of its own.
    monkeypatch.setattr(logging.getLogger("elaswave.channel"), "handlers", [logging.lastResort])
    log, problem = tmp_path / "logs" / "worker-2.log", "does not hold this job's key: check the address"
    job = run_job(tmp_path, SETTINGS, faults=["join@3"], probe=WaitsFor(log, problem))
    assert job.computation == undisturbed.computation
    assert job.result.recoveries == []
    assert "worker 2 has no connection to the coordinator: the process that listens at" in log.read_text()
    assert problem in log.read_text()
    shown = [text for text in job.errors if "worker 2 was given another key" in text]
    assert len(shown) == 1, job.errors


@pytest.mark.slow
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


@pytest.mark.slow
def test_joiners_that_end_with_the_same_error_do_not_end_the_job(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = process.Worker.__init__

    def fails(self: process.Worker, setup: WorkerSetup, *arguments: Any) -> None:
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
