"""What layers share, what is frozen, and buffers, in the computation and the sums of one worker and of several."""

import dataclasses

import pytest
import torch
from tests.integration.jobs import small_config
from tests.own_models import KINDS, WIDTH, Head, Mix, Normed, Points, mean_square, settings_of, training_of
from tests.unit.held import make_held
from torch import nn

from elaswave.blocks.shapes import StateShapes
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.compute import Compute, ComputeRules, LayerError
from elaswave.errors import UsageError
from elaswave.models.layers import Layer, ModelSpec, build_layer
from elaswave.protocol.step.ballot import expected_coverage
from elaswave.state.sums import ExactAccumulator, reduced_gradient

SEED, STEP, N = 5, 3, 3
EXPONENT = 30


def make(kind, layers=None, *, recompute=False):
    """A worker that runs these layers, with initial values."""
    model = kind if isinstance(kind, ModelSpec) else training_of(*KINDS[kind]()).model
    held, units, shapes = make_held(model, layers, SEED)
    state = StateShapes(tuple(layer.name for layer in model.layers), shapes, ("master",))
    compute = Compute(
        ComputeRules(model, SEED, recompute=recompute, lowest_trained=state.lowest_trained),
        held,
        {unit: ExactAccumulator(shapes[unit]) for unit in (*held, *units)},
    )
    compute.begin(STEP, [[EXPONENT] * len(shape.tensors) for shape in shapes])
    return compute, state


def batch(microbatch):
    return Points().batch(range(6 * microbatch, 6 * microbatch + 6), "train")


def run(compute, state, microbatches=range(N), *, split=False):
    everything = range(state.num_layers)
    for microbatch in microbatches:
        compute.forward(everything, microbatch, *batch(microbatch))
        if split:
            assert compute.backward_input(everything, microbatch, None) is None
            compute.backward_weights(everything, microbatch)
        else:
            assert compute.backward(everything, microbatch, None) is None


def means(compute, state):
    """The mean gradient of each tensor, or the mean of a buffer, from one worker's sums."""
    found = {}
    for unit, accumulator in compute.accumulators.items():
        shape = state.layers[unit]
        mean = reduced_gradient(accumulator.sum, shape, 0, [EXPONENT] * len(shape.tensors), N, shape.num_uses)
        found |= {slot.name: mean[slot.offset : slot.stop].view(-1) for slot in shape.tensors}
    return found


def coverage(state):
    return expected_coverage(state.num_layers, N, state.shared)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_recomputation_and_halves_of_a_backward_do_not_show(kind, recompute, split):
    whole, state = make(kind)
    run(whole, state)
    other, _ = make(kind, recompute=recompute)
    run(other, state, reversed(range(N)), split=split)
    assert other.losses == whole.losses
    assert all(other.accumulators[unit].sum.equal(total.sum) for unit, total in whole.accumulators.items())
    assert other.coverage == whole.coverage == coverage(state)
    assert other.writes == whole.writes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_cut_between_uses_does_not_show(kind, cut):
    whole, state = make(kind)
    run(whole, state)
    last = state.num_layers
    front, back = make(kind, range(cut))[0], make(kind, range(cut, last))[0]
    for microbatch in range(N):
        inputs, targets = batch(microbatch)
        value = front.forward(range(cut), microbatch, inputs, None).clone()
        back.forward(range(cut, last), microbatch, value, targets)
        gradient = back.backward(range(cut, last), microbatch, None)
        assert (gradient is None) == (cut <= state.lowest_trained), "no gradient goes to what is frozen"
        front.backward(range(cut), microbatch, None if gradient is None else gradient.clone())
    for unit, accumulator in whole.accumulators.items():
        total = sum(each.accumulators[unit].sum for each in (front, back) if unit in each.accumulators)
        assert total.equal(accumulator.sum)
    assert (front.coverage + back.coverage) % 2**64 == whole.coverage == coverage(state)


def plain(kind):
    """The same in ordinary PyTorch: mean gradients over micro-batches, each of which begins with the same buffers."""
    specs = KINDS[kind]()
    modules = [build_layer(spec, SEED, index) for index, spec in enumerate(specs)]
    names = {spec.name: index for index, spec in enumerate(specs)}
    for spec, module in zip(specs, modules, strict=True):
        for own, target in spec.ties.items():
            layer, _, name = target.partition(".")
            setattr(module, own, modules[names[layer]].get_parameter(name))
    before = [{name: value.clone() for name, value in module.named_buffers()} for module in modules]
    left = []
    for microbatch in range(N):
        for module, values in zip(modules, before, strict=True):
            for name, buffer in module.named_buffers():
                buffer.copy_(values[name])
        value, targets = batch(microbatch)
        for module in modules:
            value = module(value)
        (mean_square(value, targets) / N).backward()
        left.append(
            {
                f"{spec.name}.{name}": buffer.clone()
                for spec, module in zip(specs, modules, strict=True)
                for name, buffer in module.named_buffers()
            }
        )
    gradients = {
        f"{spec.name}.{name}": parameter.grad
        for spec, module in zip(specs, modules, strict=True)
        for name, parameter in module.named_parameters()
    }
    return gradients, left


