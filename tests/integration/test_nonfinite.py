"""Losses and gradients that are not finite: a clear error, or a step without an update, the same under every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import run_job
from tests.integration.unlucky import infinite_output, make_unlucky, nan_gradient, nan_output

from elaswave.errors import WorkerError

LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1": {"layout.widths": [1]},
    "1+3": {"layout.widths": [1, 3], "model.recompute": True},
}
SKIP = {"run.skip_nonfinite": True, "model.dropout": 0.0}
Spoil = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("spoil", [pytest.param(infinite_output, marks=pytest.mark.slow), nan_gradient])
def test_skipped_steps_are_the_same_under_every_layout(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_unlucky(monkeypatch, spoil, probability=0.05)
    jobs = {name: run_job(tmp_path / name, SKIP | layout) for name, layout in LAYOUTS.items()}
    losses = jobs["1x1"].result.losses
    skipped = [step for step, loss in enumerate(losses, start=1) if loss == "nan"]
    assert 0 < len(skipped) < len(losses)
    for job in jobs.values():
        assert job.computation == jobs["1x1"].computation
        assert len([text for text in job.messages if "was committed without an update" in text]) == len(skipped)


@pytest.mark.parametrize(
    "spoil, consistency", [pytest.param(nan_output, "bitwise", marks=pytest.mark.slow), (nan_gradient, "scaled")]
)
def test_a_skipped_step_changes_nothing_but_the_number_of_steps(
    spoil: Spoil, consistency: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = SKIP | LAYOUTS["1+3"] | {"elastic.consistency": consistency}
    make_unlucky(monkeypatch, spoil, probability=0.0)
    unmoved = run_job(tmp_path / "unmoved", settings | {"run.steps": 1, "optimizer.lr": 0.0})
    make_unlucky(monkeypatch, spoil, probability=1.0)
    once = run_job(tmp_path / "once", settings | {"run.steps": 1})
    twice = run_job(tmp_path / "twice", settings | {"run.steps": 2})
    assert twice.result.losses == ["nan", "nan"]
    assert twice.digests == once.digests
    assert twice.result.state_digest != once.result.state_digest
    assert masters(once.digests) == masters(unmoved.digests)


def masters(digests: dict[str, str]) -> dict[str, str]:
    """The digests of the parameters alone."""
    return {name: digest for name, digest in digests.items() if name.startswith("master.")}


@pytest.mark.parametrize(
    "spoil, what",
    [
        (nan_output, "the loss, after layer 3 (head), is not finite in step 6, micro-batch 4. "),
        (nan_gradient, "a gradient of layer 2 (block.1) is not finite in step 6, micro-batch 4. "),
    ],
)
@pytest.mark.parametrize("layout", [pytest.param("1x1", marks=pytest.mark.slow), "1+3"])
def test_the_error_names_step_microbatch_and_layer(
    spoil: Spoil, what: str, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_unlucky(monkeypatch, spoil, probability=0.05)
    with pytest.raises(WorkerError) as raised:
        run_job(tmp_path, {"model.dropout": 0.0} | LAYOUTS[layout])
    assert what in raised.value.summary
    assert "run.skip_nonfinite=true" in raised.value.summary
    assert raised.value.traceback_text == ""
