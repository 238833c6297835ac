"""Records as etcd keeps them: a chain of entries, and what is too large for one as blobs beside it. No IO.

Keys of a job, all below one prefix: `spec` (the job exists), `term` (who may write), `rec/INDEX` (one entry: some
records), `blob/DIGEST/CHUNK`. Each entry holds the digest of the one before, so that a missing, changed or foreign one
is noticed. etcd takes at most 1.5 MiB in a request, and the placement of a large model may take
as much: placements are blobs of chunks, named by the digest of their content, and so are bodies that are too large.

A decision replaces all placements before it (`protocol/coordinator/history.py` keeps none of them), so their blobs may
be removed; in records that are read back such a placement is empty.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from elaswave.blocks.placement import Placement
from elaswave.errors import StoreError
from elaswave.protocol.messages import Decision

CHUNK_BYTES = 512 << 10
"""Most bytes of a blob's chunk, and of an entry's body: in base64 well below what etcd takes in a request."""
CHUNKS_MAX = 100
"""Of all blobs of one entry; etcd takes 128 comparisons in a transaction."""
_DIGEST_BYTES = 20
_NOWHERE = Placement.of((), ())
_T = TypeVar("_T")


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that stand beside the entries."""

    digest: str
    num_bytes: int

    @property
    def num_chunks(self) -> int:
        """How many keys it takes."""
        return max(1, -(-self.num_bytes // CHUNK_BYTES))

    @property
    def chunk_keys(self) -> list[str]:
        """Of its chunks, in order, below the job's prefix."""
        return [f"blob/{self.digest}/{chunk:04d}" for chunk in range(self.num_chunks)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Records that were appended at once."""

    term: int
    """Of the coordinator that has written it, as it stood in the store."""
    previous: bytes
    """Digest of the entry before."""
    nonce: bytes
    """Of the attempt to write it: who wrote an entry knows it by that."""
    body: bytes
    """The records; empty if they are a blob."""
    body_blob: Blob | None
    placements: tuple[tuple[int, Blob], ...]
    """Which of the records lack their placement, and where it is."""


class Packed(msgspec.Struct, frozen=True):
    """Records, ready to be written."""

    value: bytes
    """Of the entry's key."""
    nonce: bytes
    blobs: dict[Blob, bytes]
    """To be written before."""
    placements: tuple[tuple[int, Blob], ...]


def entry_key(index: int) -> str:
    """Makes the key of an entry, below the job's prefix; keys are in the order of the entries' numbers."""
    return f"rec/{index:016d}"


def content_digest(content: bytes) -> bytes:
    """Computes the digest by which contents are known."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def pack_records(records: Sequence[Any], previous: bytes, nonce: bytes, term: int = 0) -> Packed:
    """Makes an entry.

    Args:
        previous: digest of the entry before; empty for the first.
        nonce: that no other entry has.
        term: of the coordinator that writes it.
    Raises:
        StoreError: they are too large for any request.
    """
    blobs: dict[Blob, bytes] = {}
    placements: list[tuple[int, Blob]] = []
    slim: list[Any] = []
    for at, record in enumerate(records):
        placement = getattr(record, "placement", None)
        if isinstance(placement, Placement):
            blob = _add(blobs, msgspec.msgpack.encode(placement))
            placements.append((at, blob))
            record = msgspec.structs.replace(record, placement=_NOWHERE)
        slim.append(record)
    body = msgspec.msgpack.encode(slim)
    body_blob = None
    if len(body) > CHUNK_BYTES:
        body_blob, body = _add(blobs, body), b""
    num_chunks = sum(blob.num_chunks for blob in blobs)
    if num_chunks > CHUNKS_MAX:
        raise StoreError(
            f"{len(records)} records take {num_chunks} chunks of {CHUNK_BYTES} bytes, and at most {CHUNKS_MAX} fit "
            "into one transaction of etcd: a job of this size needs control.store=file"
        )
    entry = Entry(term, previous, nonce, body, body_blob, tuple(placements))
    return Packed(msgspec.msgpack.encode(entry), nonce, blobs, entry.placements)


def _add(blobs: dict[Blob, bytes], content: bytes) -> Blob:
    blob = Blob(content_digest(content).hex(), len(content))
    blobs[blob] = content
    return blob


def newest_term(values: Iterable[bytes]) -> int:
    """Finds the largest term of the coordinators that have written some entries; 0: there are none."""
    return max((msgspec.msgpack.decode(value, type=Entry).term for value in values), default=0)


def chunks_of(content: bytes) -> list[bytes]:
    """Lists what stands under the keys of a blob."""
    return [content[at : at + CHUNK_BYTES] for at in range(0, max(1, len(content)), CHUNK_BYTES)]


def supersedes(record: object) -> bool:
    """Tells whether no placement of an older record is needed any more."""
    return isinstance(record, Decision)


class BlobsInUse:
    """Which blobs entries need, as they are written or read one by one."""

    def __init__(self) -> None:
        self.needed: set[Blob] = set()
        """By a placement that counts."""
        self.kept: set[Blob] = set()
        """By an entry's body."""
        self.superseded: set[Blob] = set()
        """By none any more."""

    def take(self, entry: Entry | Packed, records: Sequence[object]) -> None:
        """An entry stands in the store."""
        placements = dict(entry.placements)
        for at, record in enumerate(records):
            if supersedes(record):
                self.superseded |= self.needed
                self.needed.clear()
            if at in placements:
                self.needed.add(placements[at])
        if isinstance(entry, Packed):
            self.kept |= set(entry.blobs) - set(placements.values())
        elif entry.body_blob is not None:
            self.kept.add(entry.body_blob)
        self.superseded -= self.needed | self.kept


class EntryReader(Generic[_T]):
    """Reads entries in their order.

    Args:
        name: of the store, in messages.
        record_type: union of the records' types.
        read: returns a blob's content.
    """

    def __init__(self, name: str, record_type: Any, read: Callable[[Blob], bytes]) -> None:
        self.digests: list[bytes] = []
        """Of all entries."""
        self.in_use = BlobsInUse()
        self._name = name
        self._read = read
        self._decoder: msgspec.msgpack.Decoder[list[_T]] = msgspec.msgpack.Decoder(list[record_type])
        self._records: list[_T] = []
        self._lacking: dict[int, Blob] = {}
        """Record -> the placement that is to be put in."""

    def take(self, key: str, value: bytes) -> None:
        """Takes the next entry.

        Raises:
            StoreError: it is not the next one, it is damaged, or of another release.
        """
        what = f"{self._name}: entry {len(self.digests)}"
        advice = "restore the store from a copy, or resume the job from its last durable checkpoint"
        if key != entry_key(len(self.digests)):
            text = "is missing, or was not written with the job's key"
            raise StoreError(f"{what} {text}, although {key} is there: {advice}")
        try:
            entry = msgspec.msgpack.decode(value, type=Entry)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{what} is damaged ({error}): {advice}") from error
        if entry.previous != (self.digests[-1] if self.digests else b""):
            raise StoreError(f"{what} does not follow the one before it: one of them was changed; {advice}")
        body = entry.body if entry.body_blob is None else self._read(entry.body_blob)
        try:
            records = self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"{what} holds another kind of record: {error}; it was written by another release, which must be used "
                "to go on with this job"
            ) from error
        first = len(self._records)
        self._lacking.update((first + at, blob) for at, blob in entry.placements)
        self._records += records
        self.in_use.take(entry, records)
        self.digests.append(content_digest(value))

    def records(self) -> list[_T]:
        """Lists all records, with those placements that count.

        Raises:
            StoreError: one is missing or damaged.
        """
        newest = max((at for at, record in enumerate(self._records) if supersedes(record)), default=0)
        records: list[Any] = list(self._records)
        for at, blob in self._lacking.items():
            if at >= newest:
                placement = msgspec.msgpack.decode(self._read(blob), type=Placement)
                records[at] = msgspec.structs.replace(records[at], placement=placement)
        return records


def joined(name: str, blob: Blob, chunks: Iterable[bytes]) -> bytes:
    """Joins chunks to the content of a blob.

    Raises:
        StoreError: something is missing or changed.
    """
    content = b"".join(chunks)
    if content_digest(content).hex() != blob.digest:
        raise StoreError(
            f"{name}: blob {blob.digest} has {len(content)} of {blob.num_bytes} bytes, or other ones: restore the "
            "store from a copy, or resume the job from its last durable checkpoint"
        )
    return content
