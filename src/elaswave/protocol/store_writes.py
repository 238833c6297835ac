"""What a coordinator asks of a store that other coordinators write to as well, and what the answers mean. No IO.

A store has one order of transactions. Each compares first, so it may be said again, in the same words, whenever its
answer does not come: that it is carried out late, or twice, changes nothing. The product says them to etcd, the
simulator to a store that fails in every way.

*H4, election*: a claim writes the job's term if nobody has written it since it was read. *H5, append*: an entry is
written if the term is still the writer's and the entry's key does not exist. *H6, unknown outcomes*: what stands there
tells whether a request without an answer was carried out, since every claim and every entry has a nonce. (H4 to H6 are
rules of jobs on many hosts, see docs/store.md.)
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

SPEC, TERM, BEAT = "spec", "term", "beat"
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


class Outcome(NamedTuple):
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
    """What stands in `TERM`; has the nonce of the claim."""

    def still_writes(self) -> Transaction:
        """Compares that nobody else has written `TERM` since, and writes nothing."""
        return Transaction(((TERM, self.revision),), ((TERM, self.value),) if self.term else (), reads=(TERM,))

    def is_fenced(self, standing: KeyValue | None) -> bool:
        """Whether it may not write any more.

        Args:
            standing: what a failed comparison has found in `TERM`.
        """
        return standing is None or (standing.revision, standing.value) != (self.revision, self.value)


NOBODY = Holder(0, "", 0)


def holder_of(found: KeyValue | None) -> Holder:
    """Reads `TERM`."""
    if found is None:
        return NOBODY
    said = json.loads(found.value)
    return Holder(said["term"], said["holder"], found.revision, found.value)


class Claim:
    """A coordinator wants to write from now on.

    Args:
        name: of the claimant.
        nonce: that no other claim has.
        seen: who may write, by a linearizable read.
        founded: revision at which the job was founded that is claimed: a claim that comes late does not claim the next
            one, nor leave a key where none is.
    """

    def __init__(self, name: str, nonce: str, seen: Holder, founded: int) -> None:
        self._seen = seen
        self._founded = founded
        self._name = name
        self._value = json.dumps({"term": seen.term + 1, "holder": name, "nonce": nonce}).encode()

    def transaction(self) -> Transaction:
        """To be said until there is an answer."""
        asked = self._seen.still_writes()
        return asked._replace(
            unwritten_since=(*asked.unwritten_since, (SPEC, self._founded)), puts=((TERM, self._value),)
        )

    def judge(self, outcome: Outcome) -> Holder | None:
        """What the answer means: this claimant, which may write now; None if another one was quicker."""
        if outcome.succeeded:
            return Holder(self._seen.term + 1, self._name, outcome.revision, self._value)
        (standing,) = outcome.found
        if standing is not None and standing.value == self._value:
            return holder_of(standing)  # an earlier request had arrived
        return None


class Written(Enum):
    """What became of an entry."""

    YES = "it stands there"
    FENCED = "another coordinator has taken over: nothing of this one is taken any more"
    TAKEN = "the entry was written by somebody who is no coordinator of this job"
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
        self._term = term
        self._key = key
        self.value = value
        self._names = tuple(names)
        self._before = (previous,) if previous else ()

    def transaction(self) -> Transaction:
        """To be said until there is an answer; nothing may be sent before (H5)."""
        asked = self._term.still_writes()
        return asked._replace(
            unwritten_since=(*asked.unwritten_since, (self._key, 0)),
            exist=(*self._before, *self._names),
            puts=((self._key, self.value),),
            reads=(TERM, self._key, *self._before),
        )

    def judge(self, outcome: Outcome) -> Written:
        """What the answer means."""
        if outcome.succeeded:
            return Written.YES
        term, standing, *before = outcome.found
        if self._term.is_fenced(term):
            return Written.FENCED
        if standing is None:
            return Written.GONE_BACK if None in before else Written.INCOMPLETE
        return Written.YES if standing.value == self.value else Written.TAKEN  # an earlier request had arrived
