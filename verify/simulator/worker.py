"""A simulated worker: the real worker machine over a toy engine, driven by virtual time.

What the product's `elaswave.worker.process` does with threads and sockets happens here in events; all that decides an
order is the machine's.
"""

from collections.abc import Mapping
from typing import Any

from elaswave.blocks.placement import ReplicaRole, roles_of
from elaswave.errors import InterruptedWaitError
from elaswave.protocol.coordinator.decisions import with_members
from elaswave.protocol.events import WorkerFailed
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.messages import (
    FIRST_GENERATION,
    PROTOCOL_VERSION,
    CoreToWorker,
    Decision,
    Evidence,
    FencedOff,
    InForce,
    Installed,
    Joining,
    LayoutChange,
    Prepare,
    Registered,
)
from elaswave.protocol.step.activity import RECOVER, START, WorkerActivity
from elaswave.protocol.step.ballot import Request, VoteOutcome
from elaswave.protocol.step.engine import Committed, Key, Pause, Phase, Ports, StepObserver
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.protocol.step.replayed_state import ReplayedState
from verify.simulator.engine import ToyCopy, ToyEngine
from verify.simulator.job import Job, initial_state, model_of, parameter
from verify.simulator.links import SimLinks, closed
from verify.simulator.members import UNIT_S
from verify.simulator.messages import (
    CheckpointSettled,
    FinishedReport,
    Notice,
    PeerLost,
    Shard,
    SimFrame,
    SimReady,
    StepDone,
    StopTold,
)
from verify.simulator.store import ActorDead
from verify.simulator.world import World

SimMachine = WorkerMachine[ToyCopy]


class RejectedVote(Exception):
    """A certificate did not hold, although nothing has been corrupted: a bug."""


