"""Forward and backward layer by layer: coverage, boundaries, recomputation, positions of errors."""

import math

import pytest
import torch
from tests.unit.held import make_held
from torch import nn

from elaswave.engine.checks.values import at_boundary
from elaswave.engine.compute import ALONE, Compute, ComputeRules, LayerError, Surroundings
from elaswave.models.layers import Layer, ModelSpec, build_layer, linear
from elaswave.protocol.step.ballot import LOSS, NonFinite, coverage_key, expected_coverage, loss_key
from elaswave.state.sums import ExactAccumulator
from elaswave.training.definition import build_model

SEED, STEP = 5, 3
GPT = build_model("gpt", vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, context_length=8, dropout=0.2)


class Table(nn.Module):
    """A first layer: tokens to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, tokens):
        return self.table(tokens)


class Strange(nn.Module):
    """A layer with a parameter that nothing uses and an output that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.map(x).transpose(0, 1)


class Cut(nn.Module):
    """A layer through which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x.detach() * self.vector


def mean_square(output, targets):
    return output.square().mean()


def make_compute(
    model, layers=None, *, recompute=False, has_determinism_check=False, surroundings=ALONE, dtype=torch.float32
):
    held, units, shapes = make_held(model, layers, SEED, dtype)
    compute = Compute(
        ComputeRules(model, SEED, recompute=recompute, has_determinism_check=has_determinism_check),
        held,
        {index: ExactAccumulator(shapes[index]) for index in (*held, *units)},
        surroundings=surroundings,
    )
    compute.begin(STEP, [[40] * len(shape.tensors) for shape in shapes])
    return compute


def batch(microbatch):
    generator = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, 50, (4, 9), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run(compute, microbatches, num_layers):
    for microbatch in microbatches:
        tokens, targets = batch(microbatch)
        compute.forward(range(num_layers), microbatch, tokens, targets)
        assert compute.backward(range(num_layers), microbatch, None) is None


def sums(compute):
    return {index: accumulator.sum.clone() for index, accumulator in compute.accumulators.items()}


def model_of(*modules, loss=mean_square):
    return ModelSpec(tuple(Layer(f"l{index}", module) for index, module in enumerate(modules)), loss)


def run_split(compute, microbatches, num_layers):
    """All first halves, then all second ones, in another order."""
    for microbatch in microbatches:
        tokens, targets = batch(microbatch)
        compute.forward(range(num_layers), microbatch, tokens, targets)
        assert compute.backward_input(range(num_layers), microbatch, None) is None
    for microbatch in reversed(microbatches):
        compute.backward_weights(range(num_layers), microbatch)


def test_coverage_counts_what_was_added():
    compute = make_compute(GPT)
    run(compute, [0, 2], 4)
    assert (
        compute.coverage
        == (sum(coverage_key(layer, m) for layer in range(4) for m in (0, 2)) + loss_key(0) + loss_key(2)) % 2**64
    )
    assert compute.counts == {(layer, m): 1 for layer in (*range(4), LOSS) for m in (0, 2)}
    run(compute, [1], 4)
    assert compute.coverage == expected_coverage(4, 3)
    run(compute, [1], 4)
    assert compute.coverage != expected_coverage(4, 3)
    assert compute.counts[3, 1] == 2


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_cuts_between_workers_and_recomputation_do_not_show(cut, recompute):
    whole = make_compute(GPT)
    run(whole, [0, 1], 4)
    front = make_compute(GPT, range(cut), recompute=recompute)
    back = make_compute(GPT, range(cut, 4), recompute=recompute)
    for microbatch in (1, 0):
        tokens, targets = batch(microbatch)
        # What travels arrives in other memory.
        value = front.forward(range(cut), microbatch, tokens, None).clone()
        back.forward(range(cut, 4), microbatch, value, targets)
        gradient = back.backward(range(cut, 4), microbatch, None)
        assert front.backward(range(cut), microbatch, gradient.clone()) is None
    together = sums(front) | sums(back)
    assert together.keys() == sums(whole).keys()
    assert all(together[index].equal(total) for index, total in sums(whole).items())
    assert back.losses == whole.losses and front.losses == {}
    assert (front.coverage + back.coverage) % 2**64 == whole.coverage


def test_gradients_are_those_of_ordinary_autograd():
    model = build_model("gpt", vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, context_length=8, dropout=0.0)
    compute = make_compute(model)
    run(compute, [0], 4)
    layers = [build_layer(spec, SEED, index) for index, spec in enumerate(model.layers)]
    value, targets = batch(0)
    for layer in layers:
        value = layer(value)
    loss = model.loss(value, targets)
    loss.backward()
    assert compute.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    maxima = [float(parameter.grad.abs().max()) for layer in layers for parameter in layer.parameters()]
    ours = [maximum for accumulator in compute.accumulators.values() for maximum in accumulator.maxima]
    assert ours == pytest.approx(maxima, rel=1e-4)


def test_dropout_depends_on_step_and_microbatch_alone():
    one, other = make_compute(GPT), make_compute(GPT)
    run(one, [0, 1], 4)
    run(other, [1, 0], 4)
    assert one.losses == other.losses
    other.begin(STEP + 1, [[40] * len(layer.shape.tensors) for layer in other.layers.values()])
    run(other, [1, 0], 4)
    assert one.losses != other.losses


def test_boundaries_are_contiguous_and_aligned():
    plain = torch.zeros(6, 4)
    assert at_boundary(plain) is plain
    across = torch.arange(24.0).view(6, 4).t()
    assert at_boundary(across).is_contiguous() and at_boundary(across).equal(across)
    shifted = torch.arange(100.0)[3:50]
    assert shifted.data_ptr() % 64 and at_boundary(shifted).data_ptr() % 64 == 0
    assert at_boundary(shifted).equal(shifted)


def test_unused_parameters_and_strange_strides_are_taken():
    model = model_of(Table, Strange, Strange)
    compute = make_compute(model)
    tokens, targets = batch(0)
    output = compute.forward(range(3), 0, tokens, targets)
    assert output.is_contiguous()
    compute.backward(range(3), 0, None)
    maxima = dict(zip((slot.name for slot in compute.accumulators[1].shape.tensors), compute.accumulators[1].maxima))
    assert maxima["l1.unused"] == 0.0
    assert maxima["l1.map.weight"] > 0.0


def test_where_no_gradient_flows_zeros_are_passed_on():
    compute = make_compute(model_of(Table, Cut))
    tokens, targets = batch(0)
    compute.forward(range(2), 0, tokens, targets)
    gradient = compute.backward(range(1, 2), 0, None)
    assert gradient.shape == (4, 8, 4) and gradient.count_nonzero() == 0
    assert compute.backward(range(1), 0, gradient) is None
    assert compute.coverage == expected_coverage(2, 1)


def test_a_layer_without_parameters_is_covered_as_well():
    compute = make_compute(model_of(Table, nn.Tanh, Cut))
    run(compute, [0], 3)
    assert compute.coverage == expected_coverage(3, 1)


def test_transfers_are_looked_after_between_layers():
    calls = []

    class Counting(Surroundings):
        def check(self):
            calls.append(1)

    compute = make_compute(GPT, surroundings=Counting())
    run(compute, [0], 4)
    assert len(calls) == 8


def test_an_evaluation_keeps_nothing_and_drops_nothing():
    compute = make_compute(GPT)
    tokens, targets = batch(0)
    compute.forward(range(4), 0, tokens, targets, train=False)
    first = compute.losses[0]
    compute.begin(STEP + 1, [[40] * len(layer.shape.tensors) for layer in compute.layers.values()])
    compute.forward(range(4), 0, tokens, targets, train=False)
    assert compute.losses[0] == first
    with pytest.raises(KeyError):
        compute.backward(range(4), 0, None)
    run(compute, [0], 4)  # training goes on with dropout
    assert compute.losses[0] != first


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_an_error_carries_its_position(where):
    class Bad(nn.Module):
        def forward(self, x):
            if where == "forward":
                raise RuntimeError("bad luck")
            if where == "backward":
                x.register_hook(lambda gradient: 1 / 0)
            return x * 1.0

    def bad_loss(output, targets):
        if where == "loss":
            raise RuntimeError("bad luck")
        return output.mean()

    compute = make_compute(model_of(Table, Bad, loss=bad_loss))
    tokens, targets = batch(0)
    with pytest.raises(LayerError) as raised:
        compute.forward(range(2), 6, tokens, targets)
        compute.backward(range(2), 6, None)
    position = raised.value.position
    assert (position.step, position.microbatch) == (STEP, 6)
    assert (position.layer, position.layer_name) == ((2, "loss") if where == "loss" else (1, "l1"))
    assert isinstance(raised.value.__cause__, ZeroDivisionError if where == "backward" else RuntimeError)
    assert str(position) in str(raised.value)


def test_the_first_value_that_is_not_finite_is_kept():
    class Spoil(nn.Module):
        def forward(self, x):
            return x + (x * 0.0).abs().sqrt()  # the gradient of a square root at zero is infinite

    compute = make_compute(model_of(Table, Spoil, Cut, loss=lambda output, targets: output.sum() * math.inf))
    tokens, targets = batch(0)
    compute.forward(range(3), 4, tokens, targets)
    assert compute.nonfinite == NonFinite(4, 3)
    compute.forward(range(3), 2, tokens, targets)
    assert compute.nonfinite == NonFinite(2, 3)
    compute.backward(range(3), 2, None)
    assert compute.nonfinite == NonFinite(2, 3)
    compute.begin(STEP, [[40] * len(layer.shape.tensors) for layer in compute.layers.values()])
    assert compute.nonfinite is None


def test_a_gradient_that_is_not_finite_is_noted_with_its_layer():
    class Spoil(nn.Module):
        def forward(self, x):
            return x + (x * 0.0).abs().sqrt()

    compute = make_compute(model_of(Table, Spoil))
    run(compute, [1], 2)
    assert compute.nonfinite == NonFinite(1, 0)
    assert math.isfinite(compute.losses[1])
    assert compute.coverage == coverage_key(0, 1) + coverage_key(1, 1) + loss_key(1) & 2**64 - 1


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_split_backward_has_the_bits_of_the_whole(family, dtype, recompute, dropout):
    heads = {"num_kv_heads": 2} if family == "llama" else {}
    model = build_model(
        family, vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, context_length=8, dropout=dropout, **heads
    )
    whole = make_compute(model, dtype=dtype)
    run(whole, range(4), 4)
    front = make_compute(model, range(2), recompute=recompute, dtype=dtype)
    back = make_compute(model, range(2, 4), recompute=recompute, dtype=dtype)
    for microbatch in range(4):
        tokens, targets = batch(microbatch)
        value = front.forward(range(2), microbatch, tokens, None).clone()
        back.forward(range(2, 4), microbatch, value, targets)
        gradient = back.backward_input(range(2, 4), microbatch, None)
        assert front.backward_input(range(2), microbatch, gradient.clone()) is None
    assert (front.counts, back.counts) == ({}, {(LOSS, microbatch): 1 for microbatch in range(4)})
    for microbatch in (2, 0, 3, 1):
        back.backward_weights(range(2, 4), microbatch)
        front.backward_weights(range(2), microbatch)
    together = sums(front) | sums(back)
    assert all(together[index].equal(total) for index, total in sums(whole).items())
    maxima = {index: accumulator.maxima for index, accumulator in whole.accumulators.items()}
    assert {index: each.maxima for part in (front, back) for index, each in part.accumulators.items()} == maxima
    assert (front.coverage + back.coverage) % 2**64 == whole.coverage == expected_coverage(4, 4)
    # Every layer that has a gradient of its input was cut, so W really was left to do.
    assert front._splits | back._splits == {1: True, 2: True, 3: True}


class Twice(nn.Module):
    """Uses one parameter at two places of the way: no cut gives it a half of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4) * 0.5)

    def forward(self, x):
        return (x @ self.matrix).tanh() @ self.matrix


