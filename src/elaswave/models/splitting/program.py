"""Operators as they run: plain data that every process can execute, and what executes it.

A *value* is what an operator makes, or what it is given from outside: an input of the micro-batch, a parameter, a
buffer, a constant, or what an earlier part has sent. Values have numbers.
"""

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from elaswave.devices.interface import seed_at
from elaswave.hashing import key64
from elaswave.models.layers import aux_loss, draw_key

GETITEM = "getitem"
"""A target that is no operator of torch: it takes a tensor out of the several that an operator has made."""
AUX_LOSS = "aux_loss"
"""The other one: it tells an auxiliary loss, and makes nothing."""
_OWN: Mapping[str, Callable[..., Any]] = {GETITEM: operator.getitem, AUX_LOSS: aux_loss}
_HOST = torch.device("cpu")


class Ref(NamedTuple):
    """Stands for a value among an operator's arguments."""

    value: int


@dataclass(frozen=True)
class Context:
    """What the network has switched on around an operator."""

    grad: bool = True
    autocast: tuple[str, torch.dtype | None, bool, bool | None] | None = None
    """Device type, type to compute in, whether it is on, whether casts are kept; None: none is around it."""

    @contextlib.contextmanager
    def entered(self, place: torch.device = _HOST) -> Iterator[None]:
        """What runs inside runs as it did in the network, on another device perhaps."""
        with contextlib.ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            if self.autocast is not None:
                # Casts are not kept: a part keeps those of what it is given, which the network makes anew.
                _, dtype, enabled, _ = self.autocast
                stack.enter_context(torch.autocast(place.type, dtype, enabled, False))
            yield


PLAIN = Context()


@dataclass(frozen=True)
class Op:
    """One operator.

    Args:
        number: its place in the whole network; keys what it draws.
        target: its name, such as "aten.add.Tensor".
        args, kwargs: plain data with `Ref` for values.
        out: the value that it makes.
        writes: values that it writes in place.
        context: what is switched on around it.
        draws: whether it draws random numbers.
        source: the line of the network's code that it comes from.
    """

    number: int
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: int
    writes: tuple[int, ...] = ()
    context: Context = PLAIN
    draws: bool = False
    source: str = ""

    @property
    def values(self) -> tuple[int, ...]:
        """The values that it is given."""
        return tuple(refs_in((self.args, tuple(self.kwargs.values()))))

    @property
    def has_effect(self) -> bool:
        """Whether it does something beside what it makes, so that it runs once and in its place."""
        return self.draws or bool(self.writes) or self.target == AUX_LOSS

    def __call__(self, values: Mapping[int, Any], place: torch.device = _HOST) -> Any:
        """Runs it on a device; an exception carries its line of code."""
        if self.draws and (key := draw_key()) is not None:
            seed_at(place, key64(*key, self.number, "operator"))
        try:
            args, kwargs = filled(self.args, values, place), filled(dict(self.kwargs), values, place)
            return function_of(self.target)(*args, **kwargs)
        except Exception as error:
            error.add_note(f"in operator {self.number}, {self.target}, of {self.source}")
            raise


class _Running(threading.local):
    op: Op | None = None


RUNNING = _Running()
"""The operator that runs in this thread, for those who watch kernels."""


def refs_in(tree: Any) -> Iterator[int]:
    """Lists the values that arguments stand for."""
    if isinstance(tree, Ref):
        yield tree.value
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from refs_in(each)
    elif isinstance(tree, dict):
        yield from refs_in(tuple(tree.values()))


def filled(tree: Any, values: Mapping[int, Any], place: torch.device = _HOST) -> Any:
    """Arguments with the values that they stand for, and with the device that computes for the one of the trace."""
    if isinstance(tree, Ref):
        return values[tree.value]
    if isinstance(tree, tuple | list):
        return type(tree)(filled(each, values, place) for each in tree)
    if isinstance(tree, dict):
        return {key: filled(each, values, place) for key, each in tree.items()}
    return place if isinstance(tree, torch.device) else tree


def renamed_in(tree: Any, names: Mapping[int, int]) -> Any:
    """Arguments that stand for other values."""
    if isinstance(tree, Ref):
        return Ref(names.get(tree.value, tree.value))
    if isinstance(tree, tuple | list):
        return type(tree)(renamed_in(each, names) for each in tree)
    return {key: renamed_in(each, names) for key, each in tree.items()} if isinstance(tree, dict) else tree


def renamed(op: Op, names: Mapping[int, int]) -> Op:
    """Makes an operator that is given, and writes, other values."""
    if not names:
        return op
    writes = tuple(names.get(value, value) for value in op.writes)
    return replace(op, args=renamed_in(op.args, names), kwargs=renamed_in(dict(op.kwargs), names), writes=writes)


@functools.cache
def function_of(target: str) -> Callable[..., Any]:
    """Finds the function that a target names."""
    if target in _OWN:
        return _OWN[target]
    namespace, name, overload = target.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def execute(ops: Sequence[Op], values: dict[int, Any], released: Sequence[Sequence[int]]) -> None:
    """Runs operators in order.

    Args:
        ops: to run.
        values: what they are given; what they make is added.
        released: for each operator, values that nothing needs after it.
    """
    context, stack = PLAIN, contextlib.ExitStack()
    place = next((each.device for each in values.values() if isinstance(each, torch.Tensor)), _HOST)
    try:
        for op, gone in zip(ops, released, strict=True):
            if op.context != context:
                stack.close()
                stack.enter_context(op.context.entered(place))
                context = op.context
            RUNNING.op = op
            values[op.out] = op(values, place)
            for value in gone:
                del values[value]
    finally:
        RUNNING.op = None
        stack.close()


def last_uses(ops: Sequence[Op], kept: set[int]) -> tuple[tuple[int, ...], ...]:
    """Lists, for each operator, the values that nothing needs after it.

    Args:
        ops: in order.
        kept: values that are needed after all of them.
    """
    needed, found = set(kept), []
    for op in reversed(ops):
        touched = {op.out, *op.values}
        found.append(tuple(sorted(touched - needed)))
        needed |= touched
    return tuple(reversed(found))
