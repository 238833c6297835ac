"""How a coordinator has its recoveries planned: in the same turn if that is quick, else beside it, within a bound."""

import asyncio
import logging
import time
from collections.abc import Callable

from elaswave.control.background import Background, in_thread
from elaswave.control.run_planner import RunPlanner
from elaswave.protocol.events import PlanRecovery, RecoveryPlan

PLAN_TIMEOUT_S = 10.0
"""Within this time a recovery must be planned; else survivors keep their stages (P4)."""

_log = logging.getLogger("elaswave.control")


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
