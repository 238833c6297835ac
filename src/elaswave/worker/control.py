"""What is said between a worker and its coordinator: what arrives, what is measured of its steps, and what is sent.

`Mailbox` is what the worker's two threads share: messages that have arrived, and what is said on a new connection to a
coordinator. `StepWatch` sees the worker's steps: the probe's points, what heartbeats tell, the seconds of each phase,
and the trace. `ControlOutbox` makes the messages, of what the machine says and what was measured beside it;
`failure_message` those of the error that ends the worker.
"""

import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import msgspec

from elaswave.blocks.placement import ReplicaRole
from elaswave.channel.messages.worker import (
    EvaluationReport,
    Failed,
    Finished,
    Heartbeat,
    KeysNow,
    Leaving,
    LinkLost,
    Ready,
    Settled,
    StepReport,
    Stop,
    TakeCheckpoint,
    Timings,
    ToWorker,
    TrainingStanding,
)
from elaswave.config.cluster import base_level
from elaswave.devices.faults import DeviceFault, fault_of
from elaswave.engine.activity import ActionTimer, Activity
from elaswave.engine.batches import BatchError
from elaswave.engine.blueprint import Blueprint, frozen_digests
from elaswave.engine.compute import LayerError
from elaswave.engine.torch_engine import TorchEngine
from elaswave.errors import SpotCheckError, VoteError, WaitTimeoutError
from elaswave.faults.injection import Probe
from elaswave.observability.trace import ACTION, PHASE, TraceRecorder
from elaswave.protocol.messages import FIRST_GENERATION, Decision, FencedOff, Installed, Joining, Prepare, Registered
from elaswave.protocol.step.activity import DATA, PHASES, RECOVER, action_kind
from elaswave.protocol.step.ballot import Request
from elaswave.protocol.step.engine import Committed, Phase, StepObserver
from elaswave.protocol.step.machine import KEPT_REPORTS, WorkerMachine
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.state.flat import BlockStore, HeldBlock, Scalars
from elaswave.training.raised import readable, said, traceback_of
from elaswave.transport.interface import Transport
from elaswave.types import Action, Gauges
from elaswave.worker.links import TransportLinks, WorkerClient


