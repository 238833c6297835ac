"""Whether a device of a kind can be here: asked before any process is started. No torch, and no context on a device."""

import ctypes
import importlib.util
import re
from pathlib import Path

from elaswave.errors import ConfigError


def check_device(kind: str) -> None:
    """Refuses, before any process is started, a device that cannot be here.

    Args:
        kind: ``device.kind``.
    Raises:
        ConfigError: says what was seen and what is needed.
    """
    if kind == "cuda" and (seen := _without_cuda()):
        raise ConfigError(
            [
                f"device.kind: cuda needs an NVIDIA GPU, its driver and torch built with CUDA; {seen}. Use a machine "
                "that has them, or device.kind=cpu"
            ]
        )


def _without_cuda() -> str:
    """What shows that no GPU can be used here; empty: nothing does."""
    version = cuda_of_torch()
    if version is None:
        return "the torch that is installed is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"torch is built with CUDA {version}, and there is no driver ({error})"
    return ""


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built with, from its files; None: without."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b.*= ['\"](.+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]
