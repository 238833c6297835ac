"""Frozen parameters: their digests, their pieces of checkpoints, and what a checkpoint has otherwise than was built.

Each worker that runs a layer makes the layer's frozen parameters itself: by its build from the seed, or as a copy of
the instance in the process that forked it. That source does not change within a job. A job that resumes takes the
checkpoint's values where they differ: the forkserver loads them once, and whatever is forked later has them too.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from elaswave.blocks.placement import holders_of_layers
from elaswave.blocks.shapes import FrozenTensor
from elaswave.checkpoints.format import MASTER, CheckpointMeta, WantedPiece, stored_name
from elaswave.checkpoints.shards import Piece, PieceReader
from elaswave.engine.blueprint import Blueprint
from elaswave.state.flat import FlatLayer
from elaswave.state.hashes import tensor_digest
from elaswave.types import Layout

_PIECE_ELEMENTS = 1 << 22
"""Most elements of a piece: a writer has one in memory a second time."""

_Frozen = Iterator[tuple[FrozenTensor, torch.Tensor]]


def changed_frozen(blueprint: Blueprint, checkpoint: tuple[Path, CheckpointMeta] | None) -> Mapping[str, torch.Tensor]:
    """The frozen parameters that a checkpoint has otherwise than they are built, by full name.

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
