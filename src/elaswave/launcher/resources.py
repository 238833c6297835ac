"""What an agent's job has outside its processes: its private folder, the addresses of its network, its store.

What this machine has, read from the kernel's files, and whether a run fits into it.

Whether a device of a kind can be here: asked before any process is started. No torch, and no context on a device.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from elaswave.config.memory import least_memory, memory_problem
from elaswave.config.schema import Config
from elaswave.errors import ConfigError, UsageError
from elaswave.job.control_file import write_control_file
from elaswave.job.keys import JOB_KEY_FILE, JobKey
from elaswave.job.network import JobNetwork, open_network
from elaswave.job.role import AgentRole
from elaswave.store.opening import JobStore
from elaswave.system.job_folder import JobFolder


class JobPlace:
    """Of one agent, from its making to `close`.

    Args:
        config: with its layout resolved.
        run_dir: the run's folder.
        agent_role: how the agent takes part.
        key: the job's.
    Raises:
        LaunchError: the system refuses a folder or a port, or the store cannot be used.
        ConfigError: the network cannot be used.
    """

    def __init__(self, config: Config, run_dir: Path, agent_role: AgentRole, key: JobKey) -> None:
        self._run_dir, self._agent_role, self._key = run_dir, agent_role, key
        self._job_folder = JobFolder()
        self.folder = self._job_folder.path
        self.store: JobStore | None = None
        """None: this agent starts no coordinator."""
        self._kept_port: socket.socket | None = agent_role.kept_port
        try:
            self.network: JobNetwork
            if agent_role.network is not None:
                self.network = agent_role.network
            else:
                self.network, self._kept_port = open_network(config.net, self.folder, sum(config.widths))
            if agent_role.creates_job or agent_role.is_candidate:
                self.store = JobStore(
                    config.control,
                    run_dir,
                    self.folder,
                    key.secret,
                    job=agent_role.job,
                    creates_job=agent_role.creates_job,
                )
        except BaseException:
            self.close()
            raise

    @property
    def job_generation(self) -> int:
        """Which founding of the job this agent takes part in, see
        `elaswave.protocol.leadership.store_position.Head`."""
        return (
            self._agent_role.job_generation
            or (0 if self.store is None else self.store.job_generation)
            or self._agent_role.incarnation
        )

    @property
    def holder(self) -> str:
        """The name under which this agent's coordinators hold the job in a store that others may use; else empty."""
        return self._agent_role.name if self._agent_role.is_candidate else ""

    def write_control_file(self) -> str:
        """Tells operators of this machine where the coordinator is; returns what is wrong if it cannot."""
        try:
            self._write_key()
            write_control_file(self._run_dir, self.network, self.key_file, is_temporary=self._key.file is None)
        except OSError as error:
            return f"elaswave ctl cannot reach this run, its key cannot be written: {error}"
        return ""

    @property
    def key_file(self) -> Path:
        """Where operators of this machine read the key: no file of the run's folder holds it."""
        return self.folder / JOB_KEY_FILE if self._key.file is None else self._key.file.resolve()

    def _write_key(self) -> None:
        """If it was given in no file, and while it is the first one: a later one stands there already."""
        if self._key.file is not None:
            return
        with contextlib.suppress(FileExistsError):
            fd = os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(self._key.text)

    def close(self) -> None:
        """Gives folder and port up; the store stays as it is."""
        if self._kept_port is not None:
            self._kept_port.close()
        self._job_folder.close()


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
