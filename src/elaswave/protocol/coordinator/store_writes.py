"""What a coordinator asks of a store that other coordinators write to as well, and what the answers mean. No IO.

A store has one order of transactions. Each compares first, so it may be said again, in the same words, whenever its
answer does not come: that it is carried out late, or twice, changes nothing. The product says them to etcd, the
simulator to a store that fails in every way.

*H4, election*: a claim writes the job's term if nobody has written it since it was read. *H5, append*: an entry is
written if the term is still the writer's and the entry's key does not exist. *H6, unknown outcomes*: what stands there
tells whether a request without an answer was carried out, since every claim and every entry has a nonce. (H4 to H6 are
rules of jobs on many hosts, see docs/store.md.)

*H14, strangers*: who may write to the store need not have the job's key. What no holder of the key has written for this
place and this job generation is not *genuine*: it counts as absent, except that a transaction which puts something in
its place compares its revision. Older values of the same place are genuine; so a claim never takes a smaller term than
one that was seen, a lease heartbeat counts only if it is newer, and a coordinator whose term is not there any more
without a newer one in its place makes room for another, which claims the job anew and reads what is there.
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

SPEC, TERM, LEASE_HEARTBEAT = "spec", "term", "lease_heartbeat"
"""Keys of a job: it exists; who may write; that the writer lives."""
OUTCOME = "outcome"
"""The key that stays of a job of several hosts: how it has ended (H13)."""


class KeyValue(NamedTuple):
    """A key as a store has it."""

    key: str
    """Below the job's prefix."""
    value: bytes
    revision: int
    """At which it was last written."""
    is_genuine: bool = True
    """Whether a holder of the job's key has written it, for this key and this job generation; else its value is
    empty."""


class Transaction(NamedTuple):
    """Is carried out whole or not at all, and linearizable also where it only reads."""

    unwritten_since: tuple[tuple[str, int], ...] = ()
    """Compares: a key was last written at a revision; 0: it does not exist."""
    values: tuple[tuple[str, bytes], ...] = ()
    """Compares: a key has a value. A store that somebody has put back may come to a revision twice."""
    exist: tuple[str, ...] = ()
    """Compares: these keys exist."""
    puts: tuple[tuple[str, bytes], ...] = ()
    """If all comparisons hold."""
    deletes: tuple[str, ...] = ()
    """The same."""
    clears: bool = False
    """The same: all keys of the job are removed but those that are put."""
    reads: tuple[str, ...] = ()
    """Else; also where nothing is compared and nothing is written."""


class TransactionResult(NamedTuple):
    """What became of a transaction."""

    succeeded: bool
    """Whether all its comparisons held."""
    revision: int
    """Of the store, after it."""
    found: tuple[KeyValue | None, ...] = ()
    """What its reads have found."""


class Holder(NamedTuple):
    """Who may write, as it stands in `TERM`."""

    term: int
    """0: nobody has ever claimed the job."""
    name: str
    revision: int
    """At which it was written."""
    value: bytes = b""
    """What stands in `TERM`; has the nonce of the claim. Empty: something that is not genuine, or older."""

    def still_writes(self) -> Transaction:
        """Compares that nobody else has written `TERM` since, and writes nothing."""
        # What is not genuine, or older than what was seen, has no value here: its revision alone is compared.
        return Transaction(((TERM, self.revision),), ((TERM, self.value),) if self.value else (), reads=(TERM,))

    def has_lost_lease(self, standing: KeyValue | None) -> bool:
        """Tells whether it may not write any more.

        Args:
            standing: what a failed comparison has found in `TERM`.
        """
        # The value too: a store that was put back comes to a revision twice, and then with another claim.
        return standing is None or (standing.revision, standing.value) != (self.revision, self.value)

    def is_followed(self, standing: KeyValue | None) -> bool:
        """Tells whether another coordinator has claimed the job since; else what this one held was removed, forged, or
        replaced by an older claim (H14).

        Args:
            standing: what a failed comparison has found in `TERM`.
        """
        newer = holder_of(standing)
        # With the same term too: in a store that was put back another candidate claims that number again.
        return newer.value != self.value and newer.term >= self.term


NOBODY = Holder(0, "", 0)


def holder_of(found: KeyValue | None) -> Holder:
    """Reads `TERM`. What is not genuine names nobody, at its revision."""
    if found is None:
        return NOBODY
    if not found.is_genuine:
        # The revision stays: whoever claims the job compares it, and so replaces what stands there.
        return NOBODY._replace(revision=found.revision)
    said = json.loads(found.value)
    return Holder(said["term"], said["holder"], found.revision, found.value)


def lease_heartbeat_value(term: int, number: int) -> bytes:
    """Encodes what a coordinator writes to `LEASE_HEARTBEAT`.

    Args:
        number: of this term's lease heartbeat, from 1.
    """
    return json.dumps({"term": term, "beat": number}).encode()


def lease_heartbeat_of(found: KeyValue | None, holder: Holder) -> int:
    """Reads the number of a holder's newest lease heartbeat; 0: what stands there is none of its."""
    if found is None or not found.is_genuine:
        return 0
    said = json.loads(found.value)
    # That of the coordinator before stands there until this one has written its own.
    return int(said["beat"]) if said["term"] == holder.term else 0