class SimWorker:
    """One worker process.

    Args:
        world: time, network and observers.
        worker: its id.
        job: what is trained.
        joins: whether it joins a job that runs.
        machine_class, replayed_state_class: replaced to plant bugs.
    """

    def __init__(
        self,
        world: World,
        worker: int,
        job: Job,
        joins: bool = False,
        machine_class: type[SimMachine] = WorkerMachine,
        replayed_state_class: type[ReplayedState] = ReplayedState,
    ) -> None:
        model = model_of(job)
        domains = {**model.layout.domain_of, worker: job.host_of_joiner(worker)} if joins else {}
        layout = with_members(model.layout, (*model.layout.workers, worker), domains)
        self.world = world
        self.id = worker
        self.job = job
        self.dead = False
        self.joins = joins
        self._doing: tuple[Any, int] = ((), 0)
        """What its last heartbeat told, and since when it does that."""
        self.asks_end = False
        """Whether it was told to ask for the end of the job."""
        self._goes_at: int | None = None
        """When its machine is taken away, if it has had a notice."""
        self.store_position: StorePosition | None = None
        """The newest that it has heard of the history."""
        self.model = model
        self.unacknowledged: list[Any] = []
        """Durable messages that no coordinator has acknowledged."""
        self.links = SimLinks(self)
        self.replayed_state = replayed_state_class()
        self._disk = _SimDisk(self)
        self._watch = _Watch(self)
        self._waiting: set[Key] = set()
        self._waits_for_disk = False
        self._is_computing = False
        """Whether it is in a moment, and goes on by itself."""
        self._layers_left: int | None = None
        """Until it notices that it is asked to report."""
        self._right_in: int | None = None
        """Of a processor that is wrong: actions after which that is found."""
        self._failure: WorkerFailed | None = None
        """Its last words; it does nothing more, and ends once they are heard."""
        self._turn = 0
        """Distinguishes the present life's moments from those of earlier ones."""
        copies = {
            block: ToyCopy(model.blocks[block], role, initial_state(block))
            for block, role in roles_of(worker, model.placement, model.blocks).items()
        }
        engine = ToyEngine(self)
        self.machine: SimMachine = machine_class(
            Ports(worker, model.terms, engine, self.links, self._watch, _SimOutbox(self), self._disk),
            self.replayed_state,
            InForce(layout, model.placement),
            copies,
            model.progress,
            joins=joins,
        )
        self.engine = engine
        engine.written_all(
            {
                block: parameter(initial_state(block))
                for layer in engine.layers
                for block in model.blocks_of_layer[layer]
            },
            copies.values(),
        )
        self._watch.known = set(copies)

    @property
    def is_voting(self) -> bool:
        """Whether it makes its ballot."""
        return self._watch.phase == "vote"

    def position(self) -> WorkerActivity:
        """What its heartbeat tells."""
        machine, now = self.machine, self.world.now
        peers = tuple(sorted({key.peer for key in self._waiting})) if self._waiting else ()
        place = machine.member.generation, machine.step, machine.attempt
        doing = (*place, self._watch.label, self._is_computing, peers)
        if self._doing[0] != doing:
            self._doing = doing, now
        return WorkerActivity(*doing, since_s=(now - self._doing[1]) * UNIT_S, moved_bytes=self.links.num_frames)

    @property
    def generation(self) -> int:
        """The generation of its data plane."""
        return self.links.generation

    # ------------------------------------------------------------------------------------------------ what reaches it

    def slip(self, place: int) -> None:
        """The next update is written wrongly, and its seal is of the wrong value.

        Args:
            place: decides which copy, and whether its master or its momentum.
        """
        self.engine.slips = place

    def flip(self, place: int) -> None:
        """A bit flips. A copy that is about to be updated is left alone: between a worker's ballot and its update only
        the next vote can find it, which then does not know who is right.

        Args:
            place: decides where.
        """
        places = self.engine.places(copies=self._watch.phase in ("run", "reduce", "gather"))
        if places:
            what, index = places[place % len(places)]
            self.world.say(f"*** a bit of {what} {index} flips on worker {self.id}")
            self.engine.flip(what, index)
            if what == "copy":
                self.world.see.flipped(self.id, index)

    def registration(self) -> Registered | Joining:
        """The first words on a new control connection."""
        if self.joins and self.machine.member.generation == FIRST_GENERATION:
            return Joining(
                worker=self.id,
                address=str(self.id),
                protocol=PROTOCOL_VERSION,
                libraries="",
                environment="",
                config_hash=1,
                model_hash=1,
                data_hash=1,
                domain=self.job.host_of_joiner(self.id),
                determinism_hashes={},
            )
        return self.machine.registration(str(self.id))

    def on_connected(self) -> None:
        """A new control connection is up: say again what was not acknowledged, and all that holds."""
        for message in tuple(self.unacknowledged):
            self.world.to_coordinator(self, message, durable=True)
        for fact in self.replayed_state.standing():
            self.world.to_coordinator(self, fact)
        self._say_notice()

    def notice(self, left: int) -> None:
        """Its machine is taken away after so long."""
        self._goes_at = self.world.now + left
        self._say_notice()

    def _say_notice(self) -> None:
        if self._goes_at is not None and self._failure is None:
            self.world.to_coordinator(self, Notice(self.id, max(0, self._goes_at - self.world.now) * UNIT_S))

    def on_stop_told(self, message: StopTold) -> None:
        """It asks for the end of the job in its ballots from now on."""
        self.asks_end = True

    def on_acknowledged(self, message: Any) -> None:
        """A coordinator has handled a durable message."""
        self.unacknowledged = [other for other in self.unacknowledged if other is not message]
        if message is self._failure:
            self.world.leave(self, self._failure.summary)

    def on_settled(self, message: CheckpointSettled) -> None:
        """A checkpoint is complete, or given up."""
        self.replayed_state.settled(message.step)

    def on_start(self) -> None:
        """Every worker has registered."""
        if not self.machine.is_started:
            self.machine.start()
            self._live()

    def on_message(self, message: CoreToWorker) -> None:
        """A message of the coordinator's core."""
        if self._failure is not None:
            if isinstance(message, FencedOff):
                self.world.leave(self, message.reason)
            return
        is_urgent = isinstance(message, Prepare) and message.generation > self.machine.member.generation
        if is_urgent and self._is_computing and self.world.conditions.mid_action:
            self._run_into_it()
        before = self.machine.num_lives
        if (
            isinstance(message, LayoutChange)
            and message.generation == self.machine.member.generation == self.generation
        ):
            self.world.see.offered(self.id, message.generation, self.machine.step, message.number, message.term)
        self.machine.on_message(message)
        if self.machine.num_lives != before:
            self._live()

    def _run_into_it(self) -> None:
        """It notices the message in the midst of the action that it is about to begin, or after it."""
        self._layers_left = self.world.conditions.mid_action
        try:
            wait = self.machine.resume()
            while isinstance(wait, tuple) and not self.links.missing(wait):
                wait = self.machine.resume()
        except InterruptedWaitError:
            self.machine.abandon()
        finally:
            self._layers_left = None

    def between_layers(self) -> None:
        """A layer of an action has run: here it may notice that it is asked to report.

        Raises:
            InterruptedWaitError: it does.
        """
        if self._layers_left is not None:
            self._layers_left -= 1
            if self._layers_left == 0:
                raise InterruptedWaitError("the coordinator asks for a report")

    def spoil(self, num_actions: int) -> None:
        """Its processor is wrong from now on, and that is found after so many actions, or before its vote."""
        self._right_in = num_actions

    def handed_on(self, value: int) -> int:
        """What an action's output is on the way to the next worker; a spot check looks before it leaves."""
        if self._right_in is None:
            return value
        if self._right_in == 0:
            self.check()
        self._right_in -= 1
        return value + 1

    def check(self) -> None:
        """Looks whether the processor is right.

        Raises:
            ActorDead: it is not; nothing more is done here.
        """
        if self._right_in is None:
            return
        self._failure = WorkerFailed(self.id, f"worker {self.id}", "a spot check has failed", is_wrong=True)
        self._turn += 1
        self._waiting = set()
        self.unacknowledged.append(self._failure)
        self.world.to_coordinator(self, self._failure, durable=True)
        raise ActorDead

    def on_frame(self, key: Key, frame: SimFrame) -> None:
        """A frame arrives; goes on if it was the last one that was missing."""
        if self._failure is not None:
            return
        if self.links.arrive(key, frame) and key in self._waiting:
            self._waiting.discard(key)
            if not self._waiting:
                self.go_on()

    def on_link_closed(self, peer: int, *, dead: bool) -> None:
        """The link to a peer has closed; it notices if it waits for frames, and the peer has sent or got some of this
        generation; or else when it comes to do so."""
        if dead:
            self.links.dead.add(peer)
        self.links.close(peer)
        if self._failure is not None:
            return
        if self._waiting and (self.links.broken is not None or any(key.peer == peer for key in self._waiting)):
            self._lose(peer)
        else:
            self.machine.look_at_sent()

    def _lose(self, peer: int) -> None:
        self.machine.abandon(peer, closed(peer))
        self._live()

    # ---------------------------------------------------------------------------------------------------- its driving

    def _live(self) -> None:
        """The machine does something else now than what it waited in."""
        self._turn += 1
        self._is_computing = False
        self._waiting = set()
        self._waits_for_disk = False
        self.go_on()

    def go_on(self) -> None:
        """Lets the machine go on until it has to wait."""
        while (wait := self.machine.resume()) is not None:
            if wait is Pause.MOMENT:
                self._is_computing = True
                self.world.pause(self, self._turn)
                return
            if wait is Pause.DISK:
                if self._disk.is_busy:
                    self._waits_for_disk = True
                    return
            elif wait is Pause.SENT:
                if self.links.broken is not None:
                    self._lose(self.links.broken[0])
                    return
            elif missing := self.links.missing(wait):
                lost = [key.peer for key in missing if key.peer in self.links.closed]
                if self.links.broken is not None:
                    lost.append(self.links.broken[0])
                if lost:
                    self._lose(lost[0])
                    return
                self._waiting = missing
                return
        self.machine.look_at_sent()
        if self.machine.fenced_off is not None and not self.dead:
            self.world.leave(self, self.machine.fenced_off)

    def on_pause_over(self, turn: int) -> None:
        """The moment is over."""
        if turn == self._turn:
            self._is_computing = False
            self.go_on()

    def on_written(self) -> None:
        """Its part of a checkpoint is on the disk."""
        if self._waits_for_disk:
            self._waits_for_disk = False
            self.go_on()


