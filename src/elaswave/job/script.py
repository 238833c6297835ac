"""What a script brings to its job, beside the configuration. No torch here: the launcher imports this.

Files that a script has open when it trains: each process of the job gets a place of its own in them.

A fork shares open files, and with them the place up to which each has been read: of two processes that seek and read,
one gets the bytes that the other has asked for. So each process that runs a person's code first opens anew what the
script, or its code in the forkserver, has open for reading only, under the same number and at the same place. Never
elaswave's own files, whose locks must last as long as a child lives, and never files that are open for writing.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fcntl import F_GETFL, fcntl
from typing import Any, NamedTuple

from elaswave.errors import UsageError

_STREAMS = (0, 1, 2)
"""Every process of a job leads these elsewhere."""


class ReadFile(NamedTuple):
    """A file that is open for reading only."""

    fds: tuple[int, ...]
    """They share one place, as `os.dup` makes them."""
    device: int
    inode: int
    flags: int
    """That it was opened with, as far as the kernel keeps them."""
    offset: int
    """The place, in bytes."""


def open_descriptors() -> frozenset[int]:
    """Numbers of what this process has open."""
    return frozenset(fd for fd in map(int, os.listdir("/proc/self/fd")) if _stat(fd) is not None)


def read_files(besides: Collection[int] = _STREAMS) -> tuple[ReadFile, ...]:
    """The regular files and block devices that this process has open for reading only, and can seek in.

    No other thread may use them meanwhile: descriptors that share a place are found by moving one.

    Args:
        besides: descriptors that are left out.
    """
    found: list[ReadFile] = []
    for fd in sorted(open_descriptors() - set(besides)):
        file = _read_file(fd)
        if file is None:
            continue
        index = next((index for index, other in enumerate(found) if _share_place(file, other)), None)
        if index is None:
            found.append(file)
        else:
            found[index] = found[index]._replace(fds=(*found[index].fds, fd))
    return tuple(found)


def at_present(files: Iterable[ReadFile]) -> tuple[ReadFile, ...]:
    """The files with the places where they are now, without those that have been closed; to be asked just before a
    fork, since whoever forks reads on."""
    return tuple(_at_present(files))


def open_anew(files: Iterable[ReadFile]) -> None:
    """Gives this process places of its own in files that it has inherited: those that they had before the fork.

    Args:
        files: as `at_present` has found them.
    Raises:
        UsageError: a file cannot be opened once more.
    """
    for file in files:
        try:
            own = _opened(file)
        except OSError as error:
            raise _refusal(file, error.strerror or str(error)) from error
        try:
            here = os.fstat(own)
            if (here.st_dev, here.st_ino) != (file.device, file.inode):
                raise _refusal(file, "another file is found under its name")
            os.lseek(own, file.offset, os.SEEK_SET)
            for fd in file.fds:
                os.dup2(own, fd, inheritable=os.get_inheritable(fd))
        finally:
            os.close(own)


def apart(files: Sequence[ReadFile], body: Callable[[], int]) -> Callable[[], int]:
    """A body for `elaswave.system.processes.fork` that opens files anew first. To be made just before the
    fork.

    Args:
        files: that this process shares with no other one that runs.
        body: the rest.
    """
    places = at_present(files)

    def run() -> int:
        open_anew(places)
        return body()

    return run


def _at_present(files: Iterable[ReadFile]) -> Iterator[ReadFile]:
    for file in files:
        now = {fd: _read_file(fd) for fd in file.fds}
        same = [fd for fd, it in now.items() if it is not None and (it.device, it.inode) == (file.device, file.inode)]
        if same:
            it = now[same[0]]
            assert it is not None
            yield it._replace(fds=tuple(same))


def _stat(fd: int) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.fstat(fd)
    return None


def _read_file(fd: int) -> ReadFile | None:
    """What is open under a number; None if that is no file for reading only, or has no place."""
    status = _stat(fd)
    if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        return None
    flags = fcntl(fd, F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_PATH:
        return None
    with contextlib.suppress(OSError):  # a stream of the kernel's, which nobody can seek in
        return ReadFile((fd,), status.st_dev, status.st_ino, flags, os.lseek(fd, 0, os.SEEK_CUR))
    return None


def _share_place(one: ReadFile, other: ReadFile) -> bool:
    if one._replace(fds=other.fds) != other:
        return False
    aside = one.offset - 1 if one.offset else 1
    os.lseek(one.fds[0], aside, os.SEEK_SET)
    try:
        return os.lseek(other.fds[0], 0, os.SEEK_CUR) == aside
    finally:
        os.lseek(one.fds[0], one.offset, os.SEEK_SET)


def _opened(file: ReadFile) -> int:
    """The file once more, also if it has no name any more."""
    path = f"/proc/self/fd/{file.fds[0]}"
    try:
        return os.open(path, file.flags | os.O_CLOEXEC)
    except PermissionError:
        return os.open(path, file.flags & ~os.O_NOATIME | os.O_CLOEXEC)  # which only a file's owner may ask for


def _refusal(file: ReadFile, reason: str) -> UsageError:
    path = f"descriptor {file.fds[0]}"
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{file.fds[0]}")
    return UsageError(
        f"{path} is open for reading where train() was called, and a process of the job cannot open it once more "
        f"({reason}); processes that share an open file read each other's bytes: open it where it is first read (in "
        "__getitem__), or close it before train()"
    )


class Script(NamedTuple):
    """A script's training, and how its processes begin.

    The process that launches a script's job is the script's own: callbacks may have started threads in it, and
    libraries have left state. So it forks nothing but the forkserver, and that only where it may.
    """

    training: Any
    """An `elaswave.training.definition.Training`."""
    environment: Mapping[str, str] | None
    """Of a fresh interpreter that becomes the forkserver and gets the training pickled; None: the forkserver is
    forked."""
    on_step: Callable[[int, float, Mapping[str, float]], None]
    """Called in this process after each committed step, in order and once, with its number and loss."""
    files: Mapping[str, bytes] = {}
    """To be kept in the run's folder, under ``huggingface``, by name: what an export needs of a transformers model."""
    read_files: tuple[ReadFile, ...] = ()
    """That the script has open, and that a fork inherits."""
