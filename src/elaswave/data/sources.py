"""Token sources: Python's own documentation, text files read as bytes, nanoGPT's files of uint16 tokens.

A source is one run of tokens, cut in two: the last part is for validation, the rest for training. Sample i of a
split is its tokens [i * T, i * T + T + 1) (T the context length): T inputs and, shifted by one, T targets. Files are
memory-mapped; nothing is copied but the samples asked for. The order of samples is the sampler's business.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from elaswave.errors import DataError

if TYPE_CHECKING:
    import torch

Split = Literal["train", "validation"]

PYTHON_DOCS = "python-docs"
"""The source that needs no file: the text of Python's own documentation, as bytes."""

NUM_BYTE_VALUES = 256
_CHECK_CHUNK_TOKENS = 1 << 22


class TokenSource(Protocol):
    """What the engine needs of a source."""

    path: Path
    """The file that holds its tokens."""
    vocab_size: int
    """Number of different tokens."""

    def num_tokens(self, split: Split) -> int:
        """Tokens of a split."""
        ...

    def num_samples(self, split: Split) -> int:
        """Samples of a split; 0 where it is shorter than one."""
        ...

    def require_sample(self, split: Split) -> None:
        """Refuses a split that is shorter than one sample.

        Raises:
            DataError: says how many tokens there are and how many are needed.
        """
        ...

    def batch(self, indices: Sequence[int], split: Split) -> "tuple[torch.Tensor, torch.Tensor]":
        """Samples as tensors.

        Args:
            indices: samples of the split, B of them, in any order.
            split: which part of the source.
        Returns:
            Inputs and targets, int64 [B, T] each, contiguous.
        """
        ...


