"""Bugs planted on purpose: what the search must find, to be believed when it finds nothing.

Each changes a method of a class or function that the product runs too (the worker machine, its ledger, membership and
standing facts, the traffic, the coordinator's machine and its order of effects, the collection of checkpoints), so each
is a bug that could ship. The product has no switch for any of them. Several are defects that an earlier version of the
core really had, found by this simulation. W1 and so on are the rules of ``docs/protocol.md``.
"""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from elaswave.blocks.placement import Block, Placement
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.shards import Complete, GivenUp, Shards
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.events import (
    CoordinatorEffect,
    EvidenceSeen,
    Persist,
    Send,
)
from elaswave.protocol.leadership.store_position import TermLease
from elaswave.protocol.membership.effects import Effect
from elaswave.protocol.messages import BlockReplicas, CoreToWorker, Decision, LayoutChange, Registered, Report
from elaswave.protocol.step.ballot import Request, Verdict
from elaswave.protocol.step.blocks import WorkerBlocks
from elaswave.protocol.step.due_work import WorkBetweenSteps
from elaswave.protocol.step.engine import FrameKind
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.ledger import CatchUp, HeldCopies, Ledger
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.member import Member
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.protocol.step.traffic import Traffic, traffic_of
from elaswave.types import Layout
from verify.planted_bugs.changes import CHANGE_MUTANTS
from verify.planted_bugs.hosts import HOST_MUTANTS
from verify.planted_bugs.membership import MEMBERSHIP_MUTANTS
from verify.planted_bugs.mutant import Mutant, with_part
from verify.planted_bugs.salvage import SALVAGE_MUTANTS
from verify.planted_bugs.soundness import SOUNDNESS_MUTANTS
from verify.planted_bugs.store import STORE_MUTANTS
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.job import BlockState
from verify.simulator.run import Build
from verify.simulator.store import SimStore

_Machine = WorkerMachine[ToyCopy]
_Steps = StepLoop[ToyCopy]
_Blocks = WorkerBlocks[ToyCopy]


# ------------------------------------------------------------------------------------------- W1: an answer is a promise


class _TalkativeLedger(Ledger):
    """Learns after it has promised."""

    def _refuse_if_promised(self, what: str) -> None:
        pass


class LearnsAfterAnswering(_Machine):
    """Reports, but stays in the old generation until the decision comes."""

    ledger_class = _TalkativeLedger

    def move(self, generation: int, members: tuple[int, ...], *, with_progress: bool = False) -> None:
        self.report = self.ledger.promise(generation, self.blocks.held(), self.layers_here())
        self.outbox.send(self.report)
        self._pending = (generation, members)

    def install(self, decision: Decision) -> Life[None]:
        self.links.edit(*self._pending)
        yield from super().install(decision)


# ------------------------------------------------------------------------------------ W2: GATHER waits for the own vote


class WritesParametersEarly(_Blocks):
    """The memory of parameters is named before the own vote, so frames land in it as they arrive."""

    def post_receives(self) -> None:
        super().post_receives()
        self.post_parameters(FrameKind.PARAMETERS, self.traffic.parameters_in)


# --------------------------------------------------------------------------- the coordinator: evidence, persisted first


class SendsBeforePersisting(SimCoordinator):
    """Decisions are sent first and persisted afterwards."""

    def carry_out(self, effects: Sequence[Effect]) -> None:
        first = [effect for effect in effects if not isinstance(effect, Persist)]
        super().carry_out([*first, *(effect for effect in effects if isinstance(effect, Persist))])


class _OverlooksEvidence(Coordinator):
    def _on_report(self, report: Report) -> list[CoordinatorEffect]:
        return super()._on_report(msgspec.structs.replace(report, evidence=None))


class IgnoresEvidence(SimCoordinator):
    """A step that is in doubt is always tried again."""

    core_class = _OverlooksEvidence


class _TakesLateVotes(Coordinator):
    def _on_evidence(self, event: EvidenceSeen) -> list[CoordinatorEffect]:
        return super()._on_evidence(event._replace(generation=self.generation))


class TakesLateVotes(SimCoordinator):
    """The generation is not checked on one message: a vote that a lost worker reports late counts."""

    core_class = _TakesLateVotes


# ---------------------------------------------------------------------------------------------- planning takes its time


class _TakesAnyPlan(Coordinator):
    def _awaits(self, sequence: int, state: CoordinatorState) -> bool:
        return self.state is state


