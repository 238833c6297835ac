"""What layers are given, return, say and ask: trees, writing in place, auxiliary losses, counts, metrics, refusals.

Each case is run whole and cut between any two layers, with what travels as it would arrive: it must not show.
"""

import functools
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.unit.held import make_held
from torch import nn
from torch.utils.checkpoint import checkpoint

from elaswave.engine.checks.values import flatten, unflatten
from elaswave.engine.compute import Compute, ComputeRules, LayerError
from elaswave.errors import UsageError
from elaswave.models.layers import Call, Layer, LossOutput, ModelSpec, aux_loss, batch, build_layer, inside
from elaswave.protocol.step.ballot import expected_coverage
from elaswave.state.sums import ExactAccumulator, reduced_gradient
from elaswave.worker.links import pack_value, unpack_value

SEED, STEP, SIZE = 5, 3, 8


def inputs_of(microbatch):
    return torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(microbatch))


def targets_of(microbatch):
    return torch.randint(0, 3, (4, 6), generator=torch.Generator().manual_seed(100 + microbatch))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, SIZE)

    def forward(self, tokens):
        return self.table(tokens)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(SIZE, 3)

    def forward(self, x):
        return self.map(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return F.gelu(self.map(x))


class State(NamedTuple):
    """What layers of trees hand on."""

    hidden: torch.Tensor
    extras: dict


class Spread(Block):
    """Returns a tree with leaves of every kind, one of which nothing downstream uses."""

    def forward(self, x):
        y = self.map(x)
        extras = {"skip": x * 0.5, "mask": y > 0, "index": y.argmax(-1), "unused": y.exp(), "nothing": None}
        return State(y, extras)


class Mix(Block):
    """Takes such a tree and returns one."""

    def forward(self, state):
        hidden, extras = state
        index = extras["index"]
        mixed = self.map(hidden) * extras["mask"] + extras["skip"]
        mixed = mixed + F.one_hot(index, SIZE)
        return State(mixed, {**extras, "skip": mixed.detach()})


class Gather(Block):
    def forward(self, state):
        return self.map(state.hidden + state.extras["skip"])


class WritesInput(Block):
    """Its input was also saved by the layer before, for its backward."""

    def forward(self, x):
        return self.map(F.relu_(x))


class Remembers(Block):
    """Its backward needs its output."""

    def forward(self, x):
        return self.map(x).tanh().exp()


class Routed(Block):
    def forward(self, x):
        weights = self.map(x).softmax(-1)
        aux_loss(0.25 * weights.mean((0, 1)).square().sum())
        aux_loss(weights.amax().mean() * 0.125)
        return x * weights


class RoutedAtTimes(Block):
    """Says an auxiliary loss in micro-batch 2 only, after the halves of a backward have been tried in another one."""

    def forward(self, x):
        if batch().equal(inputs_of(2)):
            aux_loss(0.25 * x.square().mean())
        return self.map(x)


class Masked(Block):
    def forward(self, x):
        return self.map(x) * (batch() % 2)[..., None]


class Checkpointed(Block):
    def forward(self, x):
        def inner(x):
            aux_loss(x.square().mean() * 0.5)
            return self.map(F.dropout(x, 0.25)).tanh() * batch()[..., None]

        return checkpoint(inner, x, use_reentrant=False)


class Autocast(Block):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.map(x)
        return x + F.dropout(y, 0.25).float()


class OnlyWhole(nn.Module):
    """Returns nothing that a gradient could travel through."""

    def forward(self, tokens):
        return tokens + 1


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def counted_cross_entropy(logits, targets):
    keep = targets != 0
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=0, reduction="sum")
    return LossOutput(total, keep.sum())


CASES = {
    "plain": [Table, Block, Block, Head],
    "trees": [Table, Spread, Mix, Mix, Gather, Head],
    "in place": [Table, Remembers, lambda: nn.ReLU(inplace=True), Remembers, WritesInput, Head],
    "auxiliary losses": [Table, Routed, Block, Routed, Head],
    "auxiliary losses at times": [Table, RoutedAtTimes, RoutedAtTimes, Head],
    "batch": [Table, Masked, Masked, Head],
    "checkpoint": [Table, Checkpointed, Checkpointed, Head],
    "autocast": [Table, Autocast, Autocast, Head],
    "whole numbers": [OnlyWhole, OnlyWhole, Table, Head],
    "dropout in place": [Table, Block, lambda: nn.Dropout(0.25, inplace=True), Remembers, Head],
}
CAN_BE_RECOMPUTED = [name for name in CASES if "in place" not in name]


