"""What a new coordinator finds: workers that its predecessor has lost sight of, and a job that has already ended."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.jobs import Calm, coordinator_of, run_job
from tests.signals import hearing_signals

from elaswave.channel import client
from elaswave.checkpoints.checkpoint import CheckpointRef, CheckpointSearch, find_newest_checkpoint
from elaswave.config.load import load_config
from elaswave.coordinator.job_spec import CoordinatorSetup
from elaswave.coordinator.process import CoordinatorProcess
from elaswave.coordinator.records import checkpoints as checkpoints_module
from elaswave.coordinator.records.checkpoints import CheckpointFinder, Checkpoints
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.errors import RecoveryError, StoppedBySignalError
from elaswave.launcher import supervisors
from elaswave.protocol import events
from elaswave.protocol.detection.detector import Detector
from elaswave.protocol.step.engine import Phase


class StopsWithItsCoordinator:
    """Worker 1 kills the coordinator and stops for ever, so that the new one never hears of it."""

    def __init__(self, coordinator: Path) -> None:
        self._coordinator = coordinator

    def reached(self, phase: Phase, index: int, engine: Any) -> None:
        if (engine.worker, engine.step, phase, index) == (1, 3, "backward", 0):
            os.kill(int(self._coordinator.read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_worker_that_never_finds_the_new_coordinator_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    run, pid = supervisors.run_coordinator, tmp_path / "pid"

    def run_known(setup: CoordinatorSetup) -> int:
        pid.write_text(str(os.getpid()))
        return run(setup)

    monkeypatch.setattr(supervisors, "run_coordinator", run_known)
    job = run_job(tmp_path / "run", {"run.steps": 4}, probe=StopsWithItsCoordinator(pid))
    assert [recovery.worker for recovery in job.result.recoveries if recovery.kind == "lost"] == [1]
    assert job.computation == calm({"run.steps": 4}).computation


def test_a_coordinator_that_dies_with_the_last_word_on_its_lips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    close, died = RunRecorder.close, tmp_path / "died"

    def close_and_die(self: RunRecorder, *arguments: object) -> None:
        close(self, *arguments)  # type: ignore[arg-type]
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(RunRecorder, "close", close_and_die)
    job = run_job(tmp_path / "run", {"run.steps": 3})
    assert died.exists()
    assert job.result.steps == 3
    monkeypatch.undo()
    assert job.computation == calm({"run.steps": 3}).computation


@pytest.mark.parametrize("last_words", [events.Decided, pytest.param(events.Resumed, marks=pytest.mark.slow)])
def test_a_loss_is_reported_though_the_coordinator_that_dealt_with_it_is_gone(tmp_path: Path, last_words: type) -> None:
    died = tmp_path / "died"

    def die(effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, last_words) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    job = run_job(tmp_path / "run", {"run.steps": 5}, faults=["kill:2@3:backward"], before_effect=die)
    (lost,) = [recovery for recovery in job.result.recoveries if recovery.kind == "lost"]
    assert (lost.worker, lost.step, lost.phase, lost.generation, lost.outcome) == (2, 3, "backward", 2, "retried")
    assert any(line.startswith("worker 2 (stage 1) lost in backward of step 3") for line in job.messages), job.messages


def test_a_coordinator_that_hangs_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    hung = tmp_path / "hung"
    monkeypatch.setattr(client, "SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(supervisors, "COORDINATOR_HUNG_S", 2.0)

    def hang(effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, events.Decided) and not hung.exists():
            hung.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    settings = {"run.steps": 5}
    job = run_job(tmp_path / "run", settings, faults=["kill:2@3:backward"], before_effect=hang)
    assert hung.exists()
    # On a machine that is too busy for the next one to answer in so short a time that one is followed, too.
    assert [recovery.kind for recovery in job.result.recoveries].count("coordinator") >= 1
    assert job.computation == calm(settings).computation


@pytest.mark.parametrize("kind", [events.Persist, pytest.param(events.NewGeneration, marks=pytest.mark.slow)])
def test_a_coordinator_that_fails_while_it_deals_with_a_loss_ends_the_job(tmp_path: Path, kind: type) -> None:
    """A worker's end is noticed by no message; what goes wrong then must end the job, not leave it waiting."""

    def fail(effect: events.CoordinatorEffect) -> None:
        if isinstance(effect, kind) and (
            not isinstance(effect, events.Persist) or isinstance(effect.record, events.NewGenerationRecord)
        ):
            raise OSError("no space left on device")

    with pytest.raises(RecoveryError, match="the coordinator ended with status 1"):
        run_job(tmp_path / "run", {"run.steps": 5}, faults=["kill:2@3:backward"], before_effect=fail)
    assert "no space left on device" in (tmp_path / "run" / "logs" / "coordinator.log").read_text()


def test_a_coordinator_can_be_heard_while_it_verifies_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    """Checksums of large files take longer than it may be silent before it is taken for hung."""
    where = tmp_path / "where"

    def find_and_tell(run_dir: Path, *options: Any) -> CheckpointSearch:
        where.write_text("main" if threading.current_thread() is threading.main_thread() else "beside")
        return find_newest_checkpoint(run_dir, *options)

    monkeypatch.setattr(checkpoints_module, "find_newest_checkpoint", find_and_tell)
    settings = {"run.steps": 5, "run.checkpoint_every": 1, "elastic.num_followers": 0}
    job = run_job(tmp_path / "run", settings, faults=["kill:2@4:backward"])
    assert where.read_text() == "beside"
    assert any("goes back to the checkpoint of step" in message for message in job.messages)
    assert job.computation == calm({"run.steps": 5}).computation


