"""Texts to a file of tokens, with a Hugging Face tokenizer file, in bounded memory.

The tokenizer runs on pieces of a text, of some 256 thousand characters, that end where no token of the usual tokenizers
crosses: after a line end between two characters that are no spaces, or before a single space. Byte-level tokenizers
(GPT-2, Llama 3, Qwen) give the same tokens for the pieces as for the whole text. Others, which put a space in front of
every text that they are given (SentencePiece), do not: `Tokenizer.splits_at_lines` finds that out, and their texts are
encoded whole.
"""

import codecs
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from elaswave.data.token_files import TOKENIZER_BYTES, TokenWriter
from elaswave.errors import DataError, UsageError
from elaswave.untrusted import open_binary, read_bytes, reason

PIECE_CHARACTERS = 1 << 18
PIECES_AT_ONCE = 16
"""Pieces that are encoded together: the library encodes them on as many threads as there are cores."""
WHOLE_TEXT_BYTES_MAX = 1 << 28
"""Longest text for a tokenizer that needs it whole."""
_READ_BYTES = 1 << 20
_LINE_CUT = re.compile(r"(?<=\S\n)(?=\S)")
_WORD_CUT = re.compile(r"(?<=\S)(?= \S)")
_PROBE = ("The first line.", "Another one")


class Encoding(Protocol):
    """What the library makes of a text."""

    ids: list[int]


class Encoder(Protocol):
    """What is needed of a ``tokenizers.Tokenizer``."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Sequence[Encoding]:
        """Encodes texts, each for itself."""
        ...

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Returns all tokens with their numbers."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Returns the number of a token, if there is such a token."""
        ...


class Tokenizer:
    """A tokenizer from its file.

    Args:
        encoder: the library's.
        path: of the file.
        digest: its hash, `TOKENIZER_BYTES` long.
    """

    def __init__(self, encoder: Encoder, path: Path, digest: bytes) -> None:
        self._encoder = encoder
        self._path = path
        self.digest = digest
        self.vocab_size = 1 + max(encoder.get_vocab().values(), default=0)
        """Tokens are below it."""

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Encodes texts into their tokens, each for itself, without special tokens."""
        return [encoding.ids for encoding in self._encoder.encode_batch(texts, add_special_tokens=False)]

    def id_of(self, token: str) -> int:
        """Returns the number of a token.

        Raises:
            UsageError: there is no such token; names some that could be meant.
        """
        found = self._encoder.token_to_id(token)
        if found is None:
            special = [name for name in self._encoder.get_vocab() if re.fullmatch(r"[<\[].*[>\]]", name)]
            hint = f"it has {', '.join(sorted(special)[:8])}" if special else "it has none in <> or []"
            raise UsageError(f"--append-eos: {self._path} has no token {token!r}; of the special ones {hint}")
        return found

    def splits_at_lines(self) -> bool:
        """Tells whether a text that is cut after a line end has the same tokens as a whole."""
        first, second = _PROBE
        head, tail, whole = self.encode([first + "\n", second, f"{first}\n{second}"])
        return head + tail == whole


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer's file.

    Args:
        path: a ``tokenizer.json`` as Hugging Face writes it.
    Raises:
        UsageError: the library is not installed, or the file cannot be read, or is none of a tokenizer.
    """
    try:
        import tokenizers  # late: an extra that only this command needs
    except ImportError as error:
        raise UsageError(
            f"tokenizing needs the package tokenizers ({error}): pip install 'elaswave[tokenize]', or pip install "
            "tokenizers"
        ) from error
    try:
        content = read_bytes(path)
    except OSError as error:
        raise UsageError(f"--tokenizer {path}: cannot be read: {reason(error)}") from error
    try:
        encoder: Any = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more special
        raise UsageError(
            f"--tokenizer {path}: not a tokenizer's file ({error}): give the tokenizer.json of a Hugging Face model"
        ) from error
    return Tokenizer(encoder, path, hashlib.blake2b(content, digest_size=TOKENIZER_BYTES).digest())


class Tokenized(NamedTuple):
    """What has been made."""

    num_tokens: int
    num_text_bytes: int
    vocab_size: int
    token_bytes: int
    """Of one token in the file."""


def tokenize(
    texts: Sequence[Path],
    tokenizer: Tokenizer,
    output: Path,
    *,
    append: int | None = None,
    on_progress: Callable[[int, int], None] = lambda num_text_bytes, num_tokens: None,
) -> Tokenized:
    """Makes a file of tokens from texts, one behind the other. The file appears whole, or not at all.

    Args:
        texts: UTF-8 files, each a document.
        tokenizer: encodes them.
        output: the file to be made; an earlier one is replaced.
        append: a token to follow each text.
        on_progress: told now and then how many bytes of text have become how many tokens.
    Raises:
        DataError: a text cannot be read, is not UTF-8, or is too long for this tokenizer; there is no token at all;
            or the output cannot be written.
    """
    num_text_bytes = 0
    in_pieces = tokenizer.splits_at_lines()
    with TokenWriter(output, tokenizer.vocab_size, tokenizer.digest) as writer:
        for path in texts:
            pieces = text_pieces(path) if in_pieces else iter([_whole(path)])
            while batch := list(itertools.islice(pieces, PIECES_AT_ONCE)):
                for tokens in tokenizer.encode(batch):
                    writer.write(tokens)
                num_text_bytes += sum(len(piece.encode()) for piece in batch)
                on_progress(num_text_bytes, writer.num_tokens)
            if append is not None:
                writer.write([append])
        if writer.num_tokens == 0:
            raise DataError(f"no token in {', '.join(map(str, texts))}: they are empty")
        itemsize = writer.dtype.itemsize
    return Tokenized(writer.num_tokens, num_text_bytes, tokenizer.vocab_size, itemsize)


def text_pieces(path: Path, num_characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yields a text in pieces of about so many characters, each of which ends where no token crosses.

    That is after a line, or, where no line ends, before a single space; a text without spaces is cut anywhere.

    Raises:
        DataError: the text cannot be read, or is not UTF-8.
    """
    rest = ""
    for text in _decoded(path):
        rest += text
        while len(rest) >= 2 * num_characters:
            found = _LINE_CUT.search(rest, num_characters) or _WORD_CUT.search(rest, num_characters)
            if found is None and len(rest) < 8 * num_characters:
                break
            cut = len(rest) if found is None else found.start()
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _decoded(path: Path) -> Iterator[str]:
    """Yields a text as it is read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with open_binary(path) as file:
            while data := file.read(_READ_BYTES):
                yield decoder.decode(data)
                position += len(data)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 ({error.reason}, near byte {position + error.start}): convert it, for example with "
            "iconv -t utf-8"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason(error)}") from error


def _whole(path: Path) -> str:
    """Reads a whole text.

    Raises:
        DataError: it is longer than a tokenizer should be given at once.
    """
    parts, length = [], 0
    for part in _decoded(path):
        parts.append(part)
        length += len(part.encode())
        if length > WHOLE_TEXT_BYTES_MAX:
            raise DataError(
                f"{path}: longer than {WHOLE_TEXT_BYTES_MAX} bytes, and this tokenizer gives other tokens when a text "
                "is cut at line ends: split it into files, one document each"
            )
    return "".join(parts)
