"""The processor that the worker itself runs on: nothing is copied and nothing is waited for."""

import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from elaswave.devices.interface import Batch, Mark


class _Now:
    """A moment of the host: it has passed."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def has_passed(self) -> bool:
        """It has."""
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """By the monotonic clock."""
        assert isinstance(earlier, _Now)
        return self._at_s - earlier._at_s


class CpuDevice:
    """See `Device` for what its methods promise."""

    place = torch.device("cpu")
    is_host = True
    batch = Batch(blocks=1, elements=1 << 62)
    """One block: its update begins when the call does, and calls cost little."""

    @property
    def name(self) -> str:
        """Instruction set and model of the processor."""
        return f"{torch.backends.cpu.get_cpu_capability()}, {_processor()}"

    def memory(self) -> None:
        """The kernel gives memory as it is needed, and no worker waits for it."""

    def gauges(self) -> None:
        """Other programs tell of processors."""

    def seed(self, key: int) -> None:
        """The host's generators are seeded elsewhere."""

    def generator_kept(self) -> AbstractContextManager[None]:
        """It has none of its own."""
        return nullcontext()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copies it, if it is elsewhere."""
        if tensor.data_ptr() != out.data_ptr():
            out.copy_(tensor)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(like.shape, dtype=like.dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def mark(self) -> Mark:
        """It has passed."""
        return _Now()


HOST = CpuDevice()
"""The only one there is."""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