def model_of(*builds, loss=cross_entropy, metrics=None, recompute=False):
    layers = [Layer(f"l{index}", build, recompute=recompute) for index, build in enumerate(builds)]
    return ModelSpec(tuple(layers), loss, metrics or {})


def make_compute(model, layers=None, **options):
    held, units, shapes = make_held(model, layers, SEED)
    accumulators = {index: ExactAccumulator(shapes[index]) for index in (*held, *units)}
    compute = Compute(
        ComputeRules(model, SEED, **options),
        held,
        accumulators,
        inputs=lambda step, microbatch, *, train: inputs_of(microbatch),
    )
    compute.begin(STEP, [[40] * len(shape.tensors) for shape in shapes])
    return compute


def travel(value):
    """As it arrives at another worker, in other memory."""
    packed = pack_value(value)
    if isinstance(packed, torch.Tensor):
        return unpack_value(packed.clone())
    return unpack_value(torch.cat([part.detach().reshape(-1).view(torch.uint8) for part in packed]))


def train(computes, cuts, microbatches, *, split=False):
    """Runs micro-batches one after the other forward, then all of them backward; returns nothing: see `results`."""
    for microbatch in microbatches:
        value = inputs_of(microbatch)
        for compute, layers in zip(computes, cuts, strict=True):
            value = travel(compute.forward(layers, microbatch, value, targets_of(microbatch)))
    for microbatch in reversed(microbatches):
        gradient = None
        for compute, layers in zip(reversed(computes), reversed(cuts), strict=True):
            step = compute.backward_input if split else compute.backward
            gradient = step(layers, microbatch, gradient)
            assert (gradient is None) is (layers.start <= compute.rules.lowest_trained)
            gradient = None if gradient is None else travel(gradient)
    if split:
        for compute, layers in zip(computes, cuts, strict=True):
            for microbatch in microbatches:
                compute.backward_weights(layers, microbatch)


def results(computes):
    """All sums, losses and metrics of some workers together."""
    sums = {index: a.sum.clone() for compute in computes for index, a in compute.accumulators.items()}
    losses = {m: loss for compute in computes for m, loss in compute.losses.items()}
    scores = [compute.scoring.scores for compute in computes]
    aux = [sum(score.aux_loss[part] for score in scores) for part in range(3)]
    metrics = [score.metrics for score in scores if score.losses]
    return sums, losses, aux, metrics, sum(compute.coverage for compute in computes) % 2**64


def assert_same(one, other):
    assert one[1:] == other[1:]
    assert one[0].keys() == other[0].keys()
    assert all(one[0][index].equal(total) for index, total in other[0].items())


@pytest.mark.parametrize("loss", [cross_entropy, counted_cross_entropy])
@pytest.mark.parametrize("case", CASES)
def test_cuts_halves_and_orders_do_not_show(case, loss):
    model = model_of(*CASES[case], loss=loss)
    num_layers = len(model.layers)
    whole = make_compute(model)
    train([whole], [range(num_layers)], [0, 1, 2])
    expected = results([whole])
    assert expected[-1] == expected_coverage(num_layers, 3)
    for split in (False, True):
        for cut in range(1, num_layers):
            cuts = [range(cut), range(cut, num_layers)]
            computes = [make_compute(model, layers) for layers in cuts]
            train(computes, cuts, [2, 0, 1], split=split)
            assert_same(results(computes), expected)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", CAN_BE_RECOMPUTED)
def test_recomputation_does_not_show(case, split):
    kept, recomputed, by_layer = (
        make_compute(model_of(*CASES[case])),
        make_compute(model_of(*CASES[case]), recompute=True),
        make_compute(model_of(*CASES[case], recompute=True)),
    )
    for compute in (kept, recomputed, by_layer):
        train([compute], [range(len(CASES[case]))], [0, 1], split=split and compute is not kept)
    assert_same(results([recomputed]), results([kept]))
    assert_same(results([by_layer]), results([kept]))


