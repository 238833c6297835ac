"""Each use of a parameter is a term of its own, and what a network tells the engine is told, wherever it is cut."""

import pickle
from collections import Counter
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from tests.networks import Pictures, Texts, pictures, seeded, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave
from elaswave.api.given import OwnModelSpec
from elaswave.models.layers import Call, inside
from elaswave.models.splitting import split
from elaswave.models.splitting.check import bits_of, difference
from elaswave.models.splitting.split import LINK_BYTES_PER_S, TracedNetwork
from elaswave.state.flat import model_shapes

SIZE = 4


class Repeating(nn.Module):
    """One weight in a loop: as it is, through a view, through views of parts of it, cast, and computed from; an
    auxiliary loss in each round, and one of a parameter alone. It returns a parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.weight, self.gain = nn.Parameter(torch.randn(SIZE, SIZE) / 2), nn.Parameter(torch.ones(()))
        self.halves = nn.Parameter(torch.randn(2 * SIZE, SIZE) / 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        turned, scaled = self.weight.t(), self.weight / self.weight.norm()
        upper, lower = self.halves.chunk(2)
        for _ in range(2):
            x = torch.tanh(F.linear(x, self.weight) + x @ turned + x @ scaled) * self.gain
            with torch.autocast("cpu", torch.bfloat16):
                x = (F.linear(x, upper) + F.linear(x, lower) + F.linear(x, lower)).float()
            elaswave.aux_loss(x.square().mean())
        elaswave.aux_loss(self.halves.square().sum())
        return self.last(x), self.gain


def traced(model: nn.Module, inputs: Any) -> TracedNetwork:
    return TracedNetwork(model, inputs, LINK_BYTES_PER_S)


def allowed(network: TracedNetwork) -> list[int]:
    costs = network.costs.cross_s
    return [place for place in range(1, len(costs) - 1) if costs[place] < float("inf")]


def terms(layers: Any, inputs: Any) -> tuple[dict[str, Counter[bytes]], list[list[bytes]]]:
    """Bits of all gradients by parameter, as the engine adds them, and those of auxiliary losses by part."""
    found: dict[str, Counter[bytes]] = {}
    runs, value, told = [], inputs, []
    for index, layer in enumerate(layers):
        part, call = layer.build(), Call(lambda: inputs)
        given = [leaf.detach().requires_grad_(index > 0) for leaf in _tensors(value)]
        with inside(call):
            value = part(given[0] if len(given) == 1 else tuple(given))
        runs.append((layer, part, given, _tensors(value), call.aux_losses))
        told.append([bits_of(each) for each in call.aux_losses])
    reached = [torch.full_like(each, 0.5) for each in runs[-1][3]]
    for layer, part, given, made, told_here in reversed(runs):
        aux_losses = [each for each in told_here if each.requires_grad]
        named, ends = dict(part.named_parameters()), [*made, *aux_losses]
        inputs_of = [leaf for leaf in given if leaf.requires_grad]
        wanted, begin = [*named.values(), *inputs_of], [*reached, *map(torch.ones_like, aux_losses)]
        gradients = torch.autograd.grad(ends, wanted, begin, allow_unused=True) if wanted else ()
        for name, gradient in zip(named, gradients):
            full = layer.ties.get(name, layer.full_name(name))
            found.setdefault(full, Counter())[b"" if gradient is None else bits_of(gradient)] += 1
        reached = [
            torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
            for leaf, gradient in zip(inputs_of, gradients[len(named) :])
        ]
    return found, told


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def test_the_terms_of_a_parameter_do_not_depend_on_the_cuts() -> None:
    model, x = seeded(Repeating), torch.randn(3, SIZE)
    network = traced(model, x)
    alone, (told,) = terms(network.layers(()), x)
    assert {name: sum(found.values()) for name, found in alone.items() if sum(found.values()) > 1} == {
        "weight": 6, "gain": 3, "halves": 7,
    }  # fmt: skip
    assert len(told) == 3
    places = allowed(network)
    assert len(places) == len(network.train.ops) - 1, "it can be cut everywhere"
    ops = network.train.ops
    edges = tuple(place for place in places if ops[place].context != ops[place - 1].context)
    for cuts in [edges, *((place,) for place in places[::6]), tuple(places[1::7]), tuple(places[3::5])]:
        layers = network.layers(cuts)
        found, told_by_part = terms(layers, x)
        assert found == alone, cuts
        assert [each for part in told_by_part for each in part] == told, cuts
    assert difference(model, network.layers(tuple(places[::6])), network.layers(()), x) is None


def test_units_have_the_same_uses_wherever_the_network_is_cut() -> None:
    network = traced(seeded(Repeating), torch.randn(3, SIZE))
    places, found = allowed(network), []
    for cuts in ((), tuple(places[::9]), tuple(places[4::6])):
        layers = network.layers(cuts)
        shapes = model_shapes(OwnModelSpec(layers, F.mse_loss).spec)
        found.append({slot.name: shape.num_terms for shape in shapes for slot in shape.tensors})
    assert found[0] == found[1] == found[2] and found[0]["weight"] == 6 and found[0]["last.weight"] == 1
    one = OwnModelSpec(network.layers(()), F.mse_loss)
    own = sum(each.numel() for each in network.model.parameters())
    assert one.layer_parameters == (own,), "each is counted once"


def test_copies_and_what_travels_have_each_parameter_once() -> None:
    (layer,) = traced(seeded(Repeating), torch.randn(3, SIZE)).layers(())
    (arrived,) = pickle.loads(cloudpickle.dumps([layer]))
    for part in (layer.build(), arrived.build()):
        memory = {each.untyped_storage().data_ptr() for each in part.parameters()}
        assert len(memory) == 7 and len(list(part.parameters())) == 7 + 5 + 2 + 6
    assert torch.equal(arrived.build().weight, layer.build().weight)


class Turning(nn.Module):
    """Evaluation uses the maps in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        result: Tensor = self.three(self.two(x).relu()) if self.training else self.two(self.three(x).relu())
        return result


