"""Judges what becomes of a job's name in its store: nothing of a job that lives is removed, nothing of a later job is
touched by an earlier one, and who can learn how the job has ended learns it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from elaswave.protocol.coordinator.store_writes import (
    OUTCOME,
    SPEC,
    TERM,
    KeyValue,
    holder_of,
    is_there,
    job_generation_of,
)
from elaswave.protocol.leadership.job_creation import STARTS_S
from elaswave.protocol.membership.agent import SEEK_AFTER_S, SEEK_EVERY_S
from verify.simulator.candidates import TIMEOUT, UNIT_S
from verify.simulator.checkers import Violation
from verify.simulator.schedule import STRANGER_KINDS, ScheduledFault

SEEN_BY = round((SEEK_AFTER_S + 2 * SEEK_EVERY_S) / UNIT_S) + 2 * TIMEOUT
"""Who can reach the store for so long, without a coordinator, has looked for the outcome there."""


class Asker(Protocol):
    """What the judge knows of an agent."""

    host: int
    incarnation: int
    job_generation: int
    saw: int
    outcome_seen: int


class LifetimeJudge:
    """Looks at every change of the store.

    Args:
        clock: gives the time.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.has_ended = False
        """Whether all entries of a job were made, the last one of which says that it is over."""
        self.is_refused = False
        """Whether an agent could not found the job, for a stranger's key was there: people are to look."""
        self._clock = clock
        self._written = 0
        """When the job's coordinators have changed its keys."""
        self._ended: set[int] = set()
        """Foundings whose outcome was written."""
        self._outcome_since: dict[int, int] = {}
        """JobCreation whose outcome is there -> since when."""
        self._has_strangers = False
        self._was_claimed = False
        self._trouble_until: dict[int, int] = {}
        """Host -> until when it could not reach the store."""

    def trouble(self, host: int, until: int) -> None:
        """A host cannot reach the store for a while."""
        self._trouble_until[host] = max(self._trouble_until.get(host, 0), until)

    def is_over(self, job_generation: int) -> None:
        """A coordinator has made all entries."""
        self.has_ended = True

    def changed(self, by: Asker, why: str, before: Mapping[str, KeyValue], after: Mapping[str, KeyValue]) -> None:
        """The store has carried out what an agent, or its coordinator, has asked for."""
        now, was, spec = self._clock(), job_generation_of(before.get(SPEC)), after.get(SPEC)
        if why == "end":
            self._outcome_since[by.job_generation] = now
        elif OUTCOME not in after:
            self._outcome_since.clear()
        if why == "found":
            self._job_generation(by, before.get(OUTCOME))
        elif why == "remove":
            if now - self._written < round(STARTS_S / UNIT_S):
                raise Violation(
                    f"agent {by.incarnation} removes a job whose coordinator has written {now - self._written} ago"
                )
        elif was != by.job_generation and not (self._has_strangers and _is_known(before, by.job_generation)):
            there = f"job generation {was}" if was else "nothing"
            raise Violation(f"{why} of agent {by.incarnation}, of job generation {by.job_generation}, where {there} is")
        elif why == "end":
            self._ended.add(by.job_generation)
            if spec is not None or OUTCOME not in after:
                raise Violation(f"the end of job generation {by.job_generation} leaves keys, or no outcome")
        elif why == "claim":
            self._claimed_by(by, before, holder_of(after.get(TERM)).term)
        if why in ("found", "claim", "lease_heartbeat", "entry"):
            self._written = now

    def _claimed_by(self, by: Asker, keys: Mapping[str, KeyValue], after: int) -> None:
        self._was_claimed = True
        before = holder_of(keys.get(TERM)).term
        if after <= before or (after != before + 1 and not self._has_strangers):
            raise Violation(f"agent {by.incarnation} claims a term that is not the next one")
        if not before and after <= newest_term(found.value for found in entries_of(keys)):
            raise Violation(f"agent {by.incarnation} claims term {after}, in which entries were written")
        if by.job_generation in self._ended:
            raise Violation(f"agent {by.incarnation} claims job generation {by.job_generation}, which has ended")

    def stranger(self, target: str) -> None:
        """A stranger has written to a key of the store, or removed it."""
        self._has_strangers = True
        if target == "outcome":
            self._outcome_since.clear()

    def over(self, fired: Sequence[ScheduledFault]) -> None:
        """All agents have ended. What a stranger does to a single key ends no job that a coordinator has begun; of two
        keys nothing may be left by which it is known before its first entry."""
        by_strangers = len(fired) == 1 and fired[0].kind in STRANGER_KINDS
        if by_strangers and not self.has_ended and self._was_claimed:
            raise Violation("a stranger has ended the job")

    def _job_generation(self, by: Asker, outcome: KeyValue | None) -> None:
        if outcome is not None and outcome.revision != by.outcome_seen:
            raise Violation(f"agent {by.incarnation} removes an outcome that it has not seen")
        if by.saw in self._ended:
            raise Violation(f"agent {by.incarnation} creates the job again that it has seen, and that has ended since")

    def took(self, own: int, other: int) -> None:
        """A coordinator takes an agent for a member."""
        if own != other:
            raise Violation(f"the coordinator of job generation {own} takes an agent of job generation {other}")

    def sent(self, job_generation: int, outcome: KeyValue) -> None:
        """An agent takes the outcome for that of its job."""
        said = int(outcome.value.split()[-1]) if outcome.is_genuine else 0
        if said != job_generation:
            there = f"the outcome of job generation {said}" if said else "a forged outcome"
            raise Violation(f"an agent of job generation {job_generation} takes {there} for its own")

    def given_up(self, host: int, job_generation: int, alone_since: int, now: int) -> None:
        """An agent ends without an outcome."""
        there = self._outcome_since.get(job_generation)
        if there is None:
            return
        since = max(there, alone_since, self._trouble_until.get(host, 0))
        if now - since > SEEN_BY:
            raise Violation(f"the agent of host {host} ends without the outcome, which it could read for {now - since}")


def entries_of(keys: Mapping[str, KeyValue]) -> list[KeyValue]:
    """The genuine entries among a job's keys."""
    return [found for key, found in keys.items() if key.startswith("rec/") and found.is_genuine]


def newest_term(entries: Iterable[bytes]) -> int:
    """The newest term of the coordinators that have written some entries; 0: there are none."""
    return max((int(entry.split()[1].split(b".")[0]) for entry in entries), default=0)


def _is_known(keys: Mapping[str, KeyValue], job_generation: int) -> bool:
    """Whether something genuine tells that a job generation is there, as its members see the keys (H14)."""
    return bool(entries_of(keys)) or is_there(keys.get(SPEC), keys.get(TERM), job_generation)
