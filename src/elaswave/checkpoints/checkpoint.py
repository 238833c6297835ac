"""The checkpoints of a run: where they stand, found again, verified, pruned. No torch, clock, network or threads.

Every worker writes its own shard into the checkpoint's temporary folder in the background
(``checkpoint_shards.write_shard``); the coordinator merges their items, and a process that it asks for commits
(``checkpoint_commit.commit_checkpoint``). A folder without the final name was never committed; a folder with it is
whole unless the disk lied, which its checksums show.

All workers must see the folder of checkpoints (one machine, or a shared file system). A run may have a second one, a
link in its folder to another disk, for what the first does not take; readers look into both.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elaswave.checkpoints.files import (
    TEMPORARY_SUFFIX,
    cannot_write,
    check_items,
    check_shard_sizes,
    looks_whole,
    read_checked,
    read_item_bytes,
    read_manifest,
    remove_committed,
)
from elaswave.checkpoints.format import META_FILE, CheckpointMeta, decode_meta
from elaswave.errors import CheckpointError

_COMMITTED_NAME = re.compile(r"step-([0-9]{8,18})")
_DAMAGED_SUFFIX = ".damaged"
CHECKPOINTS, SPARE = "checkpoints", "spare-checkpoints"
"""In a run's folder: where its checkpoints stand, and perhaps a link to where those go that this does not take."""


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


def shard_name(worker: int, generation: int) -> str:
    """Names the file with a worker's part of a checkpoint that was begun in a generation, without its suffix."""
    return f"worker-{worker}-generation-{generation}"


def places(run_dir: Path) -> tuple[str, ...]:
    """Lists where a run's checkpoints may be written, the first choice first."""
    return (CHECKPOINTS, SPARE) if (run_dir / SPARE).is_dir() else (CHECKPOINTS,)


def link_spare(run_dir: Path, target: Path) -> None:
    """Gives a run a second place for checkpoints.

    Args:
        run_dir: its folder.
        target: the folder of this run alone, made if it is not there.
    Raises:
        OSError: it cannot be made or written, or not be linked to.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target):
        pass
    link = run_dir / SPARE
    if not (link.is_symlink() and os.readlink(link) == str(target)):
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def temporary_folder(run_dir: Path, step: int, place: str = CHECKPOINTS) -> Path:
    """Tells where the shards of a step's checkpoint stand until it is committed; the folder need not be there."""
    return folder_of(run_dir, step, place).with_suffix(TEMPORARY_SUFFIX)


def shard_folder(run_dir: Path, step: int, place: str = CHECKPOINTS) -> Path:
    """Returns the temporary folder for the shards of a checkpoint; the first worker that asks for it makes it.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    folder = temporary_folder(run_dir, step, place)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def discard_checkpoint(folder: Path) -> None:
    """Removes a temporary folder whose checkpoint is given up; never raises, the next start removes what stays."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale(run_dir: Path) -> list[Path]:
    """Removes temporary folders that earlier processes of a run have left. To be called before any checkpoint begins.

    Returns:
        The folders that were there.
    """
    stale = [folder for folder in _entries(run_dir) if folder.suffix == TEMPORARY_SUFFIX]
    for folder in stale:
        discard_checkpoint(folder)
    return stale


def find_newest_checkpoint(
    run_dir: Path,
    objection: Callable[[CheckpointMeta], str] = lambda meta: "",
    newest_step: int | None = None,
) -> CheckpointSearch:
    """Finds the newest checkpoint of a run whose every byte is as it was written, and why newer ones cannot be used.

    Args:
        run_dir: the run's folder.
        objection: says why a whole one cannot be used either; "" if it can.
        newest_step: later ones may hold what was found wrong since, and do not count.
    """
    skipped: list[SkippedCheckpoint] = []
    newest: CheckpointRef | None = None
    for step, folder in sorted(_numbered(run_dir), reverse=True):
        if folder.suffix == TEMPORARY_SUFFIX:
            skipped.append(SkippedCheckpoint(folder, "it was never committed: its writing did not end"))
            continue
        if newest_step is not None and step > newest_step:
            skipped.append(SkippedCheckpoint(folder, "it may hold copies that were found wrong since"))
            continue
        try:
            found = verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(folder, str(error)))
            continue
        reason = objection(found.meta) if found.step == step else f"it is one of step {found.step}, under another name"
        if not reason:
            newest = found
            break
        skipped.append(SkippedCheckpoint(folder, reason))
    return CheckpointSearch(newest, tuple(skipped))


