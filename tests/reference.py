"""A plain single-process training loop that the engine's results are compared with. A helper, not a test.

Independent of the engine: ordinary autograd over the whole model with float32 gradient accumulation,
``torch.optim``, ``clip_grad_norm_``, a schedule of its own. What it shares with the engine is what the comparison is
over: the layers and their initial values (`build_layer`), the samples (`Sampler`), and the key that torch's default
generator is seeded with before each layer's forward.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elaswave.data.samples import Sampler
from elaswave.hashing import key64
from elaswave.models.layers import ModelSpec, build_layer
from elaswave.training.definition import Samples


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run of the reference depends on; names and defaults as in the configuration."""

    num_microbatches: int = 8
    microbatch_size: int = 8
    seed: int = 1
    optimizer: str = "adamw"
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.9
    grad_clip: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 10
    min_lr_ratio: float = 0.1
    num_steps: int | None = None
    """Steps over which the schedule runs; None: the steps asked for."""

    @classmethod
    def of(cls, config: Any) -> "Recipe":
        """The recipe of an ``elaswave.config.schema.Config``."""
        optimizer = config.optimizer
        return cls(
            num_microbatches=config.batch.num_microbatches,
            microbatch_size=config.batch.microbatch_size,
            seed=config.run.seed,
            optimizer=optimizer.name,
            lr=optimizer.lr,
            betas=tuple(optimizer.betas),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            momentum=optimizer.momentum,
            grad_clip=optimizer.grad_clip,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            min_lr_ratio=optimizer.min_lr_ratio,
            num_steps=config.run.steps,
        )


@dataclass
class Reference:
    """What a run of the reference gives."""

    losses: list[float] = field(default_factory=list)
    """Mean nats per token of every step."""
    grad_norms: list[float] = field(default_factory=list)
    """Norm of the whole mean gradient of every step, before clipping."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Final float32 parameters by full name."""


def scheduled_lr(recipe: Recipe, step: int, num_steps: int) -> float:
    """Linear warm-up from lr / warmup_steps, then constant or a half cosine down to min_lr_ratio * lr."""
    if step < recipe.warmup_steps:
        return recipe.lr * step / recipe.warmup_steps
    if recipe.schedule == "constant":
        return recipe.lr
    span = max(num_steps - recipe.warmup_steps, 1)
    phase = math.pi * min(step - recipe.warmup_steps, span) / span
    return recipe.lr * (recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * (1 + math.cos(phase)) / 2)


def make_optimizer(recipe: Recipe, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's own optimizer for a recipe; the groups carry their weight decay."""
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    assert recipe.optimizer == "sgd", recipe.optimizer
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)


def reseed(seed: int, step: int, microbatch: int, layer: int) -> None:
    """The draws of one layer's forward."""
    torch.default_generator.manual_seed(key64(seed, step, microbatch, layer, "forward") & 0xFFFFFFFF)


def run_layers(layers: Sequence[nn.Module], x: torch.Tensor, seed: int, step: int, microbatch: int) -> torch.Tensor:
    """The model's forward pass, with the generator seeded before each layer."""
    for index, layer in enumerate(layers):
        reseed(seed, step, microbatch, index)
        x = layer(x)
    return x


def microbatch_gradients(
    model: ModelSpec, layers: Sequence[nn.Module], source: Samples, recipe: Recipe, *, step: int
) -> list[list[torch.Tensor]]:
    """The float32 gradient of every micro-batch's own mean loss, by micro-batch and parameter; nothing is updated."""
    sampler = _sampler(source, recipe)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    result = []
    for microbatch in range(recipe.num_microbatches):
        tokens_BT, targets_BT = source.batch(sampler.draws(step, microbatch), "train")
        output = run_layers(layers, tokens_BT, recipe.seed, step, microbatch)
        result.append(list(torch.autograd.grad(model.loss(output, targets_BT), parameters)))
    return result


def reference_run(
    model: ModelSpec,
    source: Samples,
    recipe: Recipe,
    steps: int,
    *,
    on_step: Callable[[int, dict[str, nn.Parameter]], None] | None = None,
) -> Reference:
    """Trains from the first step.

    Args:
        model: layers and loss.
        source: of the training split.
        recipe: batch, optimizer, schedule, seed.
        steps: number of steps.
        on_step: called after each step's update with the step and the parameters by full name.
    """
    assert torch.get_num_threads() == 1, "the reference, like the workers, runs one thread"
    sampler = _sampler(source, recipe)
    layers = [build_layer(spec, recipe.seed, index) for index, spec in enumerate(model.layers)]
    named: dict[str, nn.Parameter] = {}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for spec, layer in zip(model.layers, layers):
        for name, parameter in layer.named_parameters():
            named[f"{spec.name}.{name}"] = parameter
            (decayed if parameter.dim() >= 2 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = make_optimizer(recipe, [group for group in groups if group["params"]])

    result = Reference()
    for step in range(1, steps + 1):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for microbatch in range(recipe.num_microbatches):
            tokens_BT, targets_BT = source.batch(sampler.draws(step, microbatch), "train")
            output = run_layers(layers, tokens_BT, recipe.seed, step, microbatch)
            reseed(recipe.seed, step, microbatch, len(layers))
            loss = model.loss(output, targets_BT)
            (loss / recipe.num_microbatches).backward()
            losses.append(float(loss.detach()))
        limit = recipe.grad_clip or math.inf
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), limit)))
        for group in optimizer.param_groups:
            group["lr"] = scheduled_lr(recipe, step, recipe.num_steps or steps)
        optimizer.step()
        result.losses.append(sum(losses) / len(losses))
        if on_step is not None:
            on_step(step, named)
    result.parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    return result


def _sampler(source: Samples, recipe: Recipe) -> Sampler:
    return Sampler(recipe.seed, source.num_samples("train"), recipe.microbatch_size, recipe.num_microbatches)
