"""The simulated coordinator's process: the real core, a store that survives it, detectors, and the books of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from elaswave.protocol.coordinator import (
    ChangePlanned,
    CheckpointFound,
    Coordinator,
    Decided,
    Effect,
    End,
    EvidenceSeen,
    FindCheckpoint,
    Note,
    PendingWork,
    Persist,
    Planned,
    Planner,
    Record,
    Send,
    Start,
    State,
    Suspected,
    TermRecord,
)
from elaswave.protocol.messages import Decision, Installed, Registered, Report
from elaswave.protocol.shards import Complete, GivenUp, Shards
from elaswave.sim.protocol.job import BlockState, model_of, other_layout
from elaswave.sim.protocol.messages import FinishedReport, PeerLost, Settled, Shard, StepDone
from elaswave.state.placement import Placement
from elaswave.types import Layout

if TYPE_CHECKING:
    from elaswave.sim.protocol.world import Link, World


class StaleTermError(Exception):
    """A newer coordinator has written to the store."""


class Store:
    """What coordinators persist: refuses whoever is not the newest."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._term = 0

    def append(self, record: Record) -> None:
        """Writes a record.

        Raises:
            StaleTermError: a coordinator of a newer term has written.
        """
        self.check(record.term)
        if isinstance(record, TermRecord) and record.term == self._term:
            raise StaleTermError(f"another coordinator has begun term {record.term}")
        self._term = record.term
        self.records.append(record)

    def check(self, term: int) -> None:
        """Refuses coordinators that have been replaced."""
        if term < self._term:
            raise StaleTermError(f"the store has been written by a coordinator of term {self._term}")