def put_aside(search: CheckpointSearch) -> None:
    """Renames the damaged checkpoints that a search has passed over, before the run goes on from an older one.

    Their sizes are right, so `prune` would keep them as the newest, and remove what the run writes from now on.
    """
    for skipped in search.skipped:
        folder = skipped.folder
        if folder.suffix != TEMPORARY_SUFFIX:
            damaged = folder.with_suffix(_DAMAGED_SUFFIX)
            with contextlib.suppress(OSError):
                if damaged.exists():
                    shutil.rmtree(damaged)
                folder.rename(damaged)


def newest_committed_step(run_dir: Path) -> int | None:
    """Finds the step of the newest checkpoint that looks whole, as `prune` sees it; returns None without one.

    Raises:
        CheckpointError: they cannot be listed.
    """
    committed = ((step, folder) for step, folder in _numbered(run_dir) if folder.suffix != TEMPORARY_SUFFIX)
    return next((step for step, folder in sorted(committed, reverse=True) if looks_whole(folder)), None)


def checkpoint_of_step(run_dir: Path, step: int) -> CheckpointRef:
    """Finds the checkpoint of one step, with every byte checked.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    there = {found: folder for found, folder in sorted(_numbered(run_dir)) if folder.suffix != TEMPORARY_SUFFIX}
    if step not in there:
        steps = f"those of steps {', '.join(map(str, there))}" if there else "none"
        raise CheckpointError(f"run {run_dir} has no checkpoint of step {step}; there are {steps}")
    return verify_checkpoint(there[step])


def verify_checkpoint(folder: Path) -> CheckpointRef:
    """Checks every byte of a committed checkpoint against its checksums.

    Raises:
        CheckpointError: something is missing, cut off or altered.
    """
    manifest = read_manifest(folder)
    check_shard_sizes(folder, manifest)
    contents = {name: read_checked(folder, name, manifest) for name in manifest.files}
    for _item, _data in read_item_bytes(folder, manifest.items):
        pass
    meta = _decoded(folder, contents[META_FILE])
    check_items(manifest.items, meta.tensors)
    return CheckpointRef(meta.step, folder, meta)


def read_meta(folder: Path) -> CheckpointMeta:
    """Reads the checked description of a committed checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    return _decoded(folder, read_checked(folder, META_FILE, read_manifest(folder)))


def _decoded(folder: Path, data: bytes) -> CheckpointMeta:
    try:
        return decode_meta(data)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


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
        if folder.suffix == TEMPORARY_SUFFIX:
            continue
        if num_kept < keep:
            num_kept += looks_whole(folder)
            continue
        try:
            remove_committed(folder)
        except OSError as error:
            raise CheckpointError(f"cannot remove the old checkpoint {folder}: {error.strerror}") from error
        removed.append(folder)
    return removed


def folder_of(run_dir: Path, step: int, place: str = CHECKPOINTS) -> Path:
    """Tells where the committed checkpoint of a step stands, in one of the run's places."""
    return run_dir / place / f"step-{step:08d}"


def folder_there(run_dir: Path, step: int) -> Path:
    """Finds where the committed checkpoint of a step is: a commit removes one of the same step in another place."""
    spare = folder_of(run_dir, step, SPARE)
    return spare if spare.is_dir() else folder_of(run_dir, step)


def _entries(run_dir: Path) -> list[Path]:
    found: list[Path] = []
    for place in (CHECKPOINTS, SPARE):
        try:
            found += sorted((run_dir / place).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(f"cannot list the checkpoints in {run_dir / place}: {error.strerror}") from error
    return found


def _numbered(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """Yields (step, folder) of committed and half-written checkpoints."""
    for folder in _entries(run_dir):
        match = _COMMITTED_NAME.fullmatch(folder.name.removesuffix(TEMPORARY_SUFFIX))
        if match:
            yield int(match[1]), folder
