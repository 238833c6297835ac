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
from elaswave.models.layers import Call, inside
from elaswave.models.splitting.check import difference
from elaswave.models.splitting.split import LINK_BYTES_PER_S, TracedNetwork

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


class Scaled(nn.Module):
    """A buffer that counts calls, assigned anew, and used before and after that."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.map(x) * self.calls  # its backward needs the old value
        self.calls = self.calls + 1
        return hidden / self.calls


class Averaged(nn.Module):
    """A buffer that is assigned what the data makes of it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return x * self.average


class Counters(nn.Module):
    """Buffers that count calls: written in place and assigned anew."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.norm = nn.Linear(4, 4), Scaled(), nn.BatchNorm1d(4)
        self.averaged, self.last = Averaged(), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.last(self.averaged(self.norm(self.scaled(self.first(x)))))
        return result


def test_buffers_that_count_calls_are_written_where_they_are_used() -> None:
    model, x = seeded(Counters), torch.randn(4, 4)
    network = traced(model, x)
    whole, places = network.layers(()), allowed(network)
    behind = [network.train.modules[place - 1] for place in places]
    assert {"first", "scaled", "norm", "averaged"} <= set(behind), "no write is left for the end of the network"
    for place in places:
        layers = network.layers((place,))
        assert difference(model, layers, whole, x) is None, place
    layers = elaswave.split(model, x, 2)
    built = [layer.build() for layer in layers]
    for calls in (1, 2):
        value: Any = x
        for part in built:
            with inside(Call(lambda: x)):
                value = part(value)
        state = {name: each for part in built for name, each in part.state_dict().items()}
        assert int(state["calls"]) == calls and float(state["scaled.calls"]) == 1 + calls
        assert int(state["norm.num_batches_tracked"]) == calls


class Swapped(nn.Module):
    """Two buffers that change places, one of which another tensor of the forward is written into."""

    one: Tensor
    two: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("one", torch.arange(4.0))
        self.register_buffer("two", -torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        self.one, self.two = self.two + 0.0, self.one * 2
        view = self.two[:2]
        hidden = self.first(x) + self.one
        view.add_(hidden.detach().mean())  # after the assignment, and part of it
        result: Tensor = self.second(hidden) + self.two
        return result


def test_assigned_buffers_may_change_places() -> None:
    model, x = seeded(Swapped), torch.randn(3, 4)
    network = traced(model, x)
    for place in allowed(network):
        assert difference(model, network.layers((place,)), network.layers(()), x) is None, place
    (part,) = [layer.build() for layer in network.layers(())]
    part(x)
    model(x)
    assert torch.equal(part.get_buffer("two"), model.two) and torch.equal(part.get_buffer("one"), model.one)


class InputViews(nn.Module):
    """An input that is written through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(0.5)
        result: Tensor = self.second(self.first(x)) + x
        return result


def test_the_data_stays_where_a_view_of_it_is_written() -> None:
    model, x = seeded(InputViews), torch.randn(3, 4)
    before = x.clone()
    network = traced(model, x)
    for place in allowed(network):
        layers = network.layers((place,))
        assert difference(model, layers, network.layers(()), x) is None, place
        run(layers, x, train=True)
    assert torch.equal(x, before)


class Spectral(nn.Module):
    """Complex numbers between real ones, one of them conjugated, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.first(x))
        mixed = (found * self.factor).t().conj() * found.t()
        mixed = mixed + (found + 1j).t()
        result: Tensor = self.second(torch.fft.irfft(mixed.t(), n=4))
        return result


def test_complex_numbers_cross_a_cut() -> None:
    model, x = seeded(Spectral), torch.randn(3, 4)
    network = traced(model, x)
    whole, places, facts = network.layers(()), allowed(network), network._train_flow.facts
    complex_places = 0
    for place in places:
        assert difference(model, network.layers((place,)), whole, x) is None, place
        crossing = network._train_flow.crossing(place)
        assert crossing is not None
        complex_places += any(facts.values[value].dtype.is_complex for value in crossing.values)
    assert complex_places >= 4
    assert len(elaswave.split(model, x, 2)) == 2


def test_spectral_norm_can_be_cut() -> None:
    """Evaluation computes from buffers alone what training computes while it writes them."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    layers = elaswave.split(model, torch.randn(3, 4), 2)
    assert "0.parametrizations.weight.0._u" in layers[0].build().state_dict()
    with torch.no_grad():
        assert torch.equal(run(layers, torch.ones(2 + 1, 4)), model.eval()(torch.ones(3, 4)))


class WithoutCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.second(self.first(x)), None


def test_what_is_returned_may_hold_nothing() -> None:
    model, x = WithoutCache(), torch.randn(2, 4)
    output, nothing = run(elaswave.split(model, x, 2), x)
    assert torch.equal(output, model(x)[0]) and nothing is None


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
