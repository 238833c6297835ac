"""A candidate's process until it has the job (H4): when it claims it, and in which order it asks the store. No IO, no
clocks.

The coordinator renews the job's lease heartbeat while it lives. A candidate reads it, and judges by its own clock
alone (`Watch`). Timing has a part only in *when* somebody takes over: that nobody writes who was replaced, the claim
sees to (`elaswave.protocol.coordinator.store_writes`).

`CoordinatorCandidate` says what is to be done next, and is told what came of it. The product's process asks etcd
(`elaswave.store.claim`), the simulated ones a store that fails in every way; neither has a rule of its own. What a
process does that has the job, and when an agent starts its next one, is elsewhere (`elaswave.protocol.coordinator`,
`elaswave.protocol.membership.agent`).
"""

from collections.abc import Callable, Generator
from enum import Enum
from typing import NamedTuple

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    NOBODY,
    OUTCOME,
    SPEC,
    TERM,
    Claim,
    Holder,
    KeyValue,
    Transaction,
    TransactionResult,
    holder_of,
    is_there,
    job_generation_of,
    lease_heartbeat_of,
)

LEASE_HEARTBEAT_S = 0.5
"""Between two lease heartbeats of a coordinator."""
POLL_S = 0.25
"""Between two looks of a candidate."""
STILL_S = 2.0
"""A coordinator is followed once its lease heartbeat has stood still for so long."""
GAP_S = 1.0
"""A candidate that has not looked for so long (it was stopped, or the store did not answer) begins to watch anew: the
holder may have been kept from its lease heartbeat by the same."""
ASK_AGAIN_S = 0.1
"""Between two requests if the store does not answer."""
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
        # What is read may be as old as the question: a holder is missed from the answer that has shown its newest
        # lease heartbeat to the last question, so that slow answers speak for it.
        self._looked_s = asked_s

    def _newest(self, seen: Seen) -> Seen:
        """Determines what is known now. A claim that was removed, forged or replaced by an older one is followed as it
        was known, and lease heartbeats of earlier days do not count (H14)."""
        known = self._seen
        if seen.holder.term > known.holder.term:
            return seen
        if seen.holder.term < known.holder.term:
            # A claim has to compare what stands there now: its revision, and no value that was not read.
            return Seen(known.holder._replace(revision=seen.holder.revision, value=b""), known.lease_heartbeat)
        return Seen(seen.holder, max(known.lease_heartbeat, seen.lease_heartbeat))

    def missed(self) -> None:
        """A read was not answered: without reads nobody is elected (H8)."""
        self._since_s = None

    def failed(self, now_s: float) -> None:
        """A claim has failed: another candidate was quicker."""
        self._not_before_s = now_s + min(BACKOFF_S_MAX, BACKOFF_S * 2.0 ** min(self._num_failed, 10))
        self._num_failed += 1
        # Whoever was quicker has its whole time before it is missed.
        self._since_s = None

    def is_due(self, now_s: float) -> bool:
        """Tells whether to claim the job now."""
        if self._since_s is None or now_s < self._not_before_s:
            return False
        holder = self._seen.holder
        is_free = holder.name == self._own or (self.creates_job and not holder.term)
        return is_free or self._looked_s - self._since_s >= STILL_S


class Ask(NamedTuple):
    """The store is to carry out a transaction. An answer that does not come within a second is none."""

    transaction: Transaction
    claims: bool = False
    """Whether the job is claimed by it."""
    news: str = ""
    """What has led to it, for the log."""


class ReadEntries(NamedTuple):
    """All entries of the job are to be read, for the newest term of their writers. They may be large: the answer may
    take longer."""


class StandBy(NamedTuple):
    """Nothing is to be done for a while."""

    wait_s: float


class Won(NamedTuple):
    """This candidate has the job: its process is the coordinator from now on."""

    term: Holder
    missed_s: float | None
    """Monotonic time since which the coordinator before was missed; None: there was none."""


class NoJob(Enum):
    """There is nothing that this candidate could claim: its process ends."""

    REMOVED = "the job's keys are gone"
    CREATED_AGAIN = "another job generation is there: who is of the last one does not follow there"
    FOREIGN = "what is there was not written with the job's key (H14)"


CandidateAction = Ask | ReadEntries | StandBy | Won | NoJob


class StoreAnswer(NamedTuple):
    """What came of an action."""

    asked_s: float
    """Monotonic time at which it was asked for."""
    now_s: float
    """Monotonic time."""
    result: TransactionResult | None = None
    """Of a transaction; None: the store has not answered."""
    newest_term: int | None = None
    """Of entries; 0: there are none; None: the store has not answered."""


_Asking = Generator[CandidateAction, StoreAnswer, int | NoJob]


