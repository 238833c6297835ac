"""DCP's index of a checkpoint, its ``.metadata`` file: a pickle, which elaswave writes but never reads.

Importing this takes 0.6 s, and only the process that commits a checkpoint needs it.
"""

import pickle
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from elaswave.checkpoints.format import TensorInfo, WrittenItem
from elaswave.checkpoints.shards import DTYPES


def encode_dcp_metadata(tensors: Mapping[str, TensorInfo], items: Iterable[WrittenItem]) -> bytes:
    """The content of DCP's ``.metadata`` file.

    Names are nested at their slot ("model", "optimizer"."exp_avg"), as DCP itself nests the state dict
    ``{"model": ..., "optimizer": {"exp_avg": ...}}``: ``dcp.load`` takes both the flat and the nested form, and
    ``dcp_to_torch_save`` gives the nested one.

    Args:
        tensors: every tensor by full name.
        items: all rectangles of all tensors, in any order.
    """
    state: dict[str, TensorStorageMetadata] = {
        fqn: TensorStorageMetadata(TensorProperties(dtype=DTYPES[info.dtype]), torch.Size(info.shape), [])
        for fqn, info in tensors.items()
    }
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for item in sorted(items, key=lambda item: (item.fqn, item.offsets)):
        offsets = torch.Size(item.offsets)
        chunks = state[item.fqn].chunks
        index = MetadataIndex(item.fqn, offsets, len(chunks))
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(item.sizes)))
        storage[index] = _StorageInfo(item.relative_path, item.offset, item.length)
    return pickle.dumps(
        Metadata(
            state_dict_metadata=dict(state),
            planner_data={fqn: _nested_path(fqn) for fqn in state},
            storage_data=storage,
            storage_meta=StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
    )


def _nested_path(fqn: str) -> tuple[str, ...]:
    depth = 2 if fqn.startswith("optimizer.") else 1
    return tuple(fqn.split(".", depth))
