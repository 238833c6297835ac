"""The records of a run: what workers report becomes durable records, events, and lines on the terminal.

The recorder publishes; it takes no part in steps. Every message may come twice (a coordinator can die between handling
and acknowledging it), so everything here is idempotent. Whatever a new coordinator needs is made durable first, then
folded into the run's state (`coordinator/records/run_state.py`), then logged and shown; the event log is for people,
and may be incomplete. A repeated step must have the same loss.

What each worker holds under a layout and a placement, for the log. Pure.

What workers report becomes records of the run, recoveries too, with a line on the terminal; and what becomes of
checkpoints is told to them.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from elaswave._version import __version__
from elaswave.blocks.placement import Placement
from elaswave.blocks.survival import survival_of
from elaswave.channel.messages.agent import (
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    ShowEvaluation,
    ShowStep,
)
from elaswave.channel.messages.worker import (
    EvaluationReport,
    Finished,
    Ready,
    Settled,
    ShardFailed,
    ShardWritten,
    StepReport,
    TrainingStanding,
)
from elaswave.channel.server import ControlServer
from elaswave.checkpoints.checkpoint import newest_committed_step
from elaswave.checkpoints.format import CheckpointMeta
from elaswave.config.cluster import planned_speeds
from elaswave.config.values import OWN
from elaswave.coordinator.job_spec import CoordinatorSetup
from elaswave.coordinator.records.checkpoints import Checkpoints
from elaswave.coordinator.records.recoveries import RecoveryLog
from elaswave.coordinator.records.run_state import RunState, by_step, describe_checkpoint, make_result
from elaswave.coordinator.records.terminal import Terminal
from elaswave.errors import CheckpointError, StateError, StoreError, SupersededError
from elaswave.job.plan import RunPlan
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
    StepTimePredicted,
    TimingsMeasured,
)
from elaswave.observability.result import CheckpointRecord, Recovery, RunResult
from elaswave.observability.run_folder import data_facts, is_fine_tuning
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.events import NewGeneration, PendingWork, Suspected
from elaswave.protocol.messages import Decision, LayoutChange
from elaswave.protocol.step.due_work import pending_after
from elaswave.store.store import CheckpointGivenUp, Entered, JournalRecord, Published, RecorderRecord, Store
from elaswave.types import ExecutionParameters, Gauges, Layout


def holdings_of(plan: RunPlan, layout: Layout, placement: Placement) -> dict[int, Holdings]:
    """Maps worker id to holdings; idle workers too.

    Args:
        plan: of the run.
        layout, placement: in force.
    """
    owners, followers = placement.owner, placement.followers
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for block in plan.blocks:  # there are many, but few kinds of holders
        alike.setdefault((owners[block.id], followers[block.id]), []).append(block.num_elements)
    owned, owned_elements = Counter[int](), Counter[int]()
    followed, followed_elements = Counter[int](), Counter[int]()
    for (owner, others), elements in alike.items():
        num_elements = sum(elements)
        owned[owner] += len(elements)
        owned_elements[owner] += num_elements
        for follower in others:
            followed[follower] += len(elements)
            followed_elements[follower] += num_elements
    sizes = [sum(slot.numel for slot in shape.tensors if not slot.is_buffer) for shape in plan.state.layers]
    found = {}
    for worker in layout.workers:
        layers = layout.layers_of(worker)
        found[worker] = Holdings(
            num_parameters=sum(sizes[unit] for unit in (*layers, *layout.shared_units(layers))),
            num_owned_blocks=owned[worker],
            num_owned_parameters=owned_elements[worker],
            num_followed_blocks=followed[worker],
            num_followed_parameters=followed_elements[worker],
        )
    return found


TIMINGS_EVERY_S = 1.0
"""`TimingsMeasured` are written no more often than this."""
SHRINKS_BATCH = frozenset({"torchft"})
"""Policies after whose losses a step that is tried again has fewer micro-batches."""


class RunRecorder:
    """Keeps the journal, the event log and the terminal in step with the state of one run.

    Args:
        setup: what the coordinator is started with.
        store: the journal.
        events: the run's log.
        terminal: what is shown.
        records: what earlier coordinators of this job have made durable, in order; None for its first one.
        tell_committer: sends a message to the agent that commits checkpoints.
        at_home: says which workers are lost together with the coordinator; none where that is started again.
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        store: Store[JournalRecord],
        events: EventLog,
        terminal: Terminal,
        records: Sequence[JournalRecord] | None,
        tell_committer: Callable[[CommitCheckpoint | BreakOffCommit], None],
        at_home: Callable[[], Collection[int]],
    ) -> None:
        plan, checkpoint = setup.plan, setup.checkpoint
        self._plan = plan
        self._config = plan.config
        self._run_dir = setup.job.run_dir
        self._store = store
        self._events = events
        self._terminal = terminal
        self._at_home = at_home
        self._started_s = setup.job.started_s
        self._domains_reported = ""
        """What people were told last of the sites and hosts whose loss is survived."""
        self._next_timings_s = 0.0
        """When the next `TimingsMeasured` may be written."""
        self._sampler = setup.sampler
        meta = None if checkpoint is None else checkpoint.meta
        extra = {} if meta is None else meta.extra
        val_steps = extra.get("val_steps", [])
        val_losses = map(float, extra.get("val_losses", []))
        elastic = self._config.elastic
        self.state = RunState(
            plan.layout,
            losses=[] if meta is None else [float(loss) for loss in meta.losses],
            val_losses=dict(zip(val_steps, val_losses, strict=True)),
            metrics=by_step(extra.get("metrics", {}), range(1, 1 if meta is None else meta.step + 1)),
            val_metrics=by_step(extra.get("val_metrics", {}), val_steps),
            fence_ratios=extra.get("fence_ratios", ()),
            repeats_exactly=elastic.consistency == "bitwise" and elastic.policy not in SHRINKS_BATCH,
        )
        self.settled: list[int] = []
        """Steps of checkpoints that are durable or given up, and of which the workers are still to be told."""
        self._settling: set[int] = set()
        """The same, of which the record is not durable yet."""
        self.checkpoints = Checkpoints(plan, setup.job.run_dir, self, terminal, tell_committer)
        self._tokens_per_sample = plan.tokens_per_sample
        if records is not None:
            self._restore(records)
            return
        self._write(
            RunStarted(
                version=__version__,
                total_steps=self._config.run.steps,
                first_step=self.state.first_step,
                num_workers=len(self.state.members),
                resumed_from=None
                if checkpoint is None
                else str(Path(checkpoint.folder).relative_to(setup.job.run_dir)),
                losses=list(self.state.losses),
                config=self._config.to_dict(),
            )
        )

    def _restore(self, records: Sequence[JournalRecord]) -> None:
        """Takes over what earlier coordinators of this job have made durable."""
        for record in records:
            if isinstance(record, RecorderRecord):
                self.state.apply(record)
            if isinstance(record, Entered) and isinstance(record.event, CheckpointWritten):
                self.checkpoints.restore(record.event.checkpoint)
            elif isinstance(record, CheckpointGivenUp):
                self.checkpoints.restore_given_up(record.step)
            elif isinstance(record, Decision):
                self.checkpoints.restore_decision(record)

    def _record(self, record: RecorderRecord) -> None:
        """Counts a record; it is durable soon."""
        # First: what a store refuses of a coordinator that was replaced must not be counted.
        self._store.add(record)
        self.state.apply(record)

    def is_settled(self, step: int) -> bool:
        """Tells whether it is durable what has become of a checkpoint."""
        return self.checkpoints.is_settled(step) and step not in self._settling

    def _settle(self, step: int) -> None:
        # A worker that is told so says nothing more of its part: a successor must know what became of it.
        self._settling.add(step)
        self._store.when_durable(partial(self._settled, step))

    def _settled(self, step: int) -> None:
        self._settling.discard(step)
        self.settled.append(step)

    def _enter(self, event: AnyEvent) -> None:
        """Logs an event that a new coordinator must know of."""
        self._record(Entered(event=event))
        self._write(event)

    def _write(self, event: AnyEvent) -> None:
        self._events.write(event)

    # ----------------------------------------------------------------------------------------------------- membership

    def ready(self, message: Ready) -> None:
        """A worker begins to train."""
        if self.state.ready(message.worker):
            plan, first_step = self._plan, self.state.first_step
            reason = "as configured" if first_step == 1 else "as configured, resumed from a checkpoint"
            self._choose_layout(self.state.generation, plan.layout, plan.placement, plan.execution, reason, first_step)

    def _choose_layout(
        self,
        generation: int,
        layout: Layout,
        placement: Placement,
        execution: ExecutionParameters,
        reason: str,
        first_step: int,
        *,
        change: int = 0,
        predicted_step_s: float | None = None,
    ) -> None:
        # Before the next one is entered: what was measured is of the layout that is left.
        self.close_layout()
        speeds = planned_speeds(self._config, execution)
        num_known = len(self.state.recoveries)
        problem_without = self._plan.problem_without(layout)
        home = frozenset(self._at_home())
        survival = survival_of(
            placement,
            layout,
            lambda lost: problem_without(lost) if home.isdisjoint(lost) else "the coordinator is there",
        )
        self._enter(
            LayoutChosen(
                generation=generation,
                layout=layout,
                reason=reason,
                first_step=first_step,
                layer_names=list(self._plan.state.layer_names),
                layer_parameters=list(self._plan.layer_parameters),
                holdings=holdings_of(self._plan, layout, placement),
                start_up_s=self.state.start_up_s or time.monotonic() - self._started_s,
                change=change,
                schedule=execution.schedule or self._config.layout.schedule,
                levels=execution.levels,
                in_flight=execution.in_flight,
                ratios={self._plan.state.layer_names[at]: ratio for at, ratio in execution.ratios.items()},
                predicted_step_s=predicted_step_s,
                speeds={worker: speed for worker, speed in speeds.items() if speed != 1.0},
                survival=survival,
            )
        )
        for recovery in self.state.recoveries[num_known:]:  # they follow from what was entered
            self._write(Recovered(recovery=recovery))
        text = "" if survival is None else survival.describe_domains()
        if text and text != self._domains_reported:
            self._domains_reported = text
            self._terminal.say(f"generation {generation}: the job {text}")

    def predicted(self, predicted_step_s: float) -> None:
        """Enters what a step of the present layout should take, if that was not known when it was chosen.

        Planning takes its time: once the run has ended nothing is entered any more.
        """
        if self.state.lacks_prediction():
            record = self.state.generations[-1]
            self._enter(
                StepTimePredicted(generation=record.generation, change=record.change, predicted_step_s=predicted_step_s)
            )

    def changed(self, change: LayoutChange, first_step: int) -> None:
        """A planned change of the layout has come into force; may be said again."""
        if change.number > self.state.newest_change:
            self._choose_layout(
                change.generation,
                change.layout,
                change.placement,
                change.execution,
                change.reason,
                first_step,
                change=change.number,
                predicted_step_s=change.predicted_step_s,
            )

    def close_layout(self) -> None:
        """The present layout is left: enters what its steps took, if any were measured."""
        measured = self.state.step_time_measured()
        if measured is not None:
            self._enter(measured)

    def decided(self, decision: Decision) -> None:
        """Survivors go on with a decision."""
        reason = f"{decision.reason}; {decision.plan}" if decision.plan else decision.reason
        self._choose_layout(
            decision.generation,
            decision.layout,
            self._plan.complete(decision.layout, decision.placement),
            decision.execution,
            reason,
            decision.resume_step,
        )
        if text := self._plan.unprotected(decision.layout, decision.placement):
            self._terminal.say(f"generation {decision.generation}: {text}")
        if decision.plan and self._config.elastic.policy_is_code:  # its author wants to know what became of the plan
            self._terminal.say(decision.plan)
        self.checkpoints.decided(decision)

    def catch_up(self, generation: int, decision: Decision | None) -> None:
        """Enters what an earlier coordinator has persisted and died before it could enter it here."""
        # In the order in which they came: a decision is entered under its own generation.
        state = self.state
        if decision is not None and decision.generation > max(
            (known.generation for known in state.generations), default=0
        ):
            state.new_generation(decision.generation)
            self.decided(decision)
        if generation > state.generation:
            state.new_generation(generation)

    def recovered(self, recovery: Recovery) -> None:
        """An event has been dealt with."""
        self._enter(Recovered(recovery=recovery))

    def unfinished(self, step: int, asked: bool) -> PendingWork:
        """Finds what of a committed step is still to be done.

        Args:
            step: the newest committed one.
            asked: whether a vote asked for a durable checkpoint of it.
        """
        run, state = self._config.run, self.state
        return pending_after(
            step,
            run.steps,
            run,
            asked=asked,
            first_step=state.first_step,
            evaluated=state.val_losses,
            written={record.step for record in self.checkpoints.records},
            published=state.last_step,
        )

    def advice(self) -> str:
        """Tells what a person can do after a job that could not go on; empty if there is nothing to go back to."""
        try:
            newest = newest_committed_step(self._run_dir)  # also one that an earlier command has made
        except CheckpointError as error:
            return f"; {error}"
        is_script = self._config.model.family == OWN and not is_fine_tuning(self._run_dir)
        verb = "run" if is_script else "train"
        return "" if newest is None else f"; `elaswave {verb} --resume` continues from the checkpoint of step {newest}"

    def lost_weights(self, steps: int) -> str:
        """Tells why the weights after the last step are nowhere but in the workers' memory; empty if a checkpoint has
        them.

        Args:
            steps: of the run.
        """
        if steps < self.state.first_step or any(record.step == steps for record in self.checkpoints.records):
            return ""
        reason = self.checkpoints.given_up.get(steps, "its parts were lost")
        return (
            f"all {steps} steps are trained, but the trained weights are lost, since the checkpoint of step {steps} "
            f"could not be written: {reason}"
        )

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self, report: StepReport, finished_s: float) -> bool:
        """Publishes a committed step.

        Args:
            finished_s: when it was done, by this process's clock.
        Returns:
            Whether it is new, or has changed.
        Raises:
            StateError: a repeated step's loss is another one, in bitwise mode.
        """
        state = self.state
        if not state.is_new_loss(report.step, report.loss):
            return False
        self._record(Published(step=report.step, loss=report.loss, finished_s=finished_s, metrics=report.metrics))
        state.time_step(report, finished_s)
        before_s = state.finished_s.get(report.step - 1, finished_s - report.duration_s)
        num_samples = state.layout_of(report.step).num_microbatches * self._config.batch.microbatch_size
        num_tokens = None if self._tokens_per_sample is None else num_samples * self._tokens_per_sample
        data_pass, _ = self._sampler.cursor(report.step)
        self._terminal.show(
            ShowStep(
                step=report.step,
                total_steps=self._config.run.steps,
                loss=report.loss,
                rate=(num_samples if num_tokens is None else num_tokens) / max(1e-9, finished_s - before_s),
                counts_samples=num_tokens is None,
                data_pass=data_pass,
                generation=report.generation,
                layout_name=state.layout_of(report.step, report.generation).describe(),
                metrics=report.metrics,
            )
        )
        self._tell_troubles(report)
        self._write(
            StepCommitted(
                step=report.step,
                generation=report.generation,
                attempt=report.attempt,
                loss=report.loss,
                grad_norm=report.norm,
                lr=report.learning_rate,
                tokens_per_s=None if num_tokens is None else num_tokens / max(1e-9, report.duration_s),
                samples_per_s=num_samples / max(1e-9, report.duration_s),
                duration_s=report.duration_s,
                finished_s=finished_s,
                phases_s=report.phases_s,
                retries=report.retries,
                metrics=dict(report.metrics),
            )
        )
        # A complete checkpoint may have waited for this loss, which its description has.
        self.checkpoints.published()
        return True

    def _tell_troubles(self, report: StepReport) -> None:
        """Shows why a step was tried again, or had no update."""
        for reason in report.retries:
            # The first attempt of a run measures gradients, and is always tried again: that is no trouble.
            if "measured" not in reason:
                self._terminal.say(f"step {report.step} was tried again: {reason}")
        if report.skipped is not None:
            self._terminal.say(f"step {report.step} was committed without an update: {report.skipped}")
            self._write(
                StepSkipped(
                    step=report.step,
                    reason=report.skipped,
                    microbatch=report.skipped_microbatch,
                    layer=report.skipped_layer,
                )
            )

    def timings(self, step: int, timings: list[ActionTiming], devices: Mapping[int, Gauges]) -> None:
        """Publishes how long actions take, and what devices tell of themselves: at first, and then whenever the run has
        become a tenth longer.

        Args:
            step: the newest one that is in it.
            timings: of all workers; nothing is written if there are none.
            devices: by worker.
        """
        now_s = time.monotonic()
        if timings and now_s >= self._next_timings_s:
            self._next_timings_s = now_s + max(TIMINGS_EVERY_S, (now_s - self._started_s) / 10)
            self._write(TimingsMeasured(step=step, timings=timings, devices=dict(devices)))

    def evaluation(self, report: EvaluationReport) -> None:
        """Publishes a validation loss."""
        if self.state.is_new_validation(report.step, report.loss):
            self._enter(
                Evaluated(
                    step=report.step,
                    loss=report.loss,
                    num_tokens=report.num_tokens,
                    duration_s=report.duration_s,
                    metrics=dict(report.metrics),
                )
            )
            self._terminal.show(ShowEvaluation(step=report.step, loss=report.loss))

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def committed_s(self, step: int) -> float | None:
        """See `RecordsCheckpoints`, also of the next ones."""
        return self.state.finished_s.get(step)

    def checkpoint_written(self, record: CheckpointRecord) -> None:
        """Publishes it."""
        self._enter(CheckpointWritten(checkpoint=record))
        self._settle(record.step)

    def checkpoint_given_up(self, step: int, worker: int | None, reason: str) -> None:
        """Publishes it."""
        text = f"the checkpoint of step {step} could not be written, training goes on without it: {reason}"
        self._record(CheckpointGivenUp(step=step))
        self._write(ErrorRaised(message=text, worker=worker, step=step))
        self._terminal.say_trouble(text)
        self._settle(step)

    def describe(self, standing: TrainingStanding) -> CheckpointMeta | None:
        """Describes the run at the step of a standing; None while a loss up to it is not known."""
        if self.state.last_step < standing.step:
            return None
        return describe_checkpoint(self._plan, self.state, self._sampler, standing, data_facts(self._run_dir))

    # ---------------------------------------------------------------------------------------------------------- the end

    def finish(self, message: Finished) -> None:
        """A worker has made its last step."""
        self.state.finish(message)

    def result(self) -> tuple[RunResult, dict[str, str]]:
        """Makes the result of the run and its digest per tensor, once every member has finished.

        Raises:
            StateError: the followers' state is not the owners'.
        """
        self.close_layout()
        duration_s = time.monotonic() - self._started_s
        return make_result(self._plan, self.state, self._sampler, self.checkpoints.records, duration_s)

    def close(self, outcome: Literal["finished", "failed", "interrupted"], reason: str) -> None:
        """The job is over."""
        duration_s = time.monotonic() - self._started_s
        event = RunFinished(outcome=outcome, steps=self.state.last_step, duration_s=duration_s, reason=reason)
        try:
            # Waited for: who is told of the end acts on it, and a successor must not go on with the job.
            self._store.append(Entered(event=event))
        except SupersededError:
            # Another coordinator speaks for the job: for that one it is not over.
            raise
        except StoreError as error:
            # Only a successor would need the record, and it would come to the same end.
            self._terminal.say_trouble(f"the journal does not take the end of the job: {error}")
        self.state.apply(Entered(event=event))
        self._write(event)
        if self._events.num_lost:
            self._terminal.say_trouble(f"{self._events.path} lacks the last {self._events.num_lost} events of the run")

    def error(self, message: str, worker: int | None, traceback_text: str) -> None:
        """Logs what ends the job."""
        self._write(ErrorRaised(message=message, worker=worker, traceback=traceback_text))


