"""The store of a job on one machine: a journal in a file of sqlite.

`append` returns when records will survive this process, and nothing is put off: `add` is `append`. A crash of the
machine they need not survive: no process that acts on a record outlives the machine either, so nothing is synced. The
process that opens a journal is its only writer until it ends or closes it.

Each append is one row, and one transaction. What a crash in the middle of an append leaves behind was never
acknowledged, and sqlite rolls it back at the next opening. sqlite has no checksums, so each row has a digest of its
payload and of all rows before it, and `quick_check` finds rows at the end that no page refers to any more. What does
not read back so is damage, and ends in a `StoreError` instead of being taken for the truth or thrown away. For the same
reason sqlite rolls back and has no write-ahead log: one with a damaged byte loses all that was written after it, and
sqlite does not tell.
"""

import ctypes
import hashlib
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from elaswave.errors import StoreError
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.store.store import WriterLease
from elaswave.untrusted import open_regular

try:
    import sqlite3
except ImportError as error:
    raise ImportError(
        "this Python was built without sqlite, which keeps a coordinator's journal: use another"
    ) from error

FORMAT = 1
"""Of the file: sqlite's `user_version`."""
_TABLE = "CREATE TABLE entries (number INTEGER PRIMARY KEY, payload BLOB NOT NULL, digest BLOB NOT NULL)"
_DIGEST_BYTES = 8
_JOURNAL_BYTES_MAX = 1 << 32
"""It is read whole."""
_ADVICE = "restore it from a copy, or remove it and resume the job from its last durable checkpoint"
_T = TypeVar("_T")


class FileStore(Generic[_T]):
    """A journal in a file.

    The lock is sqlite's, which the kernel keeps for the process (`fcntl`): it ends with its holder, however that dies,
    and no child inherits it.

    Args:
        path: of the file; it and its folder are made if they are missing.
        record_type: union of the records' types.
        lock_timeout_s: how long another coordinator that still holds the journal is waited for.
        job_generation: of the job, as in `elaswave.protocol.leadership.store_position.StorePosition`; drawn by who has
            created it.
    Raises:
        StoreError: another coordinator holds the journal, it is damaged, or the system refuses.
    """

    def __init__(self, path: Path, record_type: Any, *, lock_timeout_s: float = 0.0, job_generation: int = 0) -> None:
        self.path = path
        self._job_generation = job_generation
        self._lease = WriterLease(str(path))
        self._encoder = msgspec.msgpack.Encoder()
        self._records: list[_T] = []
        self._digest = b""
        self._trouble = "it is closed"
        self._database: sqlite3.Connection | None = None
        try:
            _check_regular(path)
            self._database = sqlite3.connect(path, timeout=lock_timeout_s, isolation_level=None)
            _open_stores.add(self)
            self._open(self._database, msgspec.msgpack.Decoder(list[record_type]))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise StoreError(f"the coordinator's journal {path} cannot be used: {error.strerror}") from error
            if isinstance(error, sqlite3.Error | UnicodeDecodeError):
                raise _refusal(path, error) from error
            raise
        self._trouble = ""

    def _open(self, database: sqlite3.Connection, decoder: msgspec.msgpack.Decoder[list[_T]]) -> None:
        # The lock is taken with the first transaction, and kept.
        database.executescript("PRAGMA locking_mode=EXCLUSIVE; PRAGMA synchronous=OFF; BEGIN EXCLUSIVE; COMMIT")
        # Only under the lock: another coordinator may be making the table.
        version, tables = _found(database)
        if not version and not tables:
            database.executescript(f"BEGIN; {_TABLE}; PRAGMA user_version={FORMAT}; COMMIT")
        elif version != FORMAT or tables != [_TABLE]:
            raise StoreError(
                f"{self.path} is not a coordinator's journal of format {FORMAT}: its format is {version}; go on with "
                "the release that has written it, or name another file"
            )
        for number, payload in enumerate(self._payloads(database)):
            self._take(self._decoded(decoder, number, payload))
        # What it rolls back from stays open between appends: to make and remove it takes twice as long, and cannot be
        # done where somebody has removed the folder. So it is opened now, with a transaction that changes nothing.
        database.executescript(f"PRAGMA journal_mode=PERSIST; PRAGMA user_version={FORMAT}")

    def _payloads(self, database: sqlite3.Connection) -> Iterator[bytes]:
        """Yields the payloads of all entries, compared with their digests."""
        count = 0
        for number, payload, digest in database.execute("SELECT number, payload, digest FROM entries ORDER BY number"):
            # Of any type, since sqlite keeps in a column whatever it finds there.
            if number != count + 1 or not isinstance(payload, bytes) or digest != self._next_digest(payload):
                raise StoreError(f"{self.path} is damaged in entry {count}: {_ADVICE}")
            self._digest = digest
            count += 1
            yield payload
        (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if sound != "ok":
            raise StoreError(f"{self.path} is damaged, although {count} entries are whole: {_ADVICE}")

    def _next_digest(self, payload: bytes) -> bytes:
        return hashlib.blake2b(self._digest + payload, digest_size=_DIGEST_BYTES).digest()

    def _decoded(self, decoder: msgspec.msgpack.Decoder[list[_T]], number: int, payload: bytes) -> list[_T]:
        try:
            return decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise StoreError(
                f"{self.path}: entry {number} holds another kind of record: {error}; it was written by another "
                "release, which must be used to go on with this job"
            ) from error

    def _take(self, records: list[_T]) -> None:
        self._records += records
        self._lease.took(records)

    def append(self, *records: _T) -> None:
        """Does what `Store.append` says, in one transaction, however many records there are."""
        if self._trouble:
            raise StoreError(f"{self.path} takes no records: {self._trouble}")
        self._lease.check(records)
        payload = self._encoder.encode(records)
        digest = self._next_digest(payload)
        try:
            self._write(payload, digest)
        except sqlite3.Error as error:
            self._trouble = f"an append failed: {error}"
            raise StoreError(f"{self.path}: {self._trouble}; free space or mend the disk, then start again") from error
        self._digest = digest
        self._take(list(records))

    def add(self, *records: _T) -> None:
        """Does what `Store.add` says, at once."""
        self.append(*records)

    def when_durable(self, call: Callable[[], None]) -> None:
        """Does what `Store.when_durable` says, at once."""
        call()

    def _write(self, payload: bytes, digest: bytes) -> None:
        assert self._database is not None
        self._database.execute("INSERT INTO entries (payload, digest) VALUES (?, ?)", (payload, digest))

    def records(self) -> list[_T]:
        """See `Store.records`."""
        return list(self._records)

    @property
    def store_position(self) -> StorePosition | None:
        """None: its file is private to the job."""
        return None

    def check(self, reported: StorePosition) -> bool:
        """See `Store.check`."""
        return reported.job_generation == self._job_generation

    def close(self) -> None:
        """See `Store.close`."""
        # The first trouble stays: it says more.
        self._trouble = self._trouble or "it is closed"
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def abandon(self) -> None:
        """Forgets the journal in a child of the process that has opened it: to close it would write to the file."""
        self._trouble = "it belongs to the process that has opened it"
        database, self._database = self._database, None
        if database is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))  # the interpreter's end would close it


