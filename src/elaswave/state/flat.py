"""Units of state as flat tensors: their shapes, initial values, and modules whose parameters are views into them.

Where each tensor lies is described by `elaswave.blocks.shapes`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from elaswave.blocks.shapes import (
    WHOLE_BYTES,
    FrozenTensor,
    LayerShape,
    SharedUse,
    TensorSlot,
    align,
    segments,
)
from elaswave.checkpoints.format import MASTER
from elaswave.errors import UsageError
from elaswave.hashing import key64
from elaswave.models.admission import CopyOf, check_module, refuse_overlap, without_values
from elaswave.models.layers import Layer, ModelSpec, build_layer
from elaswave.state.buffers import FLOATS, LayerBuffers, buffer_to_float32, persistent_buffers


def model_shapes(model: ModelSpec) -> tuple[LayerShape, ...]:
    """The flat storage of every unit, found by building each layer on the meta device (no memory, no random draw).

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
            offset = align(slots[-1].stop)
            self._num_tensors += 1
        return LayerShape(unit, tuple(slots), offset, users)


def _tied(layers: Sequence[Layer], modules: Sequence[nn.Module]) -> dict[str, list[_Use]]:
    """Full name of each parameter that others are tied to -> its uses, itself first.

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
    """Name of a persistent buffer's element type.

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
    """The values of a unit's tensors in a module just built, one dimension; buffers encoded.

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
    """The float32 initial values of runs [start, stop) of a unit, each in memory of its own; arguments as of
    `slot_values`."""
    found = [torch.zeros(stop - start, dtype=torch.float32) for start, stop in runs]
    values = dict(slot_values(spec, module, shape)) if runs else {}
    for result, (start, stop) in zip(found, runs, strict=True):
        for part in segments(shape, start, stop):
            source = values[part.slot][part.tensor_start : part.tensor_start + part.stop - part.start]
            result[part.start : part.stop].copy_(source)
    return found


def initial_values(spec: Layer, shape: LayerShape, seed: int, layer: int | None = None) -> torch.Tensor:
    """The float32 initial values of one unit, shape [shape.size]; a pure function of (seed, layer).

    Args:
        spec: the layer that has them.
        shape: of the unit.
        seed: of the run.
        layer: position of the layer; None: the unit is the layer.
    """
    module = build_layer(spec, seed, shape.layer if layer is None else layer)
    return initial_runs(spec, module, shape, [(0, shape.size)])[0]


def built_sum(module: nn.Module) -> int:
    """A sum of all values of a module just built, that differs where they were drawn from a generator of their own.

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
        """Full name and values of all that no step writes: frozen parameters, and buffers that are not persistent."""
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
