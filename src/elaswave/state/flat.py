"""A model's state in one worker's memory: units as flat tensors, layers that lie in them, and copies of blocks.

A unit's tensors lie in one flat tensor, where `elaswave.blocks.shapes` says. A layer's parameters are views into the
units that it uses.

Buffers of a layer's module: persistent ones are state, so they lie in a unit of their own, as float32, and a forward is
given copies of them. Those that are not persistent are put back to their built values. So every micro-batch begins with
the step's, no forward sees what another one has written, whichever came first, and recomputation and evaluation leave
nothing behind.

Blocks, the runs of a unit, are held apart from the layers: float32 masters, optimizer slots, and the gradient that
waits to be applied. Owners and followers hold the same and apply the same updates; the role says only who reduces and
serves. The digest of a tensor is the sum of the digests of its parts (`elaswave.coordinator.records.run_state`),
wherever they are cut and whichever worker holds them.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elaswave.blocks.placement import Block, ReplicaRole
from elaswave.blocks.shapes import (
    WHOLE_BYTES,
    FrozenTensor,
    LayerShape,
    Segment,
    SharedUse,
    TensorSlot,
    align,
    segments,
)
from elaswave.checkpoints.format import MASTER
from elaswave.errors import UsageError
from elaswave.hashing import MASK64, key64, mix_words
from elaswave.models.admission import CopyOf, check_module, refuse_overlap, without_values
from elaswave.models.layers import Layer, ModelSpec, build_layer

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Element types of persistent buffers that float32 holds exactly."""

