"""Any elementwise `torch.optim` class on blocks: the class updates runs of tensors as if they were tensors.

A worker has one instance, made by the person's callable of parameters without memory. For some blocks it lends the
instance the runs of their tensors as parameters, with their states, and calls `step` once. What is not per element
(``step``, ``mu_product``, options that a step or a scheduler changes) is the same for all blocks of a parameter group.
It is kept once per group, and moved on once per update by a pilot: a tiny parameter of the group, whose elements mean
nothing.

The same holds of attributes in which an optimizer counts by itself (`elaswave.training.lent_steps`).

That the class really updates every element by itself is tried in `elaswave.training.elementwise` before the run, and on
a part of one tensor at every update.
"""

import base64
import copy
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elaswave.blocks.shapes import Segment
from elaswave.checkpoints.format import MASTER
from elaswave.checkpoints.shards import DTYPES, load_plain
from elaswave.config.values import plain
from elaswave.errors import SIGNALS, CheckpointError, OptimizerError
from elaswave.hashing import key64
from elaswave.state.flat import HeldBlock
from elaswave.training.given import options_given
from elaswave.training.lent_steps import (
    State,
    TensorRun,
    attributes_of,
    can_be_tried,
    copied,
    is_known,
    is_same,
    lend_and_step,
    options_of,
    try_update,
)
from elaswave.training.parameters import float32_by_default, has_raised, optimizer_class_name

PILOT_ELEMENTS = 32

MakeScheduler = Callable[[torch.optim.Optimizer], Any]
"""From an optimizer to one of `torch.optim.lr_scheduler`, or what has its `step`, `state_dict` and
`load_state_dict`."""


class Traits(NamedTuple):
    """What an optimizer keeps of each tensor of a parameter group."""

    states: tuple[str, ...]
    """Names of its float32 states per element."""
    scalars: tuple[tuple[str, str], ...]
    """Names and element types of the numbers that it keeps once."""
    fills: Mapping[str, float]
    """The states per element that are there before the first update, and their value."""
    initial: Mapping[str, Any]
    """All other states that are there before it."""


class _Part(NamedTuple):
    """The run of one tensor in a block."""

    parameter: torch.nn.Parameter
    segment: Segment
    views: tuple[tuple[str, torch.Tensor], ...]
    """The run of each state per element."""


class _Kit(NamedTuple):
    """A block as torch's optimizer takes it; made once, since that costs more than an update."""

    master: torch.Tensor
    parts: tuple[_Part, ...]
    state: dict[torch.Tensor, State]


