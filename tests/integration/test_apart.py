"""Jobs on a device of torch's own (tests/apart): the same bits in every layout, whatever is lost."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.apart.device import Apart, build
from tests.integration import own
from tests.integration.jobs import Job, run_job
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elaswave
from elaswave.worker import process

APART = {"device.kind": "loopback", "run.steps": 8, "optimizer.schedule": "constant"}
ONE = {"layout.stages": 1, "layout.replicas": 1}
FOUR = {"layout.stages": 2, "layout.replicas": 2}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"model.dropout": 0.1},
    "bfloat16": {"model.family": "llama", "model.dtype": "bfloat16", "elastic.accumulator_bits": 48},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("apart"))


@pytest.fixture(autouse=True)
def on_the_device(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers, which are forked from this process, compute on it."""
    monkeypatch.setattr(process, "open_device", lambda *options: Apart(library))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training of each model by one worker."""

    @functools.cache
    def job_of(model: str) -> Job:
        return run_job(tmp_path_factory.mktemp("alone"), MODELS[model] | APART | ONE)

    return job_of


@pytest.mark.parametrize(
    ("model", "settings", "faults"),
    [
        pytest.param("float32", FOUR, ["kill:3@4:backward"], marks=pytest.mark.slow),
        pytest.param(
            "bfloat16",
            {"layout.widths": [1, 2], "layout.schedule": "zero-bubble-h2"},
            ["kill:1@4:apply+2"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_jobs_on_a_device_of_its_own_are_the_same_computation(
    alone: Callable[[str], Job], model: str, settings: dict[str, Any], faults: list[str], tmp_path: Path
) -> None:
    job = run_job(tmp_path, MODELS[model] | APART | settings, faults=faults)
    assert job.computation == alone(model).computation
    assert len(job.result.recoveries) == len(faults)


class Asks(nn.Module):
    """In a region that backward runs again: the micro-batch's inputs, and a draw; a running statistic beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(24, 24), nn.BatchNorm1d(24)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 24), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def region(x: torch.Tensor) -> torch.Tensor:
            inputs = elaswave.batch()
            return F.dropout(torch.tanh(self.inner(x)) * self.scale, 0.1) + inputs.sum(-1, keepdim=True)

        x = self.norm(x)
        elaswave.aux_loss(x.square().mean() * 0.01)
        return checkpoint(region, x, use_reentrant=False)


def own_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(6, 24), Asks(), nn.Linear(24, 24).requires_grad_(False), nn.Linear(24, 2)]


def square_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


@pytest.mark.slow
def test_a_scripts_own_model_finds_its_call_and_its_draws_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(own.CONFIG, "optimizer.lr")
    settings = {"device.kind": "loopback", "run.eval_every": 4}
    jobs = [
        own.train(
            tmp_path / f"{sum(widths)}",
            settings | {"layout.widths": widths},
            model=own_layers(),
            loss=square_error,
            faults=faults,
            optimizer=adam,
            eval_dataset=own.Points(20),
        )
        for widths, faults in (([1], []), ([2, 1], ["kill:0@4:backward"]))
    ]
    one, other = ((job.losses, job.val_losses, job.state_digest) for job in jobs)
    assert one == other and one[1]