def spec_value(job_generation: int, **facts: object) -> bytes:
    """Encodes what stands in `SPEC`.

    Args:
        job_generation: number of the job generation, which no other one of this name has.
        facts: for people.
    """
    return json.dumps({"founded": job_generation, **facts}).encode()


def job_generation_of(spec: KeyValue | None) -> int:
    """Reads which job generation is in the store; 0: none, or what stands in `SPEC` is not genuine."""
    return int(json.loads(spec.value)["founded"]) if spec is not None and spec.is_genuine else 0


def is_there(spec: KeyValue | None, term: KeyValue | None, job_generation: int, *, creates_job: bool = False) -> bool:
    """Tells whether a job generation is in the store. A claim says so; before there is one, `SPEC` does. An older
    `SPEC` that was put back stands beside what another job generation has claimed.

    Args:
        spec, term: as they stand there, genuine if they are of this job generation.
        job_generation: the job generation.
        creates_job: whether the asker has created it, so that nobody else can have claimed it before.
    """
    return bool(holder_of(term).term) or (
        job_generation_of(spec) == job_generation != 0 and (term is None or creates_job)
    )


class Claim:
    """A coordinator wants to write from now on.

    Args:
        name: of the claimant.
        nonce: that no other claim has.
        seen: who may write, by a linearizable read.
        spec: what stands in `SPEC`, by the same read: a claim that comes late does not claim the next job generation,
            nor leave a key where no job is.
        job_generation: the job generation that is claimed. `SPEC` is written again if it does not say so.
        above: the claim's term is larger.
    """

    def __init__(
        self, name: str, nonce: str, seen: Holder, spec: KeyValue | None, job_generation: int, *, above: int = 0
    ) -> None:
        self._seen = seen
        self._spec = 0 if spec is None else spec.revision
        # The term and the entries go on, but without their spec nobody could tell which job they are of (H14).
        self._again = (
            () if job_generation_of(spec) == job_generation else ((SPEC, spec_value(job_generation, restored=nonce)),)
        )
        self._name = name
        # Where `TERM` was removed or forged, only the entries tell which terms were used already.
        self.term = max(seen.term, above) + 1
        self._value = json.dumps({"term": self.term, "holder": name, "nonce": nonce}).encode()

    def transaction(self) -> Transaction:
        """Makes the transaction, which is to be said until there is an answer."""
        asked = self._seen.still_writes()
        return asked._replace(
            unwritten_since=(*asked.unwritten_since, (SPEC, self._spec)), puts=((TERM, self._value), *self._again)
        )

    def judge(self, outcome: TransactionResult) -> Holder | None:
        """Tells what the answer means: this claimant, which may write now; None if another one was quicker."""
        if outcome.succeeded:
            return Holder(self.term, self._name, outcome.revision, self._value)
        standing = outcome.found[0]
        if standing is not None and standing.value == self._value:
            return holder_of(standing)  # an earlier request had arrived
        return None


class Written(Enum):
    """What became of an entry."""

    YES = "it stands there"
    LEASE_LOST = "another coordinator has taken over: nothing of this one is taken any more"
    TAKEN = "another entry of this job stands there: one that was removed has been put back (H14)"
    FOREIGN = "what stands there is not genuine, and is to be replaced: see `EntryWrite.over` (H14)"
    INCOMPLETE = "what it names is not there any more, and must be written again"
    GONE_BACK = "the entry before it, which was durable, is not there: the store has gone back (H9)"


class EntryWrite:
    """A coordinator's next entry.

    Args:
        term: its own.
        key: of the entry.
        value: of the entry; has a nonce.
        names: keys that must exist with it.
        previous: key of the entry before it; empty: it is the first.
    """

    def __init__(self, term: Holder, key: str, value: bytes, names: Sequence[str] = (), *, previous: str = "") -> None:
        self.over = 0
        """Revision of what stands in its place and is not genuine; 0: nothing."""
        self._term = term
        self._key = key
        self.value = value
        self._names = tuple(names)
        self._before = (previous,) if previous else ()

    def transaction(self) -> Transaction:
        """Makes the transaction, which is to be said until there is an answer; nothing may be sent before (H5)."""
        asked = self._term.still_writes()
        return asked._replace(
            unwritten_since=(*asked.unwritten_since, (self._key, self.over)),
            # The entry before it is missing if the store was put back (H9); its blobs, if a removal came late.
            exist=(*self._before, *self._names),
            puts=((self._key, self.value),),
            reads=(TERM, self._key, *self._before),
        )

    def judge(self, outcome: TransactionResult) -> Written:
        """Tells what the answer means."""
        if outcome.succeeded:
            return Written.YES
        term, standing, *before = outcome.found
        # First: what stands in the place of the entry may then be a successor's, and not one that was put back.
        if self._term.has_lost_lease(term):
            return Written.LEASE_LOST
        if standing is not None and standing.is_genuine:
            return Written.YES if standing.value == self.value else Written.TAKEN  # an earlier request had arrived
        if None in before:
            return Written.GONE_BACK
        # If the place is as the transaction has expected it, the comparison of the names has failed.
        over, self.over = self.over, 0 if standing is None else standing.revision
        return Written.INCOMPLETE if self.over == over else Written.FOREIGN
