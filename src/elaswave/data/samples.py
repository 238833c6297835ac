"""The samples of a run: which of them each micro-batch holds, and those of token files.

Which samples belong to which micro-batch is a pure function of (seed, step, micro-batch): no state, no memory that
grows with the data, no file, so nothing has to be moved when workers come and go. A data pass is one keyed permutation
of all samples, computed for single positions; a batch that a pass cannot fill goes on with the next one. Several
sources with weights take turns in a fixed pattern, and each has passes of its own.

Token sources are Python's own documentation, text files read as bytes, and files of tokens. A source is one run of
tokens, of one file or of several, one behind the other. It is cut in two: the last part is for validation, the rest for
training. Sample i of a split is its tokens [i * T, i * T + T + 1) (T the context length): T inputs and, shifted by one,
T targets. Files are memory-mapped; nothing is copied but the samples asked for. A script's own datasets are
`elaswave.training.dataset`'s.

Source of the permutation: a Feistel network on mixed-radix halves (Black, Rogaway 2002, "Ciphers with arbitrary
finite domains", with addition in place of exclusive or) plus cycle walking.
"""

import bisect
import errno
import functools
import glob
import hashlib
import itertools
import math
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from elaswave.data.fingerprint import SampleHash
from elaswave.data.token_files import HEADER_BYTES, SUFFIX, TokenHeader, read_header
from elaswave.errors import DataError
from elaswave.hashing import key64, mix64
from elaswave.untrusted import open_binary, read_bytes, reason

if TYPE_CHECKING:
    import torch


_NUM_ROUNDS = 8
"""Half rounds; Luby and Rackoff (1988) need four for a random-looking permutation, small domains profit from more."""


class Draw(NamedTuple):
    """One sample of a run, and where in the data it stands."""

    sample: int
    """Its number in the data; samples of several sources are counted through."""
    data_pass: int
    """Number of the pass over its source, from 0."""
    position: int
    """In the pass; where there are several sources, plus the number of samples of the sources before."""


class Source(NamedTuple):
    """One of several sources of samples."""

    name: str
    num_samples: int
    weight: float
    """Its share of the samples that a run takes is this, divided by the weights of all sources."""


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, data_pass: int) -> tuple[int, ...]:
    return tuple(key64(seed, "data", data_pass, index) for index in range(_NUM_ROUNDS))


def permuted(position: int, num_samples: int, seed: int, data_pass: int) -> int:
    """Computes the sample at one position of a data pass.

    Args:
        position: in [0, num_samples).
        num_samples: length of the permutation.
        seed: of the data order.
        data_pass: number of the pass, from 0; each has its own order.
    Returns:
        A sample in [0, num_samples); a permutation of the positions.
    Raises:
        ValueError: a position outside the range.
    """
    if not 0 <= position < num_samples:
        raise ValueError(f"position {position} is outside [0, {num_samples})")
    # The domain rows * columns is num_samples or a little more, so walking is rare: it exceeds num_samples by less
    # than rows, about the square root.
    rows = math.isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    keys = _round_keys(seed, data_pass)
    while True:
        row, column = divmod(position, columns)
        for index in range(0, _NUM_ROUNDS, 2):
            row = (row + mix64(keys[index] + column)) % rows
            column = (column + mix64(keys[index + 1] + row)) % columns
        position = row * columns + column
        if position < num_samples:
            return position


