"""Frequency actuators: how a worker is made to compute at the level that a plan gives it. One protocol, four of them.

- none: levels are stated and not acted upon.
- emulated: the emulated device's actions last as long as the level says.
- cgroup: a quota of the worker's CPU time (Linux, version 1 or 2 of the interface). Live and coarse: the kernel gives
  the time out per period, so it is for slow-downs of whole workers, not for exact clocks.
- nvidia: locked clocks of a GPU through NVML, by way of the ``zeus`` library (extra ``gpu``).

An actuator is made for one worker, is told a level whenever it changes, and gives the device back as it was found.
"""

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from elaswave.errors import FrequencyError
from elaswave.planning.costs.machines import FrequencyLevel

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
PERIOD_US = 100_000
"""Over which a quota is given out: the kernel's own default."""
QUOTA_MIN_US = 1_000
"""The kernel refuses less."""


class FrequencyActuator(Protocol):
    """Sets the speed of one worker's device."""

    def set_level(self, level: FrequencyLevel) -> None:
        """From now on the device computes at a level.

        Raises:
            FrequencyError: the system refuses it.
        """
        ...

    def close(self) -> None:
        """Gives the device back as it was found; may be called twice."""
        ...


class NoFrequency:
    """Leaves the device alone."""

    def set_level(self, level: FrequencyLevel) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class EmulatedFrequency:
    """Changes the pace of an emulated device.

    Args:
        set_speed: takes the level's speed, relative to the base level's.
    """

    def __init__(self, set_speed: Callable[[float], None]) -> None:
        self._set_speed = set_speed

    def set_level(self, level: FrequencyLevel) -> None:
        """The next action lasts as long as the level says."""
        self._set_speed(level.speed)

    def close(self) -> None:
        """Goes back to the base level."""
        self._set_speed(1.0)


