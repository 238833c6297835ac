"""Fences in the computation: what is coded where, once and by bits; what crosses, and what a codec never touches."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.unit.engine.test_compute import GPT, batch, make_compute, mean_square, model_of, run, run_split, sums
from torch import nn

from elaswave.engine.boundaries import fences as fences_module
from elaswave.engine.boundaries.codecs import decode_tensor, encode_tensor, places_of
from elaswave.engine.boundaries.fences import CodedValue, Fences
from elaswave.engine.compute import Compute, ComputeRules, Surroundings
from elaswave.errors import FrameError
from elaswave.fences import FenceRatio
from elaswave.models.layers import build_layer
from elaswave.training.definition import build_model
from elaswave.worker.links import pack_value, unpack_value

FENCED = replace(GPT, fences={0: "int4", 2: "int8"})
EVERY = replace(GPT, fences={0: "bf16", 1: "int8", 2: "int4"})
SPARSE = replace(GPT, fences={0: "topk10", 1: "topk4-own", 2: "topk3"})
SEED = 5
WITHOUT_DROPOUT = build_model(
    "gpt", vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, context_length=8, dropout=0.0
)


def sent(value: Any) -> tuple[Any, int]:
    """A value as the next worker has it, and the bytes that have travelled."""
    parts = pack_value(value)
    frame = (
        parts if isinstance(parts, torch.Tensor) else torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    )
    return unpack_value(frame.clone()), frame.nbytes


class Both(NamedTuple):
    """What a layer with a skip connection hands on."""

    x: torch.Tensor
    skip: torch.Tensor


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    def forward(self, tokens):
        x = self.table(tokens)
        return Both(x * 8, x.sin())


class Middle(nn.Module):
    """Uses one value and hands the other on, as it is or as a view that lies the same way."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)

    def forward(self, both):
        return Both(self.map(both.x), both.skip.transpose(0, 1).transpose(0, 1))


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(16, 16)

    def forward(self, both):
        return self.map(both.x) + both.skip


CARRIED = replace(model_of(Start, Middle, Middle, End), fences={0: "int4", 2: "int4"})
CARRIED_SPARSE = replace(CARRIED, fences={0: "topk5", 2: "topk5"})


