"""What a script brings to its job beside the configuration, and the options of the command that runs it. No torch here.

A script makes its `Trainer` by itself, so the options of ``elaswave run``, which are stronger than the script's own,
wait in a `ScriptSession`, in the one process that runs the script. Without the command there are none.

Files that a script has open when it trains: each process of the job gets a place of its own in them. A fork shares open
files, and with them the place up to which each has been read: of two processes that seek and read, one gets the bytes
that the other has asked for. So each process that runs a person's code first opens anew what the script, or its code in
the forkserver, has open for reading only, under the same number and at the same place. Never elaswave's own files,
whose locks must last as long as a child lives, and never files that are open for writing.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fcntl import F_GETFL, fcntl
from pathlib import Path
from typing import Any, NamedTuple

from elaswave.config.schema import Config
from elaswave.errors import UsageError
from elaswave.observability.result import RunResult
from elaswave.observability.run_folder import saved_config

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


class JobOptions(NamedTuple):
    """How a job is run, beside its configuration."""

    run_dir: Path | None = None
    """Folder for everything that the run writes; None: a new one below ``runs``."""
    resume: bool = False
    """Go on from the newest valid checkpoint of the folder."""
    overwrite: bool = False
    """Replace the run that the folder holds."""
    profile: bool = False
    """Write a trace."""
    fault_specs: tuple[str, ...] = ()
    """Faults to inject, as ``--fault`` takes them."""
    as_json: bool = False
    """Standard output belongs to a JSON document: progress goes to standard error."""

    def saved_config(self) -> Config | None:
        """Reads the configuration of the run that is resumed, if one is.

        Raises:
            UsageError: options that contradict each other.
            RunFolderError: there is no run to resume.
        """
        if self.resume and self.overwrite:
            raise UsageError("--resume goes on with a run and --overwrite removes it; give one of them")
        if self.resume and self.run_dir is None:
            raise UsageError("--resume needs --run-dir, the folder of the run to go on with (a Trainer its run_dir)")
        return saved_config(self.run_dir) if self.resume and self.run_dir is not None else None


class FinishedJob(NamedTuple):
    """A job that has ended well."""

    run_dir: Path
    result: RunResult


class ScriptSession:
    """The command's options, and the jobs that the script has run.

    Args:
        options: of the jobs.
        workers: number of workers; None: the script decides.
        overrides: as ``--set`` takes them.
    """

    def __init__(self, options: JobOptions, workers: int | None, overrides: tuple[str, ...]) -> None:
        self.workers = workers
        self.overrides = overrides
        self.jobs: list[FinishedJob] = []
        """Those that have ended well."""
        self._options = options
        self._num_begun = 0

    def begin_job(self, run_dir: Path | None, resume: bool) -> JobOptions:
        """Returns the options of the script's next job.

        Args:
            run_dir, resume: as the script has them.
        Raises:
            UsageError: the command's options are for one job, and the script runs another one.
        """
        self._num_begun += 1
        given = self._options
        for option, is_set in (
            ("--run-dir", given.run_dir is not None),
            ("--resume", given.resume),
            ("--overwrite", given.overwrite),
            ("--json", given.as_json),
        ):
            if is_set and self._num_begun > 1:
                raise UsageError(
                    f"the script trains a second time, and {option} is for one training: leave it out, and give "
                    "run_dir to each Trainer"
                )
        return given._replace(run_dir=given.run_dir or run_dir, resume=given.resume or (resume and not given.overwrite))

    @property
    def has_begun(self) -> bool:
        """Whether the script has begun to train."""
        return self._num_begun > 0


_NO_COMMAND = ScriptSession(JobOptions(), None, ())
_current: ScriptSession | None = None


def current_session() -> ScriptSession:
    """Returns the session of the command that runs this process's script; one without options where there is none."""
    return _NO_COMMAND if _current is None else _current


@contextlib.contextmanager
def active(session: ScriptSession) -> Iterator[ScriptSession]:
    """Makes the script's trainers get their options from this session while inside."""
    global _current
    before, _current = _current, session
    try:
        yield session
    finally:
        _current = before


def open_descriptors() -> frozenset[int]:
    """Lists the numbers of what this process has open."""
    return frozenset(fd for fd in map(int, os.listdir("/proc/self/fd")) if _stat(fd) is not None)


def read_files(besides: Collection[int] = _STREAMS) -> tuple[ReadFile, ...]:
    """Lists the regular files and block devices that this process has open for reading only, and can seek in.

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
    """Returns the files with the places where they are now, without those that have been closed; to be asked just
    before a fork, since whoever forks reads on."""
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
    """Makes a body for `elaswave.system.processes.fork` that opens files anew first. It is to be made just before the
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
    """Describes what is open under a number; None if that is no file for reading only, or has no place."""
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
    """Opens the file once more, also if it has no name any more."""
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
