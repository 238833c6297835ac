"""Keeps the books of a run: what the workers report becomes events, checkpoints and the result.

The coordinator publishes; it does not take part in steps. It opens no socket and starts no process: `launcher` does,
and hands it every message.
"""

import time
from collections.abc import Callable
from pathlib import Path

import elaswave
from elaswave.errors import CheckpointError, StateError
from elaswave.hashing import MASK64
from elaswave.observability.events import (
    AnyEvent,
    CheckpointWritten,
    ErrorRaised,
    Evaluated,
    EventLog,
    Holdings,
    LayoutChosen,
    RunStarted,
    StepCommitted,
    StepSkipped,
)
from elaswave.observability.progress import Reporter
from elaswave.observability.result import CheckpointRecord, EpochRecord, JsonFloat, Result, WorkerMemory
from elaswave.runtime.blueprint import Blueprint
from elaswave.runtime.materialise import MASTER, stored_name
from elaswave.runtime.messages import (
    EvaluationReport,
    Finished,
    FromWorker,
    Hello,
    Ready,
    ShardFailed,
    ShardWritten,
    Standing,
    Start,
    StepReport,
    ToWorker,
)
from elaswave.runtime.optimizer import OPTIMIZERS
from elaswave.runtime.worker import FIRST_EPOCH
from elaswave.state.checkpoint import commit_checkpoint, discard_checkpoint, prune, shard_folder
from elaswave.state.checkpoint_format import CheckpointMeta, TensorInfo, WrittenItem
from elaswave.state.verify import add_digests, state_digest

STEPS_LEFT_OUT = 3
"""First steps of a process that do not count for its throughput."""


