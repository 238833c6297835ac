"""Archives of ``torch.save`` that somebody else may have made: a tensor without its pickle, and plain values.

Such an archive is a zip file with a pickle that describes tensors, and a record with the elements of each. torch
unpacks records that are compressed, to any size, and the pickle may ask for memory that nothing stands for. A tensor of
which shape and type are known from elsewhere needs no pickle: its elements are one record.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\3\4"


def elements_in(data: bytes, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    """The elements of the one contiguous tensor that an archive holds. Its pickle is not read.

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
    """Plain values, and tensors among them, of which none is larger than the archive.

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
    """What an archive holds; unpacked it is no larger than it is."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
    except Exception as error:  # of many kinds, where fields contradict each other
        raise ValueError(f"it is no archive of torch.save ({error})") from error
    if any(file.compress_type != zipfile.ZIP_STORED for file in files) or sum(f.file_size for f in files) > len(data):
        raise ValueError("it would unpack to more than it is")
    return files


def _record(data: bytes, file: zipfile.ZipInfo) -> memoryview:
    """The bytes of a file, where they stand."""
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
    """Bytes of the largest tensor among plain values."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if not isinstance(value, Mapping | list | tuple | set) or id(value) in seen:
        return 0
    seen.add(id(value))
    parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else list(value)
    return max((_largest_tensor(part, seen) for part in parts), default=0)