class SharedReplayedState(ReplayedState):
    """Standing facts that several threads note and read."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def ready(self, message: Any) -> None:
        """See `ReplayedState.ready`."""
        with self._lock:
            super().ready(message)

    def link_lost(self, peer: int, message: Any) -> None:
        """See `ReplayedState.link_lost`."""
        with self._lock:
            super().link_lost(peer, message)

    def linked(self, message: Any) -> None:
        """See `ReplayedState.linked`."""
        with self._lock:
            super().linked(message)

    def paused(self, message: Any) -> None:
        """See `ReplayedState.paused`."""
        with self._lock:
            super().paused(message)

    def unsound(self, message: Any) -> None:
        """See `ReplayedState.unsound`."""
        with self._lock:
            super().unsound(message)

    def part(self, step: int, generation: int, message: Any) -> None:
        """See `ReplayedState.part`."""
        with self._lock:
            super().part(step, generation, message)

    def leaving(self, message: Any) -> None:
        """See `ReplayedState.leaving`."""
        with self._lock:
            super().leaving(message)

    def ended(self, message: Any) -> None:
        """See `ReplayedState.ended`."""
        with self._lock:
            super().ended(message)

    def moved(self) -> None:
        """See `ReplayedState.moved`."""
        with self._lock:
            super().moved()

    def settled(self, step: int) -> None:
        """See `ReplayedState.settled`."""
        with self._lock:
            super().settled(step)

    def rolled_back(self, step: int) -> None:
        """See `ReplayedState.rolled_back`."""
        with self._lock:
            super().rolled_back(step)

    def standing(self) -> list[Any]:
        """See `ReplayedState.standing`."""
        with self._lock:
            return super().standing()


class Mailbox:
    """What a worker's two threads share.

    Args:
        worker: its id.
        transport: woken when a message concerns the step in hand.
    """

    def __init__(self, worker: int, transport: Transport) -> None:
        self.urgent = False
        """Whether a message waits that the main thread must see before it goes on."""
        self.must_stop = False
        """Whether the coordinator has told this worker to ask for the end."""
        self.num_held = (0, 0)
        """Blocks that it owns and follows, for heartbeats."""
        self.registration = Registered(
            worker=worker, address=transport.address, generation=FIRST_GENERATION, report=None
        )
        """As of `WorkerMachine.registration`, which another thread must not ask."""
        self.joining: Joining | None = None
        """What a worker says instead that is no member yet."""
        self.replayed_state = SharedReplayedState()
        self.on_commit: Callable[[], None] = lambda: None
        """Called on the main thread whenever this worker has committed a step."""
        self.on_keys: Callable[[KeysNow], None] = lambda message: None
        self.on_fenced_off: Callable[[FencedOff], None] = lambda message: None
        """Called on the control client's thread."""
        self._gone_at_s = math.inf
        """Monotonic time at which the machine will be taken away, once there was a notice."""
        self.activity = Activity()
        self.place = (FIRST_GENERATION, 0, 0)
        """Generation, step and attempt, for heartbeats."""
        self._transport = transport
        self._wanted = (0, -1)
        """The newest (generation, step) after which the coordinator wants a checkpoint."""
        self._asked = (0, 0)
        """(generation, step) of the newest vote that has asked for one and committed. Both are compared, never cleared:
        one thread sets the one, the other the other."""
        self._messages: deque[ToWorker] = deque()
        self._changed = threading.Condition()

    def hello(self) -> Registered | Joining:
        """Returns the first message on a new connection."""
        return self.joining or self.registration

    def standing(self) -> list[Any]:
        """Lists what is said on a new connection after all that has not been acknowledged."""
        left_s = self._gone_at_s - time.monotonic()
        return [
            msgspec.structs.replace(fact, left_s=max(0.0, left_s)) if isinstance(fact, Leaving) else fact
            for fact in self.replayed_state.standing()
        ]

    def leaving_within(self, left_s: float) -> Leaving:
        """The worker's machine will be taken away; from now on it is said on every new connection.

        Args:
            left_s: seconds until then.
        Returns:
            What is to be said now.
        """
        leaving = Leaving(worker=self.registration.worker, left_s=left_s)
        # Before the fact is noted: another thread may say it at once, with the time that is left.
        self._gone_at_s = time.monotonic() + left_s
        self.replayed_state.leaving(leaving)
        return leaving

    def heartbeat(self) -> Heartbeat | None:
        """Tells where the main thread is; returns None for a worker that is no member yet, of which nobody asks."""
        if self.joining is not None:
            return None
        doing, now_s = self.activity.snapshot(), time.monotonic()
        generation, step, attempt = self.place
        return Heartbeat(
            worker=self.registration.worker,
            generation=generation,
            step=step,
            attempt=attempt,
            label=doing.label,
            computing=doing.computing,
            waiting_on=doing.waiting_on,
            since_s=now_s - doing.since_s,
            num_owned=self.num_held[0],
            num_followed=self.num_held[1],
            moved_bytes=self._transport.moved_bytes,
            starved_s=doing.starved_s,
            first_s=now_s - doing.began_s if doing.is_first else 0.0,
        )

    @property
    def request(self) -> Request:
        """What the coordinator has told this worker to ask for in its next ballot."""
        if self.must_stop:
            return Request.STOP
        return Request.CHECKPOINT if self._wanted >= self._asked else Request.NONE

    def asked_for_checkpoint(self, generation: int, step: int) -> None:
        """A vote has asked for a checkpoint, or for the end, and has committed a step."""
        self._asked = max(self._asked, (generation, step))

    def receive(self, message: ToWorker) -> None:
        """Takes a message; called on the control client's thread."""
        # Messages of the first four kinds do not concern the step in hand: the main thread is not woken for them.
        if isinstance(message, Stop):
            self.must_stop = True
            return
        if isinstance(message, TakeCheckpoint):
            self._wanted = max(self._wanted, (message.generation, message.after))
            return
        if isinstance(message, Settled):
            self.replayed_state.settled(message.step)
            return
        if isinstance(message, KeysNow):
            self.on_keys(message)
            return
        with self._changed:
            self._messages.append(message)
            self._look()
            self._changed.notify()
        # Only once the message is in the box: there the main thread looks when it is woken.
        if isinstance(message, Prepare | FencedOff) and self.is_urgent(message):
            self._transport.interrupt(message.reason, message.generation)
        if isinstance(message, FencedOff):
            self.on_fenced_off(message)

    def is_urgent(self, message: ToWorker) -> bool:
        """Tells whether a message ends the step in hand. A question that has been answered, and is asked again by a new
        coordinator, does not: it must never take a worker out of a step that nothing has happened to."""
        if isinstance(message, Prepare):
            return message.generation > self.registration.generation
        return isinstance(message, FencedOff)

    @property
    def is_empty(self) -> bool:
        """Whether no message waits; costs nothing."""
        return not self._messages

    def next(self, timeout_s: float) -> ToWorker:
        """Takes the oldest message; it is called on the main thread.

        Raises:
            WaitTimeoutError: none comes in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._messages), max(0.0, timeout_s)):
                raise WaitTimeoutError(f"the coordinator has said nothing for {timeout_s:.0f} s")
            message = self._messages.popleft()
            self._look()
            return message

    def registers_as(self, registration: Registered) -> None:
        """What this worker says of itself has changed, and with it which messages are urgent."""
        with self._changed:
            self.registration, self.joining = registration, None
            self._look()

    def _look(self) -> None:
        self.urgent = any(map(self.is_urgent, self._messages))


COUNTED = ("memory_used_bytes", "allocated_bytes", "utilization", "power_w")
"""Of a device's gauges, those that have a line in the trace."""


