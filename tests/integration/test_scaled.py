"""Float32 sums (``scaled``) stay close to exact ones (``bitwise``)."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import run_job

RECIPE: dict[str, Any] = {
    "run.steps": 20,
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 10,
    "optimizer.grad_clip": 1.0,
}


@pytest.mark.slow
@pytest.mark.parametrize("family, dropout", [("gpt", 0.0), ("llama", 0.1)])
def test_scaled_losses_are_those_of_bitwise_within_1e_5(family: str, dropout: float, tmp_path: Path) -> None:
    settings = RECIPE | {"model.family": family, "model.dropout": dropout}
    exact = run_job(tmp_path / "bitwise", settings | {"layout.widths": [1]})
    for widths in ([1], [1, 3]):
        folder = tmp_path / str(widths)
        scaled = run_job(folder, settings | {"elastic.consistency": "scaled", "layout.widths": widths})
        assert scaled.result.losses == pytest.approx(exact.result.losses, rel=1e-5, abs=0)
        assert scaled.result.losses[-1] < scaled.result.losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_scaled_losses_of_the_default_model_are_those_of_bitwise_within_1e_5(family: str, tmp_path: Path) -> None:
    sizes = {
        "model.family": family,
        "model.num_layers": 4,
        "model.hidden_size": 128,
        "model.num_heads": 4,
        "model.context_length": 64,
        "batch.num_microbatches": 8,
        "batch.microbatch_size": 8,
    }
    exact, scaled = (
        run_job(tmp_path / mode, RECIPE | sizes | {"elastic.consistency": mode, "layout.widths": [2, 2]})
        for mode in ("bitwise", "scaled")
    )
    assert scaled.result.losses == pytest.approx(exact.result.losses, rel=1e-5, abs=0)
