"""What this machine has, read from the kernel's files, and whether a run fits into it."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from elaswave.config.memory import least_memory, memory_problem
from elaswave.config.schema import Config
from elaswave.errors import UsageError


def memory_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """The most memory that processes started here can have, swap included, and the file that says so.

    Args:
        root: where ``proc`` and ``sys`` are mounted.
    Returns:
        None where nothing says how much there is.
    """
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        found.append((sizes["MemTotal"] + sizes.get("SwapTotal", 0), "/proc/meminfo"))
    folders = [Path("sys/fs/cgroup")]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = Path("sys/fs/cgroup") / line[4:]
                folders += [folder for folder in (own, *own.parents) if folder.is_relative_to("sys/fs/cgroup")]
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit = int((root / folder / "memory.max").read_text())
            with contextlib.suppress(OSError, ValueError):
                limit += int((root / folder / "memory.swap.max").read_text())
            found.append((limit, f"/{folder}/memory.max"))
    return min(found, default=None)


def check_machine_memory(config: Config, layer_parameters: Sequence[int] = ()) -> None:
    """Refuses a run that this machine cannot hold, before anything of it is built.

    Args:
        config: with its layout resolved.
        layer_parameters: number of parameters of each layer of a script's own model.
    Raises:
        UsageError: it needs more memory than there is; with the numbers.
    """
    available = memory_bytes()
    problem = None if available is None else memory_problem(least_memory(config, layer_parameters), *available)
    if problem is not None:
        raise UsageError(problem)
