"""Virtual time, the network and the faults of one simulated run. Knows nothing of the protocol.

Everything happens as an event of a queue, at a whole number of time units; equal times in the order of their making.
Frames between two processes keep their order; between different pairs anything may overtake anything.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.leadership.store_position import StorePosition, newest_position
from elaswave.protocol.membership.effects import StepPublished
from elaswave.protocol.messages import CoreToWorker, Decision, Evidence, Joining, Registered
from elaswave.protocol.step.activity import WorkerActivity
from elaswave.protocol.step.engine import Key
from verify.simulator.agents import Agents
from verify.simulator.candidates import Candidates, WriteLease
from verify.simulator.job import BlockState, Exponents, Job, losses_of, model_of
from verify.simulator.messages import CheckpointSettled, SimFrame, StopTold
from verify.simulator.observer import Observer, together
from verify.simulator.schedule import COORDINATOR, HOST, Schedule, ScheduledFault
from verify.simulator.store import ActorDead, SimStore

MAX_TIME = 20_000
MAX_INSTANTS = 20_000
_NUM_DELAYS = 509
_DELAYS_AT_ONCE = 64


class WorkerActor(Protocol):
    """What the world calls of a simulated worker."""

    id: int
    dead: bool

    @property
    def generation(self) -> int:
        """Of its data plane."""

    def on_start(self) -> None:
        """It is told to start."""

    def on_frame(self, key: Key, frame: SimFrame) -> None:
        """A frame of another worker has arrived."""

    def on_message(self, message: CoreToWorker) -> None:
        """A message of a coordinator's machine has arrived."""

    store_position: StorePosition | None
    """Where it has heard that the history stands."""

    def on_settled(self, message: CheckpointSettled) -> None:
        """A checkpoint is durable or given up."""

    def on_stop_told(self, message: StopTold) -> None:
        """It is to ask for the end of the job."""

    def position(self) -> WorkerActivity:
        """What its heartbeat tells."""

    def notice(self, left: int) -> None:
        """Its machine is taken away after so long."""

    def on_acknowledged(self, message: Any) -> None:
        """A message that it has sent was handled."""

    def on_connected(self) -> None:
        """It has a new control connection."""

    def on_link_closed(self, peer: int, *, dead: bool) -> None:
        """Its link to a peer has closed."""

    def on_pause_over(self, turn: int) -> None:
        """It has computed for a moment."""

    def spoil(self, num_actions: int) -> None:
        """Its processor is wrong from now on."""

    def flip(self, place: int) -> None:
        """A bit flips in its memory."""

    def slip(self, place: int) -> None:
        """Its next update is written wrongly."""

    def registration(self) -> Registered | Joining:
        """Its first words on a new connection."""


class CoordinatorActor(Protocol):
    """What the world calls of a simulated coordinator."""

    id: int
    dead: bool
    core: Coordinator
    write_lease: "WriteLease | None"

    def begin(self) -> None:
        """It starts."""

    def on_registered(
        self, link: "ControlLink", message: Registered | Joining, store_position: StorePosition | None
    ) -> None:
        """A worker has a new control connection."""

    def on_message(self, link: "ControlLink", message: Any) -> None:
        """A message of a worker has arrived."""

    def on_committed(self, step: int) -> None:
        """A checkpoint that it has asked for is durable."""

    def on_link_closed(self, worker: int) -> None:
        """A control connection has closed."""

    def on_exit(self, worker: int) -> None:
        """A worker's process has ended."""

    def hold_for_lost(self, worker: int, detected_by: str) -> None:
        """A detector holds a worker for lost."""


class ControlLink:
    """A control connection between a worker and a coordinator."""

    __slots__ = ("coordinator", "open", "worker")

    def __init__(self, worker: WorkerActor, coordinator: CoordinatorActor) -> None:
        self.worker = worker
        self.coordinator = coordinator
        self.open = True


