"""Token sources: samples, splits, the cached documentation text, and everything that is refused."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elaswave.data import samples
from elaswave.data.samples import (
    PYTHON_DOCS,
    MappedTokens,
    known_vocabulary,
    open_source,
    python_docs_text,
    write_python_docs,
)
from elaswave.data.token_files import TokenWriter
from elaswave.errors import DataError


def opened(source: Path | str, cache_dir: Path, **changes: Any) -> MappedTokens:
    options = {"vocab_size": None, "context_length": 4, "validation_fraction": 0.0, "cache_dir": cache_dir, **changes}
    return open_source(str(source), **options)


def bytes_file(folder: Path, num_bytes: int) -> Path:
    path = folder / "text.txt"
    path.write_bytes(bytes(index % 251 for index in range(num_bytes)))
    return path


def bin_file(folder: Path, tokens: list[int] | np.ndarray) -> Path:
    path = folder / "tokens.bin"
    np.asarray(tokens, dtype="<u2").tofile(path)
    return path


class TestSamples:
    def test_sample_i_is_its_window_with_targets_shifted_by_one(self, tmp_path: Path):
        source = opened(bytes_file(tmp_path, 23), tmp_path)
        assert source.vocab_size == 256
        assert source.num_tokens("train") == 23 and source.num_samples("train") == 5
        tokens_BT, targets_BT = source.batch([3, 0, 3], "train")
        assert tokens_BT.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3], [12, 13, 14, 15]]
        assert targets_BT.tolist() == [[13, 14, 15, 16], [1, 2, 3, 4], [13, 14, 15, 16]]

    def test_batches_are_contiguous_int64_and_the_callers_own(self, tmp_path: Path):
        source = opened(bytes_file(tmp_path, 23), tmp_path)
        for tensor in source.batch([0, 1], "train"):
            assert tensor.dtype == torch.int64 and tensor.shape == (2, 4) and tensor.is_contiguous()
            tensor.zero_()
        assert source.batch([1], "train")[0].tolist() == [[4, 5, 6, 7]]

    def test_an_empty_batch(self, tmp_path: Path):
        tokens_BT, targets_BT = opened(bytes_file(tmp_path, 23), tmp_path).batch([], "train")
        assert tokens_BT.shape == targets_BT.shape == (0, 4)

    @pytest.mark.parametrize("num_tokens, num_samples", [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
    def test_the_last_target_belongs_to_the_sample(self, num_tokens: int, num_samples: int, tmp_path: Path):
        assert opened(bytes_file(tmp_path, num_tokens), tmp_path).num_samples("train") == num_samples

    def test_the_last_part_is_for_validation(self, tmp_path: Path):
        source = opened(bytes_file(tmp_path, 40), tmp_path, validation_fraction=0.25)
        assert (source.num_tokens("train"), source.num_tokens("validation")) == (30, 10)
        assert (source.num_samples("train"), source.num_samples("validation")) == (7, 2)
        assert source.batch([1], "validation")[1].tolist() == [[35, 36, 37, 38]]

    def test_bin_tokens_are_little_endian_uint16(self, tmp_path: Path):
        path = tmp_path / "tokens.bin"
        path.write_bytes(bytes([1, 2, 255, 255, 0, 0, 7, 0, 1, 0]))
        source = opened(path, tmp_path, vocab_size=65536)
        assert source.vocab_size == 65536
        assert source.batch([0], "train")[0].tolist() == [[513, 65535, 0, 7]]

    def test_a_large_file_is_mapped_not_read(self, tmp_path: Path):
        path = tmp_path / "sparse.txt"
        with open(path, "wb") as file:
            file.truncate(1 << 36)
        tokens = samples._map_file(samples.TokenFile(path, None))
        assert len(tokens) == 1 << 36 and not tokens[-5:].any()

    @pytest.mark.parametrize("num_left", [0, 22])
    def test_a_file_that_is_cut_short_while_it_is_in_use(self, num_left: int, tmp_path: Path):
        path = bytes_file(tmp_path, 23)
        source = opened(path, tmp_path)
        source.batch([0], "train")
        os.truncate(path, num_left)
        if not num_left:
            path.write_bytes(b"x")  # else the first page is gone, and the process with it
        with pytest.raises(DataError, match=r"text\.txt was cut short while it was in use: it had 23 bytes, and has "):
            source.batch([0], "train")

    def test_a_file_that_is_replaced_or_grows_while_it_is_in_use(self, tmp_path: Path):
        path = bytes_file(tmp_path, 23)
        source = opened(path, tmp_path)
        before = source.batch([4], "train")[0]
        with path.open("ab") as file:
            file.write(b"more")
        path.rename(tmp_path / "old")
        path.write_bytes(b"new")
        assert torch.equal(source.batch([4], "train")[0], before)

    @pytest.mark.parametrize("index", [-1, 5])
    def test_a_sample_that_is_not_there(self, index: int, tmp_path: Path):
        source = opened(bytes_file(tmp_path, 23), tmp_path)
        with pytest.raises(IndexError, match=rf"sample {index} is outside \[0, 5\) of the train split"):
            source.batch([0, index], "train")

    def test_tilde_means_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        bytes_file(tmp_path, 23)
        assert opened("~/text.txt", tmp_path).num_samples("train") == 5


class TestSeveralFiles:
    def test_they_are_one_run_of_tokens(self, tmp_path: Path):
        for name, content in (("c", b"ijklmnop"), ("a", b"abc"), ("b", b"defgh")):
            (tmp_path / f"{name}.txt").write_bytes(content)
        source = opened(f"{tmp_path}/*.txt", tmp_path)
        assert [path.name for path in source.paths] == ["a.txt", "b.txt", "c.txt"]
        tokens_BT, targets_BT = source.batch([0, 1, 2], "train")
        assert [bytes(row) for row in tokens_BT.tolist()] == [b"abcd", b"efgh", b"ijkl"]
        assert [bytes(row) for row in targets_BT.tolist()] == [b"bcde", b"fghi", b"jklm"]
        listed = open_source(
            [str(tmp_path / "c.txt"), f"{tmp_path}/[ab].txt"],
            vocab_size=None, context_length=4, validation_fraction=0.25, cache_dir=tmp_path,
        )  # fmt: skip
        assert bytes(listed.batch([1], "train")[0][0].tolist()) == b"mnop"
        assert (listed.num_tokens("train"), listed.num_tokens("validation")) == (12, 4)

    def test_a_sample_may_lie_in_many_files(self, tmp_path: Path):
        for index in range(9):
            (tmp_path / f"{index}.txt").write_bytes(bytes([index]))
        assert opened(f"{tmp_path}/?.txt", tmp_path).batch([1], "train")[1].tolist() == [[5, 6, 7, 8]]

    def test_a_name_that_exists_is_no_pattern(self, tmp_path: Path):
        path = bytes_file(tmp_path, 9).rename(tmp_path / "a[1].txt")
        assert opened(path, tmp_path).paths == (path,)

    def test_a_folder_that_exists_is_no_part_of_a_pattern(self, tmp_path: Path):
        folder = tmp_path / "a[1]" / "b?*"
        folder.mkdir(parents=True)
        path = bytes_file(tmp_path, 9).rename(folder / "x.txt")
        assert opened(f"{folder}/*.txt", tmp_path).paths == (path,)
        assert opened(f"{tmp_path}/a[1]/**/x.tx?", tmp_path).paths == (path,)
        with pytest.raises(DataError, match="no file matches"):
            opened(f"{folder}/[y].txt", tmp_path)

    def test_a_pattern_without_a_match(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"\*.txt: no file matches this pattern \(working directory"):
            opened(f"{tmp_path}/*.txt", tmp_path)

    def test_texts_and_tokens_do_not_mix(self, tmp_path: Path):
        names = [str(bytes_file(tmp_path, 9)), str(bin_file(tmp_path, [1] * 9))]
        with pytest.raises(DataError, match="text.txt and .*tokens.bin: bytes of text and .bin files .* one source"):
            open_source(names, vocab_size=9, context_length=4, validation_fraction=0.0, cache_dir=tmp_path)


class TestHeaders:
    def written(self, path: Path, tokens: list[int], vocab_size: int, tokenizer: bytes = b"t" * 16) -> Path:
        with TokenWriter(path, vocab_size, tokenizer) as writer:
            writer.write(tokens)
        return path

    def test_a_file_says_what_its_tokens_are(self, tmp_path: Path):
        small = self.written(tmp_path / "small.bin", [1, 2, 3, 65535, 5], 65536)
        large = self.written(tmp_path / "large.bin", [65536, 7, 8, 9, 100_000], 100_001)
        assert (small.stat().st_size, large.stat().st_size) == (64 + 2 * 5, 64 + 4 * 5)
        assert opened(small, tmp_path).vocab_size == 65536
        source = opened(f"{tmp_path}/*.bin", tmp_path)
        assert source.vocab_size == 100_001 == known_vocabulary(f"{tmp_path}/*.bin")
        assert source.batch([0, 1], "train")[1].tolist() == [[7, 8, 9, 100_000], [1, 2, 3, 65535]]

    def test_what_has_no_header_says_nothing(self, tmp_path: Path):
        with_header = self.written(tmp_path / "a.bin", [1] * 9, 10)
        assert known_vocabulary([str(with_header), str(bin_file(tmp_path, [1] * 9))]) is None
        assert known_vocabulary(PYTHON_DOCS) is known_vocabulary(str(bytes_file(tmp_path, 9))) is None
        assert known_vocabulary(str(tmp_path / "absent.bin")) is None
        with pytest.raises(DataError, match="tokens.bin: a .bin file without a header"):
            opened(f"{tmp_path}/*.bin", tmp_path)
        assert opened(f"{tmp_path}/*.bin", tmp_path, vocab_size=10).num_tokens("train") == 18

    def test_a_smaller_vocabulary_is_refused(self, tmp_path: Path):
        path = self.written(tmp_path / "a.bin", [1] * 9, 70_000)
        with pytest.raises(DataError, match="header says 70000 different tokens, but data.vocab_size is 256"):
            opened(path, tmp_path, vocab_size=256)
        assert opened(path, tmp_path, vocab_size=70_016).vocab_size == 70_016

    def test_tokenizers_do_not_mix(self, tmp_path: Path):
        self.written(tmp_path / "a.bin", [1] * 9, 10)
        self.written(tmp_path / "b.bin", [1] * 9, 10, tokenizer=b"u" * 16)
        with pytest.raises(DataError, match="a.bin and .*b.bin were made with different tokenizers"):
            opened(f"{tmp_path}/*.bin", tmp_path)


class TestPythonDocs:
    def test_is_text_of_some_length(self, tmp_path: Path):
        source = opened(PYTHON_DOCS, tmp_path / "new" / "cache", context_length=64, validation_fraction=0.1)
        assert source.num_samples("train") > 5000 and source.num_samples("validation") > 500
        tokens_BT, _ = source.batch([0], "train")
        assert bytes(tokens_BT[0].tolist()) == python_docs_text()[:64]
        python_docs_text().decode()

    def test_is_written_once(self, tmp_path: Path):
        path = write_python_docs(tmp_path)
        before = path.stat()
        assert write_python_docs(tmp_path) == path
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert path.read_bytes() == python_docs_text()
        assert path.stat().st_mode & 0o777 == 0o644

    def test_a_damaged_copy_is_replaced(self, tmp_path: Path):
        path = write_python_docs(tmp_path)
        path.write_bytes(b"half a te")
        write_python_docs(tmp_path)
        assert path.read_bytes() == python_docs_text()

    def test_processes_that_write_at_once_leave_one_whole_file(self, tmp_path: Path):
        code = (
            "import sys; from pathlib import Path; from elaswave.data.samples import write_python_docs as w\n"
            "sys.stdin.readline()\nfor _ in range(20):\n"
            "    p = w(Path(sys.argv[1])); assert p.stat().st_size == int(sys.argv[2])\n"
        )
        size = len(python_docs_text())
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path), str(size)], stdin=subprocess.PIPE, env=environment
            )
            for _ in range(3)
        ]
        for process in running:  # all have started by the time the last one is let go
            process.communicate(b"go\n", timeout=120)
        assert [process.returncode for process in running] == [0, 0, 0]
        (only,) = tmp_path.iterdir()
        assert only.read_bytes() == python_docs_text()

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def full_disk(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full_disk)
        with pytest.raises(DataError, match="cannot write the text of 'python-docs' to .* No space left on device"):
            write_python_docs(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(DataError, match="cannot write .*: Not a directory: make the folder writable"):
            write_python_docs(tmp_path / "file" / "cache")

    def test_a_python_without_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
        with pytest.raises(DataError, match="this Python has no module pydoc_data.topics .* install Python's"):
            opened(PYTHON_DOCS, tmp_path)


class TestRefusals:
    def test_a_missing_file(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"absent.txt: no such file \(working directory /.*must be 'python-docs'"):
            opened(tmp_path / "absent.txt", tmp_path)

    def test_a_folder(self, tmp_path: Path):
        with pytest.raises(DataError, match="cannot be read: Is a directory"):
            opened(tmp_path, tmp_path)

    def test_a_pipe_does_not_hang(self, tmp_path: Path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="not a regular file"):
            opened(tmp_path / "pipe", tmp_path)

    def test_a_device(self, tmp_path: Path):
        with pytest.raises(DataError, match="not a regular file"):
            opened("/dev/zero", tmp_path)

    def test_a_socket_cannot_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.chdir(tmp_path)  # socket paths are short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
            with pytest.raises(DataError, match="socket: cannot be read: No such device or address"):
                opened("socket", tmp_path)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_without_permission(self, tmp_path: Path):
        path = bytes_file(tmp_path, 23)
        path.chmod(0)
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            opened(path, tmp_path)

    def test_an_empty_file(self, tmp_path: Path):
        with pytest.raises(DataError, match="the file is empty"):
            opened(bytes_file(tmp_path, 0), tmp_path)

    def test_too_few_tokens(self, tmp_path: Path):
        with pytest.raises(DataError, match=r"4 of its 4 tokens are for training, but one sample needs 5"):
            opened(bytes_file(tmp_path, 4), tmp_path)
        with pytest.raises(DataError, match=r"3 of its 6 tokens are for training, but one sample needs 5"):
            opened(bytes_file(tmp_path, 6), tmp_path, validation_fraction=0.5)

    def test_too_few_tokens_for_validation_are_refused_where_it_is_asked_for(self, tmp_path: Path):
        source = opened(bytes_file(tmp_path, 40), tmp_path, validation_fraction=0.1)
        assert source.num_samples("validation") == 0
        with pytest.raises(DataError, match="4 of its 40 tokens are for validation, but one sample needs 5"):
            source.require_sample("validation")
        opened(bytes_file(tmp_path, 50), tmp_path, validation_fraction=0.1).require_sample("validation")

    def test_half_a_token(self, tmp_path: Path):
        path = bin_file(tmp_path, [1] * 20)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match="39 bytes are no whole number of tokens of 2 bytes"):
            opened(path, tmp_path, vocab_size=10)

    def test_a_bin_file_without_a_vocabulary(self, tmp_path: Path):
        with pytest.raises(DataError, match="tokens.bin: a .bin file without a header .* set data.vocab_size"):
            opened(bin_file(tmp_path, [1] * 20), tmp_path)

    @pytest.mark.parametrize("position", [0, 6, 7, 29])
    def test_a_token_outside_the_vocabulary(self, position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(samples, "_CHECK_CHUNK_TOKENS", 7)  # so that positions in later chunks are met
        tokens = np.arange(30) % 10
        tokens[position:] = 9
        tokens[position] = 700
        with pytest.raises(DataError, match=rf"token 700 at position {position} is outside .*size is 10, .* 0 to 9"):
            opened(bin_file(tmp_path, tokens), tmp_path, vocab_size=10)

    def test_bytes_outside_a_smaller_vocabulary(self, tmp_path: Path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"plain text, caf\xc3\xa9")
        with pytest.raises(DataError, match="token 195 at position 15 is outside the vocabulary"):
            opened(path, tmp_path, vocab_size=128)
        path.write_bytes(b"plain text, cafe")
        assert opened(path, tmp_path, vocab_size=128).vocab_size == 128

    def test_programming_errors(self, tmp_path: Path):
        with pytest.raises(ValueError, match="context_length is 0"):
            opened(bytes_file(tmp_path, 23), tmp_path, context_length=0)
        with pytest.raises(ValueError, match="validation_fraction is 1"):
            opened(bytes_file(tmp_path, 23), tmp_path, validation_fraction=1.0)
