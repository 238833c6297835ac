"""Layers whose bits are looked at, and what makes bits repeat: for the probes of offsets and of several processes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from elaswave.engine.checks.determinism_check import hash_tensors
from elaswave.models.gpt import GPTBlock
from elaswave.models.llama import LlamaBlock

FAR = 1024
"""Bytes: tensors start at a multiple of this, plus the offset that is tried."""


def make_bits_repeat(*, repeat: bool = True) -> None:
    """The settings under which a device should give the same bits again; or, undone, those with everything allowed."""
    torch.use_deterministic_algorithms(repeat)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time, and the layers leave none unwritten
    torch.backends.cuda.matmul.allow_tf32 = not repeat
    torch.backends.cudnn.allow_tf32 = not repeat
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not repeat
    torch.backends.cuda.enable_cudnn_sdp(not repeat)


class Case(NamedTuple):
    """A layer, its type and its sizes."""

    name: str
    dtype: torch.dtype
    module: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    attention: str = ""
    """Kernel of the attention; empty: torch chooses."""

    @property
    def label(self) -> str:
        """For a row."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {'x'.join(map(str, self.input_shape))} {dtype} {self.attention}".strip()

    def input(self, device: torch.device) -> torch.Tensor:
        """The same at every call."""
        generator = torch.Generator(device).manual_seed(len(self.name))
        if self.name == "embedding":
            return torch.randint(0, 999, self.input_shape, generator=generator, device=device)
        return torch.randn(self.input_shape, generator=generator, device=device).to(self.dtype)


class Attention(nn.Module):
    """Causal attention whose queries, keys and values are slices of one tensor, as a GPT's are."""

    def forward(self, x_BT3HD: torch.Tensor) -> torch.Tensor:
        """[B, T, 3, H, D] to [B, H, T, D]."""
        q, k, v = (part.transpose(1, 2) for part in x_BT3HD.unbind(2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cases(small: bool) -> Iterator[Case]:
    """All of them, the important ones first."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, width in [(8, 32), (7, 24)] if small else [(4096, 768), (1000, 1024), (2048, 2048), (1000, 772)]:
            yield Case("linear", dtype, lambda width=width: nn.Linear(width, 4 * width), (rows, width))
            yield Case("layer norm", dtype, lambda width=width: nn.LayerNorm(width), (rows, width))
            yield Case("rms norm", dtype, lambda width=width: nn.RMSNorm(width), (rows, width))
            yield Case("embedding", dtype, lambda width=width: nn.Embedding(1000, width), (rows,))
        shape = (2, 8, 3, 2, 16) if small else (4, 1024, 3, 12, 64)
        for attention in ("flash", "efficient", "math"):
            if attention != "flash" or dtype == torch.bfloat16:
                yield Case("attention", dtype, Attention, shape, attention)
        batch, width = ((2, 8), 32) if small else ((2, 1024), 768)
        yield Case("gpt block", dtype, lambda w=width: GPTBlock(w, 4 if w < 64 else 12, 0.0, 0.02), (*batch, width))
        width, inner = (32, 64) if small else (2048, 5632)
        yield Case(
            "llama block",
            dtype,
            lambda w=width, i=inner, t=batch[1]: LlamaBlock(w, 4 if w < 64 else 32, 4, t, 0.0, i, 10000.0, 0.02),
            (*batch, width),
        )


def attention_by(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Lets torch use one kernel of attention only; a CPU has no others than its own two."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    if not name or device.type == "cpu" and name == "efficient":
        return nullcontext()
    return sdpa_kernel(kinds[name])


class Place:
    """Memory in which tensors start at chosen addresses.

    Args:
        offset: in bytes, beside a multiple of `FAR`.
    """

    def __init__(self, num_bytes: int, offset: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes + FAR, dtype=torch.uint8, device=device)
        self._at = -self._memory.data_ptr() % FAR
        self._offset = offset

    @staticmethod
    def needed(tensors: list[torch.Tensor]) -> int:
        """Bytes that tensors take in it."""
        return sum(tensor.nbytes + 2 * FAR for tensor in tensors)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor."""
        start = self._at + self._offset
        self._at += -(-(self._offset + tensor.nbytes) // FAR) * FAR
        view = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        assert view.data_ptr() % FAR == self._offset % FAR
        return view


def bits_of(case: Case, device: torch.device, *, parameters_at: int = 0, values_at: int = 0) -> int:
    """Runs a layer forward and backward.

    Args:
        parameters_at, values_at: offsets of its parameters, and of its input and the gradient of its output, in bytes.
    Returns:
        A hash of its output and of all gradients.
    """
    torch.manual_seed(5)
    with device:
        module = case.module()
    parameters = list(module.parameters())
    place = Place(Place.needed(parameters), parameters_at, device)
    for parameter in parameters:
        parameter.data = place.put(parameter.data.to(case.dtype))
    given = case.input(device)
    values = Place(Place.needed([given]), values_at, device)
    x = values.put(given)
    inputs = [x.requires_grad_(True)] if x.is_floating_point() else []
    with attention_by(case.attention, device):
        out = module(x)
        generator = torch.Generator(device).manual_seed(6)
        gradient = torch.randn(out.shape, generator=generator, device=device).to(out.dtype)
        incoming = Place(Place.needed([gradient]), values_at, device).put(gradient)
        found = torch.autograd.grad(out, [*inputs, *parameters], incoming)
    return hash_tensors([tensor.detach().cpu() for tensor in (out, *found)])
