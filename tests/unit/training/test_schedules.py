"""Learning rates by step: where they rise, stay and fall, exactly."""

import pytest
import torch

from elaswave.config.schema import OptimizerConfig
from elaswave.training.optimizer import SCHEDULES, decay_steps, learning_rate


def config_of(**values):
    return OptimizerConfig(**values)


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    config = config_of(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    assert [learning_rate(config, step, 12) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(config, 8, 12) == pytest.approx(0.55)
    assert learning_rate(config, 12, 12) == pytest.approx(0.1)
    assert learning_rate(config, 100, 12) == pytest.approx(0.1)
    rates = [learning_rate(config, step, 12) for step in range(4, 13)]
    assert rates == sorted(rates, reverse=True)


def test_the_learning_rate_may_stay_and_may_start_at_once():
    constant = config_of(lr=0.5, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, step, 3) for step in (1, 2, 3, 50)] == [0.25, 0.5, 0.5, 0.5]
    assert learning_rate(config_of(lr=0.5, warmup_steps=0, schedule="constant"), 1, 1) == 0.5
    # Fewer steps than the warm-up takes, and exactly as many.
    assert learning_rate(config_of(lr=1.0, warmup_steps=10), 5, 5) == 0.5
    assert learning_rate(config_of(lr=1.0, warmup_steps=10), 10, 10) == 1.0
    assert learning_rate(config_of(lr=1.0, warmup_steps=10, min_lr_ratio=0.0), 11, 10) == 0.0


def test_a_line_down():
    config = config_of(lr=1.0, schedule="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert [learning_rate(config, step, 10) for step in (1, 2)] == [0.5, 1.0]
    assert [learning_rate(config, step, 10) for step in (3, 6, 10, 11)] == pytest.approx([0.9, 0.6, 0.2, 0.2])
    to_zero = config_of(lr=0.3, schedule="linear", warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(to_zero, 7, 7) == 0.0


def test_warm_up_stable_decay():
    config = config_of(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    rates = [learning_rate(config, step, 12) for step in range(1, 14)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_decay_of_a_tenth_unless_it_is_set():
    assert decay_steps(config_of(schedule="wsd"), 150) == 15
    assert decay_steps(config_of(schedule="wsd", warmup_steps=0), 5) == 1
    assert decay_steps(config_of(schedule="wsd", warmup_steps=10), 10) == 0
    assert decay_steps(config_of(schedule="wsd", decay_steps=40), 150) == 40
    config = config_of(lr=1.0, schedule="wsd", warmup_steps=0, min_lr_ratio=0.5)
    assert [learning_rate(config, step, 20) for step in (18, 19, 20)] == [1.0, 0.75, 0.5]


@pytest.mark.parametrize("warmup", [0, 3])
def test_steps_down_are_torchs(warmup):
    config = config_of(lr=0.5, schedule="step", warmup_steps=warmup, step_every=4, step_factor=0.5)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for step in range(warmup + 1, warmup + 14):
        assert learning_rate(config, step, 20) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_and_never_leaves_its_range(schedule):
    config = config_of(lr=0.7, schedule=schedule, warmup_steps=5, step_every=3)
    rates = [learning_rate(config, step, 40) for step in range(1, 50)]
    assert rates[:5] == [0.7 * step / 5 for step in range(1, 6)]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert all(0.0 <= rate <= 0.7 for rate in rates)
