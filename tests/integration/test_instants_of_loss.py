"""Losses at instants that real processes meet only by chance, and what survivors must then do beside going on.

The product's workers run as threads (`tests.integration.thread_jobs`). Every job is compared with an undisturbed one.
"""

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tests.integration.thread_jobs import JOB_TIMEOUT_S, Killed, Machine, ThreadJob, is_change, wait_until

from elaswave.blocks.placement import Placement
from elaswave.channel.messages.worker import FromWorker, StepReport
from elaswave.coordinator.records.run_state import add_digests, check_followers
from elaswave.engine import torch_engine
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.messages import Decision, Installed
from elaswave.protocol.step.engine import Phase
from elaswave.state.flat import HeldBlock
from verify.planted_bugs.mutants import MUTANTS

SETTINGS: dict[str, Any] = {"run.steps": 8, "run.eval_every": 3}
BETTER = make_layout(widths=[1, 3], layers_per_stage=[1, 3], num_microbatches=5)
"""For all four workers, of whom 1 changes its stage."""


class Probe:
    """Calls a function at every point of every step."""

    def __init__(self) -> None:
        self.job: ThreadJob

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        raise NotImplementedError

    def die(self, machine: Machine) -> NoReturn:
        """The worker's process ends here."""
        self.job.kill(machine.worker)
        raise Killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ThreadJob:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return ThreadJob(tmp_path_factory.mktemp("undisturbed"), SETTINGS).run(monkeypatch)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, probe: Probe, **options: Any) -> ThreadJob:
    probe.job = ThreadJob(folder, SETTINGS | options.pop("settings", {}), probe=probe, **options)
    return probe.job.run(monkeypatch)


class DiesAt(Probe):
    """One worker dies at the first action of a phase of a step, in the first generation.

    Args:
        worker, step, phase: where.
    """

    def __init__(self, worker: int, step: int, phase: Phase) -> None:
        self.point = (worker, step, phase, 0)

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if (machine.worker, machine.step, phase, index) == self.point and not self.job.decisions:
            self.die(machine)


# ------------------------------------------------------------------------------------------------------ planned changes


class DiesAsAChangeComes(Probe):
    """Worker 3 dies in APPLY of the step whose vote brings a planned change; the others do not get to GATHER."""

    def __init__(self) -> None:
        self.step = 0
        self.placement: Placement
        """The newest one in force."""

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        self.placement = machine.placement
        if (
            self.job.new_generations
            or index
            or (phase, machine.ledger.change) != ("apply", 1)
            or machine.layout == BETTER
        ):
            return
        self.step = machine.step
        if machine.worker == 3:
            self.die(machine)
        wait_until(lambda: self.job.mailboxes[machine.worker].urgent)


def plan_after_first_step(probe: Probe) -> Any:
    def on_message(message: FromWorker) -> None:
        if isinstance(message, StepReport) and message.step == 1:
            probe.job.plan(BETTER)

    return on_message


def test_a_loss_in_apply_of_the_step_that_brings_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """The decision has the changed layout; survivors must not change to it once more in the next GATHER."""
    probe = DiesAsAChangeComes()
    job = run(tmp_path, monkeypatch, probe, on_message=plan_after_first_step(probe))
    [decision] = job.decisions
    assert decision.change == 1 and decision.resume_step == probe.step + 1
    assert [stage.start for stage in decision.layout.stages] == [0, 1]
    assert job.computation == undisturbed.computation
    # In the steps that are left every block has got its follower again.
    assert all(probe.placement.followers)


def test_a_job_may_end_while_blocks_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """What is copied has more followers than others until the change is in force: all of them are checked."""
    probe = Probe()
    probe.reached = lambda phase, index, machine: None  # type: ignore[method-assign]
    slowly = {"elastic.copy_bytes_per_step": 1}
    job = run(tmp_path, monkeypatch, probe, on_message=plan_after_first_step(probe), settings=slowly)
    assert job.computation == undisturbed.computation
    followed = add_digests(finished.followed_digests for finished in job.finished.values())
    check_followers(followed, add_digests(finished.follower_digests for finished in job.finished.values()))
    assert {name for name, digest in job.digests.items() if followed[name] != digest}, "no block was being copied"


def test_a_change_that_one_worker_never_held_is_void_in_the_next_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """All survivors have held it since step 3 at the latest; it needs the worker that is lost."""
    probe = DiesAt(3, 4, "forward")
    job = run(
        tmp_path,
        monkeypatch,
        probe,
        on_message=plan_after_first_step(probe),
        on_effect=lambda effect: not (is_change(effect) and effect.worker == 3),  # type: ignore[union-attr]
    )
    assert [decision.change for decision in job.decisions] == [0]
    assert {report.change for report in job.reports} == {0}
    assert job.computation == undisturbed.computation


# ------------------------------------------------------------------------------------------------------ unfinished work


class DiesWithItsReport(Probe):
    """The worker that reports steps dies before its report of step 4 is out, and once another one has begun step 5.

    Args:
        reporters: generation -> the worker that dies in it, and the other one.
    """

    def __init__(self, reporters: dict[int, tuple[int, int]]) -> None:
        self.reporters = reporters
        self.begun = {generation: threading.Event() for generation in reporters}

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        generation = machine.member.generation
        if machine.step == 5 and generation in self.reporters and machine.worker == self.reporters[generation][1]:
            self.begun[generation].set()

    def on_message(self, message: FromWorker) -> None:
        if not isinstance(message, StepReport) or message.step != 4 or message.generation not in self.reporters:
            return
        if message.worker == self.reporters[message.generation][0]:
            assert self.begun[message.generation].wait(JOB_TIMEOUT_S / 2)
            self.job.kill(message.worker)
            raise Killed


