"""Whether a data file is the one that a run was trained on: its size, and hashes of its content.

A file of any size is told apart from another one in a few milliseconds by 64 blocks that are spread over it; a change
between the blocks is found only by reading the whole file.
"""

import hashlib
from pathlib import Path

import msgspec

from elaswave.errors import DataError

NUM_BLOCKS = 64
BLOCK_BYTES = 1 << 16
_READ_BYTES = 1 << 22


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a data file."""

    num_bytes: int
    sample: str
    """Hash of `NUM_BLOCKS` blocks, evenly spread from the file's beginning to its end."""
    content: str = ""
    """Hash of the whole file; empty if it was not read."""


def fingerprint_of(path: Path, *, whole: bool) -> Fingerprint:
    """Reads a data file's fingerprint.

    Args:
        path: of the file.
        whole: read all of it.
    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
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
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return Fingerprint(num_bytes=num_bytes, sample=sample.hexdigest(), content=content.hexdigest() if whole else "")


def check_same_data(path: Path, then: Fingerprint | None, now: Fingerprint) -> str:
    """Compares a data file with the one that a run was trained on.

    Args:
        path: of the file.
        then: what its checkpoint says; None for a checkpoint that says nothing.
        now: what the file is.
    Returns:
        A warning for what could not be compared, or "".
    Raises:
        DataError: it is another file.
    """
    if then is None:
        return f"the checkpoint does not say what {path} was like; whether the data has changed since cannot be checked"
    what = ""
    if then.num_bytes != now.num_bytes:
        what = f"it had {then.num_bytes} bytes and now has {now.num_bytes}"
    elif then.sample != now.sample or (then.content and now.content and then.content != now.content):
        what = f"it still has {now.num_bytes} bytes, but its content has changed"
    if what:
        raise DataError(
            f"{path} is not the data that this run was trained on: {what}; bring the file back, or name the right one "
            "in data.source"
        )
    if now.content and not then.content:
        return f'of {path} only a sample can be compared: the checkpoint was written with data.verify = "sample"'
    return ""


def fingerprint_in(extra: dict[str, object]) -> Fingerprint | None:
    """The fingerprint in what a checkpoint says beside its state; None in those of older versions."""
    data = extra.get("data")
    return msgspec.convert(data, Fingerprint) if data else None
