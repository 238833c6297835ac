"""Units of state: layers, what they share, their buffers, and what is frozen."""

import pytest
import torch
from tests.own_models import KINDS, WIDTH, Mix, training_of
from torch import nn

from elaswave.blocks.shapes import FrozenTensor, SharedUse, StateShapes
from elaswave.errors import UsageError
from elaswave.models.layers import Layer, ModelSpec, build_layer
from elaswave.state.flat import FlatLayer, FlatUnit, initial_values, model_shapes


def shapes_of(*layers):
    return model_shapes(ModelSpec(layers, nn.functional.mse_loss))


def state_of(kind):
    model = training_of(*KINDS[kind]()).model
    return StateShapes(tuple(layer.name for layer in model.layers), model_shapes(model), ("master", "exp_avg"))


def test_a_tied_tensor_is_a_unit_of_its_own():
    state = state_of("tied")
    assert state.shared == ((0, 1, 3),)
    unit = state.layers[5]
    assert [(slot.name, slot.shape, slot.decays) for slot in unit.tensors] == [("first.weight", (8, 8), True)]
    assert (unit.num_uses, unit.is_buffers, state.lowest_trained) == (3, False, 0)
    assert [shape.shared for shape in state.layers[:5]] == [
        (SharedUse("weight", 5, 0),),
        (SharedUse("weight", 5, 1),),
        (),
        (SharedUse("weight", 5, 2),),
        (),
    ]
    assert [slot.name for slot in state.layers[1].tensors] == ["second.bias"]
    ids = [slot.id for shape in state.layers for slot in shape.tensors]
    assert ids == list(range(len(ids)))
    assert [state.num_parameters(layer) for layer in range(5)] == [72, 8, 72, 8, 9]
    assert [stored.tensor for stored in state.stored(1)].count("first.weight") == 2


def test_buffers_of_a_layer_are_a_unit_with_one_state():
    state = state_of("normed")
    assert state.shared == ((0,), (1,), (3,))
    unit = state.layers[5]
    assert [(slot.name, slot.dtype, slot.numel, slot.num_values) for slot in unit.tensors] == [
        ("a.norm.running_mean", "float32", 8, 8),
        ("a.norm.running_var", "float32", 8, 8),
        ("a.norm.num_batches_tracked", "int64", 8, 1),
    ]
    assert unit.is_buffers and all(slot.is_buffer and not slot.decays for slot in unit.tensors)
    assert [(each.slot, each.shape, each.dtype) for each in state.stored(1) if "tracked" in each.tensor] == [
        ("master", (), "int64")
    ] * 3


def test_what_is_frozen_has_no_place():
    state = state_of("frozen")
    assert state.lowest_trained == 2
    assert state.layers[0].tensors == ()
    assert state.layers[2].frozen == (
        FrozenTensor("adapted.base.weight", 2, (WIDTH, WIDTH), "bfloat16"),
        FrozenTensor("adapted.base.bias", 2, (WIDTH,), "bfloat16"),
    )
    assert [slot.name for slot in state.layers[2].tensors] == ["adapted.down", "adapted.up"]
    stored = {each.tensor: each for each in state.stored(1) if each.tensor.endswith("base.weight")}
    assert stored["adapted.base.weight"].dtype == "bfloat16"
    assert state.num_parameters(3) == WIDTH * WIDTH + WIDTH


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ({"weight": "a.wait"}, "b.weight is to be one tensor with a.wait, but the model has no parameter a.wait"),
        ({"wait": "a.weight"}, "b.wait is to be one tensor with a.weight, but the model has no parameter b.wait"),
        ({"weight": "c.weight"}, "b.weight is tied to c.weight, which is tied to a.weight; name that one"),
        ({"bias": "a.weight"}, r"b.bias has the shape \[8\], and a.weight \[8, 8\]: one tensor has one shape"),
        ({"weight": "d.weight"}, "b.weight has the type torch.float32, and d.weight torch.bfloat16"),
        ({"weight": "e.weight"}, "b.weight has the requires_grad True, and e.weight False"),
        ({"weight": "b.other"}, "b.weight and b.other are in one layer; assign the same Parameter"),
    ],
)
def test_ties_that_cannot_be_are_refused(ties, message):
    def two():
        module = Mix()
        module.other = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        return module

    with pytest.raises(UsageError, match=message):
        shapes_of(
            Layer("a", Mix),
            Layer("b", two, ties=ties),
            Layer("c", Mix, ties={"weight": "a.weight"}),
            Layer("d", lambda: Mix().to(torch.bfloat16)),
            Layer("e", lambda: Mix().requires_grad_(False)),
        )


