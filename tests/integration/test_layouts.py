"""The layout does not show in the result: equal losses, state and digests per tensor under every layout."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import SMALL, Job, run_job


def layouts(num_layers: int) -> dict[str, dict[str, Any]]:
    """The layouts of the matrix for a model of so many layers; every one is compared with one worker."""
    rest = num_layers - 1
    return {
        "1x2": {"layout.stages": 1, "layout.replicas": 2},
        "1x4": {"layout.stages": 1, "layout.replicas": 4},
        "2x1": {"layout.stages": 2, "layout.replicas": 1},
        "2x2": {"layout.stages": 2, "layout.replicas": 2},
        "4x1": {"layout.stages": 4, "layout.replicas": 1},
        "1+3": {"layout.widths": [1, 3]},
        "3+1": {"layout.widths": [3, 1]},
        "2+1+2": {"layout.widths": [2, 1, 2]},
        "2x2, cut early": {"layout.widths": [2, 2], "layout.layers": [1, rest]},
        "1+3, cut late": {"layout.widths": [1, 3], "layout.layers": [rest, 1]},
        "4x1, gpipe": {"layout.stages": 4, "layout.replicas": 1, "layout.schedule": "gpipe"},
        "4x1, zero-bubble": {"layout.stages": 4, "layout.replicas": 1, "layout.schedule": "zero-bubble"},
        "2+1+2, zero-bubble-h2": {"layout.widths": [2, 1, 2], "layout.schedule": "zero-bubble-h2"},
        "2+1+2, gpipe, recomputed": {"layout.widths": [2, 1, 2], "layout.schedule": "gpipe", "model.recompute": True},
        "2x2, recomputed, 2 followers": {"layout.widths": [2, 2], "model.recompute": True, "elastic.num_followers": 2},
        "1x2, no followers": {"layout.widths": [2], "elastic.num_followers": 0},
    }


LAYOUTS = layouts(SMALL["model.num_layers"] + 2)

FEW_LAYOUTS = ("2x2", "1+3", "2+1+2, gpipe, recomputed")
"""Enough to try the models other than the first one on."""

QUICK = {
    "gpt-float32": {"2x2"},
    "gpt-bfloat16": set(),
    "llama-float32": set(),
    "llama-bfloat16": {"2+1+2, gpipe, recomputed"},
}
"""What is tried each time CI runs, in real processes: `test_any_layout.py` has all layouts within one."""

ONE_WORKER = {"layout.stages": 1, "layout.replicas": 1}

MODELS: dict[str, dict[str, Any]] = {
    "gpt-float32": {"model.family": "gpt"},
    "gpt-bfloat16": {"model.family": "gpt", "model.dtype": "bfloat16"},
    "llama-float32": {"model.family": "llama", "model.num_heads": 4, "model.num_kv_heads": 2},
    "llama-bfloat16": {
        "model.family": "llama",
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.dtype": "bfloat16",
    },
}

CONSTANT = {"optimizer.schedule": "constant"}
"""A learning rate that does not depend on the number of steps, so that a run may be cut in two."""

FULL: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 128,
    "model.num_heads": 4,
    "model.context_length": 64,
    "batch.num_microbatches": 8,
    "batch.microbatch_size": 8,
    "optimizer.lr": 2e-3,
    "elastic.block_size": 16384,
    "run.steps": 16,
}
"""The default model."""
FULL_LAYOUTS = layouts(6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training of each model by one worker, made when it is first asked for."""

    @functools.cache
    def job_of(model: str) -> Job:
        return run_job(tmp_path_factory.mktemp("alone"), MODELS[model] | CONSTANT | ONE_WORKER)

    return job_of


@pytest.mark.parametrize(
    "model, layout",
    [
        pytest.param(model, layout, marks=() if layout in QUICK[model] else pytest.mark.slow)
        for model in MODELS
        for layout in (LAYOUTS if model == "gpt-float32" else FEW_LAYOUTS)
    ],
)
def test_every_layout_is_the_same_computation(
    alone: Callable[[str], Job], model: str, layout: str, tmp_path: Path
) -> None:
    job = run_job(tmp_path, MODELS[model] | CONSTANT | LAYOUTS[layout])
    assert job.computation == alone(model).computation
    assert len(job.result.losses) == 12
    assert job.result.losses[-1] < job.result.losses[0]


@pytest.mark.parametrize(
    "model, before, after",
    [
        pytest.param("gpt-float32", "2x2", "1+3", marks=pytest.mark.slow),
        pytest.param("gpt-bfloat16", "1x4", "4x1", marks=pytest.mark.slow),
        pytest.param("llama-float32", "3+1", "1x2, no followers", marks=pytest.mark.slow),
        ("llama-bfloat16", "2+1+2", "2x2, cut early"),
    ],
)
def test_a_resume_under_another_layout_is_the_same_computation(
    alone: Callable[[str], Job], model: str, before: str, after: str, tmp_path: Path
) -> None:
    run_job(tmp_path, MODELS[model] | CONSTANT | LAYOUTS[before] | {"run.steps": 7})
    job = run_job(tmp_path, MODELS[model] | CONSTANT | LAYOUTS[after], resume=True)
    assert job.computation == alone(model).computation


# The full matrix, of the default model: ``scripts/test -m slow tests/integration/test_layouts.py``.


@pytest.fixture(scope="module")
def alone_in_full(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training of each model in its default size by one worker."""

    @functools.cache
    def job_of(model: str) -> Job:
        return run_job(tmp_path_factory.mktemp("full"), FULL | MODELS[model] | CONSTANT | ONE_WORKER)

    return job_of


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL_LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_of_the_default_model_is_the_same_computation(
    alone_in_full: Callable[[str], Job], model: str, layout: str, tmp_path: Path
) -> None:
    for schedule in ("1f1b", "gpipe"):
        settings = FULL | MODELS[model] | CONSTANT | FULL_LAYOUTS[layout] | {"layout.schedule": schedule}
        assert run_job(tmp_path / schedule, settings).computation == alone_in_full(model).computation


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_resumes_of_the_default_model_are_the_same_computation(
    alone_in_full: Callable[[str], Job], model: str, tmp_path: Path
) -> None:
    settings = FULL | MODELS[model] | CONSTANT
    run_job(tmp_path, settings | FULL_LAYOUTS["2x2"] | {"run.steps": 5})
    run_job(tmp_path, settings | FULL_LAYOUTS["1+3"] | {"run.steps": 10}, resume=True)
    job = run_job(tmp_path, settings | FULL_LAYOUTS["4x1"], resume=True)
    assert job.computation == alone_in_full(model).computation
