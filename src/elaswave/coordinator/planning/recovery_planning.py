"""How a coordinator has its planner work: on recoveries in the same turn if that is quick, else beside it, within a
bound; on better layouts always beside it, one search at a time. Beside it is a thread."""

import asyncio
import logging
import time
from collections.abc import Callable

from elaswave.coordinator.background import Background, in_thread
from elaswave.coordinator.planning.run_planner import LayoutSearch, RunPlanner
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.coordinator.records.terminal import Terminal
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import ChangePlanned, PlanRecovery, RecoveryPlan
from elaswave.protocol.messages import InForce

PLAN_TIMEOUT_S = 10.0
"""Within this time a recovery must be planned; else survivors keep their stages (P4)."""

_log = logging.getLogger("elaswave.coordinator")


class RecoveryPlanning:
    """Answers the machine's questions of how to go on.

    Args:
        planner: of the run.
        background: where a slow planner runs.
        pause: called with the monotonic time when workers begin to wait for a planner that is not quick.
        answer: takes a plan, or why there is none.
    """

    def __init__(
        self,
        planner: RunPlanner,
        background: Background,
        *,
        pause: Callable[[float], None],
        answer: Callable[[PlanRecovery, RecoveryPlan | str], None],
    ) -> None:
        self.took_s = 0.0
        """How long the newest recovery took to be planned."""
        self._planner = planner
        self._background = background
        self._pause = pause
        self._take = answer
        self._asked_s = 0.0
        """When the newest recovery began to be planned."""

    def plan(self, question: PlanRecovery) -> None:
        """In the same turn if that is quick, else beside it, within a bound."""
        now_s = self._asked_s = time.monotonic()
        plan = self._planner.recovery(question)
        if self._planner.is_quick(question):
            self._answer(question, _result_of(plan))
        else:
            self._pause(now_s)
            self._background.begin(self._plan_slowly(question, plan))

    async def _plan_slowly(self, question: PlanRecovery, plan: Callable[[], RecoveryPlan]) -> None:
        try:
            answer = await asyncio.wait_for(in_thread(lambda: _result_of(plan)), PLAN_TIMEOUT_S)
        except TimeoutError:
            answer = f"no recovery is planned within {PLAN_TIMEOUT_S:g} s"
        self._answer(question, answer)

    def _answer(self, question: PlanRecovery, plan: RecoveryPlan | str) -> None:
        self.took_s = time.monotonic() - self._asked_s
        self._take(question, plan)


def _result_of(plan: Callable[[], RecoveryPlan]) -> RecoveryPlan | str:
    """A plan, or why there is none: what is wrong with a planner must not end a job that can go on."""
    try:
        return plan()
    except Exception as error:
        _log.exception("planning a recovery has failed")
        return f"planning has failed ({error})"


class LayoutSearches:
    """Searches for better layouts, one at a time, while the members train.

    Args:
        planner: of the run.
        core: the machine.
        recorder: learns what a step should take.
        terminal: what is shown.
        background: where the planner runs.
        is_over: whether the job has ended.
        change: has the members change to what was found.
    """

    def __init__(
        self,
        planner: RunPlanner,
        core: Coordinator,
        recorder: RunRecorder,
        terminal: Terminal,
        background: Background,
        *,
        is_over: Callable[[], bool],
        change: Callable[[ChangePlanned], None],
    ) -> None:
        self._planner = planner
        self._core = core
        self._recorder = recorder
        self._terminal = terminal
        self._background = background
        self._is_over = is_over
        self._change = change
        self._is_searching = False

    def predict_first(self) -> None:
        """Begins to predict the step of the first layout, once, as soon as costs are known."""
        if self._core.decision is None and not self._is_searching:
            self._begin(self._planner.first_prediction())

    def look_for_better(self) -> None:
        """Begins to plan a better layout, once after every decision, as soon as the members compute again and costs are
        known. Planning takes no part of the recovery: a thread does it."""
        decision, core = self._core.decision, self._core
        if decision is None or not self._may_search():
            return
        if core.generation == decision.generation and not core.has_planned:
            self._begin(self._planner.search(decision, self._recorder.state.layout_before(decision.generation)))

    def rebalance(self) -> None:
        """Begins to plan again if workers have become slower or faster, while no other change is under way."""
        if self._may_search() and not self._core.is_changing:
            before = self._core.in_force()
            self._begin(self._planner.rebalance(before.layout, before.execution))

    def plan_for_members(self) -> None:
        """Begins to plan a layout in which members that are to leave are idle, and others are not."""
        core = self._core
        if self._may_search() and not core.is_changing and not core.admissions.is_asked:
            self._begin(self._planner.for_members(core.in_force(), core.admissions.leaving))

    def _may_search(self) -> bool:
        return not self._is_searching and not self._is_over() and self._core.state is CoordinatorState.TRAINING

    def _begin(self, search: Callable[[], LayoutSearch] | None) -> None:
        if search is not None:
            self._is_searching = True
            self._background.begin(self._search(self._core.generation, self._core.in_force(), search))

    async def _search(self, generation: int, before: InForce, search: Callable[[], LayoutSearch]) -> None:
        """Looks for a better layout than what is in force, and has all members change to it. A job can go on without
        one."""

        def find() -> tuple[LayoutSearch, ChangePlanned | None]:
            found = search()
            return found, None if found.better is None else self._planner.change(found.better, generation, before)

        try:
            found, change = await in_thread(find)
        except Exception:
            _log.exception("planning has failed; the layout stays as it is")
            return
        finally:
            self._is_searching = False
        core = self._core
        if (
            (core.generation, core.in_force().change) != (generation, before.change)
            or core.is_changing
            or self._is_over()
        ):
            return
        self._recorder.predicted(found.predicted_step_s)
        if found.news:
            self._terminal.say(found.news)
        if change is not None:
            self._change(change)
