"""A layout that a person asks for: planned beside the job, refused while it cannot be, followed until in force."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave.coordinator.commands.commands import LayoutCommands, Reply
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.errors import ConfigError, InfeasiblePlan
from elaswave.planning.programs.layout import RunningLayout
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.messages import LayoutChange
from elaswave.types import ExecutionParameters, Layout, Stage

LAYOUT = Layout(stages=(Stage(start=0, stop=2, workers=(0,)), Stage(start=2, stop=6, workers=(1, 2))), routes=())
CHANGE = cast(LayoutChange, "a change")

Found = tuple[float | None, RunningLayout, LayoutChange | None]


def running(predicted_s: float, reason: str, layout: Layout = LAYOUT) -> RunningLayout:
    return RunningLayout(layout, ExecutionParameters(), predicted_s, reason)


class World:
    """A job that trains in generation 1, and a planner that finds what the test says."""

    def __init__(self) -> None:
        self.found: Found | Exception = (0.2, running(0.1, "as asked for"), CHANGE)
        self.changes: list[LayoutChange] = []
        self.work: list[Coroutine[Any, Any, None]] = []
        self.in_force = SimpleNamespace(layout=LAYOUT, change=0)
        self.core = SimpleNamespace(
            state=CoordinatorState.TRAINING,
            generation=1,
            is_changing=False,
            newest_change=None,
            in_force=lambda: self.in_force,
        )
        self.state = SimpleNamespace(generations=[])
        planner = SimpleNamespace(asked=lambda *arguments: self.find, look=lambda *arguments: self.find)
        self.planner = planner
        job = SimpleNamespace(core=self.core, state=self.state, planner=planner)
        self.asked = LayoutCommands(cast(JobParts, job), self.work.append, self._change)

    def find(self) -> Found:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def _change(self, change: LayoutChange) -> None:
        self.changes.append(change)
        self.core.is_changing = True
        self.core.newest_change = SimpleNamespace(
            generation=1, number=3, layout=LAYOUT, reason="as asked for", predicted_step_s=0.1
        )

    def plans(self) -> None:
        asyncio.run(self.work.pop())  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def next_of(reply: Reply) -> Reply:
    assert reply.follow is not None
    found = reply.follow()
    assert found is not None
    return found


def test_a_layout_is_planned_told_and_in_force(world: World) -> None:
    reply = world.asked.migrate((2, 4), None)
    assert reply.decided == "planning" and reply.follow is not None and reply.follow() is None
    assert world.asked.under_way == ["the layout that is asked for is planned"]
    world.plans()
    planned = next_of(reply)
    assert (planned.decided, planned.predicted_step_s, planned.present_step_s) == ("planned", 0.1, 0.2)
    assert "2+4 layers on 1+2 workers, predicted 0.1 s per step instead of 0.2" in planned.reason
    assert world.changes == [CHANGE]
    assert world.asked.under_way == ["change 3 to 2+4 layers on 1+2 workers: as asked for"]
    assert planned.follow is not None and planned.follow() is None
    world.in_force.change, world.core.is_changing = 3, False
    world.state.generations.append(SimpleNamespace(change=3, first_step=17))
    in_force = next_of(planned)
    assert (in_force.decided, in_force.step, in_force.follow) == ("in force", 17, None)
    assert world.asked.under_way == []


def test_nothing_is_predicted_before_anything_is_measured(world: World) -> None:
    world.found = (None, running(0.1, "as asked for"), CHANGE)
    reply = world.asked.migrate((2, 4), None)
    world.plans()
    planned = next_of(reply)
    assert planned.reason.startswith("as asked for: 2+4 layers on 1+2 workers; it is in force when")
    assert planned.predicted_step_s is planned.present_step_s is None


def test_a_loss_before_it_is_in_force_makes_it_void(world: World) -> None:
    reply = world.asked.rebalance()
    world.plans()
    planned = next_of(reply)
    world.core.generation, world.core.state = 2, CoordinatorState.COLLECTING
    assert planned.follow is not None and planned.follow() is None, "its last vote may have brought it into force"
    world.core.state = CoordinatorState.TRAINING
    void = next_of(planned)
    assert void.decided == "void" and "generation 2 goes on without it" in void.reason


def test_nothing_better_is_no_change(world: World) -> None:
    other = Layout(stages=(Stage(start=0, stop=6, workers=(0, 1, 2)),), routes=())
    world.found = (0.2, running(0.199, "not 3 % faster", other), None)
    reply = world.asked.rebalance()
    world.plans()
    kept = next_of(reply)
    assert (kept.decided, kept.reason, kept.layout) == ("kept", "not 3 % faster", "1x3") and world.changes == []
    world.found = (0.2, running(0.2, ""), None)
    reply = world.asked.migrate((2, 4), None)
    world.plans()
    assert next_of(reply).reason == "it is in force already"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(InfeasiblePlan("memory: 3 B lack"), "no such layout: memory: 3 B lack"), (KeyError("oh"), "planning has failed")],
)
def test_what_goes_wrong_in_planning_is_an_answer(world: World, error: Exception, reason: str) -> None:
    world.found = error
    reply = world.asked.rebalance()
    world.plans()
    assert next_of(reply).decided == "refused" and reason in next_of(reply).reason
    assert world.asked.under_way == []


def test_what_cannot_be_now_is_refused(world: World) -> None:
    world.asked.rebalance()
    assert "is looked for already" in world.asked.migrate((2, 4), None).reason
    world.plans()
    under_way = world.asked.migrate((3, 3), None)
    assert under_way.decided == "refused"
    assert "change 3 to 2+4 layers on 1+2 workers: as asked for, is under way" in under_way.reason
    world.core.is_changing, world.core.state = False, CoordinatorState.COLLECTING
    assert "the job is collecting: the layout can change when it trains" in world.asked.rebalance().reason
    world.core.state = CoordinatorState.TRAINING
    world.planner.look = lambda *arguments: "the workers have not told yet"
    assert world.asked.rebalance() == Reply("refused", "the workers have not told yet")

    def fail(*arguments: Any) -> None:
        raise ConfigError(["--layers adds up to 8", "--widths too"])

    world.planner.asked = fail
    assert world.asked.migrate((3, 5), None) == Reply("refused", "--layers adds up to 8; --widths too")


def test_who_asks_again_follows_the_change_that_is_under_way(world: World) -> None:
    """So does a command whose first coordinator is gone."""
    world.asked.migrate((2, 4), None)
    world.plans()
    for reply in (world.asked.migrate((2, 4), None), world.asked.rebalance()):
        assert reply.decided == "planned" and "change 3 is under way already (as asked for)" in reply.reason
        assert reply.follow is not None and reply.follow() is None
        assert world.changes == [CHANGE] and world.work == []
    world.in_force.change = 3
    assert next_of(reply).decided == "in force"


def test_a_change_of_the_members_while_it_was_planned_wins(world: World) -> None:
    reply = world.asked.migrate((2, 4), None)
    world.core.generation = 2
    world.plans()
    assert next_of(reply).decided == "refused" and world.changes == []
