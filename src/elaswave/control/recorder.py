"""The books of a run: what the workers report becomes events, checkpoints, lines on the terminal, and the result.

The books publish; they take no part in steps. Every message may come twice (a coordinator can die between handling and
acknowledging it), so everything here is idempotent. What a new coordinator needs is in the journal before it is shown
or logged, and restored from there; the event log is for people, and may be incomplete. A repeated step must have the
same loss.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

import elaswave
from elaswave.control.agent_messages import ShowEvaluation, ShowStep, ShowText, ToAgent
from elaswave.control.checkpoints import Checkpoints
from elaswave.control.journal import CheckpointGivenUp, Entered, JournalRecord, Published, RecorderRecord
from elaswave.costs.profiled import ActionTiming
from elaswave.errors import CheckpointError, StateError, StoreError
from elaswave.hashing import MASK64
from elaswave.observability.events import (
    AnyEvent,
    CheckpointWritten,
    ErrorRaised,
    Evaluated,
    EventLog,
    Holdings,
    LayoutChosen,
    Recovered,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepSkipped,
    StepTimeMeasured,
    StepTimePredicted,
    TimingsMeasured,
)
from elaswave.observability.result import (
    CheckpointRecord,
    EpochRecord,
    Recovery,
    Result,
    WorkerMemory,
    from_json_float,
)
from elaswave.observability.run_folder import data_facts
from elaswave.protocol.coordinator import Coordinator
from elaswave.protocol.events import PendingWork
from elaswave.protocol.messages import Decision, LayoutChange
from elaswave.state.checkpoint import newest_committed_step
from elaswave.state.checkpoint_format import CheckpointMeta, TensorInfo, stored_name
from elaswave.state.digests import add_digests, state_digest
from elaswave.types import ExecutionParameters, Layout
from elaswave.worker.messages import (
    EvaluationReport,
    Finished,
    Holding,
    Ready,
    Standing,
    StepReport,
)
from elaswave.worker.run_plan import RunPlan

TIMINGS_EVERY_S = 1.0
"""`TimingsMeasured` are written no more often than this."""
SHRINKS_BATCH = frozenset({"torchft"})
"""Policies after whose losses a step that is tried again has fewer micro-batches."""
STEPS_LEFT_OUT = 3
"""First steps of a process that do not count for its throughput."""


class RunRecorder:
    """The books of one job.

    Args:
        plan: of the run.
        run_dir: its folder.
        checkpoint: what it resumes from: folder and description, or None.
        events: the run's log.
        persist: makes a record durable.
        records: what earlier coordinators of this job have made durable, in order; None for its first one.
        show: sends something to the terminal.
        settled: called with the step of a checkpoint that is durable, or given up.
        started_s: monotonic time at which the command began.
    """

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        *,
        checkpoint: tuple[Path, CheckpointMeta] | None,
        events: EventLog,
        persist: Callable[[RecorderRecord], None],
        records: Sequence[JournalRecord] | None,
        show: Callable[[ToAgent], None],
        settled: Callable[[int], None],
        started_s: float,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._run_dir = run_dir
        self._events = events
        self._persist = persist
        self._show = show
        self._settled = settled
        self._started_s = started_s
        self._next_timings_s = 0.0
        """When the next `TimingsMeasured` may be written."""
        self._sampler = plan.sampler(plan.open_source(run_dir / "data"))
        meta = None if checkpoint is None else checkpoint[1]
        self.first_step = 1 if meta is None else meta.step + 1
        self._losses: list[float] = [] if meta is None else [float(loss) for loss in meta.losses]
        extra = {} if meta is None else meta.extra
        self._val_losses: list[float] = [float(loss) for loss in extra.get("val_losses", [])]
        self._val_steps: list[int] = list(extra.get("val_steps", []))
        self._holdings: dict[int, Holdings] = {}
        self._first_report_s: dict[int, float] = {}
        self.checkpoints = Checkpoints(
            plan,
            run_dir,
            describe=self._describe,
            begun_s=self._first_report_s.get,
            on_written=self._on_checkpoint,
            on_given_up=self._on_given_up,
            say=self.say,
        )
        self._finished: dict[int, Finished] = {}
        self._epochs: list[EpochRecord] = []
        self._steps_s: list[float] = []
        """Seconds of the steps under the present layout."""
        self._recoveries: list[Recovery] = []
        self._start_up_s = 0.0
        self._epoch = Coordinator.FIRST_EPOCH
        self.members: tuple[int, ...] = plan.layout.workers
        self.outcome: Literal["finished", "failed", "interrupted"] | None = None
        """How an earlier coordinator has ended the job, or None."""
        self.reason = ""
        """Why it has."""
        self._tokens_per_microbatch = self._config.batch.microbatch_size * self._config.model.context_length
        elastic = self._config.elastic
        self._repeats_exactly = elastic.consistency == "bitwise" and elastic.policy not in SHRINKS_BATCH
        if records is not None:
            self._restore(records)
            return
        self._write(
            RunStarted(
                version=elaswave.__version__,
                total_steps=self._config.run.steps,
                first_step=self.first_step,
                num_workers=len(self.members),
                resumed_from=None if checkpoint is None else str(checkpoint[0].relative_to(run_dir)),
                losses=list(self._losses),
                config=self._config.to_dict(),
            )
        )

    def _restore(self, records: Sequence[JournalRecord]) -> None:
        """Takes the books over from what earlier coordinators of this job have made durable."""
        for record in records:
            if isinstance(record, Published):
                self._note_loss(record.step, record.loss)
                self._first_report_s[record.step] = record.finished_s
            elif isinstance(record, Entered):
                self._restore_event(record.event)
            elif isinstance(record, CheckpointGivenUp):
                self.checkpoints.restore_given_up(record.step)
            elif isinstance(record, Decision):
                self.checkpoints.restore_decision(record)

    def _restore_event(self, event: AnyEvent) -> None:
        if isinstance(event, Evaluated):
            self._note_validation(event.step, from_json_float(event.loss))
        elif isinstance(event, CheckpointWritten):
            self.checkpoints.restore(event.checkpoint)
        elif isinstance(event, LayoutChosen):
            self._epochs.append(event.record)
            self._epoch = event.epoch
            self.members = event.layout.workers
            self._holdings = dict(event.holdings)
            self._start_up_s = event.start_up_s or self._start_up_s
        elif isinstance(event, StepTimePredicted):
            self._note_prediction(event.predicted_step_s)
        elif isinstance(event, StepTimeMeasured):
            self._note_step_time(event.predicted_step_s, event.measured_step_s)
        elif isinstance(event, Recovered):
            self._recoveries.append(event.recovery)
        elif isinstance(event, RunFinished):
            self.outcome, self.reason = event.outcome, event.reason

    def _enter(self, event: AnyEvent) -> None:
        """Logs an event that a new coordinator must know of."""
        self._persist(Entered(event=event))
        self._write(event)

    def _write(self, event: AnyEvent) -> None:
        self._events.write(event)

    @property
    def last_step(self) -> int:
        """The newest step that has been published."""
        return len(self._losses)

    @property
    def layout(self) -> Layout:
        """The layout of the present epoch."""
        return self._epochs[-1].layout if self._epochs else self._plan.layout

    @property
    def num_restarts(self) -> int:
        """How many ends of coordinators have been reported."""
        return sum(recovery.kind == "coordinator" for recovery in self._recoveries)

    @property
    def all_finished(self) -> bool:
        """Every member has made its last step and reported its state, and every step's loss is known."""
        return set(self.members) <= set(self._finished) and all(
            self._finished[worker].standing.step <= self.last_step for worker in self.members
        )

    def say(self, text: str, *, is_error: bool = False) -> None:
        """Shows a line on the terminal."""
        self._show(ShowText(text=text, is_error=is_error))

    # ----------------------------------------------------------------------------------------------------- membership

    def ready(self, message: Ready) -> None:
        """A worker begins to train."""
        self._holdings[message.worker] = _holdings(message.holding)
        if len(self._holdings) < len(self.members) or self._epochs:
            return
        self._start_up_s = time.monotonic() - self._started_s
        reason = "as configured" if self.first_step == 1 else "as configured, resumed from a checkpoint"
        self._open_epoch(self._epoch, self._plan.layout, self._plan.execution, reason, self.first_step)

    def _open_epoch(
        self,
        epoch: int,
        layout: Layout,
        execution: ExecutionParameters,
        reason: str,
        first_step: int,
        *,
        change: int = 0,
        predicted_step_s: float | None = None,
    ) -> None:
        self.close_layout()
        schedule = execution.schedule or self._config.layout.schedule
        event = LayoutChosen(
            epoch=epoch,
            layout=layout,
            reason=reason,
            first_step=first_step,
            layer_names=list(self._plan.state.layer_names),
            layer_parameters=[sum(slot.numel for slot in shape.tensors) for shape in self._plan.shapes],
            holdings={worker: self._holdings[worker] for worker in layout.workers if worker in self._holdings},
            start_up_s=self._start_up_s,
            change=change,
            schedule=schedule,
            levels=execution.levels,
            in_flight=execution.in_flight,
            predicted_step_s=predicted_step_s,
        )
        self._epochs.append(event.record)
        self._enter(event)

    def predicted(self, predicted_step_s: float) -> None:
        """What a step of the present layout should take, if that was not known when it was chosen.

        Thinking takes its time: once the books are closed nothing is entered any more.
        """
        if self.outcome is None and self._epochs and self._epochs[-1].predicted_step_s is None:
            record = self._epochs[-1]
            self._note_prediction(predicted_step_s)
            event = StepTimePredicted(epoch=record.epoch, change=record.change, predicted_step_s=predicted_step_s)
            self._enter(event)

    def _note_prediction(self, predicted_step_s: float) -> None:
        if self._epochs:
            self._epochs[-1] = msgspec.structs.replace(self._epochs[-1], predicted_step_s=predicted_step_s)

    def changed(self, change: LayoutChange, first_step: int) -> None:
        """A planned change of the layout has come into force; may be said again."""
        if change.number <= max((record.change for record in self._epochs), default=0):
            return
        self._open_epoch(
            change.epoch,
            change.layout,
            change.execution,
            change.reason,
            first_step,
            change=change.number,
            predicted_step_s=change.predicted_step_s,
        )

    def close_layout(self) -> None:
        """The present layout is left: writes what its steps took, if any were measured."""
        steps_s, self._steps_s = self._steps_s, []
        if steps_s and self._epochs:
            record, measured_s = self._epochs[-1], median(steps_s)
            self._note_step_time(record.predicted_step_s, measured_s)
            self._enter(
                StepTimeMeasured(
                    epoch=record.epoch,
                    change=record.change,
                    predicted_step_s=record.predicted_step_s,
                    measured_step_s=measured_s,
                    num_steps=len(steps_s),
                )
            )

    def _note_step_time(self, predicted_s: float | None, measured_s: float) -> None:
        if self._epochs:
            self._epochs[-1] = msgspec.structs.replace(
                self._epochs[-1], predicted_step_s=predicted_s, measured_step_s=measured_s
            )

    def new_epoch(self, epoch: int) -> None:
        """A new epoch has begun: what was reported for the end no longer counts."""
        self._epoch = epoch
        self._finished.clear()

    def decided(self, decision: Decision) -> None:
        """Survivors go on with a decision."""
        self.members = decision.members
        self._start_up_s = self._start_up_s or time.monotonic() - self._started_s  # somebody was lost at the start
        reason = f"{decision.reason}; {decision.plan}" if decision.plan else decision.reason
        self._open_epoch(decision.epoch, decision.layout, decision.execution, reason, decision.resume_step)
        self.checkpoints.decided(decision)

    def catch_up(self, epoch: int, decision: Decision | None) -> None:
        """What an earlier coordinator has persisted and died before it could enter it here."""
        if decision is not None and decision.epoch > max((known.epoch for known in self._epochs), default=0):
            self.new_epoch(decision.epoch)
            self.decided(decision)
        if epoch > self._epoch:
            self.new_epoch(epoch)

    def unreported(self, decision: Decision) -> list[int]:
        """Workers that a decision goes on without and whose loss has no entry yet."""
        reported = {recovery.worker for recovery in self._recoveries if recovery.kind == "lost"}
        return [worker for worker in decision.lost if worker not in reported]

    def layout_before(self, epoch: int) -> Layout:
        """The layout that an epoch has replaced."""
        earlier = [record.layout for record in self._epochs if record.epoch < epoch]
        return earlier[-1] if earlier else self._plan.layout

    def recovered(self, recovery: Recovery) -> None:
        """An event has been dealt with."""
        self._recoveries.append(recovery)
        self._enter(Recovered(recovery=recovery))

    def unfinished(self, step: int, asked: bool) -> PendingWork:
        """What of a committed step is still to be done.

        Args:
            step: the newest committed one.
            asked: whether a vote asked for a durable checkpoint of it.
        """
        run = self._config.run
        in_run = self.first_step <= step
        evaluate = bool(run.eval_every) and in_run and step % run.eval_every == 0 and step not in self._val_steps
        wanted = asked or step == run.steps or (run.checkpoint_every and step % run.checkpoint_every == 0)
        written = self.checkpoints.is_written(step)
        return PendingWork(evaluate, bool(wanted) and in_run and not written, published=self.last_step)

    def advice(self) -> str:
        """What a person can do after a job that could not go on; empty if there is nothing to go back to."""
        try:
            newest = newest_committed_step(self._run_dir)  # also one that an earlier command has made
        except CheckpointError as error:
            return f"; {error}"
        return "" if newest is None else f"; `elaswave train --resume` continues from the checkpoint of step {newest}"

    # ---------------------------------------------------------------------------------------------------------- steps

    def _layout_of(self, report: StepReport) -> Layout:
        """The layout in which a step was committed; a newer one may have been decided before its report came."""
        records = (r for r in reversed(self._epochs) if r.epoch <= report.epoch and r.first_step <= report.step)
        return next((record.layout for record in records), self.layout)

    def step(self, report: StepReport) -> bool:
        """Publishes a committed step.

        Returns:
            Whether it is new, or has changed.
        Raises:
            StateError: a repeated step's loss is another one, in bitwise mode.
        """
        if not self._note_loss(report.step, report.loss):
            return False
        self._persist(Published(step=report.step, loss=report.loss, finished_s=report.finished_s))
        self._first_report_s[report.step] = report.finished_s
        if self._epochs and self._epochs[-1].first_step < report.step and report.attempt == 1:
            # From one step's end to the next one's: what is done between steps belongs to them.
            begin_s = self._first_report_s.get(report.step - 1)
            if begin_s is not None:
                self._steps_s.append(report.finished_s - begin_s)
        before_s = self._first_report_s.get(report.step - 1, report.finished_s - report.duration_s)
        num_tokens = self._num_tokens(report.step)
        data_pass, _ = self._sampler.cursor(report.step)
        self._show(
            ShowStep(
                step=report.step,
                total_steps=self._config.run.steps,
                loss=report.loss,
                tokens_per_s=num_tokens / max(1e-9, report.finished_s - before_s),
                data_pass=data_pass,
                epoch=report.epoch,
                layout_name=self._layout_of(report).describe(),
            )
        )
        for reason in report.retries:
            if "measured" not in reason:
                self.say(f"step {report.step} was tried again: {reason}")
        if report.skipped is not None:
            self.say(f"step {report.step} was committed without an update: {report.skipped}")
            self._write(
                StepSkipped(
                    step=report.step,
                    reason=report.skipped,
                    microbatch=report.skipped_microbatch,
                    layer=report.skipped_layer,
                )
            )
        self._write(
            StepCommitted(
                step=report.step,
                epoch=report.epoch,
                attempt=report.attempt,
                loss=report.loss,
                grad_norm=report.norm,
                lr=report.learning_rate,
                tokens_per_s=num_tokens / max(1e-9, report.duration_s),
                duration_s=report.duration_s,
                finished_s=report.finished_s,
                phases_s=report.phases_s,
                retries=report.retries,
            )
        )
        self.checkpoints.published()
        return True

    def _note_loss(self, step: int, loss: float) -> bool:
        """Whether it is the next step's, or a repeated one's that is another one, where that may be.

        Raises:
            StateError: it must be the same, and is not.
        """
        if step == len(self._losses) + 1:
            self._losses.append(loss)
            return True
        if step > len(self._losses):
            raise StateError(
                f"step {step} was reported, but step {len(self._losses) + 1} never was: the worker that should have "
                "told of it is gone, and the others keep only their newest reports. Resume from the last checkpoint"
            )
        known = self._losses[step - 1]
        if known != loss and not (known != known and loss != loss):
            if self._repeats_exactly:
                raise StateError(
                    f"step {step} had the loss {known!r} and, repeated, {loss!r}; in bitwise mode they must be equal. "
                    "Are the workers' processors and library versions the same?"
                )
            self._losses[step - 1] = loss
            return True
        return False

    def _num_tokens(self, step: int) -> int:
        """Tokens of a published step, under the layout in which it was run."""
        layouts = (record.layout for record in reversed(self._epochs) if record.first_step <= step)
        return next(layouts, self._plan.layout).num_microbatches * self._tokens_per_microbatch

    def timings(self, step: int, timings: list[ActionTiming]) -> None:
        """Publishes how long actions take: at first, and then whenever the run has become a tenth longer.

        Args:
            step: the newest one that is in it.
            timings: of all workers; nothing is written if there are none.
        """
        now_s = time.monotonic()
        if timings and now_s >= self._next_timings_s:
            self._next_timings_s = now_s + max(TIMINGS_EVERY_S, (now_s - self._started_s) / 10)
            self._write(TimingsMeasured(step=step, timings=timings))

    def evaluation(self, report: EvaluationReport) -> None:
        """Publishes a validation loss."""
        if not self._note_validation(report.step, report.loss):
            return
        self._enter(
            Evaluated(step=report.step, loss=report.loss, num_tokens=report.num_tokens, duration_s=report.duration_s)
        )
        self._show(ShowEvaluation(step=report.step, loss=report.loss))

    def _note_validation(self, step: int, loss: float) -> bool:
        """Whether it is a new one, or another one of a step that need not repeat its loss."""
        if step not in self._val_steps:
            self._val_steps.append(step)
            self._val_losses.append(loss)
            return True
        position = self._val_steps.index(step)
        if self._repeats_exactly or self._val_losses[position] == loss:
            return False
        self._val_losses[position] = loss
        return True

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _on_checkpoint(self, record: CheckpointRecord) -> None:
        self._enter(CheckpointWritten(checkpoint=record))
        self._settled(record.step)

    def _on_given_up(self, step: int, worker: int | None, reason: str) -> None:
        text = f"the checkpoint of step {step} could not be written, training goes on without it: {reason}"
        self._persist(CheckpointGivenUp(step=step))
        self._write(ErrorRaised(message=text, worker=worker, step=step))
        self.say(text, is_error=True)
        self._settled(step)

    def _describe(self, standing: Standing) -> CheckpointMeta | None:
        """The run at the step of a standing; None while a loss up to it is not known."""
        step = standing.step
        if self.last_step < step:
            return None
        slots = self._plan.state.slots
        tensors = self._plan.tensors
        val = [(at, loss) for at, loss in zip(self._val_steps, self._val_losses, strict=True) if at <= step]
        return CheckpointMeta(
            step=step,
            losses=[loss if loss - loss == 0 else "nan" for loss in self._losses[:step]],
            grids={slot.name: exponent for slot, exponent in zip(tensors, standing.exponents, strict=True)},
            seed=self._config.run.seed,
            data_cursor=self._sampler.cursor(step),
            config=self._config.to_dict(),
            tensors={stored_name(name, slot.name): TensorInfo(slot.shape) for name in slots for slot in tensors},
            elaswave_version=elaswave.__version__,
            extra={
                "num_updates": standing.num_updates,
                "calibrated": standing.calibrated,
                "val_steps": [at for at, _ in val],
                "val_losses": [loss for _, loss in val],
                "data": data_facts(self._run_dir),
            },
        )

    # ---------------------------------------------------------------------------------------------------------- the end

    def finish(self, message: Finished) -> None:
        """A worker has made its last step."""
        if message.standing.epoch == self._epoch:
            self._finished[message.worker] = message

    @property
    def was_stopped(self) -> bool:
        """Whether the workers have ended before the run's last step, because they were asked to."""
        return any(report.stopped for report in self._finished.values())

    def result(self) -> tuple[Result, dict[str, str]]:
        """The result of the run and its digest per tensor, once everybody has finished.

        Raises:
            StateError: the followers' state is not the owners'.
        """
        assert self.all_finished
        reports = [self._finished[worker] for worker in self.members]
        standing = reports[0].standing
        digests = add_digests(report.owner_digests for report in reports)
        if all(report.complete for report in reports):
            self._check_followers(digests, add_digests(report.follower_digests for report in reports))
        step = standing.step
        self.close_layout()
        result = Result(
            steps=step,
            losses=list(self._losses),
            state_digest=state_digest(
                step=step,
                num_updates=standing.num_updates,
                data_cursor=self._sampler.cursor(step),
                grids=standing.exponents,
                tensor_digests=digests,
            ),
            throughput_tokens_per_s=self._throughput(),
            epochs=list(self._epochs),
            recoveries=list(self._recoveries),
            val_losses=list(self._val_losses),
            val_steps=list(self._val_steps),
            memory={
                report.worker: WorkerMemory(peak_bytes=report.peak_bytes, optimizer_bytes=report.optimizer_bytes)
                for report in sorted(reports, key=lambda report: report.worker)
            },
            checkpoints=list(self.checkpoints.records),
            start_up_s=self._start_up_s,
            duration_s=time.monotonic() - self._started_s,
            config=self._config.to_dict(),
        )
        return result, {name: f"{value:016x}" for name, value in digests.items()}

    def _check_followers(self, owners: dict[str, int], followers: dict[str, int]) -> None:
        """The sum over followers must be (number of followers) times the owners' digest, tensor by tensor."""
        num_followers = min(self._config.elastic.num_followers, len(self.members) - 1)
        if num_followers == 0:
            return
        for name, value in owners.items():
            if followers.get(name) != value * num_followers & MASK64:
                raise StateError(
                    f"the followers' copy of {name} is not the owners' after the last step; the result is not to be "
                    "trusted. Resume from the last checkpoint, and look at the hardware"
                )

    def _throughput(self) -> float | None:
        """Tokens per second without start-up and the first steps."""
        begin, end = self.first_step + STEPS_LEFT_OUT - 1, self.last_step
        if end <= begin or begin not in self._first_report_s:
            return None
        num_tokens = sum(map(self._num_tokens, range(begin + 1, end + 1)))
        return num_tokens / (self._first_report_s[end] - self._first_report_s[begin])

    def close(self, outcome: Literal["finished", "failed", "interrupted"], reason: str) -> None:
        """The job is over."""
        self.outcome, self.reason = outcome, reason
        event = RunFinished(
            outcome=outcome,
            steps=self.last_step,
            duration_s=time.monotonic() - self._started_s,
            reason=reason,
        )
        try:
            self._persist(Entered(event=event))
        except StoreError as error:
            # Only a successor would need the record, and it would come to the same end.
            self.say(f"the journal does not take the end of the job: {error}", is_error=True)
        self._write(event)

    def error(self, message: str, worker: int | None, traceback_text: str) -> None:
        """Logs what ends the job."""
        self._write(ErrorRaised(message=message, worker=worker, traceback=traceback_text))


def _holdings(holding: Holding) -> Holdings:
    return Holdings(
        num_parameters=holding.num_parameters,
        num_owned_blocks=holding.num_owned_blocks,
        num_owned_parameters=holding.num_owned_parameters,
        num_followed_blocks=holding.num_followed_blocks,
        num_followed_parameters=holding.num_followed_parameters,
    )
