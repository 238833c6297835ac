"""Buffers that a forward assigns anew, as the trace has to see them."""

from typing import Any

import torch
from torch import nn


class Assigning(nn.Module):
    """A network that writes its buffers in place at its end where it has assigned them anew (``self.mean = ...``):
    torch 2.13's export sees assigned buffers of the outermost module only, and forgets the others.

    Args:
        network: to be traced.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns."""
        before = [(owner, key, buffer) for owner in self.network.modules() for key, buffer in owner._buffers.items()]
        try:
            returned = self.network(*args, **kwargs)
            with torch.no_grad():
                for owner, key, buffer in before:
                    now = owner._buffers.get(key)
                    if buffer is not None and now is not None and now is not buffer:
                        buffer.copy_(now)
        finally:
            for owner, key, buffer in before:
                owner._buffers[key] = buffer
        return returned


def own_path(path: str) -> str:
    """A name or path in `Assigning` as the network has it."""
    return path.removeprefix("network").removeprefix(".")
