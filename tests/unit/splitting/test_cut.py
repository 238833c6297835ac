"""The cuts are the best ones, and what cannot be cut is refused with the reason."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elaswave
from elaswave.errors import UsageError
from elaswave.splitting.cut import Costs, best_cuts, bounds_of


def slowest(costs: Costs, cuts: tuple[int, ...]) -> float:
    return max(costs.part_s(start, stop) for start, stop in bounds_of(cuts, len(costs.compute_s)))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_no_other_cuts_have_a_faster_slowest_part(num_parts: int) -> None:
    draw = np.random.default_rng(num_parts)
    for _ in range(30):
        num_ops = int(draw.integers(num_parts, 12))
        cross = draw.exponential(0.3, num_ops + 1)
        cross[draw.random(num_ops + 1) < 0.2] = np.inf
        cross[0] = cross[-1] = 0.0
        costs = Costs(draw.exponential(1.0, num_ops), cross)
        every = [
            cuts
            for cuts in itertools.combinations(range(1, num_ops), num_parts - 1)
            if np.isfinite(slowest(costs, cuts))
        ]
        found = best_cuts(costs, num_parts)
        if not every:
            assert found is None
        else:
            assert found is not None and len(found) == num_parts - 1
            assert slowest(costs, found) == pytest.approx(min(slowest(costs, cuts) for cuts in every), rel=1e-12)


class Shared(nn.Module):
    """One module with running statistics, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.map(self.norm(x)))
        return result


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.argmax().item()


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # this line
            return x
        return -x


class Selected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class Lucky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import random

        return x * random.random()


class Cached(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x, "text"


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.map.weight.clamp_(-1, 1)
        result: Tensor = self.map(x)
        return result


def square(x: Tensor) -> Tensor:
    result: Tensor = _Square.apply(x)
    return result


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] * gradient  # not what autograd makes of the forward


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return square(self.map(x))


REFUSED = {
    "control flow": (Chosen, r"test_cut\.py:\d+ \(if x\.sum\(\) > 0:.*depends on the data; write both ways"),
    "a number": (Counting, r"aten\.item.* at .*test_cut\.py:\d+ .*takes a number from a tensor"),
    "a shape": (Selected, r"test_cut\.py:\d+ .*shape depends on the data"),
    "another generator": (Lucky, "draws from Python's random"),
    "no tensors": (Cached, "returns something else than tensors"),
    "a parameter": (Writing, r"writes its parameter map\.weight at .*test_cut\.py:\d+"),
    "shared state": (Shared, r"at most \d parts.*share mutable state.*norm\.\w+ \(.*test_cut\.py:\d+"),
    "another backward": (Custom, r"gradient of map\.weight has other bits.*first operator that differs.*test_cut\.py"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_line(what: str) -> None:
    kind, message = REFUSED[what]
    num_parts = 5 if what == "shared state" else 2
    with pytest.raises(UsageError, match=f"(?s){message}"):
        elaswave.split(kind(), torch.rand(3, 4) + 1, num_parts)


def test_wrong_arguments_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4)
    for arguments, message in (
        ((x, x, 2), "given a Tensor, needed: an nn.Module"),
        ((model, {"input": 3}, 2), "hold 3 of type int at .*made of tensors"),
        ((model, x, 0), "num_parts is 0, needed: a whole number of at least 1"),
        ((model, x, 3), "can be cut into at most 2 parts, and num_parts is 3"),
        ((nn.Linear(4, 4, device="meta"), x, 2), "weight is on the meta device"),
    ):
        with pytest.raises(UsageError, match=message):
            elaswave.split(*arguments)


def test_a_module_that_is_frozen_may_be_used_twice() -> None:
    model = Shared()
    model.norm.eval()
    layers = elaswave.split(model, torch.randn(3, 4), 3)
    assert len(layers) == 3
