"""A model that uses all that layers may do: trees, writing in place, auxiliary losses, `batch`, counts, metrics."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.integration.jobs import small_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from elaswave.data.fingerprint import SampleHash
from elaswave.data.samples import Draw, Source
from elaswave.models.layers import Layer, LossOutput, ModelSpec, aux_loss, batch
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer

VOCABULARY, LENGTH, WIDTH, NUM_SAMPLES = 40, 8, 16, 64

Values = dict[str, torch.Tensor]


class Hidden(NamedTuple):
    """What layers hand on."""

    x: torch.Tensor
    skips: tuple[torch.Tensor, ...]
    extras: Values


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs: Values) -> Hidden:
        x = self.table(inputs["tokens"])
        return Hidden(x, (x * 0.5,), {"position": inputs["tokens"].cumsum(-1)})


class Experts(nn.Module):
    """A mixture whose router asks for balance, on what `batch` says is not padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.router, self.map = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, hidden: Hidden) -> Hidden:
        weights = self.router(hidden.x).softmax(-1) * batch()["mask"][..., None]
        aux_loss(0.1 * weights.mean((0, 1)).square().sum())
        mixed = (self.map(hidden.x).unflatten(-1, (4, WIDTH)) * weights[..., None]).sum(-2)
        return Hidden(hidden.x + F.dropout(mixed, self.dropout), (*hidden.skips, mixed.tanh()), hidden.extras)


class Checkpointed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Hidden) -> torch.Tensor:
        first, second = hidden.skips
        kept: torch.Tensor = checkpoint(self._mapped, hidden.x, use_reentrant=False)
        return kept + first + second + hidden.extras["position"][..., None].cos()

    def _mapped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.map(x), self.dropout)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = self.map(x)
        return x + y.float()


def counted_loss(logits: torch.Tensor, targets: Values) -> LossOutput:
    kept = targets["labels"].masked_fill(~targets["mask"], -100).flatten()
    return LossOutput(F.cross_entropy(logits.flatten(0, 1), kept, reduction="sum"), targets["mask"].sum())


def accuracy(logits: torch.Tensor, targets: Values) -> tuple[torch.Tensor, torch.Tensor]:
    right = (logits.argmax(-1) == targets["labels"]) & targets["mask"]
    return right.sum(), targets["mask"].sum()


class Sequences:
    """Sequences of several lengths, padded to one."""

    sources: tuple[Source, ...] = ()

    def num_samples(self, split: str) -> int:
        return NUM_SAMPLES

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        return iter(())

    def batch(self, draws: Sequence[Draw], split: str) -> tuple[Values, Values]:
        tokens, masks = [], []
        for draw in draws:
            source = torch.Generator().manual_seed(draw.sample + (1000 if split == "validation" else 0))
            tokens.append(torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=source))
            masks.append(torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (1,), generator=source))
        all_tokens, mask = torch.stack(tokens), torch.stack(masks)
        inputs = {"tokens": all_tokens[:, :-1].contiguous(), "mask": mask}
        return inputs, {"labels": all_tokens[:, 1:].contiguous(), "mask": mask}


def make_model(dropout: float = 0.25) -> ModelSpec:
    """Six layers."""
    return ModelSpec(
        (
            Layer("embed", Embed),
            Layer("experts", lambda: Experts(dropout), recompute=True),
            Layer("checkpointed", lambda: Checkpointed(dropout)),
            Layer("relu", lambda: nn.ReLU(inplace=True)),
            Layer("autocast", Autocast, recompute=True),
            Layer("head", lambda: nn.Linear(WIDTH, VOCABULARY)),
        ),
        counted_loss,
        {"accuracy": accuracy, "largest": lambda logits, targets: logits.amax()},
    )


SETTINGS: dict[str, Any] = {
    "model.num_layers": 4,
    "optimizer.grad_clip": 0.05,
    "run.steps": 5,
    "run.eval_every": 2,
    "elastic.block_size": 256,
}


def training_of(settings: Mapping[str, Any] | None = None, model: ModelSpec | None = None) -> Training:
    """What is trained, under settings."""
    config = small_config({**SETTINGS, **(settings or {})})
    return Training(
        model=model or make_model(),
        dtype=torch.float32,
        make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
        open_samples=lambda folder: Sequences(),
    )