class Coordinator:
    """The books of one process's work on a run.

    Args:
        blueprint: the run.
        run_dir: its folder.
        checkpoint: what it resumes from: folder and description, or None.
        reporter: shows progress to a person.
        events: the run's log.
        send: sends a message to a worker.
        started_s: monotonic time at which the command began.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        run_dir: Path,
        *,
        checkpoint: tuple[Path, CheckpointMeta] | None,
        reporter: Reporter,
        events: EventLog,
        send: Callable[[int, ToWorker], None],
        started_s: float,
    ) -> None:
        self._blueprint = blueprint
        self._config = blueprint.config
        self._run_dir = run_dir
        self._reporter = reporter
        self._events = events
        self._send = send
        self._started_s = started_s
        self._workers = blueprint.layout.workers
        source = blueprint.open_source(run_dir / "data")
        self._sampler = blueprint.sampler(source)
        meta = None if checkpoint is None else checkpoint[1]
        self._first_step = 1 if meta is None else meta.step + 1
        self._losses: list[float] = [] if meta is None else [float(loss) for loss in meta.losses]
        extra = {} if meta is None else meta.extra
        self._val_losses: list[float] = [float(loss) for loss in extra.get("val_losses", [])]
        self._val_steps: list[int] = list(extra.get("val_steps", []))
        self._addresses: dict[int, str] = {}
        self._holdings: dict[int, Holdings] = {}
        self._reports: dict[int, dict[int, StepReport]] = {}
        self._step_done_s: dict[int, float] = {}
        self._shards: dict[int, dict[int, ShardWritten | ShardFailed]] = {}
        self._checkpoints: list[CheckpointRecord] = []
        self._finished: dict[int, Finished] = {}
        self._start_up_s = 0.0
        batch = self._config.batch
        self._tokens_per_step = batch.num_microbatches * batch.microbatch_size * self._config.model.context_length
        events.write(
            RunStarted(
                version=elaswave.__version__,
                total_steps=self._config.run.steps,
                first_step=self._first_step,
                num_workers=len(self._workers),
                resumed_from=None if checkpoint is None else str(checkpoint[0].relative_to(run_dir)),
                losses=list(self._losses),
                config=self._config.to_dict(),
            )
        )

    @property
    def all_ready(self) -> bool:
        """Every worker has begun to train."""
        return len(self._holdings) == len(self._workers)

    @property
    def all_finished(self) -> bool:
        """Every worker has made its last step and reported its state."""
        return len(self._finished) == len(self._workers)

    @property
    def last_step(self) -> int:
        """The newest step that some worker has reported."""
        return len(self._losses)

    def handle(self, message: FromWorker) -> None:
        """Takes one message of a worker.

        Raises:
            StateError: workers contradict each other.
        """
        if isinstance(message, Hello):
            self._addresses[message.worker] = message.address
            if len(self._addresses) == len(self._workers):
                for worker in self._workers:
                    self._send(worker, Start(addresses=self._addresses))
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, StepReport):
            self._on_step(message)
        elif isinstance(message, EvaluationReport):
            self._on_evaluation(message)
        elif isinstance(message, ShardWritten | ShardFailed):
            self._on_shard(message)
        elif isinstance(message, Finished):
            self._finished[message.worker] = message

    def _write(self, event: AnyEvent) -> None:
        self._events.write(event)

    def _on_ready(self, message: Ready) -> None:
        holding = message.holding
        self._holdings[message.worker] = Holdings(
            num_parameters=holding.num_parameters,
            num_owned_blocks=holding.num_owned_blocks,
            num_owned_parameters=holding.num_owned_parameters,
            num_followed_blocks=holding.num_followed_blocks,
            num_followed_parameters=holding.num_followed_parameters,
        )
        if self.all_ready:
            self._start_up_s = time.monotonic() - self._started_s
            epoch = self._epoch()
            self._write(
                LayoutChosen(
                    epoch=epoch.epoch,
                    layout=epoch.layout,
                    reason=epoch.reason,
                    first_step=epoch.first_step,
                    layer_names=[spec.name for spec in self._blueprint.model.layers],
                    layer_parameters=[sum(slot.numel for slot in shape.tensors) for shape in self._blueprint.shapes],
                    holdings=dict(sorted(self._holdings.items())),
                )
            )

    def _epoch(self) -> EpochRecord:
        return EpochRecord(
            epoch=FIRST_EPOCH,
            layout=self._blueprint.layout,
            reason="as configured" if self._first_step == 1 else "as configured, resumed from a checkpoint",
            first_step=self._first_step,
        )

    def _on_step(self, report: StepReport) -> None:
        reports = self._reports.setdefault(report.step, {})
        reports[report.worker] = report
        if len(reports) == 1:
            self._publish(report)
        first = next(iter(reports.values()))
        if _bits(report.loss) != _bits(first.loss):
            raise StateError(
                f"step {report.step}: worker {first.worker} reports the loss {first.loss!r} and worker "
                f"{report.worker} {report.loss!r}; all workers must agree. Report this as a defect of elaswave"
            )
        if len(reports) == len(self._workers):
            del self._reports[report.step]
            self._log_step(reports)

    def _publish(self, report: StepReport) -> None:
        """Makes a committed step known; its first reporter is enough, since the vote has passed for everybody."""
        now_s = time.monotonic()
        previous_s = self._step_done_s.get(report.step - 1, now_s - report.duration_s)
        self._step_done_s[report.step] = now_s
        self._losses.append(report.loss)
        data_pass, _ = self._sampler.cursor(report.step)
        self._reporter.step(
            report.step,
            self._config.run.steps,
            report.loss,
            self._tokens_per_step / max(1e-9, now_s - previous_s),
            data_pass,
            FIRST_EPOCH,
            self._blueprint.layout.describe(),
        )
        for reason in report.retries:
            if report.step > 1 or "measured" not in reason:
                self._reporter.message(f"step {report.step} was tried again: {reason}")
        if report.skipped is not None:
            self._reporter.message(f"step {report.step} was committed without an update: {report.skipped}")
            self._write(
                StepSkipped(
                    step=report.step,
                    reason=report.skipped,
                    microbatch=report.skipped_microbatch,
                    layer=report.skipped_layer,
                )
            )

    def _log_step(self, reports: dict[int, StepReport]) -> None:
        report = next(iter(reports.values()))
        duration_s = max(other.duration_s for other in reports.values())
        phases = sorted({phase for other in reports.values() for phase in other.phases_s})
        self._write(
            StepCommitted(
                step=report.step,
                epoch=FIRST_EPOCH,
                attempt=report.attempt,
                loss=report.loss,
                grad_norm=report.norm,
                lr=report.learning_rate,
                tokens_per_s=self._tokens_per_step / duration_s,
                duration_s=duration_s,
                phases_s={phase: max(other.phases_s.get(phase, 0.0) for other in reports.values()) for phase in phases},
                retries=report.retries,
            )
        )

    def _on_evaluation(self, report: EvaluationReport) -> None:
        if self._val_steps and self._val_steps[-1] == report.step:
            return  # another worker's report of the same evaluation
        self._val_steps.append(report.step)
        self._val_losses.append(report.loss)
        self._reporter.evaluation(report.step, report.loss)
        self._write(
            Evaluated(step=report.step, loss=report.loss, num_tokens=report.num_tokens, duration_s=report.duration_s)
        )

    def _on_shard(self, message: ShardWritten | ShardFailed) -> None:
        step = message.standing.step if isinstance(message, ShardWritten) else message.step
        shards = self._shards.setdefault(step, {})
        shards[message.worker] = message
        if len(shards) < len(self._workers):
            return
        del self._shards[step]
        failures = [shard for shard in shards.values() if isinstance(shard, ShardFailed)]
        if failures:
            self._give_up_checkpoint(step, failures[0].worker, failures[0].reason)
            return
        written = [shard for shard in shards.values() if isinstance(shard, ShardWritten)]
        try:
            self._commit_checkpoint(written[0].standing, [item for shard in written for item in shard.items])
        except CheckpointError as error:
            self._give_up_checkpoint(step, None, str(error))

    def _give_up_checkpoint(self, step: int, worker: int | None, reason: str) -> None:
        text = f"the checkpoint of step {step} could not be written, training goes on without it: {reason}"
        self._write(ErrorRaised(message=text, worker=worker, step=step))
        self._reporter.error(text)
        discard_checkpoint(shard_folder(self._run_dir, step))

    def _commit_checkpoint(self, standing: Standing, items: list[WrittenItem]) -> None:
        step = standing.step
        slots = (MASTER, *OPTIMIZERS[self._config.optimizer.name](self._config.optimizer).slots)
        tensors = self._blueprint.tensors
        meta = CheckpointMeta(
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
                "val_steps": [at for at in self._val_steps if at <= step],
                "val_losses": [loss for at, loss in zip(self._val_steps, self._val_losses, strict=True) if at <= step],
            },
        )
        done = commit_checkpoint(shard_folder(self._run_dir, step), items, meta)
        record = CheckpointRecord(
            step=step,
            path=str(done.folder.relative_to(self._run_dir)),
            num_bytes=sum(item.length for item in items),
            duration_s=time.monotonic() - self._step_done_s[step],
        )
        self._checkpoints.append(record)
        self._write(CheckpointWritten(checkpoint=record))
        removed = {
            str(folder.relative_to(self._run_dir)) for folder in prune(self._run_dir, self._config.run.keep_checkpoints)
        }
        self._checkpoints = [kept for kept in self._checkpoints if kept.path not in removed]

    def result(self) -> tuple[Result, dict[str, str]]:
        """The result of the run and its digest per tensor, once everybody has finished.

        Raises:
            StateError: the followers' state is not the owners'.
        """
        assert self.all_finished
        reports = list(self._finished.values())
        standing = reports[0].standing
        digests = add_digests(report.owner_digests for report in reports)
        self._check_followers(digests, add_digests(report.follower_digests for report in reports))
        step = standing.step
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
            epochs=[self._epoch()],
            val_losses=list(self._val_losses),
            val_steps=list(self._val_steps),
            memory={
                report.worker: WorkerMemory(peak_bytes=report.peak_bytes, optimizer_bytes=report.optimizer_bytes)
                for report in sorted(reports, key=lambda report: report.worker)
            },
            checkpoints=list(self._checkpoints),
            start_up_s=self._start_up_s,
            duration_s=time.monotonic() - self._started_s,
            config=self._config.to_dict(),
        )
        return result, {name: f"{value:016x}" for name, value in digests.items()}

    def _check_followers(self, owners: dict[str, int], followers: dict[str, int]) -> None:
        """The sum over followers must be (number of followers) times the owners' digest, tensor by tensor."""
        num_followers = len(self._blueprint.placement.followers[0]) if self._blueprint.blocks else 0
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
        begin, end = self._first_step + STEPS_LEFT_OUT - 1, self.last_step
        if end <= begin:
            return None
        return self._tokens_per_step * (end - begin) / (self._step_done_s[end] - self._step_done_s[begin])


def _bits(value: float) -> JsonFloat:
    """The value in a form in which nan equals nan."""
    return "nan" if value != value else value
