"""Bugs planted inside real workers are caught by the vote, and the finding names what is wrong.

A bug that strikes once costs another attempt and does not show in the result; one that stays ends the job, before any
state has changed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.integration.jobs import Job, QuietReporter, flip_bit, run_job

from elaswave.blocks.placement import ReplicaRole
from elaswave.errors import WorkerError
from elaswave.protocol.step.soundness import STATE_SAMPLE_PERIOD
from elaswave.state.flat import HeldBlock
from elaswave.types import Action

Machine = Any
"""A worker's machine over the torch engine."""

STEP = 3
CHANGED_SUM = "partial sums (worker 1's partial sum of layer 1 is not what was added to it)"
DIFFERS = "block 0 differs between its owner, worker 0, and its followers, workers [1], in its gradient"
LAYOUT: dict[str, Any] = {"layout.stages": 2, "layout.replicas": 2, "run.steps": 6}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(tmp_path_factory.mktemp("undisturbed"), LAYOUT)


class Mutation:
    """Calls a function before the vote of a step on one worker: in the first attempt, or in every one.

    Args:
        mutate: what goes wrong.
        worker: where it is.
        step: when.
        always: strikes again in every attempt.
    """

    def __init__(
        self, mutate: Callable[[Machine], None], worker: int, *, step: int = STEP, always: bool = False
    ) -> None:
        self.mutate = mutate
        self.worker = worker
        self.step = step
        self.always = always

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        here = (machine.worker, machine.step, phase) == (self.worker, self.step, "vote")
        if here and (self.always or machine.attempt == 1):
            self.mutate(machine)


class StaleFollower:
    """From step `STEP` on, one worker's copy of one block misses an update, and does not know."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.before: dict[str, torch.Tensor] = {}

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        if (machine.worker, index) != (self.worker, 0):
            return
        if (machine.step, phase) == (STEP, "vote"):
            self.before = {name: values.clone() for name, values in followed(machine).slots.items()}
        elif (machine.step, phase) == (STEP + 1, "forward"):
            before, self.before = self.before, {}  # once: a copy that replaces it has missed nothing
            for name, values in before.items():
                followed(machine).slots[name].copy_(values)


class PlantedProgram:
    """All workers run a wrong program in step `STEP`: the first attempt, or every one.

    Args:
        change: from a right program to a wrong one.
        always: in every attempt.
    """

    def __init__(self, change: Callable[[tuple[Action, ...]], tuple[Action, ...]], *, always: bool) -> None:
        self.change = change
        self.always = always
        self.right: tuple[Action, ...] = ()

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        if (machine.step, phase, index) == (STEP - 1, "apply", 0):
            self.right = machine.execution.program
            machine.execution.program = self.change(machine.execution.program)
        elif (machine.step, phase) == (STEP, "vote") and not self.always:
            machine.execution.program = self.right


class CorruptedBaseCopy:
    """Once, a bit flips in a copy of state that worker 3 has just been given, and that counts from this vote on; the
    block's state is not among those which are compared in this step anyway."""

    def __init__(self) -> None:
        self.has_struck = False

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        if (machine.worker, phase) != (3, "vote") or self.has_struck:
            return
        new = set(machine.blocks.voting_copies) - set(machine.copies)
        for block in sorted(new):
            if (block + machine.step) % STATE_SAMPLE_PERIOD:
                flip_bit(machine.blocks.voting_copies[block].slots["exp_avg"], 0, 5)
                self.has_struck = True
                return


def followed(machine: Machine) -> HeldBlock:
    """The first block that a worker follows."""
    return next(copy for copy in machine.copies.values() if copy.role is ReplicaRole.FOLLOWER)


def run_twice(program: tuple[Action, ...]) -> tuple[Action, ...]:
    return program + tuple(action for action in program if action.microbatch == 1)


