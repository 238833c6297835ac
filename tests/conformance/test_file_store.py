"""The journal in a file keeps what it has acknowledged, rolls back what it has not, and refuses damage."""

import gc
import os
import runpy
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elaswave.errors import StoreError
from elaswave.store import file_store as store_module
from elaswave.store.file_store import FORMAT, FileStore
from elaswave.store.store import Store


class Raised(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str = ""


class Decided(msgspec.Struct, frozen=True, tag=True):
    generation: int
    vector: bytes = b""


Record = Raised | Decided
KEPT = [Raised(1, "one"), Decided(2, b"two")]


class Journal:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "control" / "journal"
        self.beside = folder / "control" / "journal-journal"

    def open(self, record_type: object = Record) -> FileStore:
        return FileStore(self.path, record_type)

    def read(self) -> tuple[bytes, bytes]:
        """The file, and what sqlite rolls back from."""
        return self.path.read_bytes(), self.beside.read_bytes() if self.beside.exists() else b""

    def write(self, content: bytes, beside: bytes = b"") -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(content)
        self.beside.write_bytes(beside)

    def edit(self, *statements: str) -> None:
        """Changes the file as sqlite would."""
        database = sqlite3.connect(self.path, isolation_level=None)
        for statement in statements:
            database.execute(statement)
        database.close()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def found(journal: Journal) -> list[Record]:
    store = journal.open()
    try:
        return store.records()
    finally:
        store.close()


def filled(journal: Journal, *records: Record) -> bytes:
    """Appends to a journal, each record by itself, and returns its bytes."""
    store = journal.open()
    for record in records:
        store.append(record)
    store.close()
    return journal.read()[0]


def test_two_coordinators_cannot_hold_one_journal(journal):
    first = journal.open()
    with pytest.raises(StoreError, match="another coordinator holds"):
        journal.open()
    first.append(Raised(1))
    first.close()
    assert found(journal) == [Raised(1)]


@pytest.mark.parametrize("last", [(Raised(3, "x" * 1500),), (Raised(3), Decided(3, bytes(range(256)) * 40))])
def test_a_crash_anywhere_in_an_append_loses_nothing_that_was_acknowledged(journal, last):
    """sqlite first writes what it would roll back from, then the pages in their order, then that it is done."""
    before = filled(journal, *KEPT)
    store = journal.open()
    assert store._database is not None
    store._database.execute("BEGIN")
    store.append(*last)
    _, beside = journal.read()
    assert beside[0], "it can be rolled back"
    store._database.execute("COMMIT")
    after, done = journal.read()
    store.close()
    assert not done[0] and len(after) >= len(before)
    for length in {*range(0, len(after), 500), *range(0, len(after), 4096), len(after)}:
        journal.write(after[:length] + before[length:], beside)
        assert found(journal) == KEPT
        # What follows is as if the crash had not been.
        filled(journal, Raised(3))
        assert found(journal) == [*KEPT, Raised(3)]
    for length in range(0, len(beside), 500):  # the pages are written when all of this is
        journal.write(before, beside[:length])
        assert found(journal) == KEPT
    journal.write(after, done)
    assert found(journal) == [*KEPT, *last]


def test_a_crash_while_the_journal_is_made_leaves_an_empty_one(journal):
    database = sqlite3.connect(journal.path.parent.parent / "made", isolation_level=None)
    database.executescript(f"PRAGMA synchronous=OFF; BEGIN; {store_module._TABLE}; PRAGMA user_version={FORMAT}")
    beside = (journal.path.parent.parent / "made-journal").read_bytes()
    database.execute("COMMIT")
    database.close()
    made = (journal.path.parent.parent / "made").read_bytes()
    for length in range(0, len(made) + 1, 512):
        journal.write(made[:length], beside)
        assert found(journal) == []
        filled(journal, Raised(1))
        assert found(journal) == [Raised(1)]


def test_every_damaged_byte_of_an_acknowledged_record_is_noticed(journal):
    """Of the others (what sqlite leaves unused, counters that it compares with nothing) none costs a record."""
    records = [Raised(1, "first"), Decided(2, b"second"), Raised(3, "third")]
    content = filled(journal, *records)
    refused = []
    for at in {*(at for at, byte in enumerate(content) if byte), *range(0, len(content), 97)}:
        damaged = bytearray(content)
        damaged[at] ^= 0x01 if at % 2 else 0xFF
        journal.write(bytes(damaged))
        try:
            assert found(journal) == records
        except StoreError as error:
            assert str(journal.path) in str(error)
            refused.append(at)
    for record in records:
        begin = content.index(msgspec.msgpack.encode([record]))
        assert refused and set(range(begin, begin + len(msgspec.msgpack.encode([record])))) <= set(refused)
    journal.write(content)
    assert found(journal) == records


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM entries WHERE number = 1",
        "UPDATE entries SET number = 7 WHERE number = 3",
        "UPDATE entries SET payload = (SELECT payload FROM entries WHERE number = 1) WHERE number = 2",
        "UPDATE entries SET payload = 'text' WHERE number = 2",
        "INSERT INTO entries (payload, digest) SELECT payload, digest FROM entries WHERE number = 3",
    ],
)
def test_an_entry_that_is_missing_or_moved_is_noticed(journal, statement):
    filled(journal, Raised(1), Raised(2), Raised(3))
    journal.edit(statement)
    with pytest.raises(StoreError, match="is damaged"):
        journal.open()