class TakesStalePlans(SimCoordinator):
    """An answer counts, whatever was asked (P3)."""

    core_class = _TakesAnyPlan


class _DeafWhilePlanning(Coordinator):
    def _on_evidence(self, event: EvidenceSeen) -> list[CoordinatorEffect]:
        return [] if self.state is CoordinatorState.PLANNING else super()._on_evidence(event)


class IgnoresVotesWhilePlanning(SimCoordinator):
    """A vote that is heard of while a recovery is planned does not count (P2)."""

    core_class = _DeafWhilePlanning


# ---------------------------------------------------------------------------------- W5: versions of copies, catching up


class AppliesTwice(_Steps):
    """An APPLY that was interrupted is done again from the first block."""

    def apply(self, step: int, verdict: Verdict) -> Life[None]:
        copies = self.blocks.copies
        copies.version, copies.other_versions = step - 1, {}
        yield from super().apply(step, verdict)


class ForgetsToFinish(_Steps):
    """An APPLY that was interrupted is not finished."""

    def apply(self, step: int, verdict: Verdict) -> Life[None]:
        copies = self.blocks.copies
        if copies.version < step and not copies.other_versions:
            yield from super().apply(step, verdict)


class MarksOneOfMany(_Steps):
    """Of copies that are updated together only the first one's version is moved at once."""

    def apply_batch(self, batch: Sequence[ToyCopy], step: int, verdict: Verdict) -> None:
        super().apply_batch(batch, step, verdict)
        for copy in batch[1:]:
            del self.blocks.copies.other_versions[copy.block.id]


class KeepsOldGrids(_Machine):
    """The grids that a vote asked for are not taken over by a worker that did not see it."""

    def catch_up(self, todo: CatchUp, decision: Decision) -> Life[None]:
        if todo is not CatchUp.ADOPT_GRIDS:
            yield from super().catch_up(todo, decision)


class DeliversOneLayer(_Blocks):
    """Of several deliveries of a decision only the first is made."""

    def deliver(self, decision: Decision, new: frozenset[int]) -> Life[int]:
        return (yield from super().deliver(msgspec.structs.replace(decision, deliver=decision.deliver[:1]), new))


class SaysItHasThem(_Machine):
    """A worker that waits for deliveries reports the parameters as if they had come."""

    def note_missing_parameters(self, decision: Decision) -> None:
        pass


class RestsBlindly(_Machine):
    """A worker that waits for the coordinator does not look at its links."""

    def look_at_sent(self) -> None:
        pass


class JudgesAgain(_Machine):
    """A worker forgets the vote that it has taken over, and reads it again from the decision."""

    def catch_up(self, todo: CatchUp, decision: Decision) -> Life[None]:
        self.steps.known_vote = None
        yield from super().catch_up(todo, decision)


class SaysItWentBack(_Machine):
    """A worker reports that it has gone back to a checkpoint before it has loaded it."""

    def install(self, decision: Decision) -> Life[None]:
        if decision.rollback is not None:
            self.ledger.decided_generation = decision.generation
            self.ledger.evidence, self.ledger.checkpoint = None, 0
        yield from super().install(decision)


# --------------------------------------------------------------------------------------------------- W6: re-replication


class CountsCopiesUnderWay(_Blocks):
    """A base copy is reported from the moment at which it is promised."""

    def held(self) -> BlockReplicas:
        promised = self.voting_copies
        return HeldCopies(promised, self.execution.step - 1).replicas() if self.arriving else super().held()


class ForgetsAMember(_Blocks):
    """A group of holders to which some come forgets one that it had."""

    def use_placement(self, voting: Placement) -> None:
        if voting is not self.placement:
            before = self.placement.followers
            followers = tuple(
                tuple(worker for worker in after if len(after) == len(had) or worker != had[-1]) if had else after
                for had, after in zip(before, voting.followers, strict=True)
            )
            voting = Placement.of(voting.owner, followers)
        super().use_placement(voting)


class ChoosesByItself(_Blocks):
    """A worker with an even number lets more copies travel in a step than the others do."""

    def replicate(self, moving: LayoutChange | None, num_elements: int, num_updates: int) -> None:
        super().replicate(moving, num_elements if self.worker % 2 else 8 * num_elements, num_updates)


