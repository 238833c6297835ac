"""A simulated worker: the real membership machine and ledger around the toy engine.

It does what the product's worker does around its engine: it leaves an epoch when asked to report, installs decisions,
and speaks with the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from elaswave.control.core.ledger import CatchUp, Held
from elaswave.control.core.member import Install, Leave, Member, MemberState, MoveAndReport, ReportAgain
from elaswave.control.core.messages import CoreToWorker, Decision, Evidence, Fenced, Installed, Registered, Report
from elaswave.simulator.engine import FIRST_EPOCH, Copy, Life, ToyEngine
from elaswave.simulator.job import (
    Job,
    parameter,
)
from elaswave.simulator.messages import (
    DELIVERY,
    FinishedReport,
    Frame,
    Key,
    PeerLost,
    Shard,
    StepDone,
)

if TYPE_CHECKING:
    from elaswave.simulator.world import World


class SimWorker(ToyEngine):
    """One worker.

    Args:
        world: time, network and observers.
        worker: its id.
        job: what is trained.
    """

    member_class = Member

    def __init__(self, world: World, worker: int, job: Job) -> None:
        super().__init__(world, worker, job)
        self.member = self.member_class(worker, FIRST_EPOCH)
        self.report: Report | None = None
        """The last report, while it waits for the decision."""
        self.later: dict[int, dict[Key, Frame]] = {}
        """Frames of epochs that it has not reached yet."""
        self.dead_peers: set[int] = set()
        self.closed_links: set[int] = set()
        """Peers whose links have closed in the present epoch; said to every coordinator again."""
        self.reports: dict[int, StepDone] = {}
        """Committed steps; the member with the lowest id sends them, and the others keep them in case it is lost."""
        self.durable: list[StepDone | Shard] = []
        """Said to every coordinator again."""
        self.started = False
        """Whether it has been told where its peers are; until then it can do nothing else."""
        self.before_start: list[CoreToWorker] = []
        self.done = False

    # ------------------------------------------------------------------------------------------------ what reaches it

    def registration(self) -> Registered:
        """The first words on a new control connection."""
        waits = self.member.state is MemberState.REPORTED
        return Registered(
            worker=self.id,
            address=str(self.id),
            epoch=self.member.epoch,
            report=self.report if waits else None,
            done=self.done,
        )

    def on_connected(self) -> None:
        """A new control connection is up: say again what may have been lost."""
        self._report_links()
        for message in self.durable:
            self.world.to_coordinator(self, message)
        if self.done:
            self.world.to_coordinator(self, self._finished())

    def on_start(self) -> None:
        """Every worker has registered."""
        if not self.started:
            self.started = True
            self.live(self._steps(1, 1))
            for message in self.before_start:
                self.on_message(message)

    def on_frame(self, key: Key, frame: Frame) -> None:
        """A frame arrives."""
        epoch = frame.epoch
        if epoch == self.epoch:
            if key[-1] in self.members:
                self.accept(key, frame)
        elif epoch > self.epoch:
            self.later.setdefault(epoch, {})[key] = frame

    def accept(self, key: Key, frame: Frame) -> None:
        """Takes a frame of the present epoch, and goes on if it was the last one that was missing."""
        self.inbox[key] = frame
        waiting = self.waiting
        if key in waiting:
            waiting.discard(key)
            if not waiting:
                self.go_on()

    def on_link_closed(self, peer: int, *, dead: bool) -> None:
        """The link to a peer has closed."""
        if dead:
            self.dead_peers.add(peer)
        if peer in self.members:
            self.closed_links.add(peer)
            self.world.to_coordinator(self, PeerLost(self.id, self.epoch, peer))

    def _report_links(self) -> None:
        for peer in sorted(self.closed_links):
            self.world.to_coordinator(self, PeerLost(self.id, self.epoch, peer))

    def on_message(self, message: CoreToWorker) -> None:
        """A message of the coordinator's core."""
        if not self.started and not isinstance(message, Fenced):
            self.before_start.append(message)
            return
        action = self.member.handle(message)
        if isinstance(action, MoveAndReport):
            self.move(action.epoch, action.members)
        elif isinstance(action, ReportAgain):
            if self.report is not None:
                self.world.to_coordinator(self, self.report)
        elif isinstance(action, Install):
            self.report = None
            self.live(self._install(action.decision))
        elif isinstance(action, Leave):
            self.world.leave(self, action.reason)

    def move(self, epoch: int, members: Iterable[int]) -> None:
        """Leaves the old epoch, promises, and reports."""
        self.done = False  # what it said of its end was of the old epoch
        self.stop()
        self.leave_epoch(epoch)
        self.members = frozenset(members)
        self.report = self.ledger.promise(epoch, self.held_copies(), self.layers)
        self.world.to_coordinator(self, self.report)
        self.closed_links = set(self.dead_peers & self.members)  # the other links are made again
        self._report_links()

    def held_copies(self) -> Mapping[int, Held]:
        """The copies that it can answer for."""
        return {block: Held(copy.owned, copy.version) for block, copy in self.held.items()}

    def leave_epoch(self, epoch: int) -> None:
        """Moves the data plane: frames of older epochs are nothing any more."""
        self.epoch = epoch
        self.inbox = self.later.pop(epoch, {})
        for old in [other for other in self.later if other < epoch]:
            del self.later[old]

    # --------------------------------------------------------------------------------------------------------- its life

    def _steps(self, step: int, attempt: int) -> Life:
        while step <= self.job.steps:
            self.ledger.begin(step, attempt)
            self.step, self.attempt = step, attempt
            self.world.see.began(self.id, self.epoch, step, attempt, self.placement)
            traffic = self.traffic(step)
            plan = traffic.workers[self.id]
            yield from self.run(plan)
            yield from self.reduce(plan)
            self.ledger.prepare()
            yield from self.vote(traffic, plan)
            evidence = self.ledger.evidence
            assert evidence is not None
            if not evidence.commits:
                attempt += 1
                continue
            yield from self.apply(evidence)
            yield from self.gather(plan)
            self._step_done(evidence)
            if self.job.checkpoint_every and step % self.job.checkpoint_every == 0:
                self._write_shard(step)
            step, attempt = step + 1, 1
        self.on_done()

    def on_done(self) -> None:
        """All steps are made; it stays until it is told to leave, since others may need what it holds."""
        self.done = True
        self.world.to_coordinator(self, self._finished())

    # ------------------------------------------------------------------------------------------------------- decisions

    def _install(self, decision: Decision) -> Life:
        """Catches up, takes over layout and placement, completes the parameters, and goes on."""
        catch_up = self.ledger.accept(decision)
        base = decision.resume_step - 1
        if catch_up is CatchUp.ROLL_BACK:
            yield from self._roll_back(decision)
        else:
            evidence = decision.evidence
            if evidence is not None and catch_up is not CatchUp.NOTHING:
                self.take_grid(evidence)
            if evidence is not None and catch_up is CatchUp.APPLY:
                yield from self.catch_up(evidence)
            yield from self._take_roles(decision)
        self.filling = {}
        self.world.see.installed(self.id, decision, [copy.version for copy in self.held.values()], self.grid)
        self.world.to_coordinator(
            self, Installed(worker=self.id, epoch=self.epoch, edit_s=0, promote_s=0, critical_bytes=0)
        )
        if decision.evidence is not None and decision.evidence.commits:
            self.reports.setdefault(decision.evidence.step, StepDone(self.id, self.epoch, decision.evidence))
        if self.id == min(self.members):
            for step, report in sorted(self.reports.items()):
                if decision.published < step < decision.resume_step:
                    self._say_durably(report)
        if decision.checkpoint:
            self._write_shard(base)
        yield from self._steps(decision.resume_step, decision.resume_attempt)

    def catch_up(self, evidence: Evidence) -> Life:
        """Applies a decision's step to what is still at the version before."""
        yield from self.apply(evidence)

    def _take_roles(self, decision: Decision) -> Life:
        base, placement = decision.resume_step - 1, decision.placement
        for block in range(len(placement.owner)):
            if self.id in placement.holders(block):
                copy = self.held.get(block)
                assert copy is not None and copy.version == base, f"worker {self.id} has no copy of block {block}"
                copy.owned = placement.owner[block] == self.id
            elif block in self.held:
                self.drop(block)
        self.placement, self.layout = placement, decision.layout
        self.step, self.attempt = base, decision.resume_attempt
        for worker, layer in decision.deliver:
            if worker == self.id:
                self.ledger.parameters_step = -1
                for block in self.model.blocks_of_layer[layer]:
                    if self.id in placement.holders(block):
                        self.parameters[block] = parameter(self.held[block].state)
            else:
                for block in self.model.blocks_of_layer[layer]:
                    if placement.owner[block] == self.id and worker not in placement.followers[block]:
                        self.send(worker, DELIVERY, block, 0, parameter(self.held[block].state))
        for worker, layer in decision.deliver:
            if worker == self.id:
                for block in self.model.blocks_of_layer[layer]:
                    if self.id not in placement.holders(block):
                        key = self.key(DELIVERY, block, 0, placement.owner[block])
                        yield from self.wait((key,))
                        self.parameters[block] = self.take(key)
        self._take_layers(decision)

    def _take_layers(self, decision: Decision) -> None:
        stage = decision.layout.stages[decision.layout.stage_of(self.id)]
        self.layers = (stage.start, stage.stop)
        here = {block for layer in range(*self.layers) for block in self.model.blocks_of_layer[layer]}
        self.parameters = {block: value for block, value in self.parameters.items() if block in here}
        self.ledger.gathered(decision.resume_step - 1)

    def _roll_back(self, decision: Decision) -> Life:
        assert decision.rollback is not None
        states, self.grid = self.world.disk[decision.rollback]
        self.grid_order = (decision.rollback, 1 << 16)
        self.held.clear()
        self.filling.clear()
        self.reports = {step: report for step, report in self.reports.items() if step <= decision.rollback}
        self.ledger.parameters_step = -1
        self.layout, self.placement = decision.layout, decision.placement
        for block, state in sorted(states.items()):
            if self.id in decision.placement.holders(block):
                yield None
                self.world.tick(self)
                owned = decision.placement.owner[block] == self.id
                self.held[block] = Copy(owned, decision.rollback, state)
                self.world.see.loaded(self.id, block, decision.rollback, state)
        self.parameters = {block: parameter(state) for block, state in states.items()}
        self._take_layers(decision)

    # --------------------------------------------------------------------------------------------------------- reports

    def _step_done(self, evidence: Evidence) -> None:
        self.reports.setdefault(evidence.step, StepDone(self.id, self.epoch, evidence))
        if self.id == min(self.members):
            self._say_durably(self.reports[evidence.step])

    def _say_durably(self, message: StepDone | Shard) -> None:
        self.durable.append(message)
        self.world.to_coordinator(self, message)

    def _write_shard(self, step: int) -> None:
        states = {block: copy.state for block, copy in self.held.items() if copy.owned}
        shard = Shard(self.id, self.epoch, step, self.grid, states)
        self._say_durably(shard)

    def _finished(self) -> FinishedReport:
        states = {block: (copy.owned, copy.version, copy.state) for block, copy in self.held.items()}
        return FinishedReport(self.id, self.epoch, states)
