"""The store of a job on a cluster of etcd. What a coordinator decides outlives the coordinator's host.

*Who writes*: opening the store raises the job's `term` by a transaction that compares it with what was read. Every
write after that compares the revision of `term`, so a coordinator that was replaced writes nothing more, however late
its requests arrive. Timing has no part in it: there is no lease and no clock.

*Whether it was written*: an entry's transaction also compares that the entry's key does not exist, and the entry has a
nonce. A request without an answer is said again, in the same words; if its comparison fails, the answer tells whose
entry stands there. If it is the own one the earlier request had arrived. A request that is late finds the key taken.

*Blobs* are written before the entry that names them, whose transaction compares that all their chunks are there. Those
that no entry needs any more are removed by a transaction that compares that no entry has been appended since; so a
removal that is late cannot take a blob that a newer entry names again.

*Strangers* who may write to etcd have not the job's key (H14). What is not genuine counts as absent: a claim and an
entry replace it, wherever one of them comes to its place. A coordinator whose claim was taken away, by nobody who
has followed it, ends, and the next one begins with what is there: only what it reads is known to be.

One thread writes, in the order in which records were given: at once what someone waits for in `append`, else after
at most `BATCH_S`. While etcd does not answer, `append` waits up to a bound and the owner has turns meanwhile; what was
only added waits without a bound.

The keys of a job in etcd before its first coordinator and after its last one. What is asked, and what the answers
mean, is `elaswave.protocol.leadership.job_creation`'s.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from elaswave.errors import DisplacedError, StoreError, StoreGoneError, SupersededError
from elaswave.protocol.coordinator.store_writes import (
    OUTCOME,
    SPEC,
    TERM,
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    Transaction,
    TransactionResult,
    Written,
    holder_of,
    job_generation_of,
)
from elaswave.protocol.leadership.election import Ask, NoJob, StoreAnswer, term_before
from elaswave.protocol.leadership.job_creation import LOOKING, CreationResult, JobCreation, Left, ending, left_of
from elaswave.protocol.leadership.store_position import (
    PositionVerdict,
    StorePosition,
    compare_positions,
    first_position,
)
from elaswave.store.etcd_client import EtcdClient, NoAnswerError
from elaswave.store.etcd_entries import (
    CHUNK_BYTES,
    Blob,
    BlobsInUse,
    EntryReader,
    Packed,
    chunks_of,
    content_digest,
    entry_key,
    joined,
    newest_term,
    pack_records,
)
from elaswave.store.store import Owner, WriterLease

BATCH_S = 1.0
"""How long what was added may wait before it is written: a successor may lack so much."""
SLOW_S = 1.0
"""After this long without an answer people are told that the store is waited for."""
TURN_S = 0.25
"""Between two turns of an owner that waits."""
RETRY_S = 0.1
"""Between two requests if no member answers."""
CLOSE_S = 3.0
"""At the end, how long what was added may take."""
_PAGE = 100
"""Keys that one request asks for. etcd takes 128 operations, and values of 1.5 MiB, of strangers too: see
`elaswave.store.etcd_client` for how much an answer may hold."""
_NONCE_BYTES = 12
_log = logging.getLogger("elaswave.store")
_T = TypeVar("_T")
_Answer = TypeVar("_Answer")


class _Given(NamedTuple):
    """Records of one call."""

    records: tuple[Any, ...]
    num_bytes: int
    """About."""
    at_s: float


class Patience:
    """Repeats requests until one is answered.

    Args:
        what: is waited for, in messages.
        bound_s: how long.
        between: called between two requests, with what the last one has met and how long there was no answer; waits.
    """

    def __init__(self, what: str, bound_s: float, between: Callable[[str, float], None]) -> None:
        self._what = what
        self._bound_s = bound_s
        self._between = between

    def ask(self, request: Callable[[], _Answer]) -> _Answer:
        """Asks until there is an answer.

        Raises:
            StoreGoneError: there is none within the bound.
            StoreError: it is a refusal.
        """
        begun_s = time.monotonic()
        while True:
            try:
                return request()
            except NoAnswerError as error:
                passed_s = time.monotonic() - begun_s
                if passed_s >= self._bound_s:
                    raise StoreGoneError(
                        f"{self._what} has not answered for {passed_s:.0f} s ({error}): see whether a majority of its "
                        "members runs and can be reached from here"
                    ) from error
                self._between(str(error), passed_s)


def pause(text: str, passed_s: float) -> None:
    """Waits between two requests, where nothing else is to be done."""
    time.sleep(RETRY_S)


class EtcdStore(Generic[_T]):
    """Records of a job in etcd; its owner is the only writer from here on, until another one opens the job.

    Args:
        client: with the job's prefix. The job must have been created, see `found`.
        record_type: union of the records' types.
        owner: how it is reached.
        patience_s: how long `append`, and the opening, wait for an answer.
        term: what its owner has claimed already, see `elaswave.store.claim`; None: the store claims it.
    Raises:
        SupersededError: another coordinator has taken over in the same moment.
        StoreGoneError: etcd does not answer.
        StoreError: the job is not there, its records are damaged, or etcd refuses.
    """

    def __init__(
        self, client: EtcdClient, record_type: Any, owner: Owner, *, patience_s: float, term: Holder | None = None
    ) -> None:
        self._client = client
        self._owner = owner
        self._patience_s = patience_s
        self._lease = WriterLease(client.name)
        self._durable: list[_T] = []
        self._blobs: dict[Blob, bytes] = {}
        """Read already."""
        self._waiting = Patience(client.name, patience_s, pause)
        try:
            self._term = self._elect() if term is None else term
            self._read(record_type)
        except BaseException:
            client.close()
            raise

        # Guards everything below; the owner and the thread wait on it.
        self._changed = threading.Condition()
        self._given: deque[_Given] = deque()
        self._num_given = 0
        self._num_durable = 0
        self._calls: deque[tuple[int, Callable[[], None]]] = deque()
        """What is to be called once so many groups are durable."""
        self._is_urgent = False
        self._is_closing = False
        self._close_by_s = 0.0
        self._error: StoreError | None = None
        self._is_waited_for = False
        """Whether somebody in `append` learns of the error."""
        self._silent_s = 0.0
        """For how long etcd has not answered now."""
        self._trouble = ""
        """What the last request met."""
        self._has_warned = False
        """Whether people know that the store is waited for."""
        self._has_sent = False
        """Whether people know that strangers write to the store."""
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------------------- opening

    def _elect(self) -> Holder:
        client = self._client
        spec, standing = self._waiting.ask(lambda: client.carry_out(Transaction(reads=(SPEC, TERM)))).found
        holder, name = holder_of(standing), f"{socket.gethostname()}:{os.getpid()}"
        above = self._term_before(spec, standing)
        claim = Claim(name, new_nonce(), holder, spec, client.job_generation, above=above)
        won = claim.judge(self._waiting.ask(lambda: client.carry_out(claim.transaction())))
        if won is None:
            raise SupersededError(
                f"{client.name}: another coordinator has taken over in this moment; this one must end"
            )
        return won

    def _term_before(self, spec: KeyValue | None, term: KeyValue | None) -> int:
        """Nobody else claims a job of one host: it asks until it knows, within the bound of all its waits."""
        client, waiting = self._client, self._waiting
        asking = term_before(spec, term, client.job_generation, creates_job=True)
        try:
            action = next(asking)
            while True:
                if isinstance(action, Ask):
                    transaction = action.transaction
                    result = waiting.ask(lambda transaction=transaction: client.carry_out(transaction))  # type: ignore[misc]
                    # Nobody is watched here, so the times do not matter.
                    action = asking.send(StoreAnswer(0.0, 0.0, result))
                else:
                    action = asking.send(StoreAnswer(0.0, 0.0, newest_term=term_of_entries(client, waiting)))
        except StopIteration as found:
            if isinstance(found.value, NoJob):
                raise job_missing(client.name, found.value) from None
            return int(found.value)

    def _read(self, record_type: Any) -> None:
        chain: EntryReader[_T] = EntryReader(self._client.name, record_type, self._read_blob)
        for found in read_entries(self._client, self._waiting):
            chain.take(found.key, found.value)
        self._durable += chain.records()
        self._lease.took(self._durable)
        self._blobs.clear()
        self._digests = chain.digests
        self._store_position = self._position_now()
        self._in_use: BlobsInUse = chain.in_use
        wanted = {key for blob in chain.in_use.needed | chain.in_use.kept for key in blob.chunk_keys}
        present = {found.key for found in pages(self._client, self._waiting, "blob/")}
        # Also what a predecessor did not live to remove.
        self._garbage = present - wanted
        """Keys of chunks that no entry needs."""

    def _position_now(self) -> StorePosition:
        digests, client = self._digests, self._client
        store_position = StorePosition(
            client.job_generation, self._term.term, len(digests), digests[-1] if digests else b""
        )
        return client.seal.seal_position(store_position)

    def _read_blob(self, blob: Blob) -> bytes:
        client = self._client
        if blob not in self._blobs:
            found = [
                self._waiting.ask(lambda key=key: client.transact([], [client.get(key)])).ranges[0]  # type: ignore[misc]
                for key in blob.chunk_keys
            ]
            self._blobs[blob] = joined(client.name, blob, (chunk.value for page in found for chunk in page))
        return self._blobs[blob]

    # ------------------------------------------------------------------------------------------------- for its owner

    def append(self, *records: _T) -> None:
        """See `Store.append`."""
        self._give(records, urgent=True)
        # Only the owner's thread gives records: this is the number of those above.
        number = self._num_given
        begun_s = time.monotonic()
        try:
            self._is_waited_for = True
            while not self._await(number):
                waited_s = time.monotonic() - begun_s
                if waited_s >= self._patience_s:
                    self._give_up(waited_s)
                self._tell()
                self._owner.turn()
        finally:
            self._is_waited_for = False
        # What was given before is durable too: who waits for that need not wait for another turn.
        for call in self._due():
            call()

    def add(self, *records: _T) -> None:
        """See `Store.add`."""
        self._give(records, urgent=False)

    def when_durable(self, call: Callable[[], None]) -> None:
        """See `Store.when_durable`."""
        with self._changed:
            if self._num_durable < self._num_given:
                self._calls.append((self._num_given, call))
                return
        call()

    def records(self) -> list[_T]:
        """See `Store.records`."""
        with self._changed:
            return list(self._durable)

    @property
    def store_position(self) -> StorePosition:
        """See `Store.store_position`."""
        with self._changed:
            return self._store_position

    def check(self, reported: StorePosition) -> bool:
        """See `Store.check`."""
        if (reported.term or reported.length) and not self._client.seal.knows(reported):
            _log.warning("no coordinator of this job has told what a peer says that it has heard (%s)", reported)
            # As if it had heard nothing: whoever has a lesser key must not be able to end the job by this (H14).
            reported = first_position(reported.job_generation)
        with self._changed:
            own, meaning = self._store_position, compare_positions(reported, self._store_position, self._digests)
        if meaning is PositionVerdict.NEWER_TERM or reported.job_generation > own.job_generation:
            self.append()  # of nothing: shows whether another coordinator has taken over
        if meaning is PositionVerdict.OTHER_JOB:
            return False
        if meaning is not PositionVerdict.FITS:
            raise gone_back(self._client.name, f"a member has heard of {reported}, and there are {own}")
        return True

    def close(self) -> None:
        """See `Store.close`."""
        with self._changed:
            if not self._is_closing:
                self._is_closing = True
                self._close_by_s = time.monotonic() + CLOSE_S
                self._changed.notify_all()
        self._thread.join(2 * CLOSE_S)

    def _give(self, records: tuple[_T, ...], *, urgent: bool) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._is_closing:
                raise StoreError(f"{self._client.name} takes no records: it is closed")
            self._lease.check(records)
            self._lease.took(records)
            num_bytes = len(pack_records(records, b"", b"").value) if records else 0
            self._given.append(_Given(records, num_bytes, time.monotonic()))
            self._num_given += 1
            self._is_urgent |= urgent
            self._changed.notify_all()

    def _await(self, number: int) -> bool:
        """Tells whether so many groups are durable, after a turn's wait at most."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_durable >= number or self._error is not None, TURN_S)
            if self._num_durable >= number:
                return True
            if self._error is not None:
                raise self._error
            return False

    def _give_up(self, waited_s: float) -> None:
        with self._changed:
            # The thread stops with it: nothing may be written once the owner has been told that it was not.
            self._error = StoreGoneError(
                f"{self._client.name} has not taken a record for {waited_s:.0f} s ({self._trouble or 'it is slow'}); "
                "without it no loss can be decided on. See whether a majority of its members runs and can be reached "
                "from here; control.store_patience_s bounds the wait"
            )
            self._changed.notify_all()
            raise self._error

    def _tell(self) -> None:
        """Tells people once that the store is waited for."""
        with self._changed:
            if self._has_warned or not self._trouble or self._silent_s < SLOW_S:
                return
            self._has_warned = True
            text = (
                f"the coordinator waits for its store {self._client.name}, which has not answered for "
                f"{self._silent_s:.1f} s ({self._trouble}); steps go on meanwhile, losses, joins and new layouts wait"
            )
        self._owner.say(text)

    def _tell_end(self) -> None:
        self._owner.say(f"the store {self._client.name} answers again")

    def _due(self) -> list[Callable[[], None]]:
        calls = []
        with self._changed:
            while self._calls and self._calls[0][0] <= self._num_durable:
                calls.append(self._calls.popleft()[1])
        return calls

    def _call_due(self) -> None:
        for call in self._due():
            call()

    # ----------------------------------------------------------------------------------------------- the own thread

    def _run(self) -> None:
        try:
            while group := self._next():
                self._write(group)
                with self._changed:
                    self._num_durable += len(group)
                    self._durable += [record for given in group for record in given.records]
                    self._changed.notify_all()
                    has_calls = bool(self._calls)
                if has_calls:
                    self._post(self._call_due)
                with contextlib.suppress(NoAnswerError):
                    self._remove_garbage()  # else after the next entry
        except StoreError as error:
            _log.info("the store has ended: %s", error)
            self._break(error)
        except Exception as error:
            _log.exception("the store has failed")
            self._break(StoreError(f"{self._client.name}: {error!r}"))
        finally:
            self._client.close()

    def _break(self, error: StoreError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
                # Who waits in `append` is told by that; at the end there is nobody to tell.
                if not self._is_waited_for and not self._is_closing:
                    self._post(lambda: self._owner.broken(error))
            self._changed.notify_all()

    def _post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the owner's loop is closed: the job is over
            self._owner.post(call)

    def _next(self) -> list[_Given]:
        """Takes what is to be written next: as much as one entry may hold; nothing at the end."""
        with self._changed:
            while not self._is_closing and not (self._given and (self._is_urgent or self._age_s() >= BATCH_S)):
                if self._error is not None:
                    return []
                self._changed.wait(BATCH_S - self._age_s() if self._given else None)
            group: list[_Given] = []
            num_bytes = 0
            # One group that is larger than an entry should be goes alone.
            while self._given and (not group or num_bytes + self._given[0].num_bytes <= CHUNK_BYTES):
                group.append(self._given.popleft())
                num_bytes += group[-1].num_bytes
            # What did not fit in is waited for still.
            self._is_urgent &= bool(self._given)
            return group

    def _age_s(self) -> float:
        return time.monotonic() - self._given[0].at_s if self._given else 0.0

    def _write(self, group: list[_Given]) -> None:
        """Appends an entry."""
        records = [record for given in group for record in given.records]
        if not records:
            # `append()` of nothing: it asks whether this coordinator may still write.
            self._confirm()
            return
        length, last = self._store_position.length, self._store_position.digest
        packed = pack_records(records, last, secrets.token_bytes(_NONCE_BYTES), self._term.term)
        self._write_blobs(packed)
        chunks = [chunk for blob in packed.blobs for chunk in blob.chunk_keys]
        key, previous = entry_key(length), entry_key(length - 1) if length else ""
        entry = EntryWrite(self._term, key, packed.value, chunks, previous=previous)
        while True:
            answer = self._persist(entry.transaction())
            written = entry.judge(answer)
            if written is Written.YES:
                break
            if written is Written.LEASE_LOST:
                raise self._lease_lost(answer)
            if written is Written.GONE_BACK:
                raise gone_back(self._client.name, f"there were {self._store_position}, and {previous} is not there")
            if written is Written.TAKEN:
                raise DisplacedError(f"{self._client.name}: {key}: {written.value}; this coordinator must end")
            if written is Written.INCOMPLETE:
                self._write_blobs(packed)  # a late removal has taken them
            # Else what a stranger had put there is gone again, and nothing is replaced.
            elif entry.over:
                self._tell_of_stranger(key)
        with self._changed:
            self._digests.append(content_digest(packed.value))
            self._store_position = self._position_now()
        self._in_use.take(packed, records)
        self._garbage |= {chunk for blob in self._in_use.superseded for chunk in blob.chunk_keys}
        # A placement that was garbage may be named again: chunks are named by their content.
        self._garbage -= {chunk for blob in self._in_use.needed | self._in_use.kept for chunk in blob.chunk_keys}
        self._in_use.superseded.clear()

    def _confirm(self) -> None:
        """Asks whether this coordinator may still write."""
        answer = self._persist(self._term.still_writes())
        if not answer.succeeded:
            raise self._lease_lost(answer)

    def _tell_of_stranger(self, key: str) -> None:
        text = f"{key} of the store {self._client.name} was written without the job's key: it is replaced"
        _log.warning("%s", text)
        if not self._has_sent:
            self._has_sent = True
            self._post(lambda: self._owner.say(f"{text}; see who else may write there"))

    def _write_blobs(self, packed: Packed) -> None:
        asked = self._term.still_writes()
        for blob, content in packed.blobs.items():
            for key, chunk in zip(blob.chunk_keys, chunks_of(content), strict=True):
                written = self._persist(asked._replace(puts=((key, chunk),)))
                if not written.succeeded and self._term.has_lost_lease(written.found[0]):
                    raise self._lease_lost(written)

    def _remove_garbage(self) -> None:
        keys = tuple(sorted(self._garbage)[: _PAGE // 2])
        if keys:
            asked = self._term.still_writes()
            absent = (entry_key(self._store_position.length), 0)
            unwritten_since = (*asked.unwritten_since, absent)
            # Once, without patience: no record is to wait for it.
            self._client.carry_out(asked._replace(unwritten_since=unwritten_since, deletes=keys, reads=()))
            self._garbage -= set(keys)

    def _lease_lost(self, answer: TransactionResult) -> StoreError:
        return lease_lost(self._client.name, answer, self._term)

    def _persist(self, transaction: Transaction) -> TransactionResult:
        begun_s = time.monotonic()
        while True:
            try:
                outcome = self._client.carry_out(transaction)
            except NoAnswerError as error:
                self._no_answer(str(error), begun_s)
                continue
            self._answered()
            return outcome

    def _no_answer(self, text: str, begun_s: float) -> None:
        with self._changed:
            if text != self._trouble:
                _log.warning("the store does not answer: %s", text)
            self._trouble, self._silent_s = text, time.monotonic() - begun_s
            if self._error is not None:
                raise self._error
            if self._is_closing and time.monotonic() >= self._close_by_s:
                raise StoreError(f"{self._client.name} did not take the last records: {text}")
            # Who waits in `append` says it there, on the owner's thread.
            must_say = not self._has_warned and self._silent_s >= SLOW_S and not self._is_waited_for
            self._changed.wait(RETRY_S)
        if must_say:
            self._post(self._tell)

    def _answered(self) -> None:
        with self._changed:
            has_said, self._has_warned = self._has_warned, False
            self._trouble, self._silent_s = "", 0.0
        if has_said:
            self._post(self._tell_end)


def new_nonce() -> str:
    """Makes a nonce that no other claim or entry has."""
    return secrets.token_hex(_NONCE_BYTES)


def job_missing(name: str, missing: NoJob) -> StoreError:
    """A store does not hold the job that is to be claimed.

    Args:
        name: of the store.
        missing: what is there instead.
    """
    if missing is NoJob.FOREIGN:
        return foreign_job(name)
    if missing is NoJob.CREATED_AGAIN:
        return StoreError(f"{name}: the job was created again; who is of the last one does not follow there")
    return StoreError(f"{name} holds no job: its keys were removed; resume it from its last checkpoint")


def gone_back(name: str, text: str) -> StoreError:
    """A store has lost what was durable (H9).

    Args:
        name: of the store.
        text: what was there, and what is.
    """
    return StoreError(
        f"{name} has gone back, as if an older copy had been put in its place while the job ran: {text}. Nothing is "
        "decided on what it holds; begin the job again from its newest checkpoint"
    )


def foreign_job(name: str) -> StoreError:
    """What stands in the place of a job was not written with its key."""
    prefix = "/elaswave/" + name.partition("/elaswave/")[2]
    return StoreError(
        f"{name} holds what was not written with this job's key: a job of another key, or of an older release, or a "
        f"forgery. Give this job another name, or see whose it is, and remove it: etcdctl del --prefix {prefix}"
    )


def lease_lost(name: str, answer: TransactionResult, own: Holder) -> SupersededError:
    """A coordinator may not write any more.

    Args:
        name: of the store.
        answer: what a transaction has read whose comparison with `own` has failed: `TERM`, and more.
        own: what `TERM` held when this coordinator had claimed the job.
    """
    (standing, *_) = answer.found
    if not own.is_followed(standing):
        return DisplacedError(
            f"{name}: what coordinator number {own.term} held was removed, forged, or replaced by an older claim, and "
            "nobody has followed it; it must end, and the next one claims the job anew"
        )
    holder = holder_of(standing)
    return SupersededError(
        f"{name} takes no record of this coordinator: {holder.name} has taken over as its number {holder.term}; this "
        "must end"
    )


def read_entries(client: EtcdClient, waiting: Patience) -> list[KeyValue]:
    """Reads the genuine entries of a job, in their order; what else stands beside them is not looked at, whatever its
    size. Those behind a gap are there too, as far as one request shows them: `EntryReader` refuses them.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    entries = list[KeyValue]()
    at = 0
    while True:
        keys = tuple(entry_key(at + number) for number in range(_PAGE))
        page = waiting.ask(lambda keys=keys: client.carry_out(Transaction(reads=keys))).found  # type: ignore[misc]
        genuine = [found for found in page if found is not None and found.is_genuine]
        for found in (found for found in page if found is not None and not found.is_genuine):
            _log.warning("%s: %s was not written with the job's key: it does not count", client.name, found.key)
        entries += genuine
        at += _PAGE
        if not genuine:
            return entries


def term_of_entries(client: EtcdClient, waiting: Patience) -> int:
    """Finds the newest term of the coordinators that have written a job's entries; 0: there are none.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    return newest_term(found.value for found in read_entries(client, waiting))


def pages(client: EtcdClient, waiting: Patience, folder: str) -> list[KeyValue]:
    """Lists all keys of a folder of a job, without their values.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    first, found = folder, list[KeyValue]()
    while True:
        asked = client.get_from(first, folder, _PAGE, keys_only=True)
        page = waiting.ask(lambda asked=asked: client.transact([], [asked])).ranges[0]  # type: ignore[misc]
        found += page
        if len(page) < _PAGE:
            return found
        # The least key behind the last one.
        first = page[-1].key + "\0"


class StoredJob(NamedTuple):
    """What the store holds of a job."""

    left: Left | None
    """None: there is none."""
    outcome: KeyValue | None
    """How the last one has ended, if there is none."""


def standing_of(client: EtcdClient, patience_s: float) -> StoredJob:
    """Looks what the store holds of a job.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, pause)
    spec, term, lease_heartbeat, outcome = waiting.ask(lambda: client.carry_out(LOOKING)).found
    key = entry_key(0 if spec is None else len(read_entries(client, waiting)))
    (entry,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(key,)))).found
    return StoredJob(left_of(spec, term, lease_heartbeat, key, entry), outcome)


