"""Draws come from the generator of the device that computes, keyed anew, also in networks that were cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elaswave.devices.interface import seed_at
from elaswave.models.layers import Call, inside
from elaswave.models.splitting import program
from elaswave.models.splitting.split import LINK_BYTES_PER_S, TracedNetwork


class Recorded:
    """A generator that says what it was seeded with."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def manual_seed(self, key: int) -> None:
        self.keys.append(key)


def test_the_generator_of_a_place_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    several, one = [Recorded(), Recorded()], Recorded()
    modules = {
        "cuda": SimpleNamespace(default_generators=several),
        "privateuseone": SimpleNamespace(manual_seed_all=one.manual_seed),
    }
    monkeypatch.setattr(torch, "get_device_module", lambda kind: modules[kind])
    before = torch.get_rng_state()
    for place in ("cuda:1", "privateuseone:0"):
        seed_at(torch.device(place), 2**64 - 1)
    assert (several[0].keys, several[1].keys, one.keys) == ([], [2**63 - 1], [2**32 - 1])
    assert torch.equal(before, torch.get_rng_state()), "the host's is another one"
    seed_at(torch.device("cpu"), 2**63 + 5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


class Drawing(nn.Module):
    """Draws from what it is given and from nothing, and makes a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.map(x), 0.5, self.training) + torch.rand(4)
        return hidden * torch.arange(hidden.shape[0], device=x.device)[:, None]


def test_a_part_draws_and_computes_where_its_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []
    monkeypatch.setattr(program, "seed_at", lambda place, key: places.append(place.type))
    layers = TracedNetwork(Drawing(), torch.randn(3, 4), LINK_BYTES_PER_S).layers((1,))
    inputs = torch.empty(3, 4, device="meta")
    value: Any = inputs
    for layer in layers:
        with inside(Call(lambda: inputs, (1, 2, 3))):
            value = layer.build().to("meta")(value)
    assert value.device.type == "meta"
    assert places == ["meta", "meta"]
