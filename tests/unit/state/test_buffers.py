"""Buffers of a module: what a forward begins with, what it leaves, and what nothing may change."""

import pytest
import torch
from tests.own_models import Normed
from torch import nn

from elaswave.blocks.shapes import WHOLE_BYTES
from elaswave.errors import UsageError
from elaswave.models.layers import Layer, ModelSpec
from elaswave.state.flat import (
    FLOATS,
    FlatLayer,
    FlatUnit,
    buffer_from_float32,
    buffer_to_float32,
    initial_values,
    model_shapes,
    persistent_buffers,
)


def made(build):
    """A layer and the unit of its buffers, with initial values."""
    model = ModelSpec((Layer("l", build),), nn.functional.mse_loss)
    shapes = model_shapes(model)
    units = {shape.layer: FlatUnit(shape, torch.float32) for shape in shapes[1:]}
    for unit in units.values():
        unit.flat.copy_(initial_values(model.layers[0], unit.shape, 0, layer=0))
    return FlatLayer(model.layers[0], shapes[0], torch.float32, units=units)


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE_BYTES])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_buffers_of_every_type_keep_their_bits_in_float32(dtype, shape):
    own = getattr(torch, dtype)
    buffer = torch.randn(shape).mul(2**7).to(own)
    if dtype.startswith("int"):
        buffer = torch.full(shape, torch.iinfo(own).min + 1, dtype=own)
    values = buffer_to_float32(buffer)
    assert values.dtype == torch.float32 and values.shape == (buffer.numel() * WHOLE_BYTES.get(dtype, 1),)
    assert buffer_from_float32(values, own).view(shape).equal(buffer)
    assert dtype in FLOATS or (values.min() >= 0 and values.max() <= 255)


class Odd(nn.Module):
    """One buffer under two names, one that is not persistent, one that is missing."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("same", self.count)
        self.register_buffer("constant", torch.arange(4.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.count += 1
        assert self.same is self.count
        return x * self.constant


def test_only_persistent_buffers_are_state_and_each_once():
    assert list(persistent_buffers(Odd())) == ["count"]
    layer = made(Odd)
    assert [slot.name for slot in layer.buffers.tensors] == ["l.count"]
    for _ in range(2):
        layer.buffers.restore()
        layer.module(torch.ones(4))
        assert layer.module.count == 1 and layer.module.same is layer.module.count
        assert buffer_from_float32(layer.buffers.left()[0], torch.int64).item() == 1


def test_every_forward_begins_with_the_steps_statistics():
    layer, alone = made(Normed), Normed()
    alone.load_state_dict(layer.module.state_dict())
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(5, 8, generator=generator) for _ in range(3)]
    outputs, left = [], []
    for values in batches:
        layer.buffers.restore()
        outputs.append(layer.module(values))
        left.append(layer.buffers.left())
    for values, output, found in zip(batches, outputs, left, strict=True):
        fresh = Normed()
        fresh.load_state_dict(alone.state_dict())
        assert fresh(values).equal(output)
        assert found[0].equal(fresh.norm.running_mean) and found[1].equal(fresh.norm.running_var)
        assert buffer_from_float32(found[2], torch.int64).item() == 1
    assert layer.buffer_unit.flat.equal(made(Normed).buffer_unit.flat), "the step's buffers stay what they were"
    torch.stack(outputs).sum().backward()  # no graph was spoilt by the forwards that came after it


def test_what_the_vote_is_told_of_writes():
    layer = made(Normed)
    layer.buffers.restore()
    unwritten = layer.buffers.writes(layer.buffers.left())
    layer.module(torch.randn(5, 8))
    written = layer.buffers.writes(layer.buffers.left())
    assert [first for first, _ in unwritten[:2]] == [0, 0] and [first for first, _ in written[:2]] == [1, 1]
    assert written[2] != unwritten[2] and written[2][0] == -written[2][1] >= 0
    layer.buffers.restore()
    layer.module(torch.randn(5, 8))
    assert layer.buffers.writes(layer.buffers.left())[2] == written[2], "every micro-batch counts from the same number"


@pytest.mark.parametrize("how", ["in place", "replaced", "by a kernel"])
def test_a_buffer_that_is_not_persistent_begins_every_forward_as_built(how):
    class Tracks(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.full((8,), 0.5), persistent=False)
            self.register_buffer("var", torch.ones(8), persistent=False)

        def forward(self, x):
            if how == "in place":
                self.mean += 1
            elif how == "replaced":
                self.mean = self.mean + 1
            else:
                nn.functional.batch_norm(x, self.mean, self.var, training=True)
            return x + self.mean

    layer = made(Tracks)
    assert layer.buffer_unit is None
    values = torch.randn(5, 8)
    outputs = []
    for _ in range(12):
        layer.buffers.restore()
        assert layer.module.mean.eq(0.5).all() and layer.module.var.eq(1).all()
        outputs.append(layer.module(values))
    assert all(output.equal(outputs[0]) for output in outputs)


def test_an_untouched_constant_is_never_copied():
    layer = made(Odd)
    constant = layer.module.constant
    for _ in range(12):
        layer.buffers.restore()
        layer.module(torch.ones(4))
    assert layer.module.constant is constant


def test_a_buffer_that_changes_its_shape_is_refused():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.detach()[:1, 0]])
            return x

    layer = made(Grows)
    layer.buffers.restore()
    layer.module(torch.ones(4, 8))
    with pytest.raises(UsageError, match=r"has made buffer l.seen torch.float32 \[2\]; it was torch.float32 \[1\]"):
        layer.buffers.left()


def test_a_constant_that_is_not_finite_is_left_alone_and_may_not_be_written():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

        def forward(self, x):
            return x

    layer = made(Masks)
    layer.buffers.restore()
    assert layer.module.mask.tolist() == [0.0, -torch.inf]
    left = layer.buffers.left()
    assert left[0].tolist() == [0.0, 0.0] and layer.buffers.writes(left) == [(0, 0)]
    layer.module.mask[0] = 1.0
    with pytest.raises(UsageError, match="writes buffer l.mask, which holds values that are not finite"):
        layer.buffers.left()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_buffer_whose_sums_would_not_be_exact_is_refused(dtype):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("wide", torch.zeros(2, dtype=dtype))

    with pytest.raises(UsageError, match=r"buffer l.wide is of type \w+; persistent buffers can be float32"):
        made(Wide)
