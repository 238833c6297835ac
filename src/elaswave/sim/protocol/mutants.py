"""Bugs planted on purpose: what the search must find, to be believed when it finds nothing.

Each is a small change to the classes that the simulated processes are made of; the product has no switch for any of
them. Several are defects that an earlier version of the core really had, found by this simulation.
"""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from elaswave.protocol.coordinator import Coordinator
from elaswave.protocol.coordinator_table import State
from elaswave.protocol.events import (
    CoordinatorEffect,
    EvidenceSeen,
    PendingWork,
    Persist,
    PlanningFailed,
    PlanRecovery,
    RecoveryPlan,
    RecoveryPlanned,
    Send,
)
from elaswave.protocol.facts import Facts
from elaswave.protocol.ledger import Held, Ledger
from elaswave.protocol.member import Member
from elaswave.protocol.messages import CoreToWorker, Decision, Evidence, Registered, Report
from elaswave.sim.protocol.certificate import Vote
from elaswave.sim.protocol.coordinator import SimCoordinator
from elaswave.sim.protocol.messages import PARAMETERS, FinishedReport, Frame, Key, Shard
from elaswave.sim.protocol.run import Build
from elaswave.sim.protocol.store import SimStore
from elaswave.sim.protocol.traffic import Traffic, common_placement, swapped_traffic, traffic_between
from elaswave.sim.protocol.worker import Life, SimWorker

if TYPE_CHECKING:
    from elaswave.sim.protocol.job import Job
    from elaswave.sim.protocol.world import World


class Mutant(NamedTuple):
    """A planted bug."""

    name: str
    what: str
    """What is wrong."""
    build: Build
    example: str
    """A schedule that shows it, as short as the search could make it."""
    real: bool = False
    """Whether the core once had it."""


# ----------------------------------------------------------------------------------------------------- rule 1: promises


class _TalkativeLedger(Ledger):
    """Learns after it has promised."""

    def _refuse_if_promised(self, what: str) -> None:
        pass


class LearnsAfterAnswering(SimWorker):
    """Reports, but stays in the old epoch until the decision comes."""

    ledger_class = _TalkativeLedger

    def move(self, epoch: int, members: Iterable[int]) -> None:
        held = {block: Held(copy.owned, copy.version) for block, copy in self.held.items()}
        self.report = self.ledger.promise(epoch, held, self.layers)
        self.pending = (epoch, frozenset(members))
        self.world.to_coordinator(self, self.report)

    def _install(self, decision: Decision) -> Life:
        epoch, self.members = self.pending
        self.leave_epoch(epoch)
        yield from super()._install(decision)


# ------------------------------------------------------------------------------------------- rule 2: GATHER waits


class WritesParametersEarly(SimWorker):
    """A parameter frame is written as it arrives, whether or not the own vote is complete."""

    def accept(self, key: Key, frame: Frame) -> None:
        if key[0] == PARAMETERS:
            owned = [
                block
                for block in self.model.blocks_of_layer[key[3]]
                if self.placement.owner[block] == key[-1] and self.id not in self.placement.followers[block]
            ]
            for block, value in zip(owned, frame.value):
                self.parameters[block] = value
        super().accept(key, frame)


# ---------------------------------------------------------------------------------------- rule 3: evidence, persisted


class SendsBeforePersisting(SimCoordinator):
    """Decisions are sent first and persisted afterwards."""

    def carry_out(self, effects: Sequence[CoordinatorEffect]) -> None:
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
        return super()._on_evidence(event._replace(epoch=self.epoch))


class TakesLateVotes(SimCoordinator):
    """The epoch is not checked on one message: a vote that a lost worker reports late counts."""

    core_class = _TakesLateVotes


# ---------------------------------------------------------------------------------------- planning takes its time


class _TakesAnyPlan(Coordinator):
    def _is_awaited(self, event: RecoveryPlanned | PlanningFailed) -> bool:
        return self.state is State.PLANNING


class TakesStalePlans(SimCoordinator):
    """The planner's answer counts, whatever it was asked."""

    core_class = _TakesAnyPlan


class _DeafWhilePlanning(Coordinator):
    def _on_evidence(self, event: EvidenceSeen) -> list[CoordinatorEffect]:
        return [] if self.state is State.PLANNING else super()._on_evidence(event)


