"""Shard files: what a worker writes of a checkpoint, and what a worker reads of one, under any layout.

A shard file is a row of ``torch.save`` archives, one per rectangle, which is the file format of DCP's
``FileSystemWriter``; workers need neither its planners nor a process group, only plain data goes to the coordinator.
Both directions touch only the bytes they must: a writer holds one rectangle at a time beyond its pieces, a reader
opens the rectangles that overlap what it wants, each once, and checks their bytes before it uses them.

Somebody else may have made an archive: a zip file with a pickle that describes tensors, and a record with the elements
of each. torch unpacks records that are compressed, to any size, and the pickle may ask for memory that nothing stands
for. A tensor of which shape and type are known from elsewhere needs no pickle: its elements are one record.
"""

import io
import math
import os
import struct
import zipfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elaswave.blocks.chunks import decompose_run
from elaswave.checkpoints.files import cannot_write, read_item_bytes, read_manifest, run_of
from elaswave.checkpoints.format import ITEM_BYTES, SHARD_SUFFIX, WantedPiece, WrittenItem, checksum_of
from elaswave.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"


def elements_in(data: bytes, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    """Reads the elements of the one contiguous tensor that an archive holds. Its pickle is not read.

    Args:
        data: the archive.
        dtype: of the elements.
        num_elements: at least 1.
    Returns:
        A new 1-D tensor.
    Raises:
        ValueError: it holds something else.
    """
    records = [file for file in _files(data) if file.filename.endswith("/data/0")]
    num_bytes = num_elements * dtype.itemsize
    if len(records) != 1 or records[0].file_size != num_bytes:
        found = ", ".join(f"{record.file_size} bytes" for record in records) or "nothing"
        raise ValueError(f"it holds {found} and should hold {num_elements} elements of {dtype}, {num_bytes} bytes")
    return torch.frombuffer(bytearray(_record(data, records[0])), dtype=dtype)


def load_plain(data: bytes) -> Any:
    """Loads plain values, and tensors among them, of which none is larger than the archive.

    Args:
        data: the archive.
    Raises:
        ValueError: it holds something else.
    """
    pickles = [_record(data, file) for file in _files(data) if file.filename.endswith(".pkl")]
    if any(b"bytearray" in bytes(each) for each in pickles):  # weights_only lets a few bytes ask for gigabytes of them
        raise ValueError("it asks for memory that nothing stands for")
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: the pickle may say anything
        raise ValueError(f"it is no archive of plain values ({type(error).__name__}: {error})") from error
    if _largest_tensor(found, set()) > len(data):
        raise ValueError("it has a tensor that would be larger than all of it")
    return found


def _files(data: bytes) -> list[zipfile.ZipInfo]:
    """Lists what an archive holds; unpacked it is no larger than it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
    except Exception as error:  # of many kinds, where fields contradict each other
        raise ValueError(f"it is no archive of torch.save ({error})") from error
    if any(file.compress_type != zipfile.ZIP_STORED for file in files) or sum(f.file_size for f in files) > len(data):
        raise ValueError("it would unpack to more than it is")
    return files


def _record(data: bytes, file: zipfile.ZipInfo) -> memoryview:
    """Returns the bytes of a file, where they stand."""
    header = data[file.header_offset : file.header_offset + _LOCAL_HEADER.size]
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_MAGIC):
        raise ValueError(f"{file.filename} is not where the archive says")
    _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    start = file.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    found = memoryview(data)[start : start + file.file_size]
    if len(found) != file.file_size:
        raise ValueError(f"{file.filename} is cut off")
    return found


def _largest_tensor(value: Any, seen: set[int]) -> int:
    """Computes the bytes of the largest tensor among plain values."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if not isinstance(value, Mapping | list | tuple | set) or id(value) in seen:
        return 0
    seen.add(id(value))
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
    return max((_largest_tensor(part, seen) for part in parts), default=0)


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Element types that a checkpoint may hold, by the name that stands in its files."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """A run of a flattened tensor, to be written."""

    fqn: str
    """Full name in the checkpoint, such as "model.block.3.attention.qkv.weight"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    flat_start: int
    """First element of the run, row-major."""
    values: torch.Tensor
    """The elements, 1-D, on the CPU, of one of ``DTYPES``."""


def write_shard(folder: Path, shard: str, pieces: Sequence[Piece]) -> list[WrittenItem]:
    """Writes a worker's pieces of a checkpoint into a new file and syncs it to the disk.

    Safe to call in a background thread as long as the pieces' elements are not changed.

    Args:
        folder: the checkpoint's temporary folder, from ``checkpoint.shard_folder``.
        shard: name of the file without suffix, different for every worker, such as "worker-3-generation-1".
        pieces: in any order.
    Returns:
        One item per rectangle, for ``checkpoint_commit.commit_checkpoint``. No item spans two pieces, so that the same
        pieces that two workers have written can be told to be the same.
    Raises:
        CheckpointError: the file exists already or cannot be written (disk full, no permission).
    """
    assert shard and not set(shard) & set("/\\\0") and not shard.startswith("."), f"{shard!r} is no file name"
    path = folder / f"{shard}{SHARD_SUFFIX}"
    items: list[WrittenItem] = []
    try:
        with path.open("xb") as file:
            offset = 0
            for fqn, shape, start, values in sorted(pieces, key=lambda piece: (piece.fqn, piece.flat_start)):
                assert values.dim() == 1 and values.is_cpu and values.dtype in DTYPE_NAMES, f"{fqn}: {values.shape}"
                shape = tuple(shape)
                position = 0
                for rectangle in decompose_run(shape, start, len(values)):
                    num_elements = math.prod(rectangle.sizes)
                    # A copy of its own: torch.save writes the whole storage that a view belongs to.
                    part = values[position : position + num_elements].clone().view(rectangle.sizes)
                    position += num_elements
                    buffer = io.BytesIO()
                    torch.save(part, buffer)
                    data = buffer.getbuffer()
                    file.write(data)
                    items.append(
                        WrittenItem(
                            fqn=fqn,
                            offsets=rectangle.offsets,
                            sizes=rectangle.sizes,
                            shape=shape,
                            dtype=DTYPE_NAMES[values.dtype],
                            relative_path=path.name,
                            offset=offset,
                            length=len(data),
                            checksum=checksum_of(data),
                        )
                    )
                    offset += len(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as error:
        raise CheckpointError(f"{path} exists already; every worker needs a shard name of its own") from error
    except OSError as error:
        raise cannot_write(path, error) from error
    return items


def read_pieces(folder: Path, wanted: Sequence[WantedPiece]) -> list[torch.Tensor]:
    """Reads what `PieceReader.read` reads, at once."""
    return PieceReader(folder).read(wanted)


class PieceReader:
    """Reads runs of tensors from a committed checkpoint, whichever workers wrote them and however they were cut.

    The manifest lists every piece that any worker has written, so it is read once, and only what is asked for is
    looked at: a hundred workers that go back to a checkpoint together each want a hundredth of it.

    Args:
        folder: the checkpoint's folder.
    Raises:
        CheckpointError: the manifest is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._items: defaultdict[str, list[WrittenItem]] = defaultdict(list)
        for item in read_manifest(folder).items:
            self._items[item.fqn].append(item)
        self._runs: dict[str, list[tuple[int, int, WrittenItem]]] = {}

    def _runs_of(self, fqn: str) -> list[tuple[int, int, WrittenItem]]:
        """Lists (first element, elements, item), ascending."""
        runs = self._runs.get(fqn)
        if runs is None:
            items = self._items.get(fqn, ())
            runs = [(*run_of(item), item) for item in items]
            runs.sort(key=lambda run: run[0])
            self._runs[fqn] = runs
        return runs

    def read(self, wanted: Sequence[WantedPiece]) -> list[torch.Tensor]:
        """Reads runs, each checked.

        Args:
            wanted: runs to read, in any order, overlaps allowed.
        Returns:
            One new 1-D tensor per wanted run, of the stored element type.
        Raises:
            CheckpointError: a tensor is not in the checkpoint or has another shape, or the bytes needed are damaged.
        """
        results: list[torch.Tensor] = []
        copies: defaultdict[WrittenItem, list[tuple[torch.Tensor, int]]] = defaultdict(list)
        for piece in wanted:
            runs = self._runs_of(piece.fqn)
            num_elements = math.prod(piece.shape)
            if num_elements and not runs:
                raise CheckpointError(f"checkpoint {self._folder} has no tensor {piece.fqn!r}")
            if runs and runs[0][2].shape != tuple(piece.shape):
                raise CheckpointError(
                    f"{piece.fqn!r} has shape {list(runs[0][2].shape)} in checkpoint {self._folder}, not "
                    f"{list(piece.shape)}"
                )
            stop = piece.flat_start + piece.length
            assert 0 <= piece.flat_start <= stop <= num_elements, f"{piece} is not inside its tensor"
            result = torch.empty(piece.length, dtype=DTYPES[runs[0][2].dtype] if runs else torch.float32)
            results.append(result)
            first = bisect_right(runs, piece.flat_start, key=lambda run: run[0]) - 1
            for start, length, item in runs[max(first, 0) :]:
                if start >= stop:
                    break
                low, high = max(start, piece.flat_start), min(start + length, stop)
                if low < high:
                    copies[item].append((result[low - piece.flat_start : high - piece.flat_start], low - start))

        for item, elements in read_items(self._folder, list(copies)):
            for target, source in copies[item]:
                target.copy_(elements[source : source + len(target)])
        return results


def read_items(folder: Path, items: Sequence[WrittenItem]) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
    """Reads rectangles, each after a check of its bytes.

    Args:
        folder: the checkpoint's folder.
        items: in any order; they come back file by file, by offset.
    Returns:
        Pairs of an item and its elements, 1-D.
    Raises:
        CheckpointError: a file cannot be read, or its bytes are damaged.
    """
    for item, data in read_item_bytes(folder, items):
        try:
            elements = elements_in(data, DTYPES[item.dtype], math.prod(item.sizes))
        except ValueError as error:
            raise CheckpointError(
                f"{folder / item.relative_path} holds a part of {item.fqn!r} that is not one: {error}"
            ) from error
        yield item, elements
