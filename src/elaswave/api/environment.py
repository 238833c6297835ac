"""What processes that compute find in their environment before libraries are loaded; their children inherit it."""

import os
import tempfile

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Read by the numeric libraries when they are loaded. Two threads add in another order than one."""
_COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Torch makes a folder for its compiler when parts of it are loaded. Nothing is compiled here, so it gets one that is
there already, and leaves none behind."""


def prepare_to_compute() -> None:
    """To be called before torch is imported."""
    os.environ.update(environment_to_compute())


def environment_to_compute() -> dict[str, str]:
    """The environment of a process that computes: this process's, with one thread for each library."""
    return {_COMPILER_FOLDER: tempfile.gettempdir()} | dict(os.environ) | dict.fromkeys(_ONE_THREAD, "1")