class IgnoresVotesWhilePlanning(SimCoordinator):
    """A vote that is heard of while a recovery is planned does not count."""

    core_class = _DeafWhilePlanning


# -------------------------------------------------------------------------------------- rule 4: layouts change by vote


class SwitchesWithoutVote(SimWorker):
    """The next placement takes effect at the beginning of the step, whatever its vote will say."""

    def traffic(self, step: int) -> Traffic:
        traffic = swapped_traffic(self.job, self.layout, self.placement, step)
        for block in traffic.workers[self.id].drops:
            self.drop(block)
        self.placement = common_placement(self.placement, traffic.voting)
        return traffic_between(self.job, self.layout, self.placement, traffic.voting)


class ChangesAlone(SimWorker):
    """A planned change of the layout comes into force for whoever holds it, whatever the others hold."""

    def is_adopted(self, vote: Vote) -> bool:
        return self.change is not None


class KeepsOldChanges(SimWorker):
    """A planned change of the layout outlives its epoch."""

    def move(self, epoch: int, members: Iterable[int]) -> None:
        change = self.change
        super().move(epoch, members)
        self.change = change


class DropsOneVoteEarly(SimWorker):
    """A follower is replaced in one vote: the old copy goes at the vote that brings the new one."""

    def traffic(self, step: int) -> Traffic:
        return swapped_traffic(self.job, self.layout, self.placement, step)


class CountsCopiesUnderWay(SimWorker):
    """A base copy is reported from the moment at which it is promised."""

    def held_copies(self) -> Mapping[int, Held]:
        plan = self.traffic(self.step).workers[self.id] if self.step and self.step == self.ledger.step else None
        under_way = {} if plan is None else {block: Held(False, self.step - 1) for block, _ in plan.fills_in}
        return {**under_way, **super().held_copies()}


class TakesAnyCopy(SimCoordinator):
    """Whoever says that it holds a block may own it, at whatever version."""

    def plan(self, question: PlanRecovery) -> RecoveryPlan:
        everything = frozenset(range(len(question.placement.owner)))
        return super().plan(question._replace(valid=dict.fromkeys(question.members, everything)))


class KeepsDroppedCopies(SimWorker):
    """Copies that were given up are freed later."""

    def drop(self, block: int) -> None:
        self.dropped = {**getattr(self, "dropped", {}), block: self.held[block].version}
        super().drop(block)

    def held_copies(self) -> Mapping[int, Held]:
        stale = {block: Held(False, version) for block, version in getattr(self, "dropped", {}).items()}
        return {**stale, **super().held_copies()}


# ------------------------------------------------------------------------------------------------ rule 5: versions


class AppliesTwice(SimWorker):
    """One version for the whole worker: an APPLY that was interrupted is done again from the first block."""

    def catch_up(self, evidence: Evidence) -> Life:
        if any(copy.version < evidence.step for copy in self.held.values()):
            for copy in self.held.values():
                copy.version = evidence.step - 1
                copy.gradient = 1 if copy.gradient is None else copy.gradient
        yield from super().catch_up(evidence)


class ForgetsToFinish(SimWorker):
    """An APPLY that was interrupted is not finished."""

    def catch_up(self, evidence: Evidence) -> Life:
        if all(copy.version < evidence.step for copy in self.held.values()):
            yield from super().catch_up(evidence)


# ------------------------------------------------------------------------------------------- fencing: epochs, attempts


class MixesAttempts(SimWorker):
    """The attempt is left out of the tags, and what has arrived of the old epoch stays."""

    def leave_epoch(self, epoch: int) -> None:
        kept = self.inbox
        super().leave_epoch(epoch)
        self.inbox = {**kept, **self.inbox}

    def key(self, kind: int, a: int, b: int, source: int) -> Key:
        return (kind, self.step, 0, a, b, source)


class KeepsOldFrames(SimWorker):
    """Frames of the old epoch that have arrived are not thrown away."""

    def leave_epoch(self, epoch: int) -> None:
        kept = self.inbox
        super().leave_epoch(epoch)
        self.inbox = {**kept, **self.inbox}


# -------------------------------------------------------------------------------------------------- rule 9: the end


class EndsTooSoon(SimCoordinator):
    """The end of an older epoch counts."""

    def has_finished(self, report: FinishedReport) -> bool:
        return True


