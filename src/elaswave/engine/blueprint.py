"""The model of a run: as configuration and training describe it, and as one worker has its layers in memory.

`Blueprint` is what every worker derives, all of `RunPlan` with it. Only a real build and a layer's first micro-batch
show other parameters than those described, a weight that is not the layer's own, a checkpoint that cannot be run again
here, or a gradient that is sparse.

`materialise` makes a worker's layers and blocks from the seed, or from a durable checkpoint of any other layout. At
most one layer is in memory beyond what the worker keeps: each is built by itself, and gives up its own memory as it
moves into flat storage. Each worker that runs a layer makes the layer's frozen parameters itself: by its build from the
seed, or as a copy of the instance in the process that forked it. That source does not change within a job. A job that
resumes takes the checkpoint's values where they differ: the forkserver loads them once, and whatever is forked later
has them too. Of each frozen parameter one holder writes the pieces of checkpoints and tells the digest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from elaswave.blocks.placement import Placement, ReplicaRole, holders_of_layers, roles_of
from elaswave.blocks.shapes import INITIAL_EXPONENT, FrozenTensor, LayerShape, StateShapes, segments, with_states
from elaswave.checkpoints.format import EMA, MASTER, UPDATER, CheckpointMeta, WantedPiece, stored_name
from elaswave.checkpoints.shards import DTYPES, Piece, PieceReader
from elaswave.config.schema import Config
from elaswave.data.samples import Sampler
from elaswave.devices.interface import HOST, Device
from elaswave.errors import CheckpointError, UsageError
from elaswave.job.plan import RunPlan, sampler_of
from elaswave.models.admission import CopyOf, check_is_module, check_not_meta, check_sizes_known
from elaswave.models.foreign.layer import check_kinds
from elaswave.models.layers import Layer, ModelSpec, build_layer, describe
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.step.ballot import GridState
from elaswave.protocol.step.engine import TrainingProgress
from elaswave.state.flat import (
    BlockStore,
    FlatLayer,
    FlatUnit,
    HeldBlock,
    Scalars,
    buffer_from_float32,
    buffer_to_float32,
    initial_runs,
    model_shapes,
    persistent_buffers,
    slot_values,
    tensor_digest,
)
from elaswave.training.definition import Samples, Training, builtin_training
from elaswave.training.optimizer import Optimizer, Updater
from elaswave.training.raised import said
from elaswave.types import Layout


def build_as_described(layer: Layer, seed: int, index: int, shapes: Sequence[LayerShape]) -> nn.Module:
    """Builds a layer, and compares it with what it was for its shapes.

    Args:
        layer: to be built.
        seed: of the run.
        index: its position in the model.
        shapes: of all units.
    Raises:
        UsageError: it cannot be built, or has other parameters or persistent buffers than it had under
            ``torch.device("meta")``.
    """
    try:
        module = build_layer(layer, seed, index)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"layer {layer.name} cannot be built: {said(error)}") from error
    check_is_module(layer, module)
    if isinstance(layer.build, CopyOf):  # a copy of what was described
        return module
    check_sizes_known(layer.name, module)
    check_not_meta(layer.name, module)
    described, built = _described(layer, index, shapes), _built(module)
    for name in (*described, *built):
        if described.get(name) != built.get(name):
            raise UsageError(
                f"the build of layer {layer.name} made {built.get(name, 'nothing')} as {name}, and under "
                f"torch.device('meta') {described.get(name, 'nothing')}: it must make parameters and persistent "
                "buffers of the same names and shapes whenever it is called"
            )
    return module


def _described(layer: Layer, index: int, shapes: Sequence[LayerShape]) -> dict[str, str]:
    """Lists what a layer has, by name in its module."""
    shape = shapes[index]
    found = {slot.name: _kind("trained", slot.shape) for slot in shape.tensors}
    found |= {layer.full_name(use.name): _kind("trained", shapes[use.unit].tensors[0].shape) for use in shape.shared}
    found |= {tensor.name: _kind("frozen", tensor.shape, tensor.dtype) for tensor in shape.frozen}
    buffers = () if shape.buffers is None else shapes[shape.buffers].tensors
    found |= {slot.name: _kind("buffer", slot.shape, slot.dtype) for slot in buffers}
    return {layer.own_name(name): kind for name, kind in found.items()}


def _built(module: nn.Module) -> dict[str, str]:
    """Does the same as `_described`, but of a module that is there."""
    found = {
        name: _kind("trained", each.shape) if each.requires_grad else _kind("frozen", each.shape, each.dtype)
        for name, each in module.named_parameters()
    }
    return found | {name: _kind("buffer", each.shape, each.dtype) for name, each in persistent_buffers(module).items()}


def _kind(kind: str, shape: Sequence[int], dtype: object = "") -> str:
    what = "a persistent buffer" if kind == "buffer" else f"a {kind} parameter"
    of_type = f" of type {str(dtype).removeprefix('torch.')}" if dtype else ""
    return f"{what} of shape {list(shape)}{of_type}"


def leaves_of_others(who: str, outputs: Iterable[torch.Tensor], own: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Finds the leaves of a graph that are no own ones.

    Args:
        who: layer or loss, for errors.
        outputs: with their graphs.
        own: parameters of the layer, and its inputs.
    Raises:
        UsageError: the graph does not show all of its leaves.
    """
    outputs = list(outputs)
    known = {id(tensor) for tensor in own}
    leaves = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    for node in _nodes(output.grad_fn for output in outputs):
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise UsageError(
                f"{who} uses torch.utils.checkpoint with use_reentrant=True, which hides parameters from its graph: "
                "pass use_reentrant=False, or recompute the whole layer with Layer(recompute=True)"
            )
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves.append(variable)
    return [leaf for leaf in leaves if id(leaf) not in known]