@pytest.mark.parametrize("kind", KINDS)
def test_means_are_those_of_ordinary_pytorch(kind):
    compute, state = make(kind)
    run(compute, state)
    gradients, left = plain(kind)
    found = means(compute, state)
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    slots = {slot.name: slot for shape in state.layers for slot in shape.tensors}
    if kind == "tied":
        trained -= {"second.weight", "third.weight"}
    assert trained == {name for name, slot in slots.items() if not slot.is_buffer}
    for name in trained:
        torch.testing.assert_close(found[name], gradients[name].reshape(-1), rtol=1e-4, atol=1e-7)
    for name, slot in slots.items():
        if slot.is_buffer and not slot.is_whole:
            exact = torch.stack([values[name] for values in left]).double().mean(0)
            assert (found[name].double() - exact).abs().max() <= 2.0**-24 * exact.abs().max() + 2.0**-EXPONENT


def test_evaluation_leaves_nothing_behind():
    compute, state = make("normed")
    inputs, targets = batch(0)
    compute.forward(range(5), 0, inputs, targets, train=False)
    compute.forward(range(5), 1, inputs, targets, train=False)
    assert compute.losses[0] == compute.losses[1]
    other, _ = make("normed")
    compute.begin(STEP, [[EXPONENT] * len(shape.tensors) for shape in state.layers])
    run(compute, state)
    run(other, state)
    assert all(compute.accumulators[unit].sum.equal(total.sum) for unit, total in other.accumulators.items())


def test_an_attempt_that_failed_leaves_nothing_behind():
    once, state = make("normed")
    run(once, state)
    again, _ = make("normed")
    run(again, state, [1, 0])
    again.forward(range(5), 2, *batch(2))
    again.begin(STEP, [[EXPONENT] * len(shape.tensors) for shape in state.layers])
    run(again, state)
    assert all(again.accumulators[unit].sum.equal(total.sum) for unit, total in once.accumulators.items())
    assert again.writes == once.writes


def test_a_frozen_normalisation_is_not_written_and_uses_its_statistics():
    compute, state = make("normed")
    run(compute, state)
    slots = {slot.name: slot.id for shape in state.layers for slot in shape.tensors if slot.is_buffer}
    assert compute.writes[slots["a.norm.running_mean"]] == (1, 0)
    assert compute.writes[slots["c.norm.running_mean"]] == (0, 0)
    module = compute.layers[3].module
    value = torch.randn(6, WIDTH)
    expected = torch.relu(
        nn.functional.batch_norm(
            module.map(value), torch.full((WIDTH,), 0.25), torch.ones(WIDTH), module.norm.weight, module.norm.bias
        )
    )
    assert module(value).equal(expected)


def test_nothing_runs_backward_below_the_lowest_layer_that_is_trained():
    compute, state = make("frozen")
    called = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            called.append(1)
            return gradient

    for layer in compute.layers.values():
        forward = layer.module.forward
        layer.module.forward = lambda x, forward=forward: Watch.apply(forward(x))
    run(compute, state)
    assert len(called) == N * 3, "of five layers two are below"
    assert compute.coverage == coverage(state)
    assert compute.writes, "buffers of a frozen layer are written all the same"


def test_a_model_part_without_any_trained_parameter_works():
    model = training_of(Mix(), nn.Tanh(), Mix().requires_grad_(False), Head().requires_grad_(False)).model
    compute, state = make(model)
    run(compute, state)
    assert state.lowest_trained == 0 and compute.coverage == coverage(state)
    assert compute.accumulators[0].maxima[0] > 0


def test_parameters_that_no_gradient_reaches_count_as_zeros():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * 2

    compute, state = make(training_of(Unused(), Head()).model)
    run(compute, state)
    assert compute.accumulators[0].maxima == [0.0] and compute.coverage == coverage(state)


def test_an_integer_buffer_in_which_microbatches_differ_is_seen():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("positive", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.positive += (x > 0).sum()
            return self.map(x)

    compute, state = make(training_of(Counts(), Head()).model)
    run(compute, state)
    ((first, second),) = compute.writes.values()
    assert first != -second


def test_a_refused_buffer_names_layer_and_microbatch():
    class Grows(Normed):
        def forward(self, x):
            self.norm.running_mean = torch.zeros(2)
            return x

    compute, _ = make(training_of(Grows(), Head()).model)
    with pytest.raises(LayerError, match=r"buffer 0.norm.running_mean .* \(at step 3, micro-batch 1, layer 0 \(0\)\)"):
        compute.forward(range(2), 1, *batch(1))


def test_a_tied_sum_counts_every_use():
    model = ModelSpec((Layer("a", Mix), Layer("b", Mix, ties={"weight": "a.weight"}), Layer("h", Head)), mean_square)
    compute, state = make(model)
    run(compute, state, [0, 1])
    assert compute.counts[3, 0] == compute.counts[3, 1] == 2
    assert compute.coverage != coverage(state)
    run(compute, state, [2])
    assert compute.coverage == coverage(state)


def test_a_model_of_which_nothing_is_trained_is_refused():
    def frozen():
        return Mix().requires_grad_(False)

    model = ModelSpec(tuple(Layer(name, frozen) for name in "abc"), mean_square)
    training = dataclasses.replace(training_of(Mix(), Mix(), Head()), model=model)
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        Blueprint(small_config(settings_of(training)), training)
