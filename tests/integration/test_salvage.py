"""When a loss interrupts a step of many micro-batches, survivors keep what they have of it, and no bit differs.

Real processes and real kills. The reference is the undisturbed run of the same batch.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, run_job

from elaswave.observability.result import Recovery
from elaswave.protocol.step.engine import PHASES

N = 16
SETTINGS: dict[str, Any] = {
    "run.steps": 4,
    "batch.num_microbatches": N,
    "batch.microbatch_size": 1,
    "model.num_layers": 4,
    "model.dropout": 0.1,
}


QUICK_PHASES = ("reduce", "vote", "gather")
"""In the others workers of `test_recovery.py` are lost."""


@lru_cache(maxsize=1)
def _reference(folder: str) -> Job:
    return run_job(Path(folder), SETTINGS | {"layout.widths": "[1]"})


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return _reference(str(tmp_path_factory.getbasetemp() / "undisturbed"))


def lose(folder: Path, reference: Job, widths: str, faults: Sequence[str], **settings: Any) -> list[Recovery]:
    """Recoveries of a run that loses workers, and has the reference's bits."""
    own = {key.replace("__", "."): value for key, value in settings.items()}
    job = run_job(folder, SETTINGS | {"layout.widths": widths} | own, faults=faults)
    assert job.computation == reference.computation
    return job.result.recoveries


@pytest.mark.parametrize(
    ("phase", "worker"),
    [
        pytest.param(phase, worker, marks=() if phase in QUICK_PHASES else pytest.mark.slow)
        for phase, worker in zip(PHASES, (0, 3, 0, 3, 0, 3), strict=True)
    ],
)
def test_a_kill_in_each_phase_at_2x2(tmp_path: Path, reference: Job, phase: str, worker: int) -> None:
    offset = "+3" if phase in ("forward", "backward") else ""
    (recovery,) = lose(tmp_path, reference, "[2,2]", [f"kill:{worker}@3:{phase}{offset}"])
    # The lost worker had run half of the micro-batches at most.
    assert recovery.num_microbatches_recomputed <= N // 2
    if phase in ("reduce", "vote") and recovery.outcome == "retried":
        assert recovery.num_microbatches_recomputed == N // 2


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill:5@3:backward+2", marks=pytest.mark.slow),
        pytest.param("kill:1@3:forward+2", marks=pytest.mark.slow),
        pytest.param("kill:6@3:reduce", marks=pytest.mark.slow),
        pytest.param("kill:2@3:vote", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_2x4(tmp_path: Path, reference: Job, fault: str) -> None:
    (recovery,) = lose(tmp_path, reference, "[4,4]", [fault])
    assert recovery.num_microbatches_recomputed <= N // 4


@pytest.mark.slow
def test_switched_off_the_whole_step_runs_again(tmp_path: Path, reference: Job) -> None:
    (recovery,) = lose(tmp_path, reference, "[2,2]", ["kill:3@3:reduce"], elastic__salvage=False)
    assert recovery.outcome == "retried"
    assert N // 2 < recovery.num_microbatches_recomputed <= N  # all that have run, the other pipeline's too


@pytest.mark.slow
def test_another_loss_while_the_step_is_tried_again(tmp_path: Path, reference: Job) -> None:
    """Worker 3 is lost at its last forwards; worker 0 then has fewer backwards left than those after which it dies."""
    faults = ["kill:3@3:backward+5", "kill:0@3:vote"]
    recoveries = lose(tmp_path, reference, "[2,2]", faults, elastic__num_followers=2)
    assert {recovery.worker for recovery in recoveries} == {0, 3}
    assert all(recovery.num_microbatches_recomputed <= 3 * N // 4 for recovery in recoveries)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"layout__schedule": "zero-bubble"}, id="zero-bubble", marks=pytest.mark.slow),
        pytest.param({"model__recompute": True}, id="recompute", marks=pytest.mark.slow),
        pytest.param({"elastic__verify": False}, id="unverified", marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_run_backward(tmp_path: Path, reference: Job, settings: dict[str, Any]) -> None:
    (recovery,) = lose(tmp_path, reference, "[2,2]", ["kill:2@3:backward+4"], **settings)
    assert recovery.num_microbatches_recomputed < N


@pytest.mark.slow
def test_a_stage_that_is_gone(tmp_path: Path, reference: Job) -> None:
    """Its layers are new to the others: each keeps the sums of those that it has had."""
    (recovery,) = lose(tmp_path, reference, "[1,2]", ["kill:0@3:backward+6"])
    assert recovery.num_microbatches_recomputed <= N
