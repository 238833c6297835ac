"""What the rest of a worker needs of the device that it computes on. One implementation per kind, each in one file.

A device may compute behind the caller's back: a call returns when its kernels are queued. What the host has to know of
that is a `Mark`, a moment in the device's queue that has passed or not. Nothing here blocks but `wait_for`, which asks
again and again, so that bytes move and interrupts arrive meanwhile.

No device is touched when this module is imported, nor by the processes that compute nothing (launcher, coordinator,
forkserver): a worker opens its own (`elaswave.devices.opening`).

Numbers that a device computes and the host is to know, read together by one wait.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from elaswave.devices.gauges import Gauges

WAIT_TURN_S = 50e-6
"""Between two looks at a mark."""


class DeviceMemory(NamedTuple):
    """The memory of a device, as all processes share it."""

    free_bytes: int
    total_bytes: int


class Mark(Protocol):
    """A moment in the order of what a device computes."""

    def has_passed(self) -> bool:
        """Whether the device has come so far.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Seconds of the device from an earlier mark of the same device to this one; both have passed."""
        ...


class Batch(NamedTuple):
    """How much is updated by one call of the optimizer (`batches_of`)."""

    blocks: int
    """Most blocks: the host names each of them, and meanwhile moves no bytes and sees no interrupt."""
    elements: int
    """Most elements, if there are several blocks: what is queued cannot be revoked."""


class Device(Protocol):
    """One worker's device."""

    place: torch.device
    """Where its tensors lie."""
    is_host: bool
    """Its memory is the host's, and what is called has been computed when the call returns: tensors can be sent and
    read as they are, and no other method does anything."""
    batch: Batch
    """Of APPLY."""

    @property
    def name(self) -> str:
        """What computes, for people and for the comparison of workers: model and versions of its software."""
        ...

    def __hash__(self) -> int:
        """Of the object: there is one for each worker."""
        ...

    def memory(self) -> DeviceMemory | None:
        """What is free now; None: it is not waited for.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def gauges(self) -> Gauges | None:
        """What it tells of itself now, quickly and without waiting for what is queued; None: nothing.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def seed(self, key: int) -> None:
        """Seeds the device's own generator; the host's are `elaswave.devices.generators`'s.

        Args:
            key: in [0, 2**64).
        """
        ...

    def generator_kept(self) -> AbstractContextManager[None]:
        """Gives the device's own generator its state back at the end."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device. What is computed next sees it; the host's memory may be changed at
        once."""
        ...

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """The same into memory of the device, or what is for the host alone into the host's; of the same shape and
        type."""
        ...

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Host memory of a tensor's shape and type that is quick to copy from and to, contiguous; without content."""
        ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy a tensor to host memory, behind all that has been queued. One that is there already, such as
        the word at the end of a frame of sums, is copied as well.

        Returns:
            The host tensor, contiguous. Its content, and the right to change the source, come with a `mark` that is
            made later.
        """
        ...

    def mark(self) -> Mark:
        """The present end of the queue, fetches included."""
        ...


def wait_for(mark: Mark, check: Callable[[], None]) -> None:
    """Waits until the device has come to a mark.

    It has no bound of its own: a device that stands still is seen by who watches the worker's progress, as any
    computation that does not end.

    Args:
        check: called now and then; what it raises ends the wait.
    Raises:
        RuntimeError: the device has failed, in its own words.
    """
    while not mark.has_passed():
        check()
        time.sleep(WAIT_TURN_S)


def read_tensors(device: Device, tensors: Sequence[torch.Tensor], check: Callable[[], None]) -> list[torch.Tensor]:
    """Tensors of a device in host memory, by one wait.

    Args:
        tensors: on the device.
        check: as of `wait_for`.
    """
    found = [device.fetch(tensor) for tensor in tensors]
    wait_for(device.mark(), check)
    return found


def batches_of(sizes: Sequence[int], most: Batch) -> Iterator[slice]:
    """Cuts blocks, in their order, into the fewest batches that are within bounds.

    Args:
        sizes: elements of each block. One of more than `most.elements` is a batch of its own.
    Returns:
        The slice of each batch.
    """
    first = elements = 0
    for place, size in enumerate(sizes):
        if place > first and (place - first == most.blocks or elements + size > most.elements):
            yield slice(first, place)
            first, elements = place, 0
        elements += size
    if first < len(sizes):
        yield slice(first, len(sizes))


class Reading:
    """One number.

    Args:
        all_of_them: what it is read with.
    """

    __slots__ = ("_all", "_value")

    def __init__(self, all_of_them: "Readings", value: float | None) -> None:
        self._all = all_of_them
        self._value = value

    @property
    def value(self) -> float:
        """The number; where it has not been read yet, all are, by one wait."""
        if self._value is None:
            self._all.read()
        assert self._value is not None
        return self._value

    def learn(self, value: float) -> None:
        """It has been read."""
        self._value = value


class Readings:
    """The numbers that are still to be read.

    Args:
        device: that computes them.
        check: called while the device is waited for.
    """

    def __init__(self, device: Device, check: Callable[[], None]) -> None:
        self._device = device
        self._check = check
        self._unread: list[tuple[Reading, torch.Tensor]] = []

    @property
    def are_known_at_once(self) -> bool:
        """Whether nothing has to be waited for: the host computes."""
        return self._device.is_host

    def note(self, number: torch.Tensor) -> Reading:
        """A number to be known later; on the host it is known at once.

        Args:
            number: a tensor of one element. It may change afterwards.
        """
        if self._device.is_host:
            return Reading(self, float(number.detach()))
        reading = Reading(self, None)
        self._unread.append((reading, number.detach().reshape(()).to(torch.float64, copy=True)))
        return reading

    def read(self) -> None:
        """Reads all that are not known."""
        if self._unread:
            (found,) = read_tensors(self._device, [torch.stack([number for _, number in self._unread])], self._check)
            for (reading, _), value in zip(self._unread, found.tolist(), strict=True):
                reading.learn(value)
            self._unread.clear()