def test_a_tie_of_frozen_parameters_that_are_built_apart_is_refused():
    def frozen():
        return Mix().requires_grad_(False)

    with pytest.raises(UsageError, match="b.weight and a.weight are frozen, and built apart"):
        shapes_of(Layer("a", frozen), Layer("b", frozen, ties={"weight": "a.weight"}))


@pytest.mark.parametrize("view", [lambda w: w.view(-1), lambda w: w[2:4], lambda w: w.t()])
def test_views_within_a_layer_are_refused(view):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = nn.Parameter(torch.zeros(4, 6))
            self.part = nn.Parameter(view(self.whole.data))

    with pytest.raises(UsageError, match="parameters l.whole and l.part are different views of the same memory"):
        shapes_of(Layer("l", Views))


def test_parts_of_one_allocation_that_do_not_overlap_are_taken():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            both = torch.zeros(8)
            self.left, self.right = nn.Parameter(both[:4]), nn.Parameter(both[4:])

    (shape,) = shapes_of(Layer("l", Halves))
    assert [slot.name for slot in shape.tensors] == ["l.left", "l.right"]


def test_a_parameter_under_two_names_of_a_layer_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight

    (shape,) = shapes_of(Layer("l", Twice))
    assert [slot.name for slot in shape.tensors] == ["l.one.weight", "l.one.bias", "l.two.bias"]
    layer = FlatLayer(Layer("l", Twice), shape, torch.float32)
    assert layer.module.two.weight is layer.module.one.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_parameters_of_several_layers_are_one_memory(dtype):
    layers = KINDS["tied"]()
    shapes = model_shapes(ModelSpec(tuple(layers), nn.functional.mse_loss))
    unit = FlatUnit(shapes[5], dtype)
    held = [FlatLayer(layers[index], shapes[index], dtype, units={5: unit}) for index in (0, 1, 3)]
    assert unit.flat.count_nonzero() == 0, "a layer does not write what it shares"
    unit.flat.copy_(initial_values(layers[0], shapes[5], 7, layer=0))
    right = build_layer(layers[0], 7, 0).weight.detach().to(dtype)
    for layer in held:
        assert layer.module.weight.equal(right) and layer.module.weight.data_ptr() == unit.flat.data_ptr()
        assert [parameter is layer.module.weight for parameter in layer.parameters] == [False, True]


def test_frozen_parameters_keep_type_and_value_and_take_those_of_a_checkpoint():
    spec = KINDS["frozen"]()[2]
    (shape,) = shapes_of(spec)
    layer = FlatLayer(spec, shape, torch.float32, seed=3)
    assert layer.module.base.weight.dtype == torch.bfloat16
    assert layer.module.base.weight.equal(build_layer(spec, 3, 0).base.weight)
    assert [parameter is layer.module.base.weight for parameter in layer.parameters] == [False, False]
    other = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    changed = FlatLayer(spec, shape, torch.float32, seed=3, frozen={"adapted.base.weight": other})
    assert changed.module.base.weight.data_ptr() == other.data_ptr()


def test_submodules_that_are_built_in_evaluation_stay_in_it():
    spec = KINDS["normed"]()[3]
    shapes = shapes_of(spec)
    layer = FlatLayer(spec, shapes[0], torch.float32, units={1: FlatUnit(shapes[1], torch.float32)})
    for train in (True, False, True):
        layer.set_training(train)
        assert layer.module.training is train and layer.module.map.training is train
        assert layer.module.norm.training is False
