"""Files of tokens with a header: what is written is read, damage is noticed, a failure leaves nothing."""

import os
from pathlib import Path

import numpy as np
import pytest

from elaswave.data.token_files import HEADER_BYTES, TokenHeader, TokenWriter, read_header
from elaswave.errors import DataError

TOKENIZER = bytes(range(16))


def written(path: Path, tokens: list[int], vocab_size: int) -> Path:
    with TokenWriter(path, vocab_size, TOKENIZER) as writer:
        writer.write(tokens[:2])
        writer.write(tokens[2:])
        assert not path.exists()
    return path


@pytest.mark.parametrize("vocab_size, itemsize", [(65536, 2), (65537, 4), (2**32, 4)])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    tokens = [0, 7, vocab_size - 1, 3]
    path = written(tmp_path / "t.bin", tokens, vocab_size)
    assert read_header(path) == TokenHeader(itemsize, vocab_size, 4, TOKENIZER)
    assert np.fromfile(path, dtype=f"<u{itemsize}", offset=HEADER_BYTES).tolist() == tokens
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["t.bin"]


def test_what_is_no_such_file_has_no_header(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    assert read_header(path) is None
    for content in (b"", b"elaswave tokens", bytes(100)):
        path.write_bytes(content)
        assert read_header(path) is None


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.bin", [1, 2, 3], 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="has 69 bytes, but its header says 3 tokens of 2 bytes, so 70 bytes"):
        read_header(path)
    path.write_bytes(whole[:16] + b"\2" + whole[17:])
    with pytest.raises(
        DataError, match="header has version 2 and tokens of 2 bytes, but this elaswave reads version 1"
    ):
        read_header(path)


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="tokens from 1 to 10, but the vocabulary has 10"):
        with TokenWriter(path, 10, TOKENIZER) as writer:
            writer.write([1, 10])
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["t.bin"]
    for vocab_size in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="vocab_size is"):
            TokenWriter(path, vocab_size, TOKENIZER)


def test_a_folder_or_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="absent/t.bin: cannot be written: No such file or directory"):
        TokenWriter(tmp_path / "absent" / "t.bin", 10, TOKENIZER)

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(DataError, match="t.bin: cannot be written: No space left on device"):
        written(tmp_path / "t.bin", [1, 2], 10)
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="cannot be written: No space left"),
        TokenWriter(tmp_path / "t.bin", 10, TOKENIZER) as writer,
    ):
        writer._file.close()
        writer._file = open("/dev/full", "wb", buffering=0)  # the writer closes it
        writer.write([1])
    assert os.listdir(tmp_path) == []
