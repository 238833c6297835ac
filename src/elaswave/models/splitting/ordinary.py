"""Traces in which a network's code takes the way of an ordinary call.

Libraries ask whether they are traced, and then compute otherwise. transformers 5 gives attention a mask instead of
``is_causal``, and with a mask it repeats keys and values by hand instead of by ``enable_gqa``: gradients have other
bits. Such code is for graphs of several shapes, and for values that a trace does not know. Here shapes are fixed, and
what depends on no input is known: positions, say, in which transformers looks for packed sequences.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from elaswave.errors import UsageError

_QUESTIONS = ("is_compiling", "is_exporting")
_MAKERS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.eye, torch.tensor})
_ELEMENTS_MAX = 2**18
"""Of a tensor that is known; larger ones are computed in each step, not kept."""


def is_torch(filename: str) -> bool:
    """Whether a line of code is torch's own, or in no file."""
    return filename.startswith(("<", str(Path(torch.__file__).parent)))


@contextmanager
def as_in_a_call() -> Iterator["Known"]:
    """Answers code outside of torch that nothing traces it. Torch itself hears the truth.

    Yields:
        To be entered around the call that is traced.
    """
    known = Known()
    own = {name: getattr(torch.compiler, name) for name in _QUESTIONS}

    def answering(question: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            asks = sys._getframe(1)
            while asks.f_code.co_name in _QUESTIONS and asks.f_back is not None:
                asks = asks.f_back  # torch's older names of the same question
            if is_torch(asks.f_code.co_filename):
                return question()
            known.matters = True
            return False

        return answer

    try:
        for name, question in own.items():
            setattr(torch.compiler, name, answering(question))
        yield known
    finally:
        for name, question in own.items():
            setattr(torch.compiler, name, question)


class Known(TorchFunctionMode):
    """Computes what depends on no input, parameter, buffer or draw while the network is traced; the graph has it as
    constants."""

    def __init__(self) -> None:
        super().__init__()
        self.matters = False
        """Whether a trace without this may be another one."""
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._used: list[tuple[torch.Tensor, int]] = []
        """Constants of the graph, with the number of their writes then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if (given or func in _MAKERS) and all(self._is_known(each) for each in given):
            is_known, made = self._computed(func, args, kwargs)
            if is_known:
                return made
        self._used += [(each, each._version) for each in given if self._is_known(each)]
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if exception[0] is None and any(each._version != version for each, version in self._used):
            raise UsageError("the network writes a constant after it has used it")  # traced again without constants

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor and tensor in self._known

    def _computed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether what a function makes is known, and what it is."""
        with _disable_current_modes():
            before = torch.get_rng_state()
            made = func(*args, **kwargs)
            is_drawn = not torch.equal(before, torch.get_rng_state())
            if is_drawn:
                torch.set_rng_state(before)
        tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if is_drawn or not all(_can_be_constant(each) for each in tensors):
            return False, None
        self._known.update(dict.fromkeys(tensors))
        self.matters = True
        return True, made


def _can_be_constant(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and not tensor.requires_grad
    return is_plain and tensor.numel() <= _ELEMENTS_MAX
