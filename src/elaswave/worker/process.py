"""One worker's life: connect, materialise, train, recover, evaluate, write shards, report, end.

Runs in a process of its own. What it needs from outside comes in as arguments; it reads no environment.

Two threads: the main one computes, waits for peers and does everything that changes state; the control client's one
receives messages, puts them into an inbox, and wakes the main thread. Whatever happens (a lost peer, a risen epoch),
the main thread ends up in `_recover`, reports, and goes on as the coordinator's decision says.
"""

import resource
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from elaswave.config.devices import base_level, device_of, emulated_costs
from elaswave.config.schema import Config
from elaswave.errors import FencedError, InterruptedWaitError, PeerLostError, VoteError, WaitTimeoutError
from elaswave.observability.trace import PHASE, TraceRecorder
from elaswave.planning.layout import peers_of
from elaswave.protocol.coordinator import Coordinator
from elaswave.protocol.facts import Facts
from elaswave.protocol.ledger import CatchUp, Ledger
from elaswave.protocol.member import Hold, Ignored, Install, Leave, Member, MemberState, MoveAndReport
from elaswave.protocol.messages import Decision, Fenced, Installed, LayoutChange, Prepare, Registered, Report
from elaswave.protocol.position import LINK, START, WRITE
from elaswave.state.checkpoint import read_meta
from elaswave.state.checkpoint_format import CheckpointMeta
from elaswave.state.flat import FlatLayer
from elaswave.state.placement import Placement
from elaswave.state.store import BlockStore, Role
from elaswave.transport.group import doubling_partners
from elaswave.transport.interface import Transport
from elaswave.transport.stream import StreamTransport
from elaswave.types import ExecutionParameters, Layout
from elaswave.worker.activity import Activity
from elaswave.worker.allocator import tune_allocator
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.compute import LayerError
from elaswave.worker.frequency import make_actuator
from elaswave.worker.materialise import materialise
from elaswave.worker.messages import (
    EvaluationReport,
    Exit,
    Failed,
    Finished,
    FromWorker,
    Heartbeat,
    Holding,
    LinkLost,
    Ready,
    Settled,
    ShardFailed,
    ShardWritten,
    Standing,
    Start,
    StepReport,
    Stop,
    Timings,
    ToWorker,
)
from elaswave.worker.optimizer import OPTIMIZERS
from elaswave.worker.pacing import ActionTimer, Pace
from elaswave.worker.probe import Probe
from elaswave.worker.shard_writer import ShardWriter
from elaswave.worker.step import Progress, StepEngine, StepResult
from elaswave.worker.traced import TracedTransport
from elaswave.worker.vote import Request

LINK_TURN_S = 10.0
"""How long links are waited for before somebody looks whether the coordinator is still there."""
START_TURN_S = 5.0
"""The same of waiting for the others to be started."""
NO_COORDINATOR_S = 120.0
"""Bound of such waits without a coordinator. While there is one it watches everybody that is waited for, and bounds the
wait: by what it sees of them, not by a constant."""
DECISION_TIMEOUT_S = 600.0
"""Bound of waiting for a decision, beside the pause that a policy may make before it; a new coordinator may have to be
started in the meantime."""
EXIT_TIMEOUT_S = 3600.0
"""Bound of waiting for the others' last step and checkpoint."""
FLUSH_TIMEOUT_S = 5.0
"""Bound of waiting, at the end, for the coordinator to have handled the last messages."""
TIMINGS_EVERY_S_MIN = 1.0
TIMINGS_EVERY_S_MAX = 8.0
"""A worker tells how long its actions take after so long at first, and then less and less often, down to this."""
KEPT_REPORTS = 1024
"""Step reports kept for the case that the worker that should have sent them is lost."""
FULL_MESH_WORKERS = 128
"""Up to this many workers, everybody is linked to everybody from the start, so that no recovery has to dial."""


