"""Times and describes recoveries: from the fault (or the first suspicion) until training goes on."""

from dataclasses import dataclass, field
from pathlib import Path

from elaswave.faults.injection import FAULTS_FILE, FaultRecord, read_fault_records
from elaswave.observability.result import Recovery
from elaswave.protocol.coordinator import Raised, Suspected
from elaswave.protocol.detection import Position
from elaswave.protocol.messages import Decision, Installed
from elaswave.types import Layout
from elaswave.worker.messages import StepReport

_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass
class _Rise:
    """One rise of the epoch that is being dealt with."""

    suspicions: list[Suspected]
    detected_s: float
    faults: dict[int, FaultRecord]
    places: dict[int, tuple[int, str]]
    """Step and phase of those of whom it is known."""
    stages: dict[int, int]
    rerouted: int
    decided_s: float = 0.0
    plan_s: float = 0.0
    decision: Decision | None = None
    resumed_s: float = 0.0
    redone_s: float = 0.0
    """When the next step was committed, if that is known already."""
    installed: dict[int, Installed] = field(default_factory=dict)
    promoted: int = 0
    epochs: list[int] = field(default_factory=list)


class RecoveryLog:
    """Collects what a recovery report needs as it happens.

    Args:
        run_dir: where injected faults leave their time stamps.
        num_steps: of the run.
    """

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._positions: dict[int, Position] = {}
        self._rise: _Rise | None = None
        self._waiting: list[_Rise] = []
        """Resumed, and waiting for the redone step."""
        self._details: dict[tuple[int, int | None], tuple[int, int, int]] = {}
        """Stage, rerouted micro-batches and promoted blocks by (epoch, worker), for the readable line."""

    def seen(self, worker: int, position: Position) -> None:
        """A heartbeat: where the worker is."""
        self._positions[worker] = position

    def raised(self, effect: Raised, layout: Layout, now_s: float) -> None:
        """The epoch has risen; another rise before the decision continues the same recovery."""
        if self._rise is not None and self._rise.redone_s:
            self._go_on(self._rise.resumed_s)  # who has not said that it goes on may be who is lost now
        if self._rise is None:
            self._rise = _Rise([], now_s, {}, {}, {}, 0)
        rise = self._rise
        rise.epochs.append(effect.epoch)
        for suspicion in effect.suspicions:
            worker = suspicion.worker
            rise.suspicions.append(suspicion)
            fault = self._fault_of(worker)
            if fault is not None:
                rise.faults[worker] = fault
                rise.places[worker] = (fault.step, fault.phase or "any")
            elif worker in self._positions:
                rise.places[worker] = _place_of(self._positions[worker])
            if worker in layout.workers:
                rise.stages[worker] = layout.stage_of(worker)
            rise.rerouted += sum(any(hop.worker == worker for hop in route) for route in layout.routes)

    def _fault_of(self, worker: int) -> FaultRecord | None:
        records = read_fault_records(self._run_dir / FAULTS_FILE)
        return next((record for record in reversed(records) if record.worker == worker), None)

    def decided(self, decision: Decision, now_s: float, plan_s: float) -> None:
        """Survivors know how to go on.

        Args:
            now_s: monotonic time.
            plan_s: seconds that the planner took.
        """
        if self._rise is not None:
            self._rise.decided_s = now_s
            self._rise.plan_s = plan_s
            self._rise.decision = decision
            self._rise.installed.clear()
            self._rise.promoted += decision.promoted

    def installed(self, message: Installed) -> None:
        """A survivor has carried out a decision."""
        for rise in (self._rise, *self._waiting):
            if rise is not None and rise.decision is not None and rise.decision.epoch == message.epoch:
                rise.installed[message.worker] = message

    def resumed(self, now_s: float) -> list[Recovery]:
        """Every survivor computes again: recoveries that this completes, because the next step is known to be done."""
        rise = self._rise
        if rise is None:
            return []
        self._go_on(rise.resumed_s or now_s)
        return self._done([rise]) if rise.redone_s else []

    def _go_on(self, resumed_s: float) -> None:
        if self._rise is not None and self._rise.decision is not None:
            self._rise.resumed_s = resumed_s
            self._waiting.append(self._rise)
            self._rise = None

    def committed(self, report: StepReport) -> list[Recovery]:
        """The next step is done: recoveries that it completes."""
        rise = self._rise
        if rise is not None and not rise.redone_s and _is_redo(rise, report):
            # Its vote needed everybody, so everybody had gone on; what they have to say of it is still on its way.
            rise.redone_s, rise.resumed_s = report.finished_s, report.finished_s - report.duration_s
        for waiting in self._waiting:
            if not waiting.redone_s and _is_redo(waiting, report):
                waiting.redone_s = report.finished_s
        return self._done([waiting for waiting in self._waiting if waiting.redone_s])

    def flush(self) -> list[Recovery]:
        """The job ends: recoveries after which no step was left to run, or of which not everybody has been heard."""
        if self._rise is not None:
            self._go_on(self._rise.resumed_s or self._rise.decided_s)
        return self._done(list(self._waiting))

    def _done(self, done: list[_Rise]) -> list[Recovery]:
        self._waiting = [rise for rise in self._waiting if rise not in done]
        return [entry for rise in done for entry in self._entries(rise, rise.redone_s or rise.resumed_s)]

    def _entries(self, rise: _Rise, redone_s: float) -> list[Recovery]:
        decision = rise.decision
        assert decision is not None
        entries = []
        for suspicion in rise.suspicions:
            # Of one that a coordinator of before has known, and this one has not heard, the decision tells the step.
            unknown = (min(decision.resume_step, self._num_steps), "any")
            step, phase = rise.places.get(suspicion.worker, unknown)
            fault = rise.faults.get(suspicion.worker)
            begin_s = rise.detected_s if fault is None else fault.time_s
            retried = step >= decision.resume_step
            edit_s = max((installed.edit_s for installed in rise.installed.values()), default=0.0)
            promote_s = max((installed.promote_s for installed in rise.installed.values()), default=0.0)
            redo_s = redone_s - rise.resumed_s if retried else 0.0
            entry = Recovery(
                kind="lost",
                worker=suspicion.worker,
                step=step,
                phase=phase,
                detected_by=suspicion.detected_by,  # type: ignore[arg-type]
                epoch=decision.epoch,
                attempt=decision.resume_attempt,
                outcome="retried" if retried else "committed",
                detect_s=None if fault is None else rise.detected_s - begin_s,
                agree_s=rise.decided_s - rise.detected_s - rise.plan_s,
                plan_s=rise.plan_s,
                edit_s=edit_s,
                promote_s=promote_s,
                redo_s=redo_s,
                total_s=rise.resumed_s - begin_s + redo_s,
                critical_bytes=sum(installed.critical_bytes for installed in rise.installed.values()),
                num_microbatches_recomputed=decision.layout.num_microbatches if retried else 0,
            )
            stage = rise.stages.get(suspicion.worker, -1)
            self._details[entry.epoch, entry.worker] = (stage, rise.rerouted, rise.promoted)
            entries.append(entry)
        return entries

    def describe(self, recovery: Recovery) -> str:
        """One readable line."""
        stage, rerouted, promoted = self._details[recovery.epoch, recovery.worker]
        waited_s = recovery.total_s - recovery.redo_s
        redone = f", step redone in {recovery.redo_s * 1e3:.0f} ms" if recovery.outcome == "retried" else ""
        place = "" if recovery.phase == "any" else f"{recovery.phase} of "
        return (
            f"worker {recovery.worker} (stage {stage}) lost in {place}step {recovery.step} "
            f"({recovery.detected_by}): epoch {recovery.epoch}, {rerouted} micro-batches rerouted, "
            f"{promoted} blocks promoted, {recovery.critical_bytes} B moved, going on after "
            f"{waited_s * 1e3:.0f} ms{redone}"
        )

    def restarted(self, ended_s: float, now_s: float, step: int, epoch: int) -> Recovery:
        """A new coordinator has taken over."""
        return Recovery(
            kind="coordinator",
            worker=None,
            step=step,
            phase="any",
            detected_by="exit",
            epoch=epoch,
            attempt=1,
            outcome="committed",
            detect_s=0.0,
            agree_s=0.0,
            plan_s=0.0,
            edit_s=0.0,
            promote_s=0.0,
            redo_s=0.0,
            total_s=now_s - ended_s,
            critical_bytes=0,
            num_microbatches_recomputed=0,
        )


def _is_redo(rise: _Rise, report: StepReport) -> bool:
    """Whether a step was committed after a recovery's decision, and so by everybody who has carried it out."""
    decision = rise.decision
    return decision is not None and report.epoch >= rise.epochs[-1] and report.step >= decision.resume_step


def _place_of(position: Position) -> tuple[int, str]:
    """Step and phase of a position."""
    label = position.label.lstrip("0123456789")
    return (position.step, _PHASES.get(label[:1], position.label) if position.label[:1].isdigit() else label)
