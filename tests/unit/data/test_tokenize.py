"""Texts become files of tokens: in pieces where that changes nothing, whole where it would."""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from elaswave.cli.main import main
from elaswave.data import tokenize as module
from elaswave.data.samples import open_source
from elaswave.data.token_files import read_header
from elaswave.data.tokenize import Tokenizer, load_tokenizer, text_pieces, tokenize
from elaswave.errors import DataError, UsageError


class Ids(NamedTuple):
    ids: list[int]


class Words:
    """Stands for a byte-level tokenizer: words with the space before them, and runs of other spaces."""

    def __init__(self, prefix: str = "", vocab_size: int = 70_000) -> None:
        self.prefix = prefix
        self.vocab = {"<|endoftext|>": 0, "word": 1, "last": vocab_size - 1}
        self.longest = 0

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Sequence[Ids]:
        assert not add_special_tokens
        self.longest = max([self.longest, *map(len, texts)])
        return [Ids([hash_of(part) for part in re.findall(r" ?\S+|\s", self.prefix + text)]) for text in texts]

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        return self.vocab

    def token_to_id(self, token: str) -> int | None:
        return self.vocab.get(token)


def hash_of(part: str) -> int:
    return int.from_bytes(hashlib.blake2b(part.encode(), digest_size=2).digest(), "little")


def made_with(encoder: Words) -> Tokenizer:
    return Tokenizer(encoder, Path("tokenizer.json"), b"h" * 16)


def text_file(folder: Path, num_lines: int = 400) -> Path:
    path = folder / "text.txt"
    lines = [("é long line of words " * (index % 7)).strip() + "\n" * (index % 3) for index in range(num_lines)]
    path.write_text("".join(lines))
    return path


def test_pieces_are_the_text_and_end_at_lines(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    pieces = list(text_pieces(path, 100))
    assert "".join(pieces) == path.read_text() and len(pieces) > 20
    assert all(re.search(r"\S\n\Z", piece) or following.startswith(" ") for piece, following in zip(pieces, pieces[1:]))
    assert max(map(len, pieces)) < 400


@pytest.mark.parametrize("text, num_pieces", [("x" * 2000, 3), ("word " * 400, 20), ("", 0), ("short", 1)])
def test_texts_without_lines(tmp_path: Path, text: str, num_pieces: int) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    pieces = list(text_pieces(path, 100))
    assert "".join(pieces) == text and abs(len(pieces) - num_pieces) <= 2


def test_tokens_of_pieces_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    monkeypatch.setattr(module.text_pieces, "__defaults__", (100,))
    path, encoder = text_file(tmp_path), Words()
    seen: list[tuple[int, int]] = []
    made = tokenize(
        [path, path], made_with(encoder), tmp_path / "out.bin", append=0, on_progress=lambda *at: seen.append(at)
    )
    assert encoder.longest < 400
    (expected,) = Words().encode_batch([path.read_text()], add_special_tokens=False)
    source = open_source(
        str(tmp_path / "out.bin"), vocab_size=None, context_length=4, validation_fraction=0.0, cache_dir=tmp_path
    )
    tokens = np.concatenate(source._parts).tolist()
    assert tokens == [*expected.ids, 0] * 2
    assert made == (len(tokens), 2 * path.stat().st_size, 70_000, 4)
    assert seen[-1] == (made.num_text_bytes, made.num_tokens - 1) and seen == sorted(seen)
    header = read_header(tmp_path / "out.bin")
    assert header is not None and header.vocab_size == 70_000 and header.tokenizer == b"h" * 16


def test_a_tokenizer_that_needs_a_text_whole_gets_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.text_pieces, "__defaults__", (100,))
    path, encoder = text_file(tmp_path), Words(prefix=" ")
    assert made_with(Words()).splits_at_lines() and not made_with(encoder).splits_at_lines()
    tokenize([path], made_with(encoder), tmp_path / "out.bin")
    assert encoder.longest == len(path.read_text())
    monkeypatch.setattr(module, "WHOLE_TEXT_BYTES_MAX", 1000)
    with pytest.raises(DataError, match="text.txt: longer than 1000 bytes, and this tokenizer gives other tokens"):
        tokenize([path], made_with(encoder), tmp_path / "other.bin")
    assert sorted(os.listdir(tmp_path)) == ["out.bin", "text.txt"]


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "out.bin"
    tokenizer = made_with(Words())
    with pytest.raises(DataError, match="text.txt: cannot be read: No such file"):
        tokenize([path], tokenizer, out)
    for content in (b"good\n" * 300 + b"caf\xe9 bad", b"cut \xc3"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"text.txt: not UTF-8 \(.*near byte \d+\): convert it"):
            tokenize([path], tokenizer, out)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="no token in .*text.txt: they are empty"):
        tokenize([path], tokenizer, out)
    assert os.listdir(tmp_path) == ["text.txt"]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs the package tokenizers .*: pip install 'elaswave\[tokenize\]'"):
        load_tokenizer(tmp_path / "tokenizer.json")


class Library:
    """Stands for the package `tokenizers`."""

    class Tokenizer:
        @staticmethod
        def from_buffer(content: bytes) -> Any:
            if content != b"good":
                raise Exception("expected value at line 1")
            return Words()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", Library)
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    Path("good.json").write_bytes(b"good")
    Path("bad.json").write_bytes(b"bad")

    def run(*words: str) -> int:
        return main(["data", "tokenize", "text.txt", *words])

    assert run("--tokenizer", "good.json", "--output", "a.bin", "--append-eos", "<|endoftext|>") == 0
    assert re.match(
        r"a.bin: [\d,]+ tokens of 4 bytes from [\d,]+ bytes of text; vocab.* of 70,000$", capsys.readouterr()[0]
    )
    assert run("--tokenizer", "good.json", "--output", "b.bin", "--json") == 0
    assert '"vocab_size": 70000' in capsys.readouterr()[0]
    for words, error in (
        (["--tokenizer", "good.json", "--output", "a.txt"], "takes a file for tokens if its name ends in .bin"),
        (["--tokenizer", "bad.json", "--output", "c.bin"], "bad.json: not a tokenizer's file (expected value at line"),
        (["--tokenizer", "no.json", "--output", "c.bin"], "--tokenizer no.json: cannot be read: No such file"),
        (["--tokenizer", "good.json", "--output", "c.bin", "--append-eos", "</s>"], "no token '</s>'; of the special"),
    ):
        assert run(*words) == 2
        assert error in " ".join(capsys.readouterr()[1].split())
    assert not Path("c.bin").exists()


def test_a_real_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = text_file(tmp_path, 3000)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    trained.train([str(path)], trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.splits_at_lines()
    whole = trained.encode(path.read_text(), add_special_tokens=False).ids
    assert [token for piece in text_pieces(path, 1000) for token in tokenizer.encode([piece])[0]] == whole
    made = tokenize([path], tokenizer, tmp_path / "out.bin", append=tokenizer.id_of("<eos>"))
    assert made.num_tokens == len(whole) + 1 and made.token_bytes == 2
