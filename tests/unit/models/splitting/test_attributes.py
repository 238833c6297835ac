"""Plain attributes that a forward changes: a trace would keep the first value."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elaswave
from elaswave.errors import UsageError
from elaswave.models.splitting.attributes import ChangingAttributes
from elaswave.models.splitting.check import buffers_kept

x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Network(nn.Module):
    """What a test gives it happens in its forward.

    Args:
        happens: gets the network and a tensor, returns what is added to that.
        begins: attributes.
    """

    def __init__(self, happens: Callable[[Any, Tensor], Any], **begins: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.happens = happens
        vars(self).update(begins)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result: Tensor = self.second(hidden + self.happens(self, hidden))
        return result


def averages(network: Any, hidden: Tensor) -> Tensor:
    network.mean = 0.9 * network.mean + 0.1 * hidden.detach().mean(0)
    result: Tensor = network.mean
    return result


def counts(network: Any, hidden: Tensor) -> int:
    network.calls += 1
    return int(network.calls)


def initializes(network: Any, hidden: Tensor) -> Tensor | int:
    if network.is_first:
        network.is_first = False
        return 1
    return 0


def makes(network: Any, hidden: Tensor) -> Tensor:
    if not hasattr(network, "shift"):
        network.shift = hidden.detach() * 0.5
    result: Tensor = network.shift
    return result


def collects(network: Any, hidden: Tensor) -> int:
    network.past.append(float(len(network.past)))
    return len(network.past)


def keeps(network: Any, hidden: Tensor) -> Tensor:
    before = network.cache.value
    network.cache.value = before + 1.0
    result: Tensor = hidden * before
    return result


def writes_in_training(network: Any, hidden: Tensor) -> Any:
    if network.training:
        network.mean = hidden.detach().mean(0)
        return 0
    return network.mean


def draws(network: Any, hidden: Tensor) -> float:
    return float(network.source.random())


def stops(network: Any, hidden: Tensor) -> int:
    was = int(network.training)
    network.eval()
    return was


CHANGING: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], str]] = {
    "mean": (averages, {"mean": torch.zeros(8)}, r"reads the attribute mean at .*assigned at .*"),
    "calls": (counts, {"calls": 0}, r"attribute calls at .*assigned at .*"),
    "is_first": (initializes, {"is_first": True}, r"attribute is_first at .*only the first call changes it, call the"),
    "shift": (makes, {}, r"attribute shift at .*assigned at .*"),
    "past": (collects, {"past": []}, r"attribute past at .*changed in place"),
    "cache": (keeps, {"cache": SimpleNamespace(value=1.0)}, r"attribute cache at .*changed in place"),
    "of both modes": (writes_in_training, {"mean": torch.zeros(8)}, r"attribute mean at .*assigned at .*"),
    "source": (draws, {"source": random.Random(3)}, r"attribute source at .*changed in place"),
    "training": (stops, {}, r"attribute training at .*assigned at .*"),
}


@pytest.mark.parametrize("what", CHANGING)
def test_what_a_later_call_would_read_is_refused_with_the_lines(what: str) -> None:
    happens, begins, message = CHANGING[what]
    network = Network(happens, **begins)
    plain = {name: value for name, value in vars(network).items() if not name.startswith("_")}
    place = r"test_attributes\.py:\d+"
    with pytest.raises(UsageError, match=message.replace(" at .*", f" at .*{place}.*")):
        elaswave.split(network, x, 2)
    after = {name: value for name, value in vars(network).items() if not name.startswith("_")}
    assert after.keys() == plain.keys() and all(after[name] is value for name, value in plain.items())


def shows(network: Any, hidden: Tensor) -> int:
    network.seen = hidden
    network.size = network.seen.shape
    return 0


def caches(network: Any, hidden: Tensor) -> Tensor:
    if network.table is None or network.table.shape != hidden.shape:
        network.table = torch.ones_like(hidden).cumsum(0)
    result: Tensor = network.table
    return result


def converts(network: Any, hidden: Tensor) -> Tensor:
    network.scale = network.scale.to(hidden)
    result: Tensor = network.scale
    return result


def empty(network: Any, hidden: Tensor) -> int:
    network.table = dict(network.table)
    network.past.append(1)
    return int(network.past.pop())


@pytest.mark.parametrize(
    ("happens", "begins"),
    [
        (shows, {}),
        (converts, {"scale": torch.ones(8)}),
        (empty, {"table": {1: x}, "past": []}),
        (caches, {"table": None}),
    ],
)
def test_what_no_later_call_reads_is_nothing(happens: Any, begins: dict[str, Any]) -> None:
    network = Network(happens, **begins)
    if happens is caches:
        with pytest.raises(UsageError, match="attribute table at .*call the network once before it is split"):
            elaswave.split(network, x, 2)
        network(x)
    assert len(elaswave.split(network, x, 2)) == 2  # compares with the network
    assert not hasattr(network, "seen")


class Recurrent(nn.Module):
    """The library's own modules keep lists of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.norm, self.head = nn.LSTM(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.cells(x)[0]))
        return result


def test_torchs_own_modules_change_nothing() -> None:
    model = Recurrent()
    found = ChangingAttributes(model)
    for _ in range(2):
        with found.watched(), buffers_kept(model):
            model(x)
    found.refuse()
    assert "__getattribute__" not in vars(nn.Module)
    assert len(elaswave.split(model, x, 2)) == 2
