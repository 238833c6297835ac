"""The tables of states and transitions: nothing happens that is not in them, and everything in them happens."""

import pytest
from tests.protocol import machines

from elaswave.protocol import agent, coordinator, member
from elaswave.protocol.agent import AgentState
from elaswave.protocol.coordinator import GIVEN_UP, Bounds, Coordinator, State
from elaswave.protocol.member import Member, MemberState
from elaswave.protocol.table import check_transition, markdown_table, mermaid_diagram
from elaswave.sim.protocol.coordinator import SimCoordinator
from elaswave.sim.protocol.run import Build, run_schedule
from elaswave.sim.protocol.schedule import parse_schedule
from elaswave.sim.protocol.search import run_seeds
from elaswave.sim.protocol.worker import SimWorker


def test_all_transitions_happen():
    seen: set[object] = set()

    class WatchedCoordinator(Coordinator):
        def _go(self, cause: str, after: State) -> None:
            seen.add((self.state, cause, after))
            super()._go(cause, after)

    class WatchedMember(Member):
        def _go(self, cause: str, after: MemberState) -> None:
            seen.add((self.state, cause, after))
            super()._go(cause, after)

    class Coordinators(SimCoordinator):
        core_class = WatchedCoordinator

    class Workers(SimWorker):
        member_class = WatchedMember

    build = Build(worker=Workers, coordinator=Coordinators)
    assert run_seeds(range(400), build).num_failures == 0
    for instant in range(78, 88):  # both workers of a stage, and a third one while a checkpoint is sought
        schedule = parse_schedule(f"widths=2,2 checkpoint_every=1 kill:0@45 kill:1@45 suspect:2@{instant}")
        assert run_schedule(schedule, build).violation is None
    # The bounds of simulated jobs are never exceeded before training begins.
    machines.coordinator(kind=WatchedCoordinator, bounds=Bounds(min_workers=3)).handle(machines.suspicion(2), 0.0)
    wanted = {row[:3] for row in (*coordinator.TRANSITIONS, *member.TRANSITIONS)}
    assert seen == wanted, (wanted - seen, seen - wanted)


def test_other_transitions_are_refused():
    check_transition(coordinator.TRANSITIONS, State.STARTING, GIVEN_UP, State.ENDED)
    with pytest.raises(AssertionError, match="ended -> training because nothing is left .*: not in the table"):
        check_transition(coordinator.TRANSITIONS, State.ENDED, GIVEN_UP, State.TRAINING)


def test_tables_are_shown():
    diagram = mermaid_diagram(member.TRANSITIONS, MemberState.TRAINING).splitlines()
    assert diagram[:2] == ["stateDiagram-v2", "    [*] --> TRAINING"]
    assert "    REPORTED --> TRAINING: the decision of that epoch comes" in diagram
    assert diagram[-1] == "    FENCED --> [*]"
    both = "a worker's process ends / the coordinator's process ends"
    assert f"    RUNNING --> RUNNING: {both}" in mermaid_diagram(agent.TRANSITIONS, AgentState.RUNNING).splitlines()
    table = markdown_table(member.TRANSITIONS).splitlines()
    assert len(table) == 2 + len(member.TRANSITIONS)
    assert all(line.count("|") == 5 for line in table)
