"""Files of tokens (``.bin``): a header of 64 bytes that says what the tokens are, then the tokens, little-endian.

    offset  bytes  what
         0     16  b"elaswave tokens" and a zero byte
        16      4  version of the format, 1
        20      4  bytes of a token, 2 or 4
        24      8  size of the vocabulary: tokens are below it
        32      8  number of tokens
        40     16  BLAKE2b hash of the tokenizer's file
        56      8  zero

Whole numbers are unsigned and little-endian. A ``.bin`` file that does not begin so has no header and holds uint16
tokens, as nanoGPT writes them.
"""

import contextlib
import os
import struct
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from elaswave.errors import DataError
from elaswave.untrusted import open_binary

HEADER_BYTES = 64
SUFFIX = ".bin"
UINT16_VOCABULARY = 1 << 16
"""The largest vocabulary whose tokens fit into 2 bytes."""
VOCABULARY_MAX = 1 << 32
TOKENIZER_BYTES = 16

_MAGIC = b"elaswave tokens\0"
_VERSION = 1
_HEADER = struct.Struct("<16sIIQQ16s8x")


class TokenHeader(NamedTuple):
    """What a file of tokens says of itself."""

    itemsize: int
    """Bytes of a token."""
    vocab_size: int
    num_tokens: int
    tokenizer: bytes
    """Hash of the tokenizer's file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens."""
        return np.dtype(f"<u{self.itemsize}")


def read_header(path: Path) -> TokenHeader | None:
    """Reads the header of a file of tokens; None if it has none, or cannot be read (whoever reads the tokens says why).

    Raises:
        DataError: a header that this version cannot read, or a file that is shorter or longer than its header says.
    """
    try:
        with open_binary(path) as file:
            head, num_bytes = file.read(HEADER_BYTES) or b"", os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        return None
    _, version, itemsize, vocab_size, num_tokens, tokenizer = _HEADER.unpack(head)
    if version != _VERSION or itemsize not in (2, 4):
        raise DataError(
            f"{path}: its header has version {version} and tokens of {itemsize} bytes, but this elaswave reads version "
            f"{_VERSION} with 2 or 4 bytes: make it again with `elaswave data tokenize`"
        )
    if not 1 <= vocab_size <= 1 << 8 * itemsize:
        raise DataError(
            f"{path}: its header says a vocabulary of {vocab_size} tokens, which {itemsize} bytes cannot tell apart: "
            "make it again with `elaswave data tokenize`"
        )
    if num_bytes != HEADER_BYTES + num_tokens * itemsize:
        raise DataError(
            f"{path}: it has {num_bytes} bytes, but its header says {num_tokens} tokens of {itemsize} bytes, so "
            f"{HEADER_BYTES + num_tokens * itemsize} bytes: the file is cut off; bring it again, or make it again"
        )
    return TokenHeader(itemsize, vocab_size, num_tokens, tokenizer)


class TokenWriter:
    """Writes a file of tokens that appears whole, or not at all, when the block that it guards is left.

    Args:
        path: of the file; an earlier one is replaced.
        vocab_size: tokens are below it; decides how many bytes a token takes.
        tokenizer: hash of the tokenizer's file, `TOKENIZER_BYTES` long.
    Raises:
        DataError: the file cannot be written.
        ValueError: no such vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int, tokenizer: bytes) -> None:
        if not 1 <= vocab_size <= VOCABULARY_MAX:
            raise ValueError(f"vocab_size is {vocab_size}, it must be from 1 to {VOCABULARY_MAX}")
        self.num_tokens = 0
        self._path = path
        self._header = TokenHeader(2 if vocab_size <= UINT16_VOCABULARY else 4, vocab_size, 0, tokenizer)
        try:
            descriptor, self._scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        except OSError as error:
            raise self._unwritable(error) from error
        self._file = os.fdopen(descriptor, "wb")
        self._file.seek(HEADER_BYTES)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tokens in the file."""
        return self._header.dtype

    def write(self, tokens: list[int]) -> None:
        """Appends tokens.

        Raises:
            DataError: the file cannot be written.
            ValueError: a token that the vocabulary does not have.
        """
        values = np.asarray(tokens, dtype=np.int64)
        if len(values) and not 0 <= values.min() <= values.max() < self._header.vocab_size:
            raise ValueError(f"tokens from {values.min()} to {values.max()}, but the vocabulary has {self._header[1]}")
        try:
            self._file.write(values.astype(self.dtype).tobytes())
        except OSError as error:
            raise self._unwritable(error) from error
        self.num_tokens += len(values)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if kind is not None:
                    return
                header = self._header._replace(num_tokens=self.num_tokens)
                self._file.seek(0)
                self._file.write(_HEADER.pack(_MAGIC, _VERSION, *header))
                self._file.flush()
                os.fsync(self._file.fileno())
                os.fchmod(self._file.fileno(), 0o644)  # mkstemp lets no other user read it
            os.replace(self._scratch, self._path)
        except OSError as refusal:
            raise self._unwritable(refusal) from refusal
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._scratch)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self._path}: cannot be written: {error.strerror}: make room, or name another --output")
