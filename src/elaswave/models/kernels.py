"""The one kernel that models choose by hand: the product of a linear layer in float32 on a CPU.

torch hands it to MKL, which leaves AMD processors at half their speed; oneDNN, which torch contains too and uses for
bfloat16, does not. Measured on one core of an AMD EPYC (AVX-512), torch 2.13.0, forward and backward of 512 rows:
128 x 512 in 1.02 ms against 2.10, 320 x 1280 in 5.7 against 12.4 (230 against 105 GFLOP/s); the default model in 28 ms
against 40. The price is some 20 us per product, which shows in small ones.

Like MKL's, the result depends on shapes, strides and the kind of processor only.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

USE_ONEDNN = True
"""False: always torch's own choice. The two round differently, so all workers of a job must use the same."""


def _find_onednn() -> Any:
    """oneDNN's linear operator, which torch.compile uses too; None where torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN_LINEAR = _find_onednn()


class _Wanted(threading.local):
    """What `gradients_along` has been told in this thread: backwards of CPU tensors run in the thread that asks."""

    gradients: tuple[Collection[Node], bool] | None = None
    """None: everything."""


_WANTED = _Wanted()


@contextmanager
def gradients_along(way: Collection[Node], *, along: bool) -> Iterator[None]:
    """Saves products that will not be used while a backward runs in halves.

    torch's own kernels know which of their gradients are asked for, functions written in Python do not.

    Args:
        way: nodes of the graph on the way from output to input.
        along: True: gradients that stay on the way are wanted, False: those that leave it, or are off it.
    """
    _WANTED.gradients = (way, along)
    try:
        yield
    finally:
        _WANTED.gradients = None


def _is_wanted(node: Any, target: Node | None) -> bool:
    assert _WANTED.gradients is not None
    way, along = _WANTED.gradients
    return (node in way and target in way) is along


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` by oneDNN."""
    result: torch.Tensor = _ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return result


class _OneDNNLinear(torch.autograd.Function):
    """A linear map and its gradients, each product by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` [..., in], weight [out, in], bias [out] to [..., out]."""
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, weight and bias, contiguous."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        if _WANTED.gradients is not None:
            targets = [target for target, _ in ctx.next_functions]
            for_x, for_weight, for_bias = (
                needed and _is_wanted(ctx, target) for needed, target in zip(ctx.needs_input_grad, [*targets, None][:3])
            )
        gradient = gradient.contiguous()
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t(), None) if for_x else None,
            _product(rows.t(), x.flatten(0, -2).t(), None) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` with the faster of torch's kernels.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
    Returns:
        [..., out]
    """
    if not USE_ONEDNN or _ONEDNN_LINEAR is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    result: torch.Tensor = _OneDNNLinear.apply(x, weight, bias)
    return result
