"""Bugs planted in planned changes (rules M) and in units that layers share; see `verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from elaswave.blocks.placement import Block, Placement
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.messages import FIRST_GENERATION, Decision, LayoutChange
from elaswave.protocol.step.ballot import Verdict
from elaswave.protocol.step.blocks import PlannedChange, WorkerBlocks
from elaswave.protocol.step.execution import Execution, Life
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.traffic import Shipment, Traffic, traffic_of
from elaswave.types import ExecutionParameters, Layout
from verify.planted_bugs.mutant import Mutant, with_part
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.run import Build

_Machine = WorkerMachine[ToyCopy]
_Steps = StepLoop[ToyCopy]


class ForgetsRatios(Execution[ToyCopy]):
    """After a decision, the workers of odd ids code with the ratios of the start."""

    def use_layout(self, layout: Layout, parameters: ExecutionParameters, copies: Iterable[ToyCopy]) -> frozenset[int]:
        links: Any = self.links
        if links.generation > FIRST_GENERATION and self.worker % 2:
            parameters = msgspec.structs.replace(parameters, ratios={})
        return super().use_layout(layout, parameters, copies)


class KeepsTheFirstOffer(_Machine):
    """A change that a following coordinator says again is not taken in its name (the core once had it)."""

    def offer(self, change: LayoutChange) -> None:
        if self._offered is None or change.number > self._offered.number:
            self._offered = change


class AdoptsAlone(PlannedChange):
    """A planned change is adopted where it is held, whatever the others hold."""

    def adopts(self, verdict: Verdict) -> bool:
        return verdict.commits and self.held is not None


class MovesWhenHeld(_Steps):
    """Copies travel towards a change that is held, but not adopted yet."""

    def replicate(self) -> None:
        adopted, self.planned.moving = self.planned.moving, self.planned.moving or self.planned.held
        super().replicate()
        self.planned.moving = adopted


class SwitchesUnproven(PlannedChange):
    """An adopted change comes into force though not all of its copies are in their places."""

    def arrives(self, verdict: Verdict, step: int, *, copied: bool) -> bool:
        return self.moving is not None and verdict.commits


class BudgetsAlone(_Steps):
    """What may travel follows from what a worker has measured itself, and not from the vote."""

    def take(self, verdict: Verdict) -> None:
        super().take(verdict._replace(duration_us=self.engine.measured().duration_us))


class KeepsOldRoles(WorkerBlocks[ToyCopy]):
    """A change is in force, and a worker goes on with the roles that it had."""

    def _take_roles(self) -> None:
        pass


class DropsUnproven(WorkerBlocks[ToyCopy]):
    """Copies that the next placement does not need are dropped as soon as the change is adopted."""

    def replicate(self, moving: LayoutChange | None, num_elements: int, num_updates: int) -> None:
        if moving is not None:
            self.copies = self.copies.only(moving.placement.roles(self.worker)[self.copies.blocks] > 0)
        super().replicate(moving, num_elements, num_updates)


class SwitchesWhileCopying(PlannedChange):
    """A change comes into force with the vote with which its last copies count (the core once had it)."""

    def arrives(self, verdict: Verdict, step: int, *, copied: bool) -> bool:
        return super().arrives(verdict, step, copied=False)


class KeepsOldChanges(PlannedChange):
    """A planned change outlives its generation."""

    def forget(self) -> None:
        pass


class GathersUnderTheOldLayout(_Steps):
    """A change is in force, but GATHER still goes to those that needed parameters before."""

    def switch(self, change: LayoutChange) -> None:
        before = self.blocks.traffic
        super().switch(change)
        self.blocks.traffic = before


class SwitchesAgain(_Steps):
    """A change that has come into force is adopted once more."""

    def learn(self, vector: Sequence[int], verdict: Verdict) -> None:
        super().learn(vector, verdict)
        if self.planned.coming is not None:
            self.planned.moving = self.planned.coming


def _traffic_within_stages(
    worker: int, blocks: tuple[Block, ...], layout: Layout, placement: Placement, voting: Placement
) -> Traffic:
    right = traffic_of(worker, blocks, layout, placement, voting)
    stage = layout.stage_of(worker)

    def stays(shipment: Shipment) -> bool:
        return shipment.layer < layout.num_layers or layout.stage_of(shipment.peer) == stage

    out = {unit: tuple(filter(stays, shipments)) for unit, shipments in right.partials_out.items()}
    return right._replace(partials_out=out, partials_in=tuple(filter(stays, right.partials_in)))


class SumsWithinStages(WorkerBlocks[ToyCopy]):
    """The sum of a shared unit lacks the uses in other stages than its owner's."""

    traffic_of = staticmethod(_traffic_within_stages)