def refuse_leaf(who: str, leaf: torch.Tensor, others: Mapping[int, str]) -> NoReturn:
    """A graph leaves its layer.

    Args:
        who: layer or loss.
        leaf: that it reaches.
        others: names of other parameters of this worker, by ``id``.
    """
    name = others.get(id(leaf), f"{describe(leaf)} that requires a gradient")
    raise UsageError(
        f"{who} reaches {name}, which is not its own: its gradient would be lost. Tie a parameter with "
        "Layer(ties=...), or hand the tensor on from layer to layer"
    )


def _nodes(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Lists all nodes of a graph, once each."""
    seen: set[Node] = set()
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [child for child, _ in node.next_functions if child is not None]


class Blueprint(RunPlan):
    """Everything about a run that follows from its configuration and what is trained.

    Args:
        config: with its layout resolved.
        training: what is trained; None: what the configuration describes.
    Raises:
        UsageError: nothing of the model is trained.
    """

    def __init__(self, config: Config, training: Training | None = None) -> None:
        self.training = training = training or builtin_training(config)
        layers = training.model.layers
        every = model_shapes(training.model)
        shapes = tuple(shape for shape in every if not shape.is_buffers)
        buffers = every[len(shapes) :]  # the last units; no optimizer knows of them
        self.optimizer = optimizer = training.make_optimizer(shapes)
        names = tuple(layer.name for layer in layers)
        averages = (EMA,) if config.optimizer.ema_decay else ()
        # What is there before the first update comes first: what comes with it is added at the end.
        slots = (MASTER, *averages, *optimizer.slots)
        shapes = with_states(optimizer.shapes(shapes), averages) + buffers
        self.frozen: Mapping[str, torch.Tensor] = {}
        """Values of frozen parameters that are not as built, by full name; see `elaswave.engine.blueprint`."""
        super().__init__(config, StateShapes(names, shapes, slots, optimizer.late))
        if self.state.lowest_trained == len(names):
            raise UsageError(
                "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_() on "
                "what is to be trained, or use Trainer.evaluate"
            )

    @property
    def model(self) -> ModelSpec:
        """Layers and loss."""
        return self.training.model

    @property
    def dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return self.training.dtype

    def build(self, index: int) -> nn.Module:
        """Builds a layer's module with its initial values.

        Args:
            index: its position in the model.
        Raises:
            UsageError: it cannot be built, is another one than for its shapes, or has foreign parts of another kind
                than the run was begun with.
        """
        layer = self.model.layers[index]
        module = build_as_described(layer, self.config.run.seed, index, self.shapes)
        check_kinds(layer.name, module, self.config.model.foreign)
        return module

    def flat_layer(
        self,
        index: int,
        units: Mapping[int, FlatUnit],
        module: nn.Module | None = None,
        place: torch.device | None = None,
    ) -> FlatLayer:
        """Makes a layer, as `FlatLayer` makes it.

        Args:
            index: its position in the model.
            units: the shared units that are here.
            module: built before; None: it is built.
            place: where it computes; None: in the host's memory.
        """
        return FlatLayer(
            self.model.layers[index],
            self.shapes[index],
            self.dtype,
            units=units,
            module=self.build(index) if module is None else module,
            frozen=self.frozen,
            place=place,
        )

    def open_samples(self, cache_dir: Path) -> Samples:
        """Opens the data of the run.

        Args:
            cache_dir: where generated text is kept.
        """
        return self.training.open_samples(cache_dir)

    def sampler(self, samples: Samples) -> Sampler:
        """Makes the sampler, which tells which samples make up which micro-batch of training."""
        return sampler_of(self.config, samples.num_samples("train"), samples.sources)


def materialise(
    blueprint: Blueprint,
    worker: int,
    layout: Layout,
    placement: Placement,
    checkpoint: tuple[Path, CheckpointMeta] | None,
    device: Device = HOST,
) -> tuple[dict[int, FlatLayer | FlatUnit], BlockStore, TrainingProgress]:
    """Makes what a worker needs before its first step.

    Args:
        blueprint: the run.
        worker: its id.
        layout, placement: who runs and who holds what.
        checkpoint: a verified checkpoint's folder and description, or None to begin from the seed.
        device: where all of it is to be. Values are made, or read, on the host, so they are the same on every device.
    Returns:
        The layers of the worker's stage and the units that they share, with current parameters; the blocks that it
        holds; and where training stands.
    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    progress = initial_progress(blueprint)
    if checkpoint is not None:
        progress = _progress_of(blueprint, checkpoint[1], progress)
    made = _Made(blueprint, worker, layout, placement, checkpoint, progress.num_updates, device)
    return made.here, BlockStore(made.held), progress


class _Made:
    """Makes what one worker needs, layer by layer; arguments as of `materialise`."""

    def __init__(
        self,
        blueprint: Blueprint,
        worker: int,
        layout: Layout,
        placement: Placement,
        checkpoint: tuple[Path, CheckpointMeta] | None,
        num_updates: int,
        device: Device = HOST,
    ) -> None:
        self._blueprint, self._num_updates = blueprint, num_updates
        self._device = device
        self._place = None if device.is_host else device.place
        self._reader = None if checkpoint is None else PieceReader(checkpoint[0])
        layers = layout.layers_of(worker)
        shapes, shared = blueprint.shapes, layout.shared_units(layers)
        self._roles = roles_of(worker, placement, blueprint.blocks)
        self._blocks: dict[int, list[int]] = {}
        for block in self._roles:
            self._blocks.setdefault(blueprint.blocks[block].layer, []).append(block)
        self._units = {unit: FlatUnit(shapes[unit], blueprint.dtype, self._place) for unit in shared}
        self.here: dict[int, FlatLayer | FlatUnit] = dict(self._units)
        self.held: dict[int, HeldBlock] = {}
        by_source: dict[int, list[int]] = {}
        for unit in sorted({*layers, *shared, *self._blocks}):
            by_source.setdefault(shapes[unit].users[0] if shapes[unit].users else unit, []).append(unit)
        # Units go by the layer that has their initial values: it is built once for all, and gone before the next one.
        for source in sorted(by_source):
            self._make(source, by_source[source], is_run=source in layers)
        # Only now: a checkpoint has filled the units of buffers after the layers that read them were made.
        for layer in self.here.values():
            if isinstance(layer, FlatLayer):
                layer.refresh()

    def _make(self, source: int, units: Sequence[int], *, is_run: bool) -> None:
        """Makes the wanted units that have their initial values in one layer, and that layer if it runs here."""
        blueprint = self._blueprint
        spec = blueprint.model.layers[source]
        module = None
        if is_run or self._reader is None:
            module = blueprint.build(source)
        masters: dict[int, list[torch.Tensor] | None] = {}
        # Before the layer takes the module over, which rounds its parameters to the compute dtype; masters are not.
        if module is not None and self._reader is None:
            for unit in units:
                masters[unit] = self._from_seed(unit, spec, module, is_here=is_run if unit == source else None)
        if is_run:
            self.here[source] = blueprint.flat_layer(source, self._units, module, self._place)
        del module  # its parameters lie in flat storage now
        for unit in units:
            self._hold(unit, masters[unit] if unit in masters else self._from_checkpoint(unit))

    def _runs(self, unit: int) -> list[tuple[int, int]]:
        """Lists the runs that are held of a unit."""
        blocks = self._blueprint.blocks
        return [(blocks[block].start, blocks[block].stop) for block in self._blocks.get(unit, [])]

    def _from_seed(
        self, unit: int, spec: Layer, module: nn.Module, *, is_here: bool | None
    ) -> list[torch.Tensor] | None:
        """Makes the masters that are held of a unit; None: they are its flat storage.

        Args:
            unit: its number.
            spec, module: the layer that has its initial values.
            is_here: of a layer, whether it runs here: then it takes its values with it.
        """
        shape = self._blueprint.shapes[unit]
        flat_unit = self._units.get(unit)
        if flat_unit is not None:
            for slot, values in slot_values(spec, module, shape):
                flat_unit.flat[slot.offset : slot.stop].copy_(values)
        dtype = self._blueprint.dtype if flat_unit is None else flat_unit.flat.dtype
        if (is_here or flat_unit is not None) and dtype == torch.float32:
            return None
        return initial_runs(spec, module, shape, self._runs(unit))

    def _from_checkpoint(self, unit: int) -> list[torch.Tensor] | None:
        """Does the same as `_from_seed`, but reads the values from the checkpoint."""
        shape, runs = self._blueprint.shapes[unit], self._runs(unit)
        if unit not in self.here:
            return self._read(shape, MASTER, runs)
        (master,) = self._read(shape, MASTER, [(0, shape.size)])
        flat = self.here[unit].flat
        flat.copy_(master)
        # Clones: a view would keep the whole unit in memory.
        return None if flat.dtype == torch.float32 else [master[start:stop].clone() for start, stop in runs]

    def _hold(self, unit: int, masters: list[torch.Tensor] | None) -> None:
        """Makes the blocks that are held of a unit.

        Args:
            unit: its number.
            masters: of each block; None: a float32 layer computes with the masters themselves, so that
                `TorchEngine.publish` has nothing to copy.
        """
        blueprint, runs = self._blueprint, self._runs(unit)
        shape = blueprint.shapes[unit]
        if masters is None:
            masters = [self.here[unit].flat[start:stop] for start, stop in runs]
        else:
            masters = list(map(self._device.bring, masters))
        wanted = blueprint.state.slots_of(shape.tensors, self._num_updates)
        slots = {name: self._state(shape, name, runs, masters) for name in wanted if name != MASTER}
        for position, block in enumerate(self._blocks.get(unit, [])):
            copy = HeldBlock(blueprint.blocks[block], self._roles[block], shape, {MASTER: masters[position]})
            names = blueprint.state.slots_of((part.slot for part in copy.segments), self._num_updates)
            copy.slots.update((name, slots[name][position]) for name in names if name != MASTER)
            self.held[block] = copy

    def _state(
        self, shape: LayerShape, slot: str, runs: Sequence[tuple[int, int]], masters: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Makes a state of the optimizer, on the device: from the checkpoint, or as it begins."""
        # The average of weights begins with them, not with zeros.
        if self._reader is None and slot == EMA:
            return [master.clone() for master in masters]
        if self._reader is not None:
            found = self._read(shape, slot, runs)
        else:
            found = [_initial_state(self._blueprint.optimizer, shape, slot, *run) for run in runs]
        return list(map(self._device.bring, found))

    def _read(self, shape: LayerShape, slot: str, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Reads values of a state, each run in a tensor of its own: from the checkpoint, or zeros."""
        results = [torch.zeros(stop - start, dtype=torch.float32) for start, stop in runs]
        if self._reader is None:
            return results
        parts = [
            (run, part)
            for run, (start, stop) in enumerate(runs)
            for part in segments(shape, start, stop)
            if part.slot.has(slot)
        ]
        wanted = [
            WantedPiece(stored_name(slot, part.slot.name), part.slot.shape, part.first_value, part.num_values)
            for _, part in parts
        ]
        for (run, part), values in zip(parts, self._reader.read(wanted), strict=True):
            results[run][part.start : part.stop] = buffer_to_float32(values)
        return results


def all_layers(blueprint: Blueprint, checkpoint: tuple[Path, CheckpointMeta] | None) -> dict[int, FlatLayer]:
    """Makes all layers of the model, in this process, without the optimizer's states.

    Args:
        blueprint: the run.
        checkpoint: folder and description of the one that has their values; None: they have their initial ones.
    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    state = blueprint.state
    layout = make_layout(widths=(1,), layers_per_stage=(state.num_layers,), num_microbatches=1, shared=state.shared)
    # Nobody holds a block, so no state of the optimizer is made.
    elsewhere = Placement.of((-1,) * len(blueprint.blocks), ((),) * len(blueprint.blocks))
    here = _Made(blueprint, layout.workers[0], layout, elsewhere, checkpoint, 0).here
    return {index: layer for index, layer in here.items() if isinstance(layer, FlatLayer)}


def updater_after(blueprint: Blueprint, checkpoint: tuple[Path, CheckpointMeta] | None) -> Updater:
    """Makes the updater, which makes the updates after a checkpoint, or from the beginning on.

    Raises:
        CheckpointError: the checkpoint is of another optimizer.
    """
    updater = blueprint.optimizer.updater()
    if checkpoint is not None:
        updater.load(checkpoint[1].extra.get(UPDATER, ""), checkpoint[1].step)
    return updater


def _initial_state(optimizer: Optimizer, shape: LayerShape, slot: str, start: int, stop: int) -> torch.Tensor:
    values = torch.zeros(stop - start, dtype=torch.float32)
    for part in segments(shape, start, stop):
        if part.slot.has(slot) and (value := optimizer.initial(slot, part.slot)):
            values[part.start : part.stop] = value
    return values


def initial_progress(blueprint: Blueprint) -> TrainingProgress:
    """Tells where training stands before the first step."""
    exact = blueprint.config.elastic.consistency == "bitwise"
    exponents = (INITIAL_EXPONENT,) * len(blueprint.tensors)
    # Sums of float32 have no grids: no first attempt has to measure gradients.
    return TrainingProgress(0, GridState(exponents, calibrated=not exact, exact=exact))


def _progress_of(blueprint: Blueprint, meta: CheckpointMeta, initial: TrainingProgress) -> TrainingProgress:
    try:
        exponents = tuple(meta.grids[slot.name] for slot in blueprint.tensors)
        num_updates, calibrated = int(meta.extra["num_updates"]), bool(meta.extra["calibrated"])
    except KeyError as error:
        raise CheckpointError(f"the checkpoint of step {meta.step} says nothing of {error}; use another one") from error
    exact = initial.grids.exact
    return TrainingProgress(num_updates, GridState(exponents, calibrated=calibrated or not exact, exact=exact))


def owned_pieces(store: BlockStore, scalars: Scalars = ()) -> Iterable[Piece]:
    """Copies everything that a worker owns, as runs of the original tensors.

    Args:
        store: the blocks.
        scalars: of the optimizer.
    """
    for held in store.with_role(ReplicaRole.OWNER):
        # Copies: a thread writes the pieces while the next steps change the blocks.
        for slot, values in held.slots.items():
            for part in held.segments:
                if part.slot.has(slot):
                    name = stored_name(slot, part.slot.name)
                    own = buffer_from_float32(values[part.start : part.stop].cpu(), DTYPES[part.slot.dtype])
                    yield Piece(name, part.slot.shape, part.first_value, own)
        for name, tensor, value in held.scalar_states(scalars):
            yield Piece(stored_name(name, tensor.name), (), 0, value.reshape(1).cpu().clone())


_PIECE_ELEMENTS = 1 << 22
"""Most elements of a piece: a writer has one in memory a second time."""

_Frozen = Iterator[tuple[FrozenTensor, torch.Tensor]]


def changed_frozen(blueprint: Blueprint, checkpoint: tuple[Path, CheckpointMeta] | None) -> Mapping[str, torch.Tensor]:
    """Finds the frozen parameters that a checkpoint has otherwise than they are built, by full name.

    Args:
        blueprint: the run.
        checkpoint: what it resumes from: a verified checkpoint's folder and description, or None.
    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    if checkpoint is None or not blueprint.state.frozen:
        return {}
    reader = PieceReader(checkpoint[0])
    found: dict[str, torch.Tensor] = {}
    for shape, spec in zip(blueprint.shapes, blueprint.model.layers):
        if not shape.frozen:
            continue
        module = blueprint.build(shape.layer)
        for tensor in shape.frozen:
            built = module.get_parameter(spec.own_name(tensor.name)).detach()
            wanted = WantedPiece(stored_name(MASTER, tensor.name), tensor.shape, 0, built.numel())
            (stored,) = reader.read([wanted])
            stored = stored.to(built.dtype).view(tensor.shape)
            if _digest(tensor, stored) != _digest(tensor, built):
                found[tensor.name] = stored
    # A frozen tensor that is tied is stored once, under the name that others are tied to.
    ties = {spec.full_name(name): target for spec in blueprint.model.layers for name, target in spec.ties.items()}
    return found | {name: found[target] for name, target in ties.items() if target in found}


def frozen_pieces(layers: Mapping[int, object], layout: Layout, worker: int) -> Iterator[Piece]:
    """Pieces of the frozen parameters that a worker writes into checkpoints: of layers whose first holder it is.

    Args:
        layers: that are here.
        layout: in force.
        worker: its id.
    """
    for tensor, values in _of_first_holder(layers, layout, worker):
        # No copies here: no step writes frozen parameters.
        flat = values.reshape(-1).cpu()
        for start in range(0, len(flat), _PIECE_ELEMENTS):
            part = flat[start : start + _PIECE_ELEMENTS]
            yield Piece(stored_name(MASTER, tensor.name), tensor.shape, start, part)


def frozen_digests(layers: Mapping[int, object], layout: Layout, worker: int) -> dict[str, int]:
    """Digests of the frozen parameters of layers whose first holder a worker is; arguments as of `frozen_pieces`."""
    return {
        f"{MASTER}.{tensor.name}": _digest(tensor, values)
        for tensor, values in _of_first_holder(layers, layout, worker)
    }


def _of_first_holder(layers: Mapping[int, object], layout: Layout, worker: int) -> _Frozen:
    holders = holders_of_layers(layout)
    for index, layer in sorted(layers.items()):
        if isinstance(layer, FlatLayer) and holders[index][0] == worker:
            for tensor in layer.shape.frozen:
                name = layer.spec.own_name(tensor.name)
                yield tensor, layer.module.get_parameter(name).detach()


def _digest(tensor: FrozenTensor, values: torch.Tensor) -> int:
    return tensor_digest(MASTER, tensor.name, 0, values.reshape(-1))
