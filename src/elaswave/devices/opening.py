"""Opens the device of a worker, in its own process. The module of a device is imported only where one of its kind is
asked for."""

from pathlib import Path

from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.devices.places import take_place


def open_device(kind: str, folder: Path, workers_per_device: int = 1) -> Device:
    """The device of this worker.

    Args:
        kind: ``device.kind`` of the configuration.
        folder: of the run; places on GPUs are files there, which their workers' processes keep locked.
        workers_per_device: that may share a GPU.
    Raises:
        DeviceError: it is not there, cannot be used, or has no place; says what was seen.
    """
    if kind == "loopback":
        from elaswave.devices.loopback import Loopback

        return Loopback()
    if kind == "cuda":
        from elaswave.devices.cuda import Cuda, num_devices

        return Cuda(take_place(folder / "devices", num_devices(), workers_per_device))
    return HOST
