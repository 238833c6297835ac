"""A network as the trace has to see it: buffers that a forward assigns anew, and what it says to the engine."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.calls import Call, inside
from elaswave.models.splitting.inputs import inputs_of


class Assigning(nn.Module):
    """A network that writes its buffers in place at its end where it has assigned them anew (``self.mean = ...``):
    torch 2.13's export sees assigned buffers of the outermost module only, and forgets the others. What it tells by
    `aux_loss` is an output, and `batch` gives it the inputs that it was called with.

    Args:
        network: to be traced.
        around: entered around its call.
        example_inputs: what it is called with.
    """

    def __init__(self, network: nn.Module, around: AbstractContextManager[Any], example_inputs: Any) -> None:
        super().__init__()
        self.network, self._around, self._example = network, around, example_inputs

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What the network returns, and in training its auxiliary losses.

        Raises:
            UsageError: it has made a buffer that it had not before.
        """
        modules = list(self.network.modules())
        before = [(owner, key, buffer) for owner in modules for key, buffer in owner._buffers.items()]
        call = Call(lambda: inputs_of(args, kwargs, self._example))
        try:
            with self._around, inside(call):
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
        return returned, tuple(call.aux_losses) if any(owner.training for owner in modules) else ()

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