class CgroupFrequency:
    """Bounds the CPU time of a process.

    The process is moved into a group of its own below the one that it is in, and back at the end.

    Args:
        pid: the process.
        name: of the new group; must be unused.
        share: of a core, at level speed 1.0.
        root, proc: where the control groups and the processes are mounted.
    Raises:
        FrequencyError: there is no CPU controller, or it cannot be written.
    """

    def __init__(self, pid: int, name: str, *, share: float = 1.0, root: Path = CGROUP_ROOT, proc: Path = PROC) -> None:
        self._pid = pid
        self._share = share
        self._home = _group_of(pid, root, proc)
        self._is_v2 = (self._home / "cgroup.controllers").exists()
        self._group = self._home / name
        try:
            self._group.mkdir()
            try:
                control = "cpu.max" if self._is_v2 else "cpu.cfs_quota_us"
                if not (self._group / control).exists():
                    raise FileNotFoundError(f"{self._group / control} does not exist")
                (self._group / "cgroup.procs").write_text(str(pid))
            except OSError:
                self._group.rmdir()
                raise
        except OSError as error:
            raise FrequencyError(
                f"no CPU quota can be set for process {pid}: {error}; needed is a writable CPU controller below "
                f"{self._home} (root, or a delegated group). Use device.frequency = none"
            ) from error

    def set_level(self, level: FrequencyLevel) -> None:
        """Takes effect in the next period."""
        quota_us = max(QUOTA_MIN_US, round(level.speed * self._share * PERIOD_US))
        try:
            if self._is_v2:
                (self._group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            else:
                (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise FrequencyError(
                f"a quota of {quota_us} of {PERIOD_US} us is refused for process {self._pid}: {error}; a group above "
                "may allow less"
            ) from error

    def close(self) -> None:
        """Moves the process back and removes the group."""
        with contextlib.suppress(OSError):  # the process may have ended
            (self._home / "cgroup.procs").write_text(str(self._pid))
        with contextlib.suppress(OSError):
            self._group.rmdir()


def remove_groups(parent: int, beside: int, *, root: Path = CGROUP_ROOT, proc: Path = PROC) -> None:
    """Removes the groups that workers have left behind who were killed.

    Args:
        parent: the process that has started them; it may have ended.
        beside: a process in the group that theirs lie in.
        root, proc: where the control groups and the processes are mounted.
    """
    with contextlib.suppress(FrequencyError):  # then none was made
        for group in _group_of(beside, root, proc).glob(f"{_prefix(parent)}*"):
            with contextlib.suppress(OSError):  # a process is still in it
                group.rmdir()


def _prefix(parent: int) -> str:
    """Makes the prefix of the names of all groups of one job's workers."""
    return f"elaswave-{parent}-worker-"


def _group_of(pid: int, root: Path, proc: Path) -> Path:
    """Finds the folder of the group that bounds a process's CPU time."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError as error:
        raise FrequencyError(f"the control groups of process {pid} cannot be read: {error}; is it running?") from error
    groups = [line.split(":", 2)[1:] for line in lines]
    for controllers, path in groups:  # version 1 has a hierarchy for each controller
        if "cpu" in controllers.split(","):
            return root / controllers / path.lstrip("/")
    for controllers, path in groups:
        if not controllers and (root / "cgroup.controllers").exists():
            return root / path.lstrip("/")
    raise FrequencyError(
        f"no CPU controller is found below {root} for process {pid}; mount the control groups, or use "
        "device.frequency = none"
    )


class NvidiaFrequency:
    """Locks the clocks of an NVIDIA GPU, through ``zeus.device.get_gpus()``.

    Args:
        gpu: index of the device.
        base_clock_mhz: clock of the base level; None means the highest one supported.
        gpus: what ``get_gpus()`` returns; None imports ``zeus`` and asks it.
    Raises:
        FrequencyError: zeus is not installed, or finds no such device.
    """

    def __init__(self, gpu: int, *, base_clock_mhz: int | None = None, gpus: Any = None) -> None:
        self._gpu = gpu
        self._gpus = _zeus_gpus() if gpus is None else gpus
        if not 0 <= gpu < len(self._gpus):
            raise FrequencyError(f"there is no GPU {gpu}: zeus finds {len(self._gpus)}; use device.frequency = none")
        self._clocks_mhz: list[int] = sorted(self._ask("get_supported_graphics_clocks"))
        self._base_clock_mhz = base_clock_mhz or self._clocks_mhz[-1]
        self._locked = False

    def set_level(self, level: FrequencyLevel) -> None:
        """Locks the supported clock that is nearest to the level's."""
        wanted = level.speed * self._base_clock_mhz
        clock = min(self._clocks_mhz, key=lambda supported: (abs(supported - wanted), supported))
        self._ask("set_gpu_locked_clocks", clock, clock)
        self._locked = True

    def close(self) -> None:
        """Lets the device choose its clocks again."""
        if self._locked:
            self._locked = False
            self._ask("reset_gpu_locked_clocks")

    def _ask(self, method: str, *arguments: int) -> Any:
        try:
            return getattr(self._gpus, method)(self._gpu, *arguments)
        except Exception as error:  # zeus has one class per NVML error; all of them mean that the driver refuses
            raise FrequencyError(
                f"{method}{arguments} of GPU {self._gpu} is refused: {type(error).__name__}: {error}; locking clocks "
                "needs root or zeus's daemon zeusd. Use device.frequency = none"
            ) from error


def _zeus_gpus() -> Any:
    try:
        device = importlib.import_module("zeus.device")
    except ImportError as error:
        raise FrequencyError("device.frequency = nvidia needs the zeus library: pip install 'elaswave[gpu]'") from error
    try:
        return device.get_gpus()
    except Exception as error:
        raise FrequencyError(
            f"zeus finds no GPU: {type(error).__name__}: {error}; use device.frequency = none"
        ) from error


def make_actuator(
    kind: str, worker: int, set_speed: Callable[[float], None], *, share: float = 1.0
) -> FrequencyActuator:
    """Makes the actuator of one worker, for the process that calls this.

    Args:
        kind: ``none``, ``emulated``, ``cgroup`` or ``nvidia``, as `device.frequency`.
        worker: its id; on a machine of its own GPUs it is the index of its device, as workers are numbered by node.
        set_speed: what an emulated device is told.
        share: of a core, at level speed 1.0 (``cgroup``).
    Raises:
        FrequencyError: it cannot be had here.
        ValueError: an unknown kind.
    """
    if kind == "none":
        return NoFrequency()
    if kind == "emulated":
        return EmulatedFrequency(set_speed)
    if kind == "cgroup":
        return CgroupFrequency(os.getpid(), f"{_prefix(os.getppid())}{worker}", share=share)
    if kind == "nvidia":
        gpus = _zeus_gpus()
        return NvidiaFrequency(worker % max(1, len(gpus)), gpus=gpus)
    raise ValueError(f"unknown frequency actuator {kind!r}: choose none, emulated, cgroup or nvidia")
