"""The buffers of a layer's module: every micro-batch begins with the step's, and what it leaves behind is noted.

Persistent buffers are state: they lie in a unit of their own, as float32, and a forward is given copies of them. Those
that are not persistent are put back to their built values. So no forward sees what another one has written, whichever
came first, and recomputation and evaluation leave nothing behind.

The blocks that one worker holds: float32 masters, optimizer slots, and the gradient that waits to be applied.

Owners and followers hold the same thing and apply the same updates; the role says only who reduces and serves.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.blocks.shapes import LayerShape, Segment, TensorSlot, segments
from elaswave.checkpoints.format import MASTER
from elaswave.errors import UsageError
from elaswave.hashing import MASK64
from elaswave.models.layers import Layer
from elaswave.state.hashes import tensor_digest

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Element types of persistent buffers that float32 holds exactly."""

_NUM_LOOKS = 8
"""So many forwards of a module are watched for kernels that write buffers without telling autograd, as those of batch
normalisation do. Whatever is seen to be written so, right after a forward, is looked at from then on. What differs at
any other moment has changed in memory."""


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ``module.state_dict()`` holds, each under its first name."""
    seen: set[int] = set()
    found = {}
    for name, owner, key, buffer in _places(module):
        if key not in owner._non_persistent_buffers_set and id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def _places(module: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """Every place where a buffer is registered: full name, submodule, its name there, tensor."""
    return [
        (f"{path}.{key}" if path else key, owner, key, buffer)
        for path, owner in module.named_modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]


def buffer_to_float32(buffer: torch.Tensor) -> torch.Tensor:
    """The elements of flat storage of a buffer, float32, one dimension; see `elaswave.blocks.shapes.WHOLE_BYTES`."""
    flat = buffer.detach().contiguous().reshape(-1)
    return flat.to(torch.float32) if buffer.is_floating_point() else flat.view(torch.uint8).to(torch.float32)


def buffer_from_float32(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`, still in one dimension; always in memory of its own."""
    if dtype.is_floating_point:
        return values.to(dtype, copy=True)
    return values.to(torch.uint8).view(dtype)


class _Persistent(NamedTuple):
    slot: TensorSlot
    dtype: torch.dtype
    places: list[tuple[nn.Module, str]]


class _Fixed(NamedTuple):
    """A buffer that is not persistent, at one of its places."""

    name: str
    """In the layer's module."""
    owner: nn.Module
    key: str
    buffer: torch.Tensor
    """What is registered while a forward runs."""
    built: torch.Tensor
    """A copy of its built value that nothing writes."""
    is_compared: bool
    """Whether its content is looked at, and not only the number of writes that autograd knows of."""


