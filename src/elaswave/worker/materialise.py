"""Makes one worker's layers and blocks: from the seed, or from a durable checkpoint of any other layout."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from elaswave.errors import CheckpointError
from elaswave.protocol.ballot import GridState
from elaswave.protocol.engine import TrainingProgress
from elaswave.state.checkpoint_format import EMA, MASTER, UPDATER, CheckpointMeta, WantedPiece, stored_name
from elaswave.state.checkpoint_shards import Piece, PieceReader
from elaswave.state.flat import FlatLayer, initial_values
from elaswave.state.grids import INITIAL_EXPONENT
from elaswave.state.placement import Placement, Role, roles_of
from elaswave.state.shapes import LayerShape, segments
from elaswave.state.store import BlockStore, HeldBlock, Scalars
from elaswave.training.optimizer import Optimizer, Updater
from elaswave.types import Layout
from elaswave.worker.blueprint import Blueprint


def materialise(
    blueprint: Blueprint,
    worker: int,
    layout: Layout,
    placement: Placement,
    checkpoint: tuple[Path, CheckpointMeta] | None,
) -> tuple[dict[int, FlatLayer], BlockStore, TrainingProgress]:
    """What a worker needs before its first step.

    Args:
        blueprint: the run.
        worker: its id.
        layout, placement: who runs and who holds what.
        checkpoint: a verified checkpoint's folder and description, or None to begin from the seed.
    Returns:
        The layers of the worker's stage with current parameters, the blocks that it holds, and where training stands.
    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the model.
    """
    stage = layout.stages[layout.stage_of(worker)]
    own_layers = range(stage.start, stage.stop)
    roles = roles_of(worker, placement, blueprint.blocks)
    needed = sorted({*own_layers, *(blueprint.blocks[block].layer for block in roles)})
    read = _from_seed(blueprint) if checkpoint is None else _from_checkpoint(checkpoint[0])
    step, progress = 0, initial_progress(blueprint)
    if checkpoint is not None:
        step, progress = checkpoint[1].step, _progress_of(blueprint, checkpoint[1], progress)
    layers: dict[int, FlatLayer] = {}
    held: dict[int, HeldBlock] = {}
    by_layer: dict[int, list[int]] = {}
    for block in roles:
        by_layer.setdefault(blueprint.blocks[block].layer, []).append(block)
    for index in needed:
        shape = blueprint.shapes[index]
        runs = [(blueprint.blocks[block].start, blueprint.blocks[block].stop) for block in by_layer.get(index, [])]
        if index in own_layers:
            layers[index] = FlatLayer(blueprint.model.layers[index], shape, blueprint.dtype)
            (master,) = read(shape, MASTER, [(0, shape.size)])
            flat = layers[index].flat
            flat.copy_(master)
            # A float32 layer computes with the masters themselves; `TorchEngine.publish` has nothing to copy then.
            shared = flat.dtype == torch.float32
            masters = [flat[start:stop] if shared else master[start:stop].clone() for start, stop in runs]
        else:
            masters = read(shape, MASTER, runs)
        wanted = blueprint.state.slots_of(shape.tensors, progress.num_updates)
        slots = {name: read(shape, name, runs) for name in wanted if name != MASTER}
        for position, block in enumerate(by_layer.get(index, [])):
            copy = HeldBlock(blueprint.blocks[block], roles[block], shape, {MASTER: masters[position]}, step)
            parts = (segment.slot for segment in copy.segments)
            names = blueprint.state.slots_of(parts, progress.num_updates)
            copy.slots.update((name, slots[name][position]) for name in names if name != MASTER)
            held[block] = copy
    return layers, BlockStore(held), progress


def updater_after(blueprint: Blueprint, checkpoint: tuple[Path, CheckpointMeta] | None) -> Updater:
    """What makes the updates after a checkpoint, or from the beginning on.

    Raises:
        CheckpointError: the checkpoint is of another optimizer.
    """
    updater = blueprint.optimizer.updater()
    if checkpoint is not None:
        updater.load(checkpoint[1].extra.get(UPDATER, ""), checkpoint[1].step)
    return updater


_Read = Callable[[LayerShape, str, list[tuple[int, int]]], list[torch.Tensor]]
"""(layer, slot, runs [start, stop) of its flat storage) -> their values, each in a tensor of its own."""


def _from_seed(blueprint: Blueprint) -> _Read:
    def read(shape: LayerShape, slot: str, runs: list[tuple[int, int]]) -> list[torch.Tensor]:
        if slot not in (MASTER, EMA):
            return [_initial_state(blueprint.optimizer, shape, slot, *run) for run in runs]
        flat = initial_values(blueprint.model.layers[shape.layer], shape, blueprint.config.run.seed)
        return [flat[start:stop].clone() for start, stop in runs]

    return read


def _initial_state(optimizer: Optimizer, shape: LayerShape, slot: str, start: int, stop: int) -> torch.Tensor:
    values = torch.zeros(stop - start)
    for part in segments(shape, start, stop):
        if part.slot.has(slot) and (value := optimizer.initial(slot, part.slot)):
            values[part.start : part.stop] = value
    return values


def _from_checkpoint(folder: Path) -> _Read:
    reader = PieceReader(folder)

    def read(shape: LayerShape, slot: str, runs: list[tuple[int, int]]) -> list[torch.Tensor]:
        parts = [
            (run, part)
            for run, (start, stop) in enumerate(runs)
            for part in segments(shape, start, stop)
            if part.slot.has(slot)
        ]
        wanted = [
            WantedPiece(stored_name(slot, part.slot.name), part.slot.shape, part.tensor_start, part.stop - part.start)
            for _, part in parts
        ]
        results = [torch.zeros(stop - start) for start, stop in runs]
        for (run, part), values in zip(parts, reader.read(wanted), strict=True):
            results[run][part.start : part.stop] = values
        return results

    return read


def initial_progress(blueprint: Blueprint) -> TrainingProgress:
    """Where training stands before the first step."""
    exact = blueprint.config.elastic.consistency == "bitwise"
    exponents = (INITIAL_EXPONENT,) * len(blueprint.tensors)
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
    """Copies of everything that a worker owns, as runs of the original tensors.

    Args:
        store: the blocks.
        scalars: of the optimizer.
    """
    for held in store.with_role(Role.OWNER):
        for slot, values in held.slots.items():
            copy = values.clone()
            for part in held.segments:
                if part.slot.has(slot):
                    name = stored_name(slot, part.slot.name)
                    yield Piece(name, part.slot.shape, part.tensor_start, copy[part.start : part.stop])
        for name, tensor, value in held.scalar_states(scalars):
            yield Piece(stored_name(name, tensor.name), (), 0, value.reshape(1).clone())