class RecoveryReports:
    """What is said of the recoveries of one run.

    Args:
        log: collects what a report needs.
        recorder: of the run.
        terminal: what is shown.
        num_steps: of the run.
        coordinator_ends_s: monotonic times at which coordinators have ended of which no one has told yet.
    """

    def __init__(
        self,
        log: RecoveryLog,
        recorder: RunRecorder,
        terminal: Terminal,
        *,
        num_steps: int,
        coordinator_ends_s: Sequence[float],
    ) -> None:
        self.log = log
        self._recorder = recorder
        self._state = recorder.state
        self._terminal = terminal
        self._num_steps = num_steps
        self._coordinator_ends_s = tuple(coordinator_ends_s)

    def restore(self, decisions: Sequence[Decision], undecided: NewGeneration | None, now_s: float) -> None:
        """Takes over recoveries that earlier coordinators have begun.

        Args:
            decisions: all that there were; of some it was not seen, or not entered, that training went on.
            undecided: the generation that still waits for one.
            now_s: monotonic time.
        """
        for decision in decisions:
            unreported, joined, left = self._state.unreported(decision)
            if unreported or joined or left:
                suspicions = tuple(Suspected(worker, "exit", decision.reason) for worker in unreported)
                layout = self._state.layout_before(decision.generation)
                self.log.new_generation(NewGeneration(decision.generation, suspicions, joined, left), layout, now_s)
                self.log.decided(decision, now_s, 0.0)
                self.log.resumed(now_s)
        if undecided is not None:
            self.new_generation(undecided, now_s)

    def new_generation(self, effect: NewGeneration, now_s: float) -> None:
        """Workers were lost under the present layout, or members have joined or left."""
        self.log.new_generation(effect, self._state.layout, now_s)

    def resumed(self, now_s: float) -> None:
        """Every member computes again."""
        self._publish(self.log.resumed(now_s))

    def committed(self, report: StepReport, finished_s: float) -> None:
        """A step is done; to be called before it is published, as its line shows the new layout."""
        self._publish(self.log.committed(report, finished_s))

    def flush(self) -> None:
        """The job ends."""
        self._publish(self.log.flush())

    def _publish(self, recoveries: Sequence[Recovery]) -> None:
        for recovery in recoveries:
            # The line first: a coordinator that dies in between leaves a successor that says it again.
            self._terminal.say(self.log.describe(recovery))
            self._recorder.recovered(recovery)

    def coordinator_found(self, now_s: float, generation: int) -> None:
        """All members have found this coordinator: says, once, that it follows others."""
        ends_s, self._coordinator_ends_s = self._coordinator_ends_s, ()
        for ended_s in ends_s:
            step = min(self._state.last_step + 1, self._num_steps)
            recovery = self.log.restarted(ended_s, now_s, step, generation)
            self._recorder.recovered(recovery)
            self._terminal.say(
                f"the coordinator was lost in step {recovery.step}: a new one took over after "
                f"{recovery.total_s * 1e3:.0f} ms, training went on meanwhile"
            )


