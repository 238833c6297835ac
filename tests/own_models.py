"""Small models of a person's own, and data for them: what the built-in models do not have."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from elaswave.api.given import OwnModelSpec
from elaswave.config.schema import OptimizerConfig
from elaswave.data.samples import Draw
from elaswave.models.layers import Layer
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer

WIDTH = 8


class Points:
    """Points in space, and a number for each: 64 samples."""

    sources = ()

    def num_samples(self, split: str) -> int:
        return 64 if split == "train" else 16

    def hashes(self, num_hashes: int) -> Iterator[Any]:
        return iter(())

    def batch(self, draws: Sequence[Draw | int], split: str) -> tuple[torch.Tensor, torch.Tensor]:
        indices = numbers(draws)
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        points = torch.randn(self.num_samples(split), WIDTH, generator=generator)[indices]
        return points, points.sin().sum(1, keepdim=True)


def numbers(draws: Sequence[Draw | int]) -> list[int]:
    """The samples that are meant."""
    return [draw.sample if isinstance(draw, Draw) else draw for draw in draws]


def mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.float(), targets)


def training_of(
    *layers: nn.Module | Layer,
    loss: Callable[..., torch.Tensor] = mean_square,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerConfig | None = None,
) -> Training:
    """What is trained, of modules or builders."""
    config = optimizer or OptimizerConfig(lr=0.01)
    return Training(
        model=OwnModelSpec(list(layers), loss).spec,
        dtype=dtype,
        make_optimizer=lambda shapes: ConfiguredOptimizer(config, 6),
        open_samples=lambda folder: Points(),
    )


def settings_of(training: Training, **changes: Any) -> dict[str, Any]:
    """Configuration keys for a model of so many layers."""
    return {
        "model.num_layers": len(training.model.layers) - 2,
        "batch.microbatch_size": 4,
        "elastic.block_size": 32,
        "run.steps": 6,
        **changes,
    }


class Mix(nn.Module):
    """A square linear map with a nonlinearity; its weight can be tied to others'."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight.t() if self.transposed else self.weight, self.bias))


class Head(nn.Module):
    """Vectors to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.map(x)
        return result


class Normed(nn.Module):
    """A linear map and a batch normalisation."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.map(x)))


class LowRank(nn.Module):
    """A frozen map with a trained one of low rank beside it (LoRA, Hu et al. 2021)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return base + x @ self.down.t() @ self.up.t()


def tied_layers() -> list[Layer]:
    """One weight in three of five layers, in one of them transposed by its forward."""
    ties = {"weight": "first.weight"}
    return [
        Layer("first", Mix),
        Layer("second", Mix, ties=ties),
        Layer("other", Mix),
        Layer("third", lambda: Mix(transposed=True), ties=ties),
        Layer("head", Head),
    ]


def normed_layers() -> list[Layer]:
    """Batch normalisations, one of which is frozen in its initial statistics."""

    def frozen() -> nn.Module:
        module = Normed()
        module.norm.eval()
        assert module.norm.running_mean is not None
        nn.init.constant_(module.norm.running_mean, 0.25)
        return module

    return [
        Layer("a", Normed),
        Layer("b", lambda: Normed(momentum=None)),
        Layer("plain", Mix),
        Layer("c", frozen),
        Layer("head", Head),
    ]


def frozen_layers() -> list[Layer]:
    """Two frozen layers, one of which normalises; one with a frozen part; a frozen one; one that is trained."""
    return [
        Layer("base", lambda: Mix().requires_grad_(False)),
        Layer("statistics", lambda: Normed().requires_grad_(False)),
        Layer("adapted", lambda: LowRank(torch.bfloat16)),
        Layer("between", lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
        Layer("head", Head),
    ]


KINDS: dict[str, Callable[[], list[Layer]]] = {
    "tied": tied_layers,
    "normed": normed_layers,
    "frozen": frozen_layers,
}
