"""Runs that are done again later than at a first micro-batch: where, how often, what they find, what they leave."""

import random

import numpy as np
import pytest
import torch
from tests.unit.engine.test_layer_calls import (
    CASES,
    SEED,
    STEP,
    Block,
    Head,
    Table,
    assert_same,
    inputs_of,
    make_compute,
    model_of,
    results,
    targets_of,
    train,
)
from tests.unit.held import make_held
from torch import nn

from elaswave.engine.checks.determinism_check import changed_operator, environment
from elaswave.engine.checks.spot_checks import DENSE_STEPS, CheckKind, SpotChecks, window_of
from elaswave.engine.compute import Compute, ComputeRules, LayerError
from elaswave.errors import SpotCheckError
from elaswave.hashing import key64
from elaswave.models.layers import aux_loss
from elaswave.protocol.step.ballot import Environment
from elaswave.protocol.step.salvage import Keep
from elaswave.state.sums import ExactAccumulator


class Everywhere(SpotChecks):
    """Looks at every place, always in the same way."""

    def __init__(self, kind, **options):
        super().__init__(SEED, 0.005, 3, 1, **options)
        self.kind = kind
        self.num_checks = 0

    def due(self, layer, microbatch):
        return self.kind

    def aside(self):
        self.num_checks += 1
        return super().aside()


def checked(model, kind, layers=None, *, recompute=False, **options):
    """A worker's computation whose every place is checked."""
    held, units, shapes = make_held(model, layers, SEED)
    spots = Everywhere(kind, **options)
    compute = Compute(
        ComputeRules(model, SEED, recompute=recompute, has_determinism_check=True),
        held,
        {index: ExactAccumulator(shapes[index]) for index in (*held, *units)},
        inputs=lambda step, microbatch, *, train: inputs_of(microbatch),
        spots=spots,
    )
    compute.begin(STEP, [[40] * len(shape.tensors) for shape in shapes])
    return compute, spots


# ------------------------------------------------------------------------------------------------- where and how often


def places(seed, steps, *, share=0.005, num_microbatches=8, width=2, layers=6):
    """(step, layer, micro-batch) -> what is done again."""
    spots = SpotChecks(seed, share, num_microbatches, width)
    found = {}
    for step in steps:
        spots.begin(step)
        for layer in range(layers):
            for microbatch in range(num_microbatches):
                if (kind := spots.due(layer, microbatch)) is not None:
                    found[step, layer, microbatch] = kind
    return found


def test_one_step_of_two_has_checks_at_first_and_few_in_the_long_run():
    found = places(1, range(1, 2001))
    steps = sorted({step for step, _, _ in found})
    dense = [step for step in steps if step <= DENSE_STEPS]
    assert len(dense) == 25 and max(after - step for step, after in zip(dense, dense[1:])) <= 3
    late = [step for step in steps if step > 4 * DENSE_STEPS]
    gaps = [after - step for step, after in zip(late, late[1:])]
    assert len(dense) > len([step for step in steps if DENSE_STEPS < step <= 2 * DENSE_STEPS]) > len(gaps) * 100 / 1800
    # A check takes 1.8 times as long as the run of a layer; a worker has 4 of the 8 micro-batches.
    assert sum(1.8 / 4 for _ in late) / 1800 == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(("num_microbatches", "width"), [(1, 1), (8, 1), (8, 2), (8, 3), (96, 24)])
def test_every_worker_of_the_first_layout_checks_one_micro_batch_in_all_layers(num_microbatches, width):
    found = places(2, range(1, 400), num_microbatches=num_microbatches, width=width)
    for step in {step for step, _, _ in found}:
        numbers = {microbatch for at, _, microbatch in found if at == step}
        assert {(layer, number) for at, layer, number in found if at == step} == {
            (layer, number) for layer in range(6) for number in numbers
        }
        assert len(numbers) == width
        if num_microbatches % width == 0:
            assert {number % width for number in numbers} == set(range(width))


def test_every_place_comes_and_layers_are_run_again_and_probed_by_turns():
    found = places(3, range(1, DENSE_STEPS + 1))
    for layer in range(6):
        kinds = [kind for (_, at, _), kind in sorted(found.items(), key=lambda item: item[0][0]) if at == layer][::2]
        assert kinds == [(CheckKind.RUN, CheckKind.PROBE)[(layer + turn) % 2] for turn in range(len(kinds))]
    assert {number for _, _, number in found} == set(range(8))
    assert found != places(4, range(1, DENSE_STEPS + 1)) and found == places(3, range(1, DENSE_STEPS + 1))