def gradients_of(compute):
    """Sums of the gradients of three micro-batches, tensor by tensor."""
    found = []
    for accumulator in compute.accumulators.values():
        shape = accumulator.shape
        mean = reduced_gradient(accumulator.sum, shape, 0, [40] * len(shape.tensors), 3)
        found += [3 * mean[slot.offset : slot.stop].view(slot.shape) for slot in shape.tensors]
    return found


@pytest.mark.parametrize("loss", [cross_entropy, counted_cross_entropy])
@pytest.mark.parametrize("case", ["trees", "in place", "auxiliary losses", "batch"])
def test_gradients_are_those_of_ordinary_autograd(case, loss):
    model = model_of(*CASES[case], loss=loss)
    compute = make_compute(model)
    train([compute], [range(len(model.layers))], [0, 1, 2])
    layers = [build_layer(spec, SEED, index) for index, spec in enumerate(model.layers)]
    total, aux = 0.0, 0.0
    for microbatch in range(3):
        call = Call(functools.partial(inputs_of, microbatch))
        with inside(call):
            value = inputs_of(microbatch)
            for layer in layers:
                structure, leaves = flatten(value)  # a copy: a layer may write what the one before has saved
                value = layer(unflatten(structure, [leaf.clone() for leaf in leaves]))
        returned = loss(value, targets_of(microbatch))
        weight = 1 if isinstance(returned, torch.Tensor) else int(returned.count)
        total = total + (returned if isinstance(returned, torch.Tensor) else returned.total)
        aux = aux + weight * sum(call.aux_losses)
    (total + aux).backward()
    plain = [parameter.grad for layer in layers for parameter in layer.parameters()]
    for ours, theirs in zip(gradients_of(compute), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    measured = compute.scoring.scores
    assert math.fsum(measured.losses.values()) == pytest.approx(float(total.detach()), rel=1e-6)
    assert measured.aux_loss.over(1) == pytest.approx(float(torch.as_tensor(aux).detach()), rel=1e-6)


def test_an_evaluation_has_neither_gradients_nor_auxiliary_losses():
    right = {"right": lambda output, targets: (output.argmax(-1) == targets).float().mean()}
    model = model_of(*CASES["auxiliary losses"], metrics=right)
    compute = make_compute(model)
    compute.forward(range(5), 0, inputs_of(0), targets_of(0), train=False)
    scores = compute.scoring.scores
    assert scores.aux_loss.count == 0 and scores.metrics[0].count == 1 and list(scores.losses) == [0]


def test_a_checkpoint_says_an_auxiliary_loss_once():
    compute = run_one(*CASES["checkpoint"])
    assert compute.scoring.scores.aux_loss.count == 2


def test_metrics_are_means_or_totals_with_counts():
    model = model_of(
        Table,
        Head,
        metrics={
            "mean": lambda output, targets: output.mean(),
            "right": lambda output, targets: ((output.argmax(-1) == targets).sum(), targets.numel()),
        },
    )
    compute = make_compute(model)
    train([compute], [range(2)], [0, 1])
    mean, right = compute.scoring.scores.metrics
    assert (mean.count, right.count) == (2, 48)
    assert right.over(1) == int(right.over(1)) > 0


def run_one(*builds, **options):
    model = model_of(*builds, **options)
    compute = make_compute(model)
    train([compute], [range(len(model.layers))], [0])
    return compute


def refused(*builds, **options):
    with pytest.raises(LayerError) as raised:
        run_one(*builds, **options)
    assert isinstance(raised.value.__cause__, UsageError), raised.value.__cause__
    return str(raised.value)


FOREIGN = nn.Linear(SIZE, SIZE)


class Reaches(nn.Module):
    def forward(self, x):
        return x @ FOREIGN.weight


class Reentrant(Block):
    def forward(self, x):
        return checkpoint(self.map, x, use_reentrant=True)


class SparseLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20, SIZE))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight, sparse=True)


