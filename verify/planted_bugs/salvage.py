"""Bugs planted in what a step keeps of an earlier attempt (S1 to S5); see `verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from typing import Any

import msgspec

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import CoordinatorEffect, WorkerFailed
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.salvage import Keep, Partial
from verify.planted_bugs.mutant import Mutant, with_part
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.run import Build

_Steps = StepLoop[ToyCopy]


class KeepsCoverageOnly(_Steps):
    """What was covered stays covered, but the sums are emptied (S1)."""

    def begin_sums(self) -> None:
        super().begin_sums()
        engine: Any = self.engine
        engine.sums.words = dict.fromkeys(engine.sums.words, 0)


class _AddsTheDeadsPart(_Steps):
    from_the_dead: tuple[tuple[int, list[int]], ...] = ()

    def begin_sums(self) -> None:
        super().begin_sums()
        engine: Any = self.engine
        for layer, sums in self.from_the_dead if self.execution.kept else ():
            for block, part in zip(self.blocks.traffic.owned.get(layer, ()), sums, strict=False):
                engine.sums.words[block] = engine.sums.words.get(block, 0) + part
        self.from_the_dead = ()


class AddsTheDeadsPart(WorkerMachine[ToyCopy]):
    """Partial sums that a lost worker had sent are added all the same (S4)."""

    steps_class = _AddsTheDeadsPart
    steps: _AddsTheDeadsPart

    def move(self, generation: int, members: tuple[int, ...], *, with_progress: bool = False) -> None:
        engine: Any = self.engine
        self.steps.from_the_dead = tuple(
            (layer, sums) for (layer, peer), (_, sums) in engine.received.items() if peer not in members
        )
        super().move(generation, members, with_progress=with_progress)


class CountsLossesTwice(_Steps):
    """A loss that a survivor has kept counts again where its micro-batch runs again (S1)."""

    def keep(self) -> Keep | None:
        keep = super().keep()
        return keep and keep._replace(covered=(*keep.covered[:-1], 0))


class AddsCoveredLayers(_Steps):
    """A layer that is covered is added again where a gradient passes it (S3)."""

    def keep(self) -> Keep | None:
        keep = super().keep()
        return keep and keep._replace(covered=(*(0 for _ in keep.covered[1:]), keep.covered[-1]))


class KeepsOldSums(_Steps):
    """A worker says of sums on the grids of an earlier attempt that they are of the last one (S5)."""

    def partial(self) -> Partial | None:
        partial = super().partial()
        return partial and msgspec.structs.replace(partial, root=1 << 20)


class KeepsTooLong(_Steps):
    """Takes what is kept into every attempt of the step, not only into the one that the decision is about (S5)."""

    def begin_sums(self) -> None:
        step, attempt = self.execution.step, self.execution.attempt
        if step == self.kept_for[0]:
            self.kept_for = (step, attempt)
        super().begin_sums()


class _Trusts(Coordinator):
    def _on_failed(self, event: WorkerFailed, now_s: float) -> list[CoordinatorEffect]:
        return super()._on_failed(event._replace(is_wrong=False), now_s)


class KeepsWhatIsWrong(SimCoordinator):
    """Survivors keep what they have computed with numbers of a worker whose processor is wrong (S5)."""

    core_class = _Trusts


SALVAGE_MUTANTS = (
    Mutant(
        "keep-coverage-only",
        "what was added before a loss counts as covered, but the sums are emptied",
        Build(machine=with_part(KeepsCoverageOnly)),
        "widths=4 num_microbatches=4 kill:3@54",
    ),
    Mutant(
        "keep-dead-part",
        "partial sums that a lost worker had sent are added although its part runs again",
        Build(machine=AddsTheDeadsPart),
        "retry_step=2 tied=1 kill:2@71",
    ),
    Mutant(
        "keep-loss-twice",
        "a loss that a survivor has kept counts again where its micro-batch runs again",
        Build(machine=with_part(CountsLossesTwice)),
        "replans=1 hang:0@9+75",
    ),
    Mutant(
        "keep-and-add",
        "a layer that is covered is added again where it passes a gradient on",
        Build(machine=with_part(AddsCoveredLayers)),
        "widths=1,2 retry_step=2 kill:0@70",
    ),
    Mutant(
        "keep-old-grids",
        "sums on grids that a vote has changed since are kept",
        Build(machine=with_part(KeepsOldSums)),
        "widths=1,3 blocks_per_layer=1 num_microbatches=3 num_followers=-1 steps=6 "
        "checkpoint_every=1 retry_step=3 change_step=1 blocks_at_once=3 accumulator_bits=48 "
        "candidates=2 kill:0@193",
    ),
    Mutant(
        "keep-what-is-wrong",
        "survivors keep what they have computed with numbers that a spot check has found to be wrong",
        Build(coordinator=KeepsWhatIsWrong),
        "spoil:0@0+1",
    ),
    Mutant(
        "keep-too-long",
        "what was kept for one attempt is kept for the next one too, on other grids",
        Build(machine=with_part(KeepsTooLong)),
        "retry_step=3 tied=1 kill:0@78",
    ),
)
