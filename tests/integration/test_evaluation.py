"""Evaluations: always the same samples, the same losses under every layout, no trace in the training."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, run_job

SETTINGS: dict[str, Any] = {"run.eval_every": 2, "run.steps": 4, "optimizer.schedule": "constant"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2+3": {"layout.widths": [2, 3]},
    "3+1": {"layout.widths": [3, 1], "model.recompute": True},
    "4x1": {"layout.widths": [1, 1, 1, 1], "layout.schedule": "gpipe"},
}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 7])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Job]:
    """A number of evaluation micro-batches, and the job of one worker."""
    settings = SETTINGS | {"run.eval_microbatches": request.param, "layout.widths": [1]}
    return request.param, run_job(tmp_path_factory.mktemp("alone"), settings)


@pytest.mark.parametrize("layout", ["2+3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("3+1", "4x1"))])
def test_validation_losses_do_not_depend_on_the_layout(alone: tuple[int, Job], layout: str, tmp_path: Path) -> None:
    num_microbatches, expected = alone
    # No more training micro-batches than the widest stage needs: evaluations may need other links than training.
    job = run_job(tmp_path, SETTINGS | {"run.eval_microbatches": num_microbatches} | LAYOUTS[layout])
    assert job.result.val_steps == [2, 4]
    assert job.result.val_losses == expected.result.val_losses
    assert job.computation == expected.computation


@pytest.mark.slow
def test_links_that_only_an_evaluation_needs_are_there(tmp_path: Path) -> None:
    settings = SETTINGS | {"batch.num_microbatches": 3, "run.eval_microbatches": 7}
    one, other = (
        run_job(tmp_path / str(len(widths)), settings | {"layout.widths": widths}) for widths in ([1], [2, 3])
    )
    assert one.result.val_losses == other.result.val_losses


def test_an_evaluation_does_not_show_in_the_training_and_is_carried_over_a_resume(tmp_path: Path) -> None:
    without = run_job(tmp_path / "without", SETTINGS | {"run.eval_every": 0, "layout.widths": [1, 1]})
    whole = run_job(tmp_path / "whole", SETTINGS | {"run.eval_every": 1, "layout.widths": [1, 1]})
    assert whole.computation == without.computation
    run_job(tmp_path / "parts", SETTINGS | {"run.eval_every": 1, "layout.widths": [1, 1], "run.steps": 2})
    job = run_job(tmp_path / "parts", SETTINGS | {"run.eval_every": 1, "layout.widths": [2]}, resume=True)
    assert job.result.val_steps == [1, 2, 3, 4]
    assert job.result.val_losses == whole.result.val_losses
    assert job.computation == whole.computation
