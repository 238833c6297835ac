"""Runs one schedule and says what came of it."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from elaswave.sim.protocol.checkers import Violation, all_checkers
from elaswave.sim.protocol.coordinator import SimCoordinator
from elaswave.sim.protocol.coverage import CoverageCounter
from elaswave.sim.protocol.job import model_of, undisturbed
from elaswave.sim.protocol.schedule import Fault, Schedule
from elaswave.sim.protocol.store import SimStore
from elaswave.sim.protocol.worker import SimWorker
from elaswave.sim.protocol.world import World


class Build(NamedTuple):
    """What the simulated processes are made of; bugs are planted here."""

    worker: type[SimWorker] = SimWorker
    coordinator: type[SimCoordinator] = SimCoordinator
    store: type[SimStore] = SimStore


PRODUCT = Build()


class Outcome(NamedTuple):
    """What came of a schedule."""

    violation: str | None
    """What must never happen, and has happened."""
    ended: str
    """``finished`` or ``ended``; ``stuck`` or empty with a violation."""
    reason: str
    """Why the job was ended."""
    instants: int
    """Instants that passed."""
    time: int
    """Virtual time that passed."""
    fired: tuple[Fault, ...]
    """Faults that struck."""
    counts: Counter[str]
    """What the run led through."""


def run_schedule(
    schedule: Schedule,
    build: Build = PRODUCT,
    *,
    log: Callable[[str], None] | None = None,
    instants: list[tuple[int, int]] | None = None,
) -> Outcome:
    """Runs a schedule to its end.

    Args:
        schedule: job, conditions and faults.
        build: the processes' classes.
        log: takes a line per event.
        instants: is filled with the time and the actor of every instant.
    Returns:
        The outcome; never raises for a defect of what is simulated.
    """
    job = schedule.job
    num_layers = len(model_of(job).blocks_of_layer)
    checkers = all_checkers(undisturbed(job), num_layers, job.num_microbatches, job.checkpoint_every)
    tally = CoverageCounter()
    world = World(
        schedule,
        [*checkers, tally],
        worker_class=build.worker,
        coordinator_class=build.coordinator,
        store=build.store(),
        log=log,
    )
    world.instants = instants
    violation = None
    try:
        world.run()
    except Violation as error:
        violation = str(error)
    except Exception as error:  # whatever the simulated code raises is a finding
        violation = f"{type(error).__name__}: {error}"
    return Outcome(violation, world.outcome, world.reason, world.instant, world.now, tuple(world.fired), tally.counts)
