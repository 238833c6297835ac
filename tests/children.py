"""Processes that tests and benchmarks start, and that must not outlive them."""

import shutil
from collections.abc import Sequence


def with_parent(command: Sequence[str]) -> list[str]:
    """A command whose process is killed when the thread that starts it ends, however that ends: nobody can clean up
    after a SIGKILL."""
    return (["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []) + list(command)