class SimCoordinator:
    """One coordinator process.

    Args:
        world: time, network and observers.
    """

    core_class = Coordinator
    id = -1

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        model = model_of(world.job)
        self.core = self.core_class(
            layout=model.layout,
            placement=model.placement,
            blocks=model.blocks,
            planner=Planner(self.survive, model.planner.replace),
            records=tuple(world.store.records),
            books=self._books,
        )
        self.links: dict[int, Link] = {}
        self._finished: dict[int, FinishedReport] = {}
        self._planned_epoch = 0
        """The newest epoch in which another layout was planned."""
        self._grids: dict[int, int] = {}
        """Step -> the grid after it, of checkpoints that are being written."""
        self.shards: Shards[int, BlockState] = Shards(len(model.blocks), lambda state: 1, model.layout.workers)
        for record in world.store.records:
            if isinstance(record, Decision):
                self._tell_shards(record)
        for step in (*world.disk, *world.given_up):
            self.shards.settle(step)

    def survive(
        self, layout: Layout, placement: Placement, lost: Collection[int], valid: Callable[[int, int], bool]
    ) -> Planned:
        """How survivors go on: the real planning functions."""
        return model_of(self.world.job).planner.survive(layout, placement, lost, valid)

    def _books(self, step: int, asked: bool) -> PendingWork:
        every = self.world.job.checkpoint_every
        due = asked or (bool(every) and step > 0 and step % every == 0)
        return PendingWork(
            evaluate=False, checkpoint=due and step not in self.world.disk, published=self.world.published_step
        )

    def _tell_shards(self, decision: Decision) -> list[Complete[int, BlockState] | GivenUp]:
        again = decision.resume_step - 1 if decision.checkpoint else None
        return self.shards.decided(decision.epoch, decision.members, again=again, rollback=decision.rollback)

    # -------------------------------------------------------------------------------------------------------- effects

    def begin(self) -> None:
        """Its first effects; members that do not come within the bound are suspected."""
        self.carry_out(self.core.begin())
        for worker in self.core.members:
            self._expect(worker)

    def carry_out(self, effects: list[Effect]) -> None:
        """Carries out effects in their order; the process may end between any two."""
        for index, effect in enumerate(effects):
            self.world.tick(self)
            if self.world.postponed(self, self.carry_out, effects[index:]):
                return
            try:
                self._carry_out(effect)
            except StaleTermError as error:
                self.world.say(f"coordinator of term {self.core.term} ends: {error}")
                self.world.end_coordinator(self)
                return

    def _carry_out(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Persist):
            world.store.append(effect.record)
            if isinstance(effect.record, Decision):
                world.see.decided(effect.record)
        elif isinstance(effect, Send):
            link = self.links.get(effect.worker)
            if link is not None and link.open:
                world.to_member(self, link, effect.message)
        elif isinstance(effect, Start):
            for worker in self.core.members:
                world.tick(self)
                link = self.links.get(worker)
                if link is not None and link.open:
                    world.to_member(self, link, None)
        elif isinstance(effect, FindCheckpoint):
            newest = max(world.disk, default=None)
            world.after(4 * world.delay(), self, self._on_checkpoint, newest)  # it is read and verified
        elif isinstance(effect, Decided):
            world.say(f"decided: {_describe(effect.decision)}")
            if effect.decision.rollback is not None:
                world.given_up = {step for step in world.given_up if step <= effect.decision.rollback}
            for found in self._tell_shards(effect.decision):
                self._on_shards(found)
        elif isinstance(effect, End):
            if self._is_replaced():
                return  # the end is durable before anybody hears of it
            world.say(f"the job ends: {effect.reason}")
            world.see.ended(effect.reason, self.core.members, world.lost(), effect.orphans)
            world.finish("ended", effect.reason)
        elif isinstance(effect, Note):
            world.say(f"note: {effect.text}")

    def _on_checkpoint(self, step: int | None) -> None:
        self.carry_out(self.core.handle(CheckpointFound(step), self.world.now))

    # ---------------------------------------------------------------------------------------------------- connections

    def on_registered(self, link: Link, message: Registered) -> None:
        """A worker's first words on a new connection."""
        self.links[message.worker] = link
        self.carry_out(self.core.handle(message, self.world.now))

    def on_link_closed(self, worker: int) -> None:
        """A worker has to come back within the bound."""
        self._expect(worker)

    def _expect(self, worker: int) -> None:
        self.world.after(2 * self.world.conditions.heartbeat_bound, self, self._check_present, worker)

    def _check_present(self, worker: int) -> None:
        link = self.links.get(worker)
        if (link is None or not link.open) and worker in self.core.members:
            self.on_suspicion(worker, "heartbeat")

    # ------------------------------------------------------------------------------------------------------ detectors

    def on_exit(self, worker: int) -> None:
        """A worker's process has ended."""
        self.on_suspicion(worker, "exit")

    def on_suspicion(self, worker: int, detected_by: str) -> None:
        """A detector of its own holds a worker for lost."""
        self._suspect(Suspected(worker, detected_by, f"worker {worker} was lost ({detected_by})"))

    def _suspect(self, suspicion: Suspected) -> None:
        self.world.suspected.add(suspicion.worker)
        self.carry_out(self.core.handle(suspicion, self.world.now))
        self._end_if_finished()

    # ------------------------------------------------------------------------------------------------------- messages

    def on_message(self, link: Link, message: Any) -> None:
        """A message of a worker."""
        if isinstance(message, Report):
            self.on_report(message)
        elif isinstance(message, Installed):
            self.carry_out(self.core.handle(message, self.world.now))
        elif isinstance(message, StepDone):
            self._on_step_done(message)
        elif isinstance(message, PeerLost):
            self.on_peer_lost(message)
        elif isinstance(message, Shard):
            self._on_shard(message)
        elif isinstance(message, FinishedReport):
            self._finished[message.worker] = message
        self._end_if_finished()

    def on_report(self, message: Report) -> None:
        """A worker's answer to the question of an epoch."""
        self.carry_out(self.core.handle(message, self.world.now))

    def on_peer_lost(self, message: PeerLost) -> None:
        """A worker's link to a peer has closed."""
        reason = f"worker {message.worker} lost its link to worker {message.peer}"
        self._suspect(Suspected(message.peer, "link", reason, by=message.worker, epoch=message.epoch))

    def _on_step_done(self, message: StepDone) -> None:
        self.carry_out(self.core.handle(EvidenceSeen(message.evidence, message.epoch), self.world.now))
        if self._is_replaced():
            return
        self.world.publish(message.evidence)
        for step in self.shards.pending:
            found = self.shards.judge(step)
            if found is not None:
                self._on_shards(found)
        self._plan(message)

    def _plan(self, message: StepDone) -> None:
        """Plans another layout once in every epoch; planning takes a while, in which anything may happen."""
        core, world = self.core, self.world
        epoch, begin = core.epoch, world.job.change_step
        fresh = message.epoch == epoch > self._planned_epoch and not core.has_planned
        if begin and message.evidence.step >= begin and fresh:
            self._planned_epoch = epoch
            layout, execution, _ = core.in_force()
            planned = ChangePlanned(epoch, other_layout(layout), execution, "another layout")
            world.after(world.delay(), self, self._on_planned, planned)

    def _on_planned(self, planned: ChangePlanned) -> None:
        self.carry_out(self.core.handle(planned, self.world.now))

    def _on_shard(self, message: Shard) -> None:
        self._grids.setdefault(message.step, message.grid)
        num_bytes = len(message.states)
        found = self.shards.written(message.step, message.epoch, message.worker, message.states, num_bytes)
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
            world.disk[step] = (found.pieces, self._grids[step])
            world.see.checkpointed(step, found.pieces, self._grids[step])
        self.shards.settle(step)
        self._say_settled(step, self.core.members)

    def _say_settled(self, step: int, workers: Collection[int]) -> None:
        for worker in workers:
            self.world.tick(self)
            link = self.links.get(worker)
            if link is not None and link.open:
                self.world.to_member(self, link, Settled(step))

    def has_finished(self, report: FinishedReport) -> bool:
        """Whether a worker's end counts: only in the present epoch does it know its roles."""
        return report.epoch == self.core.epoch

    def _is_replaced(self) -> bool:
        """Whether the journal has another writer; then nothing can be made durable any more, and this one ends."""
        try:
            self.world.store.check(self.core.term)
        except StaleTermError:
            self.world.end_coordinator(self)
            return True
        return False

    def _end_if_finished(self) -> None:
        """Nobody may exit before everybody's last apply is known here, in the present epoch."""
        core, world = self.core, self.world
        if self.dead or core.state is not State.TRAINING or world.published_step < world.job.steps:
            return
        finished = {worker: self._finished[worker] for worker in core.members if worker in self._finished}
        if len(finished) == len(core.members) and all(map(self.has_finished, finished.values())):
            if self._is_replaced():
                return
            for found in self.shards.end():
                self._on_shards(found)
            world.see.finished(core.members, {worker: report.states for worker, report in finished.items()})
            world.finish("finished")


def _describe(decision: Decision) -> str:
    evidence = decision.evidence
    seen = (
        "no vote" if evidence is None else f"vote {evidence.step}.{evidence.attempt} {'+' if evidence.commits else '-'}"
    )
    return (
        f"epoch {decision.epoch} members {decision.members} {seen} resume {decision.resume_step}."
        f"{decision.resume_attempt} owners {decision.placement.owner} followers {decision.placement.followers} "
        f"deliver {decision.deliver} rollback {decision.rollback}"
    )
