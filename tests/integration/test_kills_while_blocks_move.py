"""Source, target, joiner, leaver or coordinator is killed at a named instant of a drain, a join or a planned change.

Processes are real. Each kill strikes when a condition inside a worker holds, and not by the clock, so that it strikes
where it says it does. The simulator has every instant of them (`verify.simulator.search`).
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.integration.jobs import Job, coordinator_of, run_job
from tests.integration.waits import WaitsFor, log_of

from elaswave.channel.messages.worker import StepReport
from elaswave.coordinator.driver import JobDriver
from elaswave.faults.injection import Probes
from elaswave.planning.programs.layout import RunningLayout, make_layout
from elaswave.types import ExecutionParameters
from elaswave.worker import process

SETTINGS: dict[str, Any] = {
    "layout.widths": [2, 2],
    "run.steps": 100,
    "elastic.copy_bytes_per_step": 60_000,
    "elastic.drain_deadline_s": 600,
}
"""What moves does so over several steps, and nobody who leaves is lost because the machine is busy."""
PATIENCE_S = 1.0
"""For what goes on, of each step that it takes."""
BETTER = make_layout(widths=[2, 2], layers_per_stage=[1, 3], num_microbatches=5)
"""A layer changes its stage, and its blocks go to other owners."""
LEAVER, JOINER = 1, 4

Condition = Callable[[Any], bool]
"""Whether the moment has come, asked of a worker's `elaswave.protocol.step.machine.WorkerMachine`."""


def sends(machine: Any) -> bool:
    """The worker sends base copies in this step."""
    return bool(machine.blocks.traffic.copies_out)


def receives(machine: Any) -> bool:
    """The worker receives base copies in this step, and has followed their blocks in no step before."""
    return bool(machine.blocks.traffic.copies_in)


def leaves(machine: Any) -> bool:
    """The leaver's blocks move: it sends base copies, or others begin to own what it has owned."""
    return machine.worker == LEAVER and bool(machine.blocks.traffic.copies_out or machine.planned.moving)


def first_to_send(machine: Any) -> bool:
    """The leaver stays alive: the source is another worker, or nobody."""
    return machine.worker != LEAVER and sends(machine)


def joins(machine: Any) -> bool:
    """The joiner runs a step: with its first vote it is a member like any other."""
    return bool(machine.worker == JOINER)


class Kill:
    """A probe: at the first action of a phase in which a condition holds, one process is killed; once in the job.

    Args:
        marker: a file; who makes it strikes.
        phase: of a step.
        condition: of the moment.
        victim: gives the process; the worker itself if None.
    """

    def __init__(self, marker: Path, phase: str, condition: Condition, victim: Callable[[], int] | None = None) -> None:
        self._marker, self._phase, self._condition, self._victim = marker, phase, condition, victim

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if phase == self._phase and index == 0 and not self._marker.exists() and self._condition(machine):
            if strikes(self._marker, f"worker {machine.worker} in step {machine.step}"):
                os.kill(os.getpid() if self._victim is None else self._victim(), signal.SIGKILL)


def strikes(marker: Path, text: str) -> bool:
    """Whether the caller is the one that strikes."""
    try:
        with marker.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


