"""Opens the device of a worker, in its own process. The module of a device is imported only where one of its kind is
asked for.

Places of a job's workers on the GPUs of a host are files that their processes keep locked.

Whether a device of a kind can be here: asked before any process is started. No torch, and no context on a device.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from elaswave.devices.faults import FaultClass, fault_of
from elaswave.devices.interface import HOST, Device
from elaswave.errors import DeviceError
from elaswave.untrusted import open_regular

PLACE_TIMEOUT_S = 15.0
"""How long a worker waits for a place: that of a lost worker is free when its process is gone. Below `JOINER_STILL_S`
(`elaswave.protocol.membership.membership`), after which a joiner that only waits is taken for one that hangs."""
PLACE_TURN_S = 0.1
MEMORY_TURN_S = 0.1
"""Between two looks at a device's free memory."""


def take_place(folder: Path, num_devices: int, workers_per_device: int, timeout_s: float = PLACE_TIMEOUT_S) -> int:
    """Takes a device on which fewer than the permitted number of a job's workers are, the emptiest ones first.

    The kernel frees the place when the process ends, however it does.

    Args:
        folder: of the job's places; those of this host have its name.
        num_devices: GPUs that this process may see.
        workers_per_device: that may share one.
        timeout_s: bound of waiting.
    Returns:
        Its index.
    Raises:
        DeviceError: there is no device, or all places are taken.
    """
    if num_devices < 1:
        raise DeviceError("device.kind=cuda: this process sees no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi")
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + timeout_s
    while True:
        for place in range(num_devices * workers_per_device):
            # Others may not open it: who can read a file can lock it.
            path = folder / f"{socket.gethostname()}-{place}"
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            return place % num_devices  # the descriptor stays open as long as the process lives
        if time.monotonic() > deadline_s:
            raise DeviceError(
                f"all {num_devices * workers_per_device} places on {num_devices} GPUs are taken by other workers of "
                f"this job, and none became free in {timeout_s:.0f} s: raise device.workers_per_device, or begin with "
                "fewer workers"
            )
        time.sleep(PLACE_TURN_S)


def open_device(
    kind: str, folder: Path, workers_per_device: int = 1, needed_bytes: Callable[[], float] = lambda: 0.0
) -> Device:
    """Opens the device of this worker, with room for what it cannot do without.

    Args:
        kind: ``device.kind`` of the configuration.
        folder: of the run; places on GPUs are files there, which their workers' processes keep locked.
        workers_per_device: that may share a GPU.
        needed_bytes: of memory; asked only where a device has its own.
    Raises:
        DeviceError: it is not there, cannot be used, or has no place or no room; says what was seen.
    """
    if kind == "loopback":
        from elaswave.devices.loopback import Loopback

        return with_room(Loopback, needed_bytes())
    if kind == "cuda":
        from elaswave.devices.cuda import Cuda, num_devices

        needed, end_s = needed_bytes(), time.monotonic() + PLACE_TIMEOUT_S
        index = take_place(folder / "devices", num_devices(), workers_per_device)
        return with_room(lambda: Cuda(index), needed, max(0.0, end_s - time.monotonic()))
    return HOST


def with_room(make: Callable[[], Device], needed_bytes: float, timeout_s: float = PLACE_TIMEOUT_S) -> Device:
    """Opens a device, once it has so much memory free.

    The place of a worker that has died may be free a moment before its memory: the driver takes that back while the
    process ends, and later still where a kernel runs.

    Args:
        make: opens it.
        needed_bytes: that must be free. Its context may be what there is no memory for: then it is tried again.
        timeout_s: bound of waiting.
    Raises:
        DeviceError: it cannot be opened, or there is not enough memory in time.
    """
    deadline_s = time.monotonic() + timeout_s
    device: Device | None = None
    while True:
        is_late = time.monotonic() >= deadline_s
        try:
            device = device or make()
            found = device.memory()
            if found is None or found.free_bytes >= needed_bytes:
                return device
            if is_late or found.total_bytes < needed_bytes:
                raise DeviceError(
                    f"{device.place} ({device.name}) has {_gb(found.free_bytes)} of {_gb(found.total_bytes)} GB free, "
                    f"and this worker needs at least {_gb(needed_bytes)} for parameters, sums and optimizer states"
                    + (f"; waited {timeout_s:.0f} s for others to give memory back" if is_late else "")
                    + ": look at nvidia-smi for other processes, lower device.workers_per_device, or use more workers"
                )
        except DeviceError as error:
            cause = None if error.__cause__ is None else fault_of(error.__cause__)
            if is_late or cause is None or cause.kind is not FaultClass.MEMORY:
                raise
        time.sleep(MEMORY_TURN_S)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"
