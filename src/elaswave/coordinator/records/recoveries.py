"""Times and describes recoveries: from the fault (or the first suspicion) until training goes on; joins and leaves,
from the pause on; and planned changes of the layout, for which nobody waits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elaswave.channel.messages.worker import StepReport
from elaswave.faults.injection import FaultRecord, read_fault_records
from elaswave.observability.events import LayoutChosen
from elaswave.observability.processes import clock_here
from elaswave.observability.result import Recovery
from elaswave.observability.run_folder import FAULTS_FILE, last_lines
from elaswave.protocol.detection.detector import WorkerActivity
from elaswave.protocol.events import NewGeneration, Suspected
from elaswave.protocol.messages import Decision, Installed
from elaswave.types import Layout

_SLOWER_MIN = 0.01
"""Speeds of two plans that differ by less are the same one."""
_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass
class _OpenRecovery:
    """One recovery that is being dealt with."""

    suspicions: list[Suspected]
    detected_s: float
    faults: dict[int, FaultRecord]
    places: dict[int, tuple[int, str]]
    """Step and phase of those of whom it is known."""
    stages: dict[int, int]
    rerouted: int
    joined: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    unsound: list[int] = field(default_factory=list)
    decided_s: float = 0.0
    plan_s: float = 0.0
    decision: Decision | None = None
    resumed_s: float = 0.0
    redone_s: float = 0.0
    """When the next step was committed, if that is known already."""
    installed: dict[int, Installed] = field(default_factory=dict)
    promoted: int = 0
    generations: list[int] = field(default_factory=list)


class RecoveryLog:
    """Collects what a recovery report needs as it happens.

    Args:
        run_dir: where injected faults leave their time stamps, and workers their logs.
        num_steps: of the run.
    """

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        self._run_dir = run_dir
        self._num_steps = num_steps
        self._clock = clock_here()
        self._activities: dict[int, WorkerActivity] = {}
        self._open: _OpenRecovery | None = None
        self._waiting: list[_OpenRecovery] = []
        """Resumed, and waiting for the redone step."""
        self._details: dict[tuple[int, int | None], tuple[int, int, int]] = {}
        """Stage, rerouted micro-batches and promoted blocks by (generation, worker), for the readable line."""

    def seen(self, worker: int, activity: WorkerActivity) -> None:
        """Notes from a heartbeat where the worker is."""
        self._activities[worker] = activity

    def new_generation(self, effect: NewGeneration, layout: Layout, now_s: float) -> None:
        """A new generation has begun; another one before the decision continues the same recovery."""
        if self._open is not None and self._open.redone_s:
            self._go_on(self._open.resumed_s)  # who has not said that it goes on may be who is lost now
        if self._open is None:
            self._open = _OpenRecovery([], now_s, {}, {}, {}, 0)
        pending = self._open
        pending.generations.append(effect.generation)
        pending.joined += effect.joined
        pending.left += effect.left
        pending.unsound += effect.unsound
        for suspicion in effect.suspicions:
            worker = suspicion.worker
            pending.suspicions.append(suspicion)
            fault = self._fault_of(worker)
            if fault is not None:
                pending.faults[worker] = fault
                pending.places[worker] = (fault.step, fault.phase or "any")
            elif worker in self._activities:
                pending.places[worker] = _place_of(self._activities[worker])
            if worker in layout.active:
                pending.stages[worker] = layout.stage_of(worker)
            pending.rerouted += sum(any(hop.worker == worker for hop in route) for route in layout.routes)

    def _fault_of(self, worker: int) -> FaultRecord | None:
        records = read_fault_records(self._run_dir / FAULTS_FILE)
        return next((record for record in reversed(records) if record.worker == worker and record.loses), None)

    def decided(self, decision: Decision, now_s: float, plan_s: float) -> None:
        """Survivors know how to go on.

        Args:
            now_s: monotonic time.
            plan_s: seconds that the planner took.
        """
        if self._open is not None:
            # A successor that takes over before the decision learns from it who comes and goes.
            self._open.joined += [worker for worker in decision.joined if worker not in self._open.joined]
            self._open.left += [worker for worker in decision.left if worker not in self._open.left]
            self._open.decided_s = now_s
            self._open.plan_s = plan_s
            self._open.decision = decision
            self._open.installed.clear()
            self._open.promoted += decision.promoted

    def installed(self, message: Installed) -> None:
        """A survivor has carried out a decision."""
        for pending in (self._open, *self._waiting):
            if (
                pending is not None
                and pending.decision is not None
                and pending.decision.generation == message.generation
            ):
                pending.installed[message.worker] = message

    def resumed(self, now_s: float) -> list[Recovery]:
        """Notes that every survivor computes again, and lists recoveries that this completes, because the next step is
        known to be done."""
        pending = self._open
        if pending is None:
            return []
        self._go_on(pending.resumed_s or now_s)
        return self._done([pending]) if pending.redone_s else []

    def _go_on(self, resumed_s: float) -> None:
        if self._open is not None and self._open.decision is not None:
            self._open.resumed_s = resumed_s
            self._waiting.append(self._open)
            self._open = None

    def committed(self, report: StepReport, finished_s: float) -> list[Recovery]:
        """Notes that the next step is done, and lists recoveries that it completes.

        Args:
            finished_s: when it was, by this process's clock.
        """
        pending = self._open
        if pending is not None and not pending.redone_s and _is_redo(pending, report):
            # Its vote needed all members, so all had gone on; their reports of it are still on their way.
            pending.redone_s, pending.resumed_s = finished_s, finished_s - report.duration_s
        for waiting in self._waiting:
            if not waiting.redone_s and _is_redo(waiting, report):
                waiting.redone_s = finished_s
                if waiting.redone_s <= waiting.resumed_s:  # the last member was heard after it had made the step
                    waiting.resumed_s = finished_s - report.duration_s
        return self._done([waiting for waiting in self._waiting if waiting.redone_s])

    def flush(self) -> list[Recovery]:
        """Notes that the job ends, and lists recoveries after which no step was left to run, or of which some members
        have not reported."""
        if self._open is not None:
            self._go_on(self._open.resumed_s or self._open.decided_s)
        return self._done(list(self._waiting))

    def _done(self, done: list[_OpenRecovery]) -> list[Recovery]:
        self._waiting = [pending for pending in self._waiting if pending not in done]
        return [entry for pending in done for entry in self._entries(pending, pending.redone_s or pending.resumed_s)]

    def _entries(self, pending: _OpenRecovery, redone_s: float) -> list[Recovery]:
        decision = pending.decision
        assert decision is not None
        entries = []
        for suspicion in pending.suspicions:
            fault = pending.faults.get(suspicion.worker)
            step, phase = pending.places.get(suspicion.worker, (0, "any"))
            if fault is None and _has_voted_since(step, phase, decision):
                # Steps may be quicker than heartbeats, and a successor has heard none: the decision tells the step.
                step, phase = min(decision.resume_step, self._num_steps), "any"
            if fault is not None and fault.clock != self._clock:
                fault = None  # it struck on another host: by this clock nobody knows when
            begin_s = pending.detected_s if fault is None else fault.time_s
            retried = step >= decision.resume_step
            edit_s = max((installed.edit_s for installed in pending.installed.values()), default=0.0)
            promote_s = max((installed.promote_s for installed in pending.installed.values()), default=0.0)
            redo_s = redone_s - pending.resumed_s if retried else 0.0
            entry = Recovery(
                kind="lost",
                worker=suspicion.worker,
                step=step,
                phase=phase,
                detected_by=suspicion.detected_by,  # type: ignore[arg-type]
                generation=decision.generation,
                attempt=decision.resume_attempt,
                outcome="retried" if retried else "committed",
                detect_s=None if fault is None else pending.detected_s - begin_s,
                agree_s=pending.decided_s - pending.detected_s - pending.plan_s,
                plan_s=pending.plan_s,
                edit_s=edit_s,
                promote_s=promote_s,
                redo_s=redo_s,
                total_s=pending.resumed_s - begin_s + redo_s,
                critical_bytes=sum(installed.critical_bytes for installed in pending.installed.values()),
                num_microbatches_recomputed=_num_recomputed(decision) if retried else 0,
                last_lines=last_lines(self._run_dir, suspicion.worker),
            )
            stage = pending.stages.get(suspicion.worker, -1)
            self._details[entry.generation, entry.worker] = (stage, pending.rerouted, pending.promoted)
            entries.append(entry)
        return entries + self._without_losses(pending, decision, redone_s)

    def _without_losses(self, pending: _OpenRecovery, decision: Decision, redone_s: float) -> list[Recovery]:
        """Joins, leaves and repairs."""
        who: list[tuple[Literal["joined", "drained", "repaired"], int]] = [
            *(("joined", worker) for worker in pending.joined if worker in decision.members),
            *(("drained", worker) for worker in pending.left),
            *(("repaired", worker) for worker in pending.unsound),
        ]
        return [
            Recovery(
                kind=kind,
                worker=worker,
                step=min(decision.resume_step, self._num_steps),
                phase="any",
                detected_by={"drained": "drain", "repaired": "vote"}.get(kind),  # type: ignore[arg-type]
                generation=decision.generation,
                attempt=decision.resume_attempt,
                outcome="retried" if kind == "repaired" else "committed",
                detect_s=None,
                agree_s=pending.decided_s - pending.detected_s - pending.plan_s,
                plan_s=pending.plan_s,
                edit_s=max((each.edit_s for each in pending.installed.values()), default=0.0),
                promote_s=max((each.promote_s for each in pending.installed.values()), default=0.0),
                redo_s=redone_s - pending.resumed_s if kind == "repaired" else 0.0,
                total_s=(redone_s if kind == "repaired" else pending.resumed_s) - pending.detected_s,
                critical_bytes=sum(each.critical_bytes for each in pending.installed.values()),
                num_microbatches_recomputed=_num_recomputed(decision) if kind == "repaired" else 0,
            )
            for kind, worker in who
        ]

    def describe(self, recovery: Recovery) -> str:
        """Describes a recovery in one readable line."""
        if recovery.kind == "repaired":
            return (
                f"copies that worker {recovery.worker} found wrong were made good: step {recovery.step} was done again "
                f"after {(recovery.total_s - recovery.redo_s) * 1e3:.0f} ms"
            )
        if not recovery.is_failure:
            what = "has left" if recovery.kind == "drained" else f"has {recovery.kind}"
            return f"worker {recovery.worker} {what}: training paused for {recovery.total_s * 1e3:.0f} ms"
        stage, rerouted, promoted = self._details[recovery.generation, recovery.worker]
        waited_s = recovery.total_s - recovery.redo_s
        number = recovery.num_microbatches_recomputed
        again = f" ({number} micro-batch{'' if number == 1 else 'es'} run again)"
        redone = f", step redone in {recovery.redo_s * 1e3:.0f} ms{again}" if recovery.outcome == "retried" else ""
        place = "" if recovery.phase == "any" else f"{recovery.phase} of "
        return (
            f"worker {recovery.worker} (stage {stage}) lost in {place}step {recovery.step} "
            f"({recovery.detected_by}): generation {recovery.generation}, {rerouted} micro-batches rerouted, "
            f"{promoted} blocks promoted, {recovery.critical_bytes} B moved, going on after "
            f"{waited_s * 1e3:.0f} ms{redone}{_last_words(recovery.last_lines)}"
        )

    def restarted(self, ended_s: float, now_s: float, step: int, generation: int) -> Recovery:
        """A new coordinator has taken over."""
        return Recovery(
            kind="coordinator",
            worker=None,
            step=step,
            phase="any",
            detected_by="exit",
            generation=generation,
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


def layout_changed(event: LayoutChosen, before: Layout, speeds: Mapping[int, float]) -> list[Recovery]:
    """Lists what a planned change of the layout was for: workers that have become slower, or else layers that move.

    Args:
        event: the change has come into force.
        before: the layout until then.
        speeds: that it was planned with, as of `LayoutChosen`.
    """
    slowed = [
        worker
        for worker in event.layout.workers
        if event.speeds.get(worker, 1.0) < (1 - _SLOWER_MIN) * min(1.0, speeds.get(worker, 1.0))
    ]
    causes: list[tuple[Literal["slowed", "migrated"], int | None]] = [("slowed", worker) for worker in slowed]
    if not slowed and event.layout.stages != before.stages:
        causes = [("migrated", None)]
    return [
        Recovery(
            kind=kind,
            worker=worker,
            step=event.first_step,
            phase="any",
            detected_by=None,
            generation=event.generation,
            attempt=1,
            outcome="committed",
            detect_s=None,
            agree_s=0.0,
            plan_s=0.0,
            edit_s=0.0,
            promote_s=0.0,
            redo_s=0.0,
            total_s=0.0,
            critical_bytes=0,
            num_microbatches_recomputed=0,
        )
        for kind, worker in causes
    ]


def _last_words(lines: list[str]) -> str:
    return f"; its last line: {lines[-1]}" if lines else ""


def _is_redo(pending: _OpenRecovery, report: StepReport) -> bool:
    """Tells whether a step was committed after a recovery's decision, and so by members that have all carried it
    out."""
    decision = pending.decision
    return decision is not None and report.generation >= pending.generations[-1] and report.step >= decision.resume_step


def _has_voted_since(step: int, phase: str, decision: Decision) -> bool:
    """Tells whether a lost worker was past a place: the step before the one that is resumed had the votes of all."""
    before = decision.resume_step - 1
    return step < before or (step == before and phase in ("forward", "backward", "reduce"))


def _num_recomputed(decision: Decision) -> int:
    """Micro-batches that have run in part and run again: after a return to a checkpoint, all of a step."""
    return decision.num_microbatches_recomputed if decision.rollback is None else decision.layout.num_microbatches


def _place_of(activity: WorkerActivity) -> tuple[int, str]:
    """Finds the step and phase of a position."""
    label = activity.label.lstrip("0123456789")
    return (activity.step, _PHASES.get(label[:1], activity.label) if activity.label[:1].isdigit() else label)
