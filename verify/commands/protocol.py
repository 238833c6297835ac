"""``python -m verify protocol``: the control core in a simulation, through faults at every instant.

Seeded schedules, or all schedules of small jobs; nothing depends on the machine, so a schedule that fails does so
again wherever it is run.
"""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import active_children, get_context
from typing import Any

import click
import msgspec

from elaswave.cli.tables import Waiting
from elaswave.observability.output import say, say_json
from elaswave.system.processes import end_with_parent
from verify.line_coverage import lines_run, report
from verify.planted_bugs.mutants import MUTANTS
from verify.simulator.run import PRODUCT, Build, run_schedule
from verify.simulator.schedule import Schedule, parse_schedule, random_schedule
from verify.simulator.search import SPACES, Failure, Summary, explore, run_seeds, shrink

_SEEDS_PER_TASK = 50
"""So few that all processes have work until the end, also of some hundreds."""
_PARTS = 40
"""Tasks that a space is cut into."""
_MAX_PROCESSES = 2


@click.command(
    name="protocol",
    short_help="The commit protocol in a simulation, with faults at every instant.",
    epilog="Exit codes: 0 no violation, 1 one was found (with --mutant: none was), 2 bad input.",
)
@click.option("--schedules", type=click.IntRange(min=1), default=10_000, show_default=True, help="Number of schedules.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first one.")
@click.option("--exhaustive", is_flag=True, help="All schedules of small jobs instead of seeded ones.")
@click.option(
    "--space",
    "spaces",
    type=click.Choice(list(SPACES)),
    multiple=True,
    metavar="NAME",
    help=f"Only this part of --exhaustive: {', '.join(SPACES)}.",
)
@click.option(
    "--mutant",
    "mutant",
    type=click.Choice(list(MUTANTS)),
    metavar="NAME",
    help=f"Search with a mutant of the protocol, which must be found: {', '.join(MUTANTS)}.",
)
@click.option("--replay", metavar="SEED|SCHEDULE", help="Run one schedule and print everything that happens in it.")
@click.option(
    "--processes", type=click.IntRange(min=1), help=f"Processes; default: one per core, at most {_MAX_PROCESSES}."
)
@click.option("--coverage", is_flag=True, help="Print which share of the lines of protocol/ they run; slower.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress to stderr.")
def protocol_command(
    schedules: int,
    seed: int,
    exhaustive: bool,
    spaces: tuple[str, ...],
    mutant: str | None,
    replay: str | None,
    processes: int | None,
    coverage: bool,
    as_json: bool,
) -> None:
    """Run the real coordinator, ledger, membership and recovery plans with a toy model on virtual time, while workers
    and coordinators are killed, hang, are cut off or falsely suspected, and check that the bits, the steps and the
    owners are always right and that the job always ends.

    \b
    python -m verify protocol --schedules 100000
    python -m verify protocol --exhaustive
    python -m verify protocol --replay 'widths=2,2 kill:0@41 kill:c@60'
    python -m verify protocol --mutant early-gather
    """
    build = PRODUCT if mutant is None else MUTANTS[mutant].build
    if replay is not None:
        sys.exit(_replay(_schedule_of(replay), build, as_json))
    if coverage:
        _print_coverage(seed, schedules)
        return
    started_s = time.monotonic()
    if exhaustive or spaces:
        plan = {name: _space_tasks(name, mutant) for name in spaces or SPACES}
    else:
        plan = {"seeded": _seed_tasks(seed, schedules, mutant)}
    processes = processes or min(_MAX_PROCESSES, os.cpu_count() or 1)
    summaries: dict[str, Summary] = {}
    for name, tasks in plan.items():
        summaries[name] = _run_all(name, tasks, processes, quiet=as_json)
        if summaries[name].num_failures:
            break
    total = Summary()
    for summary in summaries.values():
        total = total.merge(summary)
    failure = total.failures[0] if total.failures else None
    shortest = None if failure is None else shrink(failure.schedule, build)
    duration_s = time.monotonic() - started_s
    if as_json:
        say(_as_json(summaries, failure, shortest, mutant, duration_s))
    else:
        _print_summary(summaries, duration_s)
        if failure is not None and shortest is not None:
            _print_failure(failure, shortest, build, mutant)
        elif mutant is not None:
            say(f"the mutant {mutant} was not found; try more schedules, or another --seed")
    if (failure is None) != (mutant is None):
        sys.exit(1)


# ------------------------------------------------------------------------------------------------------------ the tasks


def _build_of(mutant: str | None) -> Build:
    return PRODUCT if mutant is None else MUTANTS[mutant].build


def _run_seeds(first: int, stop: int, mutant: str | None) -> Summary:
    # A mutant is looked for where it can strike, on the job of its example.
    job = None if mutant is None else parse_schedule(MUTANTS[mutant].example).job
    return run_seeds(range(first, stop), _build_of(mutant), job)


def _explore(name: str, part: int, mutant: str | None) -> Summary:
    return explore(SPACES[name], _build_of(mutant), part=part, parts=_PARTS)