def remove_left(client: EtcdClient, seen: Left, patience_s: float) -> TransactionResult:
    """Removes a job's keys, unless one of its coordinators has written, or was started, since it was looked at.

    Raises:
        StoreError: etcd does not answer or refuses.
    """
    return Patience(client.name, patience_s, pause).ask(lambda: client.carry_out(seen.removal()))


def found(client: EtcdClient, spec: bytes, patience_s: float) -> int:
    """Makes a job's keys, so that coordinators can open it.

    Args:
        spec: what the job is, see `spec_value`; has a nonce.
        patience_s: how long to wait for an answer.
    Returns:
        The number of the job generation.
    Raises:
        StoreError: the job is there already, or etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, pause)
    client.job_generation = job_generation_of(KeyValue(SPEC, spec, 0))
    while True:
        (outcome,) = waiting.ask(lambda: client.carry_out(Transaction(reads=(OUTCOME,)))).found
        creation = JobCreation(spec, outcome)
        made = creation.judge(waiting.ask(lambda creation=creation: client.carry_out(creation.transaction())))  # type: ignore[misc]
        if made is CreationResult.HELD:
            raise StoreError(f"{client.name} holds another job: remove its keys, or give this one another name")
        if made is CreationResult.FOREIGN:
            raise foreign_job(client.name)
        # `CHANGED` is looked at once more: the job that was in the way has ended.
        if made is CreationResult.YES:
            return client.job_generation


def remove(
    client: EtcdClient,
    patience_s: float,
    name: str = "",
    outcome: bytes | None = None,
    job_generation: int = 0,
    between: Callable[[str, float], None] = pause,
) -> None:
    """Removes a job's keys; no coordinator can write to it from then on.

    Args:
        client: of the job.
        patience_s: how long to wait for each of two answers.
        name, outcome, job_generation: as of `elaswave.protocol.leadership.job_creation.ending`.
        between: as of `Patience`.
    Raises:
        StoreError: etcd does not answer or refuses.
    """
    waiting = Patience(client.name, patience_s, between)
    spec, term = waiting.ask(lambda: client.carry_out(Transaction(reads=(SPEC, TERM)))).found
    asked = ending(name, job_generation, spec, term, outcome)
    if asked is None and not job_generation_of(spec) and (spec or term):
        raise foreign_job(client.name)
    if asked is not None:
        waiting.ask(lambda: client.carry_out(asked))
