"""Looks for violations in the lives of jobs' names (`verify.simulator.lifetimes`), by seeds and everywhere in
small ones; and the bugs that are planted there."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elaswave.protocol.founding import Due, Founder, Founding, Left, ending
from elaswave.protocol.heads import Head
from elaswave.protocol.store_writes import BEAT, OUTCOME, SPEC, Claim, EntryWrite, KeyValue, Transaction
from elaswave.protocol.vigil import Due as VigilDue
from elaswave.protocol.vigil import Vigil
from verify.simulator.checkers import Violation
from verify.simulator.lifetimes import NUM_HOSTS, Agent, Coordinator, Life, Lifetime
from verify.simulator.schedule import STORE_KEYS, STRANGER_KINDS, ScheduledFault, parse_fault

KINDS = ("kill", "cut", "shut", "lost", "mute", "late", *STRANGER_KINDS)
"""Of faults: as those of other schedules, of agents' hosts (``a0``), the coordinator (``c``) and the store (``s``)."""
_DURATIONS = (10, 60, 300, 500, 900)
"""Half a second to 45 s: a claim follows after 2 s, a founder asks for 20 s, an agent waits for 30 s."""
LIVES = (Lifetime(), Lifetime(pause=500, length=3), Lifetime(restart=200))
"""That are searched everywhere: entries every 3 s; every 25 s; a launcher that takes 10 s."""
MAX_FAILURES = 20


class LifetimeBuild(NamedTuple):
    """What the processes are made of; bugs are planted here."""

    agent: type[Agent] = Agent
    coordinator: type[Coordinator] = Coordinator


PRODUCT = LifetimeBuild()


class LifetimeOutcome(NamedTuple):
    """What came of one."""

    violation: str | None
    instants: int
    time: int
    fired: tuple[ScheduledFault, ...]


class LifetimeSummary(NamedTuple):
    """What came of many."""

    num_schedules: int
    failures: tuple[tuple[Lifetime, str], ...]


def run_lifetime(schedule: Lifetime, build: LifetimeBuild = PRODUCT, log: list[str] | None = None) -> LifetimeOutcome:
    """Runs one to its end.

    Args:
        schedule: what happens.
        build: the processes' classes.
        log: takes a line per event.
    Returns:
        The outcome; never raises for a defect of what is simulated.
    """
    life = Life(schedule, build.agent, build.coordinator, log=None if log is None else log.append)
    violation = None
    try:
        life.run()
    except Violation as error:
        violation = str(error)
    except Exception as error:  # whatever the simulated code raises is a finding
        violation = f"{type(error).__name__}: {error}"
    return LifetimeOutcome(violation, life.instant, life.now, tuple(life.fired))


def parse_lifetime(text: str) -> Lifetime:
    """The inverse of ``str(schedule)``.

    Raises:
        ValueError: it is none.
    """
    values, faults = Lifetime()._asdict(), []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            faults.append(parse_fault(word))
        elif name in values and value.isdecimal():
            values[name] = int(value)
        else:
            raise ValueError(f"{word!r} is neither a fault nor one of seed, length, pause, restart with a number")
    for fault in faults:
        targets = {"kill": ("a0", "a1", "a2", "c"), "cut": ("a0", "a1", "a2"), "shut": ("a0", "a1", "a2")}
        targets |= dict.fromkeys(STRANGER_KINDS, STORE_KEYS)
        if fault.kind not in KINDS or fault.target not in targets.get(fault.kind, ("s",)):
            raise ValueError(f"{str(fault)!r} is no fault of a job's keys: {', '.join(KINDS)}")
    return Lifetime(**{**values, "faults": tuple(faults)})


def random_lifetime(seed: int) -> Lifetime:
    """The schedule of a seed: up to five faults."""
    rng = random.Random(f"lifetime {seed}")
    span, at, faults = 160, rng.randrange(160), []
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5))):
        faults.append(_drawn_fault(rng, at))
        at = at + rng.randrange(1, 40) if rng.random() < 0.7 else rng.randrange(span)
    return Lifetime(
        seed=rng.randrange(1, 1 << 30),
        length=rng.choice((1, 3, 4)),
        pause=rng.choice((20, 60, 60, 500)),
        restart=rng.choice((5, 30, 30, 200)),
        faults=tuple(sorted(faults, key=lambda fault: fault.instant)),
    )


