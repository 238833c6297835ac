"""Files that a process has open for reading get places of their own in the processes that it forks."""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elaswave.errors import UsageError
from elaswave.job import script as module
from elaswave.job.script import ReadFile, apart, at_present, open_anew, open_descriptors, read_files
from elaswave.system.processes import fork

TEXT = "".join(f"line {number}\n" for number in range(5000))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "text").write_text(TEXT)
    before = open_descriptors()
    yield tmp_path
    assert open_descriptors() == before


def new_files(before: frozenset[int]) -> tuple[ReadFile, ...]:
    """Those that a test has opened."""
    return read_files(before)


def in_a_child(folder: Path, files: tuple[ReadFile, ...], body: Callable[[], Any]) -> str:
    """What a forked process finds, with places of its own."""

    def tell() -> int:
        (folder / "said").write_text(repr(body()))
        return 0

    child = fork("a child", folder / "log", apart(files, tell), let_go=lambda: None)
    assert child.reap() == 0, (folder / "log").read_text()
    return (folder / "said").read_text()


def test_a_child_reads_on_where_the_file_stood_and_moves_nobodys_place(folder: Path) -> None:
    before = open_descriptors()
    with open(folder / "text", "rb") as raw, open(folder / "text") as text:
        raw.seek(21)
        assert text.readline() == "line 0\n"  # the rest of the buffer is read on in each process
        os.set_inheritable(raw.fileno(), True)
        at = os.lseek(text.fileno(), 0, os.SEEK_CUR)

        def body() -> Any:
            assert os.get_inheritable(raw.fileno()) and not os.get_inheritable(text.fileno())
            return raw.read(6), len(text.readlines()), raw.seek(0, os.SEEK_END)

        assert in_a_child(folder, new_files(before), body) == repr((b"line 3", 4999, len(TEXT)))
        assert os.lseek(text.fileno(), 0, os.SEEK_CUR) == at
        assert raw.read(6) == b"line 3" and len(text.readlines()) == 4999


def test_the_place_is_that_of_the_fork_though_the_parent_reads_on(folder: Path) -> None:
    before = open_descriptors()
    with open(folder / "text", "rb", buffering=0) as file:
        files = new_files(before)
        file.seek(7)
        places = at_present(files)
        file.seek(70)
        open_anew(places)
        assert file.read(6) == b"line 1"


def test_descriptors_that_share_a_place_go_on_sharing_it(folder: Path) -> None:
    before = open_descriptors()
    with open(folder / "text", "rb", buffering=0) as one, open(folder / "text", "rb", buffering=0) as alone:
        with open(os.dup(one.fileno()), "rb", buffering=0) as same:
            files = new_files(before)
            assert [file.fds for file in files] == [(one.fileno(), same.fileno()), (alone.fileno(),)]
            assert [os.lseek(file.fds[0], 0, os.SEEK_CUR) for file in files] == [0, 0], "they are where they were"

            def body() -> Any:
                same.seek(14)
                return one.read(6), alone.read(6)

            assert in_a_child(folder, files, body) == repr((b"line 2", b"line 0"))
            assert one.tell() == 0


def test_files_without_a_name_or_closed_or_opened_otherwise_are_met(folder: Path) -> None:
    before = open_descriptors()
    with contextlib.ExitStack() as opened:
        gone = opened.enter_context(open(folder / "text", "rb", buffering=0))
        os.unlink(folder / "text")
        (folder / "text").write_text("another one")
        closed = open(folder / "text", "rb")
        other = opened.enter_context(open(folder / "text", "rb"))
        files = new_files(before)
        assert len(files) == 3
        closed.close()
        os.dup2(gone.fileno(), other.fileno())  # the number means another file now
        assert [file.fds for file in at_present(files)] == [(gone.fileno(),)]
        assert in_a_child(folder, files, lambda: gone.read(6)) == repr(b"line 0")


def test_only_files_for_reading_are_opened_anew(folder: Path) -> None:
    before = open_descriptors()
    with contextlib.ExitStack() as opened:
        for mode in ("r+b", "ab", "a+b"):
            opened.enter_context(open(folder / "text", mode))
        opened.enter_context(open("/dev/zero", "rb"))
        ours, theirs = os.pipe()
        opened.callback(os.close, ours)
        opened.callback(os.close, theirs)
        opened.callback(os.close, os.open(folder, os.O_RDONLY))
        opened.callback(os.close, os.open(folder / "text", os.O_PATH))
        assert new_files(before) == ()
        file = opened.enter_context(open(folder / "text", "rb"))
        assert [found.fds for found in new_files(before)] == [(file.fileno(),)]
        assert file.fileno() not in {fd for found in read_files(open_descriptors()) for fd in found.fds}


def test_flags_are_kept_but_one_that_only_an_owner_may_ask_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME
    with open(os.open(folder / "text", flags), "rb") as file:
        (found,) = new_files(before)
        assert found.flags & (os.O_NONBLOCK | os.O_NOATIME) == os.O_NONBLOCK | os.O_NOATIME
        asked: list[int] = []

        def refused(path: str, flags: int) -> int:
            asked.append(flags)
            if flags & os.O_NOATIME:
                raise PermissionError(1, "Operation not permitted")
            return opened(path, flags)

        opened = os.open
        monkeypatch.setattr(module.os, "open", refused)
        open_anew([found])
        assert [bool(each & os.O_NOATIME) for each in asked] == [True, False]
        assert all(each & os.O_NONBLOCK and each & os.O_CLOEXEC for each in asked)
        assert file.read(4) == b"line"


def test_a_file_that_cannot_be_opened_once_more_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    with open(folder / "text", "rb") as file, open(folder / "other", "w+b") as other:
        (found,) = new_files(before)

        def refused(path: str, flags: int) -> int:
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "open", refused)
            with pytest.raises(UsageError, match=r"/text is open for reading .* \(Permission denied\).*__getitem__"):
                open_anew([found])
        with pytest.raises(UsageError, match="another file is found under its name"):
            open_anew([found._replace(fds=(other.fileno(), file.fileno()))])
        assert file.read(4) == b"line"


def test_a_reader_of_archives_works_in_each_process(folder: Path) -> None:
    before = open_descriptors()
    with zipfile.ZipFile(folder / "archive", "w") as archive:
        for number in range(20):
            archive.writestr(str(number), f"member {number} " * 1000)
    with zipfile.ZipFile(folder / "archive") as archive:
        files = new_files(before)
        with io.TextIOWrapper(archive.open("7")) as member:
            assert member.read(8) == "member 7"
            found = in_a_child(folder, files, lambda: (archive.read("3")[:8], member.read(9)))
            assert found == repr((b"member 3", " member 7"))
            assert member.read(9) == " member 7"
