"""The one kernel that models choose by hand: the product of a linear layer in float32 on a CPU.

torch hands it to MKL, which leaves AMD processors at half their speed; oneDNN, which torch contains too and uses for
bfloat16, does not. Measured on one core of an AMD EPYC (AVX-512), torch 2.13.0, forward and backward of 512 rows:
128 x 512 in 1.02 ms against 2.10, 320 x 1280 in 5.7 against 12.4 (230 against 105 GFLOP/s); the default model in 28 ms
against 40. The price is some 20 us per product, which shows in small ones.

Like MKL's, the result depends on shapes, strides and the kind of processor only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

USE_ONEDNN = True
"""False: always torch's own choice. The two round differently, so all workers of a job must use the same."""


def _find_onednn() -> Any:
    """oneDNN's linear operator, which torch.compile uses too; None where torch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN_LINEAR = _find_onednn()


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
