"""The determinism check: what gives other bits on another worker is refused before it changes one."""

import collections

import pytest
import torch
from tests.unit.engine.test_layer_calls import (
    CASES,
    SIZE,
    Block,
    Head,
    Table,
    assert_same,
    inputs_of,
    make_compute,
    results,
    targets_of,
    train,
)
from tests.unit.engine.test_layer_calls import model_of as plain_model_of
from torch import nn

from elaswave.engine.checks import determinism_check
from elaswave.engine.compute import LayerError
from elaswave.errors import UsageError
from elaswave.models.layers import LossOutput, batch
from elaswave.state.flat import built_sum, model_shapes


def model_of(*builds):
    return plain_model_of(*builds, loss=lambda output, targets: output.square().mean())


def watched(model, layers=None, *, microbatches=(0,), step=3, **options):
    compute = make_compute(model, layers, has_determinism_check=True, **options)
    compute.begin(step, [[40] * len(shape.tensors) for shape in model_shapes(model)])
    train([compute], [range(len(model.layers))], list(microbatches))
    return compute


class Normalised(Block):
    """Writes a buffer, on which its output does not depend."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.map(x))


class DependsOnAddress(Block):
    def forward(self, x):
        return self.map(x) + x.data_ptr() % 4096


class DependsOnParameterAddress(Block):
    def forward(self, x):
        return self.map(x) * (1 + self.map.weight.data_ptr() % 4096)


class Counts(Block):
    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return self.map(x) + Counts.calls


class DrawsItsOwn(Block):
    source = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.map(x) * torch.rand(x.shape, generator=self.source)


class AddressInGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient.data_ptr() % 4096


class DependsOnGradientAddress(Block):
    def forward(self, x):
        return AddressInGradient.apply(self.map(x))


@pytest.mark.parametrize("case", CASES)
def test_the_canary_does_not_show(case):
    model = plain_model_of(*CASES[case])
    plain, with_determinism_check = make_compute(model), make_compute(model, has_determinism_check=True)
    for compute in (plain, with_determinism_check):
        train([compute], [range(len(model.layers))], [0, 1, 2])
    assert_same(results([with_determinism_check]), results([plain]))
    assert (
        with_determinism_check.determinism_hashes.keys() == set(range(len(model.layers)))
        and not plain.determinism_hashes
    )
    assert all(0 < value < 2**62 for value in with_determinism_check.determinism_hashes.values())


@pytest.mark.parametrize("case", CASES)
def test_a_later_holder_finds_the_same(case):
    model = plain_model_of(*CASES[case])
    first = watched(model)
    cut = len(model.layers) // 2
    later = [
        make_compute(model, layers, has_determinism_check=True)
        for layers in (range(cut), range(cut, len(model.layers)))
    ]
    for compute in later:
        compute.begin(17, [[40] * len(layer.shape.tensors) for layer in model_layers(model)])
        for layer in compute.layers.values():
            layer.flat.mul_(1.25)  # training has gone on meanwhile
    train(later, [range(cut), range(cut, len(model.layers))], [2, 1], split=True)
    assert {**later[0].determinism_hashes, **later[1].determinism_hashes} == first.determinism_hashes


def model_layers(model):
    return make_compute(model).layers.values()


def test_another_kernel_of_a_layer_shows():
    class Otherwise(Block):
        def forward(self, x):
            return torch.nn.functional.gelu(self.map(x) * (1 + 2**-20))

    one, other = (
        watched(model_of(Table, Block, Head)).determinism_hashes,
        watched(model_of(Table, Otherwise, Head)).determinism_hashes,
    )
    assert one[1] != other[1] and (one[0], one[2]) == (other[0], other[2])


def test_other_shapes_show():
    model = model_of(Table, Block, Head)
    one, other = watched(model), make_compute(model, has_determinism_check=True)
    other.forward(range(3), 0, inputs_of(0)[:, :5], targets_of(0)[:, :5])
    other.backward(range(3), 0, None)
    assert all(one.determinism_hashes[layer] != other.determinism_hashes[layer] for layer in range(3))


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (DependsOnAddress, "its output"),
        (DependsOnParameterAddress, "its output"),
        (DependsOnGradientAddress, "the gradient of map.weight"),
        (Counts, "its output differs in 192 of 192 elements, by up to 1"),
        (DrawsItsOwn, "its output"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_that_is_not_deterministic_is_refused(layer, what, split):
    compute = make_compute(model_of(Table, layer, Head), has_determinism_check=True)
    with pytest.raises(LayerError, match=f"layer l1 is not deterministic: .* {what}") as raised:
        train([compute], [range(3)], [0], split=split)
    assert isinstance(raised.value.__cause__, UsageError)


def test_nothing_is_left_behind():
    plain = make_compute(model_of(Table, Normalised, Head))
    compute = make_compute(model_of(Table, Normalised, Head), has_determinism_check=True)
    addresses = [p.data_ptr() for layer in compute.layers.values() for p in layer.parameters]
    for each in (plain, compute):
        each.forward(range(3), 0, inputs_of(0), targets_of(0))
    values = [p.clone() for layer in compute.layers.values() for p in layer.module.parameters()]
    for each in (plain, compute):
        each.backward(range(3), 0, None)
    assert [p.data_ptr() for layer in compute.layers.values() for p in layer.parameters] == addresses
    after = [p for layer in compute.layers.values() for p in layer.module.parameters()]
    assert all(one.equal(other) for one, other in zip(values, after, strict=True))
    for each in (plain, compute):
        each.layers[1].buffers.restore()
    for one, other in zip(plain.layers[1].module.buffers(), compute.layers[1].module.buffers(), strict=True):
        assert one.equal(other)
    assert_same(results([compute]), results([plain]))


def test_a_layer_that_takes_no_made_up_numbers_is_known_by_its_shapes():
    class Strict(Block):
        def forward(self, x):
            if not batch().any():
                raise ValueError("no tokens")
            return self.map(x)

    one, other = watched(model_of(Table, Strict, Head)), watched(model_of(Table, Strict, Head), step=9)
    assert one.determinism_hashes == other.determinism_hashes


def test_what_is_moved_lies_elsewhere():
    tensor = torch.randn(3, 5)
    moved = determinism_check.elsewhere(tensor)
    assert moved.equal(tensor) and moved.data_ptr() % 64 == 0
    assert moved.data_ptr() % 4096 != tensor.data_ptr() % 4096
    assert determinism_check.elsewhere(torch.zeros(0, 2)).shape == (0, 2)


def test_the_environment_is_computed_alike_and_leaves_no_trace():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = determinism_check.environment()
    determinism_check.environment.cache_clear()
    assert determinism_check.environment() == one and determinism_check.environment() is determinism_check.environment()
    assert torch.get_rng_state().equal(before)
    assert torch.__version__ in one.text
    assert 0 <= one.determinism_hash < 2**62


def test_another_kernel_shows_in_the_environment(monkeypatch):
    one = determinism_check.environment()
    monkeypatch.setattr(determinism_check.F, "gelu", lambda x: torch.nn.functional.silu(x))
    determinism_check.environment.cache_clear()
    other = determinism_check.environment()
    determinism_check.environment.cache_clear()
    assert one.determinism_hash != other.determinism_hash
    assert [name for name in one.operators if one.operators[name] != other.operators[name]] == ["gelu"]


@pytest.mark.parametrize("different", [torch.zeros(3), torch.zeros(2).double(), torch.tensor([0.0, -0.0]), None])
def test_hashes_tell_types_shapes_and_bits_apart(different):
    assert determinism_check.hash_tensors([torch.zeros(2)]) != determinism_check.hash_tensors([different])
    assert determinism_check.hash_tensors([torch.zeros(2)]) == determinism_check.hash_tensors([torch.zeros(4)[::2]])


class Writes(Block):
    """Has a frozen parameter beside those that are trained, and writes one."""

    def __init__(self, kind):
        super().__init__()
        self.code = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.kind = kind

    def forward(self, x):
        y = self.map(x) + 0 * self.code
        with torch.no_grad():
            if self.kind == "nothing-yet":
                self.map.weight.clamp_(-10, 10)
            elif self.kind == "data":
                self.map.weight.data.mul_(0.999)
            elif self.kind == "frozen":
                self.code.data.add_(y.mean())
            elif self.kind == "another":
                self.map.weight.data = self.map.weight.data.clone()
        return y


@pytest.mark.parametrize(
    ("kind", "name"),
    [("nothing-yet", "map.weight"), ("data", "map.weight"), ("frozen", "code"), ("another", "map.weight")],
)
def test_a_forward_that_writes_parameters_is_refused(kind, name):
    compute = make_compute(model_of(Table, lambda: Writes(kind), Head), has_determinism_check=True)
    with pytest.raises(LayerError, match=f"the forward of layer l1 writes its parameter {name}: ") as raised:
        train([compute], [range(3)], [0])
    assert isinstance(raised.value.__cause__, UsageError)
    compute = make_compute(model_of(Table, lambda: Writes("none"), Head), has_determinism_check=True)
    train([compute], [range(3)], [0])


@pytest.mark.parametrize("what", ["trained", "frozen", "buffer"])
def test_what_is_built_shows_and_what_is_trained_since_does_not(what):
    def block(value):
        made = Writes("none")
        made.register_buffer("table", torch.zeros(3), persistent=False)
        {"trained": made.map.weight.data[1], "frozen": made.code.data, "buffer": made.table}[what].fill_(value)
        return made

    def determinism_hashes(value, trained_since=0.0):
        model = model_of(Table, lambda: block(value), Head)
        compute = make_compute(model, has_determinism_check=True)
        compute.layers[1].flat.add_(trained_since)
        train([compute], [range(3)], [0])
        return compute.determinism_hashes

    one, other = determinism_hashes(1.0), determinism_hashes(2.0)
    assert one == determinism_hashes(1.0, trained_since=3.0)
    assert [layer for layer in one if one[layer] != other[layer]] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_the_sum_of_built_values_sees_every_element(dtype):
    def table(*values):
        module = nn.Module()
        module.register_buffer("empty", torch.zeros(0, 2))
        module.register_buffer("table", torch.tensor(values, dtype=dtype))
        return module

    nothing, first, last = (built_sum(table(*(place == where for where in range(9)))) for place in (9, 0, 8))
    assert nothing not in (first, last)


CALLS = collections.defaultdict(int)
GENERATOR = torch.Generator().manual_seed(3)


class Balanced(nn.Module):
    """Divides by a running mean, which it keeps in a buffer, in an attribute, or in nothing that torch knows."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.mean = torch.ones(())
        if kept == "buffer":
            del self.mean
            self.register_buffer("mean", torch.ones(()))

    def forward(self, output, targets):
        loss = output.square().mean()
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


