"""Code of a network's own that runs in its backward: `autograd.Function`, and hooks.

A trace has the operators of a forward, each with the backward that torch knows for it, and nothing of such code. It is
found in an ordinary call by being there, not by what it does to an example: a clamp whose gradient passes straight
through does nothing where no number is clamped. A Function that belongs to an operator (`torch.library.custom_op`) is
in the trace's own graph as well, and stays.

Regions of `torch.utils.checkpoint` keep their bits without it, with `use_reentrant=False`: what they save by hooks
comes back as it was. Not seen: hooks of gradient accumulators that were registered before, which torch does not show.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.utils import checkpoint

from elaswave.errors import UsageError
from elaswave.models.admission import hooked_parameter
from elaswave.models.splitting.attributes import source_line

_APPLY: CodeType = torch.autograd.Function.apply.__code__
_SAVED: CodeType = saved_tensors_hooks.__enter__.__code__
_HOOKS: Mapping[CodeType, str] = {
    torch.Tensor.register_hook.__code__: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook.__code__: "register_post_accumulate_grad_hook",
}
_NODE_HOOKS = frozenset({"register_hook", "register_prehook", "register_hooks"})
"""Methods of nodes, and of what they have saved, that are not written in Python."""
_OF_CPP = "autograd::CppNode<"
"""In the names of nodes of Functions that are written in C++."""
_INSTEAD = (
    "Make it an operator (torch.library.custom_op with register_autograd), write it with torch's operators (x + "
    "(x.clamp(-2, 2) - x).detach() lets gradients pass straight through), or give the layers by hand "
    "(docs/own-models.md)"
)


def nodes_of(ends: Sequence[torch.Tensor]) -> Iterator[Node]:
    """Lists all nodes of a graph, once each."""
    seen: set[Node] = set()
    waiting = [end.grad_fn for end in ends if end.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


def functions_in(ends: Sequence[torch.Tensor]) -> Counter[type | str]:
    """Counts how often each Function that is not torch's stands in a graph: classes of Python, names of C++."""
    return Counter(found for found in map(_function_of, nodes_of(ends)) if found is not None)


def _function_of(node: Any) -> type | str | None:
    if issubclass(type(node), BackwardCFunction):
        found: type = node._forward_cls
        return found
    name: str = node.name()
    return name if _OF_CPP in name else None


def refuse_registered(model: nn.Module) -> None:
    """Refuses a network with hooks on gradients.

    Raises:
        UsageError: names the parameter or module.
    """
    name = hooked_parameter(model)
    where = None if name is None else f"parameter {name} has a gradient hook"
    for path, each in model.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            where = f"module {path or type(each).__name__} has a backward hook"
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        where = "a backward hook is registered for all modules"
    if where is not None:
        raise UsageError(f"{where}, and no hook is in a trace: remove it before the network is split. {_INSTEAD}")


class BackwardCode:
    """Finds the code that calls of a network leave to their backward."""

    def __init__(self) -> None:
        self._applied: dict[type | str, str] = {}
        """Functions with the line of their first call."""
        self._hooks: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches a call, in this thread. By the interpreter's profile: no name that leads to `apply` is left out,
        and methods of nodes, which cannot be replaced, show as well."""
        before: Any = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            restore = getattr(before, "enable", None)  # cProfile's
            sys.setprofile(None if restore else before)
            if restore:
                restore()

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code is _APPLY:
                self._applied.setdefault(frame.f_locals["cls"], source_line(frame.f_back))
            elif code is _SAVED:
                self._note_saved(frame.f_locals["self"], frame)
            elif code in _HOOKS:
                self._hooks.append(f"{_HOOKS[code]} at {source_line(frame.f_back)}")
        elif event == "c_call" and getattr(called, "__name__", "") in _NODE_HOOKS:
            owner = getattr(called, "__self__", None)
            if hasattr(owner, "next_functions") or type(owner).__module__.startswith("torch"):
                self._hooks.append(f"{called.__name__} of a node at {source_line(frame)}")

    def _note_saved(self, hooks: saved_tensors_hooks, frame: FrameType) -> None:
        """Hooks on what is saved for the backward; a checkpoint's, and those that move it to the host, give it back."""
        if not isinstance(hooks, save_on_cpu) and type(hooks).__module__ != checkpoint.__name__:
            self._hooks.append(f"{type(hooks).__name__} at {source_line(frame.f_back)}")

    def refuse(self, ends: Sequence[torch.Tensor], traced: Mapping[type | str, int]) -> None:
        """Refuses a network whose backward is more than that of its trace.

        Args:
            ends: outputs and auxiliary losses of the call, with their graph.
            traced: `functions_in` the graph of the trace.
        Raises:
            UsageError: names the Function or hook, and its line.
        """
        for function in functions_in(ends) - Counter(traced):
            raise UsageError(_why(function, self._applied.get(function, "a place that Python does not see")))
        if self._hooks:
            raise UsageError(
                f"the network calls {self._hooks[0]}: what hooks do to gradients is not in a trace, which would train "
                f"something else. {_INSTEAD}"
            )


def _why(function: type | str, line: str) -> str:
    if function is checkpoint.CheckpointFunction:
        return (
            f"the network uses torch.utils.checkpoint with use_reentrant=True at {line}, which hides the region from "
            "its graph: pass use_reentrant=False"
        )
    name = function if isinstance(function, str) else function.__qualname__
    if not isinstance(function, str) and function.__module__.startswith("torch._functorch._aot_autograd"):
        return (
            f"a part of the network is compiled (called at {line}), and a trace sees what it was before: split the "
            "network as it is without torch.compile"
        )
    return (
        f"the network calls the autograd.Function {name} at {line}: what it does in the backward is "
        f"not in a trace, which would train something else. {_INSTEAD}"
    )