def term_before(spec: KeyValue | None, term: KeyValue | None, job_generation: int, *, creates_job: bool) -> _Asking:
    """Finds the newest term of a job's coordinators. Where its own key does not tell it, the entries do (H14).

    Args:
        spec, term: as they stand in the store, genuine if they are of this job generation.
        job_generation: which one is to be claimed.
        creates_job: as of `is_there`.
    Returns:
        The term, 0 if nobody has ever had the job; or why nobody can have it.
    """
    known = holder_of(term).term
    while not known:
        answer = yield ReadEntries()
        # 0 is an answer too: nobody has written an entry yet.
        if answer.newest_term is not None:
            known = answer.newest_term
            break
        yield StandBy(ASK_AGAIN_S)
    if is_there(spec, term, job_generation, creates_job=creates_job):
        return known
    # No key of the job shows it: whether it is over, only the outcome tells.
    while (answer := (yield Ask(Transaction(reads=(OUTCOME,))))).result is None:
        yield StandBy(ASK_AGAIN_S)
    (outcome,) = answer.result.found
    # Entries outlive keys that were removed or forged. After the end none stands there, unless it was put back.
    if known and not (outcome is not None and outcome.is_genuine):
        return known
    if job_generation_of(spec) not in (0, job_generation):
        return NoJob.CREATED_AGAIN
    return NoJob.REMOVED if spec is None and term is None else NoJob.FOREIGN


class CoordinatorCandidate:
    """One candidate's process until it has the job.

    Args:
        name: under which the job is claimed: that of its agent.
        job_generation: in which its agent takes part; nobody else's is claimed.
        new_nonce: makes one that no other claim has.
        creates_job: whether its agent has created the job.
        ended_s: monotonic time at which the last coordinator of this name has ended; None: there was none.
    """

    claim_class = Claim

    def __init__(
        self,
        name: str,
        job_generation: int,
        new_nonce: Callable[[], str],
        *,
        creates_job: bool = False,
        ended_s: float | None = None,
    ) -> None:
        self.watch = Watch(name, creates_job=creates_job)
        """Of the job's holder."""
        self._name, self._job_generation = name, job_generation
        self._new_nonce = new_nonce
        self._ended_s = ended_s
        self._now_s = 0.0
        """Of the newest answer."""
        self._run = self._actions()

    def begin(self) -> CandidateAction:
        """Returns the first thing to be done."""
        return next(self._run)

    def next(self, answer: StoreAnswer) -> CandidateAction:
        """Returns what is to be done after that; nothing more after `Won` and `NoJob`."""
        self._now_s = answer.now_s
        return self._run.send(answer)

    def _actions(self) -> Generator[CandidateAction, StoreAnswer, None]:
        watch, news = self.watch, ""
        while True:
            look = yield Ask(Transaction(reads=(SPEC, TERM, LEASE_HEARTBEAT)), news=news)
            news = ""
            if look.result is None:
                watch.missed()
                yield StandBy(ASK_AGAIN_S)
                continue
            spec, term, lease_heartbeat = look.result.found
            above = 0
            if not self.is_mine(spec, term):
                known = yield from self._term_before(spec, term)
                if isinstance(known, NoJob):
                    yield known
                    return
                above = known
            holder = holder_of(term)
            watch.looked(Seen(holder, lease_heartbeat_of(lease_heartbeat, holder)), look.asked_s, self._now_s)
            if not watch.is_due(self._now_s):
                yield StandBy(POLL_S)
                continue
            # Whom this candidate knows, which may be a later one than stands there: that term is not claimed again.
            before, missed_s = watch.holder, watch.since_s
            if not above and not self.tells_term(holder):
                known = yield from self._term_before(spec, term)
                assert not isinstance(known, NoJob), "the same was just read"
                above = known
            # The agent has seen its own coordinator end, before any candidate could miss it.
            if before.name == self._name and self._ended_s is not None:
                missed_s = self._ended_s
            claim = self.claim_class(self._name, self._new_nonce(), before, spec, self._job_generation, above=above)
            won = yield from self._claim(claim)
            if won is not None:
                yield Won(won, missed_s if before.term else None)
                return
            watch.failed(self._now_s)
            news = "another candidate was quicker than this one"

    def is_mine(self, spec: KeyValue | None, term: KeyValue | None) -> bool:
        """Tells whether the job in which this candidate's agent takes part shows itself by its own keys."""
        return is_there(spec, term, self._job_generation, creates_job=self.watch.creates_job)

    def tells_term(self, holder: Holder) -> bool:
        """Checks whether `TERM` tells the newest term. If it does not, what this candidate has seen there may be older
        than the entries are: another one may have had the job since (H14)."""
        return holder.term > 0

    def _term_before(self, spec: KeyValue | None, term: KeyValue | None) -> _Asking:
        return term_before(spec, term, self._job_generation, creates_job=self.watch.creates_job)

    def _claim(self, claim: Claim) -> Generator[CandidateAction, StoreAnswer, Holder | None]:
        """Says it in the same words until there is an answer: it may have been carried out (H6)."""
        while (answer := (yield Ask(claim.transaction(), claims=True))).result is None:
            yield StandBy(ASK_AGAIN_S)
        return claim.judge(answer.result)
