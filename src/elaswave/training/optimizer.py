"""AdamW and SGD on blocks: elementwise, so that the result does not depend on where blocks are cut.

One block updated here equals the same elements updated by torch.optim bit for bit. AdamW is torch's fused kernel, one
pass over memory instead of ten. It rounds elements past the last whole vector of a call in another way, so it depends
on where memory is cut unless all cuts are multiples of a vector; those of blocks are (`elaswave.state.flat.align`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elaswave.config.schema import OptimizerConfig


class Optimizer(Protocol):
    """What the engine needs of an optimizer."""

    slots: tuple[str, ...]
    """Names of its float32 states per element, beside "master"; all start at zero."""

    def update(
        self,
        slots: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        decay_runs: Sequence[tuple[int, int]],
        *,
        learning_rate: float,
        num_updates: int,
    ) -> None:
        """Applies one update in place.

        Args:
            slots: "master" and the optimizer's own, float32 [length].
            gradient: the clipped mean gradient, float32 [length].
            decay_runs: runs of the block that weight decay applies to.
            learning_rate: of this step.
            num_updates: updates applied so far, this one included (from 1).
        """
        ...


class AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019), as torch.optim.AdamW(fused=True)."""

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self._beta1, self._beta2 = config.betas
        self._eps = config.eps
        self._weight_decay = config.weight_decay

    def update(
        self,
        slots: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        decay_runs: Sequence[tuple[int, int]],
        *,
        learning_rate: float,
        num_updates: int,
    ) -> None:
        """See `Optimizer.update`."""
        master, exp_avg, exp_avg_sq = slots["master"], slots["exp_avg"], slots["exp_avg_sq"]
        if self._weight_decay:
            for start, stop in decay_runs:
                master[start:stop].mul_(1 - learning_rate * self._weight_decay)
        torch._fused_adamw_(
            [master],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(num_updates))],
            amsgrad=False,
            lr=learning_rate,
            beta1=self._beta1,
            beta2=self._beta2,
            weight_decay=0.0,
            eps=self._eps,
            maximize=False,
        )


class SGD:
    """Stochastic gradient descent with momentum and L2 decay, operation by operation torch.optim.SGD(foreach=False)."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.momentum
        self.slots: tuple[str, ...] = ("momentum_buffer",) if self._momentum else ()
        self._weight_decay = config.weight_decay

    def update(
        self,
        slots: dict[str, torch.Tensor],
        gradient: torch.Tensor,
        decay_runs: Sequence[tuple[int, int]],
        *,
        learning_rate: float,
        num_updates: int,
    ) -> None:
        """See `Optimizer.update`."""
        master = slots["master"]
        if self._weight_decay and decay_runs:
            gradient = gradient.clone()
            for start, stop in decay_runs:
                gradient[start:stop].add_(master[start:stop], alpha=self._weight_decay)
        if self._momentum:
            # torch starts the buffer as a copy of the first gradient: the same as zero times the momentum plus it.
            gradient = slots["momentum_buffer"].mul_(self._momentum).add_(gradient)
        master.add_(gradient, alpha=-learning_rate)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], Optimizer]] = {"adamw": AdamW, "sgd": SGD}


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step.

    Linear warm-up over `warmup_steps`, then constant, or a cosine down to `min_lr_ratio` times the peak at num_steps.

    Args:
        step: counted from 1.
        num_steps: steps of the whole run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most max_norm (0 switches clipping off).

    Source: torch.nn.utils.clip_grad_norm_, the 1e-6 included.
    """
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
