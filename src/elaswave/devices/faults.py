"""What an exception says of a device: the class of the fault, and the device's own words. Pure; asks no device.

Types come first, words second: older torch raises ``RuntimeError`` where newer has types of its own, and so do the
libraries behind it (cuBLAS, cuDNN, Triton).
"""

import enum
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from elaswave.errors import DeviceError


class FaultClass(enum.Enum):
    """Kinds of device faults; the value is what people read."""

    MEMORY = "out of device memory"
    """The context is whole."""
    CONTEXT = "broken device context"
    """A kernel has failed: whatever the process asks of the device from now on fails too, or does not end."""
    LOST = "lost device"
    """The device itself, or what it hangs on, has failed: the same, and no fault of what was computed."""
    OTHER = "device error"
    """Another one; it is not known what the context is worth."""
    UNOPENED = "device cannot be opened"


class DeviceFault(NamedTuple):
    """A fault of a device."""

    kind: FaultClass
    words: str
    """The device's own, one line."""

    @property
    def is_exact(self) -> bool:
        """Whether it is raised by the call that failed. Else the device had computed behind the worker's back, and the
        call that met the fault is a later one."""
        return self.kind in (FaultClass.MEMORY, FaultClass.UNOPENED)

    @property
    def is_of_the_device(self) -> bool:
        """Whether it is no fault of what was computed, so that another device may compute the same."""
        return self.kind is FaultClass.LOST

    @property
    def forbids_touch(self) -> bool:
        """Whether the device must not be asked anything any more, not even to take memory back: that may abort the
        process before it has told its end, or never return."""
        return not self.is_exact


def _types(name: str) -> tuple[type[BaseException], ...]:
    """Finds a type of torch, if this one has it."""
    kind = getattr(torch, name, None)
    return () if kind is None else (kind,)


_NO_MEMORY = _types("OutOfMemoryError")
_OF_DEVICES = _types("AcceleratorError")
_OF_A_DEVICE = re.compile(
    r"\b(CUDA|HIP)( driver)? (error|out of memory)|\bCU(BLAS|DNN)_STATUS_|\bcuDNN error|Triton Error \["
)
"""Of a ``RuntimeError``: whether it is one of a device."""
_WORDS: tuple[tuple[FaultClass, re.Pattern[str]], ...] = (
    (FaultClass.MEMORY, re.compile(r"out of memory|_STATUS_ALLOC_FAILED|memory allocation")),
    (
        FaultClass.LOST,
        re.compile(
            r"\bECC\b|\bXid\b|uncorrectable|NVLink|nvlink|fallen off the bus|(device|GPU) (is |was )?lost|"
            r"no CUDA-capable device|busy or unavailable|device.* unavailable|reset required|unknown error|"
            r"driver shutting down|system not yet initialized"
        ),
    ),
    (
        FaultClass.CONTEXT,
        re.compile(
            r"illegal memory access|device-side assert|misaligned address|illegal instruction|invalid program counter|"
            r"(shared|global|local)( or \w+)? address space|invalid address space|hardware stack error|launch failure|"
            r"launch timed out|context is destroyed|_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
        ),
    ),
)


def fault_of(error: BaseException) -> DeviceFault | None:
    """Finds the fault of a device that an exception tells of, also as its cause; None: it tells of none.

    Args:
        error: as it was caught.
    """
    for each in _and_causes(error):
        if isinstance(each, _NO_MEMORY):
            return DeviceFault(FaultClass.MEMORY, _line(each))
        if isinstance(each, DeviceError):
            return DeviceFault(FaultClass.UNOPENED, _line(each))
        text = _text(each)
        if isinstance(each, _OF_DEVICES) or (isinstance(each, RuntimeError) and _OF_A_DEVICE.search(text)):
            return DeviceFault(
                next((kind for kind, said in _WORDS if said.search(text)), FaultClass.OTHER), _line(each)
            )
    return None


def _and_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, what it was raised from or while handling, and so on."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of what an exception says of itself
        return ""


def _line(error: BaseException) -> str:
    """Returns the first line: behind it torch advises how to look for the cause."""
    lines = _text(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