def test_last_entries_that_no_page_refers_to_are_missed(journal):
    """One byte of a page says how many rows it has."""
    content = bytearray(filled(journal, Raised(1), Raised(2), Raised(3)))
    rows = 4096 + 4
    assert content[rows] == 3
    for count in (0, 1, 2):
        content[rows] = count
        journal.write(bytes(content))
        with pytest.raises(StoreError, match=f"is damaged, although {count} entries are whole"):
            journal.open()


def test_a_file_that_is_no_journal_is_refused(journal):
    for content in (b"step,loss\n1,5.6\n", b"x" * 5000):
        journal.write(content)
        with pytest.raises(StoreError, match="is not a coordinator's journal: file is not a database"):
            journal.open()
        assert journal.path.read_bytes() == content


def test_another_format_is_refused_in_one_line(journal):
    filled(journal, Raised(1))
    journal.edit(f"PRAGMA user_version={FORMAT + 1}")
    with pytest.raises(StoreError, match=rf"of format {FORMAT}: its format is {FORMAT + 1}; go on with") as raised:
        journal.open()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TRIGGER more AFTER INSERT ON entries BEGIN DELETE FROM entries; END",),
        (
            "DROP TABLE entries",
            "CREATE VIEW entries AS WITH RECURSIVE n(number) AS (SELECT 1 UNION ALL SELECT 1 FROM n) "
            "SELECT number, x'90' AS payload, x'00' AS digest FROM n",
        ),
    ],
)
def test_a_database_that_would_run_code_of_its_own_is_refused(journal, statements):
    filled(journal, Raised(1))
    journal.edit(*statements)
    with pytest.raises(StoreError, match="is not a coordinator's journal"):
        journal.open()


def test_an_unusable_path_is_a_store_error(tmp_path):
    (tmp_path / "control").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match="cannot be used"):
        Journal(tmp_path).open()


@pytest.mark.parametrize("name", ["journal", "journal-journal"])
def test_a_pipe_or_a_link_is_refused_without_waiting(journal, name):
    filled(journal, Raised(1))
    file = journal.path.with_name(name)
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink()
        make(file)
        with pytest.raises(StoreError, match=f"{name} cannot be used: it is no regular file"):
            journal.open()


def test_after_a_failed_append_the_store_takes_no_more(journal):
    store = journal.open()
    store.append(Raised(1))
    assert store._database is not None
    store._database.execute("PRAGMA max_page_count=2")  # as on a full disk
    with pytest.raises(StoreError, match="an append failed: database or disk is full; free space"):
        store.append(Raised(2, "x" * 9000))
    with pytest.raises(StoreError, match="takes no records: an append failed"):
        store.append(Raised(3))
    assert store.records() == [Raised(1)]
    store.close()
    assert found(journal) == [Raised(1)]


def test_a_folder_that_is_removed_stops_nothing_until_the_journal_is_opened_again(journal):
    for records in ([], [Raised(1)]):
        filled(journal, *records)
        store = journal.open()
        shutil.rmtree(journal.path.parent)
        store.append(Raised(2))
        store.append(Raised(3, "x" * 20_000))
        assert store.records() == [*records, Raised(2), Raised(3, "x" * 20_000)]
        store.close()
        assert found(journal) == []
        shutil.rmtree(journal.path.parent)


def test_a_python_without_sqlite_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(ImportError, match="this Python was built without sqlite.*: use another"):
        runpy.run_path(store_module.__file__)


def test_no_descriptor_is_left(journal):
    before = len(os.listdir("/proc/self/fd"))
    found(journal)
    store = journal.open()
    with pytest.raises(StoreError):
        journal.open()
    store.close()
    journal.write(b"damaged")
    with pytest.raises(StoreError):
        journal.open()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_takes_no_records_and_its_end_costs_its_parent_nothing(journal):
    """Not even in the middle of an append: sqlite must not end that in the child."""
    filled(journal, *KEPT)
    store = journal.open()
    assert store._database is not None
    store._database.execute("BEGIN")
    store.append(Raised(3))
    half = journal.read()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.append(Raised(4))
        except StoreError as error:
            status = 0 if "it belongs to the process that has opened it" in str(error) else 1
        store.close()
        gc.collect()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert journal.read() == half
    store._database.execute("COMMIT")
    with pytest.raises(StoreError, match="another coordinator holds"):
        journal.open()
    store.close()
    assert found(journal) == [*KEPT, Raised(3)]


HOLDER = """
import os, sys
from pathlib import Path
import msgspec
from elaswave.store.file_store import FileStore
class Raised(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str = ""
store = FileStore(Path(sys.argv[1]), Raised)
# A child that lives on must not keep its dead parent's lock.
if os.fork() == 0:
    os.read(0, 1)
    os._exit(0)
generation = 0
while True:
    store.append(Raised(generation, "x" * (generation % 7 * 900)))
    os.write(1, b".")
    generation += 1
"""


def test_a_coordinator_killed_at_any_instant_loses_nothing_and_its_lock_ends_with_it(tmp_path):
    path = tmp_path / "journal"
    children_read, children_write = os.pipe()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=children_read,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        acknowledged = len(holder.stdout.read(100))
        with pytest.raises(StoreError, match="another coordinator holds"):
            FileStore(path, Raised)
        holder.send_signal(signal.SIGKILL)
        # Not reaped yet: the next coordinator waits until the kernel has let go.
        store: Store[Raised] = FileStore(path, Raised, lock_timeout_s=20)
        os.set_blocking(holder.stdout.fileno(), False)
        acknowledged += len(holder.stdout.read() or b"")
        generations = [record.generation for record in store.records()]
        assert generations == list(range(len(generations)))
        assert acknowledged <= len(generations) <= acknowledged + 1
        store.close()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
        os.close(children_read)
        os.close(children_write)