class Doubtful(torch.autograd.Function):
    """Its results depend on which are asked for together, as a kernel's may."""

    @staticmethod
    def forward(ctx, x, vector):
        ctx.save_for_backward(x, vector)
        return x * vector

    @staticmethod
    def backward(ctx, gradient):
        x, vector = ctx.saved_tensors
        Doubtful.calls += 1
        return gradient * vector, (gradient * x).flatten(0, -2).sum(0) * (1 + 2**-20 * Doubtful.calls)


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Doubtful.apply(x, self.vector)


class Identity(nn.Module):
    def forward(self, x):
        return x


class Made(nn.Module):
    """Its first matrix is made of parameters by a linear map; its second one depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Parameter(torch.linspace(-1.0, 1.0, 8).view(4, 2))
        self.factor = nn.Parameter(torch.linspace(1.0, 2.0, 8).view(4, 2))
        self.matrix = nn.Parameter(torch.eye(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return linear(linear(x, linear(self.seed, self.factor, None), None), self.matrix * x.mean(), self.bias)


@pytest.mark.parametrize(
    ("layer", "can_be_split"),
    [(Strange, True), (Cut, False), (Twice, False), (nn.Tanh, True), (Identity, True), (Made, True)],
)
def test_any_layer_can_be_run_in_halves(layer, can_be_split):
    model = model_of(Table, layer, Strange)
    whole, halves = make_compute(model), make_compute(model)
    run(whole, range(3), 3)
    run_split(halves, range(3), 3)
    assert all(sums(halves)[index].equal(total) for index, total in sums(whole).items())
    assert halves.coverage == whole.coverage == expected_coverage(3, 3)
    assert halves._splits == {1: can_be_split, 2: True}


def test_a_layer_whose_halves_round_otherwise_is_not_split():
    Doubtful.calls = 0
    compute = make_compute(model_of(Table, Careless))
    run_split(compute, range(3), 2)
    assert compute._splits == {1: False}
    assert Doubtful.calls == 3 + 2  # the first time in three ways: whole, and in each half


def test_whether_a_layer_can_be_split_is_not_judged_by_values_that_are_not_finite():
    class Spoil(nn.Module):
        def forward(self, x):
            return x + (x * 0.0).abs().sqrt()

    compute = make_compute(model_of(Table, Strange, Spoil))
    run_split(compute, [1], 3)
    assert compute._splits == {}
    assert compute.nonfinite == NonFinite(1, 1)


def test_between_the_halves_a_new_attempt_forgets_everything():
    compute = make_compute(GPT)
    tokens, targets = batch(0)
    compute.forward(range(4), 0, tokens, targets)
    compute.backward_input(range(4), 0, None)
    compute.begin(STEP, [[40] * len(layer.shape.tensors) for layer in compute.layers.values()])
    compute.backward_weights(range(4), 0)  # nothing is left of it
    assert compute.coverage == 0 and compute.counts == {}
    assert not any(total.any() for total in sums(compute).values())
