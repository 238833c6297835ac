"""Looks for violations in lives of jobs' names (`verify.simulator.lifetimes`): by seeds, everywhere in small ones."""

import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from verify.simulator.checkers import Violation
from verify.simulator.lifetimes import NUM_HOSTS, Agent, Coordinator, Life, Lifetime
from verify.simulator.schedule import STORE_KEYS, STRANGER_KINDS, ScheduledFault, parse_fault

KINDS = ("kill", "cut", "shut", "lost", "mute", "late", *STRANGER_KINDS)
"""Of faults: as those of other schedules, of agents' hosts (``a0``), the coordinator (``c``) and the store (``s``)."""
_DURATIONS = (10, 60, 300, 500, 900)
"""Half a second to 45 s: a claim follows after 2 s, a creator asks for 20 s, an agent waits for 30 s."""
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
