"""Layouts that a person asks for: planned in a thread, told to the members as any planned change, followed until the
change is in force or void."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from elaswave.coordinator.background import in_thread
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.reply import Reply, refusal
from elaswave.coordinator.planning.run_planner import AskedLayout
from elaswave.errors import ConfigError, InfeasiblePlan
from elaswave.planning.search.requested_stages import requested_stages
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import ChangePlanned
from elaswave.protocol.messages import LayoutChange
from elaswave.types import Layout

_log = logging.getLogger("elaswave.coordinator")


class LayoutCommands:
    """The changes of layout of one job that were asked for.

    Args:
        job: what is known of it.
        begin: begins something beside the coordinator's turns.
        change: has all members change to a planned layout.
    """

    def __init__(
        self,
        job: JobParts,
        begin: Callable[[Coroutine[Any, Any, None]], None],
        change: Callable[[ChangePlanned], None],
    ) -> None:
        self._job = job
        self._begin = begin
        self._change = change
        self._planning = ""
        """What is being planned, in words."""

    @property
    def under_way(self) -> list[str]:
        """In words."""
        change = self._job.core.newest_change
        found = [self._planning] if self._planning else []
        if change is not None and self._job.core.is_changing:
            found.append(f"change {change.number} to {stages_in_words(change.layout)}: {change.reason}")
        return found

    def rebalance(self) -> Reply:
        """Looks for a better layout of the members."""
        if (change := self._outstanding) is not None:
            return self._follow(change)
        if problem := self._problem():
            return refusal(problem)
        look = self._job.planner.look(self._job.core.generation, self._job.core.in_force())
        if isinstance(look, str):
            return refusal(look)
        return self._plan("a better layout is looked for", look)

    def migrate(self, layers: tuple[int, ...] | None, widths: tuple[int, ...] | None) -> Reply:
        """Plans the layout that a person asks for; arguments as of `requested_stages`."""
        core = self._job.core
        try:
            if (change := self._outstanding) is not None:
                if requested_stages(core.in_force().layout, layers, widths) == change.layout.stages:
                    return self._follow(change)
                return refusal(f"{self.under_way[0]}, is under way: ask again when it is in force")
            if problem := self._problem():
                return refusal(problem)
            plan = self._job.planner.asked(core.generation, core.in_force(), layers, widths)
        except ConfigError as error:
            return refusal("; ".join(error.problems))
        return self._plan("the layout that is asked for is planned", plan)

    @property
    def _outstanding(self) -> LayoutChange | None:
        """The change that is under way."""
        core = self._job.core
        return core.newest_change if core.is_changing and core.state is CoordinatorState.TRAINING else None

    def _follow(self, change: LayoutChange) -> Reply:
        """A change that is under way already: a person asks a second time, or a successor for the first time."""
        values = {"layout": change.layout.describe(), "predicted_step_s": change.predicted_step_s}
        return self._answered(change, f"change {change.number} is under way already ({change.reason})", values)

    def _problem(self) -> str:
        """Why no change can be planned now; empty if one can."""
        core = self._job.core
        if core.state is not CoordinatorState.TRAINING:
            return f"the job is {core.state.value}: the layout can change when it trains; ask again then"
        return f"{self._planning} already" if self._planning else ""

    def _plan(self, what: str, plan: Callable[[], AskedLayout]) -> Reply:
        self._planning = what
        outcome: list[Reply] = []
        core = self._job.core
        self._begin(self._planned(plan, core.generation, core.in_force().change, outcome))
        reason = f"{what}, with what was measured so far, while training goes on"
        return Reply("planning", reason, follow=lambda: outcome[0] if outcome else None)

    async def _planned(
        self, plan: Callable[[], AskedLayout], generation: int, change: int, outcome: list[Reply]
    ) -> None:
        """Plans, and has the members of a generation change, if the change in force is still this one. What the journal
        raises then is the coordinator's own."""
        core = self._job.core
        try:
            found = await in_thread(plan)
        except (InfeasiblePlan, ValueError) as error:
            outcome.append(refusal(f"there is no such layout: {error}"))
            return
        except Exception as error:
            _log.exception("planning a layout that a person has asked for has failed")
            outcome.append(refusal(f"planning has failed ({error}); logs/coordinator.log tells more"))
            return
        finally:
            self._planning = ""
        is_free = core.state is CoordinatorState.TRAINING and not core.is_changing
        if not is_free or (core.generation, core.in_force().change) != (generation, change):
            outcome.append(refusal("workers were lost, or the layout has changed, while it was planned: ask again"))
            return
        values: dict[str, Any] = {
            "layout": found.layout.describe(),
            "predicted_step_s": found.found_step_s,
            "present_step_s": found.present_step_s,
        }
        if found.change is None:
            same = found.layout == core.in_force().layout
            outcome.append(Reply("kept", "it is in force already" if same else found.reason, **values))
            return
        self._change(found.change)
        newest = core.newest_change
        assert newest is not None
        predicted = ""
        if found.found_step_s is not None and found.present_step_s is not None:
            predicted = f", predicted {found.found_step_s:.3g} s per step instead of {found.present_step_s:.3g}"
        outcome.append(self._answered(newest, f"{found.reason}: {stages_in_words(found.layout)}{predicted}", values))

    def _answered(self, change: LayoutChange, reason: str, values: dict[str, Any]) -> Reply:
        """The members have been told of a change."""
        reason += "; it is in force when blocks and layers are where it wants them"
        generation, number = change.generation, change.number
        return Reply("planned", reason, follow=lambda: self._until_in_force(generation, number, values), **values)

    def _until_in_force(self, generation: int, number: int, values: dict[str, Any]) -> Reply | None:
        core = self._job.core
        if core.in_force().change >= number:
            records = (record for record in reversed(self._job.state.generations) if record.change == number)
            record = next(records, None)
            step = None if record is None else record.first_step
            stages = stages_in_words(core.in_force().layout)
            return Reply("in force", f"all members have changed to {stages}", step=step, **values)
        if core.generation != generation and core.state is CoordinatorState.TRAINING:
            return Reply(
                "void", f"workers were lost before it was in force; generation {core.generation} goes on without it"
            )
        return None


def stages_in_words(layout: Layout) -> str:
    """The stages of a layout, such as "2+4 layers on 1+2 workers"."""
    layers = "+".join(str(stage.stop - stage.start) for stage in layout.stages)
    workers = "+".join(str(stage.width) for stage in layout.stages)
    return f"{layers} layers on {workers} workers" + (f", {len(layout.idle)} idle" if layout.idle else "")
