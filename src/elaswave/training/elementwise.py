"""Tries whether an optimizer updates every element by itself, before a run relies on it.

Blocks hold any run of a tensor's elements, so the same class must give the same bits whether it updates a tensor or its
runs. No list of classes answers that (a Muon may fall back to AdamW for vectors, a fused kernel rounds the end of a
call in another way, RAdam takes another branch after some updates), so it is tried: tensors of the real shapes and
parameter groups, whole, beside the same elements in blocks that `TorchUpdater` updates, over `STEPS` updates. Shapes
that are too large are cut to fit `ELEMENTS_MAX`. Seeded, and nothing of the process's random state is changed.
"""

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.blocks.shapes import ALIGNMENT_ELEMENTS, LayerShape, TensorSlot, align
from elaswave.checkpoints.format import EMA, MASTER
from elaswave.checkpoints.shards import DTYPE_NAMES
from elaswave.errors import OptimizerError
from elaswave.state.flat import HeldBlock
from elaswave.training.lent_steps import State, attributes_of, lend_and_step, options_of
from elaswave.training.parameters import (
    Parameters,
    float32_by_default,
    groups_of,
    make_optimizer,
    optimizer_class_name,
    stand_ins,
)
from elaswave.training.torch_optimizer import TorchUpdater, Traits

STEPS = 16
"""Updates that are tried. RAdam takes another branch near the sixth."""
ELEMENTS_MAX = 1 << 20
TENSORS_MAX = 48
"""Tensors that are tried, of different shapes or groups; more where there are more groups."""

_SEED = 20
_RUN_ELEMENTS = 2 * ALIGNMENT_ELEMENTS
"""Of the run that shows which states are per element."""
_ZERO_STEP = 3
"""The update whose gradients are all zero."""
_AT_ONCE = (2, 5, 7)
"""The updates of all blocks by one step, as on devices. Each has a multiple that is made block by block, so that what
an optimizer does to all of its parameters once in a while shows there."""


class Tried(NamedTuple):
    """What is known of an optimizer that updates every element by itself."""

    groups: Mapping[str, int]
    """Parameter group by full name of a tensor."""
    traits: tuple[Traits, ...]
    """By parameter group."""
    slots: tuple[str, ...]
    """Its states per element, those of all groups: first those that are there before the first update."""
    late: tuple[str, ...]
    """The states that are not."""


def try_out(factory: Callable[[Parameters], object], tensors: Sequence[TensorSlot]) -> Tried:
    """Tries an optimizer on the shapes of a model.

    Args:
        factory: makes it of parameters.
        tensors: that are trained, at least one.
    Raises:
        OptimizerError: it is not elementwise, or cannot be used for another reason, which the message says.
    """
    with _undisturbed():
        return _Trial(factory, tensors).run()


