"""What a coordinator has planned, and when: recoveries, predictions of steps, better layouts. No threads, no IO.

Each method returns the work as a function without arguments that reads nothing of the coordinator, so that it can run
beside it.

How a coordinator has its planner work: on recoveries in the same turn if that is quick, else beside it, within a
bound; on better layouts always beside it, one search at a time. Beside it is a thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec

from elaswave.coordinator.background import Background, in_thread
from elaswave.coordinator.planning.measurements import Measurements
from elaswave.coordinator.planning.replanning import ELASWAVE, Replanner
from elaswave.coordinator.records.recorder import RunRecorder
from elaswave.coordinator.records.terminal import Terminal
from elaswave.job.plan import RunPlan
from elaswave.planning.programs.layout import RunningLayout
from elaswave.planning.search.recovery import survivor_layout
from elaswave.planning.search.requested_stages import requested_stages
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol.coordinator.decisions import plan_with
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import PlanRecovery, RecoveryPlan
from elaswave.protocol.messages import Decision, InForce, LayoutChange
from elaswave.protocol.step.blocks import refilled
from elaswave.types import ExecutionParameters, Layout

BLOCKS_FOLLOW = "blocks go to the workers that run their layers"
"""Why a change keeps the layout."""


Search = Callable[[], tuple[float, LayoutChange | None, str]]
"""A search for a better layout. It returns the predicted seconds of a step of the layout in force; the change to what
it has found, if that is better; and what people are to be told of it, empty for nothing."""

Request = Callable[[], tuple[float | None, RunningLayout, LayoutChange | None]]
"""A search on behalf of a person. It returns the predicted seconds of a step of the layout in force, None before
anything is measured; what it has found; and the change to that, None where nothing is to be changed."""


class RunPlanner:
    """The planners of one job, with what is measured in it.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.measurements = Measurements(plan.config, plan.layer_parameters)
        self._plan = plan
        self._replanner = Replanner(plan.config)
        self._struck: tuple[Layout, tuple[int, ...]] = (plan.layout, ())
        """The layout that the newest loss has struck, and the workers that were lost."""
        self._searched_generation = 0
        """The newest generation for which a better layout was looked for."""
        self._has_predicted_first = False
        self._planned_for: tuple[Layout, frozenset[int]] | None = None
        """Layout in force and leaving members for which no other layout was found."""

    @property
    def restarts(self) -> bool:
        """Whether every loss leads back to the last durable checkpoint."""
        return self._replanner.restarts

    def is_quick(self, question: PlanRecovery) -> bool:
        """Tells whether a recovery is planned within milliseconds: not where another policy's planner is asked."""
        return not question.lost or self._replanner.policy == ELASWAVE

    def recovery(self, question: PlanRecovery) -> Callable[[], RecoveryPlan]:
        """Plans how the members go on after a loss: survivors keep their stages, or as the run's policy has it."""
        self._struck = (question.layout, question.lost)
        return partial(self._survivors, question) if self.is_quick(question) else self._baseline(question)

    def _survivors(self, question: PlanRecovery) -> RecoveryPlan:
        layout, execution = question.layout, question.execution
        if question.lost:
            layout = survivor_layout(layout, question.lost)
            execution = self._replanner.within_memory(layout, execution)
        return self._with_placement(question, layout, execution=execution)

    def _baseline(self, question: PlanRecovery) -> Callable[[], RecoveryPlan]:
        costs = self.measurements.known_or_estimated()  # takes too long where nothing needs it
        # Read here, and not in `plan`: that runs in a thread while measurements change.
        replanner = self._replanner.at(self.measurements.speeds())

        def plan() -> RecoveryPlan:
            found = replanner.baseline(question.layout, question.execution, question.lost, costs)
            return self._with_placement(
                question,
                found.layout,
                execution=found.execution,
                reason=found.reason,
                predicted_step_s=found.predicted_step_s,
            )

        return plan

    def _with_placement(
        self,
        question: PlanRecovery,
        layout: Layout,
        execution: ExecutionParameters | None = None,
        **values: Any,
    ) -> RecoveryPlan:
        plan = self._plan
        if execution is not None:  # a step that is tried again has the ratios that it had
            values["execution"] = msgspec.structs.replace(execution, ratios=question.execution.ratios)
        return plan_with(question, plan.with_copies(layout), plan.blocks, plan.scatter_width, **values)

    def first_prediction(self) -> Search | None:
        """Predicts what a step of the first layout should take; None before costs are known, and afterwards: once is
        enough."""
        if self._has_predicted_first or not self.measurements.step_overhead_s:
            return None
        costs = self.measurements.costs()
        if costs is None:
            return None
        self._has_predicted_first = True
        plan, replanner = self._plan, self._replanner.at(self.measurements.speeds())
        return lambda: (replanner.predict(plan.layout, plan.execution, costs), None, "")

    def search(self, decision: Decision, layout_before: Layout, in_force: InForce) -> Search | None:
        """Searches for a better layout than a decision's; None before costs are known, and afterwards: once is enough.

        Args:
            decision: the newest one.
            layout_before: the layout that it has replaced.
            in_force: the decision's, with the followers that have been added since.
        """
        if self._searched_generation >= decision.generation:
            return None
        costs = self.measurements.costs()
        if costs is None:
            return None
        # Not before costs are known: until then each step asks again.
        self._searched_generation = decision.generation
        self.measurements.shift = None  # this search knows the newest speeds
        layout, execution = decision.layout, decision.execution
        before, lost = self._struck
        if not lost:  # an earlier coordinator has decided
            before, lost = layout_before, decision.lost
        replanner = self._replanner.at(self.measurements.speeds())

        def search() -> tuple[float, LayoutChange | None, str]:
            now_s, better = replanner.improve(before, layout, execution, lost, costs)
            present = RunningLayout(layout, execution, now_s, BLOCKS_FOLLOW)
            # A recovery moves no block: also in the present layout they may not be where they should be.
            return now_s, self.change(better or present, decision.generation, in_force), ""

        # Else nothing better is looked for; people are told all the same what a step should take.
        improves = self._rebalances and not self._replanner.is_own  # whose plan the recovery has installed
        return search if improves else lambda: (replanner.predict(layout, execution, costs), None, "")

    def for_members(self, generation: int, before: InForce, leaving: Collection[int]) -> Search | None:
        """Searches for a layout for members that are to leave, or that are idle; None if there are none, or none was
        found before.

        A member that is to leave may be idle and yet hold blocks: a loss voids the change that was to relieve it of
        them, and the decision may make it their owner. Then the layout stays, and the blocks go to others.

        Args:
            generation: the present one.
            before: what is in force.
            leaving: members that are to leave.
        """
        layout, leaving = before.layout, frozenset(leaving)  # it may grow while the search goes on beside
        wanted = (layout, leaving)
        going, new = set(leaving) & set(layout.active), set(layout.idle) - set(leaving)
        loaded = [worker for worker in layout.idle if worker in leaving and before.placement.holds(worker)]
        is_known = wanted == self._planned_for and not loaded
        if leaving.issuperset(layout.workers) or not (going or new or loaded) or is_known:
            return None
        costs = self.measurements.known_or_estimated()
        replanner = self._replanner.at(self.measurements.speeds())

        def search() -> tuple[float, LayoutChange | None, str]:
            now_s = replanner.predict(layout, before.execution, costs)
            if not going and (not new or wanted == self._planned_for):
                reason = f"blocks leave workers {loaded}, which are to leave"
                present = RunningLayout(layout, before.execution, now_s, reason)
                return now_s, self.change(present, generation, before), ""
            found = replanner.for_members(layout, before.execution, leaving, costs)
            if found.layout == layout:
                self._planned_for = wanted
            return now_s, self.change(found, generation, before), found.reason if replanner.is_own else ""

        return search

    def change(self, planned: RunningLayout, generation: int, before: InForce) -> LayoutChange | None:
        """Makes a change to a layout, with its blocks where they should be; None if all is so already.

        Args:
            planned: the layout.
            generation: of its workers.
            before: what is in force.
        """
        blocks, width, layout = self._plan.blocks, self._plan.scatter_width, self._plan.with_copies(planned.layout)
        here = refilled(blocks, before.layout, before.placement, self._plan.refill_elements, width)
        target = target_placement(layout, blocks, here, scatter_width=width)
        execution = msgspec.structs.replace(planned.execution, ratios=self._plan.ratios_of(layout))
        if (layout, execution, target) == (before.layout, before.execution, here):
            return None
        return LayoutChange(
            generation=generation,
            layout=layout,
            placement=target,
            execution=execution,
            reason=planned.reason,
            predicted_step_s=planned.predicted_step_s,
        )

    @property
    def _rebalances(self) -> bool:
        asked = self._replanner.policy == ELASWAVE or self._replanner.is_own
        return asked and self._plan.config.elastic.rebalance

    def rebalance(self, generation: int, before: InForce) -> Search | None:
        """Searches for a layout for workers that have become slower or faster; None unless any has since this was asked
        last.

        Args:
            generation: the present one.
            before: what is in force.
        """
        shift = self.measurements.shift
        if shift is None or not self._rebalances:
            return None  # most often: this is asked with every report of times, and costs take a millisecond
        costs = self.measurements.costs()
        if costs is None:
            return None
        self.measurements.shift = None
        replanner = self._replanner.at(self.measurements.speeds())

        def search() -> tuple[float, LayoutChange | None, str]:
            now_s, better = replanner.rebalance(before.layout, before.execution, shift.workers, costs)
            if better is None:
                return now_s, None, f"{shift.reason}: no layout is better than the present one ({now_s:.3g} s per step)"
            change = self.change(better._replace(reason=f"{better.reason}; {shift.reason}"), generation, before)
            times = f"{now_s:.3g} to {better.predicted_step_s:.3g} s per step"
            return now_s, change, f"{shift.reason}: the layout changes ({times})"

        return search

    def costs_more_than_it_gives(self, layout: Layout, leaving: Collection[int]) -> int | None:
        """Finds a worker that is to leave, since it is too slow for any work, again and again; None if there is none.

        A spare that may get fast again is worth the copies that it holds. One of which that is not to be hoped for only
        makes the others wait, in votes and for what it owns. It stays where the others would be too few: for copies, or
        for elastic.min_workers.

        Args:
            layout: in force.
            leaving: members that are to leave already.
        """
        elastic = self._plan.config.elastic
        busy = {hop.worker for route in layout.routes for hop in route}
        num_staying = len(set(layout.workers).difference(leaving)) - 1
        if not self._rebalances or num_staying < max(1 + elastic.planned_followers, elastic.min_workers):
            return None
        hopeless = self.measurements.stragglers.hopeless
        return next((worker for worker in hopeless if worker not in busy and worker not in leaving), None)

    def look(self, generation: int, before: InForce) -> Request | str:
        """Looks for a better layout of the workers as they are, for a person who asks; or tells why it cannot be looked
        for.

        Args:
            generation: the present one.
            before: what is in force.
        """
        if self._replanner.policy != ELASWAVE:
            return f"elastic.policy is {self._replanner.policy}, which plans after events only"
        costs = self.measurements.costs()
        if costs is None:
            return "the workers have not told yet how long their actions take: ask again after some steps"
        replanner = self._replanner.at(self.measurements.speeds())

        def look() -> tuple[float, RunningLayout, LayoutChange | None]:
            now_s, found = replanner.look(before.layout, before.execution, costs)
            if found.predicted_step_s < now_s * (1 - replanner.gain_min):
                return now_s, found, self.change(found, generation, before)
            reason = (
                f"the best layout that was found is not {100 * replanner.gain_min:g} % faster than the present one, "
                f"which a change must be worth ({found.reason})"
            )
            return now_s, found._replace(reason=reason), None

        return look

    def asked(
        self, generation: int, before: InForce, layers: Sequence[int] | None, widths: Sequence[int] | None
    ) -> Request:
        """Plans the layout that a person asks for.

        Args:
            generation, before: as of `look`.
            layers, widths: of its stages, see `requested_stages`.
        Raises:
            ConfigError: there can be no such stages.
        """
        stages = requested_stages(before.layout, layers, widths)
        is_measured = self.measurements.costs() is not None
        costs = self.measurements.known_or_estimated()
        replanner = self._replanner.at(self.measurements.speeds())

        def plan() -> tuple[float | None, RunningLayout, LayoutChange | None]:
            now_s = replanner.predict(before.layout, before.execution, costs)
            found = RunningLayout(before.layout, before.execution, now_s, BLOCKS_FOLLOW)
            if stages != before.layout.stages:
                found = replanner.with_stages(stages, before.layout, before.execution, costs)
            change = self.change(found, generation, before)
            if is_measured:
                return now_s, found, change
            if change is not None:  # estimates do to divide the work, not to tell seconds
                change = msgspec.structs.replace(change, predicted_step_s=None)
            return None, found, change

        return plan

    def take_over(self, execution: ExecutionParameters) -> None:
        """Counts with the speeds that the layout in force was planned with, perhaps by an earlier coordinator.

        Args:
            execution: in force.
        """
        if execution.layer_s:
            self.measurements.plan_with(execution)


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
        """Plans a recovery in the same turn if that is quick, else beside it, within a bound."""
        now_s = self._asked_s = time.monotonic()
        plan = self._planner.recovery(question)
        if self._planner.is_quick(question):
            self._answer(question, _result_of(plan))
        else:
            # Members wait for the answer: none is to be suspected for that (P7).
            self._pause(now_s)
            self._background.begin(self._plan_slowly(question, plan))

    async def _plan_slowly(self, question: PlanRecovery, plan: Callable[[], RecoveryPlan]) -> None:
        try:
            # The thread goes on after that, as nothing can end it; nobody hears its answer.
            answer = await asyncio.wait_for(in_thread(lambda: _result_of(plan)), PLAN_TIMEOUT_S)
        except TimeoutError:
            answer = f"no recovery is planned within {PLAN_TIMEOUT_S:g} s"
        self._answer(question, answer)

    def _answer(self, question: PlanRecovery, plan: RecoveryPlan | str) -> None:
        self.took_s = time.monotonic() - self._asked_s
        self._take(question, plan)


