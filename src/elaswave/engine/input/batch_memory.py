"""Micro-batches between processes: tensors in anonymous memory that a descriptor stands for. It has no name to stay.

The memory lives as long as someone holds its descriptor or a tensor in it, whoever is killed in between. It holds the
length of a pickle, the pickle, and behind it the tensors, each at a multiple of 64 bytes; in the pickle a place stands
for each tensor.
"""

import io
import os
import pickle
import struct
from typing import Any, NamedTuple

import torch

_ALIGN = 64
_LENGTH = struct.Struct("<Q")


class _Place(NamedTuple):
    """Where a tensor lies."""

    offset: int
    """Behind the pickle."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Pickler(pickle.Pickler):
    """Puts aside the tensors of a value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self._offset = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        place = _Place(self._offset, value.dtype, tuple(value.shape))
        self.tensors.append(value)
        self._offset += _aligned(value.nbytes)
        return tuple(place)


class _Unpickler(pickle.Unpickler):
    """Finds the tensors of a value in mapped memory."""

    def __init__(self, pickled: bytes, memory: torch.UntypedStorage) -> None:
        super().__init__(io.BytesIO(pickled))
        self._memory = memory
        self._begin = _aligned(_LENGTH.size + len(pickled))

    def persistent_load(self, pid: Any) -> torch.Tensor:
        place = _Place(*pid)
        offset, count = (self._begin + place.offset) // place.dtype.itemsize, torch.Size(place.shape).numel()
        flat = torch.empty(0, dtype=place.dtype).set_(self._memory, offset, torch.Size([count]), torch.Size([1]))
        return flat.reshape(place.shape)


def to_memory(value: Any) -> int:
    """Puts a value into anonymous memory.

    Args:
        value: can be pickled; its tensors are dense and on the CPU.
    Returns:
        The memory's descriptor, to be closed by the caller.
    Raises:
        Exception: it cannot be pickled, or there is no memory.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    head = _LENGTH.pack(pickled.tell()) + pickled.getvalue()
    descriptor = os.memfd_create("elaswave-batch", os.MFD_CLOEXEC)
    try:
        offset = _aligned(len(head))
        os.ftruncate(descriptor, max(1, offset + sum(_aligned(tensor.nbytes) for tensor in pickler.tensors)))
        _write(descriptor, memoryview(head), 0)
        for tensor in pickler.tensors:
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                _write(descriptor, flat.view(torch.uint8).numpy().data, offset)
            offset += _aligned(tensor.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def from_memory(descriptor: int) -> Any:
    """The value that `to_memory` has put there; its tensors lie in the memory itself.

    Args:
        descriptor: of the memory; may be closed afterwards.
    """
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    pickled = os.pread(descriptor, length, _LENGTH.size)
    # Unlike Python's mmap, this holds no descriptor as long as the memory is mapped: there may be many at a time.
    name, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
    memory = torch.UntypedStorage.from_file(name, True, size)
    assert isinstance(memory, torch.UntypedStorage)
    return _Unpickler(pickled, memory).load()


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
