"""Bugs that are planted in the lives of jobs' names (`verify.simulator.lifetimes`)."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from collections.abc import Generator
from typing import NamedTuple

from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    OUTCOME,
    SPEC,
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    Transaction,
)
from elaswave.protocol.leadership.election import CandidateAction, CoordinatorCandidate, NoJob, StoreAnswer
from elaswave.protocol.leadership.job_creation import CreatorAction, JobCreation, JobCreator, Left, ending
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.membership.agent import CoordinatorTimeout
from elaswave.protocol.membership.agent import TimeoutAction as TimeoutAction
from verify.simulator.lifetime_search import LifetimeBuild
from verify.simulator.lifetimes import Agent, Coordinator


class RemovesThoughTheLeaseIsHeld(Agent):
    """A creator does not compare the lease heartbeat: a coordinator that makes no entry for a while loses its job."""

    @staticmethod
    def removes(left: Left) -> Transaction:
        asked = left.removal()
        return asked._replace(
            unwritten_since=tuple(each for each in asked.unwritten_since if each[0] != LEASE_HEARTBEAT)
        )


class _Hasty(JobCreator):
    @property
    def ask_s(self) -> float:
        return 1.0


class AsksTooShort(Agent):
    """A creator asks for a second: another candidate is about to follow."""

    founder_class = _Hasty


class _Blind(JobCreation):
    def transaction(self) -> Transaction:
        return super().transaction()._replace(unwritten_since=((SPEC, 0),), deletes=(OUTCOME,))


class CreatesJobLate(Agent):
    """A creation does not compare the outcome that was there: one that comes late undoes the end of a later job."""

    job_creation_class = _Blind


class _Forgets(JobCreator):
    def looked(self, left: Left | None, outcome: KeyValue | None) -> CreatorAction:
        self.job_generation = 0
        return super().looked(left, outcome)


class CreatesWhatHasEnded(Agent):
    """A creator that has seen the job takes its end for that of an earlier one, and creates it again."""

    founder_class = _Forgets


class EndsAnotherJobGeneration(Agent):
    """The end of a job does not compare which job generation it is."""

    @staticmethod
    def ends(
        name: str, job_generation: int, spec: KeyValue | None, term: KeyValue | None, outcome: bytes | None
    ) -> Transaction | None:
        asked = ending("", 0, spec, term, outcome)
        return None if asked is None else asked._replace(unwritten_since=())


class _ClaimsAny(Claim):
    def transaction(self) -> Transaction:
        asked = super().transaction()
        return asked._replace(unwritten_since=tuple(each for each in asked.unwritten_since if each[0] != SPEC))


class _Late(CoordinatorCandidate):
    claim_class = _ClaimsAny


class ClaimsLate(Agent):
    """A claim that comes late leaves a key where no job is."""

    candidate_class = _Late


class _OfAnyJob(_Late):
    def is_mine(self, spec: KeyValue | None, term: KeyValue | None) -> bool:
        return spec is not None

    def _term_before(
        self, spec: KeyValue | None, term: KeyValue | None
    ) -> Generator[CandidateAction, StoreAnswer, int | NoJob]:
        known = yield from super()._term_before(spec, term)
        return 0 if isinstance(known, NoJob) else known


class ClaimsAnotherJobGeneration(Agent):
    """A candidate of the last job generation claims the job that was created again."""

    candidate_class = _OfAnyJob


class _RemembersTheTerm(CoordinatorCandidate):
    def tells_term(self, holder: Holder) -> bool:
        return self.watch.holder.term > 0


class ClaimsATakenTerm(Agent):
    """A candidate that finds no term takes what it has seen there for the newest one, and reads no entries."""

    candidate_class = _RemembersTheTerm


class _Undead(CoordinatorCandidate):
    def _term_before(
        self, spec: KeyValue | None, term: KeyValue | None
    ) -> Generator[CandidateAction, StoreAnswer, int | NoJob]:
        known = yield from super()._term_before(spec, term)
        return 9 if isinstance(known, NoJob) else known


class ClaimsWhatHasEnded(Agent):
    """A candidate takes an entry that was put back for a job that goes on."""

    candidate_class = _Undead


class TakesStrangers(Coordinator):
    """A coordinator takes agents of another job generation for members of its own."""

    def fits(self, received: StorePosition) -> bool:
        return True


class LeavesNoOutcome(Agent):
    """The end of a job removes all keys, and leaves no outcome."""

    @staticmethod
    def ends(
        name: str, job_generation: int, spec: KeyValue | None, term: KeyValue | None, outcome: bytes | None
    ) -> Transaction | None:
        return ending(name, job_generation, spec, term, None)


class _LooksForNothing(CoordinatorTimeout):
    def look(self, now_s: float, *, has_coordinator: bool, num_commits: int) -> TimeoutAction:
        due = super().look(now_s, has_coordinator=has_coordinator, num_commits=num_commits)
        return TimeoutAction.NOTHING if due is TimeoutAction.SEEK else due


class NeverSeeks(Agent):
    """An agent without a coordinator does not look for the outcome."""

    coordinator_timeout_class = _LooksForNothing


class TakesAnyOutcome(Agent):
    """An agent does not look who has written how the job has ended."""

    def counts(self, outcome: KeyValue | None) -> bool:
        return outcome is not None


class _KeepsItsPlace(EntryWrite):
    def transaction(self) -> Transaction:
        self.over = 0
        return super().transaction()


class StopsAtStrangers(Coordinator):
    """A coordinator waits for ever for a place where a stranger has written an entry."""

    entry_class = _KeepsItsPlace


class LifetimeMutant(NamedTuple):
    """A planted bug."""

    name: str
    what: str
    build: LifetimeBuild
    example: str
    real: bool = False
    """Whether the product once had it."""


LIFETIME_MUTANTS = {
    mutant.name: mutant
    for mutant in (
        LifetimeMutant(
            "lease-heartbeat-not-compared",
            "a job whose coordinator writes only its lease heartbeat is removed",
            LifetimeBuild(RemovesThoughTheLeaseIsHeld),
            "pause=500 restart=200 kill:a0@57 cut:a0@68+900",
            real=True,
        ),
        LifetimeMutant(
            "asks-briefly",
            "a job is removed that another candidate is about to follow",
            LifetimeBuild(AsksTooShort),
            "kill:a0@16",
        ),
        LifetimeMutant(
            "creates-late",
            "a creation that comes late undoes a later job's end",
            LifetimeBuild(CreatesJobLate),
            "seed=855270118 late:s@41+900",
            real=True,
        ),
        LifetimeMutant(
            "creates-the-ended",
            "a job that has ended while its creator asked for it is created again",
            LifetimeBuild(CreatesWhatHasEnded),
            "seed=952027333 length=1 pause=500 kill:a0@113 mute:s@136+900 cut:a0@143+900",
            real=True,
        ),
        LifetimeMutant(
            "ends-another",
            "the end of a job removes one that was created since",
            LifetimeBuild(EndsAnotherJobGeneration),
            "seed=214382231 length=1 late:s@79+10",
        ),
        LifetimeMutant(
            "claims-another",
            "a candidate of the last job generation claims the next one",
            LifetimeBuild(ClaimsAnotherJobGeneration),
            "shut:a1@19+500 kill:a0@50 kill:a0@163",
            real=True,
        ),
        LifetimeMutant(
            "claims-late",
            "a claim that comes late leaves a key where no job is",
            LifetimeBuild(ClaimsLate),
            "seed=807178501 late:s@48+500",
            real=True,
        ),
        LifetimeMutant(
            "claims-a-taken-term",
            "a candidate that has missed a coordinator, and finds no term, claims that one's",
            LifetimeBuild(ClaimsATakenTerm),
            "shut:a1@58+200 kill:c@62 lose:term@74 kill:a0@74",
            real=True,
        ),
        LifetimeMutant(
            "claims-the-ended",
            "an entry that was put back brings a job to life that is over",
            LifetimeBuild(ClaimsWhatHasEnded),
            "shut:a0@48+500 old:entry@84",
        ),
        LifetimeMutant(
            "takes-strangers",
            "a coordinator takes agents of the last job generation for its own",
            LifetimeBuild(coordinator=TakesStrangers),
            "shut:a1@7+500 kill:a0@50",
            real=True,
        ),
        LifetimeMutant(
            "outcome-unsealed",
            "a stranger's outcome is taken for the job's",
            LifetimeBuild(TakesAnyOutcome),
            "pause=500 forge:outcome@42 lost:s@64+500 kill:c@82",
            real=True,
        ),
        LifetimeMutant(
            "entry-in-the-way",
            "a stranger's entry stops the coordinator",
            LifetimeBuild(coordinator=StopsAtStrangers),
            "forge:entry@0",
            real=True,
        ),
        LifetimeMutant("no-outcome", "a job leaves no outcome", LifetimeBuild(LeavesNoOutcome), ""),
        LifetimeMutant(
            "never-seeks",
            "who was cut off at the end does not look for the outcome",
            LifetimeBuild(NeverSeeks),
            "mute:s@1+300 cut:a0@108+900",
        ),
    )
}
"""By name."""
