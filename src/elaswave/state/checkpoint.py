"""Durable checkpoints of a run: committed, found again, pruned.

Every worker writes its own shard into the checkpoint's temporary folder in the background
(``checkpoint_shards.write_shard``); the coordinator merges their items and commits. The order of a commit is the
contract: shards are on the disk before their items are reported; then ``meta.json`` and the manifest; then
``.metadata``; then the folder gets its final name in one rename. A folder without the final name was never
committed; a folder with it is whole unless the disk lied, which its checksums show.

All workers must see the run folder (one machine, or a shared file system). No clock, no network, no threads here.
"""

import contextlib
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from elaswave.errors import CheckpointError
from elaswave.state.checkpoint_format import (
    DCP_METADATA_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    META_FILE,
    SHARD_SUFFIX,
    CheckpointMeta,
    Manifest,
    Piece,
    TensorInfo,
    WantedPiece,
    WrittenItem,
    check_same_tensors,
    checksum_of,
    decode_meta,
    encode_dcp_metadata,
    encode_manifest,
    encode_meta,
    model_name,
    optimizer_name,
)
from elaswave.state.checkpoint_shards import cannot_write, read_item_bytes, read_manifest, read_pieces, write_shard
from elaswave.state.chunks import find_cover_fault, run_of_rectangle

__all__ = [
    "CheckpointMeta",
    "CheckpointRef",
    "CheckpointSearch",
    "Piece",
    "SkippedCheckpoint",
    "TensorInfo",
    "WantedPiece",
    "WrittenItem",
    "check_same_tensors",
    "checkpoint_of_step",
    "commit_checkpoint",
    "discard_checkpoint",
    "find_newest_checkpoint",
    "model_name",
    "newest_committed_step",
    "newest_valid_checkpoint",
    "optimizer_name",
    "prune",
    "put_aside",
    "read_meta",
    "read_pieces",
    "remove_stale",
    "shard_folder",
    "shard_name",
    "temporary_folder",
    "verify_checkpoint",
    "write_shard",
]

_COMMITTED_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY_SUFFIX = ".tmp"
_DAMAGED_SUFFIX = ".damaged"


class CheckpointRef(msgspec.Struct, frozen=True):
    """A committed checkpoint."""

    step: int
    folder: Path
    meta: CheckpointMeta


class SkippedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that cannot be used, and why."""

    folder: Path
    reason: str


class CheckpointSearch(msgspec.Struct, frozen=True):
    """What a search for the newest usable checkpoint has found."""

    newest: CheckpointRef | None
    skipped: tuple[SkippedCheckpoint, ...]
    """Newer ones that cannot be used, newest first."""


def shard_name(worker: int, epoch: int) -> str:
    """Name of the file with a worker's part of a checkpoint that was begun in an epoch, without its suffix."""
    return f"worker-{worker}-epoch-{epoch}"


def temporary_folder(run_dir: Path, step: int) -> Path:
    """Where the shards of a step's checkpoint stand until it is committed; the folder need not be there."""
    return _folder_of(run_dir, step).with_suffix(_TEMPORARY_SUFFIX)


def shard_folder(run_dir: Path, step: int) -> Path:
    """The temporary folder for the shards of a checkpoint; the first worker that asks for it makes it.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    folder = temporary_folder(run_dir, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def commit_checkpoint(
    folder: Path, items: Sequence[WrittenItem], meta: CheckpointMeta, *, sizes: Mapping[str, int] | None = None
) -> CheckpointRef:
    """Turns the shards in a temporary folder into a checkpoint, or leaves them as they are.

    A checkpoint of the same step (a damaged one, say, that a resumed run has passed again) is replaced. A commit that
    was made by a coordinator which died before it could say so is found and taken over.

    Args:
        folder: from :func:`temporary_folder`, with every worker's shard.
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
    _check_items(items, meta.tensors)
    meta_bytes = encode_meta(meta)
    dcp_bytes = encode_dcp_metadata(meta.tensors, items)
    files = {META_FILE: checksum_of(meta_bytes), DCP_METADATA_FILE: checksum_of(dcp_bytes)}
    used = {item.relative_path for item in items}
    shards = _shard_sizes(items) if sizes is None else {name: sizes[name] for name in sorted(used)}
    manifest = Manifest(format=FORMAT_VERSION, shards=shards, files=files, items=tuple(items))
    final = folder.with_suffix("")
    if not os.path.exists(folder) and _is_committed(final, manifest):  # Path.exists may raise
        return CheckpointRef(meta.step, final, read_meta(final))
    _check_shard_sizes(folder, manifest)
    assert folder.suffix == _TEMPORARY_SUFFIX and final.name == _folder_of(final, meta.step).name, folder
    try:
        _write_synced(folder / META_FILE, meta_bytes)
        _write_synced(folder / MANIFEST_FILE, encode_manifest(manifest))
        _write_synced(folder / DCP_METADATA_FILE, dcp_bytes)
        for unused in folder.glob(f"*{SHARD_SUFFIX}"):
            if unused.name not in used:
                unused.unlink(missing_ok=True)
        _sync_folder(folder)
        if final.exists():
            _remove_committed(final)
        folder.rename(final)
        _sync_folder(final.parent)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return CheckpointRef(meta.step, final, meta)