class LeavesWhenDone(SimWorker):
    """A worker exits after its last step instead of waiting for everybody's."""

    def on_done(self) -> None:
        super().on_done()
        self.world.leave(self, "done")


# --------------------------------------------------------------------------- rule 12: acknowledged, and then forgotten


class SaysFactsOnce(SimWorker):
    """What a coordinator has acknowledged is not said to its successor, though it was kept in memory only."""

    def say_fact(self, fact: Any) -> None:
        self.say_durably(fact)

    def on_connected(self) -> None:
        for message in tuple(self.unacknowledged):
            self.world.to_coordinator(self, message, durable=True)


class _EndFirst(Facts):
    def standing(self) -> list[Any]:
        return super().standing()[::-1]


class SaysTheEndFirst(SimWorker):
    """The end is said before the parts of checkpoints."""

    def __init__(self, world: World, worker: int, job: Job) -> None:
        super().__init__(world, worker, job)
        self.facts = _EndFirst()


class ForgetsParts(SimCoordinator):
    """Parts of checkpoints that are being written are forgotten when the epoch rises."""

    def _on_shard(self, message: Shard) -> None:
        if message.epoch == self.core.epoch:
            super()._on_shard(message)


# -------------------------------------------------------------------------------------------------- rule 10: terms


class UnfencedStore(SimStore):
    """Takes records of any coordinator."""

    def check(self, term: int) -> None:
        pass


class _TermlessMember(Member):
    def handle(self, message: CoreToWorker):  # type: ignore[no-untyped-def]
        self.term = 0
        return super().handle(message)


class IgnoresTerms(SimWorker):
    """A message of a replaced coordinator counts."""

    member_class = _TermlessMember


# --------------------------------------------------------------------------------- defects that the core really had


class _StartsOnce(Coordinator):
    def _on_registered(self, event: Registered) -> list[CoordinatorEffect]:
        before = self.state
        effects = super()._on_registered(event)
        return effects if before is not self.state else [e for e in effects if isinstance(e, Send)]


class SaysStartOnce(SimCoordinator):
    """The start is not said again."""

    core_class = _StartsOnce


class ForgetsRequests(SimCoordinator):
    """A checkpoint that a vote asked for is forgotten when a worker is lost."""

    def pending_work(self, step: int, asked: bool) -> PendingWork:
        return super().pending_work(step, asked=False)


