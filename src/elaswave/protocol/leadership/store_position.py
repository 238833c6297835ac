"""The history in a job's store: who may add to it, and how far it has come (H9). No IO.

A store takes records of the newest coordinator alone (`TermLease`); this is a rule of every store.

A coordinator tells with its messages where the history stood when it sent them, and members say the newest that they
have heard to each coordinator that they find. What was told was durable, so each coordinator has it in the history that
it has read, unless the store has gone back: somebody has put a backup in its place.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from elaswave.protocol.events import TermRecord


class StorePosition(msgspec.Struct, frozen=True, array_like=True):
    """The newest entry of a history."""

    job_generation: int
    """Of the job, as its store counts: a job that was created again has another history, and other members (H1)."""
    term: int
    """Of the coordinator that has told it."""
    length: int
    """Number of entries."""
    digest: bytes
    """Of the last one, which has that of the one before; empty if there is none."""
    seal: bytes = b""
    """That a coordinator of the job has told it (H14); empty: nobody has, or the store is private to the job."""

    def __str__(self) -> str:
        return f"{self.length} entries of term {self.term}, the last one {self.digest.hex()[:8] or 'none'}"


class PositionVerdict(Enum):
    """What a member's store position means to a coordinator."""

    FITS = "it is in the own history"
    OTHER_JOB = "it was told by a coordinator of another job generation: one of the two jobs is over"
    NEWER_TERM = "it was told by a coordinator of a later term: either that one is, or the store has gone back"
    GONE_BACK = "the store has lost what was durable"


def first_position(job_generation: int) -> StorePosition:
    """Makes what a member of a job generation says that has heard nothing of its history yet.

    Args:
        job_generation: as in `StorePosition`.
    """
    return StorePosition(job_generation, 0, 0, b"")


def newest_position(one: StorePosition | None, other: StorePosition) -> StorePosition:
    """Chooses which of two store positions a member keeps. It stays of the job generation that it is of."""
    if one is None or (
        one.job_generation == other.job_generation and (other.term, other.length) > (one.term, one.length)
    ):
        return other
    return one


def compare_positions(reported: StorePosition, own: StorePosition, digests: Sequence[bytes]) -> PositionVerdict:
    """Tells what a member's store position means.

    Args:
        reported: what the member has heard.
        own: where the coordinator's history stands.
        digests: of all its entries.
    """
    if reported.job_generation != own.job_generation:
        return PositionVerdict.OTHER_JOB
    if reported.term > own.term:
        return PositionVerdict.NEWER_TERM
    is_there = reported.length == 0 or (
        reported.length <= len(digests) and digests[reported.length - 1] == reported.digest
    )
    return PositionVerdict.FITS if is_there else PositionVerdict.GONE_BACK


class TermLease:
    """What a journal takes.

    A coordinator begins with a `TermRecord`, of a larger term than any that stands in the journal. From then on nothing
    of an older term is taken, nor another beginning of the same term. Records without a term are their writer's: only
    the lock on the journal, or `refusal` asked with the writer's term, keeps those of an older one out.
    """

    def __init__(self) -> None:
        self.term = 0
        """The newest one that stands in the journal."""

    def refusal(self, term: int) -> str | None:
        """Explains why nothing may be written by a coordinator of this term; None if it may write."""
        if term < self.term:
            return f"takes no record of term {term}: a coordinator of term {self.term} has taken over; this must end"
        return None

    def refusal_of(self, record: object) -> str | None:
        """Explains why a record is not taken; None if it is."""
        term = getattr(record, "term", None)
        if term is None:
            return None
        if isinstance(record, TermRecord) and term == self.term:
            return f"takes no second beginning of term {term}: another coordinator has begun it; this must end"
        return self.refusal(term)

    def took(self, record: object) -> None:
        """A record stands in the journal."""
        self.term = max(self.term, getattr(record, "term", 0))
