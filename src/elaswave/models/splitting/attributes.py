"""Plain attributes of modules, neither parameters nor buffers, that a forward changes and a later call reads.

A trace would keep them as they were. They are found in an ordinary call of the network: what it reads before it assigns
it, and what is something else afterwards. An attribute that each call assigns before it reads it is none of them. What
is not looked at: attributes of classes, globals, and what only C++ knows.

Traces in which a network's code takes the way of an ordinary call.

Libraries ask whether they are traced, and then compute otherwise. transformers 5 gives attention a mask instead of
``is_causal``, and with a mask it repeats keys and values by hand instead of by ``enable_gqa``: gradients have other
bits. Such code is for graphs of several shapes, and for values that a trace does not know. Here shapes are fixed, and
what depends on no input is known: positions, say, in which transformers looks for packed sequences.
"""

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
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
    """Tells whether a line of code is torch's own, or in no file."""
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
        """Tells whether what a function makes is known, and what it is."""
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


Key = tuple[int, str]
"""The id of a module, and the name of an attribute."""

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What every module has."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, torch.device)
_OPAQUE = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class Attributes:
    """The plain attributes of a network's modules as they are now, with what lies in them.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(owner): path for path, owner in model.named_modules()}
        self._plain = [(owner, _plain_of(owner)) for owner in model.modules()]
        self._held: list[tuple[Any, Any]] = []
        """Lists, sets and dictionaries, with copies."""
        seen: set[int] = set()
        self._leaves: dict[Key, list[Any]] = {
            (id(owner), name): list(self._leaves_of(value, seen))
            for owner, plain in self._plain for name, value in plain.items()
        }  # fmt: skip

    def _leaves_of(self, value: Any, seen: set[int]) -> Iterator[Any]:
        if isinstance(value, (*_VALUES, *_OPAQUE)):
            yield value
            return
        state = _state_of(value)
        inside = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
        if state is not None or not isinstance(inside, _CONTAINERS):
            yield value if state is None else state
            return
        yield f"{type(value).__qualname__} of {len(inside)}"
        if id(value) in seen:
            return
        seen.add(id(value))
        for kind in (list, deque, set, dict):
            if isinstance(inside, kind):
                self._held.append((inside, kind(inside)))
        for each in inside.items() if isinstance(inside, dict) else list(inside):
            yield from self._leaves_of(each, seen)

    def changed(self, now: "Attributes") -> set[Key]:
        """Finds what is something else by now."""
        keys = self._leaves.keys() | now._leaves.keys()
        return {key for key in keys if not _are_same(self._leaves.get(key), now._leaves.get(key))}

    def restore(self) -> None:
        """Makes all of it as it was."""
        for owner, plain in self._plain:
            for name in _plain_of(owner).keys() - plain.keys():
                del vars(owner)[name]
            vars(owner).update(plain)
        for held, copy in self._held:
            if not _are_same(list(_flat(held)), list(_flat(copy))):
                held.clear()
                (held.extend if isinstance(held, list | deque) else held.update)(copy)


def _plain_of(owner: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if name not in _OWN}


def _flat(held: Any) -> Iterator[Any]:
    for each in held.items() if isinstance(held, dict) else held:
        yield from each if isinstance(held, dict) else (each,)


def _state_of(value: Any) -> str | bytes | None:
    """Reads what is in an object that does not show it otherwise."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return repr(value.getstate()) if isinstance(value, random.Random) else None


def _are_same(ours: list[Any] | None, theirs: list[Any] | None) -> bool:
    if ours is None or theirs is None or len(ours) != len(theirs):
        return ours is theirs
    return all(
        one is other or (isinstance(one, _VALUES) and type(one) is type(other) and one == other)
        for one, other in zip(ours, theirs)
    )


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Attributes]:
    """Whatever a call does to plain attributes, they are as before afterwards."""
    before = Attributes(model)
    try:
        yield before
    finally:
        before.restore()


class _Uses(NamedTuple):
    """What calls have done with attributes, with lines of code."""

    read: dict[Key, str]
    """Those that a call has read before it assigned them."""
    assigned: dict[Key, str]
    changed: set[Key]


class ChangingAttributes:
    """Finds what calls of a network leave for later ones.

    Args:
        model: the network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[_Uses] = []
        self._paths = Attributes(model).paths

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches one call of the network; afterwards the attributes are as before."""
        uses = _Uses({}, {}, set())
        self._calls.append(uses)
        with attributes_kept(self._model) as before:
            with self._recorded(uses):
                yield
            uses.changed.update(before.changed(Attributes(self._model)))

    @contextmanager
    def _recorded(self, uses: _Uses) -> Iterator[None]:
        paths, thread, assign = self._paths, threading.get_ident(), nn.Module.__setattr__

        def read(module: nn.Module, name: str) -> Any:
            key = (id(module), name)
            if key[0] in paths and key not in uses.read and key not in uses.assigned:
                if threading.get_ident() == thread:
                    uses.read[key] = source_line(sys._getframe(1))
            return object.__getattribute__(module, name)

        def assigned(module: nn.Module, name: str, value: Any) -> None:
            if id(module) in paths and threading.get_ident() == thread:
                uses.assigned.setdefault((id(module), name), source_line(sys._getframe(1)))
            assign(module, name, value)

        nn.Module.__getattribute__, nn.Module.__setattr__ = read, assigned  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]

    def refuse(self) -> None:
        """Refuses a network that computes with what an earlier call has left.

        Raises:
            UsageError: names the attribute, and the lines that read and assign it.
        """
        read = {key: line for uses in self._calls for key, line in uses.read.items()}
        assigned = {key: line for uses in self._calls for key, line in uses.assigned.items()}
        for key in [key for uses in self._calls for key in read if key in uses.changed]:
            owner, name = key
            path = f"{self._paths[owner]}.{name}".removeprefix(".")
            where = f"assigned at {assigned[key]}" if key in assigned else "changed in place"
            raise UsageError(
                f"the forward reads the attribute {path} at {read[key]}, and what a call leaves there is another value "
                f"({where}): a trace would keep the first one for ever. Make it state with register_buffer; or, where "
                "only the first call changes it, call the network once before it is split; or assign it before it is "
                "read"
            )


def source_line(frame: FrameType | None) -> str:
    """Finds the innermost line outside of torch."""
    own = frame
    while own is not None and is_torch(own.f_code.co_filename):
        own = own.f_back
    return "a line of torch" if own is None else f"{own.f_code.co_filename}:{own.f_lineno}"
