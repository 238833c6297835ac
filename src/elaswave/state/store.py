"""The blocks that one worker holds: float32 masters, optimizer slots, and the gradient that waits to be applied.

Owners and followers hold the same thing and apply the same updates; the role says only who reduces and serves.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.blocks.shapes import LayerShape, Segment, TensorSlot, segments
from elaswave.checkpoints.format import MASTER
from elaswave.hashing import MASK64
from elaswave.state.verify import tensor_digest

Scalars = Sequence[Mapping[str, torch.Tensor]]
"""The optimizer's states that a tensor has once, not per element, by its parameter group; equal on all workers."""


class HeldBlock:
    """One block's state on one worker.

    Args:
        block: which run of which layer.
        role: owner or follower.
        shape: the block's layer.
        slots: float32 tensors of the block's length: "master" and the optimizer's, as far as they exist yet.
        version: the last step that was applied to the slots.
    """

    def __init__(
        self, block: Block, role: ReplicaRole, shape: LayerShape, slots: dict[str, torch.Tensor], version: int
    ) -> None:
        self.block = block
        self.role = role
        self.slots = slots
        self.version = version
        self.segments: tuple[Segment, ...] = tuple(segments(shape, block.start, block.stop))
        self.decay_runs = tuple(_decay_runs(self.segments))
        """The runs [start, stop) of the block that weight decay applies to."""
        self.gradient: torch.Tensor | None = None
        """The reduced mean gradient of the step in flight, float32 [length], before clipping; None outside of one."""

    @property
    def is_buffers(self) -> bool:
        """Whether it holds buffers, not parameters."""
        return bool(self.segments) and self.segments[0].slot.is_buffer

    def assign(self, values: torch.Tensor, tensors: Collection[int]) -> None:
        """Takes over new values of some of its tensors, as they are.

        Args:
            values: float32, of the whole block.
            tensors: by index.
        """
        for segment in self.segments:
            if segment.slot.id in tensors:
                part = slice(segment.start, segment.stop)
                self.slots[MASTER][part] = values[part]

    @property
    def num_elements(self) -> int:
        """Elements of the block, padding included."""
        return self.block.stop - self.block.start

    def digests(self, scalars: Scalars = ()) -> Iterator[tuple[str, int]]:
        """The block's part of every tensor digest, as ("slot.tensor", part)."""
        for slot_name, values in self.slots.items():
            for segment in self.segments:
                if segment.slot.has(slot_name):
                    part = values[segment.start : segment.stop]
                    name = segment.slot.name
                    yield f"{slot_name}.{name}", tensor_digest(slot_name, name, segment.tensor_start, part)
        for name, tensor, value in self.scalar_states(scalars):
            words = value.reshape(1).view(torch.float32)
            yield f"{name}.{tensor.name}", tensor_digest(name, tensor.name, 0, words)

    def scalar_states(self, scalars: Scalars) -> Iterator[tuple[str, TensorSlot, torch.Tensor]]:
        """Name, tensor and value of the scalar states that go with this block: of the tensors that begin in it."""
        for segment in self.segments:
            if segment.tensor_start == 0:
                for name, _ in segment.slot.scalars:
                    if name in scalars[segment.slot.group]:
                        yield name, segment.slot, scalars[segment.slot.group][name]


def _decay_runs(parts: Sequence[Segment]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for segment in parts:
        if segment.slot.decays and runs and runs[-1][1] == segment.start:
            runs[-1] = (runs[-1][0], segment.stop)
        elif segment.slot.decays:
            runs.append((segment.start, segment.stop))
    return runs


class BlockStore:
    """All blocks that one worker holds, by id."""

    def __init__(self, held: Mapping[int, HeldBlock]) -> None:
        self.held = dict(sorted(held.items()))

    def __iter__(self) -> Iterator[HeldBlock]:
        return iter(self.held.values())

    def __getitem__(self, block: int) -> HeldBlock:
        return self.held[block]

    def with_role(self, role: ReplicaRole) -> Iterator[HeldBlock]:
        """The blocks held in one role, ascending."""
        return (held for held in self if held.role is role)

    def optimizer_bytes(self) -> int:
        """Bytes of masters and optimizer slots."""
        return sum(slot.nbytes for held in self for slot in held.slots.values())

    def digest_parts(self, role: ReplicaRole, scalars: Scalars = ()) -> dict[str, int]:
        """This worker's part of every tensor digest, from the blocks of one role."""
        (parts,) = self.weighted_digests(scalars, {held.block.id: 1 for held in self.with_role(role)})
        return parts

    def weighted_digests(self, scalars: Scalars, *weights: Mapping[int, int]) -> list[dict[str, int]]:
        """Parts of every tensor digest, modulo 2**64, for each of the weightings.

        Args:
            scalars: states of the optimizer that a tensor has once.
            weights: block -> how often it counts; the others count 0 times.
        """
        sums: list[dict[str, int]] = [{} for _ in weights]
        for held in self:
            index = held.block.id
            counted = [(parts, times[index]) for parts, times in zip(sums, weights, strict=True) if times.get(index)]
            for name, value in held.digests(scalars) if counted else ():
                for parts, times in counted:
                    parts[name] = (parts.get(name, 0) + times * value) & MASK64
        return sums
