"""``python -m verify lifetimes``: a job's name in its store, from its creation to its outcome, through faults."""

import sys
import time
from itertools import chain

import click

from elaswave.cli.tables import Waiting
from elaswave.observability.output import say
from verify.simulator.lifetime_search import (
    LIVES,
    LifetimeSummary,
    everywhere,
    parse_lifetime,
    random_lifetime,
    run_lifetime,
    run_lifetimes,
    shortest,
)
from verify.simulator.lifetimes import Lifetime

_PER_TURN = 250


@click.command(
    name="lifetimes",
    short_help="A job's creation, claims and end in its store, in a simulation.",
    epilog="Exit codes: 0 no violation, 1 one was found, 2 bad input.",
)
@click.option("--schedules", type=click.IntRange(min=1), default=10_000, show_default=True, help="Number of schedules.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first one.")
@click.option(
    "--exhaustive", is_flag=True, help="A fault of each kind at every instant of small lives, instead of seeds."
)
@click.option("--replay", metavar="SEED|SCHEDULE", help="Run one schedule and print everything that happens in it.")
def lifetimes_command(schedules: int, seed: int, exhaustive: bool, replay: str | None) -> None:
    """Run what agents, candidates and coordinators ask of a store from a job's creation to its outcome, while agents
    die and come again, and hosts are cut off from each other and from the store; and check that nothing of a job that
    lives is lost, that no two job generations mix, and that who was cut off learns how the job has ended.

    \b
    python -m verify lifetimes --schedules 100000
    python -m verify lifetimes --exhaustive
    python -m verify lifetimes --replay 'kill:a0@60 cut:a1@80+300'
    """
    if replay is not None:
        sys.exit(_replay(replay))
    started_s = time.monotonic()
    if exhaustive:
        asked = list(chain.from_iterable(map(everywhere, LIVES)))
    else:
        asked = list(map(random_lifetime, range(seed, seed + schedules)))
    number, waiting = 0, Waiting("lifetimes")
    summary = LifetimeSummary(0, ())
    for first in range(0, len(asked), _PER_TURN):
        summary = run_lifetimes(asked[first : first + _PER_TURN])
        number += summary.num_schedules
        waiting.at(number / len(asked), f"{number:,} schedules")
        if summary.failures:
            break
    waiting.close()
    found = "no violation" if not summary.failures else "a violation"
    say(f"{number:,} schedules, {found}, in {time.monotonic() - started_s:.1f} s")
    if summary.failures:
        schedule, violation = summary.failures[0]
        say(f"violation: {violation}\n  python -m verify lifetimes --replay '{schedule}'")
        say(f"the shortest that was found: python -m verify lifetimes --replay '{shortest(schedule)}'")
        sys.exit(1)


def _replay(text: str) -> int:
    try:
        schedule: Lifetime = random_lifetime(int(text)) if text.isdecimal() else parse_lifetime(text)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    log: list[str] = []
    outcome = run_lifetime(schedule, log=log)
    say(f"schedule: {schedule}")
    for line in log:
        say(line)
    say("no violation" if outcome.violation is None else f"violation: {outcome.violation}")
    return 0 if outcome.violation is None else 1
