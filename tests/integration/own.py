"""A small model of a script's own, and trainings of it with real worker processes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.integration.jobs import nothing_left
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave
from elaswave.api.environment import environment_to_compute
from elaswave.job.script import JobOptions, ScriptSession, active

CONFIG: dict[str, Any] = {
    "run.steps": 8,
    "batch.num_microbatches": 5,
    "batch.microbatch_size": 4,
    "optimizer.lr": 1e-2,
    "elastic.block_size": 64,
    "elastic.rebalance": False,
    "elastic.respawn": False,
}
"""Five micro-batches divide by no number of workers."""
FORK, FRESH = "fork", "fresh"
WAYS = {FORK: lambda: None, FRESH: environment_to_compute}
"""What `forkserver_environment` answers where the forkserver is forked, and where it is a fresh interpreter."""


class Points:
    """A map-style dataset: points, and a function of them."""

    def __init__(self, num_samples: int = 47) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = torch.sin(torch.arange(6, dtype=torch.float32) * (index + 1))
        return point, point[:2] * point[2:4]


class Doubling(nn.Module):
    """A layer without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], -1)


def mlp() -> nn.Sequential:
    """Six layers, two of them without parameters, one with dropout."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 24), Doubling(), nn.Linear(48, 24), nn.Sequential(nn.GELU(), nn.Dropout(0.1)), nn.Linear(24, 8),
        nn.Linear(8, 2),
    )  # fmt: skip


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss."""
    return F.mse_loss(outputs, targets)


def train(
    run_dir: Path | None,
    changes: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    loss: Any = mean_square,
    dataset: Any = None,
    faults: Sequence[str] = (),
    **options: Any,
) -> elaswave.Result:
    """Trains, and checks that nothing of the job is left.

    Args:
        run_dir: folder of the run.
        changes: to `CONFIG`.
        model: `mlp` if None.
        loss, dataset: of the trainer.
        faults: specs as of ``--fault``.
        options: further arguments of the trainer.
    """
    trainer = elaswave.Trainer(
        mlp() if model is None else model,
        loss,
        Points() if dataset is None else dataset,
        config={**CONFIG, **(changes or {})},
        run_dir=run_dir,
        **options,
    )
    with nothing_left(), active(ScriptSession(JobOptions(fault_specs=tuple(faults)), None, ())):
        return trainer.train()


def computation(result: elaswave.Result) -> tuple[list[float], str]:
    """What must be equal for two trainings to be the same computation."""
    return result.losses, result.state_digest
