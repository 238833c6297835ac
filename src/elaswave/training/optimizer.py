"""What a run needs of an optimizer, and the two that a configuration can name: AdamW and SGD on blocks.

An optimizer here is elementwise, so that the result does not depend on where blocks are cut. One block updated here
equals the same elements updated by torch.optim bit for bit. Many blocks go into one call, by torch's operators on
lists, which compute each tensor of a list by itself: one after the other on a CPU, some dozens in a launch on a GPU.
AdamW is torch's fused kernel, one pass over memory instead of ten. It rounds elements past the last whole vector of a
call in another way, so it depends on where memory is cut unless all cuts are multiples of a vector; those of blocks are
(`elaswave.state.flat.align`). Optimizers that a person brings are in `elaswave.training.torch_optimizer`.

The learning rates that a configuration describes, as pure functions of the step. No torch.

Every schedule begins with a linear warm-up over `warmup_steps`. Those that a person brings, as `torch.optim`'s
schedulers, are in `elaswave.training.torch_optimizer`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from elaswave.blocks.shapes import LayerShape, TensorSlot
from elaswave.config.schema import OptimizerConfig
from elaswave.errors import CheckpointError
from elaswave.state.flat import HeldBlock


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Computes the learning rate of a step.

    Args:
        config: of the optimizer.
        step: counted from 1.
        num_steps: steps of the whole run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    return SCHEDULES[config.schedule](config, step, num_steps)


def decay_steps(config: OptimizerConfig, num_steps: int) -> int:
    """Counts, for wsd, the steps over which the learning rate decays: what is set, or a tenth of the run, after the
    warm-up."""
    if config.decay_steps is not None:
        return config.decay_steps
    return min(max(1, num_steps // 10), max(0, num_steps - config.warmup_steps))


def _constant(config: OptimizerConfig, step: int, num_steps: int) -> float:
    return config.lr


def _cosine(config: OptimizerConfig, step: int, num_steps: int) -> float:
    progress = _progress(step, config.warmup_steps, num_steps)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def _linear(config: OptimizerConfig, step: int, num_steps: int) -> float:
    return _falling(config, _progress(step, config.warmup_steps, num_steps))


def _wsd(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Computes the learning rate by warm-up, stable, decay (Hu et al. 2024, MiniCPM), with a linear decay as
    torchtitan's."""
    start = num_steps - decay_steps(config, num_steps)
    return config.lr if step <= start else _falling(config, _progress(step, start, num_steps))


