"""The store of a job on one machine: an append-only journal in a file.

`append` returns when records will survive the machine's crash (or, where the store is told so, the process's), and
nothing is put off: `add` is `append`. The process that opens a journal is its only writer until it ends or closes it.
Journals are never rewritten, so no step of the storage's work can lose an old record.

A journal is a magic of 8 bytes, then one entry per append:

    magic 4 | length 4 | index 8 | crc32 of these 4 | payload (msgpack list of records) | blake2b of all before 8

What a crash in the middle of an append leaves behind (the beginning of the last entry, or one with sectors that were
never written and read as zeros) was never acknowledged and is cut off at the next opening. Anything else that does
not read back is damage, and ends in a `StoreError` instead of being taken for the truth or thrown away.
"""

import fcntl
import hashlib
import logging
import os
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from elaswave.errors import StoreError
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.store.store import WriterLease
from elaswave.untrusted import open_regular

_log = logging.getLogger("elaswave.store")

MAGIC = b"ELWJRNL1"

_ENTRY_MAGIC = b"\xe1Ent"
_FIELDS = struct.Struct("<4sIQ")
_CRC = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CRC.size
_DIGEST_BYTES = 8
_SECTOR_BYTES = 512
"""What a disk writes as one."""
_JOURNAL_BYTES_MAX = 1 << 32
"""It is read whole."""
_LOCK_POLL_S = 0.01
_T = TypeVar("_T")


# ---------------------------------------------------------------------------------------------------------- the bytes


def pack_entry(index: int, payload: bytes) -> bytes:
    """One entry as bytes.

    Args:
        index: its place in the journal, from 0.
    """
    fields = _FIELDS.pack(_ENTRY_MAGIC, len(payload), index)
    whole = fields + _CRC.pack(zlib.crc32(fields)) + payload
    return whole + _digest(whole)


def scan(data: bytes, name: str) -> tuple[list[bytes], int]:
    """Reads a journal.

    Args:
        data: its bytes.
        name: what it is called in messages.
    Returns:
        The payloads of its entries, and the length of the part that holds them; what follows was never acknowledged.
    Raises:
        StoreError: damage.
    """
    if data[: len(MAGIC)] != MAGIC:
        begun = data.rstrip(b"\0")
        if len(begun) < len(MAGIC) and MAGIC.startswith(begun):
            return [], 0  # a journal whose creation was interrupted
        raise StoreError(
            f"{name} is not a coordinator's journal: it begins with {data[: len(MAGIC)]!r}; name another file"
        )
    payloads: list[bytes] = []
    at = len(MAGIC)
    while at < len(data):
        payload = _entry_at(data, at, len(payloads))
        if payload is None:
            _check_torn(data, at, len(payloads), name)
            break
        payloads.append(payload)
        at += _HEADER_BYTES + len(payload) + _DIGEST_BYTES
    return payloads, at


def _header_at(data: bytes, at: int) -> tuple[int, int] | None:
    """Length and index that an undamaged header here tells, or None."""
    header = data[at : at + _HEADER_BYTES]
    if len(header) < _HEADER_BYTES or _CRC.unpack_from(header, _FIELDS.size)[0] != zlib.crc32(header[: _FIELDS.size]):
        return None
    magic, length, index = _FIELDS.unpack_from(header)
    return (length, index) if magic == _ENTRY_MAGIC else None


def _entry_at(data: bytes, at: int, index: int) -> bytes | None:
    """The payload of the entry with this index that stands here whole, or None."""
    header = _header_at(data, at)
    if header is None or header[1] != index:
        return None
    end = at + _HEADER_BYTES + header[0]
    if data[end : end + _DIGEST_BYTES] != _digest(data[at:end]):
        return None
    return data[at + _HEADER_BYTES : end]


def _check_torn(data: bytes, at: int, index: int, name: str) -> None:
    """Refuses everything but the remains of an append that was never acknowledged."""
    what = f"{name} is damaged at byte {at}, in entry {index}"
    advice = "restore it from a copy, or remove it and resume the job from its last durable checkpoint"
    found = data.find(_ENTRY_MAGIC, at + 1)
    while found >= 0:
        header = _header_at(data, found)
        if header is not None and header[1] > index and _entry_at(data, found, header[1]) is not None:
            # Appended later, hence after this one had been acknowledged.
            raise StoreError(f"{what}, although entry {header[1]} after it is whole: {advice}")
        found = data.find(_ENTRY_MAGIC, found + 1)
    written = len(data[at:].rstrip(b"\0"))
    header = _header_at(data, at)
    length = 0 if header is None else _HEADER_BYTES + header[0] + _DIGEST_BYTES
    if written < max(length, _HEADER_BYTES) or _has_unwritten_sector(data, at):
        return
    raise StoreError(f"{what}, which is complete but not what was written: {advice}")


