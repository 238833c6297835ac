"""The cuts are the best ones, and what cannot be cut is refused with the reason."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

import elaswave
from elaswave.errors import UsageError
from elaswave.models.layers import Call, inside
from elaswave.models.splitting.cut import CutCosts, balanced_cuts, bounds_of
from elaswave.models.splitting.split import TracedNetwork


def slowest(costs: CutCosts, cuts: tuple[int, ...]) -> float:
    return max(costs.part_s(start, stop) for start, stop in bounds_of(cuts, len(costs.compute_s)))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_no_other_cuts_have_a_faster_slowest_part(num_parts: int) -> None:
    draw = np.random.default_rng(num_parts)
    for _ in range(30):
        num_ops = int(draw.integers(num_parts, 12))
        cross = draw.exponential(0.3, num_ops + 1)
        cross[draw.random(num_ops + 1) < 0.2] = np.inf
        cross[0] = cross[-1] = 0.0
        costs = CutCosts(draw.exponential(1.0, num_ops), cross)
        every = [
            cuts
            for cuts in itertools.combinations(range(1, num_ops), num_parts - 1)
            if np.isfinite(slowest(costs, cuts))
        ]
        found = balanced_cuts(costs, num_parts)
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


class Custom(Writing):
    """Code that looks whether it is traced: its numbers are the same, and its gradients are not."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.map(x)
        return result.square() if _is_traced(x) else result * result.detach()


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, FakeTensor)


class WritingAView(Writing):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.map.weight[0].clamp_(-1, 1)
        result: Tensor = self.map(x)
        return result


class Remembering(Writing):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.map(x)
        return result


class CountingUses(Writing):
    """The backward of the multiplication needs what is then written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        result = self.map(x) * self.calls
        self.calls += 1
        return result


class Nothing(Writing):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Fields(Writing):
    def forward(self, x: Tensor) -> Any:
        return Answer(self.map(x))


@dataclass
class Answer:
    """What `torch.export` does not know."""

    value: Tensor


class Doubled(Writing):
    """Without a trace the only element of a gradient is another one: no operator of the trace makes other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain * 1.0 if _is_traced(x) else 2 * self.gain - self.gain.detach()
        result: Tensor = self.map(x) * gain
        return result


class LongHalf(Writing):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.map(x.half())  # a trace lets it pass
        return result


REFUSED = {
    "control flow": (Chosen, r"test_cut\.py:\d+ \(if x\.sum\(\) > 0:.*depends on the data; write both ways"),
    "a number": (Counting, r"aten\.item.* at .*test_cut\.py:\d+ .*takes a number from a tensor"),
    "a shape": (Selected, r"test_cut\.py:\d+ .*shape depends on the data"),
    "a parameter's view": (WritingAView, r"writes its parameter map\.weight at .*test_cut\.py:\d+"),
    "an attribute": (Remembering, r"writes the tensor calls at .*test_cut\.py:\d+.*no\s+buffer.*register_buffer"),
    "its own backward": (CountingUses, r"backward of the network fails at aten\.mul\.Tensor of .*test_cut\.py:\d+"),
    "no operator": (Nothing, "computes nothing"),
    "fields": (Fields, "returns something else than tensors.*Answer"),
    "one element": (Doubled, r"gradient of gain has other bits.*comes from aten\.mul\.Tensor at .*test_cut\.py:\d+"),
    "other types": (LongHalf, r"fails with the example inputs: aten\.linear\.default at .*test_cut\.py:\d+.*dtype"),
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
        ((torch.jit.ScriptModule(), x, 2), "given a TorchScript module, needed: the nn.Module"),
        ((model, {"input": 3}, 2), "hold 3 of type int at .*made of tensors"),
        ((model, x, 0), "num_parts is 0, needed: a whole number of at least 1"),
        ((model, x, 3), "can be cut into at most 2 parts, and num_parts is 3"),
        ((nn.Linear(4, 4, device="meta"), x, 2), "weight is on the meta device"),
        ((nn.LazyLinear(4), x, 2), r"weight has no shape yet \(a lazy module\): call the network once"),
        ((model, None, 2), "hold None of type NoneType"),
        ((model, [], 2), r"example_inputs is \[\], which holds no tensor; needed: the inputs of a micro-batch"),
        ((model, {0: x}, 2), r"keys of example_inputs are \[0\], needed: names"),
        ((model, x[:0], 2), r"example input float32 \[0, 4\] at \[0\] has no elements"),
        ((model, x.to_sparse(), 2), r"float32 \[2, 4\] at \[0\] is of layout torch.sparse_coo on cpu; needed: a dense"),
        ((model, torch.zeros(2, 5), 2), "cannot be traced at .*same reduction dim.*itself can be called with"),
        ((model, {"y": x}, 2), "unexpected keyword argument 'y'; give example inputs that the network itself can be"),
        ((model, x.double(), 2), r"fails with the example inputs: aten\.linear\.default at .*modules/linear\.py:\d+"),
        ((model, x, 2, [0.5]), r"cuts is \[0\.5\], needed: a list of numbers of operators"),
        ((model, x, 2, [7]), r"cannot be cut at \[7\]"),
        ((model, x, 2, None, "fast"), "link_bytes_per_s is 'fast', needed: more than 0"),
    ):
        with pytest.raises(UsageError, match=message):
            elaswave.split(*arguments[:3], **dict(zip(("cuts", "link_bytes_per_s"), arguments[3:])))


def test_a_module_that_is_frozen_may_be_used_twice() -> None:
    model = Shared()
    model.norm.eval()
    layers = elaswave.split(model, torch.randn(3, 4), 3)
    assert len(layers) == 3


class Moving(nn.Module):
    """Evaluation uses the buffer that training writes first, after all else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            result: Tensor = self.second(self.first(self.norm(x)))
            return result
        result = self.norm(self.second(self.first(x)))
        return result


class Exchanged(nn.Module):
    """Evaluation uses two modules with running statistics in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.one, self.two = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        first, last = (self.one, self.two) if self.training else (self.two, self.one)
        result: Tensor = last(self.map(first(x)))
        return result


def test_where_evaluation_cannot_be_cut_training_is_not() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)at most 1 parts.*places are none since evaluation .*another order.*test_cut\.py:\d+"
    ):
        elaswave.split(Exchanged(), torch.randn(3, 4), 2)
    network = TracedNetwork(Exchanged(), torch.randn(3, 4), 1e9)
    (place,) = [place for place, op in enumerate(network.train.ops) if op.target == "aten.linear.default"]
    with pytest.raises(UsageError, match=rf"cannot be cut at \[{place}\].*in training or evaluation"):
        network.checked_cuts([place])


def test_a_part_uses_in_evaluation_the_buffers_that_it_writes_in_training() -> None:
    model, x = Moving(), torch.randn(3, 4)
    network = TracedNetwork(model, x, 1e9)
    writes = max(place for place, op in enumerate(network.train.ops) if op.writes)
    for place in range(writes + 1, len(network.train.ops)):
        layers = network.layers((place,))
        names = [sorted(layer.build().state_dict()) for layer in layers]
        assert "norm.running_mean" in names[0] and not any("running" in name for name in names[1])
        value: Any = x
        for layer in layers:
            with inside(Call(lambda: x)), torch.no_grad():
                value = layer.build().eval()(value)
        assert torch.equal(value, model.eval()(x).detach())
        model.train()
