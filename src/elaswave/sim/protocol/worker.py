"""A simulated worker: the real membership machine and ledger around a toy engine that keeps the real step's order.

The engine is a generator. It yields the set of frames that it waits for, or nothing for a moment of computing;
between two yields nothing can interrupt it. `SimWorker` does what the product's worker does around its engine: it
leaves an epoch when asked to report, installs decisions, and speaks with the coordinator.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from elaswave.protocol.facts import Facts
from elaswave.protocol.ledger import CatchUp, Held, Ledger
from elaswave.protocol.member import Hold, Install, Leave, Member, MemberState, MoveAndReport, ReportAgain
from elaswave.protocol.messages import (
    CoreToWorker,
    Decision,
    Evidence,
    Fenced,
    Installed,
    LayoutChange,
    Registered,
    Report,
)
from elaswave.sim.protocol.certificate import Vote, decode_vote, encode_vote, expected_residency, residency_key
from elaswave.sim.protocol.job import (
    INITIAL_GRID,
    MASK,
    BlockState,
    Job,
    backward,
    forward,
    initial_state,
    model_of,
    next_grid,
    overflows,
    parameter,
    sample,
    update,
)
from elaswave.sim.protocol.messages import (
    ACTIVATION,
    BASE_COPY,
    DELIVERY,
    GRADIENT,
    PARAMETERS,
    PARTIAL_SUM,
    REDUCED,
    VOTE,
    FinishedReport,
    Frame,
    Key,
    PeerLost,
    Settled,
    Shard,
    StepDone,
)
from elaswave.sim.protocol.traffic import Traffic, WorkerPlan, coverage_key, traffic_between, traffic_of
from elaswave.types import Layout, struct_hash

if TYPE_CHECKING:
    from elaswave.sim.protocol.world import World

FIRST_EPOCH = 1

Life = Generator[set[Key] | None, None, None]


class RejectedVote(Exception):
    """A certificate did not hold, although nothing has been corrupted: a bug."""


class Copy:
    """A held copy of a block."""

    __slots__ = ("gradient", "owned", "state", "version")

    def __init__(self, owned: bool, version: int, state: BlockState) -> None:
        self.owned = owned
        self.version = version
        self.state = state
        self.gradient: int | None = None


class SimWorker:
    """One worker.

    Args:
        world: time, network and observers.
        worker: its id.
        job: what is trained.
    """

    member_class = Member
    ledger_class = Ledger

    def __init__(self, world: World, worker: int, job: Job) -> None:
        model = model_of(job)
        self.world = world
        self.id = worker
        self.job = job
        self.dead = False
        self.model = model
        self.layout = model.layout
        self.placement = model.placement
        self.member = self.member_class(worker, FIRST_EPOCH)
        self.ledger = self.ledger_class(worker, 0)
        self.epoch = FIRST_EPOCH
        self.members: frozenset[int] = frozenset(model.layout.workers)
        self.report: Report | None = None
        """The last report, while it waits for the decision."""
        stage = model.layout.stages[model.layout.stage_of(worker)]
        self.layers = (stage.start, stage.stop)
        self.held: dict[int, Copy] = {
            block.id: Copy(model.placement.owner[block.id] == worker, 0, initial_state(block.id))
            for block in model.blocks
            if worker in model.placement.holders(block.id)
        }
        self.offered: LayoutChange | None = None
        """The newest planned change that has come since it looked."""
        self.change: LayoutChange | None = None
        """The planned change that it holds."""
        self.in_force: LayoutChange | None = None
        """The change that came into force with a vote, until the step's GATHER."""
        self.filling: dict[int, Copy] = {}
        """Copies on their way in: they count once a vote has passed with them."""
        self.parameters = {
            block: parameter(initial_state(block))
            for layer in range(*self.layers)
            for block in model.blocks_of_layer[layer]
        }
        self.grid = INITIAL_GRID
        self.grid_order = (0, 0)
        """The vote that the grid follows from."""
        self.step = 0
        self.attempt = 0
        self.inbox: dict[Key, Frame] = {}
        self.later: dict[int, dict[Key, Frame]] = {}
        """Frames of epochs that it has not reached yet."""
        self.life: Life | None = None
        self.waiting: set[Key] = set()
        self.turn = 0
        """Distinguishes the present life's moments from those of earlier ones."""
        self.dead_peers: set[int] = set()
        self.facts = Facts()
        """Said to every coordinator again."""
        self.unacknowledged: list[Any] = []
        """Durable messages that no coordinator has acknowledged."""
        self.reports: list[StepDone] = []
        """Of committed steps, for the case that the worker that should have sent them is lost."""
        self.writing: list[Shard] = []
        """Parts of checkpoints on their way to the disk."""
        self.started = False
        """Whether it has been told where its peers are; until then it can do nothing else."""
        self.before_start: list[CoreToWorker] = []

    # ------------------------------------------------------------------------------------------------ what reaches it

    def registration(self) -> Registered:
        """The first words on a new control connection."""
        waits = self.member.state is MemberState.REPORTED
        return Registered(
            worker=self.id,
            address=str(self.id),
            epoch=self.member.epoch,
            report=self.report if waits else None,
        )

    def on_connected(self) -> None:
        """A new control connection is up: say again what was not acknowledged, and all that holds."""
        for message in tuple(self.unacknowledged):
            self.world.to_coordinator(self, message, durable=True)
        for fact in self.facts.standing():
            self.world.to_coordinator(self, fact)

    def say_durably(self, message: Any) -> None:
        """Says something that is said again until a coordinator has handled it."""
        self.unacknowledged.append(message)
        self.world.to_coordinator(self, message, durable=True)

    def on_acknowledged(self, message: Any) -> None:
        """A coordinator has handled a durable message."""
        self.unacknowledged = [other for other in self.unacknowledged if other is not message]

    def say_fact(self, fact: Any) -> None:
        """Says what has just been noted as a standing fact."""
        self.world.to_coordinator(self, fact)

    def on_settled(self, message: Settled) -> None:
        """A checkpoint is complete, or given up."""
        self.facts.settled(message.step)

    def on_start(self) -> None:
        """Every worker has registered."""
        if not self.started:
            self.started = True
            self._live(self._steps(1, 1))
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
            self._report_link(peer)

    def _report_link(self, peer: int) -> None:
        lost = PeerLost(self.id, self.epoch, peer)
        self.facts.link_lost(peer, lost)
        self.say_fact(lost)

    def on_message(self, message: CoreToWorker) -> None:
        """A message of the coordinator's core."""
        if not self.started and not isinstance(message, Fenced):
            self.before_start.append(message)
            return
        if isinstance(message, LayoutChange):
            if self.offered is None or message.number > self.offered.number:
                self.offered = message
            return
        action = self.member.handle(message)
        if isinstance(action, MoveAndReport):
            self.move(action.epoch, action.members)
        elif isinstance(action, ReportAgain):
            if self.report is not None:
                self.world.to_coordinator(self, self.report)
        elif isinstance(action, Install):
            self.report = None
            self._live(self._install(action.decision))
        elif isinstance(action, Leave):
            self.world.leave(self, action.reason)

    def look_for_change(self) -> None:
        """Between two steps: holds the newest planned change that has come. Within a step nothing may be held that the
        own vote did not tell of."""
        change, self.offered = self.offered, None
        if change is not None and change.number > self.ledger.change:
            action = self.member.handle(change)
            if isinstance(action, Hold):
                self.change = action.change

    def move(self, epoch: int, members: Iterable[int]) -> None:
        """Leaves the old epoch, promises, and reports."""
        self.change = None  # it is void in any other epoch
        self.in_force = None  # the decision knows of it
        self.facts.moved()
        self._stop()
        self.leave_epoch(epoch)
        self.members = frozenset(members)
        self.report = self.ledger.promise(epoch, self.held_copies(), self.layers)
        self.world.to_coordinator(self, self.report)
        for peer in sorted(self.dead_peers & self.members):  # the other links are made again
            self._report_link(peer)

    def held_copies(self) -> Mapping[int, Held]:
        """The copies that it can answer for."""
        return {block: Held(copy.owned, copy.version) for block, copy in self.held.items()}

    def leave_epoch(self, epoch: int) -> None:
        """Moves the data plane: frames of older epochs are nothing any more."""
        self.epoch = epoch
        self.inbox = self.later.pop(epoch, {})
        for old in [other for other in self.later if other < epoch]:
            del self.later[old]

    # ------------------------------------------------------------------------------------------------------ its engine

    def _live(self, life: Life) -> None:
        self._stop()
        self.life = life
        self.go_on()

    def _stop(self) -> None:
        if self.life is not None:
            self.life.close()
            self.life = None
        self.turn += 1
        self.waiting = set()

    def go_on(self) -> None:
        """Runs the engine until it waits again."""
        life = self.life
        if life is None:
            return
        try:
            waits = next(life)
        except StopIteration:
            self.life = None
            return
        if waits is None:
            self.world.pause(self, self.turn)
        else:
            self.waiting = waits

    def on_pause_over(self, turn: int) -> None:
        """The moment of computing is over."""
        if turn == self.turn:
            self.go_on()

    def key(self, kind: int, a: int, b: int, source: int) -> Key:
        """The tag of a frame of the present attempt."""
        return (kind, self.step, self.attempt, a, b, source)

    def send(self, to: int, kind: int, a: int, b: int, value: object) -> None:
        """Sends a frame of the present attempt."""
        frame = Frame(self.epoch, self.step, self.attempt, value)
        self.world.to_worker(self, to, self.key(kind, a, b, self.id), frame)

    def wait(self, keys: Iterable[Key]) -> Life:
        """Waits until frames are here."""
        missing = {key for key in keys if key not in self.inbox}
        if missing:
            yield missing

    def take(self, key: Key) -> Any:
        """Uses a frame that is here."""
        frame = self.inbox.pop(key)
        self.world.see.consumed(self.id, self.epoch, self.step, self.attempt, frame[:3], key[-1] in self.members)
        return frame.value

    def _steps(self, step: int, attempt: int) -> Life:
        self.look_for_change()
        while step <= self.job.steps:
            self.ledger.begin(step, attempt)
            self.step, self.attempt = step, attempt
            self.world.see.began(self.id, self.epoch, step, attempt, self.placement)
            traffic = self.traffic(step)
            plan = traffic.workers[self.id]
            yield from self._run(plan)
            yield from self._reduce(plan)
            self.ledger.prepare()
            yield from self._vote(traffic, plan)
            evidence = self.ledger.evidence
            assert evidence is not None
            if not evidence.commits:
                attempt += 1
                continue
            yield from self.apply(evidence)
            if self.in_force is not None:
                self.switch(self.in_force.layout)
                self.in_force = None
            # The layout and the placement that are in force now decide who needs which parameters.
            yield from self.gather(traffic_between(self.job, self.layout, self.placement, self.placement))
            self._step_done(evidence)
            every = self.job.checkpoint_every
            if (every and step % every == 0) or evidence.checkpoint == step:
                self._write_shard(step)
            step, attempt = step + 1, 1
            self.look_for_change()
        while self.writing:
            yield None
        self.on_done()

    def traffic(self, step: int) -> Traffic:
        """What a step's attempt sends, and the placement that its vote brings into force."""
        return traffic_of(self.job, self.layout, self.placement, step)

    def on_done(self) -> None:
        """All steps are made; it stays until it is told to leave, since others may need what it holds."""
        states = {block: (copy.owned, copy.version, copy.state) for block, copy in self.held.items()}
        finished = FinishedReport(self.id, self.epoch, states)
        self.facts.ended(finished)
        self.say_fact(finished)

    def _run(self, plan: WorkerPlan) -> Life:
        """RUN: the real program; base copies for new followers leave first."""
        step, job = self.step, self.job
        self.filling = {}
        self.sums = dict.fromkeys(plan.blocks, 0)
        self.coverage = 0
        self.losses = [0] * job.num_microbatches
        self.maximum = 0
        for block, follower in self.fills(plan):
            self.send(follower, BASE_COPY, block, 0, self.held[block].state)
        values = [[self.parameters[block] for block in self.model.blocks_of_layer[layer]] for layer in plan.layers]
        for layer, numbers in zip(plan.layers, values):
            for block, value in zip(self.model.blocks_of_layer[layer], numbers):
                self.world.see.used_parameter(self.id, step, block, value)
        inputs: dict[tuple[int, int], int] = {}
        outputs: dict[int, int] = {}
        first = plan.layers.start
        for action in plan.program:
            microbatch = action.microbatch
            hop = plan.hops[microbatch]
            yield None
            if action.kind == "F":
                if hop.before is None:
                    x = sample(step, microbatch)
                else:
                    key = self.key(ACTIVATION, microbatch, 0, hop.before)
                    yield from self.wait((key,))
                    x = self.take(key)
                for layer in hop.layers:
                    inputs[microbatch, layer] = x
                    x = forward(layer, step, microbatch, values[layer - first], x)
                if hop.after is None:
                    self.losses[microbatch] = outputs[microbatch] = x
                else:
                    self.send(hop.after, ACTIVATION, microbatch, 0, x)
                continue
            if hop.after is None:
                dy = outputs[microbatch]
            else:
                key = self.key(GRADIENT, microbatch, 0, hop.after)
                yield from self.wait((key,))
                dy = self.take(key)
            for layer in reversed(hop.layers):
                dy, gradients = backward(job, step, values[layer - first], inputs[microbatch, layer], dy)
                for block, gradient in zip(self.model.blocks_of_layer[layer], gradients):
                    self.sums[block] += gradient >> self.grid
                    if gradient > self.maximum:
                        self.maximum = gradient
                self.coverage += coverage_key(layer, microbatch)
                self.world.see.computed(self.id, self.epoch, step, self.attempt, layer, microbatch)
            if hop.before is not None:
                self.send(hop.before, GRADIENT, microbatch, 0, dy)

    def fills(self, plan: WorkerPlan) -> Iterable[tuple[int, int]]:
        """Base copies to send: (block, new follower)."""
        return plan.fills_out

    def _reduce(self, plan: WorkerPlan) -> Life:
        """REDUCE: partial sums to owners, gradients to followers, and the base copies that were under way."""
        for layer, owner, blocks in plan.partials_out:
            self.send(owner, PARTIAL_SUM, layer, 0, [self.sums[block] for block in blocks])
        totals = {block: self.sums.get(block, 0) for block in plan.owned}
        for layer, peer, blocks in plan.partials_in:
            key = self.key(PARTIAL_SUM, layer, 0, peer)
            yield from self.wait((key,))
            for block, part in zip(blocks, self.take(key)):
                totals[block] += part
        for block, total in totals.items():
            self.held[block].gradient = total << self.grid
        for layer, follower, blocks in plan.reduced_out:
            self.send(follower, REDUCED, layer, 0, [self.held[block].gradient for block in blocks])
        for block, owner in plan.fills_in:
            key = self.key(BASE_COPY, block, 0, owner)
            yield from self.wait((key,))
            self.filling[block] = Copy(False, self.step - 1, self.take(key))
        for layer, owner, blocks in plan.reduced_in:
            key = self.key(REDUCED, layer, 0, owner)
            yield from self.wait((key,))
            for block, gradient in zip(blocks, self.take(key)):
                copy = self.held.get(block) or self.filling[block]
                copy.gradient = gradient

    def certificate(self, traffic: Traffic, plan: WorkerPlan) -> Vote:
        """What this worker brings to the vote."""
        residency = next_residency = agreement = norm = 0
        for block, copy in self.held.items():
            residency += residency_key(block, copy.owned, self.id, copy.version)
            if block not in plan.drops:
                next_residency += residency_key(block, copy.owned, self.id, copy.version)
            if copy.owned:
                assert copy.gradient is not None
                norm += copy.gradient
        for block, copy in self.filling.items():
            next_residency += residency_key(block, False, self.id, copy.version)
        for block, weight in plan.weights:
            copy = self.held.get(block) or self.filling[block]
            agreement += weight * hash((block, self.step, self.attempt, copy.gradient, copy.state))
        return Vote(
            1,
            self.coverage & MASK,
            residency & MASK,
            next_residency & MASK,
            agreement & MASK,
            norm & MASK,
            tuple(self.losses),
            traffic.layout_hash,
            -traffic.layout_hash,
            *self.held_change(),
            self.maximum,
            self.request(),
        )

    def request(self) -> int:
        """Whether it asks for a durable checkpoint: the lowest member does when one is due."""
        is_due = 0 < self.job.ask_step <= self.step and self.ledger.checkpoint < self.job.ask_step
        return int(is_due and self.id == min(self.layout.workers))

    def held_change(self) -> tuple[int, int]:
        """What it says of planned changes in its vote: the hash of the one that it holds, and minus that."""
        held = 0 if self.change is None else hash((self.change.number, struct_hash(self.change.layout))) & MASK >> 1
        return held, -held

    def judge(self, vote: Vote, traffic: Traffic) -> bool:
        """Whether a merged vote commits the step.

        Raises:
            RejectedVote: the certificate does not hold.
        """
        checks = {
            "voters": vote.num_voters == len(self.layout.workers),
            "coverage": vote.coverage == traffic.coverage & MASK,
            "residency": vote.residency == expected_residency(self.placement, self.step - 1),
            "next residency": vote.next_residency == expected_residency(traffic.voting, self.step - 1),
            "agreement": vote.agreement == 0,
            "layout": vote.layout == -vote.negative_layout == traffic.layout_hash,
        }
        if not all(checks.values()):
            failed = ", ".join(name for name, passed in checks.items() if not passed)
            raise RejectedVote(f"worker {self.id}: the vote on step {self.step} fails in {failed}")
        return not overflows(vote.maximum, self.grid)

    def _vote(self, traffic: Traffic, plan: WorkerPlan) -> Life:
        """VOTE: recursive doubling; whoever has everything has learned the result."""
        yield None
        vote = self.certificate(traffic, plan)
        if plan.helper is not None:
            self.send(plan.helper, VOTE, 0, 0, vote)
            key = self.key(VOTE, 1, 0, plan.helper)
            yield from self.wait((key,))
            vote = self.take(key)
        else:
            if plan.lender is not None:
                key = self.key(VOTE, 0, 0, plan.lender)
                yield from self.wait((key,))
                vote = vote.merge(self.take(key))
            for turn, partner in enumerate(plan.partners):
                self.send(partner, VOTE, 2 + turn, 0, vote)
                key = self.key(VOTE, 2 + turn, 0, partner)
                yield from self.wait((key,))
                vote = vote.merge(self.take(key))
        if plan.lender is not None:
            self.send(plan.lender, VOTE, 1, 0, vote)
        # Learning is one moment: what is known of the vote and what follows from it change together.
        self.learn(vote, self.judge(vote, traffic), traffic, plan)

    def learn(self, vote: Vote, commits: bool, traffic: Traffic, plan: WorkerPlan) -> None:
        """The own vote is complete."""
        if commits and self.is_adopted(vote):
            self.in_force, self.change = self.change, None
        number = None if self.in_force is None else self.in_force.number
        asks = commits and vote.request == 1
        evidence = self.ledger.learn(encode_vote(vote), commits=commits, change=number, asks_checkpoint=asks)
        self._take_grid(evidence)
        self.world.see.learned(self.id, self.epoch, self.step, self.attempt, commits, evidence.vector, self.grid)
        if commits:
            for block in plan.drops:
                self.drop(block)
            for block, copy in self.filling.items():
                self.held[block] = copy
                self.world.see.loaded(self.id, block, copy.version, copy.state)
            self.filling = {}
            self.placement = traffic.voting
            self.world.see.placed(self.id, self.placement)

    def is_adopted(self, vote: Vote) -> bool:
        """Whether the change that it holds comes into force with a vote."""
        return vote.is_changed_by_all

    def switch(self, layout: Layout) -> None:
        """The next layout is in force: makes room for its layers; what this worker does not hold comes with GATHER."""
        stage = layout.stages[layout.stage_of(self.id)]
        self.layout, self.layers = layout, (stage.start, stage.stop)
        self.world.see.switched(self.id, self.epoch, self.step, layout)
        here = [block for layer in range(*self.layers) for block in self.model.blocks_of_layer[layer]]
        held = {block: parameter(self.held[block].state) for block in here if block in self.held}
        self.parameters = {block: self.parameters[block] for block in here if block in self.parameters} | held

    def drop(self, block: int) -> None:
        """Gives up a copy."""
        del self.held[block]
        self.world.see.dropped(self.id, block)

    def _take_grid(self, evidence: Evidence) -> None:
        if evidence.order > self.grid_order:
            self.grid = next_grid(decode_vote(evidence.vector).maximum)
            self.grid_order = evidence.order

    def apply(self, evidence: Evidence) -> Life:
        """APPLY: every copy that is still at the version before takes the step; interruptible between blocks."""
        norm = decode_vote(evidence.vector).norm
        for block, copy in sorted(self.held.items()):
            if copy.version == evidence.step - 1:
                yield None
                self.world.tick(self)
                self.apply_block(block, copy, evidence.step, norm)
        self._publish()

    def apply_block(self, block: int, copy: Copy, step: int, norm: int) -> None:
        """Updates one copy."""
        assert copy.gradient is not None, f"worker {self.id} has no gradient of block {block} for step {step}"
        copy.state = update(copy.state, copy.gradient, norm, step)
        copy.gradient, copy.version = None, step
        self.world.see.applied(self.id, block, step, copy.state)

    def _publish(self) -> None:
        for block, copy in self.held.items():
            if block in self.parameters:
                self.parameters[block] = parameter(copy.state)

    def gather(self, traffic: Traffic) -> Life:
        """GATHER: new parameters to whoever does not hold the block."""
        plan = traffic.workers[self.id]
        for layer, peer, blocks in plan.parameters_out:
            self.send(peer, PARAMETERS, layer, 0, [parameter(self.held[block].state) for block in blocks])
        for layer, owner, blocks in plan.parameters_in:
            key = self.key(PARAMETERS, layer, 0, owner)
            yield from self.wait((key,))
            assert self.ledger.may_write_parameters(self.step)
            for block, value in zip(blocks, self.take(key)):
                self.parameters[block] = value
        self.ledger.gathered(self.step)

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
                self._take_grid(evidence)
            if evidence is not None and catch_up is CatchUp.APPLY:
                yield from self.catch_up(evidence)
            yield from self._take_roles(decision)
        self.filling = {}
        self.world.see.installed(self.id, decision, [copy.version for copy in self.held.values()], self.grid)
        self.say_durably(Installed(worker=self.id, epoch=self.epoch, edit_s=0, promote_s=0, critical_bytes=0))
        if decision.evidence is not None and decision.evidence.commits and decision.rollback is None:
            self._note_step(decision.evidence)
        if self.id == min(self.members):
            for report in self.reports:
                if decision.published < report.evidence.step < decision.resume_step:
                    self.say_durably(report)
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
        rollback = decision.rollback
        self.facts.rolled_back(rollback)
        self.reports = [report for report in self.reports if report.evidence.step <= rollback]
        seed = {block.id: initial_state(block.id) for block in self.model.blocks}, INITIAL_GRID
        states, self.grid = self.world.disk[rollback] if rollback else seed
        self.grid_order = (decision.rollback, 1 << 16)
        self.held.clear()
        self.filling.clear()
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

    def _note_step(self, evidence: Evidence) -> StepDone:
        """Keeps the report of a committed step."""
        done = StepDone(self.id, self.epoch, evidence)
        if not self.reports or self.reports[-1].evidence.step < evidence.step:
            self.reports.append(done)
        return done

    def _step_done(self, evidence: Evidence) -> None:
        """The member with the lowest id reports a committed step."""
        done = self._note_step(evidence)
        if self.id == min(self.members):
            self.say_durably(done)

    def _write_shard(self, step: int) -> None:
        """Begins to write the owned blocks, in the background: training goes on, and the epoch may rise."""
        states = {block: copy.state for block, copy in self.held.items() if copy.owned}
        shard = Shard(self.id, self.epoch, step, self.grid, states)
        self.writing.append(shard)
        self.world.after(2 * self.world.delay(), self, self._on_written, shard)

    def _on_written(self, shard: Shard) -> None:
        self.world.tick(self)
        self.writing.remove(shard)
        self.world.see.wrote(self.id, shard.step, shard.states.keys())
        self.facts.part(shard.step, shard.epoch, shard)
        self.say_fact(shard)
