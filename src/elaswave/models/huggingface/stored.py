"""Tensors in safetensors files, by the ranges of bytes that they are.

The headers are read once, by whoever describes the model; a worker that builds a layer reads that layer's ranges and
nothing else. The ranges are read with ``pread``, not through the safetensors package: that one maps whole files, where
nobody can say which bytes were read, and takes every page over a network file system one by one.

    8 bytes: length of the header, little-endian; the header, JSON: name -> dtype, shape, data_offsets; then the data
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from elaswave.errors import UsageError
from elaswave.untrusted import decode_json, is_plain_name, open_binary, open_regular, read_json, reason

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES_MAX = 1 << 25  # of a quarter of a million tensors; what it becomes in memory is some times as much
_INDEX_BYTES_MAX = 1 << 27
_DIMENSIONS_MAX = 64
_COMPARED_BYTES = 1 << 24
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class _Index(msgspec.Struct, frozen=True):
    """What of an index is read."""

    weight_map: dict[str, str]


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    path: Path
    start: int
    """First byte in the file."""
    stop: int
    dtype: str
    """As the file calls it: "F32"."""
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Reads the tensor, into memory of its own.

        Raises:
            UsageError: the file is gone, or is shorter than its header said.
        """
        values = torch.empty(math.prod(self.shape), dtype=DTYPES[self.dtype])
        self._fill(memoryview(values.view(torch.uint8).numpy().data), self.start)
        return values.view(self.shape)

    def equals(self, other: "StoredTensor") -> bool:
        """Tells whether another tensor of the same shape has the same values; stops reading where they differ.

        Raises:
            UsageError: as of `read`.
        """
        if self.dtype != other.dtype:
            wide = {self.dtype, other.dtype} <= DTYPES.keys()
            return wide and bool(self.read().double().equal(other.read().double()))
        for at in range(0, self.stop - self.start, _COMPARED_BYTES):
            ours, theirs = (bytearray(min(_COMPARED_BYTES, self.stop - self.start - at)) for _ in range(2))
            self._fill(memoryview(ours), self.start + at)
            other._fill(memoryview(theirs), other.start + at)
            if ours != theirs:
                return False
        return True

    def _fill(self, buffer: memoryview, start: int) -> None:
        try:
            descriptor = open_regular(self.path)
            try:
                read_range(descriptor, buffer, start)
            finally:
                os.close(descriptor)
        except EOFError as error:
            raise UsageError(
                f"{self.path} ends before byte {self.stop}, where its header has a tensor: the file was cut off or "
                "changed; bring it again"
            ) from error
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read: {reason(error)}; bring the checkpoint back") from error


def read_range(descriptor: int, buffer: memoryview, start: int) -> None:
    """Fills a buffer from a file; every byte of weights that a worker reads comes through here.

    Raises:
        EOFError: the file is too short.
        OSError: it cannot be read.
    """
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], start + filled)
        if count == 0:
            raise EOFError
        filled += count


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Finds all tensors of a checkpoint by name, from the headers of its files.

    Args:
        folder: with ``model.safetensors``, or else with ``model.safetensors.index.json`` and the files that it names.
    Raises:
        UsageError: there is neither, or a file is damaged.
    """
    if (folder / SINGLE).is_file():  # where there are both, transformers takes the one file too
        return dict(_header(folder / SINGLE))
    if (folder / INDEX).is_file():
        return _indexed(folder)
    others = sorted(path.name for path in folder.glob("*.bin"))[:3] + sorted(p.name for p in folder.glob("*.gguf"))[:3]
    found = f"it has {', '.join(others)}" if others else "it has no weights"
    raise UsageError(
        f"{folder} has neither {SINGLE} nor {INDEX}; {found}. Load it with transformers' from_pretrained and write it "
        "with save_pretrained, which makes safetensors; for random weights give the configuration instead of the "
        "folder"
    )


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a checkpoint in several files."""
    try:
        places = read_json(folder / INDEX, _Index, _INDEX_BYTES_MAX).weight_map
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / INDEX} cannot be read as an index ({reason(error)}): bring the file again"
        ) from error
    files = sorted(set(places.values()))
    found: dict[str, StoredTensor] = {}
    for name in files:
        if not is_plain_name(name):
            raise UsageError(f"{folder / INDEX} names the file {name!r}, needed: a file in the same folder")
        inside = dict(_header(folder / name))
        found |= {tensor: place for tensor, place in inside.items() if places.get(tensor) == name}
    missing = [tensor for tensor in places if tensor not in found]
    if missing:
        raise UsageError(
            f"{folder / INDEX} says that {missing[0]} is in {places[missing[0]]}, which does not have it "
            f"({len(missing)} tensors in all): the files are not of one checkpoint; bring them again"
        )
    return found


def _header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Reads what a file's header says.

    Raises:
        UsageError: it is no safetensors file, or it is cut off.
    """
    try:
        with open_binary(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_HEADER_BYTES_MAX, num_bytes - 8):
                raise ValueError(f"a header of {length} bytes in a file of {num_bytes}")
            header = decode_json(file.read(length), dict[str, msgspec.Raw])
        first = 8 + length
        entries = {name: decode_json(bytes(raw), _Entry) for name, raw in header.items() if name != "__metadata__"}
        tensors = [
            (name, StoredTensor(path, first + start, first + stop, each.dtype, each.shape))
            for name, each in entries.items()
            for start, stop in [each.data_offsets]
        ]
        for name, place in tensors:
            _check_extent(name, place, first, num_bytes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}; bring the file again") from error
    except ValueError as error:
        raise UsageError(f"{path} is no whole safetensors file ({error}): bring the file again") from error
    yield from tensors


_ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def _check_extent(name: str, place: StoredTensor, first: int, num_bytes: int) -> None:
    if not first <= place.start <= place.stop <= num_bytes:
        raise ValueError(f"{name} is said to end at byte {place.stop} of {num_bytes}")
    if len(place.shape) > _DIMENSIONS_MAX or any(not 0 <= size < 1 << 62 for size in place.shape):
        raise ValueError(f"{name} has a shape that no tensor has")
    item = _ITEM_BYTES.get(place.dtype)
    if item is not None and place.stop - place.start != item * math.prod(place.shape):
        raise ValueError(f"{name} of shape {list(place.shape)} has {place.stop - place.start} bytes")
