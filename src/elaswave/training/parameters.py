"""The parameters that a person's optimizer is made of: their names and shapes, no values.

An optimizer is made once in each process, of every trainable parameter of the model, although a process holds blocks of
some only. So what it gets has no memory; a tensor's group is what is read from it (`groups_of`).
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from elaswave.blocks.shapes import TensorSlot
from elaswave.config.values import plain
from elaswave.errors import SIGNALS, OptimizerError
from elaswave.training.raised import said, traceback_of

SHOWN_NAMES_MAX = 4
"""Names that an error lists."""


class Parameters:
    """Parameters of the model, in its order: what ``optimizer=`` is called with.

    Iterating gives `torch.nn.Parameter`; `named` and `except_named` choose some of them for a parameter group. They
    have shapes, but no values.

    Args:
        named: full names and parameters.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self._named = tuple(named)
        self._taken: list[str] = []
        """Names that have been iterated over, each as often; shared with all that are chosen from these."""

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        self._taken.extend(name for name, _ in self._named)
        return iter([parameter for _, parameter in self._named])

    def __len__(self) -> int:
        return len(self._named)

    @property
    def names(self) -> list[str]:
        """Full names, in the order of the model."""
        return [name for name, _ in self._named]

    def items(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Lists full names and parameters, in the order of the model."""
        self._taken.extend(self.names)
        return list(self._named)

    def named(self, *patterns: str) -> "Parameters":
        """Selects those whose full name matches one of the patterns.

        Args:
            patterns: as `fnmatch` has them, upper and lower case being different: ``"*.bias"``, ``"head.*"``.
        Raises:
            OptimizerError: a pattern that matches no name.
        """
        chosen = self._matching(patterns)
        return self._those(lambda name: name in chosen)

    def except_named(self, *patterns: str) -> "Parameters":
        """Selects the rest: those whose full name matches none of the patterns. Arguments and errors are as of
        `named`."""
        left_out = self._matching(patterns)
        return self._those(lambda name: name not in left_out)

    def taken_twice(self) -> list[str]:
        """Lists the names that have been iterated over more than once."""
        return [name for name in self.names if self._taken.count(name) > 1]

    def _matching(self, patterns: Sequence[str]) -> set[str]:
        if not patterns:
            raise OptimizerError('named() needs at least one pattern of full names, such as "*.bias"')
        matching: set[str] = set()
        for pattern in patterns:
            found = {name for name in self.names if fnmatchcase(name, pattern)}
            if not found:
                raise OptimizerError(
                    f'no trainable parameter is named "{pattern}"; there are {_listed(self.names)}. A pattern is '
                    'compared with the whole name: "*.bias", not "bias"'
                )
            matching |= found
        return matching

    def _those(self, chosen: Callable[[str], bool]) -> "Parameters":
        those = Parameters((name, parameter) for name, parameter in self._named if chosen(name))
        those._taken = self._taken
        return those


def stand_ins(tensors: Iterable[TensorSlot]) -> Parameters:
    """Parameters without memory, of the shapes of tensors."""
    return Parameters((slot.name, _without_memory(slot.shape)) for slot in tensors)


def _without_memory(shape: Sequence[int]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(tuple(shape), dtype=torch.float32, device="meta"))


@contextlib.contextmanager
def float32_by_default() -> Iterator[None]:
    """Inside, new tensors are float32: a script may have set another default type, and an optimizer's state follows it
    (torch's own count of steps is then float64)."""
    before = torch.get_default_dtype()
    if before is torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_optimizer(factory: Callable[[Parameters], object], parameters: Parameters) -> torch.optim.Optimizer:
    """Makes the optimizer that a person's callable makes of parameters.

    Raises:
        OptimizerError: it raises, makes something else, or gives a parameter no group, or two.
    """
    try:
        with warnings.catch_warnings(), float32_by_default():
            warnings.filterwarnings("ignore", ".*parameter group with duplicate parameters")  # `groups_of` refuses it
            optimizer = factory(parameters)
    except (OptimizerError, *SIGNALS):
        raise
    except (Exception, SystemExit) as error:
        twice = parameters.taken_twice()
        if twice and "more than one parameter group" in str(error):
            raise OptimizerError(_in_two_groups(twice)) from error
        if isinstance(error, ValueError) and re.search(r"\b2-?D\b", str(error)):  # as torch.optim.Muon
            raise OptimizerError(
                f"optimizer= takes matrices only ({said(error)}), and cannot be used: blocks of state hold any run of "
                "a tensor's elements, so an optimizer must update every element by itself, and one for matrices needs "
                "the others of its matrix. Give one that does, as torch.optim.AdamW or SGD"
            ) from error
        raise has_raised("optimizer=, called with the parameters of the model,", error) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer= must be a callable that takes the parameters and returns a torch.optim.Optimizer, but it has "
            f"returned {type(optimizer).__name__}: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    groups_of(optimizer, parameters)
    for group in optimizer.param_groups:  # numpy's numbers could not be kept in a checkpoint
        group.update({name: plain(value) for name, value in group.items() if name != "params"})
    return optimizer


def has_raised(who: str, error: BaseException) -> OptimizerError:
    """Makes the error that a person is told of an exception in a callable of theirs: with the traceback, since it is
    raised in another process than the script's.

    Args:
        who: the callable.
        error: that it has raised, caught where it was called.
    """
    inside = None if error.__traceback__ is None else error.__traceback__.tb_next  # without the place of the call
    text = "" if inside is None else f"\n\n{traceback_of(error.with_traceback(inside)).rstrip()}"
    return OptimizerError(f"{who} has raised {said(error)}{text}")


def groups_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, int]:
    """Maps each parameter, by full name, to the number of its parameter group.

    Raises:
        OptimizerError: a parameter is in no group, or in two, or is none of the model's.
    """
    names = {id(parameter): name for name, parameter in parameters._named}
    groups: dict[str, int] = {}
    twice = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise OptimizerError(
                    f"parameter group {number} of {optimizer_class_name(optimizer)} holds a tensor of shape "
                    f"{list(parameter.shape)} that is none of the given parameters; make it of those that "
                    "optimizer= is called with, for instance parameters.named(...), not of copies or of the module's"
                )
            if name in groups:
                twice.append(name)
            groups[name] = number
    if twice:
        raise OptimizerError(_in_two_groups(twice))
    missing = [name for name in names.values() if name not in groups]
    if missing:
        raise OptimizerError(
            f"{optimizer_class_name(optimizer)} has no parameter group for {_listed(missing)}; every trainable "
            "parameter must be in "
            "exactly one: parameters.except_named(...) gives the rest. Freeze what is not to be trained "
            "(requires_grad_(False))"
        )
    return groups


def _in_two_groups(names: Sequence[str]) -> str:
    return (
        f"{_listed(names)} would be in more than one parameter group; every trainable parameter must be in one: "
        "choose the rest with parameters.except_named(...)"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES_MAX} more" if len(names) > SHOWN_NAMES_MAX else ""
    return ", ".join(names[:SHOWN_NAMES_MAX]) + more


def optimizer_class_name(optimizer: object) -> str:
    """Names an object's class, as a person calls it: ``torch.optim.AdamW``."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__qualname__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__