def test_what_evaluation_alone_uses_brings_no_term() -> None:
    network = traced(seeded(Turning), torch.randn(3, SIZE))
    uses, terms_by_cut = set(), set()
    for place in allowed(network):
        shapes = model_shapes(OwnModelSpec(network.layers((place,)), F.mse_loss).spec)
        uses.add(max(shape.num_uses for shape in shapes))
        terms_by_cut.add(max(shape.num_terms for shape in shapes))
    assert uses == {1, 2} and terms_by_cut == {1}


class Masked(nn.Module):
    """What the engine gives: a mask that does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        result: Tensor = self.last(hidden * elaswave.batch()["mask"])
        return result


def test_a_network_may_ask_for_its_batch() -> None:
    inputs = {"x": torch.randn(3, SIZE), "mask": torch.tensor([[1.0], [0.0], [1.0]])}
    network = traced(seeded(Masked), inputs)
    for place in allowed(network):
        layers = network.layers((place,))
        assert difference(network.model, layers, network.layers(()), inputs) is None, place


def test_an_auxiliary_loss_is_told_in_training_alone() -> None:
    x = torch.randn(3, SIZE)
    (part,) = [layer.build() for layer in traced(seeded(Repeating), x).layers(())]
    told = {}
    for is_training in (True, False):
        call = Call(lambda: x)
        with inside(call):
            part.train(is_training)(x)
        told[is_training] = len(call.aux_losses)
    assert told == {True: 3, False: 0}


class Counted(nn.Module):
    """An auxiliary loss of whole numbers and constants alone, which each part could compute for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        share = (tokens == 0).float().mean()
        elaswave.aux_loss(share)
        result: Tensor = self.last(self.table(tokens) * share)
        return result


def test_an_auxiliary_loss_of_whole_numbers_is_told_once() -> None:
    tokens_of_five = torch.tensor([[0, 3, 1], [2, 0, 4]])
    network = traced(seeded(Counted), tokens_of_five)
    for place in allowed(network):
        _, told = terms(network.layers((place,)), tokens_of_five)
        assert sum(map(len, told)) == 1, place


@pytest.mark.parametrize(("kind", "inputs"), [(Pictures, pictures), (Texts, tokens)])
def test_cuts_do_not_depend_on_time(kind: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_clock(*arguments: Any) -> None:
        raise AssertionError("a cut follows a clock")

    monkeypatch.setattr(split, "operator_seconds", no_clock)
    first, again = (traced(seeded(kind), inputs()) for _ in range(2))
    assert np.array_equal(first.costs.compute_s, again.costs.compute_s)
    assert np.array_equal(first.costs.cross_s, again.costs.cross_s)
    assert len({network.best_cuts(3) for network in (first, again)}) == 1
    monkeypatch.undo()
    assert first.graph().seconds > 0, "the graph is measured when somebody looks at it"


def test_costs_are_counted_products_and_bytes() -> None:
    model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Flatten(), nn.Linear(512, 64, bias=False))
    costs = traced(model, torch.randn(32, 64)).costs.compute_s
    products = 2 * 32 * 64 * 512 / 5e10
    assert costs[0] - costs[1] > 2 * products, "the inputs have no gradient, the weight has one"
    assert costs[-1] - costs[0] > 0.9 * products, "behind the first map both factors have one"


def test_attention_and_recurrence_count_on_every_processor() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.steps = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            heads = self.map(x).unsqueeze(1)
            mixed = F.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
            result: Tensor = self.steps(mixed)[0]
            return result

    network = traced(Attending(), torch.randn(2, 5, 8))
    flops = {op.target: count for op, count in zip(network.train.ops, network._train_flow.facts.flops)}
    assert flops["aten.scaled_dot_product_attention.default"] == 2 * 2 * 2 * 5 * 5 * 8
    assert flops["aten.lstm.input"] == 2 * 2 * 2 * 5 * 8 * 4 * 8