def _check_regular(path: Path) -> None:
    """Makes the file if it is missing, and refuses what is no file, also beside it, where sqlite rolls back from.

    What is there is not opened: to close any descriptor of a file would end the lock that this process holds on it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(path):
        os.close(open_regular(path, os.O_RDWR | os.O_CREAT, 0o600))
    for file in (path, path.with_name(f"{path.name}-journal")):
        if not os.path.lexists(file):
            continue
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"the coordinator's journal {file} cannot be used: it is no regular file")
        if found.st_size > _JOURNAL_BYTES_MAX:
            raise StoreError(f"{file} is longer than {_JOURNAL_BYTES_MAX} bytes: no coordinator has written it")


def _found(database: sqlite3.Connection) -> tuple[int, list[str]]:
    """Reads the format of a file, and what it holds beside records: anything else than ours could have code run."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return version, [sql for (sql,) in database.execute("SELECT sql FROM sqlite_schema ORDER BY rowid")]


def _refusal(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> StoreError:
    """Makes the error that tells people of a journal that cannot be opened."""
    # The low byte is the kind of error, the rest a detail. Text that is none (`UnicodeDecodeError`) has no code.
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF:
        case sqlite3.SQLITE_BUSY:
            return StoreError(f"another coordinator holds {path}: end it first, or wait until it has ended")
        case sqlite3.SQLITE_NOTADB:
            return StoreError(f"{path} is not a coordinator's journal: {error}; name another file")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR:
            return StoreError(f"{path} is damaged: {_ADVICE}")  # sqlite's text would show what stands there
        case _:
            return StoreError(f"the coordinator's journal {path} cannot be used: {error}")


_open_stores: weakref.WeakSet[FileStore[Any]] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for store in list(_open_stores):
        store.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)
