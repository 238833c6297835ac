"""What an agent asks of a job's store before the first coordinator and after the last one, and what answers mean. No
IO, no clocks.

*H1, creation*: the agent at the first candidate's address makes the job's keys if they are not there. If they are, they
are of a job that runs, or of one whose hosts are all lost. It asks for a coordinator for longer than another candidate
takes to follow one that is lost, and removes the keys only if nobody has written to them meanwhile; else it goes on
asking. So a job that lives, and cannot be reached from here, loses nothing.

*H13, the end*: who had the last coordinator removes the keys, and leaves the outcome for agents that were cut off. Each
of these transactions compares with what was read, so it may be said again, and does no harm to a later job of this name
when it comes late. (H1 and H13 are rules of jobs on many hosts, see docs/protocol.md.)
"""

from enum import Enum
from typing import NamedTuple

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    OUTCOME,
    SPEC,
    TERM,
    KeyValue,
    Transaction,
    TransactionResult,
    holder_of,
    is_there,
    job_generation_of,
)

RUNS_S = 6.0
"""How long the agent that creates a job of several candidates looks whether another one has a coordinator already, if
the store holds nothing of the job."""
STARTS_S = 20.0
"""If it holds something: longer than another candidate takes to follow a coordinator that is lost."""
LOOKING = Transaction(reads=(SPEC, TERM, LEASE_HEARTBEAT, OUTCOME))
"""What the store holds of a job."""


class Left(NamedTuple):
    """How far a job had come that is in the store. Whatever its coordinators write changes it."""

    job_generation: int
    """Number of its job generation; 0: what stands there is not genuine (H14)."""
    spec: int
    """Revision at which that was written."""
    term: int
    """Revision at which its last coordinator has opened it; 0: none has."""
    lease_heartbeat: int
    """Revision of that one's last lease heartbeat; 0: there was none."""
    next_entry: str
    """Key of the entry that would be written next."""
    in_its_place: int = 0
    """Revision of what stands there and is not genuine (H14); 0: nothing."""

    def removal(self) -> Transaction:
        """Removes the job, unless one of its coordinators has written, or was started, since it was looked at."""
        # A coordinator at work writes its lease heartbeat and its next entry, and neither of the other two keys.
        seen = (
            (SPEC, self.spec),
            (TERM, self.term),
            (LEASE_HEARTBEAT, self.lease_heartbeat),
            (self.next_entry, self.in_its_place),
        )
        return Transaction(unwritten_since=seen, clears=True, reads=(SPEC,))


def left_of(
    spec: KeyValue | None,
    term: KeyValue | None,
    lease_heartbeat: KeyValue | None,
    next_entry: str,
    in_its_place: KeyValue | None = None,
) -> Left | None:
    """Describes what was found of a job; None: nothing."""
    if spec is None:
        return None
    # A genuine one was written after the entries were read: the comparison with "not there" then stops the removal.
    foreign = None if in_its_place is not None and in_its_place.is_genuine else in_its_place
    return Left(
        job_generation_of(spec),
        spec.revision,
        _revision(term),
        _revision(lease_heartbeat),
        next_entry,
        _revision(foreign),
    )


def _revision(found: KeyValue | None) -> int:
    return 0 if found is None else found.revision


class CreatorAction(Enum):
    """What an agent that may found a job does next."""

    LOOK = "look what the store holds of the job"
    ASK = "ask for a coordinator, for `ask_s`"
    REMOVE = "remove what was found: `Left.removal`"
    FOUND = "found the job"
    END = "the job has ended meanwhile, as `outcome` says"
    FOREIGN = "what is there was not written with this job's key: nothing is removed, and nothing created (H14)"
    GIVE_UP = "the job runs, and none of its candidates can be reached from here"