def _seed_tasks(seed: int, schedules: int, mutant: str | None) -> list[tuple[Any, ...]]:
    stop = seed + schedules
    return [
        (_run_seeds, first, min(first + _SEEDS_PER_TASK, stop), mutant) for first in range(seed, stop, _SEEDS_PER_TASK)
    ]


def _space_tasks(name: str, mutant: str | None) -> list[tuple[Any, ...]]:
    return [(_explore, name, part, mutant) for part in range(_PARTS)]


def _run_all(name: str, tasks: list[tuple[Any, ...]], processes: int, *, quiet: bool) -> Summary:
    """Runs tasks in order until one has found something."""
    total = Summary()
    waiting = None if quiet else Waiting(name)
    with contextlib.closing(_results(tasks, processes)) as results:
        for num_done, summary in enumerate(results, start=1):
            total = total.merge(summary)
            if waiting is not None:
                waiting.at(num_done / len(tasks), f"{total.num_schedules:,} schedules")
            if total.num_failures:
                break
    if waiting is not None:
        waiting.close()
    return total


def _results(tasks: list[tuple[Any, ...]], processes: int) -> Generator[Summary, None, None]:
    if processes == 1:
        for call, *arguments in tasks:
            yield call(*arguments)
        return
    waiting = iter(tasks)
    others = set(active_children())
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin_child, initargs=(os.getpid(),)
    ) as pool:
        with _without_interrupts():
            running: set[Future[Summary]] = {pool.submit(*task) for task in islice(waiting, processes + 1)}
        finished = False
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(*task) for task in islice(waiting, len(done))}
                for future in done:
                    yield future.result()
            finished = True
        finally:
            if not finished:
                # Leaving the pool waits for tasks that are running, half a minute of them, for nothing.
                for child in set(active_children()) - others:
                    child.kill()


def _begin_child(parent: int) -> None:
    """What a process of the pool does first: Ctrl-C is its parent's business, and it does not outlive its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(parent)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back while inside. Processes begun here inherit that, so none is interrupted while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ------------------------------------------------------------------------------------------------------------- results


def _schedule_of(text: str) -> Schedule:
    try:
        return random_schedule(int(text)) if text.isdecimal() else parse_schedule(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _replay(schedule: Schedule, build: Build, as_json: bool) -> int:
    say(f"schedule: {schedule}", err=as_json)
    outcome = run_schedule(schedule, build, log=lambda line: say(line, err=as_json))
    if as_json:
        document = {
            "schedule": str(schedule),
            "violation": outcome.violation,
            "outcome": outcome.ended,
            "reason": outcome.reason,
            "instants": outcome.instants,
            "fired": [str(fault) for fault in outcome.fired],
        }
        say_json(document)
    elif outcome.violation is not None:
        say(f"violation: {outcome.violation}")
    else:
        say(f"{outcome.ended}{': ' + outcome.reason if outcome.reason else ''}; no violation")
    return 0 if outcome.violation is None else 1


def _print_summary(summaries: dict[str, Summary], duration_s: float) -> None:
    width = max(len(name) for name in summaries)
    for name, summary in summaries.items():
        found = f"{summary.num_failures} violations" if summary.num_failures else "no violation"
        say(f"{name.ljust(width)}  {summary.num_schedules:>9,} schedules, {found}")
    counts = sum((summary.counts for summary in summaries.values()), start=Summary().counts)
    say("they led through")
    for what, count in counts.most_common():
        say(f"  {count:>9,}  {what}")
    say(f"in {duration_s:.1f} s")


def _print_coverage(seed: int, schedules: int) -> None:
    summaries: list[Summary] = []
    run = lines_run(lambda: summaries.append(run_seeds(range(seed, seed + schedules))))
    say(f"lines of protocol/ that a call can run, and that {summaries[0].num_schedules:,} schedules have run")
    for row in report(run):
        say(f"  {row}")


def _print_failure(failure: Failure, shortest: Schedule, build: Build, mutant: str | None) -> None:
    option = "" if mutant is None else f" --mutant {mutant}"
    say(f"violation: {failure.violation}")
    text = str(failure.schedule)
    if failure.seed is not None and mutant is None:
        say(f"  seed {failure.seed}: python -m verify protocol --replay {failure.seed}")
    else:
        say(f"  python -m verify protocol{option} --replay {shlex.quote(text)}")
    outcome = run_schedule(shortest, build)
    say(f"the shortest schedule found that goes wrong: {outcome.violation}")
    say(f"  python -m verify protocol{option} --replay {shlex.quote(str(shortest))}")


def _as_json(
    summaries: dict[str, Summary],
    failure: Failure | None,
    shortest: Schedule | None,
    mutant: str | None,
    duration_s: float,
) -> str:
    found = None
    if failure is not None:
        found = {
            "violation": failure.violation,
            "seed": failure.seed,
            "schedule": str(failure.schedule),
            "shortest": str(shortest),
        }
    document = {
        "mutant": mutant,
        "searched": {
            name: {
                "schedules": summary.num_schedules,
                "violations": summary.num_failures,
                "led_through": dict(summary.counts.most_common()),
            }
            for name, summary in summaries.items()
        },
        "failure": found,
        "duration_s": duration_s,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