class World:
    """One simulated run.

    Args:
        schedule: job, conditions and faults.
        observers: are told everything.
        worker_class, coordinator_class: of the processes.
        store: what coordinators persist.
        make_agents: makes the agents of nodes, if the conditions ask for them.
        make_candidates: makes candidates with a store on other machines, if the conditions ask for them.
        log: takes one line per event, for people; None for silence.
    """

    def __init__(
        self,
        schedule: Schedule,
        observers: Sequence[Observer],
        *,
        worker_class: "Callable[[World, int, Job, bool], WorkerActor]",
        coordinator_class: "Callable[[World], CoordinatorActor]",
        store: SimStore,
        make_candidates: "Callable[[World], Candidates]",
        make_agents: "Callable[[World], Agents]",
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.job = schedule.job
        self.conditions = schedule.conditions
        self.store = store
        self.disk: dict[int, tuple[dict[int, BlockState], Exponents]] = {}
        """Durable checkpoints: step -> (blocks, grids)."""
        self._newest_decision: Decision | None = None
        self.written: set[int] = set()
        """Steps of those, as the journal has it."""
        self.given_up: set[int] = set()
        """Steps whose durable checkpoints were given up, as the journal has it."""
        self.published_step = 0
        """The newest step whose losses are in the journal."""
        self.now = 0
        self.instant = 0
        self.outcome = ""
        self.reason = ""
        self.fired: list[ScheduledFault] = []
        self.has_flipped = False
        """Whether a bit has flipped in a worker's memory: then votes may be refused."""
        self.suspected: set[int] = set()
        """Workers that some detector has held for lost."""
        self.overdue: set[int] = set()
        """Workers that were lost because they could not leave in time."""
        self.is_stopping = False
        """Whether the end of the job was asked for, since too few workers would stay."""
        self._log = log
        self._queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._last: dict[tuple[int, int], int] = {}
        """(from, to) -> time at which the newest frame arrives."""
        self._closed_data: dict[tuple[int, int], int] = {}
        """Pair of workers -> newest generation in which their link has closed."""
        self._held_until: dict[tuple[int, int], int] = {}
        """Pair of workers -> time until which their frames are held back."""
        self._isolated_until: dict[int, int] = {}
        self.instants: list[tuple[int, int]] | None = None
        """Time and actor (-1 for coordinators) of each instant, if a list is put here."""
        self._faults = sorted(schedule.faults, key=lambda fault: fault.instant, reverse=True)
        self._next_fault = self._faults[-1].instant if self._faults else -1
        self.has_notices = any(fault.kind == "notice" for fault in schedule.faults)
        self.delay = self._circle_of_delays().__next__
        """Gives the next frame's time under way."""
        self.see = together(observers)
        self._coordinator_class = coordinator_class
        self._worker_class = worker_class
        self.workers = {
            worker: worker_class(self, worker, self.job, False) for worker in model_of(self.job).layout.workers
        }
        self._unborn = set(self.workers) if self.conditions.agents else set[int]()
        """Workers of the beginning that no agent has started yet."""
        self.links: dict[int, ControlLink] = {}
        """The newest control connection of each worker."""
        self._hung_until: dict[Any, int] = {}
        self._backlog: dict[Any, list[tuple[Callable[..., object], tuple[Any, ...]]]] = {}
        self._waits: set[Any] = set()
        """Processes that do nothing until the store has answered."""
        self.coordinators: list[CoordinatorActor] = []
        self.candidates = make_candidates(self) if self.conditions.candidates else None
        self.agents = make_agents(self) if self.conditions.agents else None

    def _circle_of_delays(self) -> Iterator[int]:
        """A circle of delays; drawn as they are asked for, since most runs end before it closes."""
        seed = self.conditions.seed
        choices, draws = (1, 1, 1, 2, 2, 3, 5, 9) if seed else (1,), random.Random(seed)
        delays: list[int] = []
        while len(delays) < _NUM_DELAYS:
            drawn = draws.choices(choices, k=min(_DELAYS_AT_ONCE, _NUM_DELAYS - len(delays)))
            delays += drawn
            yield from drawn
        while True:
            yield from delays

    def lost(self) -> list[int]:
        """Workers that were struck and then held for lost; while coordinators are struck it can be any worker."""
        struck = self.overdue.union(*(fault.workers for fault in self.fired))
        if any(not fault.workers for fault in self.fired):
            return sorted(self.suspected)
        return sorted(self.suspected & struck)

    def say(self, text: str) -> None:
        """A line of the log."""
        if self._log is not None:
            self._log(f"{self.now:5d} {self.instant:5d}  {text}")

    # ------------------------------------------------------------------------------------------------------- the clock

    def run(self) -> None:
        """Runs until the job is over, or nothing happens any more."""
        if self.candidates is None:
            self.start_coordinator()
        else:
            self.candidates.start()
        queue = self._queue
        while queue and not self.outcome:
            self.now, _, call, arguments = heappop(queue)
            if self.now > MAX_TIME or self.instant > MAX_INSTANTS:
                break
            call(*arguments)
        self.see.stopped(self.outcome or "stuck", self.now)

    def at(self, delay: int, call: Callable[..., None], *arguments: Any) -> None:
        """Lets something happen later, whoever lives then."""
        self._at(delay, call, *arguments)

    def _at(self, delay: int, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._queue, (self.now + delay, self._sequence, call, arguments))

    def after(self, delay: int, actor: Any, call: Callable[..., None], *arguments: Any) -> None:
        """Lets a process do something later, if it is still there."""
        self._at(delay, self._act, actor, call, arguments)

    def _act(self, actor: Any, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """A process does something: unless it is dead, and not before it wakes up."""
        if actor.dead:
            return
        if actor in self._hung_until or actor in self._waits:
            self._backlog.setdefault(actor, []).append((call, arguments))
            return
        try:
            call(*arguments)
        except ActorDead:
            pass

    def is_stopped(self, actor: Any) -> bool:
        """Whether a process does nothing at all for a while."""
        return actor in self._hung_until

    def hold(self, actor: Any) -> None:
        """A process waits for the store: all else that it is to do follows after that."""
        self._waits.add(actor)

    def release(self, actor: Any) -> None:
        """It does not wait any more."""
        self._waits.discard(actor)
        self._catch_up(actor)

    def deliver(self, actor: Any, call: Callable[..., None], *arguments: Any) -> None:
        """The store's answer to a process, which may wait for it."""
        if actor in self._hung_until and not actor.dead:
            self._at(1, self.deliver, actor, call, *arguments)
            return
        if not actor.dead:
            try:
                call(*arguments)
            except ActorDead:
                pass

    def _catch_up(self, actor: Any) -> None:
        """A process does what has come while it did nothing."""
        if actor not in self._hung_until and actor not in self._waits:
            for call, arguments in self._backlog.pop(actor, ()):
                self._act(actor, call, arguments)

    def tick(self, actor: Any) -> None:
        """An instant passes, just before the actor does something that others can see.

        Raises:
            ActorDead: a fault has ended it.
        """
        self.instant += 1
        if self.instants is not None:
            self.instants.append((self.now, actor.id))
        if self.instant - 1 == self._next_fault:
            while self._faults and self._faults[-1].instant == self._next_fault:
                self._strike(self._faults.pop())
            self._next_fault = self._faults[-1].instant if self._faults else -1
            if actor.dead:
                raise ActorDead

    def postponed(self, actor: Any, call: Callable[..., object], *arguments: Any) -> bool:
        """Whether a process has been stopped just now, or waits; then it goes on with this call afterwards."""
        if actor not in self._hung_until and actor not in self._waits:
            return False
        self._backlog.setdefault(actor, []).append((call, arguments))
        return True

    def finish(self, outcome: str, reason: str = "") -> None:
        """The job is over."""
        self.outcome, self.reason = outcome, reason

    # ----------------------------------------------------------------------------------------------------- data plane

    def pause(self, worker: WorkerActor, turn: int) -> None:
        """A worker computes for a moment."""
        self._sequence += 1
        event = (self.now + self.delay(), self._sequence, self._act, (worker, worker.on_pause_over, (turn,)))
        heappush(self._queue, event)

    def to_worker(self, sender: WorkerActor, to: int, key: Key, frame: SimFrame) -> None:
        """A frame between workers."""
        self.tick(sender)
        if self._log is not None:
            what = f"{key[0].name.lower()} {key[3]} of step {frame.step}.{frame.attempt}"
            self.say(f"{sender.id} -> {to} {what} generation {frame.generation}")
        pair = (sender.id, to)
        arrives = self.now + self.delay()
        last = self._last.get(pair, 0)
        if arrives < last:
            arrives = last
        if self._held_until or self._isolated_until:
            arrives = max(arrives, self._release(sender.id, to))
        self._last[pair] = arrives
        self._sequence += 1
        heappush(self._queue, (arrives, self._sequence, self._arrive, (sender, self.workers[to], key, frame)))

    def _release(self, a: int, b: int) -> int:
        pair = (min(a, b), max(a, b))
        until = self._isolated_until
        return max(self._held_until.get(pair, 0), until.get(a, 0), until.get(b, 0))

    def _arrive(self, sender: WorkerActor, worker: WorkerActor, key: Key, frame: SimFrame) -> None:
        if worker.dead or (sender.dead and not self.conditions.keeps_in_flight):
            return
        if self._closed_data and frame.generation <= self._closed_data.get(_pair(sender.id, worker.id), -1):
            return
        if self._hung_until:
            self._act(worker, worker.on_frame, (key, frame))
            return
        try:
            worker.on_frame(key, frame)
        except ActorDead:
            pass

    # -------------------------------------------------------------------------------------------------- control plane

    def start_coordinator(self) -> None:
        """Starts a coordinator from the store."""
        self.serve(self._coordinator_class(self))

    def serve(self, coordinator: CoordinatorActor) -> None:
        """A coordinator begins; workers without a connection find it. Who still has one to a coordinator that was
        replaced, and does not know it, loses it: the new one's agent says so. One that was slow to read what was
        decided may begin after its own successor."""
        if self.candidates is not None:
            for replaced in self.coordinators:
                if not replaced.dead and _term(replaced) <= _term(coordinator):
                    self._at(3 * self.delay(), self._abandon, replaced)
        self.coordinators.append(coordinator)
        self.say(f"coordinator of term {coordinator.core.term} starts")
        self._act(coordinator, coordinator.begin, ())
        for worker in self.workers.values():
            link = self.links.get(worker.id)
            if link is None or not link.open:
                self._at(self.delay(), self._connect, worker)
        if self.agents is not None:
            self._at(self.delay(), self.agents.find_coordinator)

    def _restart_coordinator(self) -> None:
        """Another one in the place of one that was killed, unless one has been started meanwhile."""
        if self.coordinator is None:
            self.start_coordinator()

    @property
    def coordinator(self) -> CoordinatorActor | None:
        """The one that new connections reach: with candidates, of those that live, that which has claimed the job
        last."""
        newest = self.coordinators[-1] if self.coordinators else None
        if self.candidates is not None:
            living = [coordinator for coordinator in reversed(self.coordinators) if not coordinator.dead]
            newest = max(living, key=_term, default=None)
        return None if newest is None or newest.dead else newest

    def _connect(self, worker: WorkerActor) -> None:
        if worker.dead or worker.id in self._unborn:
            return
        link = self.links.get(worker.id)
        if worker in self._hung_until:
            self._backlog.setdefault(worker, []).append((self._connect, (worker,)))
            return
        if link is not None and link.open:
            return
        coordinator = self.coordinator
        if coordinator is None:
            return  # the coordinator that is started next is found
        isolated = self._isolated_until.get(worker.id, 0)
        if isolated > self.now:
            self._at(isolated - self.now, self._connect, worker)
            return
        link = self.links[worker.id] = ControlLink(worker, coordinator)
        try:
            self._up(link, coordinator.on_registered, link, worker.registration(), worker.store_position)
            worker.on_connected()
        except ActorDead:
            pass

    def to_coordinator(self, worker: WorkerActor, message: Any, *, durable: bool = False) -> None:
        """A control message of a worker; lost if it has no connection.

        Args:
            durable: it is acknowledged once it has been handled.
        """
        self.tick(worker)
        link = self.links.get(worker.id)
        if self._log is not None:
            missing = "" if link and link.open else " (no connection)"
            self.say(f"{worker.id} -> coordinator {type(message).__name__}{missing}")
        if link is not None and link.open:
            self._up(link, self._handle_durable if durable else link.coordinator.on_message, link, message)

    def _handle_durable(self, link: ControlLink, message: Any) -> None:
        link.coordinator.on_message(link, message)
        # Its own action: a coordinator that was stopped while it handled the message acknowledges it when it wakes up.
        self._act(link.coordinator, self._acknowledge, (link, message))

    def _acknowledge(self, link: ControlLink, message: Any) -> None:
        if link.open:
            pair = (-1, link.worker.id)
            self._on_link(link, pair, link.coordinator, link.worker, link.worker.on_acknowledged, (message,))

    def _up(self, link: ControlLink, call: Callable[..., None], *arguments: Any) -> None:
        self._on_link(link, (link.worker.id, -1), link.worker, link.coordinator, call, arguments)

    def to_member(
        self,
        coordinator: CoordinatorActor,
        link: ControlLink,
        message: CoreToWorker | CheckpointSettled | StopTold | None,
    ) -> None:
        """A message of a coordinator's; None tells to start. Its instant has passed."""
        worker = link.worker
        if self.candidates is not None and message is not None and not isinstance(message, StopTold):
            assert coordinator.write_lease is not None
            self.see.spoke(coordinator.write_lease.writer, message, self.candidates.records)
        if self._log is not None:
            what = "Start" if message is None else type(message).__name__
            at = message.step if isinstance(message, CheckpointSettled) else getattr(message, "generation", "")
            self.say(f"coordinator {coordinator.core.term} -> {worker.id} {what} {at}")
        call: Callable[..., None] = worker.on_message
        if message is None:
            call = worker.on_start
        elif isinstance(message, CheckpointSettled):
            call = worker.on_settled
        elif isinstance(message, StopTold):
            call = worker.on_stop_told
        arguments: tuple[Any, ...] = () if message is None else (message,)
        if coordinator.write_lease is not None:
            write_lease = coordinator.write_lease
            arguments = (worker, write_lease.store_position, tuple(write_lease.digests), call, arguments)
            call = self._hear
        self._on_link(link, (-1, worker.id), coordinator, worker, call, arguments)

    def _hear(
        self,
        worker: WorkerActor,
        store_position: StorePosition,
        history: tuple[bytes, ...],
        call: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        """A message of a coordinator has come, with where the history stands (H9)."""
        self.see.sent(worker.id, history)
        worker.store_position = newest_position(worker.store_position, store_position)
        call(*arguments)

    def _on_link(
        self,
        link: ControlLink,
        pair: tuple[int, int],
        sender: Any,
        receiver: Any,
        call: Callable[..., None],
        arguments: Any,
    ) -> None:
        arrives = self.now + self.delay()
        worker = link.worker.id
        if worker == self.conditions.slow_worker:
            arrives += self.conditions.slow_by
        arrives = max(arrives, self._last.get(pair, 0), self._isolated_until.get(worker, 0))
        self._last[pair] = arrives
        self._at(arrives - self.now, self._arrive_on_link, link, sender, receiver, call, arguments)

    def _arrive_on_link(
        self, link: ControlLink, sender: Any, receiver: Any, call: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if link.open and not (sender.dead and not self.conditions.keeps_in_flight):
            self._act(receiver, call, arguments)

    def close_link(self, link: ControlLink) -> None:
        """A control connection ends; both ends see it, and the worker connects again."""
        if link.open:
            link.open = False
            self.say(f"control connection of worker {link.worker.id} closes")
            self._at(self.delay(), self._connect, link.worker)
            self.after(self.delay(), link.coordinator, link.coordinator.on_link_closed, link.worker.id)

    def publish(self, evidence: Evidence) -> None:
        """A coordinator makes a committed step's losses known."""
        if evidence.commits:
            if self.conditions.respawns and self.candidates is None and evidence.step > self.published_step:
                self.store.records.append(StepPublished())
            self.published_step = max(self.published_step, evidence.step)
            self.see.published(evidence.step, losses_of(self.job, evidence.vector))

    def commit(self, coordinator: CoordinatorActor, step: int, states: dict[int, BlockState], grid: Exponents) -> None:
        """A coordinator asks for a commit. It is broken off if that coordinator ends first; its answer may be lost."""
        delay = self.conditions.commit_delay
        if delay:
            self.see.committing(step)
            self._at(delay, self._commit, coordinator, step, states, grid)
        else:
            self.disk[step] = (states, grid)
            coordinator.on_committed(step)

    def _commit(self, coordinator: CoordinatorActor, step: int, states: dict[int, BlockState], grid: Exponents) -> None:
        if not coordinator.dead:
            self.disk[step] = (states, grid)
            self._at(self.delay(), self._act, coordinator, coordinator.on_committed, (step,))

    def spawn(self, worker: int) -> None:
        """The agent starts a worker that joins; one that it has started before it does not start again (J1)."""
        if worker not in self.workers:
            self.say(f"worker {worker} is started")
            actor = self.workers[worker] = self._worker_class(self, worker, self.job, True)
            self._at(4 * self.delay(), self._connect, actor)

    def begin_worker(self, worker: int) -> None:
        """An agent starts a worker with which the job begins."""
        if worker in self._unborn:
            self._unborn.discard(worker)
            self._at(self.delay(), self._connect, self.workers[worker])

    def kill_process(self, worker: int) -> None:
        """The agent kills the process of a joiner."""
        if worker in self.workers and not self.workers[worker].dead:
            self.say(f"the process of worker {worker} is killed")
            self.see.killed(worker)
            self.end_worker(self.workers[worker])

    def is_running(self, worker: int) -> bool:
        """Whether a worker's process uses its processor."""
        actor = self.workers.get(worker)
        return actor is not None and not actor.dead and actor not in self._hung_until

    def is_heard(self, worker: WorkerActor) -> bool:
        """Whether heartbeats of a worker come."""
        return not worker.dead and not self.is_cut_off(worker) and worker not in self._hung_until

    def is_cut_off(self, worker: WorkerActor) -> bool:
        """Whether nothing comes from a worker's host at present, its kernel included."""
        return self._isolated_until.get(worker.id, 0) > self.now

    def leave(self, worker: WorkerActor, reason: str) -> None:
        """A worker ends itself."""
        self.say(f"worker {worker.id} leaves: {reason}")
        self.end_worker(worker)

    # --------------------------------------------------------------------------------------------------------- faults

    def _strike(self, fault: ScheduledFault) -> None:
        self.fired.append(fault)
        self.say(f"*** {fault}")
        if fault.is_of_agent:
            if self.agents is not None:
                self.agents.strike(fault)
            return
        if not fault.workers:
            self._strike_coordination(fault)
            return
        workers = [self.workers[worker] for worker in fault.workers if worker in self.workers]
        alive = [worker for worker in workers if not worker.dead and worker.id not in self._unborn]
        if fault.kind == "kill":
            for worker in alive:
                self.end_worker(worker)
        elif len(alive) == len(fault.workers):
            getattr(self, f"_{fault.kind}")(*alive, fault.duration)

    def _strike_coordination(self, fault: ScheduledFault) -> None:
        """The coordinator, its host, or the store."""
        coordinator = self.coordinator
        if self.candidates is None:
            if coordinator is not None and fault.target == COORDINATOR and fault.kind in ("kill", "usurp"):
                self._strike_coordinator(coordinator, fault)
        elif fault.kind == "kill" and fault.target == HOST:
            self.candidates.kill_host(coordinator)
        elif fault.kind == "kill" and coordinator is not None:
            self.end_coordinator(coordinator)
        elif fault.kind == "kill":
            self.candidates.kill_process()
        elif fault.kind != "usurp":
            self.candidates.strike(fault)
        elif coordinator is not None and coordinator not in self._hung_until:
            self._hang_actor(coordinator, fault.duration)

    def _strike_coordinator(self, coordinator: CoordinatorActor, fault: ScheduledFault) -> None:
        conditions = self.conditions
        if fault.kind == "kill":
            self.end_coordinator(coordinator)
            self._at(conditions.restart_delay, self._restart_coordinator)
        elif coordinator not in self._hung_until:
            self._hang_actor(coordinator, fault.duration)
            self._at(conditions.restart_delay, self.start_coordinator)
            self._at(conditions.restart_delay, self._abandon, coordinator)

    def _abandon(self, coordinator: CoordinatorActor) -> None:
        """Workers notice a coordinator's silence, one sooner, another later; until then they stay with it."""
        for link in self.links.values():
            if link.coordinator is coordinator:
                self._at(3 * self.delay(), self.close_link, link)

    def end_coordinator(self, coordinator: CoordinatorActor) -> None:
        """A coordinator's process is gone, and its connections with it."""
        if coordinator.dead:
            return
        coordinator.dead = True
        if self.candidates is not None:
            self.candidates.ended(coordinator)
        if self.agents is not None:
            self.agents.ended(coordinator)
            self._at(self.delay(), self.agents.find_coordinator)
        for link in self.links.values():
            if link.coordinator is coordinator and link.open:
                self._at(self.delay(), self.close_link, link)

    def end_worker(self, worker: WorkerActor) -> None:
        """A worker's process is gone."""
        worker.dead = True
        self.see.gone(worker.id)
        self._hung_until.pop(worker, None)
        if self.agents is not None:
            self.agents.worker_ended(worker)
        else:
            for coordinator in self.coordinators:
                self.after(self.conditions.exit_delay, coordinator, coordinator.on_exit, worker.id)
        for peer in self.workers.values():
            if peer is not worker:
                self._at(
                    self.conditions.link_delay + self.delay(),
                    self._act,
                    peer,
                    _link_closed_by_death(peer, worker.id),
                    (),
                )

    def _suspect(self, worker: WorkerActor, duration: int) -> None:
        coordinator = self.coordinator
        if coordinator is not None:
            self.after(1, coordinator, coordinator.hold_for_lost, worker.id, "progress")

    def _hang(self, *struck: Any) -> None:
        *workers, duration = struck
        for worker in workers:
            if worker not in self._hung_until:
                self._hang_actor(worker, duration)
                self._at(self.conditions.heartbeat_bound, self._miss_heartbeats, worker)

    def _hang_actor(self, actor: Any, duration: int) -> None:
        self._hung_until[actor] = self.now + duration
        self._at(duration, self._wake, actor)

    def _wake(self, actor: Any) -> None:
        if self._hung_until.pop(actor, None) is not None:
            self.say("*** a process wakes up")
            self._catch_up(actor)

    def _miss_heartbeats(self, worker: WorkerActor) -> None:
        silent = worker in self._hung_until or self._isolated_until.get(worker.id, 0) > self.now
        coordinator = self.coordinator
        if silent and not worker.dead and coordinator is not None and not self.conditions.detects:
            self._act(coordinator, coordinator.hold_for_lost, (worker.id, "heartbeat"))

    def _spoil(self, worker: WorkerActor, duration: int) -> None:
        worker.spoil(duration)

    def _isolate(self, *struck: Any) -> None:
        *workers, duration = struck
        for worker in workers:
            self._isolated_until[worker.id] = max(self._isolated_until.get(worker.id, 0), self.now + duration)
            self._at(self.conditions.heartbeat_bound, self._miss_heartbeats, worker)

    def _cut(self, a: WorkerActor, b: WorkerActor, duration: int) -> None:
        self._closed_data[a.id, b.id] = max(a.generation, b.generation)
        for worker, peer in ((a, b), (b, a)):
            self._at(self.delay(), self._act, worker, _link_closed(worker, peer.id), ())

    def decided(self, decision: Decision) -> None:
        """A decision is durable: with it, that later checkpoints than the one that it goes back to are void."""
        self.see.decided(decision)
        if decision != self._newest_decision and decision.rollback is not None:
            self.given_up = {step for step in self.given_up if step <= decision.rollback}
            self.written = {step for step in self.written if step <= decision.rollback}
        self._newest_decision = decision

    def open_again(self, a: int, b: int) -> None:
        """Two workers have a link again."""
        self._closed_data.pop(_pair(a, b), None)

    def _delay(self, a: WorkerActor, b: WorkerActor, duration: int) -> None:
        self._held_until[a.id, b.id] = self.now + duration

    def _flip(self, worker: WorkerActor, duration: int) -> None:
        self.has_flipped = True
        worker.flip(duration or 7 * self.instant)

    def _slip(self, worker: WorkerActor, duration: int) -> None:
        self.has_flipped = True
        worker.slip(duration or 7 * self.instant)

    def _notice(self, worker: WorkerActor, duration: int) -> None:
        worker.notice(duration)
        self._at(duration, self._take_away, worker)

    def _take_away(self, worker: WorkerActor) -> None:
        """The machine of a worker that has had a notice goes."""
        if not worker.dead:
            self.say(f"*** the machine of worker {worker.id} is taken away")
            self.end_worker(worker)

    def _disconnect(self, worker: WorkerActor, duration: int) -> None:
        link = self.links.get(worker.id)
        if link is not None:
            self.close_link(link)


def _term(coordinator: CoordinatorActor) -> int:
    """Of a candidate's claim."""
    assert coordinator.write_lease is not None
    return coordinator.write_lease.term.term


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _link_closed(worker: WorkerActor, peer: int) -> Callable[[], None]:
    return lambda: worker.on_link_closed(peer, dead=False)


def _link_closed_by_death(worker: WorkerActor, peer: int) -> Callable[[], None]:
    return lambda: worker.on_link_closed(peer, dead=True)