def test_windows_lie_end_to_end_and_grow():
    begin, lengths = 1, []
    for step in range(1, 3000):
        first, length, _ = window_of(step, 75)
        if step == begin + (lengths[-1] if lengths else 0) or not lengths:
            begin = step
            lengths.append(length)
        assert first <= step < first + length
    assert lengths[0] == 2 and lengths[-1] == 75 and lengths == sorted(lengths)


# ------------------------------------------------------------------------------------------------- what they leave


@pytest.mark.parametrize("kind", CheckKind)
@pytest.mark.parametrize("case", CASES)
def test_checks_do_not_show(case, kind):
    model = model_of(*CASES[case])
    num_layers = len(model.layers)
    plain = make_compute(model)
    train([plain], [range(num_layers)], [0, 1, 2])
    for split, recompute in ((False, False), (True, "in place" not in case)):
        compute, spots = checked(model, kind, recompute=recompute)
        train([compute], [range(num_layers)], [0, 1, 2], split=split)
        assert_same(results([compute]), results([plain]))
        assert spots.num_checks >= 3 and spots.spent_ns > 0


class Draws(Block):
    """Draws in forward from every generator, and looks at what a backward would draw."""

    def forward(self, x):
        return self.map(x) * torch.rand(()) * random.random() * np.random.rand()


@pytest.mark.parametrize("kind", CheckKind)
def test_generators_are_left_as_they_were(kind):
    model = model_of(Table, Draws, Head)
    states = []
    for compute in (make_compute(model, has_determinism_check=True), checked(model, kind)[0]):
        train([compute], [range(3)], [0, 1])  # a forward seeds them anew, a backward does not
        states.append((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()))
    assert states[0] == states[1]


class Statistics(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, 8))
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
            self.table.add_(x.mean())
        return self.map(x) * self.table


@pytest.mark.parametrize("kind", CheckKind)
def test_running_statistics_are_those_of_the_run_itself(kind):
    model = model_of(Table, Statistics, Statistics, Head)
    plain, (compute, _) = make_compute(model), checked(model, kind)
    for each in (plain, compute):
        each.begin(STEP, [[40] * len(shape.tensors) for shape in make_held(model, None, SEED)[2]])
        train([each], [range(4)], [0, 1, 2], split=each is compute)
    assert_same(results([compute]), results([plain]))
    assert compute.writes == plain.writes != {}


# --------------------------------------------------------------------------------------------------- what they find


class Late:
    """What a layer does only once this is on, and then every other time."""

    on = False
    calls = 0

    @classmethod
    def strikes(cls):
        cls.calls += cls.on
        return cls.on and cls.calls % 2 == 0


@pytest.fixture(autouse=True)
def never_before():
    Late.on, Late.calls = False, 0


class LateOutput(Block):
    def forward(self, x):
        return self.map(x) + (1e-6 if Late.strikes() else 0.0)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, whose):
        ctx.whose = whose
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.0 + 1e-6 * Late.strikes()), None


class LateGradient(Block):
    """Of the input, and so of all layers before."""

    def forward(self, x):
        return self.map(_Gradient.apply(x, "input"))


class LateWeight(Block):
    """Of a weight alone, in the second half of a backward."""

    def forward(self, x):
        return nn.functional.linear(x, _Gradient.apply(self.map.weight, "weight"), self.map.bias)


class LateBuffer(Statistics):
    def forward(self, x):
        found = super().forward(x)
        if Late.strikes():
            self.mean.add_(1e-3)
        return found


class LateAuxiliary(Block):
    def forward(self, x):
        y = self.map(x)
        aux_loss(y.mean() * (1.0 + 1e-3 * Late.strikes()))
        return y


def late_loss(output, targets):
    return output.square().mean() * (1.0 + 1e-3 * Late.strikes())


