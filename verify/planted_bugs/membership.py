"""Planted bugs in joins and leaves (rules J of ``docs/protocol.md``); see `verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from elaswave.blocks.placement import Placement
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.detector import Detector
from elaswave.protocol.events import CoordinatorEffect, NewGeneration
from elaswave.protocol.membership.admissions import Admissions
from elaswave.protocol.membership.effects import LeaveAsked, StopTraining
from elaswave.protocol.membership.joiners import Joiners
from elaswave.protocol.membership.membership import Effects, Membership
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


class _WatchesAgain(Membership):
    def _ask_for(self, workers: Sequence[int]) -> Effects:
        for worker in workers:
            self._silent.setdefault(worker)
        return super()._ask_for(workers)

    def new_generation(self, effect: NewGeneration, now_s: float) -> Effects:
        kept = {worker: seen for worker, seen in self._silent.items() if worker in effect.joined}
        effects = super().new_generation(effect, now_s)
        self._silent.update(kept)
        return effects


class TakesMembersForSilent(SimCoordinator):
    """A joiner that has spoken counts as one that has not, once its agent has connected again; the product had it."""

    membership_class = _WatchesAgain


class _KeepsPlaces(Joiners):
    def left(self, worker: int, within_s: float, now_s: float) -> LeaveAsked:
        return LeaveAsked(worker=worker, within_s=within_s, at_s=now_s)


class ReplacesWhoWasAskedToLeave(SimCoordinator):
    """The place of a worker that leaves as it was asked to is taken again."""

    joiners_class = _KeepsPlaces


class _ForgetsRequests(Joiners):
    def started_for(self, request: int) -> list[int]:
        return []


class JoinsOnceMore(SimCoordinator):
    """A request that comes again starts more workers."""

    joiners_class = _ForgetsRequests


class _StopsEarly(Membership):
    def stop_if_none_stay(self) -> Effects:
        going = self._core.admissions.leaving.intersection(self._core.members)
        return [StopTraining("somebody is to leave")] if going and not self.is_stopping else []


class StopsWhileEnoughStay(SimCoordinator):
    """The job is stopped as soon as anybody is to leave."""

    membership_class = _StopsEarly


class _GoesOn(Membership):
    def stop(self) -> None:
        self.is_stopping = True


class StartsWhileItStops(SimCoordinator):
    """Places are taken again though the job is about to end."""

    membership_class = _GoesOn


class _BlamesTheReporter(Detector):
    def link_lost(self, reporter: int, peer: int, now_s: float) -> None:
        super().link_lost(peer, reporter, now_s)


class HoldsReportersForLost(SimCoordinator):
    """A worker that says that its link to another one has ended is taken for the one whose process has."""

    detector_class = _BlamesTheReporter


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
        "widths=1,1 num_microbatches=1 steps=11 join_step=2 seed=514836945 slow_worker=0 slow_by=40 candidates=2 "
        "detects=1",
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
        "steps=11 join_step=2 kill:3@96",
    ),
    Mutant(
        "newcomer-untold",
        "a member without state is not told where training stands",
        Build(coordinator=AsksStateOfNewcomers),
        "widths=1,1 num_microbatches=1 steps=11 join_step=2",
    ),
    Mutant(
        "watch-member",
        "a joiner that has spoken counts as one that has not, once its agent has connected again",
        Build(coordinator=TakesMembersForSilent),
        "widths=1,1 num_microbatches=1 steps=9 join_step=1 kill:c@49",
        real=True,
    ),
    Mutant(
        "replace-leaver",
        "the place of a worker that leaves as it was asked to is taken again",
        Build(coordinator=ReplacesWhoWasAskedToLeave),
        "widths=1,1 num_microbatches=1 steps=14 leave_step=1 respawns=1",
    ),
    Mutant(
        "join-twice",
        "a request to join that comes again starts more workers",
        Build(coordinator=JoinsOnceMore),
        "widths=1,1 num_microbatches=1 join_step=2",
    ),
    Mutant(
        "stop-early",
        "the job is stopped as soon as anybody is to leave",
        Build(coordinator=StopsWhileEnoughStay),
        "widths=1,1 num_microbatches=1 leave_step=2",
    ),
    Mutant(
        "start-while-stopping",
        "places are taken again though the job is about to end",
        Build(coordinator=StartsWhileItStops),
        "widths=1,1 num_microbatches=1 leave_step=1 leavers=2 seed=84322985 respawns=1 kill:0@14",
    ),
    Mutant(
        "blame-reporter",
        "who says that a link has ended is taken for the one whose process has",
        Build(coordinator=HoldsReportersForLost),
        "widths=1,1 num_microbatches=1 exit_delay=40 detects=1 kill:1@1",
    ),
)