def discard_checkpoint(folder: Path) -> None:
    """Removes a temporary folder whose checkpoint is given up; never raises, the next start removes what stays."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(run_dir: Path) -> list[Path]:
    """Removes temporary folders that earlier processes of a run have left. To be called before any checkpoint begins.

    Returns:
        The folders that were there.
    """
    stale = [folder for folder in _entries(run_dir) if folder.suffix == _TEMPORARY_SUFFIX]
    for folder in stale:
        discard_checkpoint(folder)
    return stale


def newest_valid_checkpoint(run_dir: Path) -> CheckpointRef | None:
    """The newest checkpoint of a run whose every byte is as it was written, or None."""
    return find_newest_checkpoint(run_dir).newest


def find_newest_checkpoint(run_dir: Path) -> CheckpointSearch:
    """Like :func:`newest_valid_checkpoint`, but also says which newer ones are half-written or damaged, and why."""
    skipped: list[SkippedCheckpoint] = []
    newest: CheckpointRef | None = None
    for _step, folder in sorted(_numbered(run_dir), reverse=True):
        if folder.suffix == _TEMPORARY_SUFFIX:
            skipped.append(SkippedCheckpoint(folder, "it was never committed: its writing did not end"))
            continue
        try:
            newest = verify_checkpoint(folder)
            break
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(folder, str(error)))
    return CheckpointSearch(newest, tuple(skipped))


def put_aside(search: CheckpointSearch) -> None:
    """Renames the damaged checkpoints that a search has passed over, before the run goes on from an older one.

    Their sizes are right, so `prune` would keep them as the newest, and remove what the run writes from now on.
    """
    for skipped in search.skipped:
        folder = skipped.folder
        if folder.suffix != _TEMPORARY_SUFFIX:
            damaged = folder.with_suffix(_DAMAGED_SUFFIX)
            with contextlib.suppress(OSError):
                if damaged.exists():
                    shutil.rmtree(damaged)
                folder.rename(damaged)


def newest_committed_step(run_dir: Path) -> int | None:
    """Step of the newest checkpoint that looks whole, as `prune` sees it; None without one.

    Raises:
        CheckpointError: they cannot be listed.
    """
    committed = ((step, folder) for step, folder in _numbered(run_dir) if folder.suffix != _TEMPORARY_SUFFIX)
    return next((step for step, folder in sorted(committed, reverse=True) if _looks_whole(folder)), None)


def checkpoint_of_step(run_dir: Path, step: int) -> CheckpointRef:
    """The checkpoint of one step, every byte checked.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    there = sorted(found for found, folder in _numbered(run_dir) if folder.suffix != _TEMPORARY_SUFFIX)
    if step not in there:
        steps = f"those of steps {', '.join(map(str, there))}" if there else "none"
        raise CheckpointError(f"run {run_dir} has no checkpoint of step {step}; there are {steps}")
    return verify_checkpoint(_folder_of(run_dir, step))