class LateHook(Block):
    def forward(self, x):
        if not self.map.weight._backward_hooks:
            self.map.weight.register_hook(lambda gradient: gradient)
        return self.map(x)


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x[: 4 - self.calls // 2]


class WritesLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        return tokens if self.calls < 2 else tokens.add_(1)


@pytest.mark.parametrize(
    ("builds", "words"),
    [
        ([Table, Reaches, Head], "layer l1 reaches a float32 tensor of shape [8, 8]"),
        ([Table, Reentrant, Head], "use_reentrant=False"),
        ([SparseLookup, Head], "layer l0 makes a sparse gradient of weight"),
        ([Table, LateHook, Head], "parameter map.weight of layer l1 has a gradient hook"),
        ([Table, lambda: Says(lambda x: aux_loss(x)), Head], "aux_loss was given a float32 tensor of shape [4, 6, 8]"),
        ([Table, lambda: Says(lambda x: aux_loss(1.0)), Head], "aux_loss was given 1.0 of type float"),
        ([Table, lambda: Returns(lambda x: (x, 3)), Head], "3 of type int"),
        ([Table, lambda: Returns(lambda x: x.to_sparse()), Head], "to_dense"),
        ([Table, lambda: Returns(lambda x: x.to("meta")), Head], "on meta"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # torch's own about re-entrant checkpoints
def test_what_would_be_lost_in_silence_is_refused(builds, words):
    assert words in refused(*builds)


class Says(nn.Module):
    def __init__(self, say):
        super().__init__()
        self.say = say

    def forward(self, x):
        self.say(x)
        return x


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, targets: output, "needed is a scalar tensor"),
        (lambda output, targets: 1.0, "needed is a scalar tensor"),
        (lambda output, targets: LossOutput(output.sum(), 2.5), "the count 2.5"),
        (lambda output, targets: LossOutput(output.sum(), torch.tensor(-1)), "at least 0"),
        (lambda output, targets: LossOutput(output.sum(), math.nan), "at least 0"),
        (lambda output, targets: output.mean() + (FOREIGN.weight * 1.0).sum(), "the loss reaches a float32 tensor"),
        (lambda output, targets: (aux_loss(output.mean()), output.mean())[1], "aux_loss was called in the loss"),
    ],
)
def test_losses_that_cannot_be_used_are_refused(loss, words):
    assert words in refused(Table, Head, loss=loss)


@pytest.mark.parametrize("returned", ["text", torch.ones(2), (1.0, -1), None])
def test_metrics_that_cannot_be_used_are_refused(returned):
    assert "the metric strange returned" in refused(Table, Head, metrics={"strange": lambda output, targets: returned})


def test_a_loss_that_has_counts_only_sometimes_is_refused():
    answers = iter([lambda output: output.mean(), lambda output: LossOutput(output.sum(), 1)])
    compute = make_compute(model_of(Table, Head, loss=lambda output, targets: next(answers)(output)))
    with pytest.raises(LayerError, match="a count for some micro-batches and none for others"):
        train([compute], [range(2)], [0, 1])


def test_what_changes_between_micro_batches_is_refused():
    compute = make_compute(model_of(Table, Changes, Head, loss=lambda output, targets: output.mean()))
    with pytest.raises(LayerError, match=r"layer l1 returns float32 \[3, 6, 8\], but float32 \[4, 6, 8\] in the first"):
        train([compute], [range(3)], [0, 1])
    with pytest.raises(LayerError, match=r"the model is given int64 \[2, 6\], but int64 \[4, 6\] in the first"):
        compute.forward(range(3), 2, inputs_of(2)[:2], targets_of(2)[:2])
    compute.forward(range(1), 2, inputs_of(2)[:2], None, train=False)


def test_a_layer_that_begins_to_write_its_input_is_refused():
    compute = make_compute(model_of(WritesLater, Table, Head))
    train([compute], [range(3)], [0])
    with pytest.raises(LayerError, match="layer l0 writes its input now, but did not in its first micro-batch"):
        train([compute], [range(3)], [1])


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_recomputed_layer_that_writes_its_input_is_refused(by_layer):
    compute = make_compute(model_of(*CASES["in place"], recompute=by_layer), recompute=not by_layer)
    with pytest.raises(LayerError, match="layer l2 writes its input, and is to be run again from it"):
        train([compute], [range(6)], [0])


def test_inputs_of_the_model_are_never_written():
    class AddsOne(nn.Module):
        def forward(self, tokens):
            return tokens.add_(1).remainder_(20)

    compute = make_compute(model_of(AddsOne, Table, Head))
    tokens = inputs_of(0)
    compute.forward(range(3), 0, tokens, targets_of(0))
    assert tokens.equal(inputs_of(0))


def test_outside_of_a_layer_there_is_no_batch_and_an_auxiliary_loss_goes_nowhere():
    aux_loss(torch.tensor(1.0))
    with pytest.raises(UsageError, match="elaswave runs no layer"):
        batch()


class Force(Block):
    """Differentiates by its input within the forward, as force fields and physics-informed networks do."""

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        energy = self.map(x).tanh().sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


class MarksItsInput(nn.Module):
    """Sets `requires_grad` of what it is given, as transformers' Wav2Vec2 does for its checkpoints."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(6, SIZE)

    def forward(self, tokens):
        hidden = tokens.float()
        hidden.requires_grad = True
        return self.map(hidden)


class MarksTheGiven(Block):
    """A frozen layer, so that its input wants no gradient, which it marks itself."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x):
        x.requires_grad_(True)
        y = self.map(x).tanh()
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Penalised(Block):
    """Differentiates by what it is given itself, for a gradient penalty."""

    def forward(self, x):
        y = self.map(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        aux_loss((slope.norm(dim=-1) - 1).square().mean())
        return y + slope


class LazyLeaf(Block):
    """Makes a leaf once, at its first call, and keeps it."""

    leaf = None

    def forward(self, x):
        if self.leaf is None:
            self.leaf = torch.ones(SIZE, requires_grad=True)
        return self.map(x) * self.leaf


OWN_LEAVES = {
    "forces": [Table, Force, Head],
    "marked": [MarksItsInput, Head],
    "penalised": [Table, Penalised, Head],
    "below what is trained": [lambda: Table().requires_grad_(False), MarksTheGiven, Block, Head],
    "recomputed": [Table, Force, Head],
}


@pytest.mark.parametrize("has_determinism_check", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", OWN_LEAVES)
def test_a_leaf_that_is_made_within_a_call_is_the_layers_own(case, split, has_determinism_check):
    model = model_of(*OWN_LEAVES[case], loss=lambda output, targets: output.mean(), recompute=case == "recomputed")
    options = {"has_determinism_check": has_determinism_check, "lowest_trained": 2 if case.startswith("below") else 0}
    num_layers = len(model.layers)
    whole = make_compute(model, **options)
    train([whole], [range(num_layers)], [0, 1])
    cuts = [range(1), range(1, num_layers)]
    computes = [make_compute(model, cut, **options) for cut in cuts]
    train(computes, cuts, [1, 0], split=split)
    assert_same(results(computes), results([whole]))
    for compute in (whole, make_compute(model, **options)):  # an evaluation may come first
        compute.forward(range(num_layers), 0, inputs_of(0), targets_of(0), train=False)
        assert math.isfinite(compute.losses[0])


def test_a_loss_may_differentiate_by_a_leaf_of_its_own():
    def penalised(output, targets):
        leaf = output.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(leaf.square().sum(), leaf, create_graph=True)
        return output.mean() + slope.square().mean()

    compute = run_one(Table, Head, loss=penalised)
    compute.forward(range(2), 1, inputs_of(1), targets_of(1), train=False)
    assert sorted(compute.losses) == [0, 1]


def test_a_loss_may_differentiate_by_the_output_that_it_is_given():
    def penalised(output, targets):
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return output.mean() + slope.square().mean()

    compute = run_one(Table, Head, loss=penalised)
    for microbatch in (1, 2):
        compute.forward(range(2), microbatch, inputs_of(0), targets_of(0), train=False)
    assert compute.losses[1] == compute.losses[2] == compute.losses[0]


def test_a_leaf_that_lasts_from_call_to_call_is_refused():
    assert "layer l1 reaches a float32 tensor of shape [8] that requires a gradient" in refused(Table, LazyLeaf, Head)


def test_another_error_of_an_evaluation_is_raised_as_it_is():
    class Fails(Block):
        def forward(self, x):
            if not self.training:
                torch.ones(2) @ torch.ones(3)
            return self.map(x)

    compute = run_one(Table, Fails, Head)
    with pytest.raises(LayerError, match="RuntimeError: inconsistent tensor size"):
        compute.forward(range(3), 0, inputs_of(0), targets_of(0), train=False)
