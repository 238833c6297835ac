"""What an agent's job takes of this machine beside processes: a private folder, addresses, a store, memory, devices.

All of it is asked for before any process is started: what this machine cannot hold, and a device that cannot be here,
is refused before anything is built. No torch, and no context on a device.

The folder holds sockets and journal. Its lock file is held by the launcher and all processes that it forks, and the
kernel lets go of it when the last of them has ended: a folder whose lock is free belongs to no running job, and is
removed by the next one. (Programs that tidy up temporary folders by age leave one alone whose lock is held, if they are
as careful as systemd's.)

What a run needs at least is arithmetic on its configuration. Counted is only what cannot be otherwise: parameters, sums
of gradients, optimizer state with its live copies, and the activations of the micro-batches in flight, without
temporary values, receive buffers, libraries or checkpoints. What this machine has is read from the kernel's files.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from elaswave.config.cluster import element_bytes, shape_of, state_bytes
from elaswave.config.schema import Config
from elaswave.config.values import OWN, path_problem
from elaswave.errors import ConfigError, LaunchError, UsageError
from elaswave.faults.injection import Fault
from elaswave.job.keys import JOB_KEY_FILE, JobKey, KeyRole
from elaswave.job.setup import AgentRole, JobNetwork, JobSetup, open_network, write_control_file
from elaswave.observability.run_folder import prepare_spare
from elaswave.planning.costs.layers import Costs, LayerCosts, MemoryModel, num_copies, sum_bytes
from elaswave.protocol.events import CoordinatorEffect
from elaswave.store.opening import JobStore
from elaswave.system.processes import DeathWatch

PREFIX = "elaswave-"
_LOCK_FILE = "lock"


class MemoryEstimate(NamedTuple):
    """Bytes, at least, by worker of the fullest stage and in all."""

    num_parameters: int
    parameters: int
    sums: int
    optimizer: int
    activations: int
    total: int
    """Of all workers together, which share one machine."""

    @property
    def worker(self) -> int:
        """Of one worker of the fullest stage."""
        return self.parameters + self.sums + self.optimizer + self.activations


def least_memory(config: Config, layer_parameters: Sequence[int] = ()) -> MemoryEstimate:
    """Estimates what a run needs at least.

    Args:
        config: with its layout resolved.
        layer_parameters: number of parameters of each layer of a script's own model, of whose activations nothing is
            known.
    """
    is_own = config.model.family == OWN
    costs = _own_costs(config, layer_parameters) if is_own else _least_costs(config)
    num_parameters = sum(layer_parameters) if is_own else shape_of(config).num_parameters
    widths, num_stages = config.widths, len(config.widths)
    copies = num_copies(config.elastic.planned_followers, sum(widths))
    total, fullest = 0, MemoryEstimate(0, 0, 0, 0, 0, 0)
    for stage, (start, stop) in enumerate(pairwise(accumulate(config.layers_per_stage, initial=0))):
        in_flight = min(-(-config.batch.num_microbatches // widths[stage]), num_stages - stage)
        parts = MemoryModel.of_width(costs, widths[stage], copies).parts(start, stop, in_flight)
        found = MemoryEstimate(
            num_parameters=num_parameters,
            parameters=round(parts.parameters),
            sums=round(parts.sums),
            optimizer=round(parts.state),
            activations=round(parts.activations),
            total=0,
        )
        total += found.worker * widths[stage]
        fullest = max(fullest, found, key=lambda memory: memory.worker)
    return fullest._replace(total=total)


def _least_costs(config: Config) -> Costs:
    """Computes the bytes of the run's layers, at least: of a block's activations only what every kernel keeps."""
    shape = shape_of(config)
    rows = config.batch.microbatch_size * shape.context_length
    block = _layer(config, shape.block_parameters, rows * shape.hidden_size * (1 if config.model.recompute else 5))
    embedding = _layer(config, shape.embedding_parameters, 0)
    head = _layer(config, shape.head_parameters, rows * shape.vocab_size)
    return Costs(layers=(embedding, *(block,) * shape.num_layers, head))


def _own_costs(config: Config, layer_parameters: Sequence[int]) -> Costs:
    return Costs(layers=tuple(_layer(config, number, 0) for number in layer_parameters))


def _layer(config: Config, num_parameters: int, num_kept: int) -> LayerCosts:
    """Computes the bytes of a layer with these parameters, and kept elements of activations of a micro-batch."""
    size, elastic = element_bytes(config), config.elastic
    return LayerCosts(
        forward_s=0.0,
        input_gradient_s=0.0,
        weight_gradient_s=0.0,
        parameter_bytes=float(num_parameters * size),
        accumulator_bytes=float(num_parameters * sum_bytes(elastic.consistency, elastic.accumulator_bits)),
        optimizer_bytes=float(num_parameters * state_bytes(config)),
        activation_bytes=float(num_kept * size),
        boundary_bytes=0.0,
    )


def memory_problem(memory: MemoryEstimate, available: int, source: str) -> str | None:
    """Tells why a run cannot be held, or None.

    Args:
        memory: what it needs at least.
        available: bytes that there are.
        source: where that was read.
    """
    if memory.total <= available:
        return None
    parts = ", ".join(
        f"{name} {_bytes(size)}"
        for name, size in (
            ("parameters", memory.parameters),
            ("sums of gradients", memory.sums),
            ("optimizer state and copies", memory.optimizer),
            ("activations", memory.activations),
        )
    )
    return (
        f"a model of {memory.num_parameters:,} parameters needs at least {_bytes(memory.total)} of memory for its "
        f"workers together, and there are {_bytes(available)} ({source}); a worker of its fullest stage: {parts}. "
        "Lower the sizes of the model, batch.microbatch_size or the number of workers"
    )


def _bytes(size: int) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} EB"


class JobFolder:
    """A new folder, until `close` or the death of the last process that holds it.

    Raises:
        LaunchError: the system refuses one.
    """

    def __init__(self) -> None:
        if problem := path_problem(tempfile.gettempdir()):
            raise LaunchError(f"TMPDIR: {problem}")
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            unnamed = self.path / f"{_LOCK_FILE}.new"
            self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            unnamed.rename(self.path / _LOCK_FILE)  # named only now that it is held: no other process can have had it
        except OSError as error:
            raise LaunchError(
                f"no folder for the job's sockets and journal can be made in {tempfile.gettempdir()}: "
                f"{error.strerror}; make room there, or set TMPDIR to another folder"
            ) from error

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep_dead() -> list[Path]:
    """Removes the folders of this user's jobs that have no process any more: their launchers were killed.

    Others may have made folders of the same name, to keep a job from starting: nothing of them is opened. No trouble
    here keeps one from starting either.

    Returns:
        Those that it has removed.
    """
    removed = []
    parent = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(parent) if name.startswith(PREFIX))
        for name in names:
            with contextlib.suppress(OSError, RecursionError):  # it is in use, or gone meanwhile
                if _removes(parent / name):
                    removed.append(parent / name)
    return removed


def _removes(folder: Path) -> bool:
    """Removes a folder if it is one that this user alone can write to, and whose lock is free."""
    if not _is_own(os.lstat(folder), stat.S_IFDIR):
        return False
    within = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_own(os.fstat(within), stat.S_IFDIR):
            return False
        lock = os.open(_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=within)
        try:
            if not _is_own(os.fstat(lock), stat.S_IFREG):
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(lock)
    finally:
        os.close(within)
    return True


def _is_own(found: os.stat_result, kind: int) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and not found.st_mode & others


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
        UsageError: the key is not good for this part.
    """

    def __init__(self, config: Config, run_dir: Path, agent_role: AgentRole, key: JobKey) -> None:
        self.agent_role, self.key = agent_role, key
        self._config, self._run_dir = config, run_dir
        key.held(KeyRole.JOB if agent_role.starts_coordinators else KeyRole.JOINING)
        prepare_spare(run_dir, config, agent_role.job)
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
            if agent_role.starts_coordinators:
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
        """Which job generation this agent takes part in, see
        `elaswave.protocol.leadership.store_position.StorePosition`."""
        return (
            self.agent_role.job_generation
            or (0 if self.store is None else self.store.job_generation)
            or self.agent_role.incarnation
        )

    @property
    def holder(self) -> str:
        """The name under which this agent's coordinators hold the job in a store that others may use; else empty."""
        return self.agent_role.name if self.agent_role.is_candidate else ""

    def setup(
        self,
        *,
        started_s: float,
        faults: tuple[Fault, ...],
        profile: bool,
        num_loaders: int = 0,
        before_effect: Callable[[CoordinatorEffect], None] = lambda effect: None,
    ) -> JobSetup:
        """Makes what all processes of the job here are started with.

        Args:
            started_s, faults, profile, num_loaders, before_effect: as of `JobSetup`.
        """
        return JobSetup(
            config=self._config,
            run_dir=self._run_dir,
            control_dir=self.folder,
            network=self.network,
            name=self.agent_role.job,
            job_generation=self.job_generation,
            home=self.agent_role.incarnation,
            started_s=started_s,
            faults=faults,
            before_effect=before_effect,
            deaths=DeathWatch(),
            profile=profile,
            num_loaders=num_loaders,
        )

    def write_control_file(self) -> str:
        """Tells operators of this machine where the coordinator is; returns what is wrong if it cannot."""
        try:
            self._write_key()
            write_control_file(self._run_dir, self.network, self.key_file, is_temporary=self.key.file is None)
        except OSError as error:
            return f"elaswave ctl cannot reach this run, its key cannot be written: {error}"
        return ""

    @property
    def key_file(self) -> Path:
        """Where operators of this machine read the key: no file of the run's folder holds it."""
        return self.folder / JOB_KEY_FILE if self.key.file is None else self.key.file.resolve()

    def _write_key(self) -> None:
        """Writes the key if it was given in no file, and while it is the first one: a later one stands there
        already."""
        if self.key.file is not None:
            return
        with contextlib.suppress(FileExistsError):
            fd = os.open(self.key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(self.key.text)

    def close(self) -> None:
        """Gives folder and port up; the store stays as it is."""
        if self._kept_port is not None:
            self._kept_port.close()
        self._job_folder.close()


def memory_bytes(root: Path = Path("/")) -> tuple[int, str] | None:
    """Finds the most memory that processes started here can have, swap included, and the file that says so.

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


def with_worker_memory(config: Config) -> Config:
    """Returns the configuration with the memory by which ``elastic.num_followers = "auto"`` decides: this machine's,
    divided among the workers, unless it is given or the devices have memory of their own.

    Args:
        config: with its layout resolved.
    """
    available, elastic = memory_bytes(), config.elastic
    if elastic.num_followers != "auto" or elastic.worker_memory_bytes is not None or available is None:
        return config
    if config.device.kind in ("emulated", "cuda"):
        return config
    return replace(config, elastic=replace(elastic, worker_memory_bytes=available[0] // sum(config.widths)))


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


def check_frequency(kind: str) -> None:
    """Refuses, before any process is started, what sets the speed of devices if its library is missing.

    Args:
        kind: ``device.frequency``.
    Raises:
        ConfigError: says what to install.
    """
    if kind == "nvidia" and importlib.util.find_spec("zeus") is None:
        raise ConfigError(
            ["device.frequency: nvidia needs the zeus library: pip install 'elaswave[gpu]', or use none, the default"]
        )


def _without_cuda() -> str:
    """Tells what shows that no GPU can be used here; empty: nothing does."""
    version = cuda_of_torch()
    if version is None:
        return "the torch that is installed is built without CUDA"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"torch is built with CUDA {version}, and there is no driver ({error})"
    return ""


def cuda_of_torch() -> str | None:
    """Finds the version of CUDA that torch is built with, from its files; None: without."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = (Path(found.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda\b.*= ['\"](.+)['\"]", text, re.MULTILINE)
    return None if match is None else match[1]
