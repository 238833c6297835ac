"""How jobs end: a user's error, a worker's death, a damaged checkpoint. Once, clearly, and nothing is left."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import QuietReporter, nothing_left, run_job
from tests.integration.unlucky import broken, make_unlucky

from elaswave.cli.main import main
from elaswave.errors import CheckpointError, DeviceError, RecoveryError, WorkerError
from elaswave.worker import process as worker_process

LAYOUT: dict[str, Any] = {"layout.stages": 2, "layout.replicas": 2, "run.steps": 6}
STEP = 3


class Kill:
    """Ends a worker with a signal before the first action of a phase of step `STEP`."""

    def __init__(self, worker: int, phase: str) -> None:
        self.worker = worker
        self.phase = phase

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if (machine.worker, machine.step, phase, index) == (self.worker, STEP, self.phase, 0):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("phase", [pytest.param("vote", marks=pytest.mark.slow), "gather"])
def test_a_worker_whose_state_nobody_copies_ends_the_job_with_a_clear_error(phase: str, tmp_path: Path) -> None:
    with pytest.raises(RecoveryError) as raised:
        run_job(tmp_path, LAYOUT | {"elastic.num_followers": 0}, probe=Kill(1, phase))
    assert "were lost with workers [1]" in str(raised.value)
    assert "elastic.num_followers = 0 survives no loss; 1 would survive any 1" in str(raised.value)


@pytest.mark.parametrize(
    "widths", [*(pytest.param(w, marks=pytest.mark.slow) for w in ([1, 1], [1, 3])), [2, 2]], ids=str
)
def test_an_error_of_a_layer_is_shown_once_and_the_exit_code_is_1(
    widths: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whether it strikes again on the worker that takes over, or all replicas at once at different micro-batches."""
    make_unlucky(monkeypatch, broken, probability=1.0)
    run_dir = tmp_path / "run"
    settings = ["model.num_layers=2", "model.hidden_size=32", "run.steps=5", f"layout.widths={widths}"]
    with nothing_left():
        code = main(["train", "--run-dir", str(run_dir), *(x for pair in settings for x in ("--set", pair))])
    assert code == 1
    shown = capfd.readouterr().err
    assert shown.count("Traceback (most recent call last)") == 1
    assert shown.count("ArithmeticError: the layer is broken (at step 1, micro-batch ") == 1
    assert "layer 2 (block.1))" in shown
    assert shown.splitlines()[-1].startswith("error: worker ")
    assert "in broken" in shown
    logs = [log.read_text() for log in (run_dir / "logs").iterdir()]
    assert any("the layer is broken" in log for log in logs)


def test_a_damaged_newest_checkpoint_is_passed_over_to_the_same_bits(tmp_path: Path) -> None:
    settings = LAYOUT | {"run.checkpoint_every": 2, "optimizer.schedule": "constant", "run.steps": 4}
    expected = run_job(tmp_path / "whole", settings | {"run.steps": 8})
    run_job(tmp_path / "parts", settings)
    damaged = tmp_path / "parts" / "checkpoints" / "step-00000004"
    shard = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    half_written = tmp_path / "parts" / "checkpoints" / "step-00000005.tmp"
    half_written.mkdir()
    reporter = QuietReporter()
    job = run_job(tmp_path / "parts", settings | {"run.steps": 8}, resume=True, reporter=reporter)
    assert any("step-00000004 is not used" in message for message in reporter.messages)
    assert not half_written.exists()
    assert job.computation == expected.computation


def test_without_any_whole_checkpoint_a_resume_says_so(tmp_path: Path) -> None:
    run_job(tmp_path, LAYOUT | {"run.checkpoint_every": 2})
    for file in tmp_path.glob("checkpoints/*/.metadata"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no valid checkpoint to resume from; .* run.checkpoint_every or .*_s"):
        run_job(tmp_path, LAYOUT, resume=True)


@pytest.mark.slow
def test_a_resumed_run_that_ends_early_names_the_checkpoint_that_it_was_resumed_from(tmp_path: Path) -> None:
    run_job(tmp_path, LAYOUT)
    more = LAYOUT | {"run.steps": 9, "elastic.min_workers": 4}
    with pytest.raises(RecoveryError, match="--resume` continues from the checkpoint of step 6"):
        run_job(tmp_path, more, resume=True, faults=["kill:1@7:forward"])


def test_a_fault_that_never_struck_is_told_at_the_end(tmp_path: Path) -> None:
    job = run_job(tmp_path, LAYOUT | {"run.steps": 4}, faults=["kill:2@2:backward", "kill:1@3:vote+3"])
    assert [recovery.worker for recovery in job.result.recoveries] == [2]
    assert [text for text in job.messages if "never struck" in text] == [
        "--fault kill:1@3:vote+3 never struck: its worker was gone, or had no such action in step 3 of this run"
    ]


def test_a_device_that_cannot_be_had_ends_the_job_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise DeviceError("device cuda:0 cannot be used: no kernel image is available")

    monkeypatch.setattr(worker_process, "open_device", fails)
    with pytest.raises(WorkerError, match="device cuda:0 cannot be used: no kernel image is available"):
        run_job(tmp_path, {"layout.stages": 1, "layout.replicas": 2})
