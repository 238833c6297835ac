"""AdamW and SGD on blocks: torch's own bits, wherever blocks are cut; clipping; the average of weights."""

import math
from typing import NamedTuple

import pytest
import torch

from elaswave.config.schema import OptimizerConfig
from elaswave.errors import CheckpointError
from elaswave.training.optimizer import RULES, ConfiguredOptimizer, average, clip_factor, learning_rate

NUM_ELEMENTS = 1024
DECAYED = [(0, 320), (640, 896)]
STEPS = 7


def config_of(**values):
    return OptimizerConfig(**values)


def gradients():
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-30, 10, NUM_ELEMENTS)
    return [torch.randn(NUM_ELEMENTS, generator=generator) * scales for _ in range(STEPS)]


def initial():
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(4))


class Run(NamedTuple):
    """A block of the tensor."""

    start: int
    stop: int
    slots: dict[str, torch.Tensor]
    decay_runs: tuple[tuple[int, int], ...]


def updated(config, cuts, at_once=1):
    """The slots after all steps, from blocks that are cut at the given places and updated so many by a call."""
    bounds = [0, *cuts, NUM_ELEMENTS]
    optimizer = RULES[config.name](config)
    blocks = []
    for start, stop in zip(bounds, bounds[1:]):
        slots = {"master": initial()[start:stop].clone()}
        slots |= {name: torch.zeros(stop - start) for name in optimizer.slots}
        inside = ((max(a, start) - start, min(b, stop) - start) for a, b in DECAYED if max(a, start) < min(b, stop))
        blocks.append(Run(start, stop, slots, tuple(inside)))
    for number, gradient in enumerate(gradients(), start=1):
        rate = learning_rate(config, number, STEPS)
        for first in range(0, len(blocks), at_once):
            some = blocks[first : first + at_once]
            parts = [gradient[block.start : block.stop].clone() for block in some]
            optimizer.update(some, parts, learning_rate=rate, num_updates=number)
    return {name: torch.cat([block.slots[name] for block in blocks]) for name in ("master", *optimizer.slots)}


def torch_updated(config):
    """The same by torch.optim, one tensor per run of elements with the same decay."""
    bounds = [0, *(bound for run in DECAYED for bound in run if bound), NUM_ELEMENTS]
    runs = list(zip(bounds, bounds[1:]))
    parameters = [torch.nn.Parameter(initial()[start:stop].clone()) for start, stop in runs]
    groups = [
        {"params": [parameter], "weight_decay": config.weight_decay if run in DECAYED else 0.0}
        for parameter, run in zip(parameters, runs, strict=True)
    ]
    if config.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=False)
    for number, gradient in enumerate(gradients(), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, number, STEPS)
        for parameter, (start, stop) in zip(parameters, runs, strict=True):
            parameter.grad = gradient[start:stop].clone()
        optimizer.step()
    slots = {"master": torch.cat([parameter.detach() for parameter in parameters])}
    for name in RULES[config.name](config).slots:
        slots[name] = torch.cat([optimizer.state[parameter][name] for parameter in parameters])
    return slots


CONFIGS = {
    "adamw": config_of(lr=0.01, weight_decay=0.1, warmup_steps=2),
    "adamw without decay": config_of(lr=0.01, weight_decay=0.0, betas=(0.0, 0.5), eps=1e-3),
    "sgd": config_of(name="sgd", lr=0.1, weight_decay=0.01, momentum=0.9),
    "sgd without momentum": config_of(name="sgd", lr=0.1, weight_decay=0.01, momentum=0.0),
    "sgd without decay": config_of(name="sgd", lr=0.1, weight_decay=0.0, momentum=0.5),
}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.view(torch.int32).equal(other[name].view(torch.int32)), name


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_have_the_bits_of_torch(name):
    assert_same_bits(updated(CONFIGS[name], []), torch_updated(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [[32], [64, 96, 320, 352, 992], list(range(32, NUM_ELEMENTS, 32))])
def test_cuts_do_not_show_in_the_bits(name, cuts):
    assert_same_bits(updated(CONFIGS[name], []), updated(CONFIGS[name], cuts))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at_once", [2, 3, 100])
def test_blocks_that_are_updated_by_one_call_have_the_bits_of_each_alone(name, at_once):
    cuts = [1, 8, 41, 320, 327, 333, 640, 1000]  # of any length: an end that fills no vector rounds in its own way
    assert_same_bits(updated(CONFIGS[name], cuts), updated(CONFIGS[name], cuts, at_once))


@pytest.mark.parametrize(
    ("name", "slots"),
    [("adamw", ("exp_avg", "exp_avg_sq")), ("sgd", ("momentum_buffer",)), ("sgd without momentum", ())],
)
def test_slots(name, slots):
    assert RULES[CONFIGS[name].name](CONFIGS[name]).slots == slots


def test_only_what_decays_is_decayed():
    slots = {"master": torch.ones(4), "momentum_buffer": torch.zeros(4)}
    config = config_of(name="sgd", weight_decay=0.5, momentum=0.9)
    block = Run(0, 4, slots, ((0, 1), (3, 4)))
    RULES["sgd"](config).update([block], [torch.ones(4)], learning_rate=0.5, num_updates=1)
    assert slots["momentum_buffer"].tolist() == [1.5, 1.0, 1.0, 1.5]
    assert slots["master"].tolist() == [0.25, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 3.0, 1e30])
def test_clipping_is_torchs(norm):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([norm])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm * clip_factor(norm, 1.0) == pytest.approx(float(parameter.grad), rel=1e-6)


def test_clipping_is_switched_off_by_zero():
    assert clip_factor(1e30, 0.0) == 1.0
    assert math.isclose(clip_factor(2.0, 0.5), 0.25, rel_tol=1e-6)


def test_the_updater_of_a_configuration_follows_its_schedule_and_keeps_nothing():
    config = config_of(lr=0.5, warmup_steps=2, schedule="constant")
    updater = ConfiguredOptimizer(config, 10).updater()
    rates = []
    for step in (1, 2, 2, 3):
        updater.committed(step, 0.0, updates=True)
        rates.append(updater.learning_rate)
    assert rates == [0.25, 0.5, 0.5, 0.5]
    assert updater.state() == "" and updater.scalars() == ()
    updater.load("", 3)


def test_the_checkpoint_of_a_scripts_optimizer_is_refused_by_a_configured_one():
    with pytest.raises(CheckpointError, match="of a run whose script brought its optimizer"):
        ConfiguredOptimizer(config_of(), 10).updater().load("something", 3)


@pytest.mark.parametrize("cuts", [[], [32], [64, 96, 992]])
def test_the_average_of_weights_is_the_textbooks(cuts):
    ema, master = initial(), gradients()[0]
    bounds = [0, *cuts, NUM_ELEMENTS]
    for start, stop in zip(bounds, bounds[1:]):
        average([ema[start:stop]], [master[start:stop]], 0.75)
    # Two roundings: of the product, and of the sum with the other one.
    expected = (initial() * 0.75).add(master, alpha=0.25)
    assert ema.view(torch.int32).equal(expected.view(torch.int32))
    assert torch.allclose(ema.double(), 0.75 * initial().double() + 0.25 * master.double())
