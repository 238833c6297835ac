"""The end of a job is heard by everybody, also when the coordinator dies between writing it down and saying it."""

import os
import signal
from pathlib import Path

import pytest
from tests.integration.jobs import run_job

from elaswave.control.books import Books


def test_a_coordinator_that_dies_with_the_last_word_on_its_lips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, died = Books.close, tmp_path / "died"

    def close_and_die(self: Books, *arguments: object) -> None:
        close(self, *arguments)  # type: ignore[arg-type]
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Books, "close", close_and_die)
    job = run_job(tmp_path / "run", {"run.steps": 3})
    assert died.exists()
    assert job.result.steps == 3
    monkeypatch.undo()
    assert job.computation == run_job(tmp_path / "twin", {"run.steps": 3}).computation
