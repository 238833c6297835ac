"""What sees a worker's steps: the probe's points, what heartbeats tell, the seconds of each phase, and the trace."""

import time
from collections.abc import Callable

import msgspec

from elaswave.blocks.placement import ReplicaRole
from elaswave.devices.gauges import Gauges
from elaswave.engine.checks.probe import Probe
from elaswave.observability.trace import ACTION, PHASE, TraceRecorder
from elaswave.protocol.messages import Decision
from elaswave.protocol.step.activity import DATA, RECOVER
from elaswave.protocol.step.engine import Phase, StepObserver
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.state.buffers import HeldBlock
from elaswave.types import Action
from elaswave.worker.mailbox import Mailbox

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
        """How many blocks the worker owns and follows."""
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
        if phase == "apply":
            self.activity.has_run()
        where = {"step": self.machine.step, "attempt": self.machine.attempt}
        self._trace.add(phase.upper(), PHASE, self._phase_ns, end_ns, where)
        if phase == "vote" and self._trace.enabled and (gauges := self._gauges()) is not None:
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
        """The same; records the recovery."""
        self._note_registration()
        begin_ns, self.recovery_began_ns = self.recovery_began_ns, None
        if begin_ns is not None:
            where = {"generation": decision.generation, "step": decision.resume_step}
            self._trace.add("RECOVERY", PHASE, begin_ns, time.monotonic_ns(), where)

    def _note_registration(self) -> None:
        address = self._mailbox.registration.address
        self._mailbox.registers_as(self.machine.registration(address))