class WritesTwice(SimCoordinator):
    """A checkpoint that a vote asked for is written again although it is on the disk."""

    def pending_work(self, step: int, asked: bool) -> PendingWork:
        return super().pending_work(step, asked)._replace(checkpoint=asked)


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
            Build(worker=LearnsAfterAnswering),
            "widths=4 num_microbatches=4 num_followers=2 suspect:3@17",
        ),
        Mutant(
            "early-gather",
            "a parameter frame is written before the receiver's own vote",
            Build(worker=WritesParametersEarly),
            "widths=4 num_microbatches=4 seed=622124356 suspect:3@69 cut:0-2@70",
        ),
        Mutant(
            "send-before-persist",
            "a decision is sent before it is persisted",
            Build(coordinator=SendsBeforePersisting),
            "widths=2,3 num_microbatches=3 kill:2@1 kill:c@33",
        ),
        Mutant(
            "ignore-evidence",
            "the votes that survivors know are not asked for",
            Build(coordinator=IgnoresEvidence),
            "widths=2,3 num_microbatches=3 suspect:3@68",
        ),
        Mutant(
            "late-vote",
            "the epoch is not checked on one message: a lost worker's late report of a vote counts",
            Build(coordinator=TakesLateVotes),
            "widths=2,2 num_microbatches=4 num_followers=2 seed=278661935 heartbeat_bound=15 isolate:0@31+28 kill:2@47",
        ),
        Mutant(
            "stale-plan",
            "a plan counts that was made before another worker was lost",
            Build(coordinator=TakesStalePlans),
            "plan_delay=15 kill:0@0 cut:1-2@9",
        ),
        Mutant(
            "deaf-while-planning",
            "a newer vote that is heard of while a recovery is planned is ignored",
            Build(coordinator=IgnoresVotesWhilePlanning),
            "widths=2,2 heartbeat_bound=15 plan_delay=20 isolate:0@52+31",
        ),
        Mutant(
            "switch-without-vote",
            "the next placement takes effect without its vote",
            Build(worker=SwitchesWithoutVote),
            "move_step=2 kill:0@18",
        ),
        Mutant(
            "change-alone",
            "a planned change of the layout comes into force though somebody does not hold it",
            Build(worker=ChangesAlone),
            "widths=1,1 num_microbatches=1 change_step=1 seed=439819278",
        ),
        Mutant(
            "old-change",
            "a planned change of the layout outlives its epoch",
            Build(worker=KeepsOldChanges),
            "widths=1,1 num_microbatches=1 change_step=1 seed=356449748 kill:0@20",
        ),
        Mutant(
            "drop-too-early",
            "a copy is dropped one vote too early",
            Build(worker=DropsOneVoteEarly),
            "widths=2,1,1 move_step=1 kill:0@27",
        ),
        Mutant(
            "count-under-way",
            "a base copy counts before a vote has passed with it",
            Build(worker=CountsCopiesUnderWay),
            "widths=3,1 num_microbatches=3 move_step=2 kill:0@37",
        ),
        Mutant(
            "stale-follower",
            "a stale follower is promoted",
            Build(worker=KeepsDroppedCopies, coordinator=TakesAnyCopy),
            "widths=2,1,1 move_step=1 kill:0@69",
        ),
        Mutant(
            "apply-twice",
            "APPLY is interrupted, and blocks carry no versions",
            Build(worker=AppliesTwice),
            "widths=2,2 suspect:3@23",
        ),
        Mutant(
            "apply-unfinished",
            "APPLY is interrupted, and not finished",
            Build(worker=ForgetsToFinish),
            "widths=1,2 suspect:1@18",
        ),
        Mutant(
            "mix-attempts",
            "frames of attempt 1 are accepted in attempt 2",
            Build(worker=MixesAttempts),
            "widths=2,2 kill:0@7",
        ),
        Mutant(
            "old-frames",
            "frames of the old epoch survive the edit",
            Build(worker=KeepsOldFrames),
            "widths=3,1 blocks_per_layer=1 num_microbatches=3 checkpoint_every=1 move_step=2 suspect:1@43 kill:c@52 "
            "suspect:0@60",
        ),
        Mutant(
            "end-too-soon",
            "the job ends on reports of an older epoch",
            Build(coordinator=EndsTooSoon),
            "widths=1,1 num_microbatches=1 kill:0@42",
        ),
        Mutant(
            "leave-when-done",
            "a worker exits before everybody's last apply is known",
            Build(worker=LeavesWhenDone),
            "widths=3,1 num_microbatches=3 link_delay=1",
        ),
        Mutant(
            "facts-once",
            "what was acknowledged is not said to the next coordinator",
            Build(worker=SaysFactsOnce),
            "widths=1,1 num_microbatches=1 checkpoint_every=1 kill:c@25",
            real=True,
        ),
        Mutant(
            "end-first",
            "a worker tells a new coordinator of its end before it tells of its parts of checkpoints",
            Build(worker=SaysTheEndFirst),
            "widths=1,1 num_microbatches=1 checkpoint_every=1 kill:c@47",
        ),
        Mutant(
            "parts-of-one-epoch",
            "parts of a checkpoint do not count in the next epoch",
            Build(coordinator=ForgetsParts),
            "widths=2,2 checkpoint_every=1 kill:c@67 kill:2@99",
            real=True,
        ),
        Mutant(
            "no-terms",
            "two coordinators write and are believed",
            Build(worker=IgnoresTerms, store=UnfencedStore),
            "widths=1,1 num_microbatches=1 kill:1@1 usurp:c@9+30",
        ),
        Mutant(
            "forget-request",
            "a checkpoint that a vote asked for is forgotten when a worker is lost",
            Build(coordinator=ForgetsRequests),
            "ask_step=1 kill:0@22",
        ),
        Mutant(
            "repeat-request",
            "a checkpoint that a vote asked for is written again after a loss",
            Build(coordinator=WritesTwice),
            "ask_step=1 kill:2@32",
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
            "a stored decision is sent under the term of whoever made it",
            Build(coordinator=SendsInOldName),
            "widths=2,1,1 kill:3@30 kill:c@61",
            real=True,
        ),
    )
}
"""All of them by name."""