def test_a_checkpoint_that_is_completed_while_one_is_sought_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of those who live on may come while checksums of older ones are read."""
    records: list[str] = []
    found: list[tuple[events.FindCheckpoint, int | None]] = []

    def find(run_dir: Path, *options: object) -> CheckpointSearch:
        ref = CheckpointRef(4 if records else 2, run_dir, meta=None)  # type: ignore[arg-type]
        records[:] = ["step 4"]
        return CheckpointSearch(ref, ())

    monkeypatch.setattr(checkpoints_module, "find_newest_checkpoint", find)
    core: Any = SimpleNamespace(restarts=False, awaits=lambda question: True)
    checkpoints: Any = SimpleNamespace(records=records, is_committing=False, hold=lambda: None)
    finder = CheckpointFinder(
        core,
        checkpoints,
        load_config(None, []),
        tmp_path,
        begins_at_seed=True,
        is_over=lambda: False,
        answer=lambda question, step: found.append((question, step)),
    )
    asyncio.run(finder.find(events.FindCheckpoint(7)))
    assert found == [(events.FindCheckpoint(7), 4)]


def dies_once_after(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, mark: Path) -> None:
    """The first coordinator in which a method is called is killed when the call has been made: what the call has dealt
    with may be acknowledged or not, but it is in no process's memory any more."""
    original = getattr(owner, method)

    def call_and_die(self: Any, *arguments: Any) -> Any:
        answer = original(self, *arguments)
        if not mark.exists():
            mark.touch()
            # Later than this turn, so that what was handled in it is acknowledged first.
            asyncio.get_running_loop().call_later(0.002, os.kill, os.getpid(), signal.SIGKILL)
        return answer

    monkeypatch.setattr(owner, method, call_and_die)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        pytest.param(RunRecorder, "finish", marks=pytest.mark.slow),
        (Checkpoints, "part"),
        pytest.param(RunRecorder, "ready", marks=pytest.mark.slow),
        pytest.param(Detector, "link_lost", marks=pytest.mark.slow),
        (RunRecorder, "step"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_a_coordinator_has_acknowledged_does_not_die_with_it(
    owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calm: Calm
) -> None:
    """The end, parts of checkpoints, the start, a broken link, a step: each dies with the coordinator that was told."""
    settings = {"run.steps": 4, "run.checkpoint_every": 2, "run.keep_checkpoints": 9}
    faults = ["cut-close:1@3:backward"] if method == "link_lost" else []
    dies_once_after(monkeypatch, owner, method, tmp_path / "died")
    job = run_job(tmp_path / "run", settings, faults=faults)
    assert (tmp_path / "died").exists()
    assert [record.step for record in job.result.checkpoints] == [2, 4]
    assert [ref.name for ref in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "step-00000002",
        "step-00000004",
    ]
    assert len(job.result.losses) == 4
    assert job.result.generations[0].generation == 1 and job.result.generations[0].first_step == 1
    monkeypatch.undo()
    assert job.computation == calm(settings).computation


def test_a_wish_to_stop_outlives_the_coordinator_that_heard_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed before it has passed the wish on."""
    mark = tmp_path / "died"

    def die(self: CoordinatorProcess) -> None:
        if mark.exists():
            stop_workers(self)
        else:
            mark.touch()
            asyncio.get_running_loop().call_later(0.002, os.kill, os.getpid(), signal.SIGKILL)

    stop_workers = CoordinatorProcess._stop_workers
    monkeypatch.setattr(CoordinatorProcess, "_stop_workers", die)
    with hearing_signals(), pytest.raises(StoppedBySignalError):
        run_job(tmp_path / "run", {"run.steps": 100_000}, probe=Terminates(os.getpid(), mark))
    assert mark.exists()
    assert list((tmp_path / "run" / "checkpoints").glob("step-????????"))


class Terminates:
    """Worker 0 sends SIGTERM to the launcher in step 3."""

    def __init__(self, launcher_pid: int, mark: Path) -> None:
        self._pid = launcher_pid

    def reached(self, phase: Phase, index: int, engine: Any) -> None:
        if (engine.worker, engine.step, phase, index) == (0, 3, "backward", 0):
            os.kill(self._pid, signal.SIGTERM)


def test_a_worker_and_the_coordinator_lost_together_are_reported_with_their_step(tmp_path: Path) -> None:
    """The new coordinator has never heard of that worker."""
    settings = {"run.steps": 5}
    job = run_job(tmp_path / "run", settings, probe=TakesTheCoordinatorAlong(tmp_path / "run", 1, 3))
    lost, restart = (next(r for r in job.result.recoveries if r.kind == kind) for kind in ("lost", "coordinator"))
    assert (lost.worker, lost.step, lost.outcome) == (1, 3, "retried")
    assert restart.step <= 5
    (line,) = [line for line in job.messages if line.startswith("worker 1 (stage")]
    assert " step 3 (" in line


class TakesTheCoordinatorAlong:
    """A worker finds the coordinator in the run folder, and kills it and itself."""

    def __init__(self, run_dir: Path, worker: int, step: int) -> None:
        self._run_dir, self._worker, self._step = run_dir, worker, step

    def reached(self, phase: Phase, index: int, engine: Any) -> None:
        if (engine.worker, engine.step, phase, index) == (self._worker, self._step, "backward", 0):
            os.kill(coordinator_of(self._run_dir), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
