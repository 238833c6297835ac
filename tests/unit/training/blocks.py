"""Tensors in blocks, updated as workers update them, beside the same tensors whole, updated by torch."""

import base64
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.blocks.shapes import LayerShape
from elaswave.checkpoints.format import MASTER
from elaswave.state.flat import HeldBlock
from elaswave.training.own_optimizer import OwnOptimizer, TorchOptimizer
from elaswave.training.parameters import Parameters

SIZES = [(7, 5), (5,), (64, 33), (33,), (1,), (), (3, 4, 32), (96,)]
"""Sizes of tensors: of less than a vector, of whole vectors, with an end that fills none."""
SHAPE = make_shape(SIZES)
NUMBERS = ("step", "mu_product", "eta", "mu")
"""States that torch's classes keep once per tensor."""
CUTS = [0, 32, 96, 544, 1024, 2176, 2208, 2336, 2560, 2720, SHAPE.size]

Factory = Callable[[Parameters], torch.optim.Optimizer]


def initial_values(shape: LayerShape = SHAPE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {slot.name: torch.randn(slot.shape, generator=generator) for slot in shape.tensors}


def gradients(step: int, shape: LayerShape = SHAPE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    found = {}
    for slot in shape.tensors:
        scale = 10.0 ** torch.randint(-5, 2, slot.shape, generator=generator)
        found[slot.name] = torch.randn(slot.shape, generator=generator) * scale
    return found


def flat_of(values: Mapping[str, torch.Tensor], shape: LayerShape) -> torch.Tensor:
    flat = torch.zeros(shape.size)
    for slot in shape.tensors:
        flat[slot.offset : slot.stop] = values[slot.name].reshape(-1)
    return flat


class Crew:
    """Some workers' blocks of one layer; worker i of n holds the blocks i, i + n, ..., and updates some at once."""

    def __init__(
        self,
        optimizer: TorchOptimizer,
        *,
        cuts: Sequence[int] = CUTS,
        workers: int = 2,
        shape: LayerShape = SHAPE,
        at_once: int = 1,
    ) -> None:
        self.optimizer, self.at_once = optimizer, at_once
        (self.shape,) = optimizer.shapes((shape,))
        self.updaters = [optimizer.updater() for _ in range(workers)]
        master = flat_of(initial_values(shape), shape)
        self.blocks = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            slots = {MASTER: master[start:stop].clone()}
            held = HeldBlock(Block(number, 0, start, stop), ReplicaRole.OWNER, self.shape, slots)
            for name in optimizer.slots:
                if name not in optimizer.late and any(part.slot.has(name) for part in held.segments):
                    held.slots[name] = torch.zeros(stop - start)
                    for part in held.segments:
                        held.slots[name][part.start : part.stop] = optimizer.initial(name, part.slot)
            self.blocks.append(held)
        self.num_updates = 0

    def step(self, number: int, *, loss: float = 0.0, updates: bool = True) -> None:
        flat = flat_of(gradients(number, self.shape), self.shape)
        self.num_updates += updates
        for updater in self.updaters:
            updater.committed(number, loss, updates=updates)
        for worker, updater in enumerate(self.updaters):
            own = self.blocks[worker :: len(self.updaters)]
            for first in range(0, len(own) if updates else 0, self.at_once):
                some = own[first : first + self.at_once]
                parts = [flat[held.block.start : held.block.stop].clone() for held in some]
                updater.update(some, parts, self.num_updates)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Parameters by name, and states by name and state, of those that have it; flat."""
        found = {}
        for slot in self.shape.tensors:
            for name in (MASTER, *self.optimizer.slots):
                if slot.has(name) and any(name in held.slots for held in self.blocks):
                    parts = [held.slots.get(name, torch.zeros(held.num_elements)) for held in self.blocks]
                    found[f"{name}.{slot.name}"] = torch.cat(parts)[slot.offset : slot.stop]
        return found

    @property
    def scalars(self) -> dict[str, float]:
        """Numbers by state and tensor."""
        found = {}
        for held in self.blocks:
            for name, tensor, value in held.scalar_states(self.updaters[0].scalars()):
                found[f"{name}.{tensor.name}"] = float(value)
        return found


class Whole:
    """The same tensors, updated by torch as a plain script does it."""

    def __init__(self, factory: Factory, scheduler: Any = None, shape: LayerShape = SHAPE) -> None:
        self.shape = shape
        self.parameters = {name: torch.nn.Parameter(value) for name, value in initial_values(shape).items()}
        self.optimizer = factory(Parameters(self.parameters.items()))
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)

    def step(self, number: int, *, loss: float = 0.0) -> None:
        for name, gradient in gradients(number, self.shape).items():
            self.parameters[name].grad = gradient
        self.optimizer.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    @property
    def values(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.parameters.items():
            found[f"{MASTER}.{name}"] = parameter.detach().reshape(-1)
            for state, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and state not in NUMBERS:
                    found[f"{state}.{name}"] = value.reshape(-1)
        return found

    @property
    def scalars(self) -> dict[str, float]:
        return {
            f"{state}.{name}": float(value)
            for name, parameter in self.parameters.items()
            for state, value in self.optimizer.state.get(parameter, {}).items()
            if state in NUMBERS
        }


@functools.cache
def tried(factory: Factory, scheduler: Any = None, shape: LayerShape = SHAPE) -> TorchOptimizer:
    return OwnOptimizer(factory, scheduler)((shape,))


def decoded(state: str) -> Any:
    """What an updater keeps in a checkpoint."""
    return torch.load(io.BytesIO(base64.b64decode(state)), weights_only=True)


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.view(torch.int32).equal(other[name].contiguous().view(torch.int32)), name
