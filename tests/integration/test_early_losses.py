"""Workers that are lost before the first step: while they start, and before any member has heard of them."""

import os
import signal
from pathlib import Path

import pytest
from tests.integration.jobs import Calm, QuietReporter, run_job

from elaswave.launcher import supervisors
from elaswave.launcher.forkserver import worker_main
from elaswave.protocol.detection import detector
from elaswave.worker.setup import WorkerSetup


def strike(monkeypatch: pytest.MonkeyPatch, victims: tuple[int, ...], number: signal.Signals) -> None:
    """Workers get a signal before they have done anything."""
    run = worker_main.run_worker

    def be_struck_or_run(setup: WorkerSetup, *arguments: object) -> int:
        if setup.worker in victims:
            os.kill(os.getpid(), number)
        return run(setup, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_main, "run_worker", be_struck_or_run)


@pytest.mark.parametrize("victims", [*(pytest.param((each,), marks=pytest.mark.slow) for each in (0, 3)), (1, 2)])
def test_workers_that_never_register_are_lost_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[int, ...], calm: Calm
) -> None:
    strike(monkeypatch, victims, signal.SIGKILL)
    settings = {"run.steps": 4, "elastic.num_followers": 2}
    job = run_job(tmp_path / "run", settings)
    assert sorted(each.worker for each in job.result.recoveries if each.kind == "lost") == list(victims)  # type: ignore[type-var]
    assert job.result.start_up_s > 0
    monkeypatch.undo()
    assert job.computation == calm(settings).computation


@pytest.mark.slow
def test_workers_that_stand_still_before_they_register_are_left_behind_and_made_up_for_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    """With them all copies of some blocks are gone, but nothing has been computed yet."""
    reference = calm({"run.steps": 4})
    strike(monkeypatch, (0, 2, 3), signal.SIGSTOP)
    monkeypatch.setattr(detector, "SILENCE_STARTING_S", 4.0)
    monkeypatch.setattr(supervisors, "LOOK_S", 0.25)
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", {"run.steps": 4}, reporter=reporter)
    lost = [each for each in job.result.recoveries if each.kind == "lost"]
    assert sorted(each.worker for each in lost if each.worker is not None) == [0, 2, 3]
    assert {each.detected_by for each in lost} == {"heartbeat"}
    text = "\n".join(reporter.messages)
    assert "has not registered, and its process has used no processor time for" in text
    assert "the job begins again from the seed" in text
    assert job.computation == reference.computation


@pytest.mark.slow
def test_the_bound_of_standing_still_is_what_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a resumed job loses before its first step it reads from the checkpoint again."""
    settings = {"run.steps": 2, "elastic.num_followers": 0, "optimizer.schedule": "constant"}
    run_job(tmp_path / "run", settings)
    strike(monkeypatch, (1,), signal.SIGSTOP)
    job = run_job(tmp_path / "run", settings | {"run.steps": 4}, resume=True)
    assert [each.worker for each in job.result.recoveries] == [1]
    assert 20.0 < job.result.start_up_s < 35.0
    monkeypatch.undo()
    assert job.computation == run_job(tmp_path / "reference", settings | {"run.steps": 4}).computation
