"""The code of an accelerator with the processor in its place, for tests and for the search for defects.

It keeps to all that makes an accelerator another thing than the host: its memory is apart, so that everything that
comes or goes is copied; a copy to the host is made only when a mark behind it is looked at, and not at the first look;
numbers are read through copies. So a tensor that is changed before it has been fetched, or read before that, shows.
It computes what the host computes, with the same bits.
"""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from elaswave.devices.interface import HOST, Batch, DeviceMemory, Mark
from elaswave.types import Gauges

LOOKS = 2
"""So many times a mark that has copies before it says that it has not passed."""


class _Copy:
    """A copy to the host that is not made yet."""

    def __init__(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self.source, self.out = source, out


class _LoopbackMark:
    def __init__(self, device: "Loopback", number: int) -> None:
        self._device = device
        self._number = number
        """Copies that were asked for before it."""
        self._looks = 0
        self._at_s = time.monotonic()

    def has_passed(self) -> bool:
        """Makes the copies before it, after some looks."""
        if self._device.is_stuck:
            return False
        if self._device.num_copied >= self._number:
            return True
        self._looks += 1
        if self._looks <= LOOKS:
            return False
        self._device.copy_until(self._number)
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """Measures by the host's clock, since the host computes."""
        assert isinstance(earlier, _LoopbackMark)
        assert max(self._number, earlier._number) <= self._device.num_copied, "the device has not come to a mark"
        return self._at_s - earlier._at_s


class Loopback:
    """See `Device` for what its methods promise."""

    place = torch.device("cpu")
    is_host = False
    batch = Batch(blocks=5, elements=1 << 16)
    """So that small jobs have several batches, full ones and others."""

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque()
        self._num_asked = 0
        self.num_copied = 0
        """Copies that are made."""
        self.is_stuck = False

    @property
    def name(self) -> str:
        """The processor's."""
        return f"loopback on {HOST.name}"

    def memory(self) -> DeviceMemory:
        """Reads the host's memory."""
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        known = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        return DeviceMemory(known["MemAvailable:"], known["MemTotal:"])

    def gauges(self) -> Gauges:
        """Its memory is the host's; it has no sensors."""
        free_bytes, total_bytes = self.memory()
        return Gauges(memory_used_bytes=total_bytes - free_bytes, memory_total_bytes=total_bytes)

    def stick(self) -> None:
        """Makes the device come to no mark any more from now on, as behind a kernel that never ends. Serves tests."""
        self.is_stuck = True

    def seed(self, key: int) -> None:
        """It draws from the host's generator."""

    def generator_kept(self) -> AbstractContextManager[None]:
        """It has none of its own."""
        return nullcontext()

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a copy."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copies it."""
        assert tensor.data_ptr() != out.data_ptr() or not tensor.numel(), "device memory was used as host memory"
        out.copy_(tensor)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Makes ordinary memory."""
        return torch.empty(like.shape, dtype=like.dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies it when a mark is looked at."""
        out = self.room(tensor)
        self._copies.append(_Copy(tensor.detach(), out))
        self._num_asked += 1
        return out

    def mark(self) -> Mark:
        """Sets a mark behind all fetches so far."""
        return _LoopbackMark(self, self._num_asked)

    def copy_until(self, number: int) -> None:
        """Makes the copies that were asked for first.

        Args:
            number: of all since the beginning.
        """
        while self.num_copied < number:
            copy = self._copies.popleft()
            copy.out.copy_(copy.source)
            self.num_copied += 1