class CopiesOnce(_Blocks):
    """Base copies are not sent again in another attempt."""

    def replicate(self, moving: LayoutChange | None, num_elements: int, num_updates: int) -> None:
        if self.voting is self.placement:
            super().replicate(moving, num_elements, num_updates)


def _traffic_without_gradients(
    worker: int, blocks: tuple[Block, ...], layout: Layout, placement: Placement, voting: Placement
) -> Traffic:
    followers = tuple(
        tuple(follower for follower in after if follower in before)
        for before, after in zip(placement.followers, voting.followers, strict=True)
    )
    before = traffic_of(worker, blocks, layout, placement, Placement.of(voting.owner, followers))
    after = traffic_of(worker, blocks, layout, placement, voting)
    return after._replace(reduced_out=before.reduced_out, reduced_in=before.reduced_in)


class LeavesOutNewFollowers(_Blocks):
    """A new follower gets the base copy, but not the gradient of the step that it travels in."""

    traffic_of = staticmethod(_traffic_without_gradients)


# -------------------------------------------------------------------------------------------- W9, W10: reports, the end


class ReportsOnce(_Machine):
    """The reports that a lost worker should have sent are not sent by the next one."""

    def send_reports_again(self, decision: Decision) -> None:
        pass


class EndsBeforeItsPart(_Machine):
    """A worker says that it has made all steps before its part of the last checkpoint is written."""

    def finish(self, stopped: bool) -> Life[None]:
        life = super().finish(stopped)
        next(life)
        yield from life


class LeavesWhenDone(_Machine):
    """A worker exits after its last step instead of waiting for all others' last step."""

    def finish(self, stopped: bool) -> Life[None]:
        yield from super().finish(stopped)
        self.fenced_off = "it has made all steps"


# ----------------------------------------------------------------------- standing facts, requests, parts of checkpoints


class _Forgetful(ReplayedState):
    def standing(self) -> list[Any]:
        return []


class _EndFirst(ReplayedState):
    def standing(self) -> list[Any]:
        return super().standing()[::-1]


class ForgetsRequests(WorkBetweenSteps[ToyCopy]):
    """A checkpoint that a vote asked for is no duty of the step."""

    def note(self, step: int, request: Request) -> None:
        super().note(step, Request.NONE)


class _CountsOldWords(Shards[int, BlockState]):
    """What was said of parts before a loss counts for the parts that are written again after it."""

    def decided(
        self,
        generation: int,
        members: Collection[int],
        *,
        again: int | None,
        rollback: int | None,
        joined: Collection[int] = (),
    ) -> list[Complete[int, BlockState] | GivenUp]:
        return super().decided(0, members, again=again, rollback=rollback, joined=joined)


class GivesUpEarly(SimCoordinator):
    """A checkpoint that is written again is given up before all members have written."""

    shards_class = _CountsOldWords


class _ForgetsCommits(Shards[int, BlockState]):
    """Parts of a checkpoint that is being committed are waited for after a loss, and never come."""

    def decided(
        self,
        generation: int,
        members: Collection[int],
        *,
        again: int | None,
        rollback: int | None,
        joined: Collection[int] = (),
    ) -> list[Complete[int, BlockState] | GivenUp]:
        committing, self._committing = self._committing, set()
        found = super().decided(generation, members, again=again, rollback=rollback, joined=joined)
        self._committing = committing
        return found


class GivesUpWhatIsCommitted(SimCoordinator):
    """At the end a checkpoint is given up that is being committed."""

    shards_class = _ForgetsCommits


# ----------------------------------------------------------------------------------------------------- two coordinators


class _NoLease(TermLease):
    def refusal(self, term: int) -> str | None:
        return None


class LeaselessStore(SimStore):
    """Takes records of any coordinator."""

    lease_class = _NoLease


class _TermlessMember(Member):
    def handle(self, message: CoreToWorker):  # type: ignore[no-untyped-def]
        self.term = 0
        return super().handle(message)


class IgnoresTerms(_Machine):
    """A message of a replaced coordinator counts."""

    member_class = _TermlessMember


# ------------------------------------------------------------------------------------- defects that the core really had


class _StartsOnce(Coordinator):
    def _on_registered(self, event: Registered) -> list[CoordinatorEffect]:
        before = self.state
        effects = super()._on_registered(event)
        return effects if before is not self.state else [e for e in effects if isinstance(e, Send)]


