"""Modules that exist already: their names, ties, modes, and copies."""

import pytest
import torch
from tests.own_models import Mix
from torch import nn

from elaswave.api.given import OwnModelSpec
from elaswave.engine.checks.determinism_check import with_parameters
from elaswave.engine.checks.values import Guarded
from elaswave.errors import UsageError
from elaswave.models.admission import CopyOf
from elaswave.models.layers import Layer, ModelSpec
from elaswave.state.flat import model_shapes


def layers_of(model):
    return OwnModelSpec(model, nn.functional.mse_loss).spec.layers


def test_names_are_those_of_a_sequential():
    sequential = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3))
    shapes = model_shapes(ModelSpec(layers_of(sequential), nn.functional.mse_loss))
    names = [slot.name for shape in shapes for slot in shape.tensors]
    assert sorted(names) == sorted(sequential.state_dict())
    mixed = layers_of([nn.Linear(2, 2), Layer("own", nn.Tanh), nn.Tanh()])
    assert [layer.name for layer in mixed] == ["0", "own", "2"]


def test_a_copy_has_the_instances_values_and_shares_what_is_frozen():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3).requires_grad_(False))
    (layer,) = layers_of([module])
    copy = layer.build()
    assert copy is not module and copy[0].weight.equal(module[0].weight)
    copy[0].weight.data.zero_()
    assert module[0].weight.count_nonzero()
    assert copy[1].weight.data_ptr() == module[1].weight.data_ptr()


class Tagged(nn.Parameter):
    """A class of Parameters of a script's own."""


def test_what_is_made_of_a_copy_shows_in_no_other_and_not_in_the_instance():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    module[1].weight = module[0].weight
    module[0].bias = Tagged(torch.ones(3), requires_grad=False)
    module[0].bias.note = "kept"
    layer, _ = layers_of([module, nn.Linear(3, 1)])
    before = module[0].weight.clone()
    one, other = layer.build(), layer.build()
    guards = [Guarded(module), Guarded(other)]
    assert one[1].weight is one[0].weight
    assert isinstance(one[0].bias, Tagged) and one[0].bias.note == "kept"
    with with_parameters(one, lambda name, values: torch.zeros_like(values)):
        assert [guard.written() for guard in guards] == [None, None]
    one[0].weight.data = torch.zeros(3, 3)
    one.to("meta")  # as to a device
    assert [guard.written() for guard in guards] == [None, None]
    assert all(each.weight.equal(before) for each in (module[0], other[0], layer.build()[0]))


def test_what_cannot_be_copied_is_refused():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.Parameter(torch.ones(1))
            self.product = self.leaf * 2  # not a leaf

    message = r"layer 3 \(Holds\) cannot be copied: .* Give it as elaswave.Layer\('3', build\)"
    with pytest.raises(UsageError, match=f"(?s){message}"):
        CopyOf(Holds(), "3")()


def test_a_shared_parameter_is_tied_under_its_first_name():
    first, middle, last = Mix(), Mix(), Mix()
    last.weight = first.weight
    layers = layers_of([first, middle, last])
    assert [dict(layer.ties) for layer in layers] == [{}, {}, {"weight": "0.weight"}]
    shapes = model_shapes(ModelSpec(layers, nn.functional.mse_loss))
    assert [shape.users for shape in shapes] == [(), (), (), (0, 2)]
    assert [slot.name for slot in shapes[3].tensors] == ["0.weight"]


@pytest.mark.parametrize("view", [lambda w: w.view(-1), lambda w: w[:4], lambda w: w.t(), lambda w: w])
def test_a_view_of_another_layers_memory_is_refused(view):
    first, last = Mix(), Mix()
    last.weight = nn.Parameter(view(first.weight.data))
    with pytest.raises(UsageError, match=r"parameters 0.weight and 1.weight are different views of the same memory"):
        layers_of([first, last])


def test_modes_stay_unless_the_whole_model_is_in_evaluation():
    frozen = nn.BatchNorm1d(3).eval()
    layers_of([nn.Linear(2, 3), frozen])
    assert not frozen.training
    whole = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    layers_of(whole)
    assert all(module.training for module in whole)