class StepWatch(StepObserver):
    """Watches the steps of one worker.

    Args:
        probe: told of every point.
        mailbox: its heartbeats tell what the worker is doing, and where.
        trace: records phases and actions.
        gauges: what the device tells of itself; recorded with each step.
    """

    def __init__(
        self, probe: Probe, mailbox: Mailbox, trace: TraceRecorder, gauges: Callable[[], Gauges | None] = lambda: None
    ) -> None:
        self.machine: WorkerMachine[HeldBlock]
        self.phases_s: dict[str, float] = {}
        """Seconds of this worker in each phase of the present step, and as "data" those that RUN has waited for micro-
        batches, all attempts added, interrupted ones too."""
        self.data_wait_s = 0.0
        """Seconds that the worker has waited for micro-batches of training, in all."""
        self.step_began_s = 0.0
        self.evaluation_began_s = 0.0
        self.recovery_began_ns: int | None = None
        """When the recovery began that is under way."""
        self._probe = probe
        self._mailbox = mailbox
        self.activity = mailbox.activity
        self._trace = trace
        self._gauges = gauges
        self._reached: dict[Phase, int] = {}
        self._phase: str | None = None
        """The phase that is under way."""
        self._phase_ns = self._asked_ns = self._computing_ns = 0

    def waited_for_data(self, seconds: float) -> None:
        """A micro-batch of training has come after so long; the time is a part of RUN."""
        self.phases_s[DATA] = self.phases_s.get(DATA, 0.0) + seconds
        self.data_wait_s += seconds

    def step_begins(self, step: int, attempt: int) -> None:
        """Starts the step's clock."""
        self.step_began_s = time.monotonic()
        self._mailbox.place = (self.machine.member.generation, step, attempt)
        self._mailbox.num_held = self._num_held()

    def _num_held(self) -> tuple[int, int]:
        """Counts how many blocks the worker owns and follows."""
        num_owned = sum(held.role is ReplicaRole.OWNER for held in self.machine.copies.values())
        return num_owned, len(self.machine.copies) - num_owned

    def evaluation_begins(self) -> None:
        """Starts the evaluation's clock."""
        self.evaluation_began_s = time.monotonic()

    def began(self) -> None:
        """Counts points anew; in the first attempt also seconds."""
        self._reached = {}
        if self.machine.attempt == 1:
            self.phases_s.clear()

    def doing(self, label: str, *, computing: bool) -> None:
        """Tells the heartbeat."""
        if computing:
            self.activity.compute(label)
        else:
            self.activity.wait(label)

    def acting(self, action: Action) -> None:
        """Tells the heartbeat and the probe."""
        self.activity.compute(str(action))
        self.point("forward" if action.kind == "F" else "backward")
        self._asked_ns = time.monotonic_ns()

    def computing(self, action: Action) -> None:
        """The action's input has come."""
        self._computing_ns = time.monotonic_ns()

    def acted(self, action: Action) -> None:
        """Records the action."""
        self.activity.has_run()
        if self._trace.enabled:
            self._trace.add("wait", "wait", self._asked_ns, self._computing_ns, {"for": str(action)})
            self._trace.add(str(action), ACTION, self._computing_ns, time.monotonic_ns(), {"step": self.machine.step})

    def point(self, phase: Phase) -> None:
        """Tells the probe, which may strike here."""
        index = self._reached.get(phase, 0)
        self._reached[phase] = index + 1
        self._probe.reached(phase, index, self.machine)

    def enter(self, phase: str) -> None:
        """Starts the phase's clock."""
        self._phase, self._phase_ns = phase, time.monotonic_ns()

    def leave(self, phase: str) -> None:
        """Records the phase."""
        end_ns = self._end_phase(phase)
        # As an action does, APPLY may take any time the first time, and about as long from then on.
        if phase == "apply":
            self.activity.has_run()
        if not self._trace.enabled:
            return
        where = {"step": self.machine.step, "attempt": self.machine.attempt}
        self._trace.add(phase.upper(), PHASE, self._phase_ns, end_ns, where)
        if phase == "vote" and (gauges := self._gauges()) is not None:
            for name, value in msgspec.structs.asdict(gauges).items():
                if value is not None and name in COUNTED:
                    self._trace.count(name, end_ns, value)

    def _end_phase(self, phase: str) -> int:
        """Adds its seconds; returns when it ended."""
        end_ns = time.monotonic_ns()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + (end_ns - self._phase_ns) * 1e-9
        self._phase = None
        return end_ns

    def _interrupt_phase(self) -> None:
        """Adds the seconds of a phase that will not be left: its attempt has ended."""
        if self._phase is not None:
            self._end_phase(self._phase)

    def recovering(self) -> None:
        """The worker waits for the coordinator's decision."""
        self._interrupt_phase()
        if self.recovery_began_ns is None:
            self.recovery_began_ns = time.monotonic_ns()
        self.activity.wait(RECOVER)

    def moved(self) -> None:
        """A new connection's first words are other ones now."""
        self._interrupt_phase()
        self._note_registration()

    def installed(self, decision: Decision) -> None:
        """Notes that a new connection's first words are other ones now, and records the recovery."""
        self._note_registration()
        begin_ns, self.recovery_began_ns = self.recovery_began_ns, None
        if begin_ns is not None:
            where = {"generation": decision.generation, "step": decision.resume_step}
            self._trace.add("RECOVERY", PHASE, begin_ns, time.monotonic_ns(), where)

    def _note_registration(self) -> None:
        address = self._mailbox.registration.address
        self._mailbox.registers_as(self.machine.registration(address))


