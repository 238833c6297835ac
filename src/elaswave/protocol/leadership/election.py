"""When a candidate claims the job (H4): it watches the holder's lease heartbeat. No IO, no clocks.

The coordinator renews the job's lease heartbeat while it lives. A candidate reads it, and judges by its own clock
alone. Timing has a part only in *when* somebody takes over: that nobody writes who was replaced, the claim sees to
(`elaswave.protocol.coordinator.store_writes`).

Which coordinator may write: that of the newest term. The rule of every store of a coordinator's records. No IO.
"""

from typing import NamedTuple

from elaswave.protocol.coordinator.store_writes import NOBODY, Holder
from elaswave.protocol.events import TermRecord

LEASE_HEARTBEAT_S = 0.5
"""Between two lease heartbeats of a coordinator."""
POLL_S = 0.25
"""Between two looks of a candidate."""
STILL_S = 2.0
"""A coordinator is followed once its lease heartbeat has stood still for so long."""
GAP_S = 1.0
"""A candidate that has not looked for so long (it was stopped, or the store did not answer) begins to watch anew: the
holder may have been kept from its lease heartbeat by the same."""
BACKOFF_S = 0.2
"""After a claim that failed: between that and the next one at least, doubled with each."""
BACKOFF_S_MAX = 1.0


class Seen(NamedTuple):
    """What one look has found."""

    holder: Holder
    lease_heartbeat: int
    """Number of the holder's newest lease heartbeat; 0: there was none yet."""


class Watch:
    """One candidate's watch.

    Args:
        own: by which name its agent's coordinators hold the job. An agent starts one after the other, so the term of
            an earlier one is free at once.
        creates_job: whether its agent has created the job: a job that nobody has claimed yet is its.
    """

    def __init__(self, own: str, *, creates_job: bool = False) -> None:
        self._own = own
        self.creates_job = creates_job
        """Whether its agent has created the job."""
        self._seen = Seen(NOBODY, 0)
        self._since_s: float | None = None
        """When the lease heartbeat was seen first; None: the watch begins."""
        self._looked_s = 0.0
        self._not_before_s = 0.0
        self._num_failed = 0

    @property
    def holder(self) -> Holder:
        """Whom a claim would follow."""
        return self._seen.holder

    @property
    def since_s(self) -> float | None:
        """Time since which the holder is missed, if it is."""
        return self._since_s

    def looked(self, seen: Seen, asked_s: float, now_s: float) -> None:
        """A linearizable read was answered.

        Args:
            seen: what it has found.
            asked_s: when it was asked.
            now_s: when it was answered.
        """
        before, self._seen = self._seen, self._newest(seen)
        lives = self._seen.holder.term > before.holder.term or self._seen.lease_heartbeat > before.lease_heartbeat
        if self._since_s is None or lives or asked_s - self._looked_s > GAP_S:
            self._since_s = now_s
        self._looked_s = asked_s

    def _newest(self, seen: Seen) -> Seen:
        """What is known now. A claim that was removed, forged or replaced by an older one is followed as it was known,
        and lease heartbeats of earlier days do not count (H14)."""
        known = self._seen
        if seen.holder.term > known.holder.term:
            return seen
        if seen.holder.term < known.holder.term:
            return Seen(known.holder._replace(revision=seen.holder.revision, value=b""), known.lease_heartbeat)
        return Seen(seen.holder, max(known.lease_heartbeat, seen.lease_heartbeat))

    def missed(self) -> None:
        """A read was not answered: without reads nobody is elected (H8)."""
        self._since_s = None

    def failed(self, now_s: float) -> None:
        """A claim has failed: another candidate was quicker."""
        self._not_before_s = now_s + min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(self._num_failed, 10))
        self._num_failed += 1
        self._since_s = None

    def is_due(self, now_s: float) -> bool:
        """Whether to claim the job now."""
        if self._since_s is None or now_s < self._not_before_s:
            return False
        holder = self._seen.holder
        is_free = holder.name == self._own or (self.creates_job and not holder.term)
        return is_free or self._looked_s - self._since_s >= STILL_S


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