class MappedTokens:
    """A source in a memory-mapped file.

    Args:
        path: of the file.
        dtype: of its tokens, ``uint8`` or ``<u2``.
        vocab_size: tokens are below this.
        context_length: T.
        validation_fraction: share of the tokens, at the end, that is for validation.
    Raises:
        DataError: the file is missing, unreadable, no regular file, too short for one training sample, no whole
            number of tokens, or holds a token outside the vocabulary.
    """

    def __init__(
        self, path: Path, *, dtype: str, vocab_size: int, context_length: int, validation_fraction: float
    ) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._tokens = _map_file(path, np.dtype(dtype))
        _check_vocabulary(path, self._tokens, vocab_size)
        self._num_train_tokens = len(self._tokens) - int(len(self._tokens) * validation_fraction)
        self.require_sample("train")

    def num_tokens(self, split: Split) -> int:
        """See `TokenSource.num_tokens`."""
        return self._num_train_tokens if split == "train" else len(self._tokens) - self._num_train_tokens

    def num_samples(self, split: Split) -> int:
        """See `TokenSource.num_samples`."""
        return max(0, (self.num_tokens(split) - 1) // self.context_length)

    def require_sample(self, split: Split) -> None:
        """See `TokenSource.require_sample`."""
        if self.num_samples(split) == 0:
            raise DataError(
                f"{self.path}: {self.num_tokens(split)} of its {len(self._tokens)} tokens are for "
                f"{'training' if split == 'train' else 'validation'}, but one sample needs {self.context_length + 1} "
                "(model.context_length + 1): use a longer file, a shorter context, or another "
                "data.validation_fraction"
            )

    def batch(self, indices: Sequence[int], split: Split) -> "tuple[torch.Tensor, torch.Tensor]":
        """See `TokenSource.batch`.

        Raises:
            IndexError: a sample that the split does not have.
        """
        import torch  # late: launcher and coordinator look at sources, and hold no torch

        num_samples = self.num_samples(split)
        outside = [index for index in indices if not 0 <= index < num_samples]
        if outside:
            raise IndexError(f"{self.path}: sample {outside[0]} is outside [0, {num_samples}) of the {split} split")
        T = self.context_length
        first = 0 if split == "train" else self._num_train_tokens
        windows = np.empty((len(indices), T + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            start = first + index * T
            windows[row] = self._tokens[start : start + T + 1]
        windows_BT = torch.from_numpy(windows)
        return windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()


def open_source(
    source: str, *, vocab_size: int | None, context_length: int, validation_fraction: float, cache_dir: Path
) -> MappedTokens:
    """Opens and checks a source.

    Args:
        source: ``python-docs``; a path that ends in ``.bin`` (little-endian uint16 tokens, as nanoGPT writes them);
            or the path of any other file, read as bytes.
        vocab_size: number of different tokens; needed for ``.bin``, else None means 256.
        context_length: T, tokens of a sample.
        validation_fraction: share of the tokens, at the end, that is for validation; in [0, 1).
        cache_dir: folder for what is made from ``python-docs``; created if it is not there.
    Raises:
        DataError: whatever keeps the source from being used, with what was seen and what is needed.
        ValueError: a context_length below 1, or a validation_fraction outside [0, 1).
    """
    if context_length < 1:
        raise ValueError(f"context_length is {context_length}, it must be at least 1")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction}, it must be in [0, 1)")
    if source == PYTHON_DOCS:
        path, dtype = write_python_docs(cache_dir), "uint8"
    else:
        path = Path(source).expanduser()
        dtype = "<u2" if path.suffix == ".bin" else "uint8"
    if vocab_size is None:
        if dtype != "uint8":
            raise DataError(
                f"{path}: a .bin file does not say how many different tokens there are: set data.vocab_size"
            )
        vocab_size = NUM_BYTE_VALUES
    return MappedTokens(
        path,
        dtype=dtype,
        vocab_size=vocab_size,
        context_length=context_length,
        validation_fraction=validation_fraction,
    )


def python_docs_text() -> bytes:
    """The text of Python's documentation topics, the same for the same release of Python.

    Raises:
        DataError: this Python comes without ``pydoc_data``.
    """
    try:
        from pydoc_data.topics import topics  # late: half a megabyte that most runs do not need
    except ImportError as error:
        raise DataError(
            f"data.source {PYTHON_DOCS!r}: this Python has no module pydoc_data.topics ({error}): install Python's "
            "full standard library, or set data.source to the path of a text file"
        ) from error
    return "\n\n".join(f"{name}\n\n{topics[name].strip()}" for name in sorted(topics)).encode() + b"\n"


def write_python_docs(cache_dir: Path) -> Path:
    """Writes the text of Python's documentation into a folder, unless it is there already.

    Any number of processes may do so at once: the file appears whole under a name that depends on its content.

    Returns:
        Path of the file.
    Raises:
        DataError: the folder cannot be written, or as `python_docs_text`.
    """
    text = python_docs_text()
    path = cache_dir / f"{PYTHON_DOCS}-{hashlib.blake2b(text, digest_size=8).hexdigest()}.txt"
    try:
        if path.is_file() and path.read_bytes() == text:
            return path
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=cache_dir, prefix=f".{PYTHON_DOCS}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            os.chmod(scratch, 0o644)  # mkstemp lets no other user read it
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise DataError(
            f"cannot write the text of {PYTHON_DOCS!r} to {path}: {error.strerror}: make the folder writable"
        ) from error
    return path


def _map_file(path: Path, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A read-only view of a file's tokens, shape [num_tokens]."""
    try:
        # Non-blocking, so that a pipe without a writer does not hang; the check is on what was opened.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: not a regular file: data.source must name a file of tokens")
            if status.st_size == 0:
                raise DataError(f"{path}: the file is empty: data.source must name a file of tokens")
            if status.st_size % dtype.itemsize:
                raise DataError(
                    f"{path}: {status.st_size} bytes are no whole number of tokens of {dtype.itemsize} bytes: the file "
                    "is cut off, or is not a file of uint16 tokens"
                )
            return np.memmap(file, dtype=dtype, mode="r")
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file (working directory {os.getcwd()}): data.source must be {PYTHON_DOCS!r}, the path of "
            "a text file, or of a .bin file of uint16 tokens"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _check_vocabulary(path: Path, tokens: np.ndarray[Any, Any], vocab_size: int) -> None:
    """Refuses tokens that the model has no row for."""
    if vocab_size > np.iinfo(tokens.dtype).max:
        return
    for start in range(0, len(tokens), _CHECK_CHUNK_TOKENS):
        chunk = tokens[start : start + _CHECK_CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            position = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                f"{path}: token {int(chunk[position])} at position {start + position} is outside the vocabulary: "
                f"data.vocab_size is {vocab_size}, so tokens go from 0 to {vocab_size - 1}"
            )
