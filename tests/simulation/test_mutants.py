"""Bugs planted in the simulated processes are found, and the schedules that show them are harmless without the bug."""

import pytest

from verify.planted_bugs.mutants import MUTANTS
from verify.simulator.run import run_schedule
from verify.simulator.schedule import parse_schedule, random_schedule
from verify.simulator.search import run_seeds, shrink

OTHER_SEEDS = 1500
"""Tried if a mutant's example does not show it any more, because the core says something more or less than before."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_planted_bugs_are_found(mutant):
    schedule = parse_schedule(mutant.example)
    if run_schedule(schedule, mutant.build).violation is None:
        found = run_seeds(range(OTHER_SEEDS), mutant.build, schedule.job).failures
        assert found, (
            f"{mutant.name} is not found; look for a new example: python -m verify protocol --mutant {mutant.name}"
        )
        schedule = found[0].schedule
    assert run_schedule(schedule).violation is None


@pytest.mark.parametrize(
    "name",
    [
        "ignore-evidence",
        "apply-twice",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("switch-again", "replicate-once")),
    ],
)
def test_a_search_by_seeds_finds_them_and_shrinks_what_it_found(name):
    build = MUTANTS[name].build
    failure = next(failure for seed in range(200) for failure in run_seeds((seed,), build).failures)
    assert failure.seed is not None
    schedule = random_schedule(failure.seed)
    assert schedule == failure.schedule
    shortest = shrink(schedule, build)
    assert run_schedule(shortest, build).violation is not None
    assert len(shortest.faults) <= len(schedule.faults)
    assert len(str(shortest)) < len(str(schedule))
    # Nothing can be left out of it.
    for index in range(len(shortest.faults)):
        fewer = shortest._replace(faults=shortest.faults[:index] + shortest.faults[index + 1 :])
        assert run_schedule(fewer, build).violation is None


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 20
    assert sum(mutant.real for mutant in MUTANTS.values()) == 11
    assert len({mutant.what for mutant in MUTANTS.values()}) == len(MUTANTS)