class ControlClient(Protocol):
    """The connection to the coordinator; outlives coordinators."""

    def send(self, message: FromWorker, durable: bool = False) -> object:
        """Sends a message; thread-safe. A durable one is repeated until a coordinator has handled it."""
        ...

    @property
    def disconnected_s(self) -> float:
        """Seconds without a coordinator that answers; 0 while there is one."""
        ...


class WorkerSetup(NamedTuple):
    """What a worker is started with."""

    config: Config
    worker: int
    run_dir: Path
    key: bytes
    """The job's secret."""
    listen: str
    """Where the data plane listens, see `elaswave.transport.addresses`."""
    checkpoint: tuple[Path, CheckpointMeta] | None
    probe: Probe
    profile: bool


class Mailbox:
    """What a worker's two threads share: messages that have arrived, and what is said on a new connection.

    Args:
        worker: its id.
        transport: woken when a message concerns the step in hand.
    """

    def __init__(self, worker: int, transport: Transport) -> None:
        self.urgent = False
        """Whether a message waits that the main thread must see before it goes on."""
        self.request = Request.NONE
        """What the coordinator has told this worker to ask for."""
        self.registration = Registered(
            worker=worker, address=transport.address, epoch=Coordinator.FIRST_EPOCH, report=None
        )
        self._facts = Facts()
        self.activity = Activity()
        self.place = (Coordinator.FIRST_EPOCH, 0, 0)
        """Epoch, step and attempt, for heartbeats."""
        self._transport = transport
        self._change: LayoutChange | None = None
        """The newest planned change of layout that the main thread has not taken."""
        self._messages: deque[ToWorker] = deque()
        self._changed = threading.Condition()

    def hello(self) -> Registered:
        """The first message on a new connection."""
        return self.registration

    def standing(self) -> list[Any]:
        """What is said on a new connection after all that has not been acknowledged."""
        with self._changed:
            return self._facts.standing()

    def note(self, change: Callable[[Facts], None]) -> None:
        """Changes the standing facts; any thread may call it. To be called before the message itself is sent."""
        with self._changed:
            change(self._facts)

    def heartbeat(self) -> Heartbeat:
        """Where the main thread is."""
        doing = self.activity.told()
        epoch, step, attempt = self.place
        return Heartbeat(
            worker=self.registration.worker,
            epoch=epoch,
            step=step,
            attempt=attempt,
            label=doing.label,
            computing=doing.computing,
            waiting_on=doing.waiting_on,
            since_s=time.monotonic() - doing.since_s,
        )

    def receive(self, message: ToWorker) -> None:
        """Takes a message; called on the control client's thread."""
        if isinstance(message, LayoutChange):
            with self._changed:
                if self._change is None or message.number > self._change.number:
                    self._change = message
            return
        if isinstance(message, Stop):
            self.request = Request.STOP
            return
        if isinstance(message, Settled):
            self.note(lambda facts: facts.settled(message.step))
            return
        with self._changed:
            self._messages.append(message)
            self._look()
            self._changed.notify()
        if isinstance(message, Prepare | Fenced) and self.is_urgent(message):
            self._transport.interrupt(message.reason, message.epoch)

    def is_urgent(self, message: ToWorker) -> bool:
        """Whether a message ends the step in hand. A question that has been answered, and is asked again by a new
        coordinator, does not: it must never take a worker out of a step that nothing has happened to."""
        if isinstance(message, Prepare):
            return message.epoch > self.registration.epoch
        return isinstance(message, Fenced)

    def next(self, timeout_s: float) -> ToWorker:
        """The oldest message; called on the main thread.

        Raises:
            WaitTimeoutError: none comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._messages), max(0.0, timeout_s)):
                raise WaitTimeoutError(f"the coordinator has said nothing for {timeout_s:.0f} s")
            message = self._messages.popleft()
            self._look()
            return message

    def take_change(self) -> LayoutChange | None:
        """The newest planned change of layout that has come since the last call; called on the main thread."""
        with self._changed:
            change, self._change = self._change, None
        return change

    def put_back(self, message: ToWorker) -> None:
        """Makes a message the oldest again."""
        with self._changed:
            self._messages.appendleft(message)
            self._look()

    def answered(self, registration: Registered) -> None:
        """What this worker says of itself has changed, and with it which messages are urgent."""
        with self._changed:
            self.registration = registration
            self._look()

    def _look(self) -> None:
        self.urgent = any(map(self.is_urgent, self._messages))


class Worker:
    """A worker with its state, ready to run.

    Args:
        setup: what it is started with.
        client: the connection to the coordinator.
        mailbox: what arrives there.
        transport: listening, not yet connected.
    """

    def __init__(self, setup: WorkerSetup, client: ControlClient, mailbox: Mailbox, transport: Transport) -> None:
        config = setup.config
        self._setup = setup
        self._config = config
        self._worker = setup.worker
        self._client = client
        self._mailbox = mailbox
        self._blueprint = Blueprint(config)
        stage = self._blueprint.layout.stage_of(setup.worker)
        self._trace = TraceRecorder(setup.worker, stage=stage, enabled=setup.profile)
        self._transport: Transport = TracedTransport(transport, self._trace) if setup.profile else transport
        self._timer = ActionTimer(setup.worker, self._make_pace())
        self._timed_at_s = 0.0
        self._timings_every_s = TIMINGS_EVERY_S_MIN
        """When the newest `Timings` were sent."""
        self._first_timed_step: int | None = None
        self._level = base_level(config)
        """Index of the frequency level at which the device runs."""
        self._actuator = make_actuator(config.device.frequency, setup.worker, self._set_level_speed)
        self._optimizer = OPTIMIZERS[config.optimizer.name](config.optimizer)
        self._source = self._blueprint.open_source(setup.run_dir / "data")
        self._sampler = self._blueprint.sampler(self._source)
        self._writer = ShardWriter(setup.worker, setup.run_dir, self._report_shard)
        self._member = Member(setup.worker, Coordinator.FIRST_EPOCH)
        self._members = self._blueprint.layout.workers
        self._addresses: dict[int, str] = {}
        self._reports: deque[StepReport] = deque(maxlen=KEPT_REPORTS)
        self._last_report: Report | None = None
        self._is_ready = False
        """Whether the first links have been made and this worker has said so."""
        self._edit_s = 0.0
        """Seconds that the newest move of the data plane took."""
        layout, placement = self._blueprint.layout, self._blueprint.placement
        layers, store, progress = materialise(
            self._blueprint, setup.worker, self._optimizer, layout, placement, setup.checkpoint
        )
        self._step = 1 if setup.checkpoint is None else setup.checkpoint[1].step + 1
        self._attempt = 1
        self._duties: list[tuple[str, int]] = []
        """What is to be done before the next step: evaluations and checkpoints of committed steps."""
        self._checkpoint_at_s = time.monotonic()
        """When the newest checkpoint was begun, or this worker was made."""
        self._ledger = Ledger(setup.worker, self._step - 1)
        self.engine = self._make_engine(layout, placement, self._blueprint.execution, layers, store, progress)

    def _make_pace(self) -> Pace | None:
        config = self._config
        if config.device.kind != "emulated":
            return None
        layer_s = [
            (layer.forward_s, layer.input_gradient_s, layer.weight_gradient_s)
            for layer in emulated_costs(config).layers
        ]
        speeds = config.device.speeds
        return Pace(layer_s, 1.0 if speeds is None else speeds[self._worker], self._transport.rest)

    def _set_level(self, execution: ExecutionParameters) -> None:
        """Sets the frequency level that a plan gives this worker."""
        level = execution.levels.get(self._worker, base_level(self._config))
        if level != self._level:
            self._timer.times.take()  # of another clock
            self._level = level
            self._actuator.set_level(device_of(self._config).levels[level])

    def _set_level_speed(self, speed: float) -> None:
        if self._timer.pace is not None:
            self._timer.pace.set_level_speed(speed)

    def close(self) -> None:
        """Gives the device back as it was found."""
        self._actuator.close()

    def _make_engine(
        self,
        layout: Layout,
        placement: Placement,
        execution: ExecutionParameters,
        layers: dict[int, FlatLayer],
        store: BlockStore,
        progress: Progress,
    ) -> StepEngine:
        self._set_level(execution)
        return StepEngine(
            self._blueprint,
            self._worker,
            layout=layout,
            placement=placement,
            execution=execution,
            layers=layers,
            store=store,
            progress=progress,
            ledger=self._ledger,
            transport=self._transport,
            batches=self._training_batch,
            optimizer=self._optimizer,
            request=self._request,
            check=self._check,
            probe=self._setup.probe,
            timer=self._timer,
            activity=self._mailbox.activity,
            trace=self._trace,
        )

    # --------------------------------------------------------------------------------------------------------- links

    def _make_links(self, layout: Layout, placement: Placement) -> None:
        """Makes the links that a layout and a placement need (all of them in a small job)."""
        if len(self._addresses) <= FULL_MESH_WORKERS:
            peers = set(layout.workers) - {self._worker}
        else:
            peers = peers_of(layout, placement, self._blueprint.blocks)[self._worker]
            peers |= doubling_partners(layout.workers, self._worker)
        missing = peers - self._transport.peers
        if unknown := missing - self._addresses.keys():
            # It was lost before this worker heard of the start; the coordinator is about to ask for a report.
            raise InterruptedWaitError(f"the start does not name workers {sorted(unknown)}")
        while missing:
            activity = self._mailbox.activity
            activity.wait_on(activity.label if self._is_ready else LINK, tuple(sorted(missing)))
            try:
                self._transport.connect({peer: self._addresses[peer] for peer in missing}, LINK_TURN_S)
            except WaitTimeoutError as error:
                _check_coordinator(self._client, str(error))
            missing = peers - self._transport.peers

    def _check(self) -> None:
        """Between layers and blocks: lets bytes move, and leaves the step if the epoch has risen."""
        self._transport.poll()
        if self._mailbox.urgent:
            raise InterruptedWaitError("the coordinator asks for a report")

    # ---------------------------------------------------------------------------------------------------- the main loop

    def train(self, addresses: dict[int, str]) -> None:
        """Runs all steps, with evaluations and checkpoints in between, and reports each; recovers whenever it must.

        Args:
            addresses: where the data planes of all workers listen.
        """
        self._addresses = addresses
        while True:
            try:
                self._run_to_the_end()
                return
            except (InterruptedWaitError, PeerLostError) as error:
                self._recover(error)

    def _run_to_the_end(self) -> None:
        run = self._config.run
        stopped = False
        if not self._is_ready:
            self._make_links(self.engine.layout, self.engine.placement)
            self._is_ready = True
            ready = Ready(worker=self._worker, holding=self._holding())
            self._mailbox.note(lambda facts: facts.ready(ready))
            self._client.send(ready)
        while True:
            while self._duties:
                kind, step = self._duties[0]
                if kind == "evaluate":
                    self._evaluate(step)
                else:
                    if self._writer.is_busy:
                        self._mailbox.activity.wait(WRITE)
                    self._writer.finish(self._check)
                    self._mailbox.activity.compute("checkpoint")
                    self._writer.start(self.engine.store, self._standing(step))
                self._duties.pop(0)
            if self._step > run.steps or stopped:
                break
            self._check()
            start_s = time.monotonic()
            self._mailbox.place = (self._member.epoch, self._step, self._attempt)
            self._look_for_change()
            result = self.engine.run_step(self._step, self._attempt)
            self._set_level(self.engine.execution)
            self._committed(result, time.monotonic() - start_s)
            self._report_timings(result.step)
            stopped = result.request is Request.STOP and self._step < run.steps
            self._step, self._attempt = self._step + 1, 1
            self._note_duties(result)
        self._finish(stopped)

    def _look_for_change(self) -> None:
        """Holds the newest planned change of layout, if there is one, once its links are there."""
        change = self._mailbox.take_change()
        if change is None or change.number <= self._ledger.change:
            return
        action = self._member.handle(change)
        if isinstance(action, Hold):
            self._make_links(change.layout, self.engine.placement)
            self.engine.hold(change)

    def _request(self) -> Request:
        """What this worker asks for in its vote.

        Checkpoints by time are asked for by the clock of the member with the lowest id; the vote makes that everybody's
        decision. All clocks begin anew at the same vote, so the next member goes on asking when that one is lost.
        """
        every_s = self._config.run.checkpoint_every_s
        if self._mailbox.request is not Request.NONE or not every_s or self._worker != self._members[0]:
            return self._mailbox.request
        due = time.monotonic() - self._checkpoint_at_s >= every_s and not self._writer.is_busy
        return Request.CHECKPOINT if due else Request.NONE

    def _note_duties(self, result: StepResult) -> None:
        run, step = self._config.run, result.step
        if run.eval_every and step % run.eval_every == 0:
            self._duties.append(("evaluate", step))
        wanted = step == run.steps or (run.checkpoint_every and step % run.checkpoint_every == 0)
        if wanted or result.request is not Request.NONE:
            self._note_checkpoint(step)

    def _note_checkpoint(self, step: int) -> None:
        self._duties.append(("checkpoint", step))
        self._checkpoint_at_s = time.monotonic()

    def _committed(self, result: StepResult, duration_s: float) -> None:
        """Keeps the report of a committed step; the member with the lowest id sends it."""
        skipped, evidence = result.skipped, self._ledger.evidence
        assert evidence is not None
        report = StepReport(
            worker=self._worker,
            epoch=self._member.epoch,
            step=result.step,
            attempt=result.attempts,
            loss=result.loss,
            norm=result.norm,
            learning_rate=result.learning_rate,
            duration_s=duration_s,
            phases_s=dict(self.engine.phases_s),
            vector=evidence.vector,
            change=evidence.change,
            checkpoint=evidence.checkpoint,
            finished_s=time.monotonic(),
            retries=list(result.retries),
            skipped=None if skipped is None else self.engine.describe_nonfinite(skipped),
            skipped_microbatch=None if skipped is None else skipped.microbatch,
            skipped_layer=None if skipped is None else self.engine.compute.layer_name(skipped.layer),
        )
        if not self._reports or self._reports[-1].step < report.step:
            self._reports.append(report)
        if self._worker == self._members[0]:
            self._client.send(report, durable=True)

    def _report_timings(self, step: int) -> None:
        """Says now and then how long actions take; the first step also loads code and fills caches, so not of it."""
        now_s = time.monotonic()
        if self._first_timed_step is None:
            self._timer.times.take()
            self._first_timed_step = step + 1
        elif now_s - self._timed_at_s >= self._timings_every_s:
            self._timed_at_s = now_s
            self._timings_every_s = min(2 * self._timings_every_s, TIMINGS_EVERY_S_MAX)
            self._client.send(
                Timings(
                    worker=self._worker,
                    epoch=self._member.epoch,
                    step=step,
                    level=self._level,
                    actions=self._timer.times.take(),
                )
            )

    def _standing(self, step: int) -> Standing:
        progress = self.engine.progress
        return Standing(
            epoch=self._member.epoch,
            step=step,
            num_updates=progress.num_updates,
            exponents=list(progress.grids.exponents),
            calibrated=progress.grids.calibrated,
        )

    def _holding(self) -> Holding:
        """What this worker holds, for the log."""
        owned = list(self.engine.store.with_role(Role.OWNER))
        followed = list(self.engine.store.with_role(Role.FOLLOWER))
        layers = self.engine.layers.values()
        return Holding(
            num_parameters=sum(slot.numel for layer in layers for slot in layer.shape.tensors),
            num_owned_blocks=len(owned),
            num_owned_parameters=sum(held.num_elements for held in owned),
            num_followed_blocks=len(followed),
            num_followed_parameters=sum(held.num_elements for held in followed),
        )

    def _report_shard(self, message: ShardWritten | ShardFailed) -> None:
        """Says what became of this worker's part of a checkpoint; called on the writer's thread."""
        where = message.standing if isinstance(message, ShardWritten) else message
        self._mailbox.note(lambda facts: facts.part(where.step, where.epoch, message))
        self._client.send(message)

    def _finish(self, stopped: bool) -> None:
        """Reports the last state and waits until everybody has done so: nobody may leave before."""
        self._mailbox.activity.wait("end")
        self._writer.finish(self._check)
        store = self.engine.store
        num_followers = min(self._config.elastic.num_followers, len(self._members) - 1)
        followers = self.engine.placement.followers
        finished = Finished(
            worker=self._worker,
            standing=self._standing(self._step - 1),
            stopped=stopped,
            owner_digests=store.digest_parts(Role.OWNER),
            follower_digests=store.digest_parts(Role.FOLLOWER),
            complete=all(len(workers) == num_followers for workers in followers),
            optimizer_bytes=store.optimizer_bytes(),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            bytes_sent=sum(self._transport.bytes_sent.values()),
        )
        self._mailbox.note(lambda facts: facts.ended(finished))
        self._client.send(finished)
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while True:
            try:
                message = self._mailbox.next(deadline_s - time.monotonic())
            except WaitTimeoutError as error:
                raise WaitTimeoutError(
                    f"all steps are made, and the coordinator has not ended the job for {EXIT_TIMEOUT_S:.0f} s; look "
                    "at the log of the coordinator, and resume from the last checkpoint"
                ) from error
            if isinstance(message, Exit):
                self._trace.dump(self._setup.run_dir)
                return
            if self._mailbox.is_urgent(message):
                self._mailbox.put_back(message)
                raise InterruptedWaitError("the epoch has risen at the end")

    # ------------------------------------------------------------------------------------------------------- recovery

    def _recover(self, error: Exception) -> None:
        """From the first sign of a loss until the decision is carried out, however often the epoch rises meanwhile.

        Raises:
            FencedError: the others go on without this worker.
            WaitTimeoutError: no decision comes.
        """
        start_ns = time.monotonic_ns()
        self._mailbox.activity.wait("recover")
        self._accuse(error)
        timeout_s = DECISION_TIMEOUT_S + self._config.elastic.restart_s
        while True:
            message = self._mailbox.next(timeout_s)
            if isinstance(message, Exit):
                raise FencedError("the job has ended")
            if not isinstance(message, Prepare | Decision | Fenced):
                continue
            action = self._member.handle(message)
            if isinstance(action, Leave):
                raise FencedError(f"worker {self._worker} is no member any more and ends itself: {action.reason}")
            if isinstance(action, Ignored):
                print(f"ignored a {type(message).__name__}: {action.reason}", flush=True)
            elif isinstance(action, MoveAndReport):
                self._move(action)
            elif isinstance(action, Install):
                try:
                    self._install(action.decision)
                except (InterruptedWaitError, PeerLostError) as again:
                    print(f"interrupted while installing epoch {action.decision.epoch}: {again}", flush=True)
                    self._accuse(again)
                    continue
                self._trace.add(
                    "RECOVERY", PHASE, start_ns, time.monotonic_ns(), {"epoch": self._member.epoch, "step": self._step}
                )
                return
            elif self._last_report is not None:
                self._client.send(self._last_report)

    def _accuse(self, error: Exception) -> None:
        """Tells the coordinator of a peer that this worker has lost sight of."""
        if isinstance(error, PeerLostError) and self._member.state is MemberState.TRAINING:
            peer = error.worker
            accusation = LinkLost(worker=self._worker, peer=peer, epoch=self._member.epoch, detail=str(error))
            self._mailbox.note(lambda facts: facts.link_lost(peer, accusation))
            self._client.send(accusation)

    def _move(self, action: MoveAndReport) -> None:
        """Leaves the old epoch's data plane, and only then promises and reports."""
        begin_s = time.monotonic()
        self.engine.hold(None)  # what was planned for the old epoch is void
        self._mailbox.note(lambda facts: facts.moved())
        self._transport.advance_epoch(action.epoch, action.members)
        self._edit_s = time.monotonic() - begin_s
        layers = sorted(self.engine.layers)
        span = (layers[0], layers[-1] + 1)
        self._last_report = self._ledger.promise(action.epoch, self.engine.held(), span)
        self._mailbox.answered(
            msgspec.structs.replace(self._mailbox.registration, epoch=action.epoch, report=self._last_report)
        )
        self._client.send(self._last_report)

    def _install(self, decision: Decision) -> None:
        """Carries out a decision: afterwards this worker computes again."""
        before = self._ledger.evidence
        todo = self._ledger.accept(decision)
        self._members = decision.members
        edit_begin_s = time.monotonic()
        self._make_links(decision.layout, decision.placement)
        edit_s = self._edit_s + time.monotonic() - edit_begin_s
        begin_s = time.monotonic()
        self._step, self._attempt = decision.resume_step, decision.resume_attempt
        self._duties = []
        if todo is CatchUp.ROLL_BACK:
            received = self._roll_back(decision)
        else:
            verdict = self.engine.catch_up(todo, decision)
            received = self.engine.install(decision)
            self._set_level(decision.execution)
            evidence = decision.evidence
            learned = evidence is not None and evidence.commits and (before is None or before.order < evidence.order)
            unreported = evidence is not None and (not self._reports or self._reports[-1].step < evidence.step)
            if verdict is not None and evidence is not None and evidence.commits and (learned or unreported):
                self.engine.step = evidence.step
                self._committed(self.engine.result_of(evidence.step, evidence.attempt, verdict, ()), 0.0)
        if self._worker == self._members[0]:
            for report in self._reports:
                if report.step < decision.resume_step and report.step > decision.published:
                    self._client.send(report, durable=True)
        if decision.evaluate:
            self._duties.append(("evaluate", decision.resume_step - 1))
        if decision.checkpoint:
            self._note_checkpoint(decision.resume_step - 1)
        self._mailbox.answered(msgspec.structs.replace(self._mailbox.registration, epoch=decision.epoch, report=None))
        self._client.send(
            Installed(
                worker=self._worker,
                epoch=decision.epoch,
                edit_s=edit_s,
                promote_s=time.monotonic() - begin_s,
                critical_bytes=received,
            ),
            durable=True,
        )

    def _roll_back(self, decision: Decision) -> int:
        """Loads the decision's checkpoint under its layout.

        The coordinator has checked every byte of it. Here are checked the bytes that are used.
        """
        assert decision.rollback is not None
        rollback = decision.rollback
        self._mailbox.note(lambda facts: facts.rolled_back(rollback))
        checkpoint = None
        if decision.rollback > 0:
            folder = self._setup.run_dir / "checkpoints" / f"step-{decision.rollback:08d}"
            checkpoint = (folder, read_meta(folder))
        layers, store, progress = materialise(
            self._blueprint, self._worker, self._optimizer, decision.layout, decision.placement, checkpoint
        )
        self.engine = self._make_engine(
            decision.layout, decision.placement, decision.execution, layers, store, progress
        )
        self._ledger.gathered(decision.rollback)
        while self._reports and self._reports[-1].step > decision.rollback:
            self._reports.pop()
        return sum(layer.flat.nbytes for layer in layers.values()) + store.optimizer_bytes()

    # ----------------------------------------------------------------------------------------------------------- data

    def _training_batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._source.batch(self._sampler.microbatch(step, microbatch), "train")

    def _evaluation_batch(self, step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._config.batch.microbatch_size
        num_samples = self._source.num_samples("validation")
        indices = [index % num_samples for index in range(microbatch * size, (microbatch + 1) * size)]
        return self._source.batch(indices, "validation")

    def _evaluate(self, step: int) -> None:
        start_s = time.monotonic()
        num_microbatches = self._config.run.eval_microbatches
        loss = self.engine.evaluate(step, self._evaluation_batch)
        batch, length = self._config.batch.microbatch_size, self._config.model.context_length
        if self._worker == self._members[0]:
            report = EvaluationReport(
                worker=self._worker,
                step=step,
                loss=loss,
                num_tokens=num_microbatches * batch * length,
                duration_s=time.monotonic() - start_s,
            )
            self._client.send(report, durable=True)


class ClosableClient(ControlClient, Protocol):
    """A control client of which this process has charge."""

    def close(self, timeout_s: float = 0.0) -> object:
        """Ends the connection, after what is durable has been handled or the time is over."""
        ...


class MakeClient(Protocol):
    """Makes the control client of a worker."""

    def __call__(self, mailbox: Mailbox) -> ClosableClient:
        """Connects; messages go to the mailbox."""
        ...


def run_worker(setup: WorkerSetup, make_client: MakeClient) -> int:
    """A worker process from its start to its end; errors are reported to the coordinator.

    Args:
        setup: what it is started with.
        make_client: connects to the coordinator.
    Returns:
        Exit status: 0, or 1 after an error.
    """
    torch.set_num_threads(1)
    tune_allocator()
    worker: Worker | None = None
    transport: StreamTransport | None = None
    client: ClosableClient | None = None
    try:
        transport = StreamTransport(setup.worker, key=setup.key, listen=setup.listen, epoch=Coordinator.FIRST_EPOCH)
        mailbox = Mailbox(setup.worker, transport)
        client = make_client(mailbox)
        worker = Worker(setup, client, mailbox, transport)
        worker.train(_wait_for_start(mailbox, client))
        return 0
    except FencedError as error:
        print(str(error), flush=True)
        return 1
    except Exception as error:
        traceback.print_exc()
        if client is not None:
            client.send(_failure(setup.worker, worker, error), durable=True)
        return 1
    finally:
        if worker is not None:
            worker.close()
        if client is not None:
            client.close(FLUSH_TIMEOUT_S)
        if transport is not None:
            transport.close()


def _check_coordinator(client: ControlClient, waited_for: str) -> None:
    """Ends a wait whose end only a coordinator can see to, if there is none.

    Raises:
        WaitTimeoutError: there has been none for `NO_COORDINATOR_S`.
    """
    gone_s = client.disconnected_s
    if gone_s > NO_COORDINATOR_S:
        raise WaitTimeoutError(f"{waited_for}, and no coordinator has answered for {gone_s:.0f} s")


def _wait_for_start(mailbox: Mailbox, client: ControlClient) -> dict[int, str]:
    """Waits for the peers' addresses; a question that comes before them is answered afterwards.

    Raises:
        FencedError: the job goes on, or has ended, without this worker.
        WaitTimeoutError: there is no coordinator.
    """
    mailbox.activity.wait(START)
    early: list[ToWorker] = []
    while True:
        try:
            message = mailbox.next(START_TURN_S)
        except WaitTimeoutError:
            _check_coordinator(client, "the start has not been given")
            continue
        if isinstance(message, Start):
            for question in reversed(early):
                mailbox.put_back(question)
            return message.addresses
        if isinstance(message, Fenced | Exit):
            raise FencedError("the job has ended before it began" if isinstance(message, Exit) else message.reason)
        early.append(message)


def _failure(worker_id: int, worker: Worker | None, error: Exception) -> Failed:
    cause = error.__cause__ if isinstance(error, LayerError) and error.__cause__ is not None else error
    summary = str(error) if isinstance(error, LayerError) else f"{type(error).__name__}: {error}"
    step = worker.engine.step if worker is not None else 0
    place = f"step {step}"
    if isinstance(error, LayerError):
        place = f"step {error.position.step}, micro-batch {error.position.microbatch}"
    elif step and not isinstance(error, VoteError):
        summary += f" (in step {step})"
    return Failed(
        worker=worker_id,
        kind=type(cause).__name__,
        signature=f"{type(cause).__name__} at {place}",
        summary=summary,
        # What the vote has found says all; where in this code that was said does not help anybody.
        traceback_text="" if isinstance(error, VoteError) else "".join(traceback.format_exception(cause)),
    )