class DeliversLayersOnly(_Machine):
    """Shared units are not delivered to those that take over a layer which uses them."""

    def install(self, decision: Decision) -> Life[None]:
        layers = tuple(pair for pair in decision.deliver if pair[1] < decision.layout.num_layers)
        yield from super().install(msgspec.structs.replace(decision, deliver=layers))


class _KeepsTheNewest(Coordinator):
    def _take_change(self, change: LayoutChange) -> None:
        self._changes.clear()
        super()._take_change(change)


class ForgetsTheSuperseded(SimCoordinator):
    """A change that another one has superseded is taken for void, though a vote may have brought it into force."""

    core_class = _KeepsTheNewest


CHANGE_MUTANTS = (
    Mutant(
        "ratios-forgotten",
        "after a loss some workers code with the ratios of the start",
        Build(machine=with_part(ForgetsRatios)),
        "steps=6 change_step=1 kill:0@0",
    ),
    Mutant(
        "change-old-name",
        "a change that is said again by the next coordinator is looked at in the name of the one before",
        Build(machine=KeepsTheFirstOffer),
        "widths=1,1 num_microbatches=1 steps=6 change_step=1 restart_delay=1 kill:c@24",
        real=True,
    ),
    Mutant(
        "change-alone",
        "a planned change is adopted though a worker does not hold it",
        Build(machine=with_part(AdoptsAlone)),
        "change_step=1 seed=242090808",
    ),
    Mutant(
        "move-when-held",
        "copies travel towards a change that is held, but not adopted",
        Build(machine=with_part(MovesWhenHeld)),
        "steps=6 change_step=1 slow_worker=0 slow_by=40",
    ),
    Mutant(
        "switch-unproven",
        "a change comes into force though not all of its copies are in their places",
        Build(machine=with_part(SwitchesUnproven)),
        "steps=6 change_step=1",
    ),
    Mutant(
        "budget-alone",
        "what may travel follows from what a worker has measured itself",
        Build(machine=with_part(BudgetsAlone)),
        "widths=1,1 num_microbatches=1",
    ),
    Mutant(
        "switch-old-roles",
        "a change is in force, and a worker goes on with the roles that it had",
        Build(machine=with_part(KeepsOldRoles)),
        "widths=1,1 num_microbatches=1 steps=6 change_step=1",
    ),
    Mutant(
        "drop-unproven",
        "copies that the next placement does not need are dropped before it is in force",
        Build(machine=with_part(DropsUnproven)),
        "steps=6 change_step=1",
    ),
    Mutant(
        "switch-while-copying",
        "a change comes into force, and copies are dropped, with the vote that the last of its copies came with",
        Build(machine=with_part(SwitchesWhileCopying)),
        "steps=8 leave_step=1 leaver=1 link_delay=6 slow_worker=1 slow_by=40 suspect:0@166",
        real=True,
    ),
    Mutant(
        "old-change",
        "a planned change of the layout outlives its generation",
        Build(machine=with_part(KeepsOldChanges)),
        "widths=1,1,1 num_microbatches=1 steps=6 change_step=1 kill:1@86",
    ),
    Mutant(
        "switch-old-gather",
        "a changed layout is in force, and GATHER still follows the old one",
        Build(machine=with_part(GathersUnderTheOldLayout)),
        "widths=2,2 steps=6 change_step=1",
    ),
    Mutant(
        "switch-again",
        "a change that has come into force is still held",
        Build(machine=with_part(SwitchesAgain)),
        "widths=1,1 num_microbatches=1 steps=4 change_step=1",
    ),
    Mutant(
        "forget-superseded",
        "a change that another one has superseded is taken for void, though a vote may have brought it into force",
        Build(coordinator=ForgetsTheSuperseded),
        "widths=4 steps=6 seed=126 num_microbatches=4 change_step=1 notice:2@42+150",
    ),
    Mutant(
        "tie-one-stage",
        "the sum of a shared unit lacks the uses in other stages than its owner's",
        Build(machine=with_part(SumsWithinStages)),
        "widths=1,1 num_microbatches=1 tied=1",
    ),
    Mutant(
        "tie-undelivered",
        "a worker that takes over a layer is not sent the unit that it shares with others",
        Build(machine=DeliversLayersOnly),
        "widths=1,1,1 tied=1 kill:0@40",
    ),
)
