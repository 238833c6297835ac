"""Looks for violations: in seeded schedules, and in all schedules of small jobs.

The exhaustive search strikes at every instant that makes a difference. Two instants at the same time are the same for
a fault if its target has done nothing in between, since what others do at that moment commutes with it; so one of
them is enough. A second fault is tried at every such instant of the run that the first one leads to.
"""

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, islice
from typing import NamedTuple

from verify.simulator.job import Job
from verify.simulator.run import PRODUCT, Build, RunOutcome, run_schedule
from verify.simulator.schedule import (
    AGENT,
    COORDINATOR,
    HOST,
    LAYOUTS,
    STORE,
    Conditions,
    Schedule,
    ScheduledFault,
    random_schedule,
    workers_of_hosts,
)

MAX_FAILURES = 20
"""Failures that a summary keeps."""

ALL_KINDS = ("kill", "suspect", "hang", "isolate", "cut", "delay", "disconnect", "usurp")
"""Of every job."""
STORE_KINDS = ("lost", "mute", "late", "back", "shut")
"""Of jobs with candidates."""
MAIN_KINDS = ("kill", "suspect", "disconnect")
"""Of workers and, for kill, the coordinator."""
_DURATIONS = {
    "spoil": (0, 1, 3),
    "hang": (20, 150),
    "isolate": (20, 150),
    "delay": (20,),
    "usurp": (5, 60),
    "flip": tuple(range(1, 10)),
    "slip": tuple(range(1, 7)),
} | dict.fromkeys(STORE_KINDS, (10, 60))
"""Shorter and longer than the silence after which a worker is suspected, and a coordinator followed; of one that is
spoiled, actions; of a flip and a slip, where."""


class Failure(NamedTuple):
    """A schedule with a violation."""

    schedule: Schedule
    violation: str
    seed: int | None = None


class Summary(NamedTuple):
    """What came of many schedules."""

    num_schedules: int = 0
    num_failures: int = 0
    failures: tuple[Failure, ...] = ()
    """The first ones."""
    counts: Counter[str] = Counter()
    """What the runs led through."""

    def merge(self, other: "Summary") -> "Summary":
        """Both together."""
        return Summary(
            self.num_schedules + other.num_schedules,
            self.num_failures + other.num_failures,
            (self.failures + other.failures)[:MAX_FAILURES],
            self.counts + other.counts,
        )


class _Collector:
    """Adds outcomes up."""

    def __init__(self) -> None:
        self.num_schedules = self.num_failures = 0
        self.failures: list[Failure] = []
        self.counts: Counter[str] = Counter()

    def add(self, schedule: Schedule, outcome: RunOutcome, seed: int | None = None) -> None:
        gc.collect(0)  # the world of this run: the next one finds its memory still in the processor's caches
        self.num_schedules += 1
        self.counts.update(outcome.counts)
        self.counts[f"schedules in which {len(outcome.fired)} faults struck"] += 1
        if outcome.violation is not None:
            self.num_failures += 1
            if len(self.failures) < MAX_FAILURES:
                self.failures.append(Failure(schedule, outcome.violation, seed))

    def summary(self) -> Summary:
        return Summary(self.num_schedules, self.num_failures, tuple(self.failures), self.counts)


def run_seeds(seeds: Iterable[int], build: Build = PRODUCT, job: Job | None = None) -> Summary:
    """Runs the schedules of seeds.

    Args:
        seeds: which.
        build: the processes' classes.
        job: the job of all of them; None draws one for each.
    """
    collector = _Collector()
    with _collected_between_runs():
        for seed in seeds:
            schedule = random_schedule(seed, job)
            collector.add(schedule, run_schedule(schedule, build), seed)
    return collector.summary()


