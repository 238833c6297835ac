"""Planted bugs in joins and leaves (rules J of ``docs/protocol.md``); see `verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from elaswave.blocks.placement import Placement
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import CoordinatorEffect
from elaswave.protocol.membership.admissions import Admissions
from elaswave.protocol.messages import GoOn, Paused, Progress, Report
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.types import Layout
from verify.planted_bugs.mutant import Mutant
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.run import Build

_Machine = WorkerMachine[ToyCopy]


class JoinsWithOldGrids(_Machine):
    """A joiner begins with the grids of the beginning."""

    def _begin_with(self, progress: Progress | None, step: int) -> None:
        before = self.steps.progress
        super()._begin_with(progress, step)
        self.steps.progress = before


class PausesIfAsked(_Machine):
    """A worker pauses only if it was asked to before it voted, whatever the vote says (the core once had it)."""

    def train(self) -> Life[None]:
        self._goes_on = True
        while self._goes_on:
            self._goes_on = False
            yield from super().train()

    def pause(self) -> None:
        if self._asks_pause:
            super().pause()
        else:
            self._goes_on = True


class _LetsGoLoaded(Admissions):
    def released(self, members: Collection[int], layout: Layout, placement: Placement) -> tuple[int, ...]:
        return tuple(sorted(self.leaving.intersection(members)))[: len(members) - 1]


class _LoadedCore(Coordinator):
    admissions_class = _LetsGoLoaded


class ReleasesLoaded(SimCoordinator):
    """A worker that is to leave is let go while it still holds blocks."""

    core_class = _LoadedCore


class _IgnoresOldPauses(Coordinator):
    def _on_membership(self, event: Any, now_s: float) -> list[CoordinatorEffect]:
        effects = super()._on_membership(event, now_s)
        if isinstance(event, Paused):
            return [each for each in effects if not isinstance(getattr(each, "message", None), GoOn)]
        return effects


class ForgetsThePaused(SimCoordinator):
    """Members that have paused for an earlier coordinator are not let go on."""

    core_class = _IgnoresOldPauses


class _CountsNewcomers(Coordinator):
    def is_new(self, report: Report) -> bool:
        return False


class AsksStateOfNewcomers(SimCoordinator):
    """A member without state is not told where training stands."""

    core_class = _CountsNewcomers


MEMBERSHIP_MUTANTS = (
    Mutant(
        "join-old-grids",
        "a joiner begins with the grids of the beginning",
        Build(machine=JoinsWithOldGrids),
        "widths=1,1 num_microbatches=1 steps=11 join_step=2",
    ),
    Mutant(
        "pause-if-asked",
        "a worker pauses only if it was asked to before it voted, whatever the vote says",
        Build(machine=PausesIfAsked),
        "widths=1,1 num_microbatches=1 steps=11 join_step=2 slow_worker=1 slow_by=15",
    ),
    Mutant(
        "release-loaded",
        "a worker that is to leave is let go while it still holds blocks",
        Build(coordinator=ReleasesLoaded),
        "steps=11 leave_step=2 num_followers=0",
    ),
    Mutant(
        "forget-paused",
        "members that have paused for an earlier coordinator are not let go on",
        Build(coordinator=ForgetsThePaused),
        "steps=11 join_step=2 seed=510846882 kill:c@80",
    ),
    Mutant(
        "newcomer-untold",
        "a member without state is not told where training stands",
        Build(coordinator=AsksStateOfNewcomers),
        "widths=1,1 num_microbatches=1 steps=11 join_step=2",
    ),
)