class LayerBuffers:
    """The buffers of one module.

    Args:
        module: just built, so that buffers that are not persistent have their values.
        spec: the layer, for its names.
        unit: where its persistent buffers lie; None: it has none.
    """

    def __init__(self, module: nn.Module, spec: Layer, unit: LayerShape | None) -> None:
        self._name = spec.name
        places = _places(module)
        by_name = {slot.name: slot for slot in unit.tensors} if unit else {}
        by_tensor: dict[int, _Persistent] = {}
        self._fixed: list[_Fixed] = []
        for full, owner, key, buffer in places:
            if id(buffer) in by_tensor:
                by_tensor[id(buffer)].places.append((owner, key))
            elif spec.full_name(full) in by_name:
                slot = by_name[spec.full_name(full)]
                by_tensor[id(buffer)] = _Persistent(slot, buffer.dtype, [(owner, key)])
            else:
                is_compared = isinstance(owner, _NormBase)
                self._fixed.append(_Fixed(full, owner, key, buffer, buffer.detach().clone(), is_compared))
        self._versions = [fixed.buffer._version for fixed in self._fixed]
        self._looks_left = _NUM_LOOKS
        self._strayed: list[tuple[str, torch.Tensor]] = []
        """Buffers that had changed though nobody had written them, and were put back since."""
        self._persistent = list(by_tensor.values())
        self._initial: list[torch.Tensor] = []
        """Encoded, of the step."""
        self._is_finite: list[bool] = []

    @property
    def tensors(self) -> list[TensorSlot]:
        """The persistent ones, in the order of `left`."""
        return [each.slot for each in self._persistent]

    def refresh(self, flat: torch.Tensor) -> None:
        """Takes over the buffers that a step begins with.

        Args:
            flat: of their unit, float32.
        """
        self._initial = [flat[each.slot.offset : each.slot.stop] for each in self._persistent]
        self._is_finite = [bool(values.isfinite().all()) for values in self._initial]

    @contextmanager
    def made_up(self) -> Iterator[None]:
        """For a while every forward begins with ones in persistent buffers of floating-point numbers and zeros in
        others, whatever the step begins with."""
        kept, self._initial = (
            self._initial,
            [
                torch.full_like(values, 0.0 if each.slot.is_whole else 1.0)
                for each, values in zip(self._persistent, self._initial, strict=True)
            ],
        )
        try:
            yield
        finally:
            self._initial = kept

    def restore(self) -> None:
        """A forward begins: persistent buffers are copies of the step's, the others have their built values."""
        for each, initial in zip(self._persistent, self._initial, strict=True):
            value = buffer_from_float32(initial, each.dtype).view(each.slot.shape)
            for owner, key in each.places:
                owner._buffers[key] = value
        for index, fixed in enumerate(self._fixed):
            if not self._is_untouched(index) or (fixed.is_compared and not _same_bits(fixed.buffer, fixed.built)):
                self._put_back(index)
            elif self._looks_left:
                self._look_for_stray(index)

    def look(self) -> None:
        """A forward has ended: looks, after the first ones, what has been written without a word."""
        if not self._looks_left:
            return
        self._looks_left -= 1
        for index, fixed in enumerate(self._fixed):
            if self._is_untouched(index) and not _same_bits(fixed.buffer, fixed.built):
                self._fixed[index] = fixed._replace(is_compared=True)

    def _is_untouched(self, index: int) -> bool:
        """Whether no forward has written a buffer, as far as autograd knows."""
        fixed = self._fixed[index]
        return fixed.owner._buffers[fixed.key] is fixed.buffer and fixed.buffer._version == self._versions[index]

    def _put_back(self, index: int) -> None:
        # A new tensor: a graph that is still needed may have saved the one that was written.
        fixed = self._fixed[index]
        fresh = fixed.built.clone()
        fixed.owner._buffers[fixed.key] = fresh
        self._fixed[index] = fixed._replace(buffer=fresh)
        self._versions[index] = fresh._version

    def _look_for_stray(self, index: int) -> None:
        fixed = self._fixed[index]
        if not fixed.is_compared and not _same_bits(fixed.buffer, fixed.built):
            self._strayed.append((fixed.name, fixed.buffer))
            self._put_back(index)

    @property
    def constants(self) -> list[tuple[str, torch.Tensor]]:
        """Name and built value of each buffer that is not persistent."""
        return [(fixed.name, fixed.built) for fixed in self._fixed]

    @property
    def in_use(self) -> list[tuple[str, torch.Tensor]]:
        """The same as forwards read them, of those that no forward writes; and those that had changed before."""
        unwritten = [
            (fixed.name, fixed.buffer)
            for index, fixed in enumerate(self._fixed)
            if not fixed.is_compared and self._is_untouched(index)
        ]
        return unwritten + self._strayed

    def put_back(self) -> None:
        """Every buffer that is not persistent has its built value again."""
        self._strayed.clear()
        for index in range(len(self._fixed)):
            self._put_back(index)

    def left(self) -> list[torch.Tensor]:
        """What a forward has left in the persistent buffers, encoded.

        Raises:
            UsageError: a buffer has another shape or type now, or held values that are not finite and was written.
        """
        found = []
        for each, initial, is_finite in zip(self._persistent, self._initial, self._is_finite, strict=True):
            owner, key = each.places[0]
            buffer = owner._buffers[key]
            if buffer is None or buffer.dtype != each.dtype or tuple(buffer.shape) != each.slot.shape:
                now = "nothing" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
                raise UsageError(
                    f"the forward of layer {self._name} has made buffer {each.slot.name} {now}; it was {each.dtype} "
                    f"{list(each.slot.shape)}, and must stay so. Register it with persistent=False, or keep it out of "
                    "the buffers"
                )
            values = buffer_to_float32(buffer)
            if not is_finite:
                if not _same_bits(values, initial):
                    raise UsageError(
                        f"the forward of layer {self._name} writes buffer {each.slot.name}, which holds values that "
                        "are not finite: their mean over micro-batches means nothing. Keep the values finite, or "
                        "register it with persistent=False"
                    )
                values = torch.zeros_like(values)
            found.append(values)
        return found

    def writes(self, left: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """What the vote is to know of each persistent buffer, see `elaswave.protocol.step.ballot.BufferTensor`.

        Args:
            left: of one micro-batch.
        """
        found = []
        for each, initial, is_finite, values in zip(
            self._persistent, self._initial, self._is_finite, left, strict=True
        ):
            if each.slot.is_whole:
                content = _hash62(values)
                found.append((content, -content))
            else:
                found.append((int(is_finite and not _same_bits(values, initial)), 0))
        return found


def _hash62(values: torch.Tensor) -> int:
    content = values.to(torch.uint8).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 2


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)))


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