@pytest.mark.parametrize(
    "model",
    [FENCED, EVERY, CARRIED, SPARSE, CARRIED_SPARSE],
    ids=["two", "every", "carried", "sparse", "carried-sparse"],
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_cuts_and_recomputation_do_not_show(model, cut, recompute):
    whole = make_compute(model)
    run(whole, [0, 1], 4)
    front = make_compute(model, range(cut), recompute=recompute)
    back = make_compute(model, range(cut, 4), recompute=recompute)
    for microbatch in (1, 0):
        tokens, targets = batch(microbatch)
        value, _ = sent(front.forward(range(cut), microbatch, tokens, None))
        back.forward(range(cut, 4), microbatch, value, targets)
        gradient, _ = sent(back.backward(range(cut, 4), microbatch, None))
        assert front.backward(range(cut), microbatch, gradient) is None
    together = sums(front) | sums(back)
    assert all(together[index].equal(total) for index, total in sums(whole).items())
    assert back.losses == whole.losses


@pytest.mark.parametrize(
    "model", [FENCED, CARRIED, SPARSE, CARRIED_SPARSE], ids=["two", "carried", "sparse", "carried-sparse"]
)
def test_a_backward_in_halves_has_the_same_bits(model):
    whole, halves = make_compute(model), make_compute(model)
    run(whole, [0, 1, 2], 4)
    run_split(halves, [0, 1, 2], 4)
    assert all(sums(halves)[index].equal(total) for index, total in sums(whole).items())


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_the_gradient_is_that_of_autograd_with_both_directions_coded(codec):
    model = replace(GPT, fences={1: codec})
    compute = make_compute(model, dtype=torch.float32)
    tokens, targets = batch(0)
    compute.forward(range(4), 0, tokens, targets, train=False)
    layers = [build_layer(spec, SEED, index).eval() for index, spec in enumerate(model.layers)]
    value = layers[1](layers[0](tokens))
    passed = decode_tensor(encode_tensor(value.detach(), codec)).requires_grad_()
    loss = model.loss(layers[3](layers[2](passed)), targets)
    assert compute.losses[0] == float(loss.detach())  # also in evaluation

    plain = replace(WITHOUT_DROPOUT, fences={1: codec})
    compute = make_compute(plain)
    run(compute, [0], 4)
    (gradient,) = torch.autograd.grad(loss, [passed], retain_graph=True)
    back = decode_tensor(encode_tensor(gradient, codec))
    assert not back.equal(gradient)
    value.backward(back)
    loss.backward()
    maxima = [float(parameter.grad.abs().max()) for layer in layers for parameter in layer.parameters()]
    ours = [maximum for accumulator in compute.accumulators.values() for maximum in accumulator.maxima]
    assert ours == pytest.approx(maxima, rel=1e-4)


def test_fewer_bytes_cross_a_fence_in_both_directions():
    tokens, targets = batch(0)
    crossed = {}
    for codec in ("none", "bf16", "int8", "int4"):
        model = replace(GPT, fences={1: codec})
        front, back = make_compute(model, range(2)), make_compute(model, range(2, 4))
        value, forward_bytes = sent(front.forward(range(2), 0, tokens, None))
        back.forward(range(2, 4), 0, value, targets)
        gradient, backward_bytes = sent(back.backward(range(2, 4), 0, None))
        front.backward(range(2), 0, gradient)
        crossed[codec] = (forward_bytes, backward_bytes)
    raw = 4 * 8 * 16 * 4
    assert crossed["none"] == (raw, raw)
    room = 512  # a frame's description, and gaps
    for codec, payload in (("bf16", raw // 2), ("int8", 8 * 66), ("int4", 8 * 34)):
        assert all(payload < each <= payload + room for each in crossed[codec]), codec


def test_a_model_without_fences_takes_the_path_without_them():
    assert make_compute(GPT).fences is None
    plain, none = make_compute(GPT), make_compute(replace(GPT, fences={1: "none"}))
    for compute in (plain, none):
        run(compute, [0], 4)
    assert all(sums(none)[index].equal(total) for index, total in sums(plain).items())


def test_a_value_that_is_carried_over_fences_is_coded_once(monkeypatch):
    """At the second fence, and between, it crosses as the bytes that the first one has made."""
    calls = []

    def counting(leaf, codec):
        calls.append(tuple(leaf.shape))
        return encode_tensor(leaf, codec)

    monkeypatch.setattr(fences_module, "encode_tensor", counting)
    compute = make_compute(CARRIED)
    tokens, targets = batch(0)
    first = compute.forward(range(1), 0, tokens, None)
    second = compute.forward(range(1, 2), 0, sent(first)[0], None)
    third = compute.forward(range(2, 3), 0, sent(second)[0], None)
    assert [each.places.tolist() for each in (first, second, third)] == [[0, 1], [1], [0, 1]]
    assert first.value.skip.equal(second.value.skip) and first.value.skip.equal(third.value.skip)
    assert len(calls) == 3
    compute.forward(range(3, 4), 0, sent(third)[0], targets)
    calls.clear()
    gradient = compute.backward(range(3, 4), 0, None)
    assert [each.dtype for each in gradient] == [torch.uint8, torch.uint8] and len(calls) == 2
    gradient = compute.backward(range(2, 3), 0, gradient)
    assert [each.dtype for each in gradient] == [torch.float32, torch.uint8] and len(calls) == 2
    gradient = compute.backward(range(1, 2), 0, gradient)
    assert [each.dtype for each in gradient] == [torch.uint8, torch.uint8] and len(calls) == 3


def test_only_floating_point_tensors_are_coded():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, tokens):
            return self.table(tokens), tokens, tokens > 3, None

    compute = make_compute(replace(model_of(First, End), fences={0: "int8"}), range(1))
    tokens, _ = batch(0)
    value = compute.forward(range(1), 0, tokens, None)
    assert value.places.tolist() == [0]
    x, same, mask, nothing = Fences({0: "int8"}).opened(sent(value)[0])
    assert x.dtype == torch.float32 and same.equal(tokens) and mask.equal(tokens > 3) and nothing is None


def test_what_is_not_finite_passes_as_it_is_and_is_reported():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, tokens):
            x = self.table(tokens)
            return Both(x, x.detach().masked_fill(x.detach() > 0, -torch.inf))

    class Use(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 16)

        def forward(self, both):
            return self.map(both.x) * both.skip.isinf()

    compute = make_compute(replace(model_of(Masked, Use, loss=mean_square), fences={0: "int8"}))
    run(compute, [0, 1], 2)
    assert compute.nonfinite is None
    assert compute.fence_bypasses() == {"l0:int8 forward": 2}
    value = make_compute(replace(model_of(Masked, Use), fences={0: "int8"}), range(1)).forward(
        range(1), 0, batch(0)[0], None
    )
    assert value.places.tolist() == [0] and bool(value.value.skip.isinf().any())


def test_a_codec_never_runs_inside_a_layer(monkeypatch):
    """Neither when a layer is run again in backward nor for its determinism hash: one run and one coding for each
    direction."""
    calls = []

    def counting(leaf, codec):
        calls.append(codec)
        return encode_tensor(leaf, codec)

    monkeypatch.setattr(fences_module, "encode_tensor", counting)
    held = make_compute(FENCED)
    compute = Compute(
        ComputeRules(FENCED, SEED, recompute=True, has_determinism_check=True),
        held.layers,
        held.accumulators,
    )
    compute.begin(3, [[40] * len(layer.shape.tensors) for layer in held.layers.values()])
    run(compute, [0], 4)
    assert set(compute.determinism_hashes) == {0, 1, 2, 3}
    assert sorted(calls) == ["int4", "int4", "int8", "int8"]
    without = Compute(
        ComputeRules(GPT, SEED, recompute=True, has_determinism_check=True),
        held.layers,
        held.accumulators,
    )
    without.begin(3, [[40] * len(layer.shape.tensors) for layer in held.layers.values()])
    run(without, [0], 4)
    assert without.determinism_hashes == compute.determinism_hashes
    calls.clear()
    compute.try_out(0, batch(0)[0], prove=True)
    assert not calls


@pytest.mark.parametrize("model", [EVERY, SPARSE], ids=["every", "sparse"])
def test_an_interrupted_computation_goes_on_from_what_was_coded(model):
    class Interrupt(Exception):
        pass

    left = [3]

    class Interrupting(Surroundings):
        def check(self):
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt

    whole, compute = make_compute(model), make_compute(model, surroundings=Interrupting())
    run(whole, [0], 4)
    tokens, targets = batch(0)
    with pytest.raises(Interrupt):
        compute.forward(range(4), 0, tokens, targets)
    compute.forward(range(4), 0, tokens, targets)
    left[0] = 2
    with pytest.raises(Interrupt):
        compute.backward(range(4), 0, None)
    compute.backward(range(4), 0, None)
    assert all(sums(compute)[index].equal(total) for index, total in sums(whole).items())


@pytest.mark.parametrize("places", [[], [2], [-1]])
def test_a_value_that_names_other_tensors_is_refused(places):
    value = CodedValue((torch.zeros(3), torch.zeros(3)), torch.tensor(places, dtype=torch.int64))
    with pytest.raises(FrameError, match="a value of 2 tensors says that those at"):
        Fences({0: "int8"}).opened(value)
    with pytest.raises(FrameError, match="says that those at"):
        Fences({0: "int8"}).opened(value._replace(places=torch.zeros(1)))


def test_a_zero_of_the_other_sign_is_another_value():
    fences = Fences({0: "bf16", 1: "bf16"})
    zeros = torch.zeros(64)
    before = fences.closed(0, zeros, None, [])
    value = fences.closed(1, -zeros, before, [zeros])
    assert fences.opened(value).signbit().all()


@pytest.mark.parametrize("codec", ["topk3", "topk3-own"])
def test_a_gradient_has_the_places_of_the_activation_or_its_own(codec):
    """With the activation's it is the true gradient of the network in which the rest is zero, but for rounding."""
    model = replace(WITHOUT_DROPOUT, fences={1: codec})
    compute = make_compute(model)
    tokens, targets = batch(0)
    run(compute, [0], 4)
    layers = [build_layer(spec, SEED, index).eval() for index, spec in enumerate(model.layers)]
    value = layers[1](layers[0](tokens))
    passed = decode_tensor(encode_tensor(value.detach(), codec)).requires_grad_()
    loss = model.loss(layers[3](layers[2](passed)), targets)
    (gradient,) = torch.autograd.grad(loss, [passed], retain_graph=True)
    kept = (
        decode_tensor(encode_tensor(gradient, codec))
        if codec.endswith("own")
        else gradient.bfloat16().float() * (passed != 0)
    )
    assert int((kept != 0).sum()) == int((passed != 0).sum()) < passed.numel() / 2
    value.backward(kept)
    loss.backward()
    maxima = [float(parameter.grad.abs().max()) for layer in layers for parameter in layer.parameters()]
    ours = [maximum for accumulator in compute.accumulators.values() for maximum in accumulator.maxima]
    assert ours == pytest.approx(maxima, rel=1e-4)


def test_only_numbers_travel_backward_where_the_places_are_known():
    tokens, targets = batch(0)
    crossed = {}
    for codec in ("topk10", "topk10-own"):
        model = replace(GPT, fences={1: codec})
        front, back = make_compute(model, range(2)), make_compute(model, range(2, 4))
        value = front.forward(range(2), 0, tokens, None)
        back.forward(range(2, 4), 0, sent(value)[0], targets)
        gradient = back.backward(range(2, 4), 0, None)
        crossed[codec] = (value.value.nbytes, gradient.nbytes)
    assert crossed["topk10-own"][0] == crossed["topk10-own"][1] == crossed["topk10"][0]
    assert crossed["topk10"][1] == crossed["topk10"][0] - 64  # a bit for each of 512 numbers


def test_bytes_without_places_are_not_handed_on_to_a_tensor_with_other_places():
    """A layer whose gradient passes it bit for bit, while what it hands on is another tensor than it was given."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x + 10 * self.own.cumsum(0)

    class Begin(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, tokens):
            return self.table(tokens)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 16)

        def forward(self, x):
            return self.map(x)

    model = replace(model_of(Begin, Shift, Last), fences={0: "topk5", 1: "topk5"})
    tokens, targets = batch(0)
    compute = make_compute(model)
    values = [compute.forward(range(1), 0, tokens, None)]
    values.append(compute.forward(range(1, 2), 0, values[0], None))
    compute.forward(range(2, 3), 0, values[1], targets)
    behind = compute.backward(range(2, 3), 0, None)
    before = compute.backward(range(1, 2), 0, behind)
    first, second = (decode_tensor(each.value) for each in values)
    assert not (first != 0).equal(second != 0)
    places = [places_of(each.value) for each in values]
    assert decode_tensor(before, places[0]).equal(decode_tensor(behind, places[1]) * (first != 0))


def test_zeros_behind_a_relu_tie_and_change_nothing():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 16)

        def forward(self, tokens):
            return (self.table(tokens) - 1.5).relu()

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 16)

        def forward(self, x):
            return self.map(x)

    model = replace(model_of(Zeros, Last), fences={0: "topk3"})
    value = make_compute(model, range(1)).forward(range(1), 0, batch(0)[0], None)
    assert int((decode_tensor(value.value) != 0).sum()) < 512 // 3  # more zeros than there is room for
    whole = make_compute(model)
    run(whole, [0, 1], 2)
    front, back = make_compute(model, range(1)), make_compute(model, range(1, 2))
    for microbatch in (1, 0):
        tokens, targets = batch(microbatch)
        back.forward(range(1, 2), microbatch, sent(front.forward(range(1), microbatch, tokens, None))[0], targets)
        front.backward(range(1), microbatch, sent(back.backward(range(1, 2), microbatch, None))[0])
    together = sums(front) | sums(back)
    assert all(together[index].equal(total) for index, total in sums(whole).items())


def test_adaptive_fences_have_the_ratio_in_force_and_all_else_follows_from_the_bytes():
    model = replace(GPT, fences={0: "adatopk50", 1: "adatopk50"})
    compute, fixed = make_compute(model), make_compute(replace(GPT, fences={0: "topk7"}))
    compute.use_ratios({0: 7, 1: 1})
    for each in (compute, fixed):
        run(each, [0], 4)
    assert all(sums(compute)[index].equal(total) for index, total in sums(fixed).items())
    largest = make_compute(replace(GPT, fences={0: "topk50", 1: "topk50"}))
    compute = make_compute(model)
    for each in (compute, largest):
        run(each, [0], 4)
    assert all(sums(compute)[index].equal(total) for index, total in sums(largest).items())


def test_a_recorded_list_has_the_ratios_of_its_steps_whatever_the_run_would_choose():
    name = GPT.layers[1].name
    recorded = (FenceRatio(1, name, 4), FenceRatio(3, name, 9))
    compute = make_compute(replace(GPT, fences={1: "adatopk50"}, fence_ratios=recorded))
    exponents = [[40] * len(layer.shape.tensors) for layer in compute.layers.values()]
    tokens, _ = batch(0)

    def num_kept():
        value = compute.forward(range(2), 0, tokens, None, train=False)
        return int((decode_tensor(value.value) != 0).sum())

    kept = {}
    for step in (1, 2, 3):
        compute.begin(step, exponents)
        compute.use_ratios({1: 30})
        kept[step] = num_kept()
        compute.end_step(step)
        kept[step + 0.5] = num_kept()  # an evaluation has what is in force from the next step on
    assert kept[1] == kept[1.5] == kept[2] == 128 and kept[2.5] == kept[3] == kept[3.5] == 57
