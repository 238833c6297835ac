"""The learning rates that a configuration describes, as pure functions of the step. No torch.

Every schedule begins with a linear warm-up over `warmup_steps`. Those that a person brings, as `torch.optim`'s
schedulers, are in `elaswave.training.torch_optimizer`.
"""

import math
from collections.abc import Callable

from elaswave.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step.

    Args:
        config: of the optimizer.
        step: counted from 1.
        num_steps: steps of the whole run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    return SCHEDULES[config.schedule](config, step, num_steps)


def decay_steps(config: OptimizerConfig, num_steps: int) -> int:
    """wsd: steps over which the learning rate decays: what is set, or a tenth of the run, after the warm-up."""
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
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM), with a linear decay as torchtitan's."""
    start = num_steps - decay_steps(config, num_steps)
    return config.lr if step <= start else _falling(config, _progress(step, start, num_steps))


def _step(config: OptimizerConfig, step: int, num_steps: int) -> float:
    assert config.step_every is not None, "a rule of the configuration asks for it"
    return config.lr * config.step_factor ** ((step - config.warmup_steps - 1) // config.step_every)


def _progress(step: int, start: int, stop: int) -> float:
    """How much of the steps after `start`, up to `stop`, is over: in (0, 1]."""
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