def _step(config: OptimizerConfig, step: int, num_steps: int) -> float:
    assert config.step_every is not None, "a rule of the configuration asks for it"
    return config.lr * config.step_factor ** ((step - config.warmup_steps - 1) // config.step_every)


def _progress(step: int, start: int, stop: int) -> float:
    """Computes how much of the steps after `start`, up to `stop`, is over: in (0, 1]."""
    return min(1.0, (step - start) / max(1, stop - start))


def _falling(config: OptimizerConfig, progress: float) -> float:
    return config.lr * (1 - (1 - config.min_lr_ratio) * progress)


SCHEDULES: dict[str, Callable[[OptimizerConfig, int, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "step": _step,
}
"""Learning rate after the warm-up, of (configuration, step, steps of the run)."""


class Optimizer(Protocol):
    """An optimizer, as far as it is the same for the whole run. Nothing of it changes."""

    slots: tuple[str, ...]
    """Names of its float32 states per element, beside "master"."""
    late: tuple[str, ...]
    """Those of them, and of its scalar states, that come into being with the first update."""
    given: dict[str, str]
    """What a script gives; see `elaswave.training.given`. Empty where the configuration says all."""

    def shapes(self, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        """Returns the tensors of the model, with the states that each of them has."""
        ...

    def initial(self, slot: str, tensor: TensorSlot) -> float:
        """Returns the value that all elements of a state have before the first update."""
        ...

    def updater(self) -> "Updater":
        """Makes a new updater, that has made no update yet."""
        ...


class Updater(Protocol):
    """Makes the updates of one worker, and knows what is applied at each step. All workers' are equal after a step."""

    learning_rate: float
    """Of the newest committed step: the first parameter group's."""

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """A step is committed: what its update needs is fixed, and schedules go on to the next step.

        The newest step may be told again, and then nothing changes: APPLY may have been interrupted.

        Args:
            step: its number.
            loss: of the step.
            updates: whether it is applied; a step that is not finite may be skipped.
        """
        ...

    def update(self, copies: Sequence[HeldBlock], gradients: Sequence[torch.Tensor], num_updates: int) -> None:
        """Applies the newest committed step to some blocks, in place, with the bits of one after the other. The number
        of operations does not grow with that of blocks, as far as torch's operators on lists go.

        Args:
            copies: of the blocks; their states of the first update come into being with it.
            gradients: the clipped mean gradient of each, float32 [length]. They may be overwritten.
            num_updates: updates so far, this one included (from 1).
        """
        ...

    def scalars(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Returns the states that tensors have once, after the newest committed step, by parameter group."""
        ...

    def state(self) -> str:
        """Returns all that must be known beside the blocks to go on after the newest committed step; "" stands for
        nothing."""
        ...

    def load(self, state: str, step: int) -> None:
        """Goes on after a step.

        Args:
            state: what `state` has said then.
            step: the number of the step.
        Raises:
            CheckpointError: the state is that of another optimizer.
        """
        ...


class UpdateRule(Protocol):
    """The update of an optimizer that a configuration names."""

    slots: tuple[str, ...]
    """Names of its float32 states per element, beside "master"; all start at zero."""

    def update(
        self, blocks: Sequence["Slots"], gradients: Sequence[torch.Tensor], *, learning_rate: float, num_updates: int
    ) -> None:
        """Applies one update to some blocks in place. What changes from step to step are numbers of the host, which go
        with the launch: a device is neither asked nor waited for.

        Args:
            blocks: to be updated, at least one.
            gradients: the clipped mean gradient of each, float32 [length]. They may be overwritten.
            learning_rate: of this step.
            num_updates: updates applied so far, this one included (from 1).
        """
        ...


class Slots(Protocol):
    """What a rule needs of a block, as a `HeldBlock` has it."""

    slots: dict[str, torch.Tensor]
    """"master" and the optimizer's own, float32 [length]."""
    decay_runs: tuple[tuple[int, int], ...]
    """Runs of the block that weight decay applies to."""


def _each(name: str, blocks: Sequence[Slots]) -> list[torch.Tensor]:
    """Lists one state of all blocks."""
    return [block.slots[name] for block in blocks]


def _decaying(tensors: Sequence[torch.Tensor], blocks: Sequence[Slots]) -> list[torch.Tensor]:
    """Lists the runs that weight decay applies to, of one tensor per block; most are whole blocks."""
    return [
        tensor if stop - start == tensor.numel() else tensor[start:stop]
        for tensor, block in zip(tensors, blocks, strict=True)
        for start, stop in block.decay_runs
    ]


class AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019), as torch.optim.AdamW(fused=True)."""

    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimizerConfig) -> None:
        self._beta1, self._beta2 = config.betas
        self._eps = config.eps
        self._weight_decay = config.weight_decay

    def update(
        self, blocks: Sequence[Slots], gradients: Sequence[torch.Tensor], *, learning_rate: float, num_updates: int
    ) -> None:
        """See `Rule.update`."""
        masters = _each("master", blocks)
        if self._weight_decay and (decaying := _decaying(masters, blocks)):
            torch._foreach_mul_(decaying, 1 - learning_rate * self._weight_decay)
        # The kernel reads the number of updates where the blocks are; filling it in waits for nothing.
        step = torch.full((), float(num_updates), dtype=torch.float32, device=masters[0].device)
        torch._fused_adamw_(
            masters,
            list(gradients),
            _each("exp_avg", blocks),
            _each("exp_avg_sq", blocks),
            [],
            [step] * len(masters),
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
        self, blocks: Sequence[Slots], gradients: Sequence[torch.Tensor], *, learning_rate: float, num_updates: int
    ) -> None:
        """See `Rule.update`."""
        masters, added = _each("master", blocks), list(gradients)
        if self._weight_decay and (decaying := _decaying(added, blocks)):
            torch._foreach_add_(decaying, _decaying(masters, blocks), alpha=self._weight_decay)
        if self._momentum:
            # torch starts the buffer as a copy of the first gradient: the same as zero times the momentum plus it.
            buffers = _each("momentum_buffer", blocks)
            torch._foreach_mul_(buffers, self._momentum)
            torch._foreach_add_(buffers, added)
            added = buffers
        torch._foreach_add_(masters, added, alpha=-learning_rate)


RULES: dict[str, Callable[[OptimizerConfig], UpdateRule]] = {"adamw": AdamW, "sgd": SGD}


class ConfiguredOptimizer:
    """The optimizer that a configuration describes; see `Optimizer` for what its methods promise.

    Args:
        config: of the optimizer.
        num_steps: steps of the whole run.
    """

    late: tuple[str, ...] = ()

    def __init__(self, config: OptimizerConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._rule = RULES[config.name](config)
        self.slots = self._rule.slots
        self.given: dict[str, str] = {}

    def shapes(self, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        """Every tensor has all states."""
        return shapes

    def initial(self, slot: str, tensor: TensorSlot) -> float:
        """All states start at zero."""
        return 0.0

    def updater(self) -> "ConfiguredUpdater":
        """Makes updates by the rule and the schedule of the configuration."""
        return ConfiguredUpdater(self._rule, lambda step: learning_rate(self._config, step, self._num_steps))


class ConfiguredUpdater:
    """See `Updater` for what its methods promise. It keeps nothing from one step to the next.

    Args:
        rule: the update.
        rate: the learning rate of a step.
    """

    def __init__(self, rule: UpdateRule, rate: Callable[[int], float]) -> None:
        self._rule, self._rate = rule, rate
        self.learning_rate = 0.0

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """The learning rate follows from the step alone."""
        self.learning_rate = self._rate(step)

    def update(self, copies: Sequence[HeldBlock], gradients: Sequence[torch.Tensor], num_updates: int) -> None:
        """Updates the copies by the rule."""
        self._rule.update(copies, gradients, learning_rate=self.learning_rate, num_updates=num_updates)

    def scalars(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """There are none."""
        return ()

    def state(self) -> str:
        """There is none."""
        return ""

    def load(self, state: str, step: int) -> None:
        """There is none."""
        if state:
            raise CheckpointError(
                "the checkpoint is of a run whose script brought its optimizer; resume it with that script"
            )


def average(averages: list[torch.Tensor], masters: list[torch.Tensor], decay: float) -> None:
    """Moves exponential moving averages of weights on by one update, in place.

    Args:
        averages, masters: of at least one block: the average and the weights, float32 [length].
        decay: what the average keeps of itself.
    """
    torch._foreach_mul_(averages, decay)
    torch._foreach_add_(averages, masters, alpha=1.0 - decay)


def clip_factor(norm: float, max_norm: float) -> float:
    """Computes what gradients are multiplied by so that their norm is at most max_norm (0 switches clipping off).

    Source: torch.nn.utils.clip_grad_norm_, the 1e-6 included.
    """
    if max_norm <= 0:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
