"""What a run's optimizer makes of made-up numbers, as one more operator of the environment
(`elaswave.engine.checks.determinism_check`).

A built-in optimizer is the code of this release, one of a script's own is not: in another process it may be another
version, or round otherwise. So the first vote compares it, and every later one that of workers that are new.
"""

from collections.abc import Iterator

import torch

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.checkpoints.format import MASTER
from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.determinism_check import environment, hash_tensors, made_up
from elaswave.hashing import key64
from elaswave.protocol.environment import Environment
from elaswave.state.store import HeldBlock

UPDATE = "update"
"""Name of the operator."""


def environment_of(blueprint: Blueprint, device: Device = HOST) -> Environment:
    """What this process computes with, the optimizer of a run included."""
    found = environment(device)
    return found._replace(operators={**found.operators, UPDATE: update_hash(blueprint, device)})


def update_hash(blueprint: Blueprint, device: Device = HOST) -> int:
    """A hash of the first update of the first block of each kind of layer; 0 for an optimizer that does not take
    made-up numbers. Nothing is left behind: the updater is a new one, and so is what is updated."""
    found: list[torch.Tensor] = []
    try:
        updater = blueprint.optimizer.updater()
        updater.committed(1, 1.0, updates=True)
        for block in _one_of_each_kind(blueprint):
            copy = _made_up_copy(blueprint, block, device)
            gradient = made_up(
                torch.empty(copy.num_elements, device=device.place), key64(UPDATE, "gradient", block.layer)
            )
            updater.update([copy], [gradient], 1)
            found += [copy.slots[name] for name in sorted(copy.slots)]
    except Exception:
        return 0
    return hash_tensors(found) or 1


def _one_of_each_kind(blueprint: Blueprint) -> Iterator[Block]:
    kinds = set()
    for block in blueprint.blocks:
        shape = blueprint.shapes[block.layer]
        kind = tuple((slot.shape, slot.decays, slot.group, slot.states, slot.scalars) for slot in shape.tensors)
        if block.start == 0 and not shape.is_buffers and kind not in kinds:
            kinds.add(kind)
            yield block


def _made_up_copy(blueprint: Blueprint, block: Block, device: Device) -> HeldBlock:
    """A block with values that do not depend on the run; states of the optimizer are not negative."""
    copy = HeldBlock(block, ReplicaRole.OWNER, blueprint.shapes[block.layer], {}, version=0)
    for name in blueprint.state.slots_of((segment.slot for segment in copy.segments), 0):
        values = made_up(torch.empty(copy.num_elements, device=device.place), key64(UPDATE, name, block.layer))
        copy.slots[name] = values if name == MASTER else values.abs_()
    return copy
