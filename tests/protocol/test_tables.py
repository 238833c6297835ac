"""The tables of states and transitions: they drive the machines, and everything in them happens."""

from enum import Enum
from itertools import pairwise

import msgspec
import pytest
from tests.protocol.machines import FIVE, answer, coordinator, failure, registered, report, started, suspicion, vote

from elaswave.protocol.coordinator import transitions
from elaswave.protocol.coordinator.machine import Bounds, Coordinator
from elaswave.protocol.coordinator.table import Transition, TransitionTable
from elaswave.protocol.coordinator.transitions import Cause, CoordinatorState, Response
from elaswave.protocol.events import (
    CheckpointFound,
    CoordinatorEffect,
    EvidenceSeen,
    JoinerCame,
    JoinerGone,
    LeaveWanted,
    NewGenerationRecord,
    Persist,
    PlanRecovery,
    StartRecord,
    WorkerFailed,
)
from elaswave.protocol.membership import agent
from elaswave.protocol.messages import Installed, LayoutChange, Linked, Paused, Unsound
from elaswave.protocol.step import member
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.member import Member
from elaswave.types import ExecutionParameters
from verify.page import markdown_table, mermaid_diagram
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.run import Build, run_schedule
from verify.simulator.schedule import parse_schedule, random_schedule

SEEN: set[tuple[Enum, Enum]] = set()


class Watched(Coordinator):
    """Its planner answers nothing by itself."""

    question: PlanRecovery

    def _go(self, cause: Cause) -> list[CoordinatorEffect]:
        SEEN.add((self.state, cause))
        effects = super()._go(cause)
        for effect in effects:
            if isinstance(effect, PlanRecovery):
                self.question = effect
        return effects


def in_state(state: CoordinatorState, **options) -> Watched:
    """A machine of five workers in a state; worker 1 is lost in the later ones, and worker 2 too if it rolls back."""
    if state is CoordinatorState.STARTING:
        return coordinator(job=FIVE, kind=Watched, **options)
    machine = started(FIVE, Watched, **options)
    if state is CoordinatorState.TRAINING:
        return machine
    lost = [1, 2] if state is CoordinatorState.ROLLING_BACK else [1]
    machine.suspect([suspicion(worker) for worker in lost], 0.0)
    if state is not CoordinatorState.COLLECTING:
        for worker in sorted(set(range(5)) - set(lost)):
            machine.handle(report(worker, 2, job=FIVE, evidence=vote(1)), 0.0)
    assert machine.state is state
    return machine


def unsound_in_state(state: CoordinatorState, **options) -> Watched:
    """The same, but no worker is lost: a copy is wrong, or all copies of a block where it rolls back."""
    if state in (CoordinatorState.STARTING, CoordinatorState.TRAINING):
        return in_state(state, **options)
    machine = started(FIVE, Watched, **options)
    machine.handle(Unsound(worker=0, generation=1, step=3, reason="a bit has flipped"), 0.0)
    wrong = tuple((0, worker) for worker in range(5)) if state is CoordinatorState.ROLLING_BACK else ()
    for worker in range(5) if state is not CoordinatorState.COLLECTING else ():
        told = report(worker, 2, job=FIVE, evidence=vote(1))
        machine.handle(msgspec.structs.replace(told, wrong=wrong, proven=1), 0.0)
    assert machine.state is state
    return machine


def pairs_of(table: TransitionTable) -> set[tuple[Enum, Enum]]:
    """All (state, cause) that a table has a row for."""
    return {(state, row.cause) for row in table.rows for state in row.before}


ALIVE = (
    CoordinatorState.STARTING,
    CoordinatorState.TRAINING,
    CoordinatorState.COLLECTING,
    CoordinatorState.PLANNING,
    CoordinatorState.ROLLING_BACK,
)


def linked_joiner(machine: Watched) -> Watched:
    """Worker 5 may join, and has links to the five members."""
    machine.handle(JoinerCame(5, "there"), 0.0)
    for worker in range(5):
        machine.handle(Linked(worker=worker, peers=(5,)), 0.0)
    machine.handle(Linked(worker=5, peers=(0, 1, 2, 3, 4)), 0.0)
    return machine