class Sampler:
    """The samples of every micro-batch of every step.

    Args:
        seed: of the data order.
        num_samples: samples of a data pass.
        samples_per_microbatch: B.
        num_microbatches: M, of a step.
    Raises:
        ValueError: a count below 1.
    """

    def __init__(self, seed: int, num_samples: int, samples_per_microbatch: int, num_microbatches: int) -> None:
        counts = {
            "num_samples": num_samples,
            "samples_per_microbatch": samples_per_microbatch,
            "num_microbatches": num_microbatches,
        }
        problems = [f"{name} is {count}" for name, count in counts.items() if count < 1]
        if problems:
            raise ValueError(f"a sampler needs counts of at least 1, but {', '.join(problems)}")
        self.seed = seed
        self.num_samples = num_samples
        self.samples_per_microbatch = samples_per_microbatch
        self.num_microbatches = num_microbatches

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """Lists the samples of one micro-batch, in order.

        Args:
            step: from 1.
            microbatch: in [0, num_microbatches).
        Raises:
            ValueError: a step or micro-batch outside its range.
        """
        return [draw.sample for draw in self.draws(step, microbatch)]

    def draws(self, step: int, microbatch: int) -> list[Draw]:
        """Lists the samples of one micro-batch, in order, with where they stand in the data.

        Args:
            step: from 1.
            microbatch: in [0, num_microbatches).
        Raises:
            ValueError: a step or micro-batch outside its range.
        """
        if step < 1 or not 0 <= microbatch < self.num_microbatches:
            raise ValueError(
                f"step {step}, micro-batch {microbatch}: steps count from 1, micro-batches from 0 to "
                f"{self.num_microbatches - 1}"
            )
        first = ((step - 1) * self.num_microbatches + microbatch) * self.samples_per_microbatch
        return [self._draw(first + index) for index in range(self.samples_per_microbatch)]

    def cursor(self, step: int) -> tuple[int, int]:
        """Computes where the data stand once `step` steps are done.

        Args:
            step: number of steps done, from 0.
        Returns:
            (data pass, position in it) of the next sample.
        """
        return divmod(step * self.num_microbatches * self.samples_per_microbatch, self.num_samples)

    def _draw(self, number: int) -> Draw:
        """Finds what the run takes as its sample number `number`, from 0."""
        data_pass, position = divmod(number, self.num_samples)
        return Draw(permuted(position, self.num_samples, self.seed, data_pass), data_pass, position)


class MixedSampler(Sampler):
    """The samples of every micro-batch of every step, from several sources with weights.

    Of any n samples that follow each other, a source with the share s gives n s, to within one for each source before
    it, plus one. Which source gives a sample depends on nothing but the sample's number.

    Args:
        seed: of the data order.
        sources: at least one; their names differ.
        samples_per_microbatch: B.
        num_microbatches: M, of a step.
    Raises:
        ValueError: a count below 1, or a weight that is no positive number.
    """

    def __init__(
        self, seed: int, sources: Sequence[Source], samples_per_microbatch: int, num_microbatches: int
    ) -> None:
        num_samples = sum(source.num_samples for source in sources)
        super().__init__(seed, num_samples, samples_per_microbatch, num_microbatches)
        for source in sources:
            if source.num_samples < 1 or not 0 < source.weight < math.inf:
                raise ValueError(
                    f"source {source.name} has {source.num_samples} samples and weight {source.weight}: it needs one "
                    "sample at least, and a weight above 0"
                )
        self._sources = tuple(sources)
        self._units = share_units([source.weight for source in sources])
        self._seeds = [key64(seed, source.name) for source in sources]

    def _draw(self, number: int) -> Draw:
        index, number = choose_source(number, self._units)
        size = self._sources[index].num_samples
        before = sum(source.num_samples for source in self._sources[:index])
        data_pass, position = divmod(number, size)
        return Draw(before + permuted(position, size, self._seeds[index], data_pass), data_pass, before + position)


def share_units(weights: Sequence[float]) -> tuple[int, ...]:
    """Converts weights to whole numbers, so that no rounding depends on a machine: their shares times 2**32, at least
    1."""
    total = sum(weights)
    return tuple(max(1, round(weight / total * 2**32)) for weight in weights)


def choose_source(number: int, units: Sequence[int]) -> tuple[int, int]:
    """Chooses which source gives a sample of the run.

    Of the first n samples the first source gives floor(n u / U), with u its units and U those of all; of the rest the
    second source gives its share of the units that are left, and so on.

    Args:
        number: of the sample, from 0.
        units: of the sources, see `share_units`.
    Returns:
        (index of the source, number of the sample among those of the source, from 0).
    """
    left = sum(units)
    for index, unit in enumerate(units):
        taken = number * unit // left
        if (number + 1) * unit // left > taken:
            return index, taken
        number -= taken
        left -= unit
    raise AssertionError("the last source takes all that is left")


