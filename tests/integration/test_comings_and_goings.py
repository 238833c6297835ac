"""Workers join and leave running jobs of real processes, are lost and slow meanwhile: no bit differs."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.jobs import Job, QuietReporter, run_job
from tests.integration.waits import WaitsFor, log_of

from elaswave.errors import StoppedBySignalError
from elaswave.observability.processes import read_processes

STEPS = 48
SETTINGS = {"layout.widths": [2, 2], "run.steps": STEPS, "elastic.rebalance": True}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("undisturbed"), {**SETTINGS, "layout.widths": [1]})


def _members(job: Job) -> tuple[int, ...]:
    """Those that the job has ended with."""
    return job.result.generations[-1].layout.workers


def test_a_loss_a_join_a_leave_and_a_slow_worker_change_no_bit(undisturbed: Job, tmp_path: Path) -> None:
    probe = WaitsFor(log_of(tmp_path), "worker 4 has joined", step=8)
    job = run_job(tmp_path, SETTINGS, probe=probe, faults=["kill:1@4", "join@8", "drain:0@32", "slow:2@34:0.5"])
    assert job.computation == undisturbed.computation
    assert _members(job) == (2, 3, 4)
    assert "worker 4 has joined: generation 3" in job.messages
    assert "worker 0 has left, as it was asked to: generation 4" in job.messages
    kinds = [(each.kind, each.worker) for each in job.result.recoveries]
    assert [each for each in kinds if each[0] != "migrated"] == [("lost", 1), ("joined", 4), ("drained", 0)]
    assert ("migrated", None) in kinds


def test_a_lost_workers_place_is_taken_again(undisturbed: Job, tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        {**SETTINGS, "elastic.respawn": True},
        faults=["kill:1@3"],
        probe=WaitsFor(log_of(tmp_path), "worker 4 has joined"),
    )
    assert job.computation == undisturbed.computation
    assert _members(job) == (0, 2, 3, 4)
    kinds = [(each.kind, each.worker) for each in job.result.recoveries]
    assert [each for each in kinds if each[0] != "migrated"] == [("lost", 1), ("joined", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "leaving", "left"),
    [
        pytest.param([1, 2], [0], (1, 2), id="the last one of a stage"),
        pytest.param([1, 1, 1], [0, 2], (1,), id="all but one", marks=pytest.mark.slow),
    ],
)
def test_leaves_redo_no_step(
    undisturbed: Job, tmp_path: Path, widths: list[int], leaving: list[int], left: tuple[int, ...]
) -> None:
    job = run_job(tmp_path, {**SETTINGS, "layout.widths": widths}, faults=[f"drain:{worker}@5" for worker in leaving])
    assert job.computation == undisturbed.computation
    assert _members(job) == left
    assert [each.worker for each in job.result.recoveries if each.kind == "drained"] == leaving
    assert not any(each.is_failure for each in job.result.recoveries)


@pytest.mark.slow
def test_a_leave_that_does_not_get_there_in_time_is_a_loss_and_no_more(undisturbed: Job, tmp_path: Path) -> None:
    job = run_job(
        tmp_path,
        {**SETTINGS, "elastic.drain_deadline_s": 0.05},
        faults=["drain:1@5"],
        probe=WaitsFor(log_of(tmp_path), "worker 1 could not leave in time", step=5),
    )
    assert job.computation == undisturbed.computation
    assert _members(job) == (0, 2, 3)
    lost = [(each.worker, each.detected_by) for each in job.result.recoveries if each.kind == "lost"]
    assert lost == [(1, "drain")]


def _notify(run_dir: Path, *workers: int, and_kill_coordinator: bool = False) -> Callable[[], None]:
    def send() -> None:
        processes = read_processes(run_dir)
        for process in processes:
            if process.role == "worker" and process.id in workers:
                os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            if and_kill_coordinator and process.role == "coordinator":
                os.kill(process.pid, signal.SIGKILL)

    return send


@pytest.mark.slow
@pytest.mark.parametrize("and_kill_coordinator", [False, True])
def test_a_worker_that_has_had_a_notice_leaves(undisturbed: Job, tmp_path: Path, and_kill_coordinator: bool) -> None:
    notify = _notify(tmp_path, 3, and_kill_coordinator=and_kill_coordinator)
    job = run_job(tmp_path, SETTINGS, probe=WaitsFor(log_of(tmp_path), "worker 3 has left", notify))
    assert job.computation == undisturbed.computation
    assert _members(job) == (0, 1, 2)
    assert not [each for each in job.result.recoveries if each.kind == "lost"]
    told = "worker 3 has had a notice that its machine will be taken away (SIGTERM): it leaves within "
    assert any(line.startswith(told) for line in job.messages)


@pytest.mark.slow
def test_notices_to_all_workers_stop_the_job_with_a_checkpoint(undisturbed: Job, tmp_path: Path) -> None:
    reporter = QuietReporter()
    probe = WaitsFor(log_of(tmp_path), "all workers are to leave", _notify(tmp_path, 0, 1, 2, 3))
    with pytest.raises(StoppedBySignalError, match="stopped after step"):
        run_job(tmp_path, SETTINGS, probe=probe, reporter=reporter)
    assert any(line.startswith("all workers are to leave, and the job needs 1: ending") for line in reporter.messages)
    assert not any("lost" in line for line in reporter.messages)
    assert run_job(tmp_path, SETTINGS, resume=True).computation == undisturbed.computation