class _Trial:
    def __init__(self, factory: Callable[[Parameters], object], tensors: Sequence[TensorSlot]) -> None:
        self._factory, self._tensors = factory, tensors
        parameters = stand_ins(tensors)
        self._optimizer = make_optimizer(factory, parameters)
        self._kind = optimizer_class_name(self._optimizer)
        self._groups = groups_of(self._optimizer, parameters)
        self._generator = torch.Generator().manual_seed(_SEED)
        self._samples = self._sampled()
        self._values = {slot.name: torch.randn(slot.shape, generator=self._generator) for slot in self._samples}

    # ------------------------------------------------------------------------------------------------- what is tried

    def _sampled(self) -> list[TensorSlot]:
        """Chooses one tensor of each shape and group, or of some, cut to a size that can be tried; they are in one
        layer's storage."""
        kinds: dict[tuple[int, tuple[int, ...]], TensorSlot] = {}
        for slot in self._tensors:
            if slot.numel:
                kinds.setdefault((self._groups[slot.name], slot.shape), slot)
        first: dict[tuple[int, int], TensorSlot] = {}
        for (group, shape), slot in kinds.items():
            first.setdefault((group, len(shape)), slot)
        others = [slot for slot in kinds.values() if slot not in first.values()]
        order = torch.randperm(len(others), generator=self._generator).tolist()
        chosen = [*first.values(), *(others[index] for index in order)][: max(len(first), TENSORS_MAX)]
        samples, offset = [], 0
        for slot in chosen:
            shape = _cut(slot.shape, ELEMENTS_MAX // len(chosen))
            group, numel = self._groups[slot.name], math.prod(shape)
            samples.append(slot._replace(shape=shape, numel=numel, offset=offset, layer=0, group=group))
            offset = align(offset + numel)
        return samples

    def run(self) -> Tried:
        """Tries it."""
        self._check_options()
        whole, parameters = self._whole()
        before = self._states_before(whole, parameters)
        traits = tuple(self._traits(group, before[group]) for group in range(len(self._optimizer.param_groups)))
        names = list(dict.fromkeys(name for each in traits for name in each.states))
        at_once = [name for name in names if any(name in each.fills for each in traits)]
        slots = (*at_once, *(name for name in names if name not in at_once))
        initial = {name for each in traits for name in (*each.fills, *each.initial)}
        every = {*names, *(name for each in traits for name, _ in each.scalars)}
        tried = Tried(self._groups, traits, slots, tuple(sorted(every - initial)))
        self._compare(whole, parameters, tried)
        return tried

    def _check_options(self) -> None:
        optimizer = self._optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise OptimizerError(
                f"{self._kind} has step hooks, which would run once for each block; leave them out, and use a callback "
                "of the Trainer"
            )
        for number, group in enumerate(optimizer.param_groups):
            for name, value in options_of(group).items():
                if isinstance(value, torch.Tensor):
                    raise OptimizerError(
                        f"option {name} of parameter group {number} of {self._kind} is a tensor; give the number "
                        f"{value.tolist()}"
                    )

    # ------------------------------------------------------------------------------------------------- whole tensors

    def _whole(self) -> tuple[torch.optim.Optimizer, dict[str, torch.nn.Parameter]]:
        """Makes a new instance of whole tensors, and returns it with those of the sampled ones."""
        sampled = {name: torch.nn.Parameter(values.clone()) for name, values in self._values.items()}
        given = Parameters((name, sampled.get(name, other)) for name, other in stand_ins(self._tensors).items())
        optimizer = make_optimizer(self._factory, given)
        if groups_of(optimizer, given) != self._groups:
            raise OptimizerError(
                f"the callable of {self._kind} gives parameters other groups when it is called again; it is called in "
                "every process, and must do the same each time"
            )
        _keep_only(optimizer, sampled.values())
        return optimizer, sampled

    def _states_before(
        self, whole: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
    ) -> list[tuple[dict[str, float], State]]:
        """Finds the states that are there before the first update, by group: the fills of those per element, and the
        rest."""
        found: list[tuple[dict[str, float], State] | None] = [None] * len(whole.param_groups)
        for slot in sorted(self._samples, key=lambda slot: -slot.numel):
            fills: dict[str, float] = {}
            initial: State = {}
            for name, value in whole.state.get(parameters[slot.name], {}).items():
                # The count of steps has the shape of a parameter that is a number.
                is_number = not isinstance(value, torch.Tensor) or (not slot.shape and name == "step")
                if is_number or value.shape != slot.shape:
                    initial[name] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if not bool((value == value.reshape(-1)[0]).all()):
                    self._refuse(slot, f"its state {name} begins with values that differ between elements")
                fills[name] = float(value.reshape(-1)[0])
            if found[slot.group] is None:
                found[slot.group] = fills, initial
            elif (known := found[slot.group]) is not None and (known[0], known[1].keys()) != (fills, initial.keys()):
                self._refuse(slot, "it begins with other states than other tensors of its parameter group")
        return [({}, {}) if each is None else each for each in found]

    def _step_whole(self, whole: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        try:
            whole.step()
        except Exception as error:
            for slot in self._samples:  # each alone, to name one that fails
                optimizer, single = self._whole()
                _keep_only(optimizer, [single[slot.name]])
                single[slot.name].grad = torch.zeros(slot.shape)
                try:
                    optimizer.step()
                except Exception as own:
                    self._refuse(slot, f"its step fails: {_said(own)}", own)
            self._refuse(self._samples[0], f"its step fails: {_said(error)}", error)

    # -------------------------------------------------------------------------------------------------- runs of them

    def _traits(self, group: int, before: tuple[dict[str, float], State]) -> Traits:
        """Finds what the optimizer keeps of the tensors of a group, by updates of a run of elements."""
        fills, initial = before
        options = options_of(self._optimizer.param_groups[group])
        slot = next((slot for slot in self._samples if slot.group == group), None)
        if slot is None:  # a group of nothing, or of tensors without elements
            return Traits((), (), {}, {})
        run = torch.nn.Parameter(torch.randn(_RUN_ELEMENTS, generator=self._generator))
        state: State = {name: torch.full((_RUN_ELEMENTS,), value) for name, value in fills.items()}
        state |= {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in initial.items()}
        kept: list[tuple[str, str]] = []
        attributes = attributes_of(self._optimizer)
        for number in range(1, STEPS + 1):
            run.grad = self._gradient(_RUN_ELEMENTS, number)
            try:
                found, attributes = lend_and_step(
                    self._optimizer, [{**options, "params": [run]}], {run: state}, attributes
                )
                state = found[run]
            except Exception as error:
                self._refuse(slot, f"its step fails for a run of the tensor's elements: {_said(error)}", error)
            now = sorted((name, self._sort_of(slot, name, value)) for name, value in state.items())
            if number > 1 and now != kept:
                self._refuse(
                    slot,
                    f"its states after update {number} are others than after the first: {_listed(now)}, not "
                    f"{_listed(kept)}; they must all be there from the first update on",
                )
            kept = now
        states = tuple(name for name in state if (name, "elements") in kept)
        scalars = tuple((name, sort) for name, sort in kept if sort in DTYPE_NAMES.values())
        return Traits(states, scalars, fills, initial)

    def _sort_of(self, slot: TensorSlot, name: str, value: Any) -> str:
        """Tells the sort of a state: "elements", or the element type of a number, or "other" for a state that no
        checkpoint shows."""
        if name in (MASTER, EMA):
            self._refuse(slot, f'its state has the name "{name}", which elaswave uses itself')
        if isinstance(value, torch.Tensor) and value.shape == (_RUN_ELEMENTS,):
            if value.dtype != torch.float32:
                self._refuse(slot, f"its state {name} is {value.dtype}, and blocks hold torch.float32")
            return "elements"
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype in DTYPE_NAMES:
            return DTYPE_NAMES[value.dtype]
        if value is None or isinstance(value, bool):
            return "other"
        if isinstance(value, int | float):
            return "int64" if isinstance(value, int) else "float64"
        what = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
        self._refuse(slot, f"its state {name} has {what} for a run of {_RUN_ELEMENTS} elements")

    # ---------------------------------------------------------------------------------------------------- comparison

    def _compare(
        self, whole: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], tried: Tried
    ) -> None:
        optimizer = make_optimizer(self._factory, stand_ins(self._tensors))
        updater = TorchUpdater(optimizer, tried.traits, tried.slots, tries=False)
        blocks = self._blocks(tried)
        size = blocks[-1].block.stop
        for number in range(1, STEPS + 1):
            flat = torch.zeros(size)
            for slot in self._samples:
                run = flat[slot.offset : slot.stop] = self._gradient(slot.numel, number)
                parameters[slot.name].grad = run.view(slot.shape).clone()
            self._step_whole(whole, parameters)
            updater.committed(number, 0.0, updates=True)
            for some in [blocks] if number in _AT_ONCE else [[held] for held in blocks]:
                try:
                    updater.update(some, [flat[held.block.start : held.block.stop].clone() for held in some], number)
                except Exception as error:
                    slot = some[0].segments[0].slot
                    self._refuse(slot, f"its step fails for a run of elements: {_said(error)}", error)
            self._compare_step(whole, parameters, tried, blocks, updater, number)
        for slot in self._samples:
            unchanged = torch.equal(parameters[slot.name], self._values[slot.name])
            if unchanged and self._optimizer.param_groups[slot.group].get("lr") != 0:
                self._refuse(slot, f"{STEPS} steps leave it as it is; does it keep parameters anywhere else?")

    def _blocks(self, tried: Tried) -> list[HeldBlock]:
        tensors = tuple(slot._replace(states=(MASTER, *tried.traits[slot.group].states)) for slot in self._samples)
        size = align(tensors[-1].stop)
        shape = LayerShape(0, tensors, size)
        master = torch.zeros(size)
        cuts = {0, size}
        for slot in tensors:
            master[slot.offset : slot.stop] = self._values[slot.name].reshape(-1)
            places = torch.randint(0, align(slot.numel) // ALIGNMENT_ELEMENTS, (3,), generator=self._generator)
            cuts.update(slot.offset + ALIGNMENT_ELEMENTS * place for place in places.tolist())
        blocks = []
        for number, (start, stop) in enumerate(pairwise(sorted(cuts))):
            held = HeldBlock(
                Block(number, 0, start, stop), ReplicaRole.OWNER, shape, {MASTER: master[start:stop].clone()}
            )
            for segment in held.segments:
                for name, value in tried.traits[segment.slot.group].fills.items():
                    state = held.slots.setdefault(name, torch.zeros(stop - start))
                    state[segment.start : segment.stop] = value
            blocks.append(held)
        return blocks

    def _compare_step(
        self,
        whole: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        tried: Tried,
        blocks: Sequence[HeldBlock],
        updater: TorchUpdater,
        number: int,
    ) -> None:
        flat = {
            name: torch.cat([held.slots.get(name, held.slots[MASTER]) for held in blocks])
            for name in (MASTER, *tried.slots)
        }
        scalars = updater.scalars()
        for slot in self._samples:
            traits, parameter = tried.traits[slot.group], parameters[slot.name]
            state = whole.state.get(parameter, {})
            kept = {*traits.states, *updater.kept_once(slot.group)}
            if state.keys() != kept:
                self._refuse(slot, f"it keeps {_listed(state)} of it, but {_listed(kept)} of a run of its elements")
            for name in (MASTER, *traits.states):
                values = parameter.detach() if name == MASTER else state[name]
                if values.shape != slot.shape:
                    self._refuse(slot, f"its state {name} has the shape {list(values.shape)}")
                self._compare_values(slot, name, values.reshape(-1), flat[name][slot.offset : slot.stop], number)
            for name, _ in traits.scalars:
                if float(state[name]) != float(scalars[slot.group][name]):
                    self._refuse(
                        slot,
                        f"its state {name} is {float(state[name])} after update {number}, but "
                        f"{float(scalars[slot.group][name])} for another tensor of the same parameter group",
                    )

    def _compare_values(
        self, slot: TensorSlot, name: str, whole: torch.Tensor, runs: torch.Tensor, number: int
    ) -> None:
        differs = whole.contiguous().view(torch.int32) != runs.view(torch.int32)
        if bool(differs.any()):
            first = int(differs.nonzero()[0])
            what = "the parameter" if name == MASTER else f"the state {name}"
            self._refuse(
                slot,
                f"update {number} gives {what} other bits when the tensor is cut into runs of elements (element "
                f"{first}: {float(whole[first])!r} whole, {float(runs[first])!r} cut)",
            )

    def _gradient(self, num_elements: int, number: int) -> torch.Tensor:
        if number == _ZERO_STEP:
            return torch.zeros(num_elements)
        scales = torch.randint(-4, 3, (num_elements,), generator=self._generator)
        return torch.randn(num_elements, generator=self._generator) * 10.0**scales

    def _refuse(self, slot: TensorSlot, why: str, error: Exception | None = None) -> NoReturn:
        raise OptimizerError(
            f"{self._kind} cannot be used: {slot.name} {list(slot.shape)}: {why}. Blocks of state hold any run of a "
            "tensor's elements, so an optimizer must update every element by itself, as torch.optim's Adam, AdamW, "
            "SGD, RMSprop, Adagrad, Adamax, NAdam and RAdam do"
        ) from error


def _keep_only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Takes the others out of an optimizer's groups: they have no gradient, which a class need not look for."""
    kept = set(map(id, parameters))
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]


def _cut(shape: Sequence[int], num_elements: int) -> tuple[int, ...]:
    """Returns the shape, or one of as many dimensions with at most so many elements."""
    sizes = list(shape)
    while math.prod(sizes) > num_elements:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[largest] = -(-sizes[largest] // 2)
    return tuple(sizes)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _listed(names: Any) -> str:
    return ", ".join(sorted(name if isinstance(name, str) else name[0] for name in names)) or "nothing"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps what is done inside from changing random states, and from starting threads: the forkserver forks later."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with float32_by_default():
            yield
    finally:
        torch.set_num_threads(num_threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
