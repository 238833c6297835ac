"""Which coordinator may write: that of the newest term. The rule of every store of a coordinator's records. No IO."""

from elaswave.protocol.events import TermRecord


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
        """Why nothing may be written by a coordinator of this term; None if it may write."""
        if term < self.term:
            return f"takes no record of term {term}: a coordinator of term {self.term} has taken over; this must end"
        return None

    def refusal_of(self, record: object) -> str | None:
        """Why a record is not taken; None if it is."""
        term = getattr(record, "term", None)
        if term is None:
            return None
        if isinstance(record, TermRecord) and term == self.term:
            return f"takes no second beginning of term {term}: another coordinator has begun it; this must end"
        return self.refusal(term)

    def took(self, record: object) -> None:
        """A record stands in the journal."""
        self.term = max(self.term, getattr(record, "term", 0))