class _SimOutbox:
    """See `elaswave.protocol.step.engine.Outbox`."""

    def __init__(self, host: SimWorker) -> None:
        self._host = host

    def send(self, message: Any, *, durable: bool = False) -> None:
        if durable:
            self._host.unacknowledged.append(message)
        self._host.world.to_coordinator(self._host, message, durable=durable)

    def request(self) -> Request:
        stop_step = self._host.job.stop_step
        is_due = self._host.asks_end or 0 < stop_step <= self._host.machine.step
        return Request.STOP if is_due else Request.NONE

    def ready(self) -> SimReady:
        return SimReady(self._host.id)

    def link_lost(self, peer: int, detail: str) -> PeerLost:
        return PeerLost(self._host.id, self._host.machine.member.generation, peer)

    def committed(self, committed: Committed) -> StepDone:
        if self._host.world.agents is not None:
            self._host.world.agents.committed(self._host.id)
        return StepDone(self._host.id, self._host.machine.member.generation, committed.evidence)

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float]) -> object:
        raise AssertionError("the toy job has no evaluations")

    def installed(self, received_bytes: int) -> Installed:
        generation = self._host.machine.member.generation
        return Installed(
            worker=self._host.id, generation=generation, edit_s=0, promote_s=0, critical_bytes=received_bytes
        )

    def finished(self, stopped: bool) -> FinishedReport:
        machine, held = self._host.machine, self._host.machine.copies
        states = {
            copy.block.id: (copy.role is ReplicaRole.OWNER, version, copy.state)
            for copy, version in zip(held.all, held.versions, strict=True)
        }
        return FinishedReport(self._host.id, machine.member.generation, machine.last_step, stopped, states)