class SaysStartOnce(SimCoordinator):
    """The start is not said again."""

    core_class = _StartsOnce


class _OldName(Coordinator):
    def _on_registered(self, event: Registered) -> list[CoordinatorEffect]:
        effects = super()._on_registered(event)
        return [
            Send(effect.worker, self.decision)
            if isinstance(effect, Send) and isinstance(effect.message, Decision) and self.decision is not None
            else effect
            for effect in effects
        ]


class SendsInOldName(SimCoordinator):
    """A stored decision is sent under the term of the coordinator that made it."""

    core_class = _OldName


MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "learn-after-answer",
            "a worker can still learn the vote after it has reported",
            Build(machine=LearnsAfterAnswering),
            "widths=2,1,1 suspect:3@24",
        ),
        Mutant(
            "early-gather",
            "a parameter frame is written before the receiver's own vote",
            Build(machine=with_part(WritesParametersEarly)),
            "widths=4 num_microbatches=4 scatter_width=9 seed=301007 slow_worker=3 slow_by=15 suspect:0@23",
        ),
        Mutant(
            "send-before-persist",
            "a decision is sent before it is persisted",
            Build(coordinator=SendsBeforePersisting),
            "widths=2,1,1 suspect:1@0 kill:c@20",
        ),
        Mutant(
            "ignore-evidence",
            "the votes that survivors know are not asked for",
            Build(coordinator=IgnoresEvidence),
            "widths=1,1,1 num_microbatches=1 kill:2@48",
        ),
        Mutant(
            "late-vote",
            "the generation is not checked on one message: a lost worker's late report of a vote counts",
            Build(coordinator=TakesLateVotes),
            "widths=2,2 num_followers=2 seed=684754 heartbeat_bound=15 isolate:0@68+30 kill:1@85",
        ),
        Mutant(
            "stale-plan",
            "a plan counts that was made before another worker was lost",
            Build(coordinator=TakesStalePlans),
            "num_followers=2 heartbeat_bound=25 plan_delay=15 hang:1@24+40 kill:0@43",
        ),
        Mutant(
            "deaf-while-planning",
            "a newer vote that is heard of while a recovery is planned is ignored",
            Build(coordinator=IgnoresVotesWhilePlanning),
            "widths=2,2 heartbeat_bound=15 plan_delay=20 isolate:0@56+31",
        ),
        Mutant(
            "apply-twice",
            "APPLY is interrupted, and done again from the first block",
            Build(machine=with_part(AppliesTwice)),
            "widths=1,1,1 num_microbatches=1 kill:2@21",
        ),
        Mutant(
            "apply-unfinished",
            "APPLY is interrupted, and not finished",
            Build(machine=with_part(ForgetsToFinish)),
            "widths=1,1 num_microbatches=1 seed=696831126 kill:0@12",
        ),
        Mutant(
            "apply-marks-one",
            "of copies that APPLY updates together only the first one's version is moved at once",
            Build(machine=with_part(MarksOneOfMany)),
            "num_followers=2 blocks_at_once=2 tied=1 seed=712692386 kill:2@33",
        ),
        Mutant(
            "old-grids",
            "grids that a vote asked for are not taken over where it was not seen",
            Build(machine=KeepsOldGrids),
            "widths=1,2 retry_step=2 kill:1@44",
        ),
        Mutant(
            "deliver-less",
            "of several deliveries of a decision only the first is made",
            Build(machine=with_part(DeliversOneLayer)),
            "widths=1,2 kill:0@0",
        ),
        Mutant(
            "deliver-claimed",
            "a worker that waits for deliveries says that it has them",
            Build(machine=SaysItHasThem),
            "widths=2,1,1 num_followers=2 kill:3@0 isolate:0@15+50",
        ),
        Mutant(
            "rest-blind",
            "a worker that has made all its steps does not tell that a link has ended over which it sent parameters",
            Build(machine=RestsBlindly),
            "widths=1,1,1 steps=1 checkpoint_every=1 seed=632652 exit_delay=6 link_delay=1 slow_worker=2 slow_by=5 "
            "kill:1@46 cut:0-2@66",
        ),
        Mutant(
            "vote-taken-twice",
            "a worker takes over a vote that it has completed once more, from the decision",
            Build(machine=JudgesAgain),
            "widths=1,1 num_microbatches=1 kill:0@12",
        ),
        Mutant(
            "back-claimed",
            "a worker says that it has gone back to a checkpoint before it has loaded it",
            Build(machine=SaysItWentBack),
            "widths=2,3 blocks_per_layer=1 num_microbatches=3 scatter_width=9 retry_step=2 ask_step=1 tied=1 "
            "seed=221338698 exit_delay=6 link_delay=30 slow_worker=1 slow_by=5 kill:2@93 kill:3@130 kill:4@145",
            real=True,
        ),
        Mutant(
            "count-under-way",
            "a base copy counts before a vote has passed with it",
            Build(machine=with_part(CountsCopiesUnderWay)),
            "seed=6285242 heartbeat_bound=25 cut:1-2@1 hang:1@25+40",
        ),
        Mutant(
            "forget-a-member",
            "a group of holders to which some come forgets one that it had",
            Build(machine=with_part(ForgetsAMember)),
            "widths=2,2 num_followers=2 kill:3@0",
        ),
        Mutant(
            "replicate-alone",
            "a worker chooses other new followers than its peers",
            Build(machine=with_part(ChoosesByItself)),
            "widths=1,1,1 num_microbatches=1 tied=1 notice:0@0+1",
        ),
        Mutant(
            "replicate-once",
            "base copies are not sent again in another attempt",
            Build(machine=with_part(CopiesOnce)),
            "widths=2,1,1 retry_step=3 kill:0-2@31",
        ),
        Mutant(
            "replicate-without-gradient",
            "a new follower gets the base copy, but not the gradient of that step",
            Build(machine=with_part(LeavesOutNewFollowers)),
            "kill:1@0",
        ),
        *CHANGE_MUTANTS,
        *MEMBERSHIP_MUTANTS,
        *HOST_MUTANTS,
        *SALVAGE_MUTANTS,
        *SOUNDNESS_MUTANTS,
        Mutant(
            "reports-once",
            "reports that a lost worker should have sent are not sent by the next one",
            Build(machine=ReportsOnce),
            "widths=1,1 num_microbatches=1 kill:0@42",
        ),
        Mutant(
            "end-before-part",
            "a worker ends before its part of the last checkpoint is written",
            Build(machine=EndsBeforeItsPart),
            "widths=1,1 num_microbatches=1",
        ),
        Mutant(
            "leave-when-done",
            "a worker exits before the others' last apply is known",
            Build(machine=LeavesWhenDone),
            "widths=1,1 num_microbatches=1 keeps_in_flight=0",
        ),
        Mutant(
            "replayed-state-once",
            "what was acknowledged is not said to the next coordinator",
            Build(replayed_state=_Forgetful),
            "widths=1,1 num_microbatches=1 kill:c@38",
            real=True,
        ),
        Mutant(
            "end-first",
            "a worker tells a new coordinator of its end before it tells of its parts of checkpoints",
            Build(replayed_state=_EndFirst),
            "usurp:c@62+1",
        ),
        Mutant(
            "forget-request",
            "a checkpoint that a vote asked for is not written",
            Build(machine=with_part(ForgetsRequests)),
            "widths=1,1 num_microbatches=1 ask_step=1",
        ),
        Mutant(
            "old-parts",
            "what was said of parts before a loss counts for those that are written again",
            Build(coordinator=GivesUpEarly),
            "widths=1,1,1 blocks_per_layer=1 num_microbatches=1 checkpoint_every=2 kill:2@47",
        ),
        Mutant(
            "give-up-committing",
            "a checkpoint is given up at the end while it is being committed",
            Build(coordinator=GivesUpWhatIsCommitted),
            "widths=1,1 num_microbatches=1 commit_delay=60 kill:1@60",
            real=True,
        ),
        Mutant(
            "no-terms",
            "two coordinators write and are believed",
            Build(machine=IgnoresTerms, store=LeaselessStore),
            "widths=1,1 num_microbatches=1 kill:1@0 usurp:c@5+40",
        ),
        Mutant(
            "start-once",
            "a start that was lost is not said again",
            Build(coordinator=SaysStartOnce),
            "widths=2,1,1 kill:c@2",
            real=True,
        ),
        Mutant(
            "old-name",
            "a stored decision is sent under the term of the coordinator that made it",
            Build(coordinator=SendsInOldName),
            "widths=2,1,1 kill:1@53 kill:c@75",
            real=True,
        ),
        *STORE_MUTANTS,
    )
}
"""All of them by name."""
