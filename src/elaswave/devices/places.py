"""Places of a job's workers on the GPUs of a host: files that their processes keep locked. No torch."""

import fcntl
import os
import socket
import time
from pathlib import Path

from elaswave.errors import DeviceError
from elaswave.untrusted import open_regular

PLACE_TIMEOUT_S = 15.0
"""How long a worker waits for a place: that of a lost worker is free when its process is gone. Below
`elaswave.control.membership.JOINER_STILL_S`, after which a joiner that only waits is taken for one that hangs."""
TURN_S = 0.1


def take_place(folder: Path, num_devices: int, workers_per_device: int, timeout_s: float = PLACE_TIMEOUT_S) -> int:
    """A device on which fewer than the permitted number of a job's workers are, the emptiest ones first.

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
        time.sleep(TURN_S)