class JobCreator:
    """An agent that may found a job, until it knows whether it does. A coordinator that answers ends it.

    Args:
        has_others: whether there are other candidates, who may have a coordinator.
        patience_s: how long it asks for one of a job that runs.
        now_s: monotonic time.
    """

    def __init__(self, *, has_others: bool, patience_s: float, now_s: float) -> None:
        self.left: Left | None = None
        """What was found last."""
        self.outcome: KeyValue | None = None
        """How the job has ended, if it is `CreatorAction.END`."""
        self._has_others = has_others
        self._patience_s = patience_s
        self._began_s = now_s
        self.job_generation = 0
        """Number of the job generation that was there; 0: none was."""

    @property
    def ask_s(self) -> float:
        """How long to ask for a coordinator."""
        return RUNS_S if self.left is None else STARTS_S

    def looked(self, left: Left | None, outcome: KeyValue | None) -> CreatorAction:
        """The store has answered.

        Args:
            left: what it holds of the job.
            outcome: what it holds of the end of an earlier one; genuine if it is of `job_generation`.
        """
        self.left = left
        # Only if this agent has seen the job: else it is the outcome of an earlier one, after which a job is created.
        if left is None and self.job_generation and outcome is not None and outcome.is_genuine:
            self.outcome = outcome
            return CreatorAction.END
        # What was seen stays known when the keys are gone at the next look: then the job has ended.
        self.job_generation = (0 if left is None else left.job_generation) or self.job_generation
        # Without other candidates no coordinator could answer.
        return CreatorAction.ASK if self._has_others else self._without_coordinator()

    def unanswered(self) -> CreatorAction:
        """No coordinator has answered for `ask_s`."""
        return self._without_coordinator()

    def _without_coordinator(self) -> CreatorAction:
        if self.left is None:
            return CreatorAction.FOUND
        return CreatorAction.REMOVE if self.left.job_generation else CreatorAction.FOREIGN

    def removed(self, outcome: TransactionResult, now_s: float) -> CreatorAction:
        """The store has answered to the removal."""
        if outcome.succeeded:
            return CreatorAction.FOUND
        (spec,) = outcome.found
        # Either an earlier request had arrived, or the job has ended.
        if spec is not None and now_s - self._began_s > self._patience_s:
            return CreatorAction.GIVE_UP
        return CreatorAction.LOOK


class CreationResult(Enum):
    """What became of a creation."""

    YES = "the job is created"
    HELD = "there is another job of this name"
    FOREIGN = "what is there was not written with this job's key (H14)"
    CHANGED = "a job of this name has ended since it was looked: look again"


class JobCreation:
    """The keys of a job are made.

    Args:
        spec: what the job is, see `spec_value`; has a nonce.
        outcome: how the last job of this name has ended, as it was looked; it is removed.
    """

    def __init__(self, spec: bytes, outcome: KeyValue | None) -> None:
        self._spec = spec
        self._outcome = _revision(outcome)

    def transaction(self) -> Transaction:
        """Makes the transaction, which is to be said until there is an answer."""
        return Transaction(
            # Also the outcome: a creation that comes late must not undo the end of a later job.
            unwritten_since=((SPEC, 0), (OUTCOME, self._outcome)),
            puts=((SPEC, self._spec),),
            deletes=(OUTCOME,) if self._outcome else (),
            reads=(SPEC,),
        )

    def judge(self, outcome: TransactionResult) -> CreationResult:
        """Tells what the answer means."""
        if outcome.succeeded:
            return CreationResult.YES
        (spec,) = outcome.found
        if spec is None:
            return CreationResult.CHANGED
        if not spec.is_genuine:
            return CreationResult.FOREIGN
        return CreationResult.YES if spec.value == self._spec else CreationResult.HELD  # an earlier request had arrived


def ending(
    name: str, job_generation: int, spec: KeyValue | None, term: KeyValue | None, outcome: bytes | None
) -> Transaction | None:
    """Makes the transaction that removes the keys of a job that is over; it is to be said until there is an answer,
    which does not matter.

    Args:
        name: under which its last coordinator holds it, where several may.
        job_generation: which job generation is over; 0: there is only one.
        spec, term: as they stand in the store.
        outcome: how it has ended; stays (H13).
    Returns:
        None: they are not there any more, of another job, or another agent's coordinator has the job.
    """
    holder = holder_of(term)
    if not is_there(spec, term, job_generation or job_generation_of(spec)) or (
        name and holder.term and holder.name != name
    ):
        return None
    puts = () if outcome is None else ((OUTCOME, outcome),)
    # Compared, so that one that comes late removes nothing of the next job.
    return Transaction(unwritten_since=((SPEC, _revision(spec)), (TERM, holder.revision)), puts=puts, clears=True)
