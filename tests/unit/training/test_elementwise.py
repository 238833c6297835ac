"""Which optimizers are refused, with which reason; what the trial leaves as it was."""

import random

import numpy as np
import pytest
import torch
from tests.unit.shapes import make_shape
from tests.unit.training.blocks import SHAPE, tried
from tests.unit.training.test_torch_optimizer import OPTIMIZERS

from elaswave.errors import OptimizerError
from elaswave.training import elementwise
from elaswave.training.elementwise import try_out
from elaswave.training.own_optimizer import OwnOptimizer
from elaswave.training.parameters import make_optimizer, stand_ins

MATRICES = make_shape([(8, 6), (40, 33)])


class MuonForMatrices(torch.optim.AdamW):
    """Updates matrices as Muon does (by the sign of a product), and vectors as AdamW: looks elementwise on runs."""

    @torch.no_grad()
    def step(self, closure=None):
        vectors = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dim() == 2:
                    parameter.sub_(torch.sign(parameter.grad @ parameter.grad.T @ parameter.grad), alpha=group["lr"])
                elif parameter.grad is not None:
                    vectors.append(parameter)
        kept = self.param_groups
        self.param_groups = [{**kept[0], "params": vectors}]
        super().step()
        self.param_groups = kept


class NeedsGradients(torch.optim.Optimizer):
    """Does not look whether there is a gradient: the rule that it may rely on is that all are there."""

    def __init__(self, parameters, lr=0.1, decay=0.5):
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                average.mul_(group["decay"]).add_(parameter.grad)
                parameter.sub_(average, alpha=group["lr"])


class Normed(torch.optim.SGD):
    """Clips by the norm of each tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-6)
        super().step()


class AfterSixNormed(torch.optim.SGD):
    """Elementwise for six updates."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    count = self.state[parameter].setdefault("count", torch.tensor(0.0))
                    count += 1
                    if count > 6:
                        with torch.no_grad():
                            parameter.div_(parameter.norm())