@pytest.fixture(scope="module")
def everything_has_happened() -> None:
    for state in ALIVE:
        in_state(state).handle(suspicion(0), 0.0)
        in_state(state).handle(registered(9), 0.0)
        in_state(state, bounds=Bounds(min_workers=3)).suspect([suspicion(0), suspicion(3), suspicion(4)], 0.0)
        failed = in_state(state)
        failed.handle(WorkerFailed(9, "the same place", "ValueError"), 0.0)
        failed.handle(WorkerFailed(0, "the same place", "ValueError"), 0.0)
        in_state(state).handle(WorkerFailed(0, "the vote", "VoteError", is_common=True), 0.0)
        num_lost = 5 - len(in_state(state).members)
        unsound_in_state(state, bounds=Bounds(max_failures_per_hour=0)).handle(suspicion(0), 0.0)
        in_state(state, bounds=Bounds(min_workers=5 - num_lost)).handle(WorkerFailed(0, "there", "MemoryError"), 0.0)
        in_state(state).handle(LeaveWanted(0), 0.0)
        if state is not CoordinatorState.STARTING:
            in_state(state).handle(registered(0, generation=in_state(state).generation, report=None), 0.0)
    for records in (
        [],
        [StartRecord(term=1)],
        [NewGenerationRecord(term=1, generation=2, members=(0,), lost=(1,), reason="")],
    ):
        coordinator(records, FIVE, Watched).begin()

    machine = in_state(CoordinatorState.PLANNING)
    machine.handle(EvidenceSeen(vote(1, 2), 1), 0.0)
    machine.handle(answer(machine.question), 0.0)
    for worker in (0, 2, 3, 4):
        machine.handle(Installed(worker=worker, generation=2, edit_s=0, promote_s=0, critical_bytes=0), 0.0)
    machine.handle(registered(0, generation=1), 0.0)
    machine.handle(
        LayoutChange(
            generation=2,
            layout=machine.layout,
            placement=machine.placement,
            execution=ExecutionParameters(),
            reason="better",
        ),
        0.0,
    )
    machine.handle(registered(0, generation=2), 0.0)
    machine = in_state(CoordinatorState.PLANNING)
    machine.handle(failure(machine.question), 0.0)
    in_state(CoordinatorState.PLANNING).handle(
        EvidenceSeen(vote(7), 1), 0.0
    )  # no such vote can be: no member has its state

    in_state(CoordinatorState.TRAINING).handle(Unsound(worker=0, generation=1, step=3, reason="a bit has flipped"), 0.0)
    linked_joiner(in_state(CoordinatorState.TRAINING)).handle(JoinerGone(5), 0.0)
    machine = linked_joiner(in_state(CoordinatorState.TRAINING))
    machine.handle(registered(0), 0.0)
    for worker in range(5):
        machine.handle(Paused(worker=worker, generation=1, step=3), 0.0)

    in_state(CoordinatorState.ROLLING_BACK).handle(CheckpointFound(1, None), 0.0)
    machine = in_state(CoordinatorState.ROLLING_BACK)
    machine.handle(CheckpointFound(1, 1), 0.0)
    machine.handle(answer(machine.question), 0.0)
    machine.handle(suspicion(4), 0.0)
    for worker in (0, 3):
        machine.handle(report(worker, 3, job=FIVE, version=1, decided=0), 0.0)
    in_state(CoordinatorState.ROLLING_BACK)
    machine = in_state(CoordinatorState.COLLECTING, restarts=True)
    for worker in (0, 2, 3, 4):
        machine.handle(report(worker, 2, job=FIVE), 0.0)


def test_everything_in_the_coordinators_table_happens(everything_has_happened):
    wanted = pairs_of(transitions.TRANSITIONS)
    assert {seen for seen in SEEN if isinstance(seen[0], CoordinatorState)} == wanted