def verify_checkpoint(folder: Path) -> CheckpointRef:
    """Checks every byte of a committed checkpoint against its checksums.

    Raises:
        CheckpointError: something is missing, cut off or altered.
    """
    manifest = read_manifest(folder)
    _check_shard_sizes(folder, manifest)
    contents = {name: _read_checked(folder, name, manifest) for name in manifest.files}
    for name in (META_FILE, DCP_METADATA_FILE):
        assert name in contents, f"{folder}: the manifest does not list {name}"
    for _item, _data in read_item_bytes(folder, manifest.items):
        pass
    meta = decode_meta(contents[META_FILE])
    _check_items(manifest.items, meta.tensors)
    return CheckpointRef(meta.step, folder, meta)


def read_meta(folder: Path) -> CheckpointMeta:
    """The checked description of a committed checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    return decode_meta(_read_checked(folder, META_FILE, read_manifest(folder)))


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Removes all but the newest checkpoints.

    A checkpoint counts only if its manifest and descriptions are whole and its shards have their full size, so that
    damaged ones do not push out good ones; the shards are not read again.

    Args:
        run_dir: the run's folder.
        keep: number of checkpoints to keep, at least 1.
    Returns:
        The folders that were removed.
    Raises:
        ValueError: keep is below 1.
        CheckpointError: a folder cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints: at least 1 is needed")
    removed: list[Path] = []
    num_kept = 0
    for _step, folder in sorted(_numbered(run_dir), reverse=True):
        if folder.suffix == _TEMPORARY_SUFFIX:
            continue
        if num_kept < keep:
            num_kept += _looks_whole(folder)
            continue
        try:
            _remove_committed(folder)
        except OSError as error:
            raise CheckpointError(f"cannot remove the old checkpoint {folder}: {error.strerror}") from error
        removed.append(folder)
    return removed


def _check_items(items: Sequence[WrittenItem], tensors: dict[str, TensorInfo]) -> None:
    """Every tensor is covered exactly once, and nothing else is there."""
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
        try:
            runs[item.fqn].append(run_of_rectangle(item.shape, item.offsets, item.sizes))
        except ValueError as error:
            raise CheckpointError(
                f"{item.relative_path} holds a part of {item.fqn!r} that is not one: {error}"
            ) from None
    for fqn, info in tensors.items():
        fault = find_cover_fault(math.prod(info.shape), runs[fqn])
        if fault:
            raise CheckpointError(f"the shards do not cover {fqn!r} (shape {list(info.shape)}) exactly once: {fault}")


def _is_committed(final: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint stands under its final name and holds just these items."""
    try:
        found = read_manifest(final)
    except CheckpointError:
        return False
    return (found.items, found.shards) == (manifest.items, manifest.shards) and _looks_whole(final)


def _shard_sizes(items: Sequence[WrittenItem]) -> dict[str, int]:
    """Bytes of every shard file up to the end of its last item; items, sorted by offset, do not overlap."""
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


def _check_shard_sizes(folder: Path, manifest: Manifest) -> None:
    for name, least in _shard_sizes(manifest.items).items():
        assert manifest.shards[name] >= least, (folder, name)
    for name, size in manifest.shards.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
        if found != size:
            raise CheckpointError(f"{folder / name} is damaged: it has {found} bytes and should have {size}")


def _read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    if checksum_of(data) != manifest.files[name]:
        raise CheckpointError(f"{folder / name} is damaged: its content does not match its checksum")
    return data


def _looks_whole(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
        _check_shard_sizes(folder, manifest)
        for name in manifest.files:
            _read_checked(folder, name, manifest)
    except CheckpointError:
        return False
    return True


def _remove_committed(folder: Path) -> None:
    """Removes a checkpoint; if that is cut short, the rest does not look like a checkpoint."""
    doomed = folder.with_suffix(f".old{_TEMPORARY_SUFFIX}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
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


def _checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _folder_of(run_dir: Path, step: int) -> Path:
    return _checkpoints_dir(run_dir) / f"step-{step:08d}"


def _entries(run_dir: Path) -> list[Path]:
    try:
        return sorted(_checkpoints_dir(run_dir).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list the checkpoints in {_checkpoints_dir(run_dir)}: {error.strerror}"
        ) from error


def _numbered(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """(step, folder) of committed and half-written checkpoints."""
    for folder in _entries(run_dir):
        match = _COMMITTED_NAME.fullmatch(folder.name.removesuffix(_TEMPORARY_SUFFIX))
        if match:
            yield int(match[1]), folder
