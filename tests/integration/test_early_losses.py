"""Workers that are lost before the first step: while they start, and before anybody has heard of them."""

import os
import signal
from pathlib import Path

import pytest
from tests.integration.jobs import run_job

from elaswave.control import launcher
from elaswave.runtime.worker import WorkerSetup


@pytest.mark.parametrize("victims", [(0,), (3,), (1, 2)])
def test_workers_that_never_register_are_lost_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[int, ...]
) -> None:
    run = launcher.run_worker

    def die_or_run(setup: WorkerSetup, *arguments: object) -> int:
        if setup.worker in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(setup, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "run_worker", die_or_run)
    settings = {"run.steps": 4, "elastic.num_followers": 2}
    job = run_job(tmp_path / "run", settings)
    assert sorted(each.worker for each in job.result.recoveries if each.kind == "lost") == list(victims)  # type: ignore[type-var]
    assert job.result.start_up_s > 0
    monkeypatch.undo()
    assert job.computation == run_job(tmp_path / "twin", settings).computation