def counting(output, targets):
    CALLS["loss"] += 1
    return output.square().mean() * min(1.0, CALLS["loss"] / 100)


def counting_in_a_closure():
    calls = iter(range(1, 1000))
    return lambda output, targets: LossOutput(output.square().sum() * next(calls), 3)


def drawing(output, targets):
    return (output * torch.rand(output.shape, generator=GENERATOR)).mean()


class OnlyInGradient(torch.autograd.Function):
    """Its backward counts."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        OnlyInGradient.calls += 1
        return gradient * OnlyInGradient.calls


LOSSES_THAT_KEEP = {
    "buffer": (Balanced("buffer"), "writes its mean: "),
    "attribute": (Balanced("attribute"), "is not deterministic: .* its output differs"),
    "defaultdict": (counting, "is not deterministic: .* its output differs"),
    "closure, with counts": (counting_in_a_closure(), "is not deterministic: .* output 0 differs"),
    "own generator": (drawing, "is not deterministic: .* its output differs"),
    "in its backward": (
        lambda output, targets: OnlyInGradient.apply(output).mean(),
        "is not deterministic: .* the gradient of its input differs",
    ),
}


@pytest.mark.parametrize(("loss", "what"), LOSSES_THAT_KEEP.values(), ids=LOSSES_THAT_KEEP)
def test_a_loss_that_keeps_something_is_refused(loss, what):
    compute = make_compute(plain_model_of(Table, Head, loss=loss), has_determinism_check=True)
    with pytest.raises(LayerError, match=rf"the loss {what}.*\(loss\)\)$"):
        train([compute], [range(2)], [0])


class Smooth(nn.Module):
    """A loss with state of its own that nothing writes, and with draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.bias = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, output, targets):
        return LossOutput(nn.functional.dropout(output * self.scale + self.bias, 0.25).sum(), targets.numel())


def test_a_loss_that_is_run_twice_counts_once():
    calls = []
    loss = Smooth()

    def noted(output, targets):
        calls.append(1)
        return loss(output, targets)

    for own in (noted, loss):
        model = plain_model_of(Table, Head, loss=own)
        plain, with_determinism_check = make_compute(model), make_compute(model, has_determinism_check=True)
        for compute in (plain, with_determinism_check):
            train([compute], [range(2)], [0, 1, 2])
        assert_same(results([with_determinism_check]), results([plain]))
    assert len(calls) == 3 + 4


def test_parameters_are_as_before_where_no_room_is_left_for_others():
    layer = Block()
    before = [each.data_ptr() for each in layer.parameters()]
    made = []

    def make(name, values):
        if made:
            raise MemoryError
        made.append(name)
        return torch.zeros_like(values)

    with pytest.raises(MemoryError), determinism_check.with_parameters(layer, make):
        pass
    assert len(before) > 1 and [each.data_ptr() for each in layer.parameters()] == before
