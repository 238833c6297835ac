"""Single steps of a person's `torch.optim` optimizer on parameters that are lent to it, which leave it as it was; and
the trial that never ends: at every update a part of a real one is made whole and in halves, on clones.

What an optimizer knows is more than states and parameter groups: many count in an attribute of their own. So a step is
lent the attributes too, as they are after all updates before it, however many blocks a worker has. Attributes that are
no plain values (numbers, texts, small tensors, and containers of them) stay as the steps leave them.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from elaswave.blocks.shapes import ALIGNMENT_ELEMENTS, TensorSlot
from elaswave.config.values import plain
from elaswave.errors import OptimizerError
from elaswave.hashing import key64
from elaswave.training.parameters import float32_by_default, optimizer_class_name

TRIED_ELEMENTS = 1024
"""Of a tensor, at most, in each update."""
_PLAIN_ELEMENTS = 4096
"""Of a tensor, or of a container, that is an attribute."""
_PLAIN_DEPTH = 3
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Whose rules are known, so that what was tried before the run holds for all of it."""

State = dict[str, Any]
"""The states of one parameter, as a `torch.optim.Optimizer` keeps them."""


class Stepped(NamedTuple):
    """What a step leaves."""

    state: Mapping[torch.Tensor, State]
    attributes: dict[str, Any]


def lend_and_step(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[torch.Tensor, State],
    attributes: Mapping[str, Any] | None = None,
) -> Stepped:
    """Lets an optimizer update other parameters than its own.

    Args:
        optimizer: is left as it was, its plain attributes included.
        groups: parameter groups, whose parameters have gradients.
        state: of the parameters.
        attributes: plain ones, as the step is to find them; None: as they are.
    """
    own, plain = dict(vars(optimizer)), attributes_of(optimizer)
    lent = copy.deepcopy(dict(plain if attributes is None else attributes))
    for name in plain.keys() - lent.keys():  # an update has made it that comes later
        del vars(optimizer)[name]
    vars(optimizer).update({**lent, "param_groups": groups, "state": defaultdict(dict, state)})
    try:
        with float32_by_default():
            optimizer.step()
        return Stepped(optimizer.state, attributes_of(optimizer))
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the plain attributes of an optimizer, beside its parameter groups and states; they are not to be
    written."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "defaults") and _is_plain(value, _PLAIN_DEPTH)
    }


