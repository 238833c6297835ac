"""Parts of a network: their bits, names, ties, and what crosses the cuts."""

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from tests.networks import KINDS, Pictures, Texts, pictures, seeded, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave
from elaswave.errors import UsageError
from elaswave.models.calls import Call, inside
from elaswave.splitting.check import difference
from elaswave.splitting.split import LINK_BYTES_PER_S, TracedNetwork

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "pictures": (lambda: seeded(Pictures, dropout=0.2, blocks=2), pictures),
    "texts": (lambda: seeded(Texts, dropout=0.2), tokens),
}


def traced(model: nn.Module, inputs: Any) -> TracedNetwork:
    return TracedNetwork(model, inputs, LINK_BYTES_PER_S)


def allowed(network: TracedNetwork) -> list[int]:
    """Every place of a cut."""
    costs = network.costs.cross_s
    return [place for place in range(1, len(costs) - 1) if costs[place] < float("inf")]


def run(layers: Any, inputs: Any, *, train: bool = False) -> Any:
    """What parts return, one after the other."""
    value = inputs
    for layer in layers:
        part = layer.build().train(train)
        with inside(Call(lambda: inputs)):
            value = part(value)
    return value


@pytest.mark.parametrize("name", NETWORKS)
def test_any_cut_computes_the_bits_of_the_network(name: str) -> None:
    make, inputs = NETWORKS[name]
    model = make()
    network = traced(model, inputs())
    whole = network.layers(())
    with torch.no_grad():
        expected = model.eval()(**inputs())["logits"] if name == "texts" else model.eval()(inputs())
    model.train()
    places = allowed(network)
    assert len(places) > 0.5 * len(network.train.ops)
    for place in places[::3]:  # all of them have been tried once
        layers = network.layers((place,))
        assert difference(model, layers, whole, inputs()) is None, place
        found = run(layers, inputs())
        assert torch.equal(found["logits"] if name == "texts" else found, expected), f"in evaluation, cut at {place}"
    assert difference(model, network.layers(tuple(places[:: len(places) // 5])), whole, inputs()) is None


@pytest.mark.parametrize("name", NETWORKS)
def test_tensors_keep_their_names(name: str) -> None:
    make, inputs = NETWORKS[name]
    model = make()
    layers = elaswave.split(model, inputs(), 3)
    state = {}
    for layer in layers:
        for own, value in layer.build().state_dict(keep_vars=True).items():
            if own not in layer.ties:
                state[layer.full_name(own)] = value
    assert {own: value.shape for own, value in state.items()} == {
        own: value.shape for own, value in model.state_dict().items()
    }
    model.load_state_dict(state)


def test_a_parameter_that_two_parts_use_is_tied() -> None:
    layers = elaswave.split(seeded(Texts), tokens(), 3)
    assert [dict(layer.ties) for layer in layers] == [{}, {}, {"_part2.table.weight": "table.weight"}]


def test_what_depends_on_whole_numbers_alone_is_not_sent() -> None:
    model = seeded(Texts)
    network = traced(model, tokens())
    flow = network._train_flow
    for place in allowed(network):
        crossing = flow.crossing(place)
        assert crossing is not None
        for value in crossing.values:
            facts = flow.facts.values[value]
            assert facts.dtype == torch.float32 and facts.has_gradient(place), "no mask, position or table"


class Views(nn.Module):
    """A view that is written after it was taken, and its base that is used later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        base = self.first(x)
        part = base[:, :2]
        other = base.t()
        added = self.second(base * 2)
        part.mul_(3.0)
        return added + base + other.t().tanh()


def test_aliases_cross_once_and_stay_aliases() -> None:
    model, x = seeded(Views), torch.randn(4, 4)
    network = traced(model, x)
    flow, whole = network._train_flow, network.layers(())
    write = next(place for place, op in enumerate(network.train.ops) if "mul_" in op.target)
    crossing = flow.crossing(write)
    assert crossing is not None and len(crossing.values) == 2, "the base, and what is added to it"
    for place in allowed(network):
        assert difference(model, network.layers((place,)), whole, x) is None, place


class Modes(nn.Module):
    """Autocast, no_grad, a buffer that is assigned anew, an input that is written, and a constant."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(0.5)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.first(x).relu()
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * hidden.float().mean(0)
            scale = hidden.float().abs().amax()
        hidden = hidden.float() / (scale + 1) + torch.tensor([0.0, 1.0, 2.0, 3.0])
        return self.second(hidden) + x, hidden.argmax(-1) + y


def test_modes_buffers_and_unused_parameters_come_along() -> None:
    model, inputs = seeded(Modes), (torch.randn(3, 4), torch.arange(3))
    network = traced(model, inputs)
    whole, kept = network.layers(()), inputs[0].clone()
    for place in allowed(network):
        layers = network.layers((place,))
        assert difference(model, layers, whole, inputs) is None, place
        names = {name for layer in layers for name in layer.build().state_dict()}
        assert names == set(model.state_dict())
        assert not layers[0].build().get_parameter("unused.weight").requires_grad, "no optimizer decays it"
    assert torch.equal(inputs[0], kept) and not model.mean.any(), "splitting leaves inputs and buffers alone"


def test_layers_travel_to_other_processes() -> None:
    model = seeded(Texts)
    layers = list(elaswave.split(model, tokens(), 2))
    arrived = pickle.loads(cloudpickle.dumps(layers))
    with torch.no_grad():
        assert torch.equal(run(arrived, tokens())["logits"], run(layers, tokens())["logits"])


def test_other_shapes_are_refused() -> None:
    layers = elaswave.split(seeded(Texts), tokens(2), 2)
    with pytest.raises(
        UsageError, match=r"\['mask'\] bool \[3, 6\].*traced with \['mask'\] bool \[2, 6\].*Pad to one size"
    ):
        run(layers, tokens(3))


def test_dropout_is_keyed_by_its_operator_not_by_the_cuts() -> None:
    model, inputs = seeded(Pictures, dropout=0.5), pictures()
    network = traced(model, inputs)

    def keyed(cuts: tuple[int, ...], key: tuple[int, ...]) -> Tensor:
        value: Any = inputs
        for index, layer in enumerate(network.layers(cuts)):
            torch.manual_seed(100 + index)  # as the engine does: by layer
            with inside(Call(lambda: inputs, key)):
                value = layer.build()(value)
        assert value.shape == (2, KINDS)
        return value.detach()

    places = allowed(network)
    once = keyed((places[3],), (1, 2, 3))
    assert torch.equal(once, keyed((places[5], places[9]), (1, 2, 3)))
    assert not torch.equal(once, keyed((places[3],), (1, 2, 4))), "another micro-batch"


def test_another_split_of_the_same_network_has_the_same_fingerprint() -> None:
    first, second = (elaswave.split(seeded(Pictures), pictures(), 2) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    again = second.cut_at(first.cuts, first.fingerprint)
    assert again.cuts == first.cuts
    other = elaswave.split(seeded(Pictures, blocks=2), pictures(), 2)
    with pytest.raises(UsageError, match="the run was begun with another network"):
        other.cut_at(first.cuts, first.fingerprint)
    with pytest.raises(UsageError, match=r"cannot be cut at \[0\]"):
        other.cut_at((0,))


def test_the_loss_goes_down_when_parts_are_called_like_layers() -> None:
    model = nn.Sequential(*[layer.build() for layer in elaswave.split(seeded(Pictures), pictures(8), 3)])
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(model(pictures(8)), torch.arange(8) % KINDS)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
