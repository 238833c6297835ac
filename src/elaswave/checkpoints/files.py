"""A checkpoint's folder on the disk: reading and checking its files, removing it. No torch: the coordinator and the
command line look at checkpoints too.
"""

import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elaswave.blocks.chunks import find_cover_fault, run_of_rectangle
from elaswave.checkpoints.format import (
    MANIFEST_FILE,
    Manifest,
    TensorInfo,
    WrittenItem,
    check_places,
    checksum_of,
    decode_manifest,
)
from elaswave.errors import CheckpointError
from elaswave.untrusted import open_binary, read_bytes, reason

TEMPORARY_SUFFIX = ".tmp"
"""Of folders that are not committed, or are being removed."""
MANIFEST_BYTES_MAX = 1 << 30
META_BYTES_MAX = 1 << 30


def read_item_bytes(folder: Path, items: Sequence[WrittenItem]) -> Iterator[tuple[WrittenItem, bytes]]:
    """Reads rectangles, each after a check of its bytes.

    Args:
        folder: the checkpoint's folder.
        items: in any order; they come back file by file, by offset.
    Returns:
        Pairs of an item and its bytes as they stand in the file.
    Raises:
        CheckpointError: a file cannot be read, or its bytes are damaged.
    """
    by_file: defaultdict[str, list[WrittenItem]] = defaultdict(list)
    for item in items:
        by_file[item.relative_path].append(item)
    for name in sorted(by_file):
        path = folder / name
        try:
            with open_binary(path) as file:
                for item in sorted(by_file[name], key=lambda item: item.offset):
                    file.seek(item.offset)
                    data = file.read(item.length)
                    if checksum_of(data) != item.checksum:
                        raise CheckpointError(
                            f"{path} is damaged: bytes [{item.offset}, {item.offset + item.length}), a part of "
                            f"{item.fqn!r}, do not match their checksum"
                        )
                    yield item, data
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {reason(error)}") from error


def read_manifest(folder: Path) -> Manifest:
    """Reads the checked manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        data = read_bytes(folder / MANIFEST_FILE, MANIFEST_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / MANIFEST_FILE}: {reason(error)}") from error
    try:
        return decode_manifest(data)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Makes the error for a file that cannot be written, such as on a full disk."""
    return CheckpointError(
        f"cannot write {path}: {error.strerror}; the checkpoint is given up, earlier ones are untouched "
        "(free some space, or lower run.keep_checkpoints)"
    )


def check_items(items: Sequence[WrittenItem], tensors: dict[str, TensorInfo]) -> None:
    """Checks that every tensor is covered exactly once, and nothing else is there.

    Raises:
        CheckpointError: it is not so.
    """
    runs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in items:
        info = tensors.get(item.fqn)
        if info is None:
            raise CheckpointError(f"the shards hold {item.fqn!r}, which is no tensor of this run")
        if (item.shape, item.dtype) != (info.shape, info.dtype):
            raise CheckpointError(
                f"{item.relative_path} holds {item.fqn!r} as {item.dtype} of shape {list(item.shape)}, but it is "
                f"{info.dtype} of shape {list(info.shape)}"
            )
        runs[item.fqn].append(run_of(item))
    for fqn, info in tensors.items():
        fault = find_cover_fault(math.prod(info.shape), runs[fqn])
        if fault:
            raise CheckpointError(f"the shards do not cover {fqn!r} (shape {list(info.shape)}) exactly once: {fault}")


def check_written(items: Sequence[WrittenItem], sizes: Mapping[str, int]) -> None:
    """Refuses what a worker says that it has written, if that is not in the checkpoint's folder.

    Args:
        items: of any workers.
        sizes: bytes of each shard file.
    Raises:
        CheckpointError: says which.
    """
    try:
        check_places(items, sizes)
    except ValueError as error:
        raise CheckpointError(f"a worker has written no part of a checkpoint: {error}") from None


def run_of(item: WrittenItem) -> tuple[int, int]:
    """Computes the first element and the number of elements of a rectangle in its flattened tensor.

    Raises:
        CheckpointError: it is none.
    """
    try:
        return run_of_rectangle(item.shape, item.offsets, item.sizes)
    except ValueError as error:
        raise CheckpointError(f"{item.relative_path} holds a part of {item.fqn!r} that is not one: {error}") from None


def shard_sizes(items: Sequence[WrittenItem]) -> dict[str, int]:
    """Computes the bytes of every shard file up to the end of its last item.

    Args:
        items: sorted by offset.
    Raises:
        CheckpointError: two of them overlap.
    """
    sizes: dict[str, int] = {}
    for item in items:
        size = sizes.get(item.relative_path, 0)
        if item.offset < size:
            raise CheckpointError(
                f"the items of {item.relative_path} overlap: one ends at byte {size}, the next begins at byte "
                f"{item.offset}"
            )
        sizes[item.relative_path] = item.offset + item.length
    return sizes


def check_shard_sizes(folder: Path, manifest: Manifest) -> None:
    """Checks the size of every shard file.

    Raises:
        CheckpointError: one is missing, cut off or too long.
    """
    shard_sizes(manifest.items)  # whether they overlap
    for name, size in manifest.shards.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {reason(error)}") from error
        if found != size:
            raise CheckpointError(f"{folder / name} is damaged: it has {found} bytes and should have {size}")


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Reads a file of which the manifest has a checksum.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    try:
        data = read_bytes(folder / name, META_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {reason(error)}") from error
    if checksum_of(data) != manifest.files[name]:
        raise CheckpointError(f"{folder / name} is damaged: its content does not match its checksum")
    return data


def looks_whole(folder: Path) -> bool:
    """Tells whether manifest and descriptions are whole and the shards have their full size; the shards are not
    read."""
    try:
        manifest = read_manifest(folder)
        check_shard_sizes(folder, manifest)
        for name in manifest.files:
            read_checked(folder, name, manifest)
    except CheckpointError:
        return False
    return True


def remove_committed(folder: Path) -> None:
    """Removes a checkpoint; if that is cut short, the rest does not look like a checkpoint."""
    doomed = folder.with_suffix(f".old{TEMPORARY_SUFFIX}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)
