"""Workers that become slow, in real jobs: no loss, the same bits."""

from pathlib import Path

import pytest
from tests.integration.jobs import Job, run_job

from elaswave.faults.injection import FAULTS_FILE, read_fault_records
from elaswave.types import Layout
from elaswave.worker import outbox


def test_a_slow_worker_is_no_loss_and_does_not_show_in_the_bits(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference")
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


EMULATED = {
    "device.kind": '"emulated"',
    "device.model": '"gpt2-small"',
    "device.name": '"a100"',
    "device.time_scale": 20.0,
    "model.num_layers": 12,
    "model.hidden_size": 16,
    "model.context_length": 8,
    "batch.num_microbatches": 8,
    "batch.microbatch_size": 1,
    "layout.stages": 2,
    "layout.replicas": 2,
    "run.steps": 24,
    "elastic.rebalance": True,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training by one worker of this machine, undisturbed."""
    settings = {key: value for key, value in EMULATED.items() if not key.startswith(("device.", "layout."))}
    return run_job(tmp_path_factory.mktemp("reference") / "run", settings | {"layout.widths": [1]})


@pytest.fixture(autouse=True)
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers tell with every step how long their actions take; they are forked from this process."""
    monkeypatch.setattr(outbox, "TIMINGS_EVERY_S_MIN", 0.0)
    monkeypatch.setattr(outbox, "TIMINGS_EVERY_S_MAX", 0.0)


def work_of(layout: Layout, worker: int) -> int:
    """Layers of all its micro-batches."""
    return sum(hop.stop - hop.start for route in layout.routes for hop in route if hop.worker == worker)


def test_a_slow_worker_gets_less_to_do_and_more_again_when_it_is_fast(tmp_path: Path, reference: Job) -> None:
    job = run_job(tmp_path / "run", EMULATED, faults=["slow:1@4:0.2", "slow:1@16:1"])
    assert job.computation == reference.computation
    assert not job.result.recoveries
    slow = next(record for record in job.result.epochs if "worker 1 computes at 0." in record.reason)
    assert slow.change and slow.reason.startswith("elaswave: ")
    assert any("worker 1 computes at 0." in message and "the layout changes" in message for message in job.messages)
    assert work_of(slow.layout, 1) < work_of(job.result.epochs[0].layout, 1)
    last = job.result.epochs[-1]
    assert "worker 1" in last.reason and last is not slow
    assert work_of(last.layout, 1) > work_of(slow.layout, 1)


@pytest.mark.slow
def test_a_slow_worker_is_known_to_the_plans_after_a_loss_and_to_a_new_coordinator(
    tmp_path: Path, reference: Job
) -> None:
    faults = ["slow:1@3:0.2", "kill:coordinator@12", "kill:2@14:backward"]
    job = run_job(tmp_path / "run", EMULATED, faults=faults)
    assert job.computation == reference.computation
    assert any("worker 1 computes at 0." in record.reason for record in job.result.epochs if record.first_step <= 12)
    last = job.result.epochs[-1].layout
    assert last.workers == (0, 1, 3)
    assert work_of(last, 1) < work_of(last, 0)
