"""What a layer may say and ask while it runs, and what a loss may return: `aux_loss`, `batch`, `LossOutput`.

The engine puts a `Call` in place around each call of a layer (`inside`), one per thread. Where there is none, as in
ordinary PyTorch, an auxiliary loss goes nowhere and there is no batch.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from elaswave.errors import UsageError


class LossOutput(NamedTuple):
    """What a loss returns that is normalised by a count over the whole batch, such as tokens that are not ignored.

    The loss of a step is the sum of all totals divided by the sum of all counts.
    """

    total: torch.Tensor
    """A scalar: the sum over the micro-batch."""
    count: torch.Tensor | int  # type: ignore[assignment]  # hides tuple.count
    """What it is a sum over: a whole number, at least 0."""


@dataclass
class Call:
    """One call of a layer.

    Args:
        inputs: fetches the micro-batch's inputs.
        key: of draws in this micro-batch: run seed, step, micro-batch; None: there is none.
        check: called while the layer waits for another process; it may raise, and the layer is run again later.
        elsewhere: stands around such a wait.
    """

    inputs: Callable[[], Any]
    key: tuple[int, ...] | None = None
    check: Callable[[], None] = lambda: None
    elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
    aux_losses: list[torch.Tensor] = field(default_factory=list)
    """In the order in which they were given."""


class _Here(threading.local):
    call: Call | None = None


_HERE = _Here()


class inside:
    """Puts a call in place for this thread, as a context manager. A class: it stands around every run of a layer, and
    takes a quarter of the time of a generator."""

    __slots__ = ("_before", "_call")

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._before, _HERE.call = _HERE.call, self._call

    def __exit__(self, *exception: object) -> None:
        _HERE.call = self._before


def aux_loss(value: torch.Tensor) -> None:
    """Adds an auxiliary loss of the present micro-batch, from inside a layer: a router's balance loss, say.

    Its gradient joins the layer's backward. A step's auxiliary loss is the mean over micro-batches, weighted with their
    counts where the loss returns counts; it is reported as the metric "aux_loss", beside the loss. Outside of a layer
    that elaswave runs, and in evaluation, it does nothing.

    Args:
        value: a scalar, computed from the layer's input and parameters.
    Raises:
        UsageError: it is no scalar of a floating-point type.
    """
    call = _HERE.call
    if call is None:
        return
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise UsageError(
            f"aux_loss was given {describe(value)}, needed is a scalar tensor of a floating-point type: take its mean "
            "or sum"
        )
    call.aux_losses.append(value)


def batch() -> Any:
    """The inputs of the present micro-batch, as the dataset's `collate` made them, from inside any layer.

    Masks and positions need not travel through the layers before. Not to be written to.

    Raises:
        UsageError: no layer is being run by elaswave here.
    """
    call = _HERE.call
    if call is None:
        raise UsageError(
            "batch() was called where elaswave runs no layer; call it in a layer's forward, while a Trainer trains"
        )
    return call.inputs()


def draw_key() -> tuple[int, ...] | None:
    """What keys the draws of the present micro-batch; None where elaswave runs no layer."""
    return None if _HERE.call is None else _HERE.call.key


def check_wait() -> None:
    """To be called while a layer waits: lets the worker's transfers move, and leaves the layer if its step is over."""
    if _HERE.call is not None:
        _HERE.call.check()


def computed_elsewhere() -> AbstractContextManager[None]:
    """Stands around a wait for another process, which is to take as long as the layer permits."""
    return nullcontext() if _HERE.call is None else _HERE.call.elsewhere()


def describe(value: object) -> str:
    """What a value is, for error messages."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if isinstance(value, int | float) else type(value).__name__