def sample_order(
    seed: int, num_samples: int, step: int, microbatch: int, size: int, num_microbatches: int
) -> list[int]:
    """Lists the samples that one micro-batch of a run holds, so that another program can train on the same ones.

    Args:
        seed: ``run.seed``.
        num_samples: ``len(dataset)``.
        step: from 1.
        microbatch: in [0, num_microbatches).
        size: ``batch.microbatch_size``, samples of a micro-batch.
        num_microbatches: ``batch.num_microbatches``, of a step.
    Returns:
        Indices into the dataset, in order, as many as `size`.
    Raises:
        ValueError: a count below 1, or a step or micro-batch outside its range.
    """
    return Sampler(seed, num_samples, size, num_microbatches).microbatch(step, microbatch)


Split = Literal["train", "validation"]

PYTHON_DOCS = "python-docs"
"""The source that needs no file: the text of Python's own documentation, as bytes."""

NUM_BYTE_VALUES = 256
_CHECK_CHUNK_TOKENS = 1 << 22


class TokenSource(Protocol):
    """What the engine needs of a source."""

    paths: tuple[Path, ...]
    """The files that hold its tokens, in order."""
    vocab_size: int
    """Number of different tokens."""

    def num_tokens(self, split: Split) -> int:
        """Tokens of a split."""
        ...

    def num_samples(self, split: Split) -> int:
        """Counts the samples of a split; 0 where it is shorter than one."""
        ...

    def require_sample(self, split: Split) -> None:
        """Refuses a split that is shorter than one sample.

        Raises:
            DataError: says how many tokens there are and how many are needed.
        """
        ...

    def batch(self, indices: Sequence[int], split: Split) -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns samples as tensors.

        Args:
            indices: samples of the split, B of them, in any order.
            split: which part of the source.
        Returns:
            Inputs and targets, int64 [B, T] each, contiguous.
        """
        ...


class TokenFile(NamedTuple):
    """One file of a source."""

    path: Path
    header: TokenHeader | None
    """What it says of itself; None: it holds nothing but tokens."""

    @property
    def dtype(self) -> str:
        """Of its tokens: bytes, unless it is a ``.bin`` file."""
        if self.header is not None:
            return self.header.dtype.str
        return "<u2" if self.path.suffix == SUFFIX else "uint8"


class MappedTokens:
    """A source in memory-mapped files.

    Args:
        files: one at least.
        vocab_size: tokens are below this.
        context_length: T.
        validation_fraction: share of the tokens, at the end, that is for validation.
    Raises:
        DataError: a file is missing, unreadable, no regular file, no whole number of tokens, or holds a token outside
            the vocabulary; or all of them are too short for one training sample.
    """

    def __init__(
        self, files: Sequence[TokenFile], *, vocab_size: int, context_length: int, validation_fraction: float
    ) -> None:
        self.paths = tuple(file.path for file in files)
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._parts = [_map_file(file) for file in files]
        for file, part in zip(files, self._parts, strict=True):
            _check_vocabulary(file, part, vocab_size)
        self._mapped: list[mmap.mmap] = [part._mmap for part in self._parts]  # type: ignore[attr-defined]
        self._sizes = [mapped.size() for mapped in self._mapped]
        self._starts = [0, *itertools.accumulate(map(len, self._parts))]
        """Where each file begins, and where the last one ends."""
        self._num_tokens = self._starts[-1]
        self._num_train_tokens = self._num_tokens - int(self._num_tokens * validation_fraction)
        self.require_sample("train")

    def num_tokens(self, split: Split) -> int:
        """See `TokenSource.num_tokens`."""
        return self._num_train_tokens if split == "train" else self._num_tokens - self._num_train_tokens

    def num_samples(self, split: Split) -> int:
        """See `TokenSource.num_samples`."""
        return max(0, (self.num_tokens(split) - 1) // self.context_length)

    def require_sample(self, split: Split) -> None:
        """See `TokenSource.require_sample`."""
        if self.num_samples(split) == 0:
            raise DataError(
                f"{_named(self.paths)}: {self.num_tokens(split)} of its {self._num_tokens} tokens are for "
                f"{'training' if split == 'train' else 'validation'}, but one sample needs {self.context_length + 1} "
                "(model.context_length + 1): use a longer file, a shorter context, or another "
                "data.validation_fraction"
            )

    def batch(self, indices: Sequence[int], split: Split) -> "tuple[torch.Tensor, torch.Tensor]":
        """See `TokenSource.batch`.

        Raises:
            IndexError: a sample that the split does not have.
            DataError: a file is shorter than when it was mapped. What of its last page is gone reads as zeros.
        """
        import torch  # late: launcher and coordinator look at sources, and hold no torch

        num_samples = self.num_samples(split)
        outside = [index for index in indices if not 0 <= index < num_samples]
        if outside:
            raise IndexError(
                f"{_named(self.paths)}: sample {outside[0]} is outside [0, {num_samples}) of the {split} split"
            )
        T = self.context_length
        first = 0 if split == "train" else self._num_train_tokens
        windows = np.empty((len(indices), T + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            start = first + index * T
            self._read(start, windows[row])
        self._require_whole_files()
        windows_BT = torch.from_numpy(windows)
        return windows_BT[:, :-1].contiguous(), windows_BT[:, 1:].contiguous()

    def _read(self, start: int, window: np.ndarray[Any, Any]) -> None:
        """Copies the tokens from `start` on into a window, from as many files as it takes."""
        part = bisect.bisect_right(self._starts, start) - 1
        filled = 0
        while filled < len(window):
            offset = start + filled - self._starts[part]
            tokens = self._parts[part][offset : offset + len(window) - filled]
            window[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
            part += 1

    def _require_whole_files(self) -> None:
        for path, mapped, size in zip(self.paths, self._mapped, self._sizes, strict=True):
            if (now := mapped.size()) < size:  # asked of the file itself, whatever stands at its path by now
                raise DataError(
                    f"{path} was cut short while it was in use: it had {size} bytes, and has {now}. Put it back, and "
                    "go on with --resume; write new data to another file, and rename that"
                )


class TokenSamples:
    """Tokens as samples; see `elaswave.training.definition.Samples`. Nothing in them is random.

    Args:
        tokens: the source.
    """

    sources: tuple[Source, ...] = ()

    def __init__(self, tokens: TokenSource) -> None:
        self._tokens = tokens
        self.num_samples = tokens.num_samples

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        """Returns no hashes: tokens are compared as files (`elaswave.data.fingerprint`)."""
        return iter(())

    def batch(self, draws: Sequence[Draw], split: Split) -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs and targets, int64 [samples, context_length] each."""
        return self._tokens.batch([draw.sample for draw in draws], split)