_NUM_LOOKS = 8
"""So many forwards of a module are watched for kernels that write buffers without telling autograd, as those of batch
normalisation do. Whatever is seen to be written so, right after a forward, is looked at from then on. What differs at
any other moment has changed in memory."""


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Finds the buffers that ``module.state_dict()`` holds, each under its first name."""
    seen: set[int] = set()
    found = {}
    for name, owner, key, buffer in _places(module):
        if key not in owner._non_persistent_buffers_set and id(buffer) not in seen:
            seen.add(id(buffer))
            found[name] = buffer
    return found


def _places(module: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """Lists every place where a buffer is registered: full name, submodule, its name there, tensor."""
    return [
        (f"{path}.{key}" if path else key, owner, key, buffer)
        for path, owner in module.named_modules()
        for key, buffer in owner._buffers.items()
        if buffer is not None
    ]


def buffer_to_float32(buffer: torch.Tensor) -> torch.Tensor:
    """Returns the elements of flat storage of a buffer, float32, one dimension; see
    `elaswave.blocks.shapes.WHOLE_BYTES`."""
    flat = buffer.detach().contiguous().reshape(-1)
    return flat.to(torch.float32) if buffer.is_floating_point() else flat.view(torch.uint8).to(torch.float32)


def buffer_from_float32(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Does the inverse of `encode`, still in one dimension; the result is always in memory of its own."""
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
        # Views: only APPLY and what arrives write there, while no forward runs.
        self._initial = [flat[each.slot.offset : each.slot.stop] for each in self._persistent]
        self._is_finite = [bool(values.isfinite().all()) for values in self._initial]

    @contextmanager
    def made_up(self) -> Iterator[None]:
        """Makes every forward begin for a while with ones in persistent buffers of floating-point numbers and zeros in
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
            # One copy for all places of a buffer: what is written under one name is read under the others as well.
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
        """Tells whether no forward has written a buffer, as far as autograd knows."""
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
        """Returns what a forward has left in the persistent buffers, encoded.

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
                # Exact sums take finite numbers only. Nobody has written these, so no mean is taken over.
                values = torch.zeros_like(values)
            found.append(values)
        return found

    def writes(self, left: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
        """Finds what the vote is to know of each persistent buffer, see `elaswave.protocol.step.ballot.BufferTensor`.

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


def model_shapes(model: ModelSpec) -> tuple[LayerShape, ...]:
    """Finds the flat storage of every unit by building each layer on the meta device (no memory, no random draw).

    First the layers, then each parameter that layers share, in the order of the layers that have its values, then the
    persistent buffers of each layer that has any.

    Raises:
        UsageError: a module that cannot be trained as it stands, ties that cannot be, or buffers that cannot be kept;
            the first one is named.
    """
    modules = [without_values(spec) for spec in model.layers]
    for spec, module in zip(model.layers, modules, strict=True):
        spans: dict[int, list[tuple[int, int, str]]] = {}
        for name, parameter in module.named_parameters():
            if not spec.is_further_use(name):
                refuse_overlap(spec.full_name(name), parameter, spans)
        check_module(spec.name, module)
    return _Shapes(model.layers, modules).made()


class _Use(NamedTuple):
    """A parameter of a layer that is tied, or that others are tied to."""

    layer: int
    name: str
    """In its module."""


_Named = tuple[str, torch.Tensor, bool]
"""Full name, tensor, and whether it is a buffer."""


class _Shapes:
    """Puts the units together."""

    def __init__(self, layers: Sequence[Layer], modules: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._modules = modules
        self._num_tensors = 0
        self._uses = _tied(layers, modules)
        """Full name of a tied parameter -> its uses, the one that has its values first."""

    def made(self) -> tuple[LayerShape, ...]:
        tied = {use: full for full, uses in self._uses.items() for use in uses}
        trained = [full for full, uses in self._uses.items() if self._parameter(uses[0]).requires_grad]
        units = {full: len(self._layers) + index for index, full in enumerate(trained)}
        first_buffers = len(self._layers) + len(units)
        buffers = [persistent_buffers(module) for module in self._modules]
        with_buffers = [layer for layer, found in enumerate(buffers) if found]
        shapes = []
        for layer, (spec, module) in enumerate(zip(self._layers, self._modules, strict=True)):
            slots: list[_Named] = []
            frozen, shared = [], []
            for name, parameter in module.named_parameters():
                full = tied.get(_Use(layer, name))
                if full in units:
                    assert full is not None
                    shared.append(SharedUse(name, units[full], self._uses[full].index(_Use(layer, name))))
                elif parameter.requires_grad:
                    slots.append((spec.full_name(name), parameter, False))
                elif full is None or self._uses[full][0] == (layer, name):
                    frozen.append(_frozen(spec.full_name(name), layer, parameter))
            place = first_buffers + with_buffers.index(layer) if layer in with_buffers else None
            shapes.append(self._unit(layer, slots)._replace(shared=tuple(shared), buffers=place, frozen=tuple(frozen)))
        for full, unit in units.items():
            uses = self._uses[full]
            made = self._unit(unit, [(full, self._parameter(uses[0]), False)], tuple(use.layer for use in uses))
            num_idle = sum(use.name in self._layers[use.layer].only_reads for use in uses)
            shapes.append(made._replace(num_idle=num_idle))
        for unit, layer in enumerate(with_buffers, start=first_buffers):
            spec = self._layers[layer]
            slots = [(spec.full_name(name), buffer, True) for name, buffer in buffers[layer].items()]
            shapes.append(self._unit(unit, slots, (layer,)))
        return tuple(shapes)

    def _parameter(self, use: _Use) -> nn.Parameter:
        return dict(self._modules[use.layer].named_parameters())[use.name]

    def _unit(self, unit: int, tensors: Sequence[_Named], users: tuple[int, ...] = ()) -> LayerShape:
        slots = []
        offset = 0
        for name, tensor, is_buffer in tensors:
            dtype = _buffer_type(name, tensor) if is_buffer else "float32"
            numel = tensor.numel() * WHOLE_BYTES.get(dtype, 1)
            decays = tensor.dim() >= 2 and not is_buffer
            slots.append(
                TensorSlot(
                    self._num_tensors,
                    name,
                    unit,
                    tuple(tensor.shape),
                    offset,
                    numel,
                    decays,
                    states=(MASTER,) if is_buffer else None,
                    dtype=dtype,
                    is_buffer=is_buffer,
                )
            )
            # Kernels may round otherwise at another alignment: every tensor begins at 64 bytes.
            offset = align(slots[-1].stop)
            self._num_tensors += 1
        return LayerShape(unit, tuple(slots), offset, users)


def _tied(layers: Sequence[Layer], modules: Sequence[nn.Module]) -> dict[str, list[_Use]]:
    """Maps each parameter that others are tied to, by its full name, to its uses, itself first.

    Raises:
        UsageError: a tie of parameters that are not there, or cannot be one tensor.
    """
    parameters = {
        spec.full_name(name): (_Use(layer, name), parameter)
        for layer, (spec, module) in enumerate(zip(layers, modules, strict=True))
        for name, parameter in module.named_parameters()
    }
    targets = {spec.full_name(name): target for spec in layers for name, target in spec.ties.items()}
    uses: dict[str, list[_Use]] = {}
    for full, target in targets.items():
        for name in (full, target):
            if name not in parameters:
                raise UsageError(
                    f"ties: {full} is to be one tensor with {target}, but the model has no parameter {name}; name "
                    "parameters as LAYER.PARAMETER, as in state_dict()"
                )
        if target in targets:
            raise UsageError(f"ties: {full} is tied to {target}, which is tied to {targets[target]}; name that one")
        (use, own), (owner, other) = parameters[full], parameters[target]
        for what, ours, theirs in (
            ("shape", list(own.shape), list(other.shape)),
            ("type", own.dtype, other.dtype),
            ("requires_grad", own.requires_grad, other.requires_grad),
        ):
            if ours != theirs:
                raise UsageError(
                    f"ties: {full} has the {what} {ours}, and {target} {theirs}: one tensor has one {what}. A tensor "
                    "that is used in another shape (as a view, or transposed) cannot be tied; give both the same one, "
                    "and change the shape in the forward"
                )
        if not own.requires_grad and not all(isinstance(layers[at].build, CopyOf) for at in (use.layer, owner.layer)):
            raise UsageError(
                f"ties: {full} and {target} are frozen, and built apart: they would not have the same values. Leave "
                "out the tie and let both builds make the same values, or give the layers as instances that share "
                "the Parameter"
            )
        if use.layer == owner.layer and not layers[use.layer].keeps_names:
            raise UsageError(
                f"ties: {full} and {target} are in one layer; assign the same Parameter to both in its module instead"
            )
        uses.setdefault(target, [owner]).append(use)
    order = {full: place for place, full in enumerate(parameters)}
    return dict(sorted(uses.items(), key=lambda item: order[item[0]]))


def _frozen(name: str, layer: int, parameter: torch.Tensor) -> FrozenTensor:
    return FrozenTensor(name, layer, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def _buffer_type(name: str, buffer: torch.Tensor) -> str:
    """Returns the name of a persistent buffer's element type.

    Raises:
        UsageError: one of which sums are not exact.
    """
    found = str(buffer.dtype).removeprefix("torch.")
    if found not in FLOATS and found not in WHOLE_BYTES:
        raise UsageError(
            f"buffer {name} is of type {found}; persistent buffers can be {', '.join([*FLOATS, *WHOLE_BYTES])}. "
            "Change its type, or register it with persistent=False"
        )
    return found


def slot_values(spec: Layer, module: nn.Module, shape: LayerShape) -> Iterator[tuple[TensorSlot, torch.Tensor]]:
    """Yields the values of a unit's tensors in a module just built, one dimension; buffers encoded.

    Args:
        spec: the layer that has the unit's initial values.
        module: built from it.
        shape: of the unit.
    """
    for slot in shape.tensors:
        name = spec.own_name(slot.name)
        if slot.is_buffer:
            yield slot, buffer_to_float32(module.get_buffer(name))
        else:
            yield slot, module.get_parameter(name).detach().reshape(-1)


def initial_runs(
    spec: Layer, module: nn.Module, shape: LayerShape, runs: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Returns the float32 initial values of runs [start, stop) of a unit, each in memory of its own; arguments as of
    `slot_values`."""
    found = [torch.zeros(stop - start, dtype=torch.float32) for start, stop in runs]
    values = dict(slot_values(spec, module, shape)) if runs else {}
    for result, (start, stop) in zip(found, runs, strict=True):
        for part in segments(shape, start, stop):
            source = values[part.slot][part.tensor_start : part.tensor_start + part.stop - part.start]
            result[part.start : part.stop].copy_(source)
    return found


def initial_values(spec: Layer, shape: LayerShape, seed: int, layer: int | None = None) -> torch.Tensor:
    """Computes the float32 initial values of one unit, shape [shape.size]; a pure function of (seed, layer).

    Args:
        spec: the layer that has them.
        shape: of the unit.
        seed: of the run.
        layer: position of the layer; None: the unit is the layer.
    """
    module = build_layer(spec, seed, shape.layer if layer is None else layer)
    return initial_runs(spec, module, shape, [(0, shape.size)])[0]


def built_sum(module: nn.Module) -> int:
    """Computes a sum of all values of a module just built, that differs where they were drawn from a generator of their
    own.

    A tenth of the time of a hash: whoever takes over a layer waits for it.
    """
    total = 0
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.numel() and tensor.device.type == "cpu":
            bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            rest = len(bits) % 8
            words = bits[: len(bits) - rest].view(np.uint64)
            total = key64("built", total, int(words.sum(dtype=np.uint64)), int(bits[len(bits) - rest :].sum()))
    return total


class FlatUnit:
    """A shared unit: a flat tensor, and no module of its own.

    Args:
        shape: where its tensors lie.
        dtype: that layers compute in; buffers are kept in float32.
        place: where it is; None: in the host's memory.
    """

    def __init__(self, shape: LayerShape, dtype: torch.dtype, place: torch.device | None = None) -> None:
        self.shape = shape
        self.flat = torch.zeros(shape.size, dtype=torch.float32 if shape.is_buffers else dtype, device=place)


class FlatLayer:
    """A layer whose parameters are views into flat tensors of the compute dtype: its own one, and those of units that
    it shares.

    Its own parameters keep the values that they are built with, rounded to the compute dtype; those of shared units,
    and persistent buffers, are what lies there. Frozen parameters, and buffers that are not persistent, are as built.

    Args:
        spec: how the module is built.
        shape: where its tensors lie.
        dtype: dtype that forward and backward compute in (the float32 masters live in blocks).
        units: the shared units that are here, by number; all that the layer uses.
        module: built before, and not to be used again; None: it is built here.
        seed: of the run.
        frozen: values of frozen parameters that are not as built, by full name.
        place: where it computes; None: in the host's memory. It is built there, and then moved.
    """

    def __init__(
        self,
        spec: Layer,
        shape: LayerShape,
        dtype: torch.dtype,
        *,
        units: Mapping[int, FlatUnit] = {},
        module: nn.Module | None = None,
        seed: int = 0,
        frozen: Mapping[str, torch.Tensor] = {},
        place: torch.device | None = None,
    ) -> None:
        self.spec = spec
        self.shape = shape
        self.module = build_layer(spec, seed, shape.layer) if module is None else module
        # While the values are in the host's memory, and not yet rounded to the compute dtype.
        self.built = built_sum(self.module)
        """Of the values that it was built with, which are the same in every process of a job."""
        if place is not None:
            self.module.to(place)
        self.flat = torch.zeros(shape.size, dtype=dtype, device=place)
        self.buffer_unit = None if shape.buffers is None else units[shape.buffers]
        self.parameters: list[nn.Parameter] = []
        """Those that are trained: its own in the order of their places, then those that it shares."""
        self.parameter_names: list[str] = []
        """Their names in the module."""
        for slot in shape.tensors:
            name = spec.own_name(slot.name)
            self.flat[slot.offset : slot.stop].copy_(self.module.get_parameter(name).detach().reshape(-1))
            self._bind(name, self.flat, slot)
        for use in shape.shared:
            unit = units[use.unit]
            self._bind(use.name, unit.flat, unit.shape.tensors[0])
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad and spec.full_name(name) in frozen:
                values = frozen[spec.full_name(name)]
                parameter.data = values if place is None else values.to(place)
        self.buffers = LayerBuffers(self.module, spec, self.buffer_unit.shape if self.buffer_unit else None)
        self._in_evaluation = [each for each in self.module.modules() if not each.training]
        """Submodules that were built so, such as a frozen batch normalisation: they stay so in training."""
        self._is_training = True
        self.refresh()

    def _bind(self, name: str, flat: torch.Tensor, slot: TensorSlot) -> None:
        parameter = self.module.get_parameter(name)
        parameter.data = flat[slot.offset : slot.stop].view(slot.shape)
        assert parameter.data_ptr() % 64 == 0, f"{slot.name} is not 64-byte aligned"
        self.parameters.append(parameter)
        self.parameter_names.append(name)

    def constants(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the full name and values of all that no step writes: frozen parameters, and buffers that are not
        persistent."""
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield self.spec.full_name(name), parameter.detach()
        for name, built in self.buffers.constants:
            yield self.spec.full_name(name), built

    def refresh(self) -> None:
        """Takes over what lies in flat storage, as far as the module has copies of it."""
        if self.buffer_unit is not None:
            self.buffers.refresh(self.buffer_unit.flat)

    def set_training(self, train: bool) -> None:
        """Switches the module between training and evaluation; submodules that were built in evaluation stay so."""
        if self._is_training is train:
            return
        self._is_training = train
        self.module.train(train)
        for each in self._in_evaluation:
            each.training = False


_CHUNK = 1 << 15


def _words(values: torch.Tensor) -> np.ndarray:
    """Returns the bits of a tensor as unsigned integers of up to 32 bits."""
    words = {1: torch.uint8, 2: torch.int16}.get(values.dtype.itemsize, torch.int32)
    numbers = values.detach().contiguous().view(words).cpu().numpy()
    return numbers.view(f"u{numbers.itemsize}")


def tensor_digest(slot: str, tensor: str, start: int, values: torch.Tensor) -> int:
    """Computes the digest of elements [start, start + len(values)) of a flattened tensor; digests of parts are added.

    Args:
        slot: which of the tensor's states, such as "master" or "exp_avg".
        tensor: full name of the tensor.
        start: position of the first value.
        values: of any element type, shape [length]; float32 for what lies in flat storage.
    Returns:
        An integer in [0, 2**64).
    """
    key = key64("digest", slot, tensor)
    bits = _words(values)
    # Positions count words: an element of 8 bytes is two.
    start = start * len(bits) // max(1, len(values))
    total = 0
    for first in range(0, len(bits), _CHUNK):
        words = bits[first : first + _CHUNK].astype(np.uint64)
        keys = np.arange(start + first, start + first + len(words), dtype=np.uint64)
        keys += np.uint64(key)
        words += mix_words(keys)
        total += int(mix_words(words).sum(dtype=np.uint64))
    return total & MASK64


Scalars = Sequence[Mapping[str, torch.Tensor]]
"""The optimizer's states that a tensor has once, not per element, by its parameter group; equal on all workers."""


class HeldBlock:
    """One block's state on one worker.

    Args:
        block: which run of which layer.
        role: owner or follower.
        shape: the block's layer.
        slots: float32 tensors of the block's length: "master" and the optimizer's, as far as they exist yet.
    """

    def __init__(self, block: Block, role: ReplicaRole, shape: LayerShape, slots: dict[str, torch.Tensor]) -> None:
        self.block = block
        self.role = role
        self.slots = slots
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
        """Yields the block's part of every tensor digest, as ("slot.tensor", part)."""
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
        """Yields the name, tensor and value of the scalar states that go with this block: of the tensors that begin in
        it."""
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
        """Yields the blocks held in one role, ascending."""
        return (held for held in self if held.role is role)

    def optimizer_bytes(self) -> int:
        """Counts the bytes of masters and optimizer slots."""
        return sum(slot.nbytes for held in self for slot in held.slots.values())

    def digest_parts(self, role: ReplicaRole, scalars: Scalars = ()) -> dict[str, int]:
        """Computes this worker's part of every tensor digest, from the blocks of one role."""
        (parts,) = self.weighted_digests(scalars, {held.block.id: 1 for held in self.with_role(role)})
        return parts

    def weighted_digests(self, scalars: Scalars, *weights: Mapping[int, int]) -> list[dict[str, int]]:
        """Computes parts of every tensor digest, modulo 2**64, for each of the weightings.

        Args:
            scalars: states of the optimizer that a tensor has once.
            weights: block -> how often it counts; the others count 0 times.
        """
        # All weightings in one pass: a digest costs more than any number of additions.
        sums: list[dict[str, int]] = [{} for _ in weights]
        for held in self:
            index = held.block.id
            counted = [(parts, times[index]) for parts, times in zip(sums, weights, strict=True) if times.get(index)]
            for name, value in held.digests(scalars) if counted else ():
                for parts, times in counted:
                    parts[name] = (parts.get(name, 0) + times * value) & MASK64
        return sums
