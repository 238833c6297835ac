"""Runs one schedule and says what came of it."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.replayed_state import ReplayedState
from verify.simulator.agents import Agents, SimAgent
from verify.simulator.candidates import Candidates, SimCandidate, WriteLease
from verify.simulator.checkers import Violation, all_checkers
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.coverage import CoverageCounter
from verify.simulator.host_checker import HeldForACause, HostsApart, OneInEachPlace, OneProcess, Orphans
from verify.simulator.job import asks_checkpoint, model_of, undisturbed
from verify.simulator.one_coordinator import OneCoordinator, OneHistory
from verify.simulator.schedule import Schedule, ScheduledFault
from verify.simulator.store import SimStore
from verify.simulator.worker import SimMachine, SimWorker
from verify.simulator.world import World


class Build(NamedTuple):
    """What the simulated processes are made of; bugs are planted here."""

    machine: type[SimMachine] = WorkerMachine
    replayed_state: type[ReplayedState] = ReplayedState
    coordinator: type[SimCoordinator] = SimCoordinator
    store: type[SimStore] = SimStore
    candidate: type[SimCandidate] = SimCandidate
    write_lease: type[WriteLease] = WriteLease
    agent: type[SimAgent] = SimAgent


PRODUCT = Build()


class RunOutcome(NamedTuple):
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
    fired: tuple[ScheduledFault, ...]
    """Faults that struck."""
    counts: Counter[str]
    """What the run led through."""


def run_schedule(
    schedule: Schedule,
    build: Build = PRODUCT,
    *,
    log: Callable[[str], None] | None = None,
    instants: list[tuple[int, int]] | None = None,
) -> RunOutcome:
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
    num_layers = model_of(job).terms.num_layers
    checkers = all_checkers(
        undisturbed(job),
        num_layers,
        job.num_microbatches,
        job.checkpoint_every,
        lambda vector: asks_checkpoint(job, vector),
        job.stop_step,
        job.num_followers,
        any(fault.kind in ("flip", "slip") for fault in schedule.faults),
        job.min_workers,
    )
    checkers += [OneInEachPlace(job.num_workers, job.joiners), HeldForACause(schedule)]
    checkers.append(HostsApart(job))
    if schedule.conditions.agents:
        checkers += [OneProcess(), Orphans(schedule.conditions.orphan_delay)]
    if schedule.conditions.candidates:
        checkers += [OneCoordinator(), OneHistory()]
    counter = CoverageCounter(job.steps, job.num_workers)
    world = World(
        schedule,
        [*checkers, counter],
        worker_class=partial(SimWorker, machine_class=build.machine, replayed_state_class=build.replayed_state),
        coordinator_class=build.coordinator,
        store=build.store(),
        make_candidates=lambda world: Candidates(
            world,
            candidate_class=build.candidate,
            write_lease_class=build.write_lease,
            make_coordinator=lambda write_lease: build.coordinator(world, write_lease),
        ),
        make_agents=lambda world: Agents(world, build.agent),
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
    return RunOutcome(
        violation, world.outcome, world.reason, world.instant, world.now, tuple(world.fired), counter.counts
    )