def _drawn_fault(rng: random.Random, instant: int) -> ScheduledFault:
    kind = rng.choice(("kill", "kill", "kill", "cut", "cut", "shut", "shut", "lost", "mute", "late", "stranger"))
    if kind == "stranger":
        return ScheduledFault(rng.choice([*STRANGER_KINDS]), rng.choice(STORE_KEYS), instant)
    host = f"a{rng.randrange(NUM_HOSTS)}"
    if kind == "kill":
        return ScheduledFault(kind, rng.choice(("a0", host, "c")), instant)
    target = host if kind in ("cut", "shut") else "s"
    return ScheduledFault(kind, target, instant, rng.choice(_DURATIONS))


def run_lifetimes(schedules: Iterable[Lifetime], build: LifetimeBuild = PRODUCT) -> LifetimeSummary:
    """Runs many."""
    number, failures = 0, list[tuple[Lifetime, str]]()
    for schedule in schedules:
        number += 1
        violation = run_lifetime(schedule, build).violation
        if violation is not None and len(failures) < MAX_FAILURES:
            failures.append((schedule, violation))
    return LifetimeSummary(number, tuple(failures))


def everywhere(schedule: Lifetime, first: int = 0, step: int = 1) -> Iterator[Lifetime]:
    """The schedule with one more fault: of each kind, at each instant from its last one on.

    Args:
        schedule: with its faults so far.
        first, step: every so manieth instant.
    """
    start = schedule.faults[-1].instant if schedule.faults else 0
    for instant in range(start + first, run_lifetime(schedule).instants, step):
        for host in range(NUM_HOSTS):
            yield _with(schedule, ScheduledFault("kill", f"a{host}", instant))
            for duration in _DURATIONS:
                yield _with(schedule, ScheduledFault("cut", f"a{host}", instant, duration))
                yield _with(schedule, ScheduledFault("shut", f"a{host}", instant, duration))
        yield _with(schedule, ScheduledFault("kill", "c", instant))
        for kind in STRANGER_KINDS:
            for key in STORE_KEYS:
                yield _with(schedule, ScheduledFault(kind, key, instant))
        for kind in ("lost", "mute", "late"):
            for duration in _DURATIONS:
                yield _with(schedule, ScheduledFault(kind, "s", instant, duration))


def _with(schedule: Lifetime, fault: ScheduledFault) -> Lifetime:
    return schedule._replace(faults=(*schedule.faults, fault))


def shortest(schedule: Lifetime, build: LifetimeBuild = PRODUCT) -> Lifetime:
    """A schedule with a violation with as few faults, and as plain values, as can be found."""
    improved = True
    while improved:
        improved = False
        for simpler in _simpler(schedule):
            if run_lifetime(simpler, build).violation is not None:
                schedule, improved = simpler, True
                break
    return schedule


def _simpler(schedule: Lifetime) -> Iterator[Lifetime]:
    faults = schedule.faults
    for at in range(len(faults)):
        yield schedule._replace(faults=faults[:at] + faults[at + 1 :])
    for name, value in Lifetime()._asdict().items():
        if name != "faults" and getattr(schedule, name) != value:
            yield Lifetime(**{**schedule._asdict(), name: value})
    for at, fault in enumerate(faults):
        if fault.instant:
            yield schedule._replace(faults=(*faults[:at], fault._replace(instant=fault.instant - 1), *faults[at + 1 :]))


# --------------------------------------------------------------------------------------------------------- planted bugs


class RemovesThoughItBeats(Agent):
    """A founder does not compare the beat: a coordinator that makes no entry for a while loses its job."""

    @staticmethod
    def removes(left: Left) -> Transaction:
        asked = left.removal()
        return asked._replace(unwritten_since=tuple(each for each in asked.unwritten_since if each[0] != BEAT))


class _Hasty(Founder):
    @property
    def ask_s(self) -> float:
        return 1.0


class AsksTooShort(Agent):
    """A founder asks for a second: another candidate is about to follow."""

    founder_class = _Hasty


class _Blind(Founding):
    def transaction(self) -> Transaction:
        return super().transaction()._replace(unwritten_since=((SPEC, 0),), deletes=(OUTCOME,))