class Case(NamedTuple):
    """A kill: when it strikes, and whom."""

    phase: str
    condition: Condition
    of_coordinator: bool = False
    over: str = ""
    """A line of the coordinator's log with which all has ended, if the victim is what would have ended it."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("undisturbed"), SETTINGS | {"layout.widths": [1]})


def _run(folder: Path, case: Case, over: str, faults: list[str]) -> tuple[Job, Path]:
    """A job in which the case's process is killed.

    Args:
        folder: for the run and the marker.
        case: when, and who.
        over: a line of the coordinator's log with which what goes on has ended; steps wait for it.
        faults: what goes on.
    """
    run_dir, marker = folder / "run", folder / "struck"
    victim = (lambda: coordinator_of(run_dir)) if case.of_coordinator else None
    kill = Kill(marker, case.phase, case.condition, victim)
    waits = WaitsFor(log_of(run_dir), case.over or over, patience_s=PATIENCE_S)
    return run_job(run_dir, SETTINGS, probe=Probes(waits, kill), faults=faults), marker


def _check(job: Job, case: Case, marker: Path, undisturbed: Job) -> None:
    assert marker.exists(), "the moment has not come"
    assert job.computation == undisturbed.computation
    lost = [each.worker for each in job.result.recoveries if each.kind == "lost"]
    coordinators = [each for each in job.result.recoveries if each.kind == "coordinator"]
    if case.of_coordinator:
        assert (lost, len(coordinators)) == ([], 1)
    else:
        assert lost == [int(marker.read_text().split()[1])]


SLOW = pytest.mark.slow
DRAINS = [
    pytest.param(Case("reduce", receives), id="target, as copies come", marks=SLOW),
    pytest.param(Case("vote", receives), id="target, with copies that no vote has counted", marks=SLOW),
    pytest.param(Case("apply", receives), id="target, with copies that a vote has counted", marks=SLOW),
    pytest.param(Case("forward", leaves, over="generation 2"), id="leaver, before it sends anything", marks=SLOW),
    pytest.param(Case("reduce", leaves, over="generation 2"), id="leaver, as it sends copies"),
    pytest.param(
        Case("gather", leaves, over="generation 2"), id="leaver, as others learn that they own its blocks", marks=SLOW
    ),
    pytest.param(Case("reduce", receives, of_coordinator=True), id="coordinator", marks=SLOW),
    pytest.param(Case("vote", leaves, of_coordinator=True), id="coordinator, before a vote", marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DRAINS)
def test_a_kill_during_a_drain_changes_no_bit(undisturbed: Job, tmp_path: Path, case: Case) -> None:
    job, marker = _run(tmp_path, case, f"worker {LEAVER} has left", [f"drain:{LEAVER}@5"])
    _check(job, case, marker, undisturbed)
    assert LEAVER not in job.result.generations[-1].layout.workers


JOINS = [
    pytest.param(Case("reduce", first_to_send, over="generation 3"), id="source"),
    pytest.param(Case("vote", first_to_send, over="generation 3"), id="source, before a vote"),
    pytest.param(Case("forward", joins, over="generation 3"), id="joiner, in its first step"),
    pytest.param(Case("reduce", receives, over="generation 3"), id="joiner, as copies come"),
    pytest.param(Case("apply", joins, over="generation 3"), id="joiner, after its first vote"),
    pytest.param(Case("forward", joins, of_coordinator=True), id="coordinator, as a joiner has come in"),
    pytest.param(Case("reduce", receives, of_coordinator=True), id="coordinator, as copies are sent"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", JOINS)
def test_a_kill_during_a_join_changes_no_bit(undisturbed: Job, tmp_path: Path, case: Case) -> None:
    job, marker = _run(tmp_path, case, "has joined", ["join@5"])
    _check(job, case, marker, undisturbed)
    members = job.result.generations[-1].layout.workers
    lost = {each.worker for each in job.result.recoveries if each.kind == "lost"}
    assert set(members) == {0, 1, 2, 3, JOINER} - lost


@pytest.mark.slow
@pytest.mark.parametrize("and_the_coordinator", [False, True])
def test_a_joiner_that_is_killed_before_it_is_admitted_disturbs_nobody(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, and_the_coordinator: bool
) -> None:
    own, marker, run_dir = process.first_words, tmp_path / "struck", tmp_path / "run"

    def dies(setup: Any, address: str) -> Any:
        words = own(setup, address)
        if strikes(marker, "joiner"):
            if and_the_coordinator:
                os.kill(coordinator_of(run_dir), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return words

    monkeypatch.setattr(process, "first_words", dies)
    probe = WaitsFor(log_of(run_dir), f"worker {JOINER} was killed by SIGKILL")
    job = run_job(run_dir, SETTINGS, probe=probe, faults=["join@5"])
    assert marker.exists()
    assert job.computation == undisturbed.computation
    assert not [each for each in job.result.recoveries if each.kind in ("lost", "joined")]
    assert job.result.generations[-1].layout.workers == (0, 1, 2, 3)


CHANGES = [
    pytest.param(Case("reduce", sends), id="source"),
    pytest.param(Case("vote", sends), id="source, before a vote"),
    pytest.param(Case("apply", sends), id="source, after a vote"),
    pytest.param(Case("reduce", receives), id="target"),
    pytest.param(Case("vote", receives), id="target, before a vote"),
    pytest.param(Case("gather", receives), id="target, after a vote"),
    pytest.param(
        Case("apply", lambda machine: machine.planned.coming is not None), id="anyone, as it comes into force"
    ),
    pytest.param(Case("reduce", sends, of_coordinator=True, over="changed to"), id="coordinator"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CHANGES)
def test_a_kill_during_a_planned_change_changes_no_bit(
    undisturbed: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    own = JobDriver.after_step

    def plans(self: JobDriver, message: StepReport) -> None:
        own(self, message)
        if message.step == 3:
            planned = RunningLayout(BETTER, ExecutionParameters(), 0.1, "a test wants it")
            change = self._planner.change(planned, self.core.generation, self.core.in_force())
            assert change is not None
            self.feed(change)

    monkeypatch.setattr(JobDriver, "after_step", plans)
    job, marker = _run(tmp_path, case, "generation 2", [])
    _check(job, case, marker, undisturbed)