def run_not_at_all(program: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(action for action in program if action.microbatch != 1)


def flip_gradient(machine: Machine) -> None:
    gradient = followed(machine).gradient
    assert gradient is not None
    flip_bit(gradient, 7, 0)


def flip_owned_gradient(machine: Machine) -> None:
    gradient = next(copy for copy in machine.copies.values() if copy.role is ReplicaRole.OWNER).gradient
    assert gradient is not None
    flip_bit(gradient, 7, 0)


def own_it_too(machine: Machine) -> None:
    copies, block = machine.copies, followed(machine).block.id
    copies.take_roles(np.where(copies.blocks == block, ReplicaRole.OWNER, copies.roles).astype(np.uint8))


def another_next_layout(machine: Machine) -> None:
    machine.blocks.agreement_hash += 1


def other_grids(machine: Machine) -> None:
    grids = machine.progress.grids
    machine.steps.progress = machine.progress._replace(grids=grids._replace(exponents=(0, *grids.exponents[1:])))


def flip_master(machine: Machine) -> None:
    flip_bit(followed(machine).slots["master"], 100, 5)


def lose_update(machine: Machine) -> None:
    machine.copies.other_versions[followed(machine).block.id] = machine.copies.version - 1


class FlippedSum:
    """In step `STEP`, bit 40 flips in worker 1's sum of a layer's gradients, after its last addition and before the sum
    leaves: in the first attempt, or in every one.

    Args:
        owner: of the block in which it flips.
        always: in every attempt.
    """

    def __init__(self, owner: int, *, always: bool = False) -> None:
        self.owner = owner
        self.always = always

    def reached(self, phase: str, index: int, machine: Machine) -> None:
        if (machine.worker, machine.step, phase, index) != (1, STEP, "reduce", 0):
            return
        if self.always or machine.attempt == 1:
            layer = max(machine.engine.layers)  # whose sum is complete first
            owners = machine.blocks.voting.owner
            block = next(each for each in machine.terms.blocks if (each.layer, owners[each.id]) == (layer, self.owner))
            machine.engine.compute.accumulators[layer].sum[block.start] ^= 1 << 40


def retries_of(job: Job, step: int = STEP) -> list[str]:
    """What the log says of a step's failed attempts."""
    lines = (job.run_dir / "events.jsonl").read_text().splitlines()
    events = [msgspec.json.decode(line) for line in lines]
    return [reason for event in events if event.get("step") == step for reason in event.get("retries", [])]


@pytest.mark.parametrize(
    "probe, finding",
    [
        (PlantedProgram(run_twice, always=False), "coverage (micro-batch 1 was added 2 times in layers [0, 1, 2, 3]"),
        pytest.param(
            PlantedProgram(run_not_at_all, always=False),
            "coverage (micro-batch 1 was added 0 times in layers [0, 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(Mutation(flip_gradient, 1), f"agreement ({DIFFERS}", marks=pytest.mark.slow),
        (Mutation(flip_owned_gradient, 0), f"agreement ({DIFFERS}"),
        (FlippedSum(owner=0), CHANGED_SUM),
        pytest.param(FlippedSum(owner=1), CHANGED_SUM, marks=pytest.mark.slow),
    ],
    ids=["run twice", "not run", "flipped in a follower", "flipped in an owner", "sum for another", "sum of its own"],
)
def test_a_fault_that_strikes_once_costs_an_attempt_and_no_bit(
    undisturbed: Job, probe: Any, finding: str, tmp_path: Path
) -> None:
    reporter = QuietReporter()
    job = run_job(tmp_path, LAYOUT, probe=probe, reporter=reporter)
    assert job.computation == undisturbed.computation
    assert len(retries_of(job)) == 1
    assert finding in retries_of(job)[0]
    assert any(f"step {STEP} was tried again" in message and finding in message for message in reporter.messages)


@pytest.mark.parametrize(
    "probe, finding",
    [
        (PlantedProgram(run_twice, always=True), "coverage (micro-batch 1 was added 2 times in layers [0, 1, 2, 3]"),
        pytest.param(
            PlantedProgram(run_not_at_all, always=True),
            "coverage (micro-batch 1 was added 0 times in layers [0, 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(Mutation(flip_gradient, 1, always=True), DIFFERS, marks=pytest.mark.slow),
        pytest.param(FlippedSum(owner=0, always=True), CHANGED_SUM, marks=pytest.mark.slow),
        (Mutation(own_it_too, 1), "block 0 has 2 owners and 0 followers, needed are 1 and 1"),
        pytest.param(Mutation(lose_update, 1), "a copy of block 0 is 1 steps behind", marks=pytest.mark.slow),
        (Mutation(another_next_layout, 2), "the next layout differs between workers [0, 1, 3] and [2]"),
        (Mutation(other_grids, 1), "grids or the number of updates differ between workers [0, 2, 3] and [1]"),
    ],
    ids=["run twice", "not run", "flipped", "sum", "two owners", "stale follower", "two next layouts", "grids"],
)
def test_a_bug_that_stays_ends_the_job_and_is_named(probe: Any, finding: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        run_job(tmp_path, LAYOUT, probe=probe)
    message = str(raised.value)
    assert "VoteError" in message
    assert f"step {STEP} cannot be committed, attempt 2" in message
    assert finding in message


@pytest.mark.slow
def test_a_fault_in_the_first_attempt_of_all_still_leaves_room_to_measure_the_grids(
    undisturbed: Job, tmp_path: Path
) -> None:
    job = run_job(tmp_path, LAYOUT, probe=Mutation(flip_gradient, 1, step=1))
    assert job.computation == undisturbed.computation
    first, second = retries_of(job, step=1)
    assert "block 0 differs" in first
    assert second == "the first gradients have been measured"


@pytest.mark.parametrize(
    "probe",
    [StaleFollower(1), pytest.param(Mutation(flip_master, 1), marks=pytest.mark.slow)],
    ids=["missed update", "flipped bit"],
)
def test_a_copy_that_has_silently_changed_is_found_in_the_next_vote_and_replaced(
    undisturbed: Job, probe: Any, tmp_path: Path
) -> None:
    reporter = QuietReporter()
    job = run_job(tmp_path, LAYOUT, probe=probe, reporter=reporter)
    assert job.computation == undisturbed.computation
    assert [(recovery.kind, recovery.outcome) for recovery in job.result.recoveries] == [("repaired", "retried")]
    assert any("on worker 1 the master of block 0" in message for message in reporter.messages)
    assert any("were made good" in message for message in reporter.messages)


def test_a_base_copy_that_came_corrupted_is_found_before_it_counts(undisturbed: Job, tmp_path: Path) -> None:
    job = run_job(tmp_path, LAYOUT, probe=CorruptedBaseCopy(), faults=[f"kill:1@{STEP}:backward"])
    assert job.computation == undisturbed.computation
    (reason,) = retries_of(job)
    assert reason.startswith("the certificate does not hold: agreement (block ") and "workers [3]" in reason


@pytest.mark.slow
def test_a_job_that_a_bug_has_ended_resumes_to_the_same_bits(undisturbed: Job, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        run_job(tmp_path, LAYOUT | {"run.checkpoint_every": 1}, probe=Mutation(flip_gradient, 1, step=5, always=True))
    assert run_job(tmp_path, LAYOUT, resume=True).computation == undisturbed.computation
