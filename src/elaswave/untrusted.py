"""Files and texts that somebody else may have made: opened, read and shown so that no content can do harm.

A file of a run's folder, a checkpoint, a model from elsewhere: who sent it chose what stands there. It may be a pipe
that nobody writes to, nested a million levels deep, or hold what a terminal obeys. Here such a file is opened without
waiting, is refused if it is no regular file, is read up to a limit, and is decoded with one kind of error. All code of
this package reads files through this module; `tests/unit/project/test_untrusted.py` finds what does not, and says what
is excepted. Absent: what a file has to say, and the error that a person sees; who reads it knows both.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec

JSON_BYTES_MAX = 1 << 28
"""Of a file of JSON or TOML, unless its reader knows better: a million steps of a run take a tenth of it."""
_CHUNK_BYTES = 1 << 20
_PIPES_OF_OUR_OWN = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")
"""What a shell calls a pipe that it has made for this command: ``<(...)``."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

# ---------------------------------------------------------------------------------------------------------------- files


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Opens a file that another may have put there, without waiting for anybody.

    A pipe that the shell has made for this command (``<(...)``) is read as a file is.

    Args:
        path: of the file. A link is followed to read, and never to write: it may lead to a file of this user's.
        flags: of ``open``.
        mode: of a file that is made.
    Returns:
        Its descriptor.
    Raises:
        OSError: it cannot be opened, or is no regular file. ``strerror`` says what it is.
    """
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a link, through which nothing is written", os.fspath(path)) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        own_pipe = kind == stat.S_IFIFO and os.fspath(path).startswith(_PIPES_OF_OUR_OWN)
        if kind != stat.S_IFREG and not own_pipe:
            if kind == stat.S_IFDIR:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
            what = f"it is {_KINDS.get(kind, 'something else')}, no regular file"
            raise OSError(errno.EINVAL, what, os.fspath(path))
        os.set_blocking(descriptor, True)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def open_binary(path: str | os.PathLike[str], most_bytes: int | None = None) -> BinaryIO:
    """Opens a file to read bytes from, as of `open_regular`.

    Args:
        path: of the file.
        most_bytes: that it may have; a file with holes may claim any size.
    Raises:
        OSError: as of `open_regular`, or it is longer.
    """
    descriptor = open_regular(path)
    if most_bytes is not None and os.fstat(descriptor).st_size > most_bytes:
        os.close(descriptor)
        raise _too_long(path, most_bytes)
    return os.fdopen(descriptor, "rb")


def open_to_write(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to write bytes into, made or emptied first, as of `open_regular`.

    Raises:
        OSError: as of `open_regular`.
    """
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "wb")


def open_text(path: str | os.PathLike[str], *, errors: str = "strict", newline: str | None = None) -> TextIO:
    """Opens a file to read UTF-8 text from, as of `open_regular`.

    Args:
        path: of the file.
        errors, newline: as of ``open``.
    Raises:
        OSError: as of `open_regular`.
    """
    return os.fdopen(open_regular(path), "r", encoding="utf-8", errors=errors, newline=newline)


def read_bytes(path: str | os.PathLike[str], most_bytes: int = JSON_BYTES_MAX) -> bytes:
    """Reads what a file holds.

    Args:
        path: of the file.
        most_bytes: as of `open_binary`.
    Raises:
        OSError: as of `open_regular`, or it is longer.
    """
    data = bytearray()
    with open_binary(path, most_bytes) as file:
        while chunk := file.read(_CHUNK_BYTES):
            data += chunk
            if len(data) > most_bytes:  # a pipe, or a file that grows
                raise _too_long(path, most_bytes)
    return bytes(data)


def _too_long(path: str | os.PathLike[str], most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is longer than {most_bytes} bytes", os.fspath(path))


def read_text(path: str | os.PathLike[str], most_bytes: int = JSON_BYTES_MAX) -> str:
    """Reads the UTF-8 text in a file.

    Raises:
        OSError: as of `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode()


def decode_json(data: bytes | str, type: Any = None) -> Any:
    """Decodes what a JSON document says.

    Args:
        data: the document.
        type: what it has to be, or a decoder of it; None: anything, also the numbers that JSON does not have.
    Raises:
        ValueError: it is no JSON, is nested too deeply, or is something else.
    """
    try:
        if type is None:
            return json.loads(data)
        if isinstance(type, msgspec.json.Decoder):
            return type.decode(data)
        return msgspec.json.decode(data, type=type)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def read_json(path: str | os.PathLike[str], type: Any = None, most_bytes: int = JSON_BYTES_MAX) -> Any:
    """Reads what a file of JSON says.

    Args:
        path: of the file.
        type: as of `decode_json`.
        most_bytes: as of `read_bytes`.
    Raises:
        OSError: as of `read_bytes`.
        ValueError: as of `decode_json`.
    """
    return decode_json(read_bytes(path, most_bytes), type)


def reason(error: Exception) -> str:
    """Describes an error of this module in words, without the file's name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or error.__class__.__name__


def is_plain_name(name: str) -> bool:
    """Tells whether a name from elsewhere is that of a file in a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\0"}


def stays_inside(path: Path) -> bool:
    """Tells whether what stands at a path in a folder is in that folder, whatever links there are.

    The folder of a snapshot in Hugging Face's cache holds links to files beside it, in ``blobs``.
    """
    folder, real = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    return real.parent == blobs or folder in real.parents