def open_source(
    source: str | Sequence[str],
    *,
    vocab_size: int | None,
    context_length: int,
    validation_fraction: float,
    cache_dir: Path,
) -> MappedTokens:
    """Opens and checks a source.

    Args:
        source: ``python-docs``; or paths and patterns of paths (see `files_of`), of ``.bin`` files (see
            `elaswave.data.token_files`), or of any other files, read as bytes.
        vocab_size: number of different tokens; None: what the files say of themselves, or 256 for bytes.
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
    paths = [write_python_docs(cache_dir)] if source == PYTHON_DOCS else files_of(source)
    files = [TokenFile(path, read_header(path) if path.suffix == SUFFIX else None) for path in paths]
    _check_alike(files)
    return MappedTokens(
        files,
        vocab_size=_vocabulary(files) if vocab_size is None else vocab_size,
        context_length=context_length,
        validation_fraction=validation_fraction,
    )


def files_of(source: str | Sequence[str]) -> list[Path]:
    """Lists the files that a source names, in order.

    Args:
        source: one or several of: a path; or a pattern with ``*``, ``?`` or ``[...]``, which stands for the files that
            match it, sorted by name. What exists as it is written is no pattern.
    Raises:
        DataError: a pattern that no file matches.
    """
    paths: list[Path] = []
    for name in [source] if isinstance(source, str) else source:
        path = Path(name).expanduser()
        if path.exists() or not glob.has_magic(name):
            paths.append(path)
            continue
        # A folder that is there is no pattern either, whatever its name holds.
        folder = next(parent for parent in path.parents if parent.is_dir() or parent == parent.parent)
        pattern = str(path.relative_to(folder))
        found = sorted(glob.glob(os.path.join(glob.escape(str(folder)), pattern), recursive=True))
        if not found:
            raise DataError(f"{path}: no file matches this pattern (working directory {os.getcwd()})")
        paths += map(Path, found)
    return paths


def known_vocabulary(source: str | Sequence[str]) -> int | None:
    """Finds the size of the vocabulary that the files of a source state in their headers; None if one states none.

    Raises:
        DataError: see `files_of` and `elaswave.data.token_files.read_header`.
    """
    names = [source] if isinstance(source, str) else source
    if not any(name.endswith(SUFFIX) for name in names):
        return None  # no header to read: whether there are such files is found out when they are opened
    headers = [read_header(path) if path.suffix == SUFFIX else None for path in files_of(source)]
    sizes = [header.vocab_size for header in headers if header is not None]
    return max(sizes) if sizes and len(sizes) == len(headers) else None


def _check_alike(files: Sequence[TokenFile]) -> None:
    """Refuses files whose tokens do not mean the same."""
    for file in files[1:]:
        if (file.path.suffix == SUFFIX) != (files[0].path.suffix == SUFFIX):
            raise DataError(
                f"{files[0].path} and {file.path}: bytes of text and {SUFFIX} files of tokens cannot be one source: "
                "tokenize the texts as well"
            )
    tokenizers: dict[bytes, Path] = {}
    for file in files:
        if file.header is not None:
            tokenizers.setdefault(file.header.tokenizer, file.path)
    if len(tokenizers) > 1:
        first, second, *_ = tokenizers.values()
        raise DataError(
            f"{first} and {second} were made with different tokenizers, so that equal numbers mean different tokens: "
            "make all files of a source with one tokenizer"
        )


def _vocabulary(files: Sequence[TokenFile]) -> int:
    """Finds what files say of their vocabulary."""
    for file in files:
        if file.header is None and file.path.suffix == SUFFIX:
            raise DataError(
                f"{file.path}: a {SUFFIX} file without a header does not say how many different tokens there are: set "
                "data.vocab_size"
            )
    return max(NUM_BYTE_VALUES if file.header is None else file.header.vocab_size for file in files)


def _named(paths: Sequence[Path]) -> str:
    """Files for a message."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def python_docs_text() -> bytes:
    """Returns the text of Python's documentation topics, the same for the same release of Python.

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
        if path.is_file() and path.stat().st_size == len(text) and read_bytes(path, len(text)) == text:
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


def _map_file(source: TokenFile) -> np.ndarray[Any, Any]:
    """Makes a read-only view of a file's tokens, shape [num_tokens]."""
    path, dtype = source.path, np.dtype(source.dtype)
    offset = 0 if source.header is None else HEADER_BYTES
    try:
        with open_binary(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # a pipe of the shell's, which cannot be mapped
                raise DataError(f"{path}: not a regular file: data.source must name a file of tokens")
            if status.st_size == offset:
                raise DataError(f"{path}: the file is empty: data.source must name a file of tokens")
            if status.st_size % dtype.itemsize:
                raise DataError(
                    f"{path}: {status.st_size} bytes are no whole number of tokens of {dtype.itemsize} bytes: the file "
                    "is cut off, or is not a file of uint16 tokens"
                )
            return np.memmap(file, dtype=dtype, mode="r", offset=offset)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file (working directory {os.getcwd()}): data.source must be {PYTHON_DOCS!r}, the path of "
            "a text file, or of a .bin file of tokens"
        ) from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise DataError(f"{path}: not a regular file: data.source must name a file of tokens") from error
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


def _check_vocabulary(file: TokenFile, tokens: np.ndarray[Any, Any], vocab_size: int) -> None:
    """Refuses tokens that the model has no row for. A header is believed; other files are read."""
    if file.header is not None:
        if file.header.vocab_size > vocab_size:
            raise DataError(
                f"{file.path}: its header says {file.header.vocab_size} different tokens, but data.vocab_size is "
                f"{vocab_size}: set it to {file.header.vocab_size} or more, or leave it out"
            )
        return
    if vocab_size > np.iinfo(tokens.dtype).max:
        return
    for start in range(0, len(tokens), _CHECK_CHUNK_TOKENS):
        chunk = tokens[start : start + _CHECK_CHUNK_TOKENS]
        if chunk.max() >= vocab_size:
            position = int(np.argmax(chunk >= vocab_size))
            raise DataError(
                f"{file.path}: token {int(chunk[position])} at position {start + position} is outside the vocabulary: "
                f"data.vocab_size is {vocab_size}, so tokens go from 0 to {vocab_size - 1}"
            )