class FollowsRecords(Protocol):
    """Of a job's driver what is needed here."""

    core: Coordinator

    def after_step(self, report: StepReport) -> None:
        """A step is published."""

    def finish_if_complete(self) -> None:
        """More is known that may end the job."""

    def fail_with(self, error: StateError) -> None:
        """The records cannot agree with what was reported."""


class Publishing:
    """Passes reports to the records of one run.

    Args:
        driver: of the job.
        recorder: of the run.
        recoveries: are published with the steps that complete them.
        server: has the connections.
    """

    def __init__(
        self,
        driver: FollowsRecords,
        recorder: RunRecorder,
        recoveries: RecoveryReports,
        server: ControlServer[Any],
    ) -> None:
        self.environment = ""
        """What a member computes with, for people."""
        self._driver = driver
        self._recorder = recorder
        self._recoveries = recoveries
        self._server = server

    def publish(
        self,
        message: Ready | StepReport | EvaluationReport | ShardWritten | ShardFailed | Finished,
        now_s: float,
    ) -> None:
        """A worker has reported.

        Args:
            message: what arrives in this turn.
            now_s: monotonic time.
        """
        try:
            if isinstance(message, Ready):
                self.environment = message.environment
                self._recorder.ready(message)
            elif isinstance(message, StepReport):
                # By its own clock: a worker tells only how long ago it was.
                finished_s = now_s - self._server.age_s - message.ago_s
                self._recoveries.committed(message, finished_s)
                if self._recorder.step(message, finished_s):
                    self._driver.after_step(message)
            elif isinstance(message, EvaluationReport):
                self._recorder.evaluation(message)
            elif isinstance(message, ShardWritten | ShardFailed):
                self._recorder.checkpoints.part(message)
                step = message.standing.step if isinstance(message, ShardWritten) else message.step
                # It may have missed the word, and would say it again to every coordinator.
                if self._recorder.is_settled(step):
                    self._server.send(message.worker, Settled(step=step))
            else:
                self._recorder.finish(message)
            self.tell_settled()
            self._driver.finish_if_complete()
        except StateError as error:
            self._driver.fail_with(error)

    def committed(self, message: CheckpointCommitted) -> None:
        """The committer has answered."""
        try:
            self._recorder.checkpoints.committed(message.number, message.error, again=message.again)
            self.tell_settled()
            self._driver.finish_if_complete()
        except StateError as error:
            self._driver.fail_with(error)

    def tick(self, now_s: float) -> None:
        """Time has passed: a checkpoint may be given up by now."""
        has_given_up = self._recorder.checkpoints.tick(now_s)
        self.tell_settled()
        if has_given_up:
            self._driver.finish_if_complete()

    def give_up_missing_parts(self) -> None:
        """Gives up missing parts, with a word to the workers."""
        self._recorder.checkpoints.end()
        self.tell_settled()

    def tell_settled(self) -> None:
        """Checkpoints are durable or given up: no worker need say again what became of its parts."""
        steps, self._recorder.settled[:] = tuple(self._recorder.settled), []
        for step in steps:
            self._server.send_all(self._driver.core.members, Settled(step=step))
