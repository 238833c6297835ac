"""The private temporary folder of a job (sockets, journal), and those that dead launchers have left.

The folder's lock file is held by the launcher and all processes that it forks, and the kernel lets go of it when the
last of them has ended. So a folder whose lock is free belongs to no running job. (Programs that tidy up temporary
folders by age leave one alone whose lock is held, if they are as careful as systemd's.)
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from elaswave.config.checks import path_problem
from elaswave.errors import LaunchError

PREFIX = "elaswave-"
_LOCK_FILE = "lock"


class JobFolder:
    """A new folder, until `close` or the death of the last process that holds it.

    Raises:
        LaunchError: the system refuses one.
    """

    def __init__(self) -> None:
        if problem := path_problem(tempfile.gettempdir()):
            raise LaunchError(f"TMPDIR: {problem}")
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            unnamed = self.path / f"{_LOCK_FILE}.new"
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / _LOCK_FILE)  # named only now that it is held: no other process can have had it
        except OSError as error:
            raise LaunchError(
                f"no folder for the job's sockets and journal can be made in {tempfile.gettempdir()}: "
                f"{error.strerror}; make room there, or set TMPDIR to another folder"
            ) from error

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_dead() -> list[Path]:
    """Removes the folders of this user's jobs that have no process any more: their launchers were killed.

    Others may have made folders of the same name, to keep a job from starting: nothing of them is opened. No trouble
    here keeps one from starting either.

    Returns:
        Those that it has removed.
    """
    removed = []
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(parent) if name.startswith(PREFIX))
        for name in names:
            with contextlib.suppress(OSError, RecursionError):  # it is in use, or gone meanwhile
                if _removes(parent / name):
                    removed.append(parent / name)
    return removed


def _removes(folder: Path) -> bool:
    """Removes a folder if it is one that this user alone can write to, and whose lock is free."""
    if not _is_own(os.lstat(folder), stat.S_IFDIR):
        return False
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_own(os.fstat(within), stat.S_IFDIR):
            return False
        lock = os.open(_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
        try:
            if not _is_own(os.fstat(lock), stat.S_IFREG):
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    finally:
        os.close(within)
    return True


def _is_own(found: os.stat_result, kind: int) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & others


def refused(error: OSError, what: str, advice: str) -> LaunchError:
    """What to tell when the system refuses something that a job needs."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return LaunchError(f"{what}: {error.strerror} ({name}); {advice}")