TIMINGS_EVERY_S_MIN = 1.0
TIMINGS_EVERY_S_MAX = 4.0
"""A worker tells how long its actions take after so long at first, and then less and less often, down to this."""


class _DataTime(NamedTuple):
    """How long a worker has waited for data, and when that was so."""

    at_s: float
    data_wait_s: float


class ControlOutbox:
    """See `elaswave.protocol.step.engine.Outbox` for what its methods promise.

    Args:
        blueprint: the run.
        client: the connection to the coordinator.
        mailbox: what arrives there.
        links: measure how long they took.
        watch: measures steps.
        timer: measures actions.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        client: WorkerClient,
        mailbox: Mailbox,
        links: TransportLinks,
        watch: StepWatch,
        timer: ActionTimer,
    ) -> None:
        self.machine: WorkerMachine[HeldBlock]
        self.level = base_level(blueprint.config)
        """Index of the frequency level at which the device runs."""
        self._config = blueprint.config
        self._blueprint = blueprint
        self._client = client
        self._mailbox = mailbox
        self._links = links
        self._watch = watch
        self._timer = timer
        self._timed_at_s = 0.0
        """When the newest `Timings` were sent."""
        self._timings_every_s = TIMINGS_EVERY_S_MIN
        self._waits_from = _DataTime(0.0, 0.0)
        """When `Timings` told last how long was waited for data."""
        self._runs_s: deque[float] = deque(maxlen=256)
        """Seconds of RUN of the steps since `Timings` were sent last."""
        self.is_stopping = False
        """Whether the newest committed step is the last one because the job was asked to stop."""
        self._finished_s: dict[int, float] = {}
        """When the newest steps were done."""
        self._has_warmed_up = False
        """Whether the first step is over, which also loads code and fills caches."""

    def send(self, message: Any, *, durable: bool = False) -> None:
        """Sends a message."""
        if isinstance(message, StepReport):
            # A report may be sent again, by another worker or long after its step (W9).
            message = msgspec.structs.replace(message, ago_s=time.monotonic() - self._finished_s[message.step])
        self._client.send(message, durable=durable) if durable else self._client.send(message)

    def request(self) -> Request:
        """Returns what the coordinator has told this worker to ask for."""
        return self._mailbox.request

    def ready(self) -> Ready:
        """Says that the worker is ready, with what computes here, for the log."""
        text = self._engine.environment().text if self._config.elastic.verify else ""
        return Ready(worker=self.machine.worker, environment=text)

    def link_lost(self, peer: int, detail: str) -> LinkLost:
        """The link to a peer has ended."""
        return LinkLost(worker=self.machine.worker, peer=peer, generation=self.machine.member.generation, detail=detail)

    def committed(self, committed: Committed) -> StepReport:
        """Reports a committed step; now and then it also reports how long actions take."""
        self._mailbox.on_commit()
        self.is_stopping = committed.request is Request.STOP
        if committed.request in (Request.CHECKPOINT, Request.STOP):
            self._mailbox.asked_for_checkpoint(self.machine.member.generation, committed.step)
        if committed.was_run:
            # The seconds of all attempts are added up: they are those of one RUN only if there was one attempt.
            if committed.attempt == 1:
                self._runs_s.append(self._watch.phases_s.get("run", 0.0))
            self._report_timings(committed.step)
        finished_s = self._finished_s[committed.step] = time.monotonic()
        self._finished_s.pop(committed.step - KEPT_REPORTS, None)
        skipped = committed.nonfinite
        layer_name = self.machine.terms.layer_name
        num_in_place, num_moving = self.machine.move_progress
        return StepReport(
            worker=self.machine.worker,
            generation=self.machine.member.generation,
            step=committed.step,
            attempt=committed.attempt,
            loss=committed.loss,
            norm=committed.norm,
            learning_rate=self._engine.updater.learning_rate,
            duration_s=finished_s - self._watch.step_began_s if committed.was_run else 0.0,
            phases_s=dict(self._watch.phases_s),
            vector=committed.evidence.vector,
            change=committed.evidence.change,
            checkpoint=committed.evidence.checkpoint,
            retries=list(committed.retries),
            skipped=None if skipped is None else self.machine.steps.describe_nonfinite(skipped),
            skipped_microbatch=None if skipped is None else skipped.microbatch,
            skipped_layer=None if skipped is None else layer_name(skipped.layer),
            metrics=dict(committed.metrics),
            num_in_place=num_in_place,
            num_moving=num_moving,
        )

    @property
    def _engine(self) -> TorchEngine:
        engine = self.machine.engine
        assert isinstance(engine, TorchEngine)
        return engine

    def _report_timings(self, step: int) -> None:
        now_s = time.monotonic()
        if not self._has_warmed_up:
            self._timer.times.take()
            self._runs_s.clear()
            self._has_warmed_up = True
            self._waits_from = _DataTime(now_s, self._watch.data_wait_s)
        elif now_s - self._timed_at_s >= self._timings_every_s:
            self._timed_at_s = now_s
            self._timings_every_s = min(2 * self._timings_every_s, TIMINGS_EVERY_S_MAX)
            actions = self._timer.times.take()
            run_s = median(self._runs_s) if self._runs_s else 0.0
            self._runs_s.clear()
            generation = self.machine.member.generation
            before, self._waits_from = self._waits_from, _DataTime(now_s, self._watch.data_wait_s)
            self._client.send(
                Timings(
                    worker=self.machine.worker,
                    generation=generation,
                    step=step,
                    level=self.level,
                    actions=actions,
                    run_s=run_s,
                    data_wait_s=self._waits_from.data_wait_s - before.data_wait_s,
                    elapsed_s=now_s - before.at_s,
                    device=self._engine.device.gauges(),
                )
            )

    def evaluated(self, step: int, loss: float, metrics: Mapping[str, float]) -> EvaluationReport:
        """An evaluation has been made."""
        num_microbatches = self._config.run.eval_microbatches
        batch, tokens = self._config.batch.microbatch_size, self._blueprint.tokens_per_sample
        return EvaluationReport(
            worker=self.machine.worker,
            step=step,
            loss=loss,
            num_tokens=None if tokens is None else num_microbatches * batch * tokens,
            duration_s=time.monotonic() - self._watch.evaluation_began_s,
            metrics=dict(metrics),
        )

    def installed(self, received_bytes: int) -> Installed:
        """A decision is installed."""
        return Installed(
            worker=self.machine.worker,
            generation=self.machine.member.generation,
            edit_s=self._links.edit_s,
            promote_s=time.monotonic() - self._links.connected_s,
            critical_bytes=received_bytes,
        )

    def standing(self, step: int) -> TrainingStanding:
        """Describes where training stands after a step."""
        progress = self.machine.progress
        return TrainingStanding(
            generation=self.machine.member.generation,
            step=step,
            num_updates=progress.num_updates,
            exponents=list(progress.grids.exponents),
            calibrated=progress.grids.calibrated,
            optimizer=self._engine.updater.state(),
        )

    def scalars(self) -> Scalars:
        """Returns the optimizer's states that tensors have once, after the newest committed step."""
        return self._engine.updater.scalars()

    def _frozen_digests(self) -> dict[str, int]:
        machine = self.machine
        assert isinstance(machine.engine, TorchEngine)
        return frozen_digests(machine.engine.layers, machine.layout, machine.worker)

    def finished(self, stopped: bool) -> Finished:
        """Reports the last state: all workers wait until every one has said so."""
        machine, placement = self.machine, self.machine.placement
        store, scalars = BlockStore(machine.copies), self.scalars()
        owned = {block: 1 for block, owner in enumerate(placement.owner) if owner == machine.worker}
        followed = {block: len(placement.followers[block]) for block in owned}
        follows = {block: 1 for block, others in enumerate(placement.followers) if machine.worker in others}
        # Added over all workers, the last two are equal if all copies are.
        of_owner, of_followed, of_follower = store.weighted_digests(scalars, owned, followed, follows)
        return Finished(
            worker=machine.worker,
            standing=self.standing(machine.last_step),
            stopped=stopped,
            owner_digests=of_owner | self._frozen_digests(),
            followed_digests=of_followed,
            follower_digests=of_follower,
            optimizer_bytes=store.optimizer_bytes(),
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            bytes_sent=sum(self._links.transport.bytes_sent.values()),
            data_wait_s=self._watch.data_wait_s,
            fence_bypasses=self._engine.compute.fence_bypasses(),
        )