def _has_unwritten_sector(data: bytes, at: int) -> bool:
    """Whether a sector from here on reads as zeros, so that it seems never to have reached the disk."""
    while at < len(data):
        stop = min(len(data), at - at % _SECTOR_BYTES + _SECTOR_BYTES)
        if stop - at >= _DIGEST_BYTES and not any(data[at:stop]):
            return True
        at = stop
    return False


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


# --------------------------------------------------------------------------------------------------------- the stores


class _Entries(Generic[_T]):
    """Records in memory, and as payloads of entries."""

    def __init__(self, record_type: Any, payloads: Sequence[bytes], name: str) -> None:
        self.all: list[_T] = []
        self.fence = WriterLease(name)
        decoder: msgspec.msgpack.Decoder[list[_T]] = msgspec.msgpack.Decoder(list[record_type])
        self._encoder = msgspec.msgpack.Encoder()
        self.num_entries = len(payloads)
        for index, payload in enumerate(payloads):
            try:
                self.take(decoder.decode(payload))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise StoreError(
                    f"{name}: entry {index} holds another kind of record: {error}; it was written by another release, "
                    "which must be used to go on with this job"
                ) from error

    def take(self, records: Sequence[_T]) -> None:
        self.all += records
        self.fence.took(records)

    def pack(self, records: Sequence[_T]) -> bytes:
        return pack_entry(self.num_entries, self._encoder.encode(records))


class FileStore(Generic[_T]):
    """A journal in a file.

    The lock is the kernel's (flock), so it ends with its holder, however that dies.

    Args:
        path: of the file; it and its folder are made if they are missing.
        record_type: union of the records' types.
        lock_timeout_s: how long another coordinator that still holds the journal is waited for.
        outlives_machine: False: records outlive this process, not a crash of the machine. That is enough, and saves
            the disk's time (2 to 25 ms an append), where no process that acts on a record outlives the machine either.
        job_generation: of the job, as in `elaswave.protocol.leadership.store_position.Head`; drawn by who has founded
            it.
    Raises:
        StoreError: another coordinator holds the journal, it is damaged, or the system refuses.
    """

    def __init__(
        self,
        path: Path,
        record_type: Any,
        *,
        lock_timeout_s: float = 0.0,
        outlives_machine: bool = True,
        job_generation: int = 0,
    ) -> None:
        self.path = path
        self._job_generation = job_generation
        self._outlives_machine = outlives_machine
        self._fd = -1
        self._trouble = "it is closed"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._lock(lock_timeout_s)
            self._open(record_type)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StoreError(f"the coordinator's journal {path} cannot be used: {error.strerror}") from error
            raise
        _open_stores.add(self)

    def _lock(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"another coordinator holds {self.path}: end it first, or wait until it has ended"
                    ) from None
                time.sleep(_LOCK_POLL_S)

    def _open(self, record_type: Any) -> None:
        if os.fstat(self._fd).st_size > _JOURNAL_BYTES_MAX:
            raise StoreError(f"{self.path} is longer than {_JOURNAL_BYTES_MAX} bytes: no coordinator has written it")
        data = bytearray()
        while chunk := os.pread(self._fd, 1 << 20, len(data)):
            data += chunk
        payloads, self._end = scan(bytes(data), str(self.path))
        self._records: _Entries[_T] = _Entries(record_type, payloads, str(self.path))
        if self._end < len(data):
            _log.warning("%s: %d bytes of an append that was interrupted are cut off", self.path, len(data) - self._end)
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        if not self._end:
            self._write(MAGIC)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._trouble = ""

    def append(self, *records: _T) -> None:
        """See `Store.append`. At most one fdatasync, however many records."""
        if self._trouble:
            raise StoreError(f"{self.path} takes no records: {self._trouble}")
        self._records.fence.check(records)
        try:
            self._write(self._records.pack(records))
        except OSError as error:
            # What is on the disk now is unknown: after a failed fdatasync the system may forget what it had to write.
            self._trouble = f"an append failed: {error.strerror}"
            raise StoreError(f"{self.path}: {self._trouble}; free space or mend the disk, then start again") from error
        self._records.num_entries += 1
        self._records.take(records)

    def add(self, *records: _T) -> None:
        """See `Store.add`; at once."""
        self.append(*records)

    def when_durable(self, call: Callable[[], None]) -> None:
        """See `Store.when_durable`; at once."""
        call()

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._fd, rest, self._end)
            self._end += written
            rest = rest[written:]
        if self._outlives_machine:
            os.fdatasync(self._fd)

    def records(self) -> list[_T]:
        """See `Store.records`."""
        return list(self._records.all)

    @property
    def store_position(self) -> StorePosition | None:
        """None: its file is private to the job."""
        return None

    def check(self, reported: StorePosition) -> bool:
        """See `Store.check`."""
        return reported.job_generation == self._job_generation

    def close(self) -> None:
        """See `Store.close`."""
        self._trouble = self._trouble or "it is closed"
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_open_stores: weakref.WeakSet[FileStore[Any]] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that kept the descriptor would keep the lock beyond its parent's end.
    for store in list(_open_stores):
        store.close()


os.register_at_fork(after_in_child=_close_in_child)
