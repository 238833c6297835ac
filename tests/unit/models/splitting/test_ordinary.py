"""A trace takes the way of an ordinary call: what asks whether it is traced, and what looks at known numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elaswave
from elaswave.models.layers import Call, inside
from elaswave.models.splitting.split import LINK_BYTES_PER_S, TracedNetwork
from elaswave.models.splitting.trace import trace

ROWS, LENGTH, HEADS, WIDTH = 2, 8, 4, 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Attention(Base):
    """As transformers 5 has it: packed sequences have a mask of their own, and without a mask heads are grouped by the
    kernel, whose gradients have other bits than those of keys and values that are repeated by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, HEADS * WIDTH), nn.Linear(WIDTH, HEADS // 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        positions = torch.arange(LENGTH).unsqueeze(0).expand(ROWS, -1)
        packed = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        mask = None
        if torch.compiler.is_exporting() or isinstance(packed, torch._subclasses.FakeTensor) or packed.any():
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        queries = self.queries(x).view(ROWS, LENGTH, HEADS, WIDTH).transpose(1, 2)
        keys = self.keys(x).view(ROWS, LENGTH, HEADS // 2, WIDTH).transpose(1, 2)
        if mask is not None:
            keys = keys.repeat_interleave(2, 1)
        made = F.scaled_dot_product_attention(
            queries, keys, keys, attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None
        )
        result: Tensor = self.second(made.mean(1))
        return result


def test_attention_without_a_mask_stays_without_one() -> None:
    layers = elaswave.split(Attention(), torch.randn(ROWS, LENGTH, WIDTH), 3)  # compares with the network
    (attention,) = [op for op in layers.network.train.ops if "attention" in op.target]
    assert attention.args[3:] == (None, 0.0, True) and attention.kwargs["enable_gqa"]


class Asking(Base):
    """Only what it does when it is traced can be traced."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool(x.isnan().any()):
            raise ValueError("not a number")
        result: Tensor = self.second(self.first(x).relu())
        return result


class WritingLater(Base):
    """Writes a constant that it has used."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.ones(WIDTH)
        first = self.first(x) + weights
        weights.mul_(3)
        result: Tensor = self.second(first) + weights
        return result


class Filling(Base):
    """Writes values of the data into what begins as a constant."""

    def forward(self, x: Tensor) -> Tensor:
        filled = torch.zeros(ROWS, LENGTH, WIDTH)
        filled[:, 1:] = self.first(x)[:, 1:]
        result: Tensor = self.second(filled)
        return result


class Drawing(Base):
    """Draws whole numbers that depend on no input."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(LENGTH)
        flips = torch.randint_like(torch.zeros(LENGTH, 1, dtype=torch.long), 2)
        result: Tensor = self.second(self.first(x)[:, order] * flips)
        return result


class Repeating(Base):
    """A constant that is one row many times, and an operator that can tell by the strides."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(LENGTH, dtype=torch.float32)[:, None].expand(ROWS, LENGTH, WIDTH)
        result: Tensor = self.second((self.first(x) + places).cos()) * places.sum()
        return result


@pytest.mark.parametrize("kind", [Asking, WritingLater, Filling, Drawing])
def test_what_is_no_constant_stays_an_operator(kind: type[nn.Module]) -> None:
    layers = elaswave.split(kind(), torch.randn(ROWS, LENGTH, WIDTH), 2)  # compares with the network
    targets = [op.target for op in layers.network.train.ops]
    if kind is Drawing:
        assert [op.target for op in layers.network.train.ops if op.draws] == [
            "aten.randperm.default", "aten.randint_like.default",
        ]  # fmt: skip
    if kind is WritingLater:
        assert "aten.mul_.Tensor" in targets


def test_a_constant_that_is_repeated_stays_so() -> None:
    layers = elaswave.split(Repeating(), torch.randn(ROWS, LENGTH, WIDTH), 2)
    strides = [constant.stride() for constant in layers.network.train.constants.values()]
    assert strides == [(0, 1, 0), ()]
    kept = [buffer for layer in layers for buffer in layer.build().buffers() if buffer.dim() == 3]
    assert [buffer.stride() for buffer in kept] == [(0, 1, 0)]


class TwoConstants(Base):
    """Each mode has its own under the same name."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.arange(WIDTH) + (1 if self.training else 5)
        result: Tensor = self.second(self.first(x)) * weights
        return result


def test_constants_of_both_modes_are_kept_apart() -> None:
    model, x = TwoConstants(), torch.randn(ROWS, LENGTH, WIDTH)
    layers = elaswave.split(model, x, 2)
    for is_training in (True, False):
        value: Any = x
        for layer in layers:
            with inside(Call(lambda: x)):
                value = layer.build().train(is_training)(value)
        assert torch.equal(value, model.train(is_training)(x))


class Placed(Base):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.start = first

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)) + (torch.arange(WIDTH) + self.start)
        return result


def test_a_network_with_other_constants_is_another_network() -> None:
    x = torch.randn(ROWS, WIDTH)
    one, other, again = (TracedNetwork(Placed(first), x, LINK_BYTES_PER_S) for first in (1, 2, 1))
    assert [op.target for op in one.train.ops] == [op.target for op in other.train.ops]
    assert one.fingerprint == again.fingerprint != other.fingerprint


def test_questions_are_torchs_own_again() -> None:
    before = torch.compiler.is_compiling, torch.compiler.is_exporting
    trace(Attention(), torch.randn(ROWS, LENGTH, WIDTH))
    assert (torch.compiler.is_compiling, torch.compiler.is_exporting) == before