class _SimDisk:
    """See `elaswave.protocol.step.engine.Disk`. A checkpoint is due as the job's ``ask_step`` says."""

    def __init__(self, host: SimWorker) -> None:
        self.is_busy = False
        self._host = host

    def is_due(self) -> bool:
        machine, ask_step = self._host.machine, self._host.job.ask_step
        return 0 < ask_step <= machine.step and machine.ledger.checkpoint < ask_step

    def restart_clock(self) -> None:
        pass

    def write(self, step: int) -> None:
        host, machine = self._host, self._host.machine
        states = {copy.block.id: copy.state for copy in machine.copies.owned}
        shard = Shard(host.id, machine.member.generation, step, machine.progress.grids.exponents, states)
        self.is_busy = True
        host.world.after(2 * host.world.delay(), host, self._on_written, shard)

    def _on_written(self, shard: Shard) -> None:
        host = self._host
        host.world.tick(host)
        self.is_busy = False
        host.world.see.wrote(host.id, shard.step, shard.states.keys())
        host.machine.wrote(shard.step, shard.generation, shard)
        host.on_written()


class _Watch(StepObserver):
    """Tells the world's observers what the machine does."""

    def __init__(self, host: SimWorker) -> None:
        self.phase = ""
        """Of the step in hand."""
        self.label = START
        """What a heartbeat says that it does."""
        self.known: set[int] = set()
        """Blocks of which the observers know that they are held here."""
        self._host = host
        self._see = host.world.see

    def began(self) -> None:
        machine = self._host.machine
        worker, generation = self._host.id, self._host.links.generation
        self._tell_new_copies()
        self._see.began(worker, generation, machine.step, machine.attempt, machine.placement)
        changes = (machine.planned.held, machine.planned.moving, machine.planned.coming)
        newest = max([machine.ledger.change, *(change.number for change in changes if change is not None)])
        self._see.holds(worker, generation, machine.step, newest, machine.member.term)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.label = "F" if phase == "run" else phase

    def moved(self) -> None:
        self.phase = ""
        self.label = RECOVER

    def doing(self, label: str, *, computing: bool) -> None:
        self.label = label

    def point(self, phase: Phase) -> None:
        if phase == "apply":
            self._host.world.tick(self._host)

    def learned(self, evidence: Evidence) -> None:
        host, machine = self._host, self._host.machine
        assert machine.steps.known_vote is not None
        verdict = machine.steps.known_vote[2]
        if verdict.outcome is VoteOutcome.REJECT and not host.world.has_flipped:
            raise RejectedVote(
                f"worker {host.id}: the vote on step {machine.step} fails in {', '.join(verdict.failed)}"
            )
        self._see.learned(
            host.id,
            host.links.generation,
            machine.step,
            machine.attempt,
            evidence.commits,
            evidence.vector,
            machine.progress.grids.exponents,
        )
        if machine.planned.moving is not None:
            self._see.adopted(host.id)
        if evidence.commits:
            self._tell_new_copies()
            self._see.placed(host.id, machine.placement)

    def switched(self) -> None:
        machine = self._host.machine
        self._see.switched(self._host.id, self._host.links.generation, machine.step, machine.layout, machine.placement)
        self.known = set(machine.copies)
        self._see.placed(self._host.id, machine.placement)

    def installed(self, decision: Decision) -> None:
        machine = self._host.machine
        self._tell_new_copies()
        self._see.installed(self._host.id, decision, machine.copies.versions, machine.progress.grids.exponents)

    def _tell_new_copies(self) -> None:
        """Of copies that have begun to count: with a commit or, before the next attempt, with a refused vote (K7)."""
        copies = self._host.machine.copies
        for copy, version in zip(copies.all, copies.versions, strict=True):
            if copy.block.id not in self.known:
                self._see.loaded(self._host.id, copy.block.id, version, copy.state)
        self.known = set(copies)
