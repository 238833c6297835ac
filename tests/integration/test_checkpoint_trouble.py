"""What goes wrong with a checkpoint never ends a job."""

import threading
import time
from pathlib import Path

import pytest
from tests.integration.jobs import Calm, QuietReporter, run_job, small_config
from tests.integration.waits import HeldUntil

from elaswave.channel.messages.worker import ShardFailed, ShardWritten
from elaswave.checkpoints.format import WrittenItem
from elaswave.coordinator.records import checkpoints
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.errors import CheckpointError, RecoveryError
from elaswave.faults.injection import Probes
from elaswave.launcher.launcher import _way_on
from elaswave.worker import shard_writer

SETTINGS = {"run.steps": 4, "run.checkpoint_every": 2}


def test_a_checkpoint_folder_that_cannot_be_made_costs_checkpoints_and_at_the_end_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    """A file stands in its place, so that neither workers nor the coordinator can make it, or remove it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("in the way")
    reporter = QuietReporter()
    monkeypatch.setattr(shard_writer, "PATIENCE_S", 0.0)
    with pytest.raises(RecoveryError, match=r"the checkpoint of step 4 could not be written: cannot write .*Not a dir"):
        run_job(run_dir, SETTINGS, reporter=reporter)
    for step in (2, 4):
        begin = f"the checkpoint of step {step} could not be written, training goes on without it: cannot write"
        assert sum(line.startswith(begin) for line in reporter.errors) == 1, reporter.errors
    spare = {**SETTINGS, "run.spare_checkpoints": str(tmp_path / "spare")}
    job = run_job(run_dir, spare)
    assert [record.path for record in job.result.checkpoints] == [f"spare-checkpoints/step-0000000{n}" for n in (2, 4)]
    assert job.computation == calm(SETTINGS).computation


def test_a_thread_that_cannot_be_started_costs_a_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a limit of processes, which threads count to; the last checkpoint is then written without one."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "checkpoint" or "_load_committing" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reporter = QuietReporter()
    job = run_job(tmp_path / "run", SETTINGS, reporter=reporter)
    assert [record.step for record in job.result.checkpoints] == [4] and job.result.recoveries == []
    (said,) = [line for line in reporter.errors if line.startswith("the checkpoint of step 2 could not be written")]
    assert "its thread cannot be started (can't start new thread); raise the limit of pids" in said


@pytest.mark.slow
def test_an_old_checkpoint_that_cannot_be_removed_does_not_cost_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run_dir: Path, keep: int) -> list[Path]:
        raise CheckpointError("cannot remove the old checkpoint: Permission denied")

    monkeypatch.setattr(checkpoints, "prune", refuse)
    job = run_job(tmp_path / "run", SETTINGS)
    assert [record.step for record in job.result.checkpoints] == [2, 4]
    assert any("an old checkpoint stays, training goes on" in line for line in job.messages)


@pytest.mark.parametrize(
    "also_coordinator",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["worker", "worker and coordinator"],
)
def test_a_loss_after_the_part_was_written_keeps_the_checkpoint(
    also_coordinator: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other parts are written a step later, in the next generation; worker 3 lives until its own is known."""
    write, take = shard_writer.write_shard, checkpoints.Checkpoints.part

    def write_late(folder: Path, shard: str, pieces: object) -> list[WrittenItem]:
        # The parts of the workers that survive wait until the generation has risen, which worker 3's end brings about.
        while "worker-3" not in shard and not list(tmp_path.glob("gone")):
            time.sleep(0.01)
        return write(folder, shard, pieces)  # type: ignore[arg-type]

    def take_and_mark(self: checkpoints.Checkpoints, message: ShardWritten | ShardFailed) -> None:
        take(self, message)
        if message.worker == 3:
            (tmp_path / "told").touch()

    monkeypatch.setattr(shard_writer, "write_shard", write_late)
    monkeypatch.setattr(checkpoints.Checkpoints, "part", take_and_mark)
    faults = ["kill:3@5:backward"] + (["kill:coordinator@5"] if also_coordinator else [])
    settings = {"run.steps": 6, "run.checkpoint_every": 3}
    reporter = QuietReporter()
    probe = Probes(HeldUntil(3, 5, (tmp_path / "told").exists), Marks(tmp_path / "gone"))
    job = run_job(tmp_path / "run", settings, faults=faults, probe=probe, reporter=reporter)
    steps = [record.step for record in job.result.checkpoints]
    # A part of which only the coordinator has heard that is lost with its writer is missing: it is given up by name.
    given_up = [line for line in reporter.errors if line.startswith("the checkpoint of step 3 could not be written")]
    assert steps[-1] == 6 and (3 in steps) != bool(given_up)
    assert 3 in steps or also_coordinator


def test_checkpoints_that_cannot_be_listed_do_not_hide_why_a_job_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("checkpoints")
    recorder = RunRecorder.__new__(RunRecorder)
    recorder._run_dir = tmp_path / "run"
    for said in (recorder.advice(), _way_on(small_config(), tmp_path / "run", None)):
        assert "cannot list the checkpoints" in said and "--overwrite" not in said


class Marks:
    """Leaves a file when step 6 begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reached(self, phase: str, index: int, engine: object) -> None:
        if engine.step == 6:  # type: ignore[attr-defined]
            self._path.touch()
