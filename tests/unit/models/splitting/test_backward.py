"""What of a network runs in its backward and is in no trace is refused by name; what a trace has, stays."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import elaswave
from elaswave.errors import UsageError
from elaswave.models.splitting.backward import BackwardCode, functions_in
from elaswave.models.splitting.check import difference
from elaswave.models.splitting.split import LINK_BYTES_PER_S, TracedNetwork


class Clamp(torch.autograd.Function):
    """Whose gradient passes straight through: nothing shows where no number is clamped."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-100, 100)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


clamp = Clamp.apply  # a name of its own, as libraries have it


@torch.library.custom_op("elaswave_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return Clamp.apply(x) * 1  # below autograd


@tripled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tripled.register_autograd(lambda ctx, gradient: 3 * gradient)


@torch.library.custom_op("elaswave_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Network(nn.Module):
    """Two maps, and something between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second, self.inner = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.between(self, self.first(x)))
        return result


def hooked(owner: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: None)
    return x


def hooked_node(owner: Any, x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda gradients: None)
    return x


def hooked_by_torch(owner: Any, x: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([x], lambda gradients: None)
    return x


def hooked_leaf(owner: Any, x: Tensor) -> Tensor:
    owner.inner.weight.register_post_accumulate_grad_hook(lambda leaf: None)
    result: Tensor = owner.inner(x)
    return result


def hooked_module(owner: Any, x: Tensor) -> Tensor:
    owner.inner.register_full_backward_hook(lambda *given: None)
    return x


def saved(hooks: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any, Tensor], Tensor]:
    def between(owner: Any, x: Tensor) -> Tensor:
        with hooks():
            return x.exp()

    return between


def told(owner: Any, x: Tensor) -> Tensor:
    elaswave.aux_loss(clamp(x).mean())
    return x


def again(region: Callable[[Any, Tensor], Tensor], *, reentrant: bool = False) -> Callable[[Any, Tensor], Tensor]:
    def between(owner: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda value: region(owner, value), x, use_reentrant=reentrant)
        return result

    return between


def inner(owner: Any, x: Tensor) -> Tensor:
    result: Tensor = F.dropout(owner.inner(x), 0.5)
    return result


LINE = r"at .*test_backward\.py:\d+"
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "function": (lambda owner, x: clamp(x), f"calls the autograd.Function Clamp {LINE}.*register_autograd"),
    "function for an auxiliary loss": (told, f"autograd.Function Clamp {LINE}"),
    "function in a checkpoint": (again(lambda owner, x: clamp(x)), f"autograd.Function Clamp {LINE}"),
    "checkpoint": (again(inner, reentrant=True), f"use_reentrant=True {LINE}.*pass use_reentrant=False"),
    "hook": (hooked, f"calls register_hook {LINE}"),
    "hook in a checkpoint": (again(hooked), f"calls register_hook {LINE}"),
    "hook of a node": (hooked_node, f"calls register_prehook of a node {LINE}"),
    "hook by torch": (hooked_by_torch, f"calls register_hook {LINE}"),
    "hook of a leaf": (hooked_leaf, "parameter inner.weight has a gradient hook"),
    "hook of a module": (hooked_module, "module inner has a backward hook"),
    "hook of what is saved": (
        saved(lambda: saved_tensors_hooks(lambda x: x, lambda x: 2 * x)),
        f"calls saved_tensors_hooks {LINE}",
    ),
    "silent draws": (lambda owner, x: noisy(x), f"noisy.default {LINE}.*draws.*nondeterministic_seeded"),
    "sparse": (
        lambda owner, x: F.embedding(x.argmax(-1), owner.inner.weight, sparse=True),
        "sparse gradient of inner.weight",
    ),
    "sparse of what is computed": (
        lambda owner, x: F.embedding(x.argmax(-1), owner.inner.weight * 2, sparse=True),
        "sparse gradient of what it is given: look vectors up with sparse=False",
    ),
}  # fmt: skip


def traced(between: Callable[[Any, Tensor], Tensor]) -> TracedNetwork:
    torch.manual_seed(3)
    return TracedNetwork(Network(between), torch.randn(3, 4), LINK_BYTES_PER_S)


@pytest.mark.parametrize("what", REFUSED)
def test_code_in_the_backward_is_refused_with_its_line(what: str) -> None:
    between, message = REFUSED[what]
    with pytest.raises(UsageError, match=f"(?s){message}"):
        traced(between)


def drawn_apart(owner: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = clamp(owner.inner(x))
    return x * mask + clamp(x).detach()


KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function without a gradient": drawn_apart,
    "operator with a backward of its own": lambda owner, x: tripled(x),
    "checkpoint": again(inner),
    "saved on the host": saved(save_on_cpu),
    "straight through": lambda owner, x: x + (x.round() - x).detach(),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_a_trace_has_is_kept(what: str) -> None:
    network = Network(KEPT[what])
    assert len(elaswave.split(network, torch.randn(3, 4), 2)) == 2, "compared with the network"


class CppNode:
    """As torch shows a node of a Function that is written in C++ and belongs to no operator."""

    next_functions = ()

    def name(self) -> str:
        return "torch::autograd::CppNode<Straight>"


def test_functions_of_cpp_are_refused_unless_the_trace_has_them() -> None:
    ends: Any = [SimpleNamespace(grad_fn=CppNode())]
    with pytest.raises(UsageError, match=r"CppNode<Straight> at a place that Python does not see.*not in a trace"):
        BackwardCode().refuse(ends, {})
    BackwardCode().refuse(ends, functions_in(ends))


def test_hooks_from_before_are_refused() -> None:
    def registered(register: Callable[[Network], Any], message: str) -> None:
        network = Network(inner)
        handle = register(network)
        with pytest.raises(UsageError, match=message):
            elaswave.split(network, torch.zeros(3, 4), 2)
        handle.remove()

    registered(lambda each: each.first.weight.register_hook(lambda g: g), "parameter first.weight has a gradient hook")
    registered(lambda each: each.first.register_full_backward_pre_hook(lambda *g: None), "first has a backward hook")
    registered(
        lambda each: nn.modules.module.register_module_full_backward_hook(lambda *g: None), "hook is registered for all"
    )


def otherwise_traced(owner: Any, x: Tensor) -> Tensor:
    """Two ways for small numbers, which are the same, and for large ones."""
    bound = 8.0
    return x.clamp(-bound, bound) if isinstance(x, FakeTensor) else x + (x.clamp(-bound, bound) - x).detach()


def test_what_shows_on_large_inputs_alone_is_found() -> None:
    torch.manual_seed(3)
    network, x = Network(otherwise_traced), torch.full((3, 4), 0.5)
    found = TracedNetwork(network, x, LINK_BYTES_PER_S)
    assert difference(network, found.layers((1,)), found.layers(()), x) is None, "the example says nothing"
    with pytest.raises(UsageError, match=r"has other bits .*operator that differs is .*clamp"):
        elaswave.split(network, x, 2)


def used_again(owner: Any, x: Tensor) -> Tensor:
    """In a trace the gradient of one use is lost."""
    again = owner.inner(x)
    result: Tensor = owner.inner(again.detach() if isinstance(x, FakeTensor) else again) + again.detach()
    return result


def test_a_parameter_of_several_uses_is_compared() -> None:
    network = Network(used_again)
    network.first.requires_grad_(False)
    with pytest.raises(UsageError, match=r"the gradient of inner\.\w+ has other bits"):
        elaswave.split(network, torch.randn(3, 4), 2)


def test_a_profiler_of_the_script_goes_on() -> None:
    import cProfile
    import sys

    seen: list[str] = []
    before, profiler = sys.getprofile(), cProfile.Profile()
    for begin, end in (
        (lambda: sys.setprofile(lambda frame, event, called: seen.append(event)), lambda: sys.setprofile(before)),
        (profiler.enable, profiler.disable),
    ):
        begin()
        try:
            traced(inner)
            _marked()
        finally:
            end()
    assert seen
    assert any("_marked" in str(key) for key in profiler.getstats())


def _marked() -> AbstractContextManager[None]:
    return nullcontext()
