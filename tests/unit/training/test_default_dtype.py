"""Another default type of torch (a script's choice) changes nothing in what elaswave itself makes: it stays float32."""

from collections.abc import Iterator

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.engine.checks import determinism_check
from elaswave.state.sums import ExactAccumulator
from elaswave.training.own_optimizer import OwnOptimizer
from elaswave.training.parameters import float32_by_default

SHAPE = make_shape([(7, 5), (40,)])
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.1),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_tried_and_moves_on_as_with_float32(default_dtype: torch.dtype, name: str) -> None:
    def scheduled(optimizer: torch.optim.Optimizer) -> object:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def found() -> tuple[object, ...]:
        optimizer = OwnOptimizer(OPTIMIZERS[name], scheduled)((SHAPE,))
        updater = optimizer.updater()
        updater.committed(1, 0.5, updates=True)
        return optimizer.slots, optimizer._tried.traits, updater.learning_rate, updater.scalars()

    here = found()
    assert torch.get_default_dtype() is default_dtype
    with float32_by_default():
        expected = found()
    assert str(here) == str(expected)


def test_the_environments_canary_is_that_of_float32(default_dtype: torch.dtype) -> None:
    here = determinism_check.environment.__wrapped__()
    with float32_by_default():
        assert here == determinism_check.environment.__wrapped__()
    drawn = determinism_check.made_up(torch.ones(3, dtype=torch.float32), 5)
    with float32_by_default():
        assert torch.equal(drawn, determinism_check.made_up(torch.ones(3), 5))


def test_a_gradient_that_is_missing_counts_as_float32_zeros(default_dtype: torch.dtype) -> None:
    sums = ExactAccumulator(SHAPE)
    sums.reset([0] * len(SHAPE.tensors))
    assert sums.add([torch.ones(7, 5, dtype=torch.float32), None])