class TorchUpdater:
    """See `elaswave.training.optimizer.Updater` for what its methods promise.

    Args:
        optimizer: of its own.
        traits: what it keeps, by parameter group.
        slots: its states per element, those of all groups, in the order in which blocks keep them.
        make_scheduler: of the learning rate and other options; None: they stay.
        tries: makes the update of a part of one tensor whole and in halves, at every update.
    Raises:
        OptimizerError: `make_scheduler` raises, or what it returns is no scheduler.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        traits: Sequence[Traits],
        slots: Sequence[str],
        make_scheduler: MakeScheduler | None = None,
        *,
        tries: bool = True,
    ) -> None:
        self._optimizer, self._traits, self._slots = optimizer, traits, slots
        self._groups = optimizer.param_groups
        self._pilots = [torch.nn.Parameter(torch.zeros(PILOT_ELEMENTS, dtype=torch.float32)) for _ in self._groups]
        self._scalars: list[State] = [dict(each.initial) for each in traits]
        """After the newest committed step, by parameter group; as the optimizer has them."""
        self._tries = tries and not is_known(optimizer)
        self._calls = self._calls_before = 0
        """Of `update`, in this step and in the one before."""
        self._is_due, self._tried_in = False, 0
        self._scheduler = None if make_scheduler is None else _scheduler_of(make_scheduler, optimizer)
        self._kits: WeakKeyDictionary[HeldBlock, _Kit] = WeakKeyDictionary()
        self._step = self._num_updates = 0
        self._built = copy.deepcopy(attributes_of(optimizer))
        self._fix()

    # ---------------------------------------------------------------------------------------------- committed steps

    def _fix(self) -> None:
        """Keeps what the update of the next step needs, before it is moved on."""
        self._options = [options_of(group) for group in self._groups]
        self._before = self._scalars
        self._attributes = copy.deepcopy(attributes_of(self._optimizer))
        self.learning_rate = float(self._options[0].get("lr", 0.0))

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """Moves what is kept once per parameter group on by one step."""
        # A step is said again after an interrupt.
        if step == self._step:
            return
        assert step == self._step + 1, f"step {step} is committed after step {self._step}"
        self._fix()
        self._calls_before, self._calls = self._calls, 0
        # A step in which no block could be tried leaves its turn to the next one.
        self._is_due &= self._tried_in != self._step
        if updates:
            self._move_on()
        with float32_by_default():
            if isinstance(self._scheduler, ReduceLROnPlateau):
                self._scheduler.step(loss)
            elif self._scheduler is not None:
                self._scheduler.step()
        self._step = step

    def _move_on(self) -> None:
        groups = [{**options, "params": [pilot]} for options, pilot in zip(self._options, self._pilots, strict=True)]
        state: dict[torch.Tensor, State] = {}
        for pilot, traits, scalars in zip(self._pilots, self._traits, self._scalars, strict=True):
            # The first update makes the states that are not there before it, as with torch's own parameters.
            there = traits.states if self._num_updates else traits.fills
            state[pilot] = {name: torch.zeros(PILOT_ELEMENTS, dtype=torch.float32) for name in there} | copied(scalars)
            pilot.grad = torch.zeros(PILOT_ELEMENTS, dtype=torch.float32)
        found, attributes = lend_and_step(self._optimizer, groups, state)
        # A lent step leaves the optimizer as it was; of those of a step only this one counts.
        vars(self._optimizer).update(attributes)
        self._num_updates += 1
        self._scalars = [
            copied({name: value for name, value in found[pilot].items() if name not in traits.states})
            for pilot, traits in zip(self._pilots, self._traits, strict=True)
        ]
        for group, moved, options in zip(self._groups, groups, self._options, strict=True):
            group.update({key: value for key, value in options_of(moved).items() if options.get(key) is not value})

    def kept_once(self, group: int) -> Collection[str]:
        """Names all that is kept once for each tensor of a parameter group."""
        return self._scalars[group].keys()

    def scalars(self) -> list[Mapping[str, torch.Tensor]]:
        """Returns the states that tensors have once as tensors of no dimension."""
        return [
            {
                name: torch.as_tensor(scalars[name], dtype=DTYPES[dtype]).reshape(())
                for name, dtype in traits.scalars
                if name in scalars
            }
            for traits, scalars in zip(self._traits, self._scalars, strict=True)
        ]

    # ----------------------------------------------------------------------------------------------------- updates

    def update(self, copies: Sequence[HeldBlock], gradients: Sequence[torch.Tensor], num_updates: int) -> None:
        """Lends the runs of all blocks to the optimizer, for one call of its step."""
        kits = [self._kit_of(held) for held in copies]
        if self._tries:
            self._try_a_part(kits, gradients, num_updates)
        parameters: dict[int, list[torch.nn.Parameter]] = {}
        state: dict[torch.Tensor, State] = {}
        for kit, gradient in zip(kits, gradients, strict=True):
            for parameter, segment, _ in kit.parts:
                parameter.grad = gradient[segment.start : segment.stop]
                parameters.setdefault(segment.slot.group, []).append(parameter)
            state.update(kit.state)
        groups = []
        for group, lent in sorted(parameters.items()):
            groups.append({**self._options[group], "params": lent})
            # All blocks take the update from the same numbers, however many calls a step has.
            _set([state[parameter] for parameter in lent], self._before[group], self._place_of_numbers(group, lent[0]))
        found = lend_and_step(self._optimizer, groups, state, self._attributes).state
        for kit in kits:
            for part in kit.parts:
                # A kit lives as long as its block: it would keep the step's gradient.
                part.parameter.grad = None
                kit.state[part.parameter] = self._taken(part, found[part.parameter], num_updates)

    def _try_a_part(self, kits: Sequence[_Kit], gradients: Sequence[torch.Tensor], num_updates: int) -> None:
        """Makes the update of a part of one tensor whole and in halves, at one call of each step, another one from step
        to step."""
        self._is_due |= self._calls == self._step % max(1, self._calls_before)
        self._calls += 1
        if not self._is_due or self._tried_in == self._step:
            return
        parts = [
            (kit, part, gradient)
            for kit, gradient in zip(kits, gradients, strict=True)
            for part in kit.parts
            if can_be_tried(part.segment.stop - part.segment.start)
        ]
        if not parts:
            return  # the next call has some
        self._tried_in = self._step
        kit, part, gradient = parts[key64("part", self._step) % len(parts)]
        segment, group = part.segment, part.segment.slot.group
        state = kit.state[part.parameter]
        numbers: State = {}
        _set([numbers], self._before[group], self._place_of_numbers(group, part.parameter))
        run = TensorRun(
            segment.slot,
            part.parameter.detach(),
            gradient[segment.start : segment.stop],
            {name: view for name, view in part.views if name in state},
            numbers,
            self._options[group],
        )
        try_update(self._optimizer, run, self._attributes, self._step, num_updates)

    def _place_of_numbers(self, group: int, parameter: torch.Tensor) -> torch.device:
        """Tells where the optimizer has what it keeps once per tensor: as torch's classes, of which only the fused ones
        read it in their kernels."""
        return parameter.device if self._options[group].get("fused") else torch.device("cpu")

    def _kit_of(self, held: HeldBlock) -> _Kit:
        master = held.slots[MASTER]
        kit = self._kits.get(held)
        # The master moves when its layer is given up: the old parameters lie in the old memory.
        if kit is None or kit.master is not master:
            kit = self._kits[held] = self._new_kit(held, master)
        return kit

    def _new_kit(self, held: HeldBlock, master: torch.Tensor) -> _Kit:
        there = set(held.slots)
        for name in self._slots:
            if name not in there and any(name in self._states_of(segment) for segment in held.segments):
                # For what the first update makes. The lent state is without it, so that the optimizer begins it.
                held.slots[name] = torch.zeros(held.num_elements, dtype=torch.float32, device=master.device)
        parts = []
        state: dict[torch.Tensor, State] = {}
        for segment in held.segments:
            run = slice(segment.start, segment.stop)
            views = tuple((name, held.slots[name][run]) for name in self._states_of(segment))
            part = _Part(torch.nn.Parameter(master[run]), segment, views)
            parts.append(part)
            state[part.parameter] = {name: view for name, view in views if name in there}
        return _Kit(master, tuple(parts), state)

    def _states_of(self, segment: Segment) -> tuple[str, ...]:
        return self._traits[segment.slot.group].states

    def _taken(self, part: _Part, found: State, num_updates: int) -> State:
        """Returns the state after an update, with what is per element where the block keeps it."""
        for name, view in part.views:
            value = found.get(name)
            if value is not view and isinstance(value, torch.Tensor):
                view.copy_(value)
                found[name] = view
        kept = {name for name, _ in part.views} | self._scalars[part.segment.slot.group].keys()
        if found.keys() != kept:
            raise OptimizerError(
                f"{optimizer_class_name(self._optimizer)} keeps {_listed(found)} of {part.segment.slot.name} after "
                "update "
                f"{num_updates}, but kept {_listed(kept)} when it was tried; an optimizer's states must not depend on "
                "values, and must all be there from the first update on"
            )
        return found

    # ------------------------------------------------------------------------------------------------- checkpoints

    def given(self) -> dict[str, str]:
        """Describes the options of optimizer and scheduler, as texts by name."""
        return options_given(self._optimizer, self._scheduler)

    def state(self) -> str:
        """Options, scalar states and the scheduler's state, in torch's format, as base64."""
        content = {
            "num_updates": self._num_updates,
            "options": [options_of(group) for group in self._groups],
            "scalars": self._scalars,
            "scheduler": None if self._scheduler is None else plain(self._scheduler.state_dict()),
        }
        attributes = {
            name: value
            for name, value in attributes_of(self._optimizer).items()
            if name not in self._built or not is_same(value, self._built[name])
        }
        if attributes:
            content["attributes"] = plain(attributes)
        data = io.BytesIO()
        torch.save(content, data)
        return base64.b64encode(data.getvalue()).decode()

    def load(self, state: str, step: int) -> None:
        """Goes on with the options that were saved: they are stronger than those of the script."""
        try:
            content = load_plain(base64.b64decode(state))
            options, scheduler = [dict(group) for group in content["options"]], content["scheduler"]
            scalars, num_updates = [dict(group) for group in content["scalars"]], int(content["num_updates"])
            attributes = dict(content.get("attributes", {}))
            if len(scalars) != len(options) or any("params" in group for group in options):
                raise ValueError("its groups are not those of an optimizer")
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} has no state of an optimizer like "
                f"{optimizer_class_name(self._optimizer)}: {error}; "
                "resume with the optimizer that it was written with"
            ) from error
        if len(options) != len(self._groups) or (scheduler is None) != (self._scheduler is None):
            raise CheckpointError(
                f"the checkpoint of step {step} is of an optimizer with {len(options)} parameter groups and "
                f"{'no' if scheduler is None else 'a'} scheduler, but {optimizer_class_name(self._optimizer)} has "
                f"{len(self._groups)} and {'none' if self._scheduler is None else 'one'}; resume with the optimizer "
                "and the scheduler that it was written with"
            )
        try:
            if self._scheduler is not None:
                self._scheduler.load_state_dict(scheduler)
            for group, saved in zip(self._groups, options, strict=True):
                group.update(saved)
            vars(self._optimizer).update({**copy.deepcopy(self._built), **attributes})
        except SIGNALS:
            raise
        except Exception as error:  # of any kind: a scheduler takes what it is given
            raise CheckpointError(
                f"the state of {optimizer_class_name(self._optimizer)} in the checkpoint of step {step} cannot be "
                "taken over "
                f"({type(error).__name__}: {error}); resume with the optimizer that it was written with"
            ) from error
        self._scalars, self._num_updates, self._step = scalars, num_updates, step
        self._fix()


def _scheduler_of(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> Any:
    try:
        with float32_by_default():
            scheduler = make(optimizer)
    except SIGNALS:
        raise
    except (Exception, SystemExit) as error:
        raise has_raised(f"lr_scheduler=, called with {optimizer_class_name(optimizer)},", error) from error
    missing = [
        name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(scheduler, name, None))
    ]
    if missing:
        raise OptimizerError(
            "lr_scheduler= must be a callable that takes the optimizer and returns one of torch.optim.lr_scheduler, "
            f"but it has returned {type(scheduler).__name__}, which has no {' and no '.join(missing)}: "
            "lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)"
        )
    # It warns if its first step comes before the optimizer's, as it does after a step that is skipped.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return scheduler


def _set(states: Sequence[State], scalars: State, place: torch.device) -> None:
    """Sets the scalar states of parameters of one group, each of which has its own tensor.

    Args:
        states: of the parameters.
        scalars: their values, in host memory.
        place: where they are kept.
    """
    for name, value in scalars.items():
        if not isinstance(value, torch.Tensor):
            for state in states:
                state[name] = value
            continue
        # What is on a device is filled by a kernel: a copy of ordinary memory would wait for the device.
        here = value if place.type == "cpu" else torch.full_like(value, value.item(), device=place)
        known = []
        for state in states:
            there = state.get(name)
            if there is None:
                state[name] = here.clone()
            else:
                known.append(there)
        if known:
            torch._foreach_copy_(known, [here] * len(known))


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
