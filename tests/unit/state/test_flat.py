"""Layers as flat tensors: where parameters lie, aligned, the same in every dtype and on the meta device."""

import pytest
import torch
from torch import nn

from elaswave.blocks.shapes import ALIGNMENT_ELEMENTS, Segment, align, all_tensors, segments
from elaswave.models.layers import Layer, ModelSpec, build_layer
from elaswave.state.flat import FlatLayer, initial_values, model_shapes
from elaswave.training.definition import build_model


class Odd(nn.Module):
    """A layer whose parameters have sizes that fit nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


MODEL = ModelSpec((Layer("odd", Odd), Layer("plain", nn.Identity), Layer("last", Odd)), nn.functional.mse_loss)


@pytest.mark.parametrize(("count", "aligned"), [(0, 0), (1, 32), (32, 32), (33, 64)])
def test_align(count, aligned):
    assert align(count) == aligned


def test_every_tensor_has_its_place():
    first, plain, last = model_shapes(MODEL)
    assert [(slot.id, slot.name, slot.shape, slot.offset, slot.stop, slot.decays) for slot in first.tensors] == [
        (0, "odd.scale", (), 0, 1, False),
        (1, "odd.inner.weight", (7, 5), 32, 67, True),
        (2, "odd.inner.bias", (7,), 96, 103, False),
    ]
    assert first.size == 128
    assert (plain.tensors, plain.size) == ((), 0)
    assert [slot.id for slot in all_tensors([first, plain, last])] == [0, 1, 2, 3, 4, 5]
    assert [slot.layer for slot in last.tensors] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_parameters_are_aligned_views_of_one_tensor(family, dtype):
    model = build_model(
        family,
        vocab_size=97,
        num_layers=1,
        hidden_size=36,
        num_heads=3,
        context_length=10,
        dropout=0.0,
        intermediate_size=50,
    )
    for spec, shape in zip(model.layers, model_shapes(model), strict=True):
        layer = FlatLayer(spec, shape, dtype)
        layer.flat.copy_(torch.arange(shape.size))
        for slot, (name, parameter) in zip(shape.tensors, layer.module.named_parameters(), strict=True):
            assert slot.name == f"{spec.name}.{name}"
            assert slot.offset % ALIGNMENT_ELEMENTS == 0
            assert parameter.data_ptr() % 64 == 0
            assert parameter.dtype == dtype
            assert parameter.shape == slot.shape
            assert parameter.detach().reshape(-1).equal(layer.flat[slot.offset : slot.stop])


def test_initial_values_are_those_of_the_built_layer_and_padding_is_zero():
    shape = model_shapes(MODEL)[2]
    flat = initial_values(MODEL.layers[2], shape, seed=5)
    module = build_layer(MODEL.layers[2], 5, 2)
    covered = torch.zeros(shape.size, dtype=torch.bool)
    for slot, parameter in zip(shape.tensors, module.parameters(), strict=True):
        assert flat[slot.offset : slot.stop].equal(parameter.detach().reshape(-1))
        covered[slot.offset : slot.stop] = True
    assert flat[~covered].count_nonzero() == 0
    assert flat.equal(initial_values(MODEL.layers[2], shape, seed=5))
    assert not flat.equal(initial_values(MODEL.layers[2], shape, seed=6))


def test_segments_are_the_tensors_parts_of_a_run():
    shape = model_shapes(MODEL)[0]
    scale, weight, bias = shape.tensors
    assert list(segments(shape, 0, shape.size)) == [
        Segment(scale, 0, 1, 0),
        Segment(weight, 32, 67, 0),
        Segment(bias, 96, 103, 0),
    ]
    assert list(segments(shape, 40, 100)) == [Segment(weight, 0, 27, 8), Segment(bias, 56, 60, 0)]
    assert list(segments(shape, 67, 96)) == []