def _is_plain(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in (int, float, bool, str, type(None)) or (kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0):
        return True
    if kind is torch.Tensor:
        return value.numel() <= _PLAIN_ELEMENTS and not value.requires_grad and not value.is_meta
    if kind not in (list, tuple, dict) or depth == 0 or len(value) > _PLAIN_ELEMENTS:
        return False
    parts = [*value, *value.values()] if kind is dict else value
    return all(_is_plain(part, depth - 1) for part in parts)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether an optimizer is one of torch's own whose rule is elementwise, with its own step."""
    return type(optimizer) in _ELEMENTWISE and "step" not in vars(optimizer)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group, by name."""
    return {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}


# ---------------------------------------------------------------------------------------------------- at every update


class TensorRun(NamedTuple):
    """A run of one tensor in a block, before an update."""

    slot: TensorSlot
    values: torch.Tensor
    gradient: torch.Tensor
    states: Mapping[str, torch.Tensor]
    """Those per element that are there."""
    numbers: State
    """What is kept once."""
    options: Mapping[str, Any]
    """Of its parameter group."""


def can_be_tried(num_elements: int) -> bool:
    """Tells whether a run can be cut where blocks are cut."""
    return num_elements > ALIGNMENT_ELEMENTS


def try_update(
    optimizer: torch.optim.Optimizer, run: TensorRun, attributes: Mapping[str, Any], step: int, num_updates: int
) -> None:
    """Makes the update of a part of a run on clones, in as many dimensions as its tensor has, and in two halves.

    Args:
        optimizer: is left as it was.
        run: before the update; more than `ALIGNMENT_ELEMENTS` elements.
        attributes: of the optimizer, before the update.
        step: chooses the part, so that all are tried in the course of time.
        num_updates: updates so far, this one included.
    Raises:
        OptimizerError: both differ in a bit of a value or a state, or in a number or an option.
    """
    total = run.values.numel()
    # The last place may leave fewer elements.
    places = 1 + -(-max(0, total - TRIED_ELEMENTS) // ALIGNMENT_ELEMENTS)
    start = ALIGNMENT_ELEMENTS * (key64("tried", step) % places)
    size = min(total - start, TRIED_ELEMENTS)
    half = start + max(1, size // (2 * ALIGNMENT_ELEMENTS)) * ALIGNMENT_ELEMENTS
    dimensions = len(run.slot.shape)
    try:
        whole = _updated(optimizer, run, start, start + size, dimensions, attributes)
        halves = [_updated(optimizer, run, *ends, 1, attributes) for ends in ((start, half), (half, start + size))]
    except Exception as error:
        _refuse(optimizer, run.slot, num_updates, f"fails for {size} of its elements: {error}", error)
    for name, values in whole.elements.items():
        cut = [one.elements[name] for one in halves if name in one.elements]
        if len(cut) < 2 or not _same(values, torch.cat(cut)):
            what = "the parameter" if name == "" else f"the state {name}"
            _refuse(optimizer, run.slot, num_updates, f"gives {what} other bits when {size} of its elements are halved")
    for name, number in whole.numbers.items():
        for one in halves:
            if name not in one.numbers or not is_same(number, one.numbers[name]):
                what = f"leaves {name} at {number}, and for a half of its elements at {one.numbers.get(name)}"
                _refuse(optimizer, run.slot, num_updates, what)


class _Updated(NamedTuple):
    elements: dict[str, torch.Tensor]
    """By state, the parameter under ""."""
    numbers: dict[str, Any]
    """States that are kept once, and options."""


def _updated(
    optimizer: torch.optim.Optimizer,
    run: TensorRun,
    start: int,
    stop: int,
    dimensions: int,
    attributes: Mapping[str, Any],
) -> _Updated:
    shape = _shape_of(stop - start, dimensions)

    def part(values: torch.Tensor) -> torch.Tensor:
        return values[start:stop].clone().view(shape)

    parameter = torch.nn.Parameter(part(run.values))
    parameter.grad = part(run.gradient)
    state = {name: part(values) for name, values in run.states.items()} | copied(run.numbers)
    groups = [{**run.options, "params": [parameter]}]
    found = lend_and_step(optimizer, groups, {parameter: state}, attributes).state[parameter]
    elements = {
        name: value.reshape(-1)
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and name not in run.numbers
    }
    numbers = {name: value for name, value in found.items() if name not in elements}
    options = {f"option {name}": value for name, value in options_of(groups[0]).items()}
    return _Updated({"": parameter.detach().reshape(-1), **elements}, {**numbers, **options})


def _shape_of(num_elements: int, dimensions: int) -> tuple[int, ...]:
    """Makes a shape of as many dimensions, of which at most two are not of size 1."""
    if dimensions < 2:
        return (num_elements,)
    rows = num_elements // math.gcd(num_elements, ALIGNMENT_ELEMENTS)
    return (*[1] * (dimensions - 2), rows, num_elements // rows)


def copied(state: State) -> State:
    """Copies a state, with tensors of its own."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def is_same(one: Any, other: Any) -> bool:
    """Tells whether two plain values are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and _same(one.reshape(-1), other.reshape(-1))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(is_same, one.values(), other.values()))
    return bool(one == other) or (one != one and other != other)


def _refuse(
    optimizer: torch.optim.Optimizer, slot: TensorSlot, num_updates: int, what: str, error: Exception | None = None
) -> None:
    raise OptimizerError(
        f"{optimizer_class_name(optimizer)} cannot be used any more: update {num_updates} of {slot.name} "
        f"{list(slot.shape)} {what}. "
        "It must update every element by itself at every update, and keep nothing that depends on gradients but per "
        "element; it did in those that were tried before the run. Blocks of state hold any run of a tensor's elements"
    ) from error
