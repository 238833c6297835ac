"""A disk that is full for a while, and one that stays full: training goes on, and what is said of it is true."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import QuietReporter, coordinator_of, run_job

from elaswave.control import job_end
from elaswave.control.file_store import FileStore
from elaswave.control.journal import Entered
from elaswave.errors import RecoveryError, RunFolderError
from elaswave.observability.events import EventsLost, RunFinished, StepCommitted, read_events
from elaswave.protocol.engine import Phase

SETTINGS = {"run.steps": 70, "layout.widths": "[1, 1]"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


class FillsTheDisk:
    """Worker 0 fills the disk in step 2, kills the coordinator in step 14, and frees the disk again in another step."""

    def __init__(self, folder: Path, until: int) -> None:
        self._file, self._until = folder / "filler", until
        self._run_dir = folder / "run"

    def reached(self, phase: Phase, index: int, engine: Any) -> None:
        if (engine.worker, phase, index) != (0, "forward", 0):
            return
        if engine.step == 2:
            with contextlib.suppress(OSError), self._file.open("wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(b"x" * size)
        elif engine.step == 14 and self._until > 14:
            os.kill(coordinator_of(self._run_dir), signal.SIGKILL)
        elif engine.step == self._until:
            self._file.unlink()


def test_a_disk_that_is_full_for_a_while_costs_lines_of_the_log(small_disk: Path, tmp_path: Path) -> None:
    reporter = QuietReporter()
    job = run_job(
        small_disk / "run",
        {**SETTINGS, "run.checkpoint_every": 30},
        probe=FillsTheDisk(small_disk, until=58),
        reporter=reporter,
    )
    events = read_events(job.run_dir / "events.jsonl")
    assert sum(event.num_events for event in events if isinstance(event, EventsLost)) >= 1
    assert isinstance(events[-1], RunFinished) and events[-1].outcome == "finished"
    assert len([event for event in events if isinstance(event, StepCommitted)]) < 70
    assert any("No space left on device): training goes on" in line for line in reporter.errors)
    assert any(line.startswith("the checkpoint of step 30 could not be written") for line in reporter.errors)
    # What the log lacks the result has, also what only the coordinator of before has heard.
    assert [record.step for record in job.result.checkpoints] == [60, 70]
    assert any(recovery.kind == "coordinator" for recovery in job.result.recoveries)
    reference = run_job(tmp_path / "reference", SETTINGS)
    assert job.computation == reference.computation


@pytest.mark.slow
def test_a_disk_that_stays_full_is_named_at_the_end(small_disk: Path) -> None:
    reporter = QuietReporter()
    with pytest.raises(RecoveryError, match="all 70 steps are trained, but their result cannot be written") as raised:
        run_job(small_disk / "run", SETTINGS, probe=FillsTheDisk(small_disk, until=99), reporter=reporter)
    assert "No space left on device" in str(raised.value)
    assert any(line.startswith("the checkpoint of step 70 could not be written") for line in reporter.errors)
    assert any("lacks the last" in line for line in reporter.errors)
    assert len(reporter.losses) == 70


def test_a_journal_that_takes_no_more_records_ends_the_job_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileStore._write

    def write_until_full(self: FileStore[Any], data: bytes) -> None:
        if self._end > 700:
            raise OSError(28, os.strerror(28))
        write(self, data)

    monkeypatch.setattr(FileStore, "_write", write_until_full)
    with pytest.raises(RecoveryError, match="an append failed: No space left on device; free space or mend the disk"):
        run_job(tmp_path / "run", {**SETTINGS, "run.steps": 100})
    assert isinstance(read_events(tmp_path / "run" / "events.jsonl")[-1], RunFinished)


def test_a_result_that_cannot_be_written_names_the_checkpoint_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run_dir: Path, result: object) -> None:
        raise RunFolderError(f"cannot write {run_dir / 'result.json'}: Read-only file system")

    monkeypatch.setattr(job_end, "write_result", refuse)
    with pytest.raises(RecoveryError, match="--resume` continues from the checkpoint of step 70"):
        run_job(tmp_path / "run", SETTINGS)


def test_a_journal_that_takes_everything_but_the_end_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = FileStore.append

    def append_until_the_end(self: FileStore[Any], *records: Any) -> None:
        if any(isinstance(record, Entered) and isinstance(record.event, RunFinished) for record in records):
            monkeypatch.setattr(FileStore, "_write", full)
        append(self, *records)

    def full(self: FileStore[Any], data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(FileStore, "append", append_until_the_end)
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", {**SETTINGS, "run.steps": 3}, reporter=reporter)
    assert job.result.steps == 3
    assert any("the journal does not take the end of the job" in line for line in reporter.errors)
    events = read_events(job.run_dir / "events.jsonl")
    assert isinstance(events[-1], RunFinished) and events[-1].outcome == "finished"
