"""A planner that takes its time runs beside the coordinator, within a bound; one that fails ends no job."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.protocol.machines import FIVE, report, started, suspicion

from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.coordinator.background import Background, in_thread
from elaswave.coordinator.planning import run_planner
from elaswave.coordinator.planning.run_planner import RecoveryPlanning
from elaswave.coordinator.process import CoordinatorProcess
from elaswave.protocol.coordinator.decisions import plan_survivors
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import PendingWork, PlanRecovery, RecoveryPlan
from verify.simulator.job import model_of


class Process(CoordinatorProcess):
    """A coordinator's process without connections, journal and recorder."""

    def __init__(self, plan: Callable[[PlanRecovery], RecoveryPlan], *, is_quick: bool = False) -> None:
        self.core = started(FIVE, Coordinator)
        self.paused: list[bool] = []
        self.threads: list[str] = []
        planner: Any = SimpleNamespace(is_quick=lambda question: is_quick, recovery=self._recovery(plan))
        background = Background()
        parts: dict[str, Any] = {
            "_background": background,
            "_recovery_planning": RecoveryPlanning(
                planner, background, pause=lambda now_s: self.paused.append(True), answer=self.answer_plan
            ),
            "_publishing": SimpleNamespace(tell_settled=lambda: None),
            "_recorder": SimpleNamespace(unfinished=lambda step, asked: PendingWork(False, asked)),
        }
        for name, part in parts.items():
            setattr(self, name, part)

    def _recovery(self, plan: Callable[[PlanRecovery], RecoveryPlan]) -> Callable[[PlanRecovery], Any]:
        def work(question: PlanRecovery) -> RecoveryPlan:
            self.threads.append(threading.current_thread().name)
            return plan(question)

        return lambda question: lambda: work(question)

    def carry_out_one(self, effect) -> None:
        if isinstance(effect, PlanRecovery):
            self.plan_recovery(effect)

    def lose(self, worker: int) -> None:
        self.feed(suspicion(worker))
        for member in self.core.members:
            self.feed(report(member, self.core.generation, job=FIVE))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def survivors(question: PlanRecovery) -> RecoveryPlan:
    return plan_survivors(question, model_of(FIVE).blocks, scatter_width=EVERYBODY, reason="as planned")


def test_a_quick_plan_is_answered_in_the_same_turn():
    async def run() -> None:
        process = Process(survivors, is_quick=True)
        process.lose(1)
        assert process.core.state is CoordinatorState.TRAINING and not process.paused
        assert process.threads == ["MainThread"]

    asyncio.run(run())


def test_a_slow_plan_lets_other_events_through_and_holds_no_standstill_against_anyone():
    go_on = threading.Event()

    def plan(question: PlanRecovery) -> RecoveryPlan:
        assert go_on.wait(10.0)
        return survivors(question)

    async def run() -> None:
        process = Process(plan)
        process.lose(1)
        assert process.core.state is CoordinatorState.PLANNING and process.paused == [True]
        process.lose(3)  # while the first question is being thought about
        assert process.core.state is CoordinatorState.PLANNING
        go_on.set()
        await until(lambda: process.core.state is CoordinatorState.TRAINING)
        assert process.core.decision is not None
        assert process.core.decision.members == (0, 2, 4) and process.core.decision.plan == "as planned"
        await until(lambda: not process._background._tasks)
        assert process.core.decision.members == (0, 2, 4), "the first answer has no effect"
        assert process.threads == ["planner", "planner"]

    asyncio.run(run())


def test_a_planner_that_exceeds_its_bound_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_planner, "PLAN_TIMEOUT_S", 0.01)
    go_on = threading.Event()

    def plan(question: PlanRecovery) -> RecoveryPlan:
        go_on.wait(10.0)
        return survivors(question)

    async def run() -> None:
        process = Process(plan)
        process.lose(1)
        await until(lambda: process.core.state is CoordinatorState.TRAINING)
        decision = process.core.decision
        assert (
            decision is not None
            and decision.plan == "no recovery is planned within 0.01 s: survivors keep their stages"
        )
        go_on.set()
        await asyncio.sleep(0)
        assert process.core.decision is decision

    asyncio.run(run())


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_planner_that_fails_is_replaced(is_quick):
    def plan(question: PlanRecovery) -> RecoveryPlan:
        raise ZeroDivisionError("no costs")

    async def run() -> None:
        process = Process(plan, is_quick=is_quick)
        process.lose(1)
        await until(lambda: process.core.state is CoordinatorState.TRAINING)
        assert process.core.decision is not None
        assert process.core.decision.plan == "planning has failed (no costs): survivors keep their stages"
        assert not process._background.broken.done()

    asyncio.run(run())


def test_what_a_task_raises_ends_the_coordinator():
    async def fail() -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        background = Background()
        background.begin(fail())
        await until(background.broken.done)
        assert isinstance(background.broken.exception(), RuntimeError)
        await background.close()

    asyncio.run(run())


def test_an_end_does_not_wait_for_a_thread():
    go_on = threading.Event()

    async def run() -> None:
        future = in_thread(lambda: go_on.wait(10.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.001)

    asyncio.run(run())  # would wait for a thread of the loop's own pool
    assert not go_on.is_set()
    go_on.set()
