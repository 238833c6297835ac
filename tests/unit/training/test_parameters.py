"""Parameter groups: how parameters are chosen by name, and what is wrong with groups."""

import sys

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.errors import EndedBySignal, OptimizerError, StoppedBySignalError
from elaswave.training.parameters import Parameters, groups_of, make_optimizer, optimizer_class_name, stand_ins
from elaswave.training.torch_optimizer import _scheduler_of

NAMES = ["0.weight", "0.bias", "norm.weight", "head.weight", "head.bias"]


@pytest.fixture
def parameters():
    return Parameters((name, torch.nn.Parameter(torch.empty(2, device="meta"))) for name in NAMES)


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def test_they_come_in_the_order_of_the_model(parameters):
    assert parameters.names == NAMES and len(parameters) == 5
    assert [name for name, _ in parameters.items()] == NAMES
    assert all(isinstance(each, torch.nn.Parameter) for each in parameters)


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["*.bias"], ["0.bias", "head.bias"]),
        (["head.*", "0.bias"], ["0.bias", "head.weight", "head.bias"]),
        (["*"], NAMES),
        (["norm.weight"], ["norm.weight"]),
        (["[0n]*.weight"], ["0.weight", "norm.weight"]),
    ],
)
def test_some_are_chosen_by_name_and_the_rest(parameters, patterns, chosen):
    assert parameters.named(*patterns).names == chosen
    assert parameters.except_named(*patterns).names == [name for name in NAMES if name not in chosen]


def test_choices_can_be_narrowed(parameters):
    assert parameters.named("*.weight").except_named("norm.*").names == ["0.weight", "head.weight"]


def test_a_pattern_that_matches_nothing_is_refused(parameters):
    with pytest.raises(
        OptimizerError, match='named "bias"; there are 0.weight, 0.bias, norm.weight, head.weight and 1'
    ):
        parameters.named("*.bias", "bias")
    with pytest.raises(OptimizerError, match=r'named "\*\.Bias"'):
        parameters.except_named("*.Bias")
    with pytest.raises(OptimizerError, match="needs at least one pattern"):
        parameters.named()


def test_stand_ins_have_shapes_and_no_memory():
    shape = make_shape([(1 << 20, 1 << 20), ()])
    assert [tuple(each.shape) for each in stand_ins(shape.tensors)] == [(1 << 20, 1 << 20), ()]
    assert all(each.is_meta and each.requires_grad for each in stand_ins(shape.tensors))


def test_groups_by_name(parameters):
    optimizer = make_optimizer(
        lambda p: sgd([{"params": p.except_named("*.bias")}, {"params": p.named("*.bias")}]), parameters
    )
    assert groups_of(optimizer, parameters) == {name: int(name.endswith("bias")) for name in NAMES}
    named = make_optimizer(lambda p: sgd([{"params": p.items()}]), parameters)
    assert set(groups_of(named, parameters).values()) == {0}


def test_a_parameter_in_no_group_is_named(parameters):
    with pytest.raises(
        OptimizerError, match=r"torch\.optim\.SGD has no parameter group for 0\.bias, head\.bias; every"
    ):
        make_optimizer(lambda p: sgd(p.except_named("*.bias")), parameters)


@pytest.mark.parametrize(
    "groups",
    [
        lambda p: [{"params": p.named("*.bias")}, {"params": p.named("head.*", "*.weight")}],
        lambda p: [[*p, p.items()[4][1]]][0],
    ],
    ids=["two groups", "one group"],
)
def test_a_parameter_in_two_groups_is_named(parameters, groups):
    with pytest.raises(OptimizerError, match=r"head\.bias would be in more than one parameter group"):
        make_optimizer(lambda p: sgd(groups(p)), parameters)


def test_other_tensors_are_refused(parameters):
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(
        OptimizerError, match=r"group 1 of torch\.optim\.SGD holds a tensor of shape \[3\] that is none"
    ):
        make_optimizer(lambda p: sgd([{"params": p}, {"params": [other]}]), parameters)


def test_what_is_no_optimizer_is_refused(parameters):
    with pytest.raises(OptimizerError, match="returns a torch.optim.Optimizer, but it has returned NoneType"):
        make_optimizer(lambda p: None, parameters)


def misses(parameters, learning_rate):
    """Needs one argument too many."""


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=-1.0), r"ValueError: Invalid learning rate: -1\.0"),
        (lambda p: torch.optim.SGD([]), "ValueError: optimizer got an empty parameter list"),
        (lambda p: 1 / 0, "ZeroDivisionError: division by zero"),
        (misses, r"TypeError: misses\(\) missing 1 required positional argument"),
        (lambda p: sys.exit(3), "SystemExit: 3"),
    ],
    ids=["torch's", "empty", "own", "argument", "exit"],
)
def test_errors_of_the_callable_come_with_its_traceback(parameters, factory, words):
    with pytest.raises(OptimizerError, match=f"^optimizer=, called with .*, has raised {words}") as caught:
        make_optimizer(factory, parameters)
    text = str(caught.value)
    assert ("\n\nTraceback (most recent call last):" in text) is (factory is not misses)  # which was never entered
    assert ("test_parameters.py" in text) is (factory is not misses) and "in make_optimizer" not in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EndedBySignal(143), StoppedBySignalError(10, "")], ids=repr)
def test_a_signal_that_comes_meanwhile_is_no_error_of_the_callable(parameters, error):
    def comes(*_: object):
        raise error

    with pytest.raises(type(error)):
        make_optimizer(comes, parameters)
    with pytest.raises(type(error)):
        _scheduler_of(comes, sgd(parameters))


def test_an_optimizer_for_matrices_is_refused_for_what_it_does(parameters):
    with pytest.raises(
        OptimizerError, match=r"takes matrices only \(ValueError: Muon .*update every element by itself"
    ):
        make_optimizer(lambda p: torch.optim.Muon(p), parameters)


def test_classes_are_called_what_a_person_calls_them():
    class Mine(torch.optim.SGD):
        pass

    parameter = [torch.nn.Parameter(torch.zeros(1))]
    assert optimizer_class_name(torch.optim.AdamW(parameter)) == "torch.optim.AdamW"
    assert optimizer_class_name(Mine(parameter, lr=0.1)).endswith("Mine")