_ACTIONS = {"F": "forward", "B": "backward", "I": "backward, input half", "W": "backward, weight half"}


class FailureLocation(NamedTuple):
    """What a worker was at."""

    step: int = 0
    """0: before its first."""
    label: str = ""
    """What its heartbeat tells: an action, a phase, or another word."""


UNKNOWN_LOCATION = FailureLocation()


def failure_message(worker: int, error: BaseException, at: FailureLocation = UNKNOWN_LOCATION) -> Failed:
    """Makes the message that says what is said of an error.

    Args:
        worker: its id.
        error: that ends it.
        at: where it was raised.
    """
    if isinstance(error, BatchError):
        return Failed(
            worker=worker,
            kind=error.kind,
            signature=f"{error.kind} at {error.name}",
            summary=readable(str(error)),
            traceback_text=error.traceback_text,
        )
    cause = error.__cause__ if isinstance(error, LayerError) and error.__cause__ is not None else error
    fault = fault_of(error)
    if fault is not None:
        return Failed(
            worker=worker,
            kind=type(cause).__name__,
            signature=_fault_signature(worker, error, type(cause).__name__, fault, at),
            summary=readable(_fault_summary(error, fault, at)),
            traceback_text=traceback_of(cause),
        )
    summary = readable(str(error)) if isinstance(error, LayerError) else said(error)
    # The same signature from a second worker ends the job: it names where, and never who.
    place = f"step {at.step}"
    if isinstance(error, LayerError):
        place = _microbatch(error)
        if isinstance(cause, SpotCheckError):  # workers of one stage look at the same layer in the same step
            place = f"step {error.position.step}, layer {error.position.layer}"
    elif at.step and not isinstance(error, VoteError):
        summary += f" (in step {at.step})"
    return Failed(
        worker=worker,
        kind=type(cause).__name__,
        signature=f"{type(cause).__name__} at {place}",
        summary=summary,
        # The vote's finding says all; the place in this code where it was raised does not help the user.
        traceback_text="" if isinstance(error, VoteError) else traceback_of(cause),
        is_common=isinstance(error, VoteError),
        is_wrong=isinstance(cause, SpotCheckError),
    )


