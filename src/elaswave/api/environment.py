"""What processes that compute find in their environment before libraries are loaded, and their children inherit; and
what no child may find there: the job's key. And whether a script's process may fork, or starts a fresh interpreter.

Whoever prepares the environment imports this first, so it imports nothing that loads such a library.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from elaswave.errors import UsageError
from elaswave.job.keys import JobKey, key_of_text, read_key

COORDINATOR_VARIABLE = "ELASWAVE_COORDINATOR"
"""Where agents dial their coordinator, if their command does not say."""
KEY_FILE_VARIABLE = "ELASWAVE_KEY_FILE"
KEY_VARIABLE = "ELASWAVE_KEY"

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
RANDOM = "random"
"""What Python takes for a seed that it draws by itself."""

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by the numeric libraries when they are loaded. Two threads add in another order than one."""
_COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it compiles (inductor, Triton, AOTAutograd), and loads it from. By itself it takes a folder in
the temporary one whose name anybody can guess, and make first: with code of their own in it."""
_COMPILED = "compiled"


def use_one_thread() -> None:
    """Sets one thread for each numeric library. It is to be called before any numeric library is imported: numpy starts
    its threads then."""
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))


def prepare_to_compute() -> None:
    """Sets `environment_to_compute` in this process. It is to be called before torch is imported."""
    os.environ.update(environment_to_compute())


def environment_to_compute() -> dict[str, str]:
    """Makes the environment of a process that computes: this process's, with one thread for each library, without the
    key."""
    inherited = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    if _COMPILER_FOLDER not in inherited:
        inherited[_COMPILER_FOLDER] = str(private_folder(_COMPILED))
    return inherited | dict.fromkeys(_ONE_THREAD, "1")


def use_private_cache() -> None:
    """Keeps what this process and its children compile where nobody else can put code, unless the environment says
    where. It is to be called before layers are compiled: torch looks when it compiles."""
    if _COMPILER_FOLDER not in os.environ:
        os.environ[_COMPILER_FOLDER] = str(private_folder(_COMPILED))


def private_folder(name: str, *, stays: bool = False) -> Path:
    """Finds or makes a folder that only this user can write to: in the user's cache folder, or, where that is not safe,
    a new one that goes with this process.

    Args:
        name: of the folder.
        stays: other processes of this user are to have the same one: where the cache folder is not safe it is one in
            the temporary folder that stays, unless another user has its name.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        parent = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = parent / "elaswave" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all(map(_is_safe, (folder, *folder.resolve().parents))) and os.access(folder, os.W_OK | os.X_OK):
            return folder.resolve()
    except (OSError, RuntimeError):  # no home, or nothing can be made there
        pass
    if stays and (found := _own_temporary(name)) is not None:
        return found
    own = Path(tempfile.mkdtemp(prefix=f"elaswave-{name}-"))
    atexit.register(_remove, own, os.getpid())
    return own


def _own_temporary(name: str) -> Path | None:
    """Finds or makes a folder of this user's whose name anybody can guess, and make first: then there is none."""
    folder = Path(tempfile.gettempdir()) / f"elaswave-{name}-{os.geteuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if is_own and all(map(_is_safe, folder.resolve().parents)):
            return folder
    return None


def _is_safe(folder: Path) -> bool:
    """Tells whether nobody but this user and root can replace what is in a folder."""
    found = folder.stat()
    may_others_write = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return found.st_uid in (0, os.geteuid()) and (not may_others_write or bool(found.st_mode & stat.S_ISVTX))


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in children that were forked
        shutil.rmtree(folder, ignore_errors=True)


def begin_with_fixed_hashes() -> None:
    """Begins this process anew, with its command line, where Python has drawn the seed of its hashes at random: by them
    sets of texts are ordered, and another process, or another day, would have another order.

    Returns where the seed is given already, or cannot be: Python takes no environment, or does not know how it was
    started, or the system refuses.
    """
    arguments = sys.orig_argv[1:]
    is_whole = arguments[len(arguments) - len(sys.argv) + 1 :] == sys.argv[1:] and arguments[:1] != ["-"]
    if os.environ.get(HASH_SEED_VARIABLE, RANDOM) != RANDOM or sys.flags.ignore_environment:
        return
    if sys.executable and is_whole:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, HASH_SEED_VARIABLE: "0"})


def hash_seed() -> str:
    """Returns the seed of this process's hashes, or `RANDOM`. It is the one that the process began with: what a script
    writes to its environment counts for processes to come."""
    if not sys.flags.hash_randomization:
        return "0"
    name = f"{HASH_SEED_VARIABLE}=".encode()
    given = [entry for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if entry.startswith(name)]
    value = given[0].removeprefix(name).decode("ascii", "replace") if given else RANDOM
    return value if value.isdigit() and int(value) and not sys.flags.ignore_environment else RANDOM


def given_key() -> JobKey | None:
    """Reads the job's key, if the environment gives it: in a file, or itself.

    Raises:
        UsageError: both do, the file could be read by others, or cannot be read, or the key is too short.
    """
    given, named = _taken_from_environment(), os.environ.get(KEY_FILE_VARIABLE)
    if given is not None and named is not None:
        raise UsageError(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} both give the job's key; unset one of them")
    if given is not None:
        return key_of_text(given, KEY_VARIABLE, None)
    if named is None:
        return None
    path = Path(named).expanduser().absolute()
    return read_key(path)


_taken: list[bytes] = []
"""The key that the variable held, for later jobs of this process."""


def _taken_from_environment() -> bytes | None:
    """Takes the variable's value, which is erased, also where ``/proc/PID/environ`` of this process and of those that
    it forks reads: from the memory that the environment was passed in (proc(5))."""
    name = KEY_VARIABLE.encode()
    value = os.environb.pop(name, None)
    if value is not None:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, stop = int(fields[47]), int(fields[48])  # env_start and env_end
        passed = b"\0" + ctypes.string_at(start, stop - start)
        place = passed.find(b"\0" + name + b"=")
        if place >= 0:
            num_bytes = passed.index(b"\0", place + 1) - place - len(name) - 2
            ctypes.memset(start + place + len(name) + 1, ord("-"), num_bytes)
        _taken[:] = [value.strip()]
    return _taken[0] if _taken else None


def forkserver_environment() -> dict[str, str] | None:
    """Makes the environment for a fresh forkserver, with this process's hashes; None where this process may fork
    one."""
    return None if may_fork() else environment_to_compute() | {HASH_SEED_VARIABLE: hash_seed()}


def may_fork() -> bool:
    """Tells whether a child that is forked now can compute: only this thread would be in it, and no device's state."""
    return len(os.listdir("/proc/self/task")) == 1 and not _has_accelerator_state()


def _has_accelerator_state() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(device is not None and device.is_initialized() for device in devices)
