"""What a worker computes on, as the rest of it sees that: `Device`, and the processor as the first device.

A device may compute behind the caller's back: a call returns when its kernels are queued. What the host has to know of
that is a `Mark`, a moment in the device's queue that has passed or not. Nothing here blocks but `wait_for`, which asks
again and again, so that bytes move and interrupts arrive meanwhile. Numbers that a device computes and the host is to
know (`Readings`) are read together, by one wait.

The processor (`HOST`) copies nothing and waits for nothing. Each other kind is in a file of its own; a worker opens its
own device (`elaswave.devices.opening`), and processes that compute nothing open none.

Draws come from generators at the device. Every draw is keyed by what it is for, never by who makes it or what came
before, so no draw depends on the layout. Nothing outside of this folder seeds a generator by itself: one that is keyed
by the processor's alone would depend on what was drawn there before.
"""

import contextlib
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from elaswave.hashing import key64
from elaswave.types import Gauges

WAIT_TURN_S = 50e-6
"""Between two looks at a mark."""


class DeviceMemory(NamedTuple):
    """The memory of a device, as all processes share it."""

    free_bytes: int
    total_bytes: int


class Mark(Protocol):
    """A moment in the order of what a device computes."""

    def has_passed(self) -> bool:
        """Tells whether the device has come so far.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Measures the seconds of the device from an earlier mark of the same device to this one; both have passed."""
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
        """Hashes the object: there is one for each worker."""
        ...

    def memory(self) -> DeviceMemory | None:
        """Tells what is free now; None: it is not waited for.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def gauges(self) -> Gauges | None:
        """Reads what the device tells of itself now, quickly and without waiting for what is queued; None: nothing.

        Raises:
            RuntimeError: the device has failed, in its own words.
        """
        ...

    def seed(self, key: int) -> None:
        """Seeds the device's own generator; the host's are `elaswave.devices.interface`'s.

        Args:
            key: in [0, 2**64).
        """
        ...

    def generator_kept(self) -> AbstractContextManager[None]:
        """Gives the device's own generator its state back at the end."""
        ...

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a copy of a host tensor on the device. What is computed next sees it; the host's memory may be changed
        at once."""
        ...

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Does the same as `bring` into memory of the device, or with what is for the host alone into the host's; the
        memory is of the same shape and type."""
        ...

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Makes host memory of a tensor's shape and type that is quick to copy from and to, contiguous; it is without
        content."""
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
        """Marks the present end of the queue, fetches included."""
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
    """Reads tensors of a device into host memory, by one wait.

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
        """Notes a number to be known later; on the host it is known at once.

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


class _Now:
    """A moment of the host: it has passed."""

    def __init__(self) -> None:
        self._at_s = time.monotonic()

    def has_passed(self) -> bool:
        """It has."""
        return True

    def seconds_since(self, earlier: Mark) -> float:
        """Measures by the monotonic clock."""
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
        """Returns the tensor itself."""
        return tensor

    def bring_into(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copies it, if it is elsewhere."""
        if tensor.data_ptr() != out.data_ptr():
            out.copy_(tensor)

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Makes ordinary memory."""
        return torch.empty(like.shape, dtype=like.dtype)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself."""
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


def seed_host(key: int) -> None:
    """Seeds the processor's.

    Args:
        key: in [0, 2**64); torch's generator uses only the low 32 bits.
    """
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)


def seed_at(place: torch.device, key: int) -> None:
    """Seeds the one that draws at a place come from.

    Args:
        place: where the drawn tensor is to lie.
        key: in [0, 2**64).
    """
    if place.type == "cpu":
        seed_host(key)
        return
    module = torch.get_device_module(place.type)
    generators = getattr(module, "default_generators", ())
    if generators:
        generators[place.index or 0].manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    else:
        module.manual_seed_all(key & 0xFFFFFFFF)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the generators that `seed_everything` seeds their states back: in a person's own process, where they are
    not ours."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def seed_everything(*parts: int | str) -> None:
    """Seeds torch's, Python's and numpy's global generators for one purpose.

    Args:
        parts: what the draws are for, such as (run seed, step, micro-batch, layer, "forward").
    """
    key = key64(*parts)
    seed_host(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
