"""The journal in a file keeps what it has acknowledged, cuts off what it has not, and refuses damage."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from elaswave.errors import StoreError
from elaswave.store import file_store as store_module
from elaswave.store.file_store import MAGIC, FileStore, pack_entry, scan
from elaswave.store.store import Store


class Raised(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str = ""


class Decided(msgspec.Struct, frozen=True, tag=True):
    generation: int
    vector: bytes = b""


Record = Raised | Decided


class Journal:
    def __init__(self, folder: Path, *, outlives_machine: bool = True) -> None:
        self.path = folder / "control" / "journal"
        self.outlives_machine = outlives_machine

    def open(self, record_type: object = Record) -> Store:
        return FileStore(self.path, record_type, outlives_machine=self.outlives_machine)

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, content: bytes) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_bytes(content)


@pytest.fixture(params=["file", "file of one machine"])
def journal(request, tmp_path) -> Journal:
    return Journal(tmp_path, outlives_machine=request.param == "file")


def found(journal: Journal) -> list[Record]:
    store = journal.open()
    try:
        return store.records()
    finally:
        store.close()


def filled(journal: Journal, *appends: tuple[Record, ...]) -> bytes:
    """Appends to a journal and returns its bytes."""
    store = journal.open()
    for records in appends:
        store.append(*records)
    store.close()
    return journal.read()


def test_two_coordinators_cannot_hold_one_journal(journal):
    first = journal.open()
    with pytest.raises(StoreError, match="another coordinator holds"):
        journal.open()
    first.append(Raised(1))
    first.close()
    assert found(journal) == [Raised(1)]


@pytest.mark.parametrize("last", [(Raised(3, "x" * 1500),), (Raised(3), Decided(3, b"\xe1Ent" * 20))])
def test_a_crash_at_every_byte_of_an_append_loses_nothing_that_was_acknowledged(journal, last, monkeypatch):
    # Thousands of journals, of which only the bytes matter.
    monkeypatch.setattr(store_module.os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(store_module.os, "fsync", lambda fd: None)
    kept = [Raised(1, "one"), Decided(2, b"two")]
    before = filled(journal, *[(record,) for record in kept])
    after = filled(journal, last)
    assert after.startswith(before)
    for length in range(len(before), len(after)):
        journal.write(after[:length])
        assert found(journal) == kept
        # What follows is as if the crash had not been.
        assert filled(journal, last) == after
        assert found(journal) == [*kept, *last]


def test_what_a_crash_left_behind_does_not_outlive_a_shorter_append(journal):
    before = filled(journal, (Raised(1),))
    after = filled(journal, (Decided(2, bytes(range(1, 255)) * 8),))
    for length in (len(before) + 100, len(after) - 1):
        journal.write(after[:length])
        filled(journal, (Raised(3),))
        assert found(journal) == [Raised(1), Raised(3)]


@pytest.mark.parametrize("length", range(len(MAGIC)))
def test_a_crash_while_the_journal_is_made_leaves_an_empty_one(journal, length):
    journal.write(MAGIC[:length])
    assert found(journal) == []
    filled(journal, (Raised(1),))
    assert found(journal) == [Raised(1)]


@pytest.mark.parametrize("missing", range(4))
def test_an_append_of_which_a_sector_was_never_written_is_cut_off(journal, missing):
    """Disks write sectors in any order, and a file system may have written the new length before them."""
    before = filled(journal, (Raised(1),))
    after = bytearray(filled(journal, (Decided(2, bytes(range(1, 255)) * 8),)))
    start = max(len(before), 512 * missing)
    stop = min(len(after), 512 * (missing + 1))
    after[start:stop] = bytes(stop - start)
    journal.write(bytes(after))
    assert found(journal) == [Raised(1)]
    journal.write(before + bytes(len(after) - len(before)))
    assert found(journal) == [Raised(1)]


def test_every_damaged_byte_of_an_acknowledged_record_is_noticed(journal):
    content = filled(journal, (Raised(1, "first"),), (Decided(2, b"second"),), (Raised(3, "third"),))
    for at in range(len(content)):
        for flip in (0x01, 0xFF):
            damaged = bytearray(content)
            damaged[at] ^= flip
            journal.write(bytes(damaged))
            with pytest.raises(StoreError, match=r"damaged at byte \d+, in entry|is not a coordinator's journal"):
                journal.open()
            assert journal.read() == damaged, "a damaged journal must stay as it is"
    journal.write(content)
    assert len(found(journal)) == 3


def test_an_entry_that_is_missing_or_moved_is_noticed(journal):
    first = filled(journal, (Raised(1),))
    second = filled(journal, (Raised(2),))
    third = filled(journal, (Raised(3),))
    for content in (
        first + third[len(second) :],
        first + second[len(first) :] * 2,
        first + third[len(second) :] + second[len(first) :],
    ):
        journal.write(content)
        with pytest.raises(StoreError, match="is damaged at byte"):
            journal.open()


def test_what_a_record_holds_cannot_be_taken_for_an_entry(journal):
    """A torn entry whose payload looks like later entries is still cut off."""
    before = filled(journal, (Raised(1),))
    inner = pack_entry(0, msgspec.msgpack.encode([Raised(9)])) * 3
    after = filled(journal, (Decided(2, inner),))
    journal.write(after[:-1])
    assert found(journal) == [Raised(1)]
    assert len(before) < len(after)


def test_a_file_that_is_no_journal_is_refused(journal):
    journal.write(b"step,loss\n1,5.6\n")
    with pytest.raises(StoreError, match="is not a coordinator's journal: it begins with b'step,los'"):
        journal.open()


def test_messages_name_the_file(tmp_path):
    journal = Journal(tmp_path)
    journal.write(b"something else")
    with pytest.raises(StoreError, match=str(journal.path)):
        journal.open()


def test_a_cut_is_logged(tmp_path, caplog):
    journal = Journal(tmp_path)
    journal.write(filled(journal, (Raised(1),)) + b"\xe1Ent")
    assert found(journal) == [Raised(1)]
    assert "4 bytes of an append that was interrupted are cut off" in caplog.text


def test_an_unusable_path_is_a_store_error(tmp_path):
    (tmp_path / "control").write_text("a file where a folder is needed")
    with pytest.raises(StoreError, match="cannot be used"):
        Journal(tmp_path).open()


def test_after_a_failed_append_the_store_takes_no_more(tmp_path, monkeypatch):
    store = Journal(tmp_path).open()
    store.append(Raised(1))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module.os, "fdatasync", full)
        with pytest.raises(StoreError, match="an append failed: No space left on device; free space"):
            store.append(Raised(2))
    with pytest.raises(StoreError, match="takes no records: an append failed"):
        store.append(Raised(3))
    assert store.records() == [Raised(1)]
    store.close()
    assert found(Journal(tmp_path))[0] == Raised(1)


def test_an_append_is_synced_before_it_returns(tmp_path, monkeypatch):
    store = Journal(tmp_path).open()
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(store_module.os, "fdatasync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    store.append(Raised(1), Raised(2))
    assert synced == [os.path.getsize(tmp_path / "control" / "journal")]
    store.close()


def test_no_descriptor_is_left(tmp_path):
    journal = Journal(tmp_path)
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


HOLDER = """
import os, sys, time
from pathlib import Path
import msgspec
from elaswave.store.file_store import FileStore
class Raised(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str = ""
store = FileStore(Path(sys.argv[1]), Raised)
store.append(Raised(7))
# A child that lives on must not keep its dead parent's lock.
child = os.fork()
if child == 0:
    os.read(0, 1)
    os._exit(0)
print("held", flush=True)
os.read(3, 1)
"""


def test_the_lock_ends_with_its_holder_and_can_be_waited_for(tmp_path):
    path = tmp_path / "journal"
    ours, theirs = os.pipe()
    children_read, children_write = os.pipe()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace("os.read(3", f"os.read({ours}"), str(path)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=children_read,
        stdout=subprocess.PIPE,
        pass_fds=[ours],
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match="another coordinator holds"):
            FileStore(path, Record)
        holder.send_signal(signal.SIGKILL)
        # Not reaped yet: the next coordinator waits until the kernel has let go.
        store: FileStore[Record] = FileStore(path, Record, lock_timeout_s=20)
        assert store.records() == [Raised(7)]
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store.close()
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
        for fd in (ours, theirs, children_read, children_write):
            os.close(fd)


def test_scanning_is_pure():
    entries = pack_entry(0, b"a") + pack_entry(1, b"bc")
    assert scan(MAGIC + entries, "it") == ([b"a", b"bc"], len(MAGIC) + len(entries))
    assert scan(MAGIC + entries + pack_entry(2, b"d")[:-1], "it") == ([b"a", b"bc"], len(MAGIC) + len(entries))
    assert scan(b"", "it") == ([], 0)
