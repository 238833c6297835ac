"""What processes that compute find in their environment before libraries are loaded, and their children inherit; and
what no child may find there: the job's key."""

import ctypes
import os
import tempfile
from pathlib import Path

from elaswave.control.key_files import JobKey, checked_key, read_key
from elaswave.errors import UsageError

COORDINATOR_VARIABLE = "ELASWAVE_COORDINATOR"
"""Where agents dial their coordinator, if their command does not say."""
KEY_FILE_VARIABLE = "ELASWAVE_KEY_FILE"
KEY_VARIABLE = "ELASWAVE_KEY"

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by the numeric libraries when they are loaded. Two threads add in another order than one."""
_COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Torch makes a folder for its compiler when parts of it are loaded. Nothing is compiled here, so it gets one that is
there already, and leaves none behind."""


def prepare_to_compute() -> None:
    """To be called before torch is imported."""
    os.environ.update(environment_to_compute())


def environment_to_compute() -> dict[str, str]:
    """The environment of a process that computes: this process's, with one thread for each library, without the key."""
    inherited = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    return {_COMPILER_FOLDER: tempfile.gettempdir()} | inherited | dict.fromkeys(_ONE_THREAD, "1")


def given_key() -> JobKey | None:
    """The job's key, if the environment gives it: in a file, or itself.

    Raises:
        UsageError: both do, the file could be read by others, or cannot be read, or the key is too short.
    """
    given, named = _taken_from_environment(), os.environ.get(KEY_FILE_VARIABLE)
    if given is not None and named is not None:
        raise UsageError(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} both give the job's key; unset one of them")
    if given is not None:
        return JobKey(checked_key(given, KEY_VARIABLE), None)
    if named is None:
        return None
    path = Path(named).expanduser().absolute()
    return JobKey(read_key(path), path)


_taken: list[bytes] = []
"""The key that the variable held, for later jobs of this process."""


def _taken_from_environment() -> bytes | None:
    """The variable's value, which is erased, also where ``/proc/PID/environ`` of this process and of those that it
    forks reads: from the memory that the environment was passed in (proc(5))."""
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