@contextmanager
def _collected_between_runs() -> Iterator[None]:
    """Looks for cycles after each run alone (`_Collector.add`): all that a run has made lives until its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------- exhaustive search


class Space(NamedTuple):
    """A set of schedules that is searched completely."""

    name: str
    job: Job
    conditions: tuple[Conditions, ...]
    kinds: tuple[tuple[str, ...], ...]
    """Kinds of the first fault, of the second, and so on."""


_PROMPT = Conditions(exit_delay=1, link_delay=6)
_BY_LINK = Conditions(exit_delay=12, link_delay=1)
_LATE = Conditions(exit_delay=40, link_delay=30)
_SLOW_PLAN = _PROMPT._replace(plan_delay=20)
"""Long enough for another loss to be noticed, and reported about, before the planner answers."""

_SLOW_COMMIT = _PROMPT._replace(commit_delay=20)
"""Long enough for a loss to be decided upon while a checkpoint is committed."""

JOB_OF_3 = Job(widths=(2, 1), steps=2, checkpoint_every=1, retry_step=2)
BATCHED_JOB = JOB_OF_3._replace(blocks_at_once=3)
"""A worker updates its copies in two batches, as on a device."""
JOB_OF_4 = Job(widths=(2, 2), steps=2, retry_step=2)
TIED_JOB = Job(widths=(1, 2), steps=2, tied=True)
"""Two stages share a unit, owned in either of them."""
CHANGING_JOB = Job(widths=(2, 1), steps=6, change_step=1)
"""A change is adopted with its second step, blocks move in the third and fourth, and the fifth brings it into force and
drops copies."""

LONG_JOB = Job(widths=(2, 2), layers_per_stage=2, blocks_per_layer=1, num_microbatches=6, steps=1)
"""Several micro-batches are on their way at once, and a loss may strike in the midst of any."""
LONG_JOB_OF_3 = Job(widths=(2, 1), layers_per_stage=2, blocks_per_layer=1, num_microbatches=4, steps=1)


def _in_the_midst(seeds: Iterable[int]) -> tuple[Conditions, ...]:
    """Ways in which survivors are told of a loss in the midst of what they do."""
    return tuple(
        _PROMPT._replace(seed=seed, link_delay=1, mid_action=num_layers, replans=replans)
        for seed in seeds
        for num_layers in (1, 2)
        for replans in (False, True)
    )


JOINING_JOB = Job(widths=(2, 1), steps=9, join_step=1)
"""Worker 3 joins, and works in the last steps."""
LEAVING_JOB = Job(widths=(2, 1), steps=9, leave_step=1, leaver=1)
"""Worker 1 leaves; another one of its stage stays."""
LEAVING_JOB_OF_4 = Job(widths=(2, 2), steps=9, leave_step=1, leaver=1)
"""The same with two workers in the other stage, so that one can be lost while another one leaves."""
LAST_LEAVING_JOB = Job(widths=(2, 1), steps=9, leave_step=1, leaver=2)
"""Worker 2 leaves, the only one of its stage."""


def _weathers(num_workers: int) -> tuple[Conditions, ...]:
    """Ways in which a failure is noticed: early or late, by whom, and which worker hears of it last."""
    weathers = []
    for conditions in (_PROMPT, _BY_LINK, _LATE):
        for keeps in (True, False):
            weathers.append(conditions._replace(keeps_in_flight=keeps))
            weathers += [
                conditions._replace(keeps_in_flight=keeps, slow_worker=worker, slow_by=9)
                for worker in range(num_workers)
            ]
    return tuple(weathers)


HOSTS_JOB = Job(widths=(2, 2), steps=3, checkpoint_every=1, retry_step=2, num_hosts=2)
"""Two hosts with a worker of each stage."""
UNEVEN_HOSTS_JOB = Job(widths=(2, 1), steps=10, blocks_per_round=8, num_hosts=2, join_step=1)
"""Three workers on two hosts; worker 3 joins on the second one."""

_FEW = (
    _PROMPT,
    _BY_LINK._replace(keeps_in_flight=False),
    _LATE,
    _PROMPT._replace(slow_worker=0, slow_by=9),
    _PROMPT._replace(slow_worker=1, slow_by=40),
)
"""For jobs in which much happens."""

_STORES = tuple(
    _PROMPT._replace(candidates=2, store_delay=delay, restart_delay=restart)
    for delay, restart in ((0, 10), (0, 1), (8, 30))
)
"""Two candidates; at last requests that are answered late, so that all that is written is said again."""

SPACES = {
    space.name: space
    for space in (
        Space("3-workers-1-fault", JOB_OF_3, _weathers(3), (ALL_KINDS,)),
        Space("3-workers-2-faults", JOB_OF_3, (_PROMPT,), (MAIN_KINDS, MAIN_KINDS)),
        Space("3-workers-batches-1-fault", BATCHED_JOB, _weathers(3), (ALL_KINDS,)),
        Space("4-workers-1-fault", JOB_OF_4, _weathers(4), (ALL_KINDS,)),
        Space("3-workers-change-1-fault", CHANGING_JOB, _weathers(3), (ALL_KINDS,)),
        Space("3-workers-change-2-kills", CHANGING_JOB, (_PROMPT,), (("kill",), ("kill", "suspect"))),
        Space("3-workers-slow-plan-2-faults", JOB_OF_3, (_SLOW_PLAN,), (("kill", "suspect"), ("kill", "suspect"))),
        Space("3-workers-slow-commit-2-faults", JOB_OF_3, (_SLOW_COMMIT,), (("kill", "suspect"), ("kill", "suspect"))),
        Space("3-workers-tied-1-fault", TIED_JOB, _weathers(3), (ALL_KINDS,)),
        Space("3-workers-tied-2-kills", TIED_JOB, (_PROMPT,), (("kill",), ("kill",))),
        Space("3-workers-join-1-kill", JOINING_JOB, _FEW, (("kill", "suspect"),)),
        Space("3-workers-leave-1-kill", LEAVING_JOB, _FEW, (("kill", "suspect"),)),
        Space("4-workers-leave-1-kill", LEAVING_JOB_OF_4, _FEW, (("kill", "suspect"),)),
        Space("3-workers-last-leaves-1-kill", LAST_LEAVING_JOB, _FEW, (("kill", "suspect"),)),
        Space("3-workers-join-1-fault", JOINING_JOB, (_PROMPT,), (ALL_KINDS,)),
        Space("4-workers-2-hosts-1-fault", HOSTS_JOB, _FEW, (("kill", "suspect"),)),
        Space("3-workers-2-hosts-join-1-kill", UNEVEN_HOSTS_JOB, _FEW, (("kill",),)),
        Space("3-workers-2-candidates-1-fault", JOB_OF_3, _STORES, ((*ALL_KINDS, *STORE_KINDS),)),
        Space(
            "3-workers-2-candidates-2-faults",
            JOB_OF_3,
            _STORES[:1],
            (("kill", "suspect"), ("kill", "usurp", *STORE_KINDS)),
        ),
        Space(
            "3-workers-2-agents-join-1-fault",
            JOINING_JOB,
            (_PROMPT._replace(agents=2), _BY_LINK._replace(agents=2, restart_delay=30)),
            (("kill", "suspect", "disconnect"),),
        ),
        Space(
            "3-workers-2-agents-orphans-1-fault",
            JOB_OF_3._replace(steps=6),
            tuple(_PROMPT._replace(agents=2, orphan_delay=40, restart_delay=delay) for delay in (10, 36, 60)),
            (("kill", "suspect", "hang", "disconnect"),),
        ),
        Space("3-workers-1-flip", JOB_OF_3._replace(checkpoint_every=1), (_PROMPT,), (("flip",),)),
        Space("3-workers-change-1-flip", CHANGING_JOB, (_PROMPT,), (("flip",),)),
        Space("3-workers-1-slip", JOB_OF_3._replace(steps=4), (_PROMPT,), (("slip",),)),
        Space("3-workers-3-copies-1-slip", JOB_OF_3._replace(steps=4, num_followers=2), (_PROMPT,), (("slip",),)),
        Space(
            "3-workers-3-copies-at-the-end-1-slip",
            JOB_OF_3._replace(steps=4, num_followers=2, checkpoint_every=0),
            (_PROMPT,),
            (("slip",),),
        ),
        Space("3-workers-change-1-slip", CHANGING_JOB, (_PROMPT,), (("slip",),)),
        Space(
            "3-workers-flip-1-fault",
            JOB_OF_3._replace(salvage=False),
            (_PROMPT,),
            (("flip",), ("kill", "suspect", "disconnect")),
        ),
        Space("4-workers-2-kills", JOB_OF_4, (_PROMPT,), (("kill",), ("kill",))),
        Space("4-workers-salvage-1-fault", LONG_JOB, _in_the_midst(range(1, 9)), (("kill", "suspect"),)),
        Space("4-workers-spoiled", LONG_JOB, _in_the_midst((1,)), (("spoil",),)),
        Space("3-workers-spoiled-and-usurped", LONG_JOB_OF_3, _in_the_midst((1,)), (("spoil",), ("usurp",))),
        Space("3-workers-salvage-2-kills", LONG_JOB_OF_3, _in_the_midst((1,)), (("kill",), ("kill", "suspect"))),
    )
}
"""The spaces that are searched completely, by name."""


def explore(
    space: Space, build: Build = PRODUCT, *, part: int = 0, parts: int = 1, limit: int | None = None
) -> Summary:
    """Searches a space, or one part of it.

    Args:
        space: what to search.
        build: the processes' classes.
        part, parts: every ``parts``-th first fault, from the ``part``-th on; the parts make up the whole.
        limit: stop after so many first faults.
    """
    collector = _Collector()
    firsts = (
        schedule
        for conditions in space.conditions
        for schedule in _with_one_more(Schedule(space.job, conditions), space.kinds[0], build)
    )
    with _collected_between_runs():
        for schedule in islice(firsts, part, None if limit is None else part + limit * parts, parts):
            _explore_from(schedule, space.kinds[1:], build, collector)
    return collector.summary()


def _explore_from(schedule: Schedule, kinds: Sequence[tuple[str, ...]], build: Build, collector: _Collector) -> None:
    collector.add(schedule, run_schedule(schedule, build))
    if kinds:
        for longer in _with_one_more(schedule, kinds[0], build):
            _explore_from(longer, kinds[1:], build, collector)


def _with_one_more(schedule: Schedule, kinds: Collection[str], build: Build) -> Iterator[Schedule]:
    """The schedule with one more fault, at every instant from its last one on that makes a difference."""
    instants: list[tuple[int, int]] = []
    run_schedule(schedule, build, instants=instants)
    start = schedule.faults[-1].instant if schedule.faults else 0
    kills = [fault for fault in schedule.faults if fault.kind == "kill"]
    dead = {str(worker) for fault in kills for worker in fault.workers}
    for kind in kinds:
        for target, workers in _targets(kind, schedule.job, schedule.conditions):
            if dead & set(target.split("-")):
                continue
            for instant in strike_points(instants, workers, start):
                for duration in _DURATIONS.get(kind, (0,)):
                    fault = ScheduledFault(kind, target, instant, duration)
                    if fault not in schedule.faults:
                        yield schedule._replace(faults=(*schedule.faults, fault))


def _targets(kind: str, job: Job, conditions: Conditions) -> list[tuple[str, tuple[int, ...]]]:
    """Targets of a kind, with the actors that they are (-1 for the coordinator)."""
    num_workers = job.num_workers + (job.join_step > 0)
    if kind in ("usurp", "shut"):
        return [(COORDINATOR, (-1,))]
    if kind in STORE_KINDS:
        return [(STORE, (-1,))]
    if kind in ("cut", "delay"):
        return [(f"{a}-{b}", (a, b)) for a, b in combinations(range(num_workers), 2)]
    targets: list[tuple[str, tuple[int, ...]]] = [(str(worker), (worker,)) for worker in range(num_workers)]
    if kind in ("kill", "disconnect"):
        targets += [(f"{AGENT}{number}", (-1,)) for number in range(conditions.agents)]
    if kind != "kill":
        return targets
    hosts = [("-".join(map(str, workers)), workers) for workers in workers_of_hosts(job) if len(workers) > 1]
    targets += [*hosts, (COORDINATOR, (-1,))]
    return [*targets, (HOST, (-1,))] if conditions.candidates else targets


def strike_points(instants: Sequence[tuple[int, int]], actors: Collection[int], start: int) -> list[int]:
    """The instants that differ for a fault.

    Args:
        instants: time and actor of each instant of the run without the fault.
        actors: whom the fault strikes.
        start: the first instant to consider.
    """
    return [
        instant
        for instant in range(start, len(instants))
        if instant == start or instants[instant][0] != instants[instant - 1][0] or instants[instant - 1][1] in actors
    ]


# ------------------------------------------------------------------------------------------------------------ shrinking


def shrink(schedule: Schedule, build: Build = PRODUCT) -> Schedule:
    """A schedule with a violation as short as can be found: fewer faults, plainer conditions, a smaller job.

    Args:
        schedule: one with a violation.
        build: the processes' classes.
    """

    def fails(candidate: Schedule) -> bool:
        return run_schedule(candidate, build).violation is not None

    improved = True
    while improved:
        improved = False
        for candidate in _simpler(schedule):
            if fails(candidate):
                schedule, improved = candidate, True
                break
    return schedule


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    for index in range(len(faults)):
        yield schedule._replace(faults=faults[:index] + faults[index + 1 :])
    for field, default in Conditions()._asdict().items():
        if getattr(schedule.conditions, field) != default:
            yield schedule._replace(conditions=Conditions(**{**schedule.conditions._asdict(), field: default}))
    job = schedule.job
    busiest = max((worker for fault in faults for worker in fault.workers), default=0)
    for widths in LAYOUTS:
        if busiest < sum(widths) < job.num_workers:
            yield schedule._replace(job=job._replace(widths=widths, num_microbatches=max(widths)))
    for field, default in Job()._asdict().items():
        value = getattr(job, field)
        if field != "widths" and value != default:
            plain = max(job.widths) if field == "num_microbatches" else default
            if plain != value and not (field == "steps" and plain > value):
                yield schedule._replace(job=Job(**{**job._asdict(), field: plain}))
    for index, fault in enumerate(faults):
        for simpler in (fault._replace(duration=fault.duration // 2), fault._replace(instant=fault.instant - 1)):
            if simpler != fault and simpler.instant >= 0 and (simpler.duration or not fault.duration):
                yield schedule._replace(faults=(*faults[:index], simpler, *faults[index + 1 :]))
