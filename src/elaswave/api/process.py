"""Whether a script's process may fork, and what a fresh interpreter finds in its environment."""

import os
import sys

from elaswave.api.environment import HASH_SEED_VARIABLE, environment_to_compute, hash_seed


def template_environment() -> dict[str, str] | None:
    """The environment for a fresh template, with this process's hashes; None where this process may fork one."""
    return None if may_fork() else environment_to_compute() | {HASH_SEED_VARIABLE: hash_seed()}


def may_fork() -> bool:
    """Whether a child that is forked now can compute: only this thread would be in it, and no device's state."""
    return len(os.listdir("/proc/self/task")) == 1 and not _has_accelerator_state()


def _has_accelerator_state() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return any(device is not None and device.is_initialized() for device in devices)
