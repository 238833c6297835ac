"""The simulated coordinator's process: the real machine and driver, a store that survives it, detectors, and what it
keeps of the run."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from elaswave.blocks.placement import Block, Placement
from elaswave.planning.search.recovery import put_to_work, set_idle
from elaswave.planning.state_moves.target_placement import target_placement
from elaswave.protocol.coordinator.decisions import MemberEnd, plan_survivors, plan_with
from elaswave.protocol.coordinator.shards import Complete, GivenUp, Shards
from elaswave.protocol.events import (
    Decided,
    End,
    EvidenceSeen,
    FindCheckpoint,
    Note,
    PendingWork,
    Persist,
    PlanRecovery,
    RecoveryPlan,
    Suspected,
    WorkerFailed,
)
from elaswave.protocol.leadership.store_position import PositionVerdict, StorePosition, compare_positions
from elaswave.protocol.membership.effects import (
    AwaitMembers,
    Effect,
    Say,
    StartFirst,
    StopTraining,
    Suspect,
    TellCore,
    WorkerGone,
    WriteDown,
)
from elaswave.protocol.messages import (
    CoreToWorker,
    Decision,
    Installed,
    Joining,
    LayoutChange,
    Linked,
    Paused,
    Registered,
    Report,
    Unsound,
)
from elaswave.protocol.step.blocks import refilled
from elaswave.protocol.step.due_work import pending_after
from elaswave.types import Layout
from verify.simulator.candidates import WriteLease
from verify.simulator.job import BlockState, Exponents, model_of, other_layout, renumbered
from verify.simulator.members import REQUEST, SimMembers
from verify.simulator.messages import CheckpointSettled, FinishedReport, Notice, PeerLost, Shard, StepDone, StopTold
from verify.simulator.store import StaleTermError
from verify.simulator.world import ControlLink, World

UNSEEN = (TellCore, Suspect, AwaitMembers, WorkerGone, StopTraining, StartFirst, Say)
"""Effects of which others see nothing but what follows from them."""
PLAN_BOUND = 45
"""A planner that takes longer than this is taken to have failed (P4)."""


class SimCoordinator(SimMembers):
    """One coordinator process.

    Args:
        world: time, network and observers.
        write_lease: its right to write, where there are candidates.
    """

    shards_class: type[Shards[int, BlockState]] = Shards

    def __init__(self, world: World, write_lease: WriteLease | None = None) -> None:
        records = world.store.records if write_lease is None else write_lease.records
        super().__init__(world, write_lease, records)
        model = model_of(world.job)
        self._finished: dict[int, FinishedReport] = {}
        self._is_planning = False
        self._planned_generation = 0
        """The newest generation in which another layout was planned."""
        self._grids: dict[int, Exponents] = {}
        """Step -> the grid after it, of checkpoints that are being written."""
        self.shards = self.shards_class(lambda step: len(model.blocks), lambda state: 1, model.layout.workers)
        for record in records:
            if isinstance(record, Decision):
                self.shards.follow(record)
        for step in (*world.written, *world.given_up):
            self.shards.settle(step)

    # -------------------------------------------------------------------------------------------------------- effects

    def begin(self) -> None:
        """Its first effects; members that do not come within the bound are suspected."""
        self.carry_out(self.membership.begin(self.now_s()))
        self.carry_out(self.core.begin())
        self.then(self.begin_members)

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries out effects in their order; the process may end between any two."""
        for index, effect in enumerate(effects):
            if self._is_seen(effect):
                self.world.tick(self)
            if self.world.postponed(self, self.carry_out, effects[index:]):
                return
            try:
                self.carry_out_one(effect)
            except StaleTermError as error:
                self.world.say(f"coordinator of term {self.core.term} ends: {error}")
                self.world.end_coordinator(self)
                return
            is_written = isinstance(effect, Persist | WriteDown)
            if is_written and self.world.postponed(self, self.carry_out, effects[index + 1 :]):
                return

    def _is_seen(self, effect: Effect) -> bool:
        """Whether others can see, by itself, that an effect is carried out."""
        if isinstance(effect, PlanRecovery):
            return not self._plans_at_once
        return not isinstance(effect, UNSEEN)

    def send(self, worker: int, message: CoreToWorker) -> None:
        """Over the control connection, if there is one."""
        link = self.links.get(worker)
        if link is not None and link.open:
            self.world.to_member(self, link, message)

    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """Addresses are of no use here; what counts is that the start is heard."""
        for worker in self.core.members:
            self.world.tick(self)
            link = self.links.get(worker)
            if link is not None and link.open:
                self.world.to_member(self, link, None)

    def find_checkpoint(self, question: FindCheckpoint) -> None:
        """It is read and verified, which takes a while."""
        newest = self._newest(question)
        self.world.after(4 * self.world.delay(), self, self._on_checkpoint_found, question, newest)

    def _on_checkpoint_found(self, question: FindCheckpoint, newest: int | None) -> None:
        """A newer one may be completed meanwhile."""
        if not self.core.awaits(question):
            return
        if self.is_committing() or newest != self._newest(question):
            self.find_checkpoint(question)
        else:
            for step in [step for step in self.world.disk if newest is None or step > newest]:
                del self.world.disk[step]  # it is put aside
            self.shards.hold()
            self.answer_checkpoint(question, newest)

    def _newest(self, question: FindCheckpoint) -> int | None:
        bound = max(self.world.disk, default=0) if question.newest is None else question.newest
        return max((step for step in self.world.disk if step <= bound), default=None)

    @property
    def _plans_at_once(self) -> bool:
        return not self.world.conditions.plan_delay

    def plan_recovery(self, question: PlanRecovery) -> None:
        """Answers in the same turn, or later, or too late."""
        delay = self.world.conditions.plan_delay
        self.world.see.asked_planner(self.core.term, question)
        if self._plans_at_once:
            self.answer_plan(question, self.plan(question))
        elif delay > PLAN_BOUND:
            self.world.after(PLAN_BOUND, self, self.answer_plan, question, "the planner has taken too long")
        else:
            self.world.after(delay, self, self._answer_slowly, question)

    def _answer_slowly(self, question: PlanRecovery) -> None:
        self.answer_plan(question, self.plan(question))

    def plan(self, question: PlanRecovery) -> RecoveryPlan:
        """How survivors go on: the real planning functions."""
        blocks, job = model_of(self.world.job).blocks, self.world.job
        plan = plan_survivors(question, blocks, job.scatter_width)
        if self.world.conditions.replans:
            plan = plan_with(question, self._other_layout(plan.layout), blocks, job.scatter_width)
        return plan

    def pending_work(self, step: int, asked: bool) -> PendingWork:
        """What the disk and the publications leave to be done."""
        world, terms = self.world, model_of(self.world.job).terms
        return pending_after(
            step,
            terms.num_steps,
            terms,
            asked=asked,
            first_step=1,
            evaluated=(),
            written=world.written,
            published=world.published_step,
        )

    def on_decided(self, effect: Decided) -> None:
        """Checkpoints that wait for the lost are given up or complete now."""
        world, decision = self.world, effect.decision
        world.say(f"decided: {_describe(decision)}")
        for found in self.shards.follow(decision):
            self._on_shards(found)

    def on_end(self, effect: End) -> None:
        """The end is durable before any worker hears of it."""
        if self._is_replaced():
            return
        world = self.world
        world.say(f"the job ends: {effect.reason}")
        world.see.ended(effect.reason, self.core.members, world.lost(), effect.orphans)
        world.finish("ended", effect.reason)

    def note(self, effect: Note) -> None:
        """A line of the log."""
        self.world.say(f"note: {effect.text}")

    # ---------------------------------------------------------------------------------------------------- connections

    def on_registered(
        self, link: ControlLink, message: Registered | Joining, store_position: StorePosition | None
    ) -> None:
        """A worker's first words on a new connection: where it has heard that the history stands, and who it is."""
        if store_position is not None and not self.fits(store_position):
            return
        self.links[message.worker] = link
        if isinstance(message, Joining):
            self.worker_joining(message)
        else:
            self.worker_registered(message)
        if self.world.is_stopping:
            self.then(self.tell_to_stop, message.worker)

    def tell_to_stop(self, worker: int) -> None:
        """Has a worker ask for the end of the job in its next ballot."""
        link = self.links.get(worker)
        if link is not None and link.open:
            self.world.tick(self)
            self.world.to_member(self, link, StopTold())

    def fits(self, received: StorePosition) -> bool:
        """Whether a worker's head is in the own history. If not, nothing that it says counts (H9)."""
        write_lease = self.write_lease
        assert write_lease is not None
        meaning = compare_positions(received, write_lease.store_position, write_lease.digests)
        if meaning is PositionVerdict.NEWER_TERM:
            write_lease.confirm(self, received)
        elif meaning is PositionVerdict.GONE_BACK:
            write_lease.gone_back(self, received)
        return meaning is PositionVerdict.FITS

    def after_suspicions(self) -> None:
        """Fewer may be left, which have all made their last step."""
        self._end_if_finished()

    # ------------------------------------------------------------------------------------------------------- messages

    def on_message(self, link: ControlLink, message: Any) -> None:
        """A message of a worker."""
        if isinstance(message, StepDone):
            self._on_step_done(message)
        elif isinstance(message, Linked):
            self.feed(message)
        elif isinstance(message, WorkerFailed):
            self.world.suspected.add(message.worker)
            self.worker_failed(message)
        elif isinstance(message, Notice):
            self.worker_leaving(message.worker, message.left_s)
        elif not self.hears(message.worker):
            pass
        elif isinstance(message, Report | Installed | Paused | Unsound):
            self.feed(message)
        elif isinstance(message, PeerLost):
            self.on_peer_lost(message)
        elif isinstance(message, Shard):
            self._on_shard(message)
        elif isinstance(message, FinishedReport):
            self._finished[message.worker] = message
            self.membership.joiners.stop()
        self.then(self._end_if_finished)

    def on_peer_lost(self, message: PeerLost) -> None:
        """A worker's link to a peer has closed."""
        if not self.core.believes(message.worker, message.peer, message.generation):
            return
        if self.world.conditions.detects:
            self.detector.link_lost(message.worker, message.peer, self.now_s())
            self.world.after(1, self, self.look_now)
        else:
            reason = f"worker {message.worker} lost its link to worker {message.peer}"
            self.suspected(Suspected(message.peer, "link", reason))

    def _on_step_done(self, message: StepDone) -> None:
        self.world.see.received(self.core.term, message.generation, message.evidence)
        self.feed(EvidenceSeen(message.evidence, message.generation))
        self.then(self._after_vote, message)

    def _after_vote(self, message: StepDone) -> None:
        is_member = self.hears(message.worker)
        if self._is_replaced() or not is_member:
            return
        self.world.publish(message.evidence)
        self.carry_out(self.membership.committed(message.evidence.vector, "", self.now_s()))
        for step in self.shards.pending:
            found = self.shards.judge(step)
            if found is not None:
                self._on_shards(found)
        self._plan(message)

    def _plan(self, message: StepDone) -> None:
        """Asks for what the job wants from a step on; planning takes a while, in which anything may happen."""
        core, job = self.core, self.world.job
        step = message.evidence.step
        if 0 < job.join_step <= step:
            self.then(self.request_join, job.joiners, REQUEST)
        if 0 < job.leave_step <= step:
            for worker in range(job.leaver, job.leaver + job.leavers):
                if worker in core.members and worker not in core.admissions.leaving:
                    self.then(self.request_drain, worker)
        self.then(self._plan_change, message)

    def _plan_change(self, message: StepDone) -> None:
        core, step = self.core, message.evidence.step
        is_free = not core.is_changing or core.may_supersede
        if message.generation == core.generation and is_free and not self._is_planning:
            planned = self._next_plan(step)
            if planned is not None:
                self._is_planning = True
                self.world.after(self.world.delay(), self, self._on_planned, planned)

    def _next_plan(self, step: int) -> LayoutChange | None:
        """Who is to leave becomes idle, who is idle works; another layout once in every generation, where the job asks
        for it."""
        core, begin = self.core, self.world.job.change_step
        before, leaving = core.in_force(), core.admissions.leaving
        if leaving.intersection(before.layout.active) and not leaving.issuperset(before.layout.workers):
            return self._change(set_idle(before.layout, leaving))
        if any(before.placement.holds(worker) for worker in leaving.intersection(before.layout.idle)):
            return self._change(before.layout)
        if core.is_changing:
            return None
        for worker in before.layout.idle:
            if worker not in leaving:
                return self._change(put_to_work(before.layout, worker))
        if begin and step >= begin and core.generation > self._planned_generation and not core.has_planned:
            self._planned_generation = core.generation
            return self._change(self._other_layout(before.layout))
        return None

    def _other_layout(self, layout: Layout) -> Layout:
        other = other_layout(layout)
        return renumbered(other) if self.world.job.renumbers else other

    def _change(self, layout: Layout) -> LayoutChange:
        """A change to a layout, with its blocks where they should be."""
        model, job = model_of(self.world.job), self.world.job
        before = self.core.in_force()
        copies = job.blocks_per_round, job.scatter_width
        here = _refilled(model.blocks, before.layout, before.placement, *copies)
        placement = _target(layout, model.blocks, here, job.scatter_width)
        ratios = {0: before.execution.ratios.get(0, 1) + 1}  # each change brings another one
        execution = msgspec.structs.replace(before.execution, ratios=ratios)
        return LayoutChange(
            generation=self.core.generation,
            layout=layout,
            placement=placement,
            execution=execution,
            reason="another layout",
        )

    def _on_planned(self, planned: LayoutChange) -> None:
        self._is_planning = False
        self.feed(planned)

    def _on_shard(self, message: Shard) -> None:
        self._grids.setdefault(message.step, message.grid)
        num_bytes = len(message.states)
        found = self.shards.written(message.step, message.generation, message.worker, message.states, num_bytes)
        if found is not None:
            self._on_shards(found)
        elif self.shards.is_settled(message.step):
            self._say_settled(message.step, [message.worker])

    def _on_shards(self, found: Complete[int, BlockState] | GivenUp) -> None:
        """A checkpoint is complete, or will never be."""
        world, step = self.world, found.step
        if self._is_replaced():
            return
        if isinstance(found, GivenUp):
            world.say(f"the checkpoint of step {step} is given up: {found.reason}")
            world.given_up.add(step)
            world.see.given_up(step, self.core.members)
        elif world.published_step < step:
            return  # it waits for the losses
        else:
            world.tick(self)
            self.shards.commit(step)
            world.commit(self, step, found.pieces, self._grids[step])
            return
        self._settle(step)

    def on_committed(self, step: int) -> None:
        """The committer has made a checkpoint durable."""
        world = self.world
        if self._is_replaced():
            return
        world.written.add(step)
        world.see.checkpointed(step, *world.disk[step])
        self._settle(step)
        self._end_if_finished()

    def _settle(self, step: int) -> None:
        self.shards.settle(step)
        self._say_settled(step, self.core.members)

    def _say_settled(self, step: int, workers: Collection[int]) -> None:
        for worker in workers:
            self.world.tick(self)
            link = self.links.get(worker)
            if link is not None and link.open:
                self.world.to_member(self, link, CheckpointSettled(step))

    def _is_replaced(self) -> bool:
        """Whether the journal has another writer; then nothing can be made durable any more, and this one ends."""
        if self.write_lease is not None:
            if self.write_lease.is_taken():
                self.world.end_coordinator(self)
            return self.write_lease.is_lost
        try:
            self.world.store.check(self.core.term)
        except StaleTermError:
            self.world.end_coordinator(self)
            return True
        return False

    # -------------------------------------------------------------------------------------------------------- the end

    def ends(self) -> Mapping[int, MemberEnd]:
        """As workers have said it to this coordinator."""
        return {worker: MemberEnd(report.generation, report.step) for worker, report in self._finished.items()}

    def published_step(self) -> int:
        """As the journal has it."""
        return self.world.published_step

    def give_up_missing_parts(self) -> None:
        """With a word to the workers."""
        for found in self.shards.end():
            self._on_shards(found)

    def is_committing(self) -> bool:
        """Whether the committer has still to answer."""
        return self.shards.num_committing > 0

    def on_finished(self) -> None:
        """All that was to be done is done."""
        members = self.core.members
        self.world.see.finished(members, {worker: self._finished[worker].states for worker in members})
        self.world.finish("finished")

    def _end_if_finished(self) -> None:
        if not self.dead and not self.world.outcome and not self._is_replaced():
            self.end_if_finished()


# The schedules of a search ask the same again and again.


@lru_cache(maxsize=4096)
def _target(layout: Layout, blocks: tuple[Block, ...], placement: Placement, scatter_width: int) -> Placement:
    return target_placement(layout, blocks, placement, scatter_width=scatter_width)


_refilled = lru_cache(maxsize=4096)(refilled)


def _describe(decision: Decision) -> str:
    evidence = decision.evidence
    seen = (
        "no vote" if evidence is None else f"vote {evidence.step}.{evidence.attempt} {'+' if evidence.commits else '-'}"
    )
    return (
        f"generation {decision.generation} members {decision.members} {seen} resume {decision.resume_step}."
        f"{decision.resume_attempt} owners {decision.placement.owner} followers {decision.placement.followers} "
        f"deliver {decision.deliver} rollback {decision.rollback}"
    )