def test_everything_in_a_members_table_happens():
    seen: set[tuple[Enum, Enum]] = set()

    class WatchedMember(Member):
        def _go(self, cause, message):
            seen.add((self.state, cause))
            return super()._go(cause, message)

    class Workers(WorkerMachine):
        member_class = WatchedMember

    class Coordinators(SimCoordinator):
        core_class = Watched

    build = Build(machine=Workers, coordinator=Coordinators)
    wanted = pairs_of(member.TRANSITIONS)
    for instant in range(78, 88):  # both workers of a stage, and a third one while a checkpoint is sought
        schedule = parse_schedule(f"widths=2,2 checkpoint_every=1 kill:0@45 kill:1@45 suspect:2@{instant}")
        assert run_schedule(schedule, build).violation is None
    seeds = iter(range(300))  # `tests/simulation/test_seeds.py` proves that none of them has a violation
    while seen != wanted:
        assert run_schedule(random_schedule(next(seeds)), build).violation is None


def test_every_response_is_named_once_and_carried_out():
    machine = coordinator()
    assert set(machine._responses) == set(Response)
    named = {response for row in transitions.TRANSITIONS.rows for response in row.does}
    assert named == set(Response)
    assert {row.cause for row in transitions.TRANSITIONS.rows} == set(Cause)


def test_what_is_persisted_stands_before_what_is_sent():
    for row in transitions.TRANSITIONS.rows:
        persists = [response for response in row.does if response.name.startswith("PERSIST")]
        assert persists == list(row.does[: len(persists)]), row


def test_the_table_drives_the_machine(monkeypatch):
    """Another row, another behaviour: a coordinator without plans of recoveries waits for a checkpoint."""
    rows = [
        row
        if row.cause is not Cause.REPORTED
        else Transition(row.before, row.cause, CoordinatorState.ROLLING_BACK, (Response.FIND_CHECKPOINT,))
        for row in transitions.TRANSITIONS.rows
    ]
    monkeypatch.setattr(
        "elaswave.protocol.coordinator.machine.TRANSITIONS", TransitionTable(CoordinatorState.STARTING, *rows)
    )
    machine = started()
    machine.handle(suspicion(1), 0.0)
    machine.handle(report(0, 2), 0.0)
    (effect,) = machine.handle(report(2, 2), 0.0)
    assert type(effect).__name__ == "FindCheckpoint" and machine.state is CoordinatorState.ROLLING_BACK


def test_what_is_not_in_the_table_cannot_happen():
    with pytest.raises(AssertionError, match="ended: a member is suspected: not in the table"):
        transitions.TRANSITIONS.next(CoordinatorState.ENDED, Cause.SUSPECTED)
    row = Transition((CoordinatorState.TRAINING,), Cause.SUSPECTED, CoordinatorState.ENDED)
    with pytest.raises(AssertionError, match="training: two rows for: a member is suspected"):
        TransitionTable(CoordinatorState.STARTING, row, row)


def test_after_the_end_there_is_nothing():
    assert not [pair for pair in pairs_of(transitions.TRANSITIONS) if pair[0] is CoordinatorState.ENDED]


def test_tables_are_shown():
    diagram = mermaid_diagram(member.TRANSITIONS).splitlines()
    assert diagram[:2] == ["stateDiagram-v2", "    [*] --> TRAINING"]
    assert "    REPORTED --> TRAINING: the decision of that generation comes" in diagram
    assert diagram[-1] == "    FENCED_OFF --> [*]"
    both = "an error of its own ends a worker that cannot be spared / no checkpoint is found"
    assert any(line.endswith(both) for line in mermaid_diagram(transitions.TRANSITIONS).splitlines())
    table = markdown_table(member.TRANSITIONS).splitlines()
    assert len(table) == 2 + len(member.TRANSITIONS.rows)
    assert all(line.count("|") == 5 for line in table)
    assert (
        "| reported | it is asked to report for its generation once more | the same | send the same report |" in table
    )
    assert "nothing |" in markdown_table(agent.TRANSITIONS)


def test_the_generations_record_is_the_first_effect_of_a_loss():
    effects = started().handle(suspicion(1), 0.0)
    assert [isinstance(effect, Persist) for effect in effects[:2]] == [True, False]
    assert all(a is not b for a, b in pairwise(effects))