def test_what_the_lost_worker_did_not_report_is_reported_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    probe = DiesWithItsReport({1: (0, 1)})
    job = run(tmp_path, monkeypatch, probe, on_message=probe.on_message)
    assert [(report.worker, report.generation) for report in job.reports if report.step == 4] == [(1, 1)]
    assert job.computation == undisturbed.computation


def test_a_bug_that_is_planted_in_the_machine_shows_here_as_in_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same class as in the simulation: so what is found there is the product's."""
    probe = DiesWithItsReport({1: (0, 1)})
    bug = MUTANTS["reports-once"].build.machine
    job = run(tmp_path, monkeypatch, probe, on_message=probe.on_message, machine_class=bug)
    with pytest.raises(AssertionError, match=r"reported were steps \[1, 2, 3, 5, 6, 7, 8\]"):
        _ = job.losses


def test_reports_of_steps_that_are_made_again_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """The first loss leads back to the beginning, where the steps are made again: under a policy that lets the batch
    shrink they come to other losses. What is then said of step 4 is not what survivors have kept of the first time."""
    probe = DiesWithItsReport({1: (0, 1), 2: (1, 2)})
    job = run(tmp_path, monkeypatch, probe, on_message=probe.on_message, restart_in={2})
    assert [decision.rollback for decision in job.decisions] == [0, None]
    assert [(report.worker, report.generation) for report in job.reports if report.step == 4] == [(2, 2)]
    assert job.computation == undisturbed.computation


def test_an_evaluation_that_a_loss_has_prevented_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    job = run(tmp_path, monkeypatch, DiesAt(3, 3, "gather"))
    assert [decision.evaluate for decision in job.decisions] == [True]
    assert job.evaluations == undisturbed.evaluations
    assert sorted(job.evaluations) == [3, 6]
    assert job.computation == undisturbed.computation


def test_a_checkpoint_that_a_loss_has_prevented_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """What worker 3 owned after step 3 is written by the worker that owns it now."""
    job = run(tmp_path, monkeypatch, DiesAt(3, 3, "gather"), settings={"run.checkpoint_every": 3})
    assert [decision.checkpoint for decision in job.decisions] == [True]
    written = {shard.worker for shard in job.shards if shard.standing.step == 3 and shard.standing.generation == 2}
    assert written == {0, 1, 2}
    assert job.computation == undisturbed.computation


# --------------------------------------------------------------------------------------------------------- the recovery


def test_a_worker_that_only_its_peers_miss_is_lost_by_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """No end of a process is reported: the accusation of a peer is all that the coordinator gets."""

    class Vanishes(DiesAt):
        def die(self, machine: Machine) -> NoReturn:
            self.job.kill(machine.worker, silently=True)
            raise Killed

    job = run(tmp_path, monkeypatch, Vanishes(2, 3, "backward"))
    [suspicion] = job.new_generations[0].suspicions
    assert (suspicion.worker, suspicion.detected_by) == (2, "link")
    assert job.computation == undisturbed.computation


class DiesBeforeItDelivers(DiesAt):
    """After worker 0 worker 2 dies, as soon as the others have made room for what it should deliver to them."""

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if machine.worker == 2 and machine.step == 1:
            machine.take_roles = self.take_roles  # type: ignore[method-assign]
        super().reached(phase, index, machine)

    def take_roles(self, decision: Decision) -> NoReturn:
        wait_until(lambda: all(0 in self.job.machines[worker].engine.layers for worker in (1, 3)))
        self.die(self.job.machines[2])


def test_a_loss_while_parameters_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """Worker 0 is a whole stage. Worker 1 has that stage's layer, but not all of its values, when worker 2 is lost; it
    must not say that it has them. When worker 0 votes, all others have the parameters of step 2."""
    settings = {"layout.widths": "[1,3]", "elastic.num_followers": 2}
    job = run(tmp_path, monkeypatch, DiesBeforeItDelivers(0, 3, "vote"), settings=settings)
    assert [decision.lost for decision in job.decisions] == [(0,), (2,)]
    assert (1, 0) in job.decisions[0].deliver and (1, 0) in job.decisions[1].deliver
    assert job.computation == undisturbed.computation


class DiesBeforeItFills(DiesAt):
    """After worker 2 worker 0 dies, which has not sent a base copy, when the others have made room for them."""

    def __init__(self) -> None:
        super().__init__(2, 3, "backward")
        self.begun: set[int] = set()

    def reached(self, phase: Phase, index: int, machine: Machine) -> None:
        if self.job.decisions and machine.step == 3:
            self.begun.add(machine.worker)
        super().reached(phase, index, machine)

    def on_message(self, message: FromWorker) -> None:
        if isinstance(message, Installed) and (message.worker, message.generation) == (0, 2):
            wait_until(lambda: self.begun == {1, 3})
            self.job.kill(0)
            raise Killed


def test_a_base_copy_that_has_not_come_is_not_taken_for_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: ThreadJob
) -> None:
    """Worker 1 was to follow blocks of worker 0, of layers that both run: their parameters are here already."""

    empty_copy = torch_engine.TorchEngine.empty_copy

    def spoilt(engine: torch_engine.TorchEngine, block: int, num_updates: int) -> HeldBlock:
        copy = empty_copy(engine, block, num_updates)
        for values in copy.slots.values():
            values.fill_(torch.nan)
        return copy

    monkeypatch.setattr(torch_engine.TorchEngine, "empty_copy", spoilt)
    probe = DiesBeforeItFills()
    settings = {"layout.widths": "[3,1]", "elastic.num_followers": 2}
    job = run(tmp_path, monkeypatch, probe, settings=settings, on_message=probe.on_message)
    assert [decision.lost for decision in job.decisions] == [(2,), (0,)]
    assert job.computation == undisturbed.computation