def _result_of(plan: Callable[[], RecoveryPlan]) -> RecoveryPlan | str:
    """Returns a plan, or why there is none: what is wrong with a planner must not end a job that can go on."""
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
        change: Callable[[LayoutChange], None],
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
            layout_before = self._recorder.state.layout_before(decision.generation)
            self._begin(self._planner.search(decision, layout_before, core.in_force()))

    def rebalance(self) -> None:
        """Begins to plan again if workers have become slower or faster, while no other change is under way."""
        if self._may_search() and not self._core.is_changing:
            self._begin(self._planner.rebalance(self._core.generation, self._core.in_force()))

    def plan_for_members(self) -> None:
        """Begins to plan a layout in which members that are to leave are idle, and others are not. All leave together
        that are known to: also where a change for the first of them is under way already."""
        core = self._core
        # The machine would take no change now; this is called again after the next step.
        is_free = not core.is_changing or core.may_supersede
        if self._may_search() and is_free and not core.admissions.is_asked:
            self._begin(self._planner.for_members(core.generation, core.in_force(), core.admissions.leaving))

    def _may_search(self) -> bool:
        return not self._is_searching and not self._is_over() and self._core.state is CoordinatorState.TRAINING

    def _begin(self, search: Search | None) -> None:
        if search is not None:
            self._is_searching = True
            core = self._core
            leaving = frozenset(core.admissions.leaving)
            self._background.begin(self._search(core.generation, core.in_force().change, leaving, search))

    async def _search(self, generation: int, number: int, leaving: frozenset[int], search: Search) -> None:
        """Looks for a better layout than what is in force, and has all members change to it. A job can go on without
        one."""
        try:
            predicted_s, change, news = await in_thread(search)
        except Exception:
            _log.exception("planning has failed; the layout stays as it is")
            return
        finally:
            self._is_searching = False
        core = self._core
        # It was planned for what is not in force any more, or somebody's request came first.
        is_free = not core.is_changing or core.may_supersede
        if (core.generation, core.in_force().change) != (generation, number) or not is_free or self._is_over():
            return
        self._recorder.predicted(predicted_s)
        if core.admissions.leaving - leaving:
            # Their machines go too: one change relieves all, and none waits for that of another.
            self.plan_for_members()
            return
        if news:
            self._terminal.say(news)
        if change is not None:
            self._change(change)
