"""What a layer or the loss is lent and must not write: its inputs, its parameters, the gradients that come to it.

All of it is memory that somebody reads again: the layer before in its backward, copies of the parameters, another
attempt of the step. By which look a write is found:

- *by bits*, at a layer's first micro-batch in each process, in training and in evaluation, and wherever a run is done
  again (`elaswave.worker.canary.check_again`): all that was lent is compared with what it was.
- *by sums*, at every run, from before a forward until after its backward: inputs, what `elaswave.batch` returns, and
  targets. The words of a tensor are added up, in some parts. It costs a thousandth of what a layer computes.
- *by versions*, at every run, after forward and backward: what torch counts of writes in place, of parameters and
  inputs, and whether a parameter is still the same object at the same place.

Writes to parameters past torch's counting (`.data`, numpy) that begin later show in the vote's hash of what workers
compute with. Nothing here decides what is lent: see `elaswave.worker.compute`.
"""

from typing import NoReturn

import torch
from torch import nn

from elaswave.errors import UsageError


class Unwritten:
    """Compares the parameters of a layer before and after a forward.

    Args:
        module: of the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [(name, each, *_state(each), each.detach().clone()) for name, each in module.named_parameters()]

    def check(self, who: str) -> None:
        """Refuses a forward that has written parameters, or put others in their place.

        Args:
            who: the layer, for errors.
        Raises:
            UsageError: names the first one.
        """
        now = dict(self._module.named_parameters())
        for name, parameter, place, version, values in self._before:
            found = now.pop(name, None)
            # Not the bits alone: a clamp may write what was there, at first. Not the version alone: .data has its own.
            is_same = found is parameter and _state(parameter) == (place, version) and same_bits(parameter, values)
            if not is_same:
                refuse_written_parameter(f"the forward of {who}", name)
        for name in now:
            refuse_written_parameter(f"the forward of {who}", name)


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(first, second))


def refuse_written_parameter(what: str, name: str) -> NoReturn:
    """A parameter was written.

    Args:
        what: the forward or backward of a layer.
        name: of the parameter.
    """
    raise UsageError(
        f"{what} writes its parameter {name}: parameters change in updates only, so that every copy has the same bits. "
        "Compute with a changed copy, or make it a buffer, which a layer's forward may write"
    )


def refuse_written_input(who: str) -> NoReturn:
    """An input was written by what does not write it as a rule."""
    raise UsageError(
        f"{who} writes its input now, but did not in its first micro-batch: write to a copy. (A layer that writes its "
        "input from the first micro-batch on gets copies of it; .data and numpy() share its memory)"
    )


def refuse_written_gradient(who: str) -> NoReturn:
    """A gradient was written."""
    raise UsageError(
        f"the backward of {who} writes the gradient that it is given, which others read too: torch.autograd.Function "
        "forbids it. Work on a copy (gradient = gradient.clone())"
    )