class Noisy(torch.optim.SGD):
    """Draws."""

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Elsewhere(torch.optim.SGD):
    """Updates what it was made of, not what its groups hold."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


class Idle(torch.optim.SGD):
    def step(self, closure=None):
        pass


class Stateful(torch.optim.SGD):
    """Keeps what it is told to."""

    make = staticmethod(lambda parameter, count: None)

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    count = state["count"] = state.get("count", 0) + 1
                    for name, value in self.make(parameter, count).items():
                        state[name] = value


def keeping(make):
    kind = type("Keeping", (Stateful,), {"make": staticmethod(make)})
    return lambda parameters: kind(parameters, lr=0.1)


class BeginsWithValues(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["begun"] = parameter.detach().clone()


REFUSED = {
    "LBFGS": (lambda p: torch.optim.LBFGS(p), SHAPE, r"torch\.optim\.LBFGS cannot be used: layer0\.t0.*closure"),
    "Adafactor": (lambda p: torch.optim.Adafactor(p), SHAPE, r"torch\.optim\.Adafactor cannot be used: layer0\."),
    "Muon": (lambda p: torch.optim.Muon(p), MATRICES, r"torch\.optim\.Muon cannot be used: layer0\.t0 \[8, 6\]: "),
    "SparseAdam": (
        lambda p: torch.optim.SparseAdam(list(p)),
        SHAPE,
        "SparseAdam cannot be used: layer0.*dense gradients",
    ),
    "Muon that falls back": (
        lambda p: MuonForMatrices(p, lr=0.1),
        MATRICES,
        r"layer0\.t0 \[8, 6\]: it keeps nothing of",
    ),
    "norms": (lambda p: Normed(p, lr=0.1), SHAPE, r"layer0\.\w+ \[.*\]: update 1 gives the parameter other bits when"),
    "norms later": (lambda p: AfterSixNormed(p, lr=0.1), SHAPE, "update 7 gives the parameter other bits"),
    "draws": (lambda p: Noisy(p, lr=0.1), SHAPE, "update 1 gives the parameter other bits"),
    "parameters elsewhere": (lambda p: Elsewhere(p, lr=0.1), SHAPE, "update 1 gives the parameter other bits"),
    "idle": (lambda p: Idle(p, lr=0.1), SHAPE, "16 steps leave it as it is"),
    "double": (keeping(lambda p, n: {"sum": p.double()}), SHAPE, r"its state sum is torch\.float64, and blocks hold"),
    "list": (keeping(lambda p, n: {"all": [1]}), SHAPE, "its state all has type list"),
    "shape": (keeping(lambda p, n: {"row": p.new_zeros(2)}), SHAPE, r"its state row has shape \[2\]"),
    "late": (
        keeping(lambda p, n: {"slow": torch.zeros_like(p)} if n > 4 else {}),
        SHAPE,
        "its states after update 5 are others than after the first: count, slow, not count",
    ),
    "reserved": (keeping(lambda p, n: {"ema": p.clone()}), SHAPE, 'its state has the name "ema", which elaswave uses'),
    "number": (
        keeping(lambda p, n: {"size": float(p.numel())}),
        SHAPE,
        "its state size is .* after update 1, but 32.0 for another",
    ),
    "shape of the whole": (
        keeping(lambda p, n: {"sum": torch.zeros_like(p) if p.dim() < 2 else torch.zeros(p.numel())}),
        SHAPE,
        r"its state sum has the shape \[",
    ),
    "begins with values": (
        lambda p: BeginsWithValues(p, lr=0.1),
        SHAPE,
        "its state begun begins with values that differ",
    ),
    "begins otherwise": (
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1) if False else Uneven(p, lr=0.1),
        SHAPE,
        "it begins with other states than other tensors of its parameter group",
    ),
    "capturable": (lambda p: torch.optim.AdamW(p, capturable=True), SHAPE, "AdamW cannot be used: layer0.*capturable"),
    "differentiable": (lambda p: torch.optim.AdamW(p, differentiable=True), SHAPE, "in-place operation"),
    "tensor option": (
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5)),
        SHAPE,
        "option lr .* is a tensor; give the number 0.5",
    ),
}


class Uneven(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    self.state[parameter]["begun"] = torch.zeros_like(parameter)


@pytest.mark.parametrize(("factory", "shape", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(factory, shape, message):
    with pytest.raises(OptimizerError, match=message):
        try_out(factory, shape.tensors)


def test_step_hooks_are_refused():
    def hooked(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *arguments: None)
        return optimizer

    with pytest.raises(OptimizerError, match="has step hooks, which would run once for each block"):
        try_out(hooked, SHAPE.tensors)


def test_a_callable_that_groups_otherwise_each_time_is_refused():
    calls = []

    def grouped(parameters):
        calls.append(1)
        pattern = "*.t0" if len(calls) == 1 else "*.t1"
        groups = [{"params": parameters.named(pattern)}, {"params": parameters.except_named(pattern)}]
        return torch.optim.SGD(groups, lr=0.1)

    with pytest.raises(OptimizerError, match="gives parameters other groups when it is called again"):
        try_out(grouped, SHAPE.tensors)


def test_what_is_found():
    found = try_out(
        lambda p: torch.optim.Adam(
            [{"params": p.named("*.t0")}, {"params": p.except_named("*.t0"), "amsgrad": True}], lr=0.1
        ),
        SHAPE.tensors,
    )
    assert found.groups == {slot.name: int(slot.name != "layer0.t0") for slot in SHAPE.tensors}
    assert [each.states for each in found.traits] == [
        ("exp_avg", "exp_avg_sq"),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ]
    assert [each.scalars for each in found.traits] == [(("step", "float32"),)] * 2
    assert found.slots == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert found.late == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


def test_random_states_are_left_as_they_were():
    def drawing(parameters):
        random.random(), np.random.rand(), torch.rand(1)
        return torch.optim.SGD(parameters, lr=0.1)

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    num_threads = torch.get_num_threads()
    try_out(drawing, SHAPE.tensors)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert torch.get_num_threads() == num_threads


def test_a_huge_model_is_tried_on_a_part(monkeypatch):
    sizes = [(1 << 20, 1 << 14), *((4 + number, 1 << 16) for number in range(60)), (1 << 24,), ()]
    shape = make_shape(sizes)
    seen = []
    samples = elementwise._Trial(lambda p: torch.optim.SGD(p, lr=0.1), shape.tensors)._samples
    seen = [(slot.numel, len(slot.shape)) for slot in samples]
    assert len(seen) == elementwise.TENSORS_MAX
    assert sum(numel for numel, _ in seen) <= elementwise.ELEMENTS_MAX
    assert {dimensions for _, dimensions in seen} == {0, 1, 2}
    assert stand_ins(shape.tensors).names[0] == "layer0.t0"


def test_a_group_without_elements_is_no_obstacle():
    shape = make_shape([(4, 3), (0,)])
    found = try_out(
        lambda p: torch.optim.AdamW([{"params": p.named("*.t0")}, {"params": p.named("*.t1")}]), shape.tensors
    )
    assert found.traits[1].states == ()


@pytest.mark.parametrize("name", ["AdamW", "RAdam"])
def test_a_learning_rate_of_zero_changes_nothing_and_is_accepted(name):
    assert OPTIMIZERS[name] is not None
    assert tried(lambda p: torch.optim.AdamW(p, lr=0.0)).slots == ("exp_avg", "exp_avg_sq")


def test_an_optimizer_need_not_look_whether_there_are_gradients(monkeypatch):
    monkeypatch.setattr(elementwise, "TENSORS_MAX", 2)
    shape = make_shape([(8, 6), (8, 6), (5,), (0,), (), (40, 33), (3, 3)])
    for factory in (
        NeedsGradients,
        lambda p: NeedsGradients([{"params": p.named("*.t0", "*.t2", "*.t3")}, {"params": p.except_named("*.t[023]")}]),
    ):
        assert try_out(factory, shape.tensors).slots == ("average",)


def test_numpys_numbers_are_options_as_pythons_are():
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=np.float32(0.5), betas=(np.float64(0.5), 0.25), eps=np.float64(0.125))

    optimizer = make_optimizer(make, stand_ins(SHAPE.tensors))
    group = optimizer.param_groups[0]
    assert [type(group[name]) for name in ("lr", "eps")] == [float, float] and group["betas"] == (0.5, 0.25)
    assert type(group["betas"][0]) is float
    updaters = [
        OwnOptimizer(make, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: np.float64(0.5) ** step))(
            (SHAPE,)
        ).updater()
        for _ in range(2)
    ]
    for step in (1, 2):
        updaters[0].committed(step, 0.0, updates=True)
    updaters[1].load(updaters[0].state(), 2)
    assert updaters[1].state() == updaters[0].state() and updaters[1].learning_rate == 0.125
