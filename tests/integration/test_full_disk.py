"""A disk that is full for a while, and one that stays full: training goes on, and what is said of it is true."""

import contextlib
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Calm, QuietReporter, coordinator_of, run_job
from tests.integration.waits import held_up, wait_until

from elaswave.coordinator.records import checkpoints, job_end
from elaswave.errors import RecoveryError, RunFolderError
from elaswave.observability.events import EventsLost, RunFinished, StepCommitted, read_events
from elaswave.protocol.step.engine import Phase
from elaswave.store.file_store import FileStore
from elaswave.store.store import Entered
from elaswave.worker import shard_writer

SETTINGS = {"run.steps": 70, "layout.widths": "[1, 1]"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def mounted(*arguments: str | Path) -> None:
    """Mounts; skips the test where that may not be done."""
    if subprocess.run(["mount", *arguments], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")


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


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_lines_of_the_log(small_disk: Path, tmp_path: Path, calm: Calm) -> None:
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
    reference = calm(SETTINGS)
    assert job.computation == reference.computation


def test_a_disk_that_stays_full_costs_the_weights_which_is_said_or_they_go_to_the_spare_disk(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    for module in (checkpoints, shard_writer):
        monkeypatch.setattr(module, "PATIENCE_S", 0.2)
        monkeypatch.setattr(module, "RETRY_S", 0.05)
    reporter = QuietReporter()
    settings = {**SETTINGS, "run.steps": 8}
    lost = r"all 8 steps are trained, but the trained weights are lost, since the checkpoint of step 8 could not be"
    with pytest.raises(RecoveryError, match=lost) as raised:
        run_job(small_disk / "run", settings, probe=FillsTheDisk(small_disk, until=99), reporter=reporter)
    assert "No space left on device" in str(raised.value)
    assert any(line.startswith("the checkpoint of step 8 could not be written") for line in reporter.errors)
    assert sum(" step 8, cannot be written and is tried again for" in line for line in reporter.messages) == 1
    assert any("lacks the last" in line for line in reporter.errors)
    assert len(reporter.losses) == 8 and not (small_disk / "run" / "result.json").exists()

    (small_disk / "filler").unlink()
    spare = {**settings, "run.spare_checkpoints": str(tmp_path / "spare")}
    with contextlib.suppress(RecoveryError):  # the disk may not take the result
        run_job(small_disk / "other", spare, probe=FillsTheDisk(small_disk, until=99))
    (small_disk / "filler").unlink()
    resumed = run_job(small_disk / "other", spare, resume=True)
    assert resumed.result.steps == 8 and (small_disk / "other" / "spare-checkpoints" / "step-00000008").is_dir()
    assert resumed.computation == calm(settings).computation


class TurnsReadOnly:
    """Worker 0 has the run's folder be one that cannot be written any more, in step 3, and kills the coordinator."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def reached(self, phase: Phase, index: int, machine: Any) -> None:
        if (machine.worker, phase, index, machine.step) == (0, "forward", 0, 3):
            # Whoever is held for lost here strikes no more: the others make all steps and their checkpoints.
            with held_up(machine):
                wait_until((self._run_dir / "checkpoints" / "step-00000002").is_dir)
                self._make_read_only()
                os.kill(coordinator_of(self._run_dir), signal.SIGKILL)

    def _make_read_only(self) -> None:
        """At once: what is mounted there may not turn read-only while a file is written through it."""
        aside = self._run_dir.with_name("aside")
        aside.mkdir()
        for arguments in (
            ["mount", "--bind", self._run_dir, aside],
            ["mount", "-o", "remount,bind,ro", aside],
            ["mount", "--bind", aside, self._run_dir],
            ["umount", aside],
        ):
            subprocess.run(arguments, check=True)


@pytest.mark.usefixtures("small_disk")
def test_a_folder_that_turns_read_only_names_the_checkpoint_to_go_on_from_also_after_a_new_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    for module in (checkpoints, shard_writer):
        monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    reporter = QuietReporter()
    run_dir = tmp_path / "run"
    settings = {**SETTINGS, "run.steps": 6, "run.checkpoint_every": 2}
    try:
        with pytest.raises(RecoveryError, match=r"weights are lost.*Read-only file system.*the checkpoint of step 2$"):
            run_job(run_dir, settings, probe=TurnsReadOnly(run_dir), reporter=reporter)
        assert os.statvfs(run_dir).f_flag & os.ST_RDONLY
    finally:
        subprocess.run(["umount", run_dir], check=True)
    assert len(reporter.losses) == 6, "a coordinator has followed"
    log = (run_dir / "logs" / "coordinator.log").read_text()
    assert "Traceback" not in log
    resumed = run_job(run_dir, settings, resume=True)
    assert resumed.computation == calm(settings).computation


def test_a_journal_that_takes_no_more_records_ends_the_job_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileStore._write

    def write_until_full(self: FileStore[Any], payload: bytes, digest: bytes) -> None:
        if len(self.records()) > 7:
            raise sqlite3.OperationalError("database or disk is full")
        write(self, payload, digest)

    monkeypatch.setattr(FileStore, "_write", write_until_full)
    with pytest.raises(RecoveryError, match="an append failed: database or disk is full; free space or mend the disk"):
        run_job(tmp_path / "run", {**SETTINGS, "run.steps": 100})
    assert isinstance(read_events(tmp_path / "run" / "events.jsonl")[-1], RunFinished)


@pytest.mark.slow
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

    def full(self: FileStore[Any], payload: bytes, digest: bytes) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(FileStore, "append", append_until_the_end)
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", {**SETTINGS, "run.steps": 3}, reporter=reporter)
    assert job.result.steps == 3
    assert any("the journal does not take the end of the job" in line for line in reporter.errors)
    events = read_events(job.run_dir / "events.jsonl")
    assert isinstance(events[-1], RunFinished) and events[-1].outcome == "finished"
