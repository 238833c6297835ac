"""Folders of others where jobs make theirs: a start looks at none of them, and none keeps it from starting."""

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.security.attacker import as_another, needs_root

from elaswave.launcher.resources import PREFIX, JobFolder, sweep_dead

pytestmark = pytest.mark.security

DEPTH = 1200
"""More than Python's limit of calls within each other."""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, which others reach."""
    shared = Path(tempfile.mkdtemp(dir="/tmp"))
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    yield shared
    subprocess.run(["rm", "-rf", str(shared)], check=True)


def make_deep(folder: Path) -> None:
    (folder / "lock").touch()
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)


def make_fifo(folder: Path) -> None:
    os.mkfifo(folder / "lock", 0o666)


def make_leased(folder: Path) -> None:
    """Who opens it waits for the lease to be given up: 45 s by default."""
    (folder / "lock").touch()
    lease = os.open(folder / "lock", os.O_RDONLY)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def make_link(folder: Path) -> None:
    (folder / "lock").symlink_to("/etc/passwd")


def make_socket(folder: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(folder / "lock"))


@needs_root
@pytest.mark.parametrize("make", [make_deep, make_fifo, make_leased, make_link, make_socket])
def test_folders_of_another_user_are_left_alone(make, temporary: Path) -> None:
    folder = temporary / f"{PREFIX}trap"

    def act() -> None:
        os.umask(0)
        folder.mkdir(mode=0o777)
        make(folder)

    with as_another(act):
        assert sweep_dead() == []
        own = JobFolder()
        own.close()
    assert os.path.lexists(folder / "lock")


def test_a_link_to_an_own_folder_is_not_followed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "lock").touch(mode=0o600)
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}file").touch()
    assert sweep_dead() == [] and (elsewhere / "lock").exists()


def test_an_own_folder_that_others_may_write_to_is_left_alone(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}open"
    folder.mkdir()
    (folder / "lock").touch(mode=0o600)
    folder.chmod(0o777)
    assert sweep_dead() == []
    folder.chmod(0o700)
    assert sweep_dead() == [folder]


def test_an_own_folder_that_cannot_be_removed_keeps_nobody_from_starting(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}deep"
    folder.mkdir(mode=0o700)
    make_deep(folder)
    (folder / "lock").chmod(0o600)
    sweep_dead()
