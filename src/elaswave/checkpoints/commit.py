"""Makes a checkpoint of the shards that the workers have written. Needs torch, for DCP's index.

The order of a commit is the contract: shards are on the disk before their items are reported; then ``meta.json`` and
the manifest; then ``.metadata``; then the folder gets its final name in one rename. So the committing process may be
killed at any point.

DCP's index of a checkpoint, its ``.metadata`` file: a pickle, which elaswave writes but never reads.

Importing this takes 0.6 s, and only the process that commits a checkpoint needs it.
"""

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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

from elaswave.checkpoints.checkpoint import CheckpointRef, folder_of, read_meta
from elaswave.checkpoints.files import (
    TEMPORARY_SUFFIX,
    cannot_write,
    check_items,
    check_shard_sizes,
    check_written,
    looks_whole,
    read_manifest,
    remove_committed,
    shard_sizes,
)
from elaswave.checkpoints.format import (
    DCP_METADATA_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    META_FILE,
    SHARD_SUFFIX,
    CheckpointMeta,
    Manifest,
    TensorInfo,
    WrittenItem,
    checksum_of,
    encode_manifest,
    encode_meta,
)
from elaswave.checkpoints.shards import DTYPES
from elaswave.errors import CheckpointError
from elaswave.untrusted import open_binary, open_to_write


def encode_dcp_metadata(tensors: Mapping[str, TensorInfo], items: Iterable[WrittenItem]) -> bytes:
    """Encodes the content of DCP's ``.metadata`` file.

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


def commit_in_one_of(
    folders: Sequence[Path], items: Sequence[WrittenItem], meta: CheckpointMeta, *, sizes: Mapping[str, int]
) -> CheckpointRef:
    """Commits a checkpoint in the first place that takes all of it; shards that stand in another one are copied.

    Args:
        folders: the checkpoint's temporary folder in each place, the first choice first.
        items, meta, sizes: as of `commit_checkpoint`.
    Returns:
        The committed checkpoint.
    Raises:
        CheckpointError: there is none; what each place has said.
    """
    # Before any place is tried: items that do not fit would fit in no other place either.
    check_written(items, sizes)
    troubles = []
    for folder in folders:
        try:
            _gather(folder, folders, {name: sizes[name] for name in {item.relative_path for item in items}})
            made = commit_checkpoint(folder, items, meta, sizes=sizes)
        except CheckpointError as error:
            troubles.append(str(error))
            continue
        for other in folders:
            if other != folder and other.with_suffix("").is_dir():  # a damaged one that a resumed run has passed again
                with contextlib.suppress(OSError):
                    remove_committed(other.with_suffix(""))
        return made
    raise CheckpointError("; ".join(troubles))


def _gather(folder: Path, folders: Sequence[Path], sizes: Mapping[str, int]) -> None:
    """Copies shards that are not in a folder, but in another one; those that are nowhere the commit will miss."""
    for name, num_bytes in sorted(sizes.items()):
        # By size: what a full disk or the end of a worker has left of a shard is shorter.
        whole = [each for each in folders if _size_of(each / name) == num_bytes]
        if not whole or folder in whole:
            continue
        copy = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_binary(whole[0] / name) as source, open_to_write(copy) as target:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                copy.unlink(missing_ok=True)
            raise cannot_write(copy, error) from error


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def commit_checkpoint(
    folder: Path, items: Sequence[WrittenItem], meta: CheckpointMeta, *, sizes: Mapping[str, int] | None = None
) -> CheckpointRef:
    """Turns the shards in a temporary folder into a checkpoint, or leaves them as they are.

    A checkpoint of the same step (a damaged one, say, that a resumed run has passed again) is replaced. A commit that
    was made by a coordinator which died before it could say so is found and taken over.

    Args:
        folder: from ``checkpoint.temporary_folder``, with every worker's shard.
        items: what the workers' ``write_shard`` returned, in any order, every element once.
        meta: the run at that step; ``meta.tensors`` says what the checkpoint must hold.
        sizes: bytes of each shard file, where items of it are left out; None: as its items say.
    Returns:
        The committed checkpoint, under its final name.
    Raises:
        CheckpointError: the items do not cover every tensor exactly once, a shard is not as its items say, or
            something cannot be written.
    """
    items = sorted(items, key=lambda item: (item.relative_path, item.offset))
    check_items(items, meta.tensors)
    meta_bytes = encode_meta(meta)
    dcp_bytes = encode_dcp_metadata(meta.tensors, items)
    files = {META_FILE: checksum_of(meta_bytes), DCP_METADATA_FILE: checksum_of(dcp_bytes)}
    used = {item.relative_path for item in items}
    check_written(items, shard_sizes(items) if sizes is None else sizes)
    shards = shard_sizes(items) if sizes is None else {name: sizes[name] for name in sorted(used)}
    manifest = Manifest(format=FORMAT_VERSION, shards=shards, files=files, items=tuple(items))
    final = folder.with_suffix("")
    try:
        check_shard_sizes(folder, manifest)
    except CheckpointError:
        # The folder may be there again: survivors of a loss have written once more.
        if _is_committed(final, manifest):
            return CheckpointRef(meta.step, final, read_meta(final))
        raise
    assert folder.suffix == TEMPORARY_SUFFIX and final.name == folder_of(final, meta.step).name, folder
    try:
        _write_synced(folder / META_FILE, meta_bytes)
        _write_synced(folder / MANIFEST_FILE, encode_manifest(manifest))
        _write_synced(folder / DCP_METADATA_FILE, dcp_bytes)
        # After a loss survivors write pieces again; of each piece the first one counts.
        for unused in folder.glob(f"*{SHARD_SUFFIX}"):
            if unused.name not in used:
                unused.unlink(missing_ok=True)
        # Before the folder has its final name, under which it is taken for whole.
        _sync_folder(folder)
        if final.exists():
            remove_committed(final)
        folder.rename(final)
        _sync_folder(final.parent)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return CheckpointRef(meta.step, final, meta)


def _is_committed(final: Path, manifest: Manifest) -> bool:
    """Tells whether a checkpoint stands under its final name and holds just these items."""
    try:
        found = read_manifest(final)
    except CheckpointError:
        return False
    return (found.items, found.shards) == (manifest.items, manifest.shards) and looks_whole(final)


def _write_synced(path: Path, data: bytes) -> None:
    with open_to_write(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
