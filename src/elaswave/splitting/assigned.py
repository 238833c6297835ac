"""Buffers that a forward assigns anew, as the trace has to see them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from elaswave.errors import UsageError


class Assigning(nn.Module):
    """A network that writes its buffers in place at its end where it has assigned them anew (``self.mean = ...``):
    torch 2.13's export sees assigned buffers of the outermost module only, and forgets the others.

    Args:
        network: to be traced.
        around: entered around its call.
    """

    def __init__(self, network: nn.Module, around: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.network, self._around = network, around

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns.

        Raises:
            UsageError: it has made a buffer that it had not before.
        """
        modules = list(self.network.modules())
        before = [(owner, key, buffer) for owner in modules for key, buffer in owner._buffers.items()]
        try:
            with self._around:
                returned = self.network(*args, **kwargs)
            self._refuse_new(before)
            with torch.no_grad():
                for owner, key, buffer in before:
                    now = owner._buffers.get(key)
                    if buffer is not None and now is not None and now is not buffer:
                        buffer.copy_(now)
        finally:
            for owner in modules:
                owner._buffers.clear()
            for owner, key, buffer in before:
                owner._buffers[key] = buffer
        return returned

    def _refuse_new(self, before: list[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
        known = {(id(owner), key) for owner, key, buffer in before if buffer is not None}
        for path, owner in self.network.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and (id(owner), key) not in known:
                    raise UsageError(
                        f"the forward makes the buffer {path}{'.' if path else ''}{key} in its first call, so that a "
                        "trace of it says nothing of later ones; register it with its first value in __init__"
                    )


def own_path(path: str) -> str:
    """A name or path in `Assigning` as the network has it."""
    return path.removeprefix("network").removeprefix(".")
