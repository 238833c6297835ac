"""Whether data files, and what a script gives, are those that a run was trained on: sizes, hashes, and texts.

A file of any size is told apart from another one in a few milliseconds by 64 blocks that are spread over it; a change
between the blocks is found only by reading the whole file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elaswave.errors import DataError
from elaswave.hashing import key64
from elaswave.untrusted import open_binary, reason

NUM_BLOCKS = 64
BLOCK_BYTES = 1 << 16
FIRST_LOSS = "the loss of the first micro-batch"
"""What a `Finding` is of."""
_READ_BYTES = 1 << 22

PYTHON = "python"
"""In what a script gives: the version whose byte code was hashed; that of another one says nothing."""
_OPTIONS = ("optimizer", "lr_scheduler")
"""Begin the names of what a checkpoint has itself, so that a resumed run goes on with the checkpoint's."""


class SampleHash(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one sample of a dataset."""

    sample: int
    hash: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What two processes find out of a script's data or loss, and compare; see `elaswave.engine.checks.rehearsal`."""

    what: str
    value: str
    """What is compared: a hash, or all bits of a number; empty: it was not found out."""
    text: str = ""
    """The same for a person, or why it was not found out."""
    sample: int | None = None
    """Of a sample's hash."""


class DatasetFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of own datasets."""

    num_samples: dict[str, int]
    """By the dataset's name."""
    hashes: list[SampleHash]
    """Of samples that are spread over the data; see `elaswave.training.dataset.hash_of`. Fewer than asked for, or
    none, where samples take long to make."""
    script: dict[str, str] = {}
    """What else the script gives, by name; see `elaswave.training.given`. Empty in checkpoints of older versions."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the data files of a source."""

    num_bytes: int
    sample: str
    """Hash of `NUM_BLOCKS` blocks, evenly spread from a file's beginning to its end; of several files, of their sizes
    and hashes."""
    content: str = ""
    """Hash of all that they hold; empty if it was not read."""


def fingerprint_of_all(paths: Sequence[Path], *, whole: bool) -> Fingerprint:
    """Computes the fingerprint of files that are one source.

    Args:
        paths: of the files, one at least, in their order.
        whole: read all of them.
    Raises:
        DataError: one cannot be read.
    """
    parts = [fingerprint_of(path, whole=whole) for path in paths]
    if len(parts) == 1:
        return parts[0]
    sample, content = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for part in parts:
        sample.update(f"{part.num_bytes} {part.sample}\n".encode())
        content.update(f"{part.num_bytes} {part.content}\n".encode())
    return Fingerprint(
        num_bytes=sum(part.num_bytes for part in parts),
        sample=sample.hexdigest(),
        content=content.hexdigest() if whole else "",
    )


def fingerprint_of(path: Path, *, whole: bool) -> Fingerprint:
    """Reads a data file's fingerprint.

    Args:
        path: of the file.
        whole: read all of it.
    Raises:
        DataError: it cannot be read.
    """
    try:
        with open_binary(path) as file:
            num_bytes = file.seek(0, 2)
            sample = hashlib.blake2b(digest_size=16)
            for index in range(NUM_BLOCKS):
                file.seek(max(0, num_bytes - BLOCK_BYTES) * index // (NUM_BLOCKS - 1))
                sample.update(file.read(BLOCK_BYTES))
            content = hashlib.blake2b(digest_size=16)
            if whole:
                file.seek(0)
                while chunk := file.read(_READ_BYTES):
                    content.update(chunk)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error
    return Fingerprint(num_bytes=num_bytes, sample=sample.hexdigest(), content=content.hexdigest() if whole else "")


def check_same_data(source: str, then: Fingerprint | None, now: Fingerprint) -> str:
    """Compares data files with those that a run was trained on.

    Args:
        source: the files, for messages.
        then: what the run's checkpoint says; None for a checkpoint that says nothing.
        now: what the files are.
    Returns:
        A warning for what could not be compared, or "".
    Raises:
        DataError: they are other files.
    """
    if then is None:
        return (
            f"the checkpoint does not say what {source} was like; whether the data has changed since cannot be checked"
        )
    what = ""
    if then.num_bytes != now.num_bytes:
        what = f"it had {then.num_bytes} bytes and now has {now.num_bytes}"
    elif then.sample != now.sample or (then.content and now.content and then.content != now.content):
        what = f"it still has {now.num_bytes} bytes, but its content has changed"
    if what:
        raise DataError(
            f"{source} is not the data that this run was trained on: {what}; bring the file back, or name the right "
            "one in data.source"
        )
    if now.content and not then.content:
        return f'of {source} only a sample can be compared: the checkpoint was written with data.verify = "sample"'
    return ""


def fingerprint_in(extra: dict[str, object]) -> Fingerprint | None:
    """Finds the fingerprint in what a checkpoint says beside its state; None in those of older versions."""
    data = extra.get("data")
    return _converted(data, Fingerprint) if data else None


def check_same_dataset(then: DatasetFingerprint | None, now: DatasetFingerprint) -> str:
    """Compares own datasets with those that a run was trained on.

    Args:
        then: what the run's checkpoint says; None for a checkpoint that says nothing.
        now: what the datasets are.
    Returns:
        A warning for what could not be compared, or "".
    Raises:
        DataError: they are others.
    """
    if then is None:
        return "the checkpoint does not say what the dataset was like; whether it has changed since cannot be checked"
    if then.num_samples != now.num_samples:
        was, are = (_sizes(fingerprint.num_samples) for fingerprint in (then, now))
        raise DataError(
            f"the dataset is not the one that this run was trained on: it had {was} and now has {are}; give the same "
            "samples in the same order, or begin a new run"
        )
    before = {each.sample: each.hash for each in then.hashes}
    compared = [each for each in now.hashes if each.sample in before]
    changed = [each.sample for each in compared if before[each.sample] != each.hash]
    if changed:
        raise DataError(
            f"the dataset is not the one that this run was trained on: of {len(compared)} samples that were compared "
            f"{len(changed)} have changed, the first is number {changed[0]}; give the same samples in the same order, "
            "or begin a new run"
        )
    if not compared:
        return "no sample of the dataset could be compared with the run's, only how many there are"
    return ""


def script_differences(then: DatasetFingerprint | None, now: DatasetFingerprint) -> list[str]:
    """Lists what a script gives otherwise than when its run was begun, and what the run does about it; a line each.

    Args:
        then: what the run's checkpoint says; None for a checkpoint that says nothing.
        now: what the script gives.
    """
    was, given = {} if then is None else then.script, now.script
    if not was:
        return []
    here = {name: given.get(name, "missing") for name in sorted(was.keys() | given.keys())}
    other = {name: was.get(name, "missing") for name, text in here.items() if was.get(name, "missing") != text}
    options = [name for name in other if name.startswith(_OPTIONS)]
    code = [name for name in other if name not in options and PYTHON not in other]
    lines = []
    if options:
        said = "; ".join(f"{name} is {other[name]} there and {here[name]} in the script" for name in options)
        lines.append(
            f"the script's optimizer has other options than the checkpoint, whose options are kept: {said}. To train "
            "with the script's, begin a new run"
        )
    if code:
        lines.append(
            f"{', '.join(code)}: other code or settings than those that the run was begun with; it goes on with those "
            "of the script"
        )
    return lines


def script_in_force(then: DatasetFingerprint | None, now: DatasetFingerprint) -> DatasetFingerprint:
    """Returns what the checkpoints of a run keep: options from the checkpoint that it was resumed from, else what is
    given."""
    was = {} if then is None else then.script
    kept = {name: text for name, text in was.items() if name.startswith(_OPTIONS)}
    new = {name: text for name, text in now.script.items() if not (kept and name.startswith(_OPTIONS))}
    return msgspec.structs.replace(now, script=new | kept)


def data_hash(facts: Mapping[str, object]) -> int:
    """Computes a hash by which workers know each other's data. It is a hash of that which a worker finds out in
    milliseconds: size and sample of files, sizes of own datasets.

    Args:
        facts: a `Fingerprint` or a `DatasetFingerprint`, as plain data.
    """
    known = {key: facts[key] for key in ("num_bytes", "sample", "num_samples") if key in facts}
    return key64(msgspec.json.encode(known, order="deterministic").decode()) >> 2


def dataset_fingerprint_in(extra: dict[str, object]) -> DatasetFingerprint | None:
    """Finds the fingerprint of own datasets in what a checkpoint says beside its state; None if it has none."""
    data = extra.get("data")
    return _converted(data, DatasetFingerprint) if isinstance(data, dict) and "num_samples" in data else None


def _converted(data: object, type: Any) -> Any:
    """Converts what a checkpoint says of the data.

    Raises:
        DataError: it says something else.
    """
    try:
        return msgspec.convert(data, type)
    except msgspec.ValidationError as error:
        raise DataError(
            f"what the checkpoint says of the data is damaged ({error}): resume from another checkpoint"
        ) from error


def _sizes(num_samples: dict[str, int]) -> str:
    return ", ".join(f"{count} samples in {name}" for name, count in num_samples.items())