def _microbatch(error: LayerError) -> str:
    return f"step {error.position.step}, micro-batch {error.position.microbatch}"


def _fault_signature(worker: int, error: BaseException, kind: str, fault: DeviceFault, at: FailureLocation) -> str:
    """Makes a signature that is equal for what would strike whoever computes the same.

    A fault that shows late has the step for its place: one worker may have met it in an action, another in the next. A
    lost device is this worker's alone, so that several that are lost at once do not pass for a fault of the program.
    """
    if fault.is_exact:
        return f"{kind} at " + (_microbatch(error) if isinstance(error, LayerError) else f"step {at.step}")
    whose = f" of worker {worker}" if fault.is_of_the_device else ""
    return f"{fault.words} at step {at.step}{whose}"


def _fault_summary(error: BaseException, fault: DeviceFault, at: FailureLocation) -> str:
    """Names the class of the fault, the device's own words, and where they came."""
    if not at.step:
        return f"{fault.kind.value}: {fault.words}"
    where = str(error.position) if isinstance(error, LayerError) else f"step {at.step}"
    doing = _doing(at.label)
    where += f", in {doing}" if doing else ""
    if fault.is_exact:
        return f"{fault.kind.value}: {fault.words} (at {where})"
    return f"{fault.kind.value}: {fault.words} (met at {where}; what failed may have been queued before)"


def _doing(label: str) -> str:
    """Describes an action or phase as people read it; the text is empty for anything else."""
    kind = action_kind(label)
    if kind in _ACTIONS:
        stage, microbatch = label.split(kind)
        return f"{_ACTIONS[kind]} of micro-batch {microbatch} in stage {stage}"
    return label if kind in PHASES else ""
