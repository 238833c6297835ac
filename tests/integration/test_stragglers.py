"""Workers that become slow, in real jobs: no loss, the same bits."""

from pathlib import Path

import pytest
from tests.integration.jobs import Calm, Job, run_job

from elaswave.coordinator.planning import measurements
from elaswave.faults.injection import read_fault_records
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.types import Layout
from elaswave.worker import control as outbox


@pytest.mark.slow
def test_a_slow_worker_is_no_loss_and_does_not_show_in_the_bits(tmp_path: Path, calm: Calm) -> None:
    reference = calm({})
    faults = ["slow:1@3:0.5", "slow:2@4:0.3", "slow:1@6:1", "kill:3@8:backward"]
    job = run_job(tmp_path / "run", faults=faults)
    assert job.computation == reference.computation
    struck = read_fault_records(job.run_dir / FAULTS_FILE)
    assert [(record.fault, record.step) for record in struck] == [
        ("slow:1@3:0.5", 3),
        ("slow:2@4:0.3", 4),
        ("slow:1@6:1", 6),
        ("kill:3@8:backward", 8),
    ]
    assert [recovery.worker for recovery in job.result.recoveries] == [3]


LAYERS = {
    "model.num_layers": 6,
    "batch.num_microbatches": 8,
    "layout.stages": 2,
    "layout.replicas": 2,
    "run.steps": 40,
    "elastic.rebalance": True,
}
"""On real processors a slow worker's actions are stretched by a factor, however busy the machine is."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The undisturbed run."""
    return run_job(tmp_path_factory.mktemp("reference") / "run", LAYERS | {"elastic.rebalance": False})


@pytest.fixture(autouse=True)
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers tell with every step how long their actions take; they are forked from this process."""
    monkeypatch.setattr(outbox, "TIMINGS_EVERY_S_MIN", 0.0)
    monkeypatch.setattr(outbox, "TIMINGS_EVERY_S_MAX", 0.0)


def work_of(layout: Layout, worker: int) -> int:
    """Layers of all its micro-batches."""
    return sum(hop.stop - hop.start for route in layout.routes for hop in route if hop.worker == worker)


@pytest.mark.slow
def test_a_slow_worker_gets_less_to_do_and_more_again_when_it_is_fast(tmp_path: Path, reference: Job) -> None:
    """Speeds are measured: where other work takes the processors for seconds, noise decides, and nothing may change."""
    job = run_job(tmp_path / "run", LAYERS, faults=["slow:1@6:0.2", "slow:1@22:1"])
    assert job.computation == reference.computation
    assert ("slowed", 1) in [(each.kind, each.worker) for each in job.result.recoveries]
    assert not any(each.is_failure for each in job.result.recoveries)
    slow = next(record for record in job.result.generations if "worker 1 computes at 0." in record.reason)
    assert slow.change and slow.reason.startswith("elaswave: ")
    assert any("worker 1 computes at 0." in message and "the layout changes" in message for message in job.messages)
    assert work_of(slow.layout, 1) < work_of(job.result.generations[0].layout, 1)
    fast = next(record for record in job.result.generations if record.first_step > 22 and "worker 1" in record.reason)
    assert work_of(fast.layout, 1) > work_of(slow.layout, 1)


@pytest.mark.slow
def test_a_worker_that_stays_too_slow_for_any_work_leaves(
    tmp_path: Path, reference: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one trial here: the coordinator is forked from this process."""
    monkeypatch.setattr(measurements, "TRIAL_ROUNDS", 1)
    monkeypatch.setattr(measurements, "TRIALS_MAX", 1)
    job = run_job(tmp_path / "run", LAYERS, faults=["slow:1@3:0.05"])
    assert job.computation == reference.computation
    assert any("worker 1 leaves: it is too slow for any work" in message for message in job.messages)
    assert not any(each.is_failure for each in job.result.recoveries)
    assert job.result.generations[-1].layout.workers == (0, 2, 3)


@pytest.mark.slow
def test_a_slow_worker_is_known_to_the_plans_after_a_loss_and_to_a_new_coordinator(
    tmp_path: Path, reference: Job
) -> None:
    faults = ["slow:1@4:0.2", "kill:coordinator@20", "kill:2@24:backward"]
    job = run_job(tmp_path / "run", LAYERS, faults=faults)
    assert job.computation == reference.computation
    assert any(
        "worker 1 computes at 0." in record.reason for record in job.result.generations if record.first_step <= 20
    )
    last = job.result.generations[-1].layout
    assert last.workers == (0, 1, 3)
    assert work_of(last, 1) < work_of(last, 0)