class FoundsLate(Agent):
    """A founding does not compare the outcome that was there: one that comes late undoes the end of a later job."""

    founding_class = _Blind


class _Forgets(Founder):
    def looked(self, left: Left | None, outcome: KeyValue | None) -> Due:
        self.founded = 0
        return super().looked(left, outcome)


class FoundsWhatHasEnded(Agent):
    """A founder that has seen the job takes its end for that of an earlier one, and founds it again."""

    founder_class = _Forgets


class EndsAnotherFounding(Agent):
    """The end of a job does not compare which founding it is."""

    @staticmethod
    def ends(
        name: str, founded: int, spec: KeyValue | None, term: KeyValue | None, outcome: bytes | None
    ) -> Transaction | None:
        asked = ending("", 0, spec, term, outcome)
        return None if asked is None else asked._replace(unwritten_since=())


class _ClaimsAny(Claim):
    def transaction(self) -> Transaction:
        asked = super().transaction()
        return asked._replace(unwritten_since=tuple(each for each in asked.unwritten_since if each[0] != SPEC))


class ClaimsLate(Agent):
    """A claim that comes late leaves a key where no job is."""

    claim_class = _ClaimsAny


class ClaimsAnotherFounding(Agent):
    """A candidate of the last founding claims the job that was founded again."""

    claim_class = _ClaimsAny

    def is_mine(self, spec: KeyValue | None, term: KeyValue | None) -> bool:
        return spec is not None


class TakesStrangers(Coordinator):
    """A coordinator takes agents of another founding for members of its own."""

    def fits(self, heard: Head) -> bool:
        return True


class LeavesNoOutcome(Agent):
    """The end of a job removes all keys, and leaves no outcome."""

    @staticmethod
    def ends(
        name: str, founded: int, spec: KeyValue | None, term: KeyValue | None, outcome: bytes | None
    ) -> Transaction | None:
        return ending(name, founded, spec, term, None)


class _LooksForNothing(Vigil):
    def look(self, now_s: float, *, has_coordinator: bool, num_commits: int) -> VigilDue:
        due = super().look(now_s, has_coordinator=has_coordinator, num_commits=num_commits)
        return VigilDue.NOTHING if due is VigilDue.SEEK else due


class NeverSeeks(Agent):
    """An agent without a coordinator does not look for the outcome."""

    vigil_class = _LooksForNothing


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
            "beat-uncompared",
            "a job whose coordinator writes only its beat is removed",
            LifetimeBuild(RemovesThoughItBeats),
            "pause=500 restart=200 kill:a0@57 cut:a0@68+900",
            real=True,
        ),
        LifetimeMutant(
            "asks-briefly",
            "a job is removed that another candidate is about to follow",
            LifetimeBuild(AsksTooShort),
            "kill:a0@17",
        ),
        LifetimeMutant(
            "founds-late",
            "a founding that comes late undoes a later job's end",
            LifetimeBuild(FoundsLate),
            "seed=855270118 late:s@41+900",
            real=True,
        ),
        LifetimeMutant(
            "founds-the-ended",
            "a job that has ended while its founder asked for it is founded again",
            LifetimeBuild(FoundsWhatHasEnded),
            "seed=952027333 length=1 pause=500 kill:a0@100 mute:s@112+900 cut:a0@127+900",
            real=True,
        ),
        LifetimeMutant(
            "ends-another",
            "the end of a job removes one that was founded since",
            LifetimeBuild(EndsAnotherFounding),
            "seed=214382231 length=1 late:s@73+10",
        ),
        LifetimeMutant(
            "claims-another",
            "a candidate of the last founding claims the next one",
            LifetimeBuild(ClaimsAnotherFounding),
            "kill:a0@49 shut:a1@19+500 kill:a0@162",
            real=True,
        ),
        LifetimeMutant(
            "claims-late",
            "a claim that comes late leaves a key where no job is",
            LifetimeBuild(ClaimsLate),
            "seed=807178501 late:s@45+500",
            real=True,
        ),
        LifetimeMutant(
            "takes-strangers",
            "a coordinator takes agents of the last founding for its own",
            LifetimeBuild(coordinator=TakesStrangers),
            "kill:a0@49 shut:a1@7+500",
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
            "mute:s@1+300 cut:a0@106+900",
        ),
    )
}
"""By name."""