def late_loss_gradient(output, targets):
    return _Gradient.apply(output, "loss").square().mean()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (LateOutput, "layer l1 is not deterministic: run twice .*, its output differs in .* by up to"),
        (LateGradient, "layer l1 .*, the gradient of its input differs"),
        (LateWeight, "layer l1 .*, the gradient of map.weight differs"),
        (LateBuffer, "layer l1 .*, what it leaves in buffer l1.mean differs"),
        (LateAuxiliary, "layer l1 .*, an auxiliary loss differs"),
    ],
)
def test_a_layer_that_begins_later_to_give_other_bits_is_named(layer, said, split):
    compute, _ = checked(model_of(Table, layer, Head), CheckKind.RUN)
    train([compute], [range(3)], [0, 1], split=split)
    Late.on = True
    Late.calls = layer in (LateGradient, LateWeight)  # the run itself is the one that is wrong
    added = {index: accumulator.covered for index, accumulator in compute.accumulators.items()}
    before = {index: dict(masks) for index, masks in added.items()}
    with pytest.raises(LayerError, match=said + ".*must keep nothing between calls.*held here was in step 3") as caught:
        train([compute], [range(3)], [2], split=split)
    assert isinstance(caught.value.__cause__, SpotCheckError)
    assert str(caught.value.position) == f"step {STEP}, micro-batch 2, layer 1 (l1)"
    assert added[1] == before[1], "what was found to be wrong has been added"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("loss", "said"), [(late_loss, "its output"), (late_loss_gradient, "the gradient of its input")]
)
def test_a_loss_that_begins_later_to_give_other_bits_is_named(loss, said, recompute):
    compute, _ = checked(model_of(Table, Block, Head, loss=loss), CheckKind.RUN, recompute=recompute)
    train([compute], [range(3)], [0, 1])
    Late.on = True
    with pytest.raises(LayerError, match=f"the loss is not deterministic: .*{said} differs"):
        train([compute], [range(3)], [2])


class Core(Block):
    """Computes otherwise from some time on, and always in the same way then."""

    def forward(self, x):
        return self.map(x) * (1.0 + 2.0**-20 * Late.on)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_has_become_wrong_for_good_is_found_by_the_probe_alone(recompute):
    model = model_of(Table, Core, Head)
    compute, spots = checked(model, CheckKind.PROBE, recompute=recompute)
    train([compute], [range(3)], [0, 1])
    Late.on = True
    spots.kind = CheckKind.RUN
    train([compute], [range(3)], [2])
    spots.kind = CheckKind.PROBE
    with pytest.raises(LayerError, match="layer l1 gives other bits than at the start of the run: what it makes of"):
        compute.forward(range(3), 0, inputs_of(0), targets_of(0))


class Fails(Block):
    """Does not take made-up numbers."""

    def forward(self, x):
        if float(self.map.weight.detach().abs().max()) > 0.36:  # as built they are below
            raise ValueError("made up")
        return self.map(x)


def test_a_layer_without_a_probe_and_one_that_has_not_been_voted_on_are_only_run_again():
    compute, spots = checked(model_of(Table, Fails, Head), CheckKind.PROBE)
    compute.forward(range(3), 0, inputs_of(0), targets_of(0))
    assert spots.num_checks == 0
    compute.backward(range(3), 0, None)
    assert spots.num_checks == 1  # an operator, in the place of the loss's probe
    train([compute], [range(3)], [1])
    assert set(compute.determinism_hashes) == {0, 1, 2} and spots.num_checks == 1 + 4


def test_the_loss_has_an_operator_of_the_environment_in_the_place_of_its_probe():
    compute, _ = checked(model_of(Table, Block, Head), CheckKind.PROBE, changed_operator=lambda key: "exp")
    with pytest.raises(LayerError, match=r"the operator exp gives other bits.*layer 3 \(loss\)"):
        train([compute], [range(3)], [0])


def test_an_operator_that_has_changed_is_named():
    known = environment()
    names = sorted(known.operators)
    assert all(changed_operator(known, key) is None for key in range(len(names)))
    wrong = Environment("", {**known.operators, names[3]: known.operators[names[3]] ^ 1})
    assert changed_operator(wrong, 3 + len(names)) == names[3]


def test_what_is_in_the_sums_already_is_not_looked_at():
    compute, _ = checked(model_of(Table, LateOutput, Head), CheckKind.RUN)
    train([compute], [range(3)], [0, 1])
    Late.on = True
    keep = Keep(frozenset({0, 1, 2}), 0b11, {}, (0b11, 0b11, 0b11, 0b11))
    compute.begin(STEP, [[40] * len(shape.tensors) for shape in make_held(compute.model, None, SEED)[2]], keep)
    compute.forward(range(3), 0, inputs_of(0), targets_of(0), keeps=False)
    compute.forward(range(3), 1, inputs_of(1), targets_of(1))
    with pytest.raises(LayerError, match="layer l1 is not deterministic"):
        compute.forward(range(3), 2, inputs_of(2), targets_of(2))


def test_an_evaluation_is_not_looked_at():
    compute, spots = checked(model_of(Table, LateOutput, Head), CheckKind.RUN)
    compute.forward(range(3), 0, inputs_of(0), targets_of(0), train=False)  # the first one is run twice anyway
    Late.on = True
    compute.forward(range(3), 0, inputs_of(0), targets_of(0), train=False)
    assert spots.num_checks == 0


def test_places_are_drawn_from_the_seed():
    assert key64(1, "spot check", 1) != key64(2, "spot check", 1)
    assert len({tuple(places(seed, range(1, 51))) for seed in range(5)}) == 5
