"""Workers that become slow, in real jobs: no loss, the same bits."""

from pathlib import Path

from tests.integration.jobs import run_job

from elaswave.faults.injection import FAULTS_FILE, read_fault_records


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
