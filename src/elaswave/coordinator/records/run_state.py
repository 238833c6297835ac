"""What a coordinator knows of the run, as a fold: records and reports go in one by one, questions are answered. No IO.

A live coordinator and one that takes over fold the same records with `apply`: what the first makes durable is all that
the second knows. Beside them stand reports that every worker repeats to each new coordinator (`ready`, `finished`).

The result of a run and the description of a checkpoint, made from what the coordinator knows of the run. No IO.

Digests of tensors' parts put together: per tensor, and of the whole state. No torch; `verify` computes the parts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from elaswave._version import __version__
from elaswave.channel.messages.worker import Finished, StepReport, TrainingStanding
from elaswave.checkpoints.format import UPDATER, CheckpointMeta, TensorInfo, stored_name
from elaswave.coordinator.records.recoveries import layout_changed
from elaswave.data.samples import Sampler
from elaswave.errors import StateError
from elaswave.fences import changing, fence_ratio_of, with_ratios
from elaswave.hashing import MASK64, key64, mix64
from elaswave.job.plan import RunPlan
from elaswave.observability.events import (
    AnyEvent,
    Evaluated,
    LayoutChosen,
    Recovered,
    RunFinished,
    StepTimeMeasured,
    StepTimePredicted,
)
from elaswave.observability.result import (
    CheckpointRecord,
    GenerationRecord,
    JsonFloat,
    Recovery,
    RunResult,
    WorkerMemory,
    from_json_float,
    to_json_float,
)
from elaswave.protocol.coordinator.decisions import MemberEnd, all_have_ended
from elaswave.protocol.messages import FIRST_GENERATION, Decision
from elaswave.store.store import CheckpointGivenUp, Entered, Published, RecorderRecord
from elaswave.types import Layout


def add_digests(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Adds up the digests per tensor and slot from those of all parts, in sorted order of names."""
    total: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (total.get(name, 0) + value) & MASK64
    return dict(sorted(total.items()))


def state_digest(
    *,
    step: int,
    num_updates: int,
    data_cursor: tuple[int, int],
    grids: Iterable[int],
    tensor_digests: Mapping[str, int],
    fences: Iterable[str] = (),
) -> str:
    """Computes the hash of everything that decides how training goes on, as 16 hexadecimal digits."""
    total = key64("state", step, num_updates, *data_cursor, *grids)
    for fence in fences:
        total = mix64(total + key64("fence", fence))
    for name, value in sorted(tensor_digests.items()):
        total = mix64(total + key64(name, value))
    return f"{total:016x}"


STEPS_LEFT_OUT = 3
"""First steps of a process that do not count for its throughput."""


Metrics = Mapping[int, Mapping[str, float]]
"""Step -> metrics by name."""


def as_series(metrics: Metrics, steps: Iterable[int]) -> dict[str, list[float]]:
    """Metrics by name, one value per step; nan where a step has none."""
    rows = [metrics.get(step, {}) for step in steps]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def by_step(series: Mapping[str, Sequence[float | str]], steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Does the inverse of `as_series`."""
    return {step: {name: float(values[at]) for name, values in series.items()} for at, step in enumerate(steps)}


class RunState:
    """The state of one run.

    Args:
        layout: of the start.
        losses: of the steps before the first one, if the run resumes from a checkpoint.
        val_losses: step -> validation loss, of the same steps.
        metrics, val_metrics: by step, then by name, of the same steps.
        fence_ratios: that the run has chosen in them, as ``STEP:LAYER:RATIO``.
        repeats_exactly: whether a step that is run again must have the same loss.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        losses: Sequence[float] = (),
        val_losses: Mapping[int, float] | None = None,
        metrics: Metrics | None = None,
        val_metrics: Metrics | None = None,
        fence_ratios: Sequence[str] = (),
        repeats_exactly: bool = True,
    ) -> None:
        self.first_step = len(losses) + 1
        self.losses = list(losses)
        """Of all steps from the first on."""
        self.val_losses = dict(val_losses or {})
        """Step -> validation loss, in the order in which they came."""
        self.metrics = dict(metrics or {})
        """Step -> metrics by name; only steps that have some."""
        self.val_metrics = dict(val_metrics or {})
        """The same of evaluations."""
        self.fence_ratios = list(map(fence_ratio_of, fence_ratios))
        """That the run has chosen for its adaptive fences, by step."""
        self.finished_s: dict[int, float] = {}
        """Step -> monotonic time at which it was done."""
        self.generations: list[GenerationRecord] = []
        """Layouts that were chosen, in order."""
        self.recoveries: list[Recovery] = []
        self._ready: set[int] = set()
        """Workers that have begun to train."""
        self.finished: dict[int, Finished] = {}
        """Workers that have said, since the present generation began, that they have made their last step."""
        self.generation = FIRST_GENERATION
        self.members: tuple[int, ...] = layout.workers
        self.start_up_s = 0.0
        self.outcome: Literal["finished", "failed", "interrupted"] | None = None
        """How the job has ended, or None."""
        self.reason = ""
        """Why it has."""
        self._first_layout = layout
        self._repeats_exactly = repeats_exactly
        self._speeds: dict[int, float] = {}
        """That the present layout was planned with."""
        self._steps_s: list[float] = []
        """Seconds of the steps under the present layout."""

    # ------------------------------------------------------------------------------------------------------- the fold

    def apply(self, record: RecorderRecord) -> None:
        """Takes a durable record."""
        if isinstance(record, Published):
            if record.step <= len(self.losses):
                self.losses[record.step - 1] = record.loss
            else:
                self.losses.append(record.loss)
            self.finished_s[record.step] = record.finished_s
            if record.metrics:
                self.metrics[record.step] = record.metrics
        elif not isinstance(record, CheckpointGivenUp):  # of checkpoints `control.checkpoints` keeps account
            self._apply_event(record)

    def _apply_event(self, record: Entered) -> None:
        event: AnyEvent = record.event
        if isinstance(event, Evaluated):
            self.val_losses[event.step] = from_json_float(event.loss)
            if event.metrics:
                self.val_metrics[event.step] = {name: from_json_float(value) for name, value in event.metrics.items()}
        elif isinstance(event, LayoutChosen):
            if event.change:
                self.recoveries += layout_changed(event, self.layout, self._speeds)
            self._speeds = event.speeds
            self.generations.append(event.record)
            self.fence_ratios = with_ratios(self.fence_ratios, event.first_step, event.ratios)
            self._steps_s.clear()
            self.start_up_s = event.start_up_s or self.start_up_s
            if event.generation >= self.generation:  # a change of the last generation may be heard of in the next one
                self.generation, self.members = event.generation, event.layout.workers
        elif isinstance(event, StepTimePredicted):
            self._amend(predicted_step_s=event.predicted_step_s)
        elif isinstance(event, StepTimeMeasured):
            self._steps_s.clear()
            self._amend(predicted_step_s=event.predicted_step_s, measured_step_s=event.measured_step_s)
        elif isinstance(event, Recovered):
            self.recoveries.append(event.recovery)
        elif isinstance(event, RunFinished):
            self.outcome, self.reason = event.outcome, event.reason

    def _amend(self, **values: float | None) -> None:
        if self.generations:
            self.generations[-1] = msgspec.structs.replace(self.generations[-1], **values)

    def new_generation(self, generation: int) -> None:
        """A new generation has begun: what was reported for the end no longer counts."""
        self.generation = generation
        self.finished.clear()

    def ready(self, worker: int) -> bool:
        """A worker begins to train.

        Returns:
            Whether every member has been heard for the first time, so that the first layout can be shown.
        """
        self._ready.add(worker)
        return self._ready.issuperset(self.members) and not self.generations

    def finish(self, message: Finished) -> None:
        """A worker has made its last step."""
        self.finished[message.worker] = message

    def time_step(self, report: StepReport, finished_s: float) -> None:
        """Counts how long a published step took, from one step's end to the next one's: what is done between steps
        belongs to them. A layout's first step, and one that was tried again, do not count."""
        if self.generations and self.generations[-1].first_step < report.step and report.attempt == 1:
            begin_s = self.finished_s.get(report.step - 1)
            if begin_s is not None:
                self._steps_s.append(finished_s - begin_s)

    # ------------------------------------------------------------------------------------------------------- is it new

    def is_new_loss(self, step: int, loss: float) -> bool:
        """Tells whether it is the next step's, or a repeated one's that is another one, where that may be.

        Raises:
            StateError: it must be the same, and is not; or a step before it is missing.
        """
        if step == len(self.losses) + 1:
            return True
        if step > len(self.losses):
            raise StateError(
                f"step {step} was reported, but step {len(self.losses) + 1} never was: the worker that should have "
                "told of it is gone, and the others keep only their newest reports. Resume from the last checkpoint"
            )
        known = self.losses[step - 1]
        if known == loss or (known != known and loss != loss):
            return False
        if self._repeats_exactly:
            raise StateError(
                f"step {step} had the loss {known!r} and, repeated, {loss!r}; in bitwise mode they must be equal. "
                "Are the workers' processors and library versions the same?"
            )
        return True

    def is_new_validation(self, step: int, loss: float) -> bool:
        """Tells whether it is a new one, or another one of a step that need not repeat its loss."""
        return step not in self.val_losses or (not self._repeats_exactly and self.val_losses[step] != loss)

    def lacks_prediction(self) -> bool:
        """Tells whether it is not known yet what a step of the present layout should take, and would still be of
        interest."""
        return self.outcome is None and bool(self.generations) and self.generations[-1].predicted_step_s is None

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def last_step(self) -> int:
        """The newest step that has been published."""
        return len(self.losses)

    @property
    def layout(self) -> Layout:
        """The layout of the present generation."""
        return self.generations[-1].layout if self.generations else self._first_layout

    @property
    def step_s(self) -> float:
        """Of the newest step under the present layout; 0 before one was made."""
        return self._steps_s[-1] if self._steps_s else 0.0

    @property
    def newest_change(self) -> int:
        """The newest planned change that has come into force; 0 for none."""
        return max((record.change for record in self.generations), default=0)

    @property
    def num_restarts(self) -> int:
        """How many ends of coordinators have been reported."""
        return sum(recovery.kind == "coordinator" for recovery in self.recoveries)

    @property
    def ends(self) -> dict[int, MemberEnd]:
        """Workers that have said that they have made their last step."""
        return {
            worker: MemberEnd(message.standing.generation, message.standing.step)
            for worker, message in self.finished.items()
        }

    @property
    def all_finished(self) -> bool:
        """Whether every member has made its last step and reported its state, and every step's loss is known."""
        return all_have_ended(self.members, self.generation, self.ends, self.last_step)

    @property
    def was_stopped(self) -> bool:
        """Whether the workers have ended before the run's last step, because they were asked to."""
        return any(report.stopped for report in self.finished.values())

    def unreported(self, decision: Decision) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Lists the workers of a decision that it goes on without, that have joined, and that have left; those without
        an entry, and an id is used once."""
        reported = {(recovery.kind, recovery.worker) for recovery in self.recoveries}
        lost, joined, left = (
            tuple(worker for worker in workers if (kind, worker) not in reported)
            for kind, workers in (("lost", decision.lost), ("joined", decision.joined), ("drained", decision.left))
        )
        return lost, joined, left

    def layout_before(self, generation: int) -> Layout:
        """Returns the layout that a generation has replaced."""
        earlier = [record.layout for record in self.generations if record.generation < generation]
        return earlier[-1] if earlier else self._first_layout

    def layout_of(self, step: int, generation: int | None = None) -> Layout:
        """Finds the layout in which a step was committed; a newer one may have been decided before its report came.

        Args:
            step: which.
            generation: in which it was committed; None if that is not known.
        """
        for record in reversed(self.generations):
            if record.first_step <= step and (generation is None or record.generation <= generation):
                return record.layout
        return self._first_layout if generation is None else self.layout

    def step_time_measured(self) -> StepTimeMeasured | None:
        """Computes what the steps of the present layout took, if any were measured."""
        if not self._steps_s or not self.generations:
            return None
        record = self.generations[-1]
        return StepTimeMeasured(
            generation=record.generation,
            change=record.change,
            predicted_step_s=record.predicted_step_s,
            measured_step_s=median(self._steps_s),
            num_steps=len(self._steps_s),
        )

    def samples_per_s(self, microbatch_size: int) -> float | None:
        """Computes the throughput without start-up and the first steps; None before there are others."""
        begin, end = self.first_step + STEPS_LEFT_OUT - 1, self.last_step
        if end <= begin or begin not in self.finished_s:
            return None
        num_microbatches = sum(self.layout_of(step).num_microbatches for step in range(begin + 1, end + 1))
        return num_microbatches * microbatch_size / (self.finished_s[end] - self.finished_s[begin])


def describe_checkpoint(
    plan: RunPlan, state: RunState, sampler: Sampler, standing: TrainingStanding, facts: dict[str, object]
) -> CheckpointMeta:
    """Describes the run at the step of a standing, the losses up to which are known.

    Args:
        plan, state, sampler: of the run.
        standing: of the workers that have written the checkpoint.
        facts: about the data.
    """
    step = standing.step
    tensors = plan.tensors
    val = [(at, loss) for at, loss in state.val_losses.items() if at <= step]
    return CheckpointMeta(
        step=step,
        losses=[loss if loss - loss == 0 else "nan" for loss in state.losses[:step]],
        grids={slot.name: exponent for slot, exponent in zip(tensors, standing.exponents, strict=True)},
        seed=plan.config.run.seed,
        data_cursor=sampler.cursor(step),
        config=plan.config.to_dict(),
        tensors={
            stored_name(stored.slot, stored.tensor): TensorInfo(stored.shape, stored.dtype)
            for stored in plan.state.stored(standing.num_updates)
        },
        elaswave_version=__version__,
        extra={
            "num_updates": standing.num_updates,
            "calibrated": standing.calibrated,
            "val_steps": [at for at, _ in val],
            "val_losses": [loss for _, loss in val],
            "metrics": _as_json(as_series(state.metrics, range(1, step + 1))),
            "val_metrics": _as_json(as_series(state.val_metrics, [at for at, _ in val])),
            "data": facts,
            "fence_ratios": _ratios_until(plan, state, step),
        }
        | ({UPDATER: standing.optimizer} if standing.optimizer else {}),
    )


def make_result(
    plan: RunPlan, state: RunState, sampler: Sampler, checkpoints: Sequence[CheckpointRecord], duration_s: float
) -> tuple[RunResult, dict[str, str]]:
    """Makes the result of the run and its digest per tensor, once every member has finished.

    Args:
        plan, state, sampler: of the run.
        checkpoints: those that are on the disk.
        duration_s: of the whole run.
    Raises:
        StateError: the followers' state is not the owners'.
    """
    assert state.all_finished
    reports = [state.finished[worker] for worker in state.members]
    standing = reports[0].standing
    digests = add_digests(report.owner_digests for report in reports)
    check_followers(
        add_digests(report.followed_digests for report in reports),
        add_digests(report.follower_digests for report in reports),
    )
    step = standing.step
    samples_per_s = state.samples_per_s(plan.config.batch.microbatch_size)
    tokens = plan.tokens_per_sample
    result = RunResult(
        steps=step,
        losses=list(state.losses),
        state_digest=state_digest(
            step=step,
            num_updates=standing.num_updates,
            data_cursor=sampler.cursor(step),
            grids=_grids_of(plan, standing.exponents),
            tensor_digests=digests,
            fences=(*changing(plan.config.model.fences), *_ratios_until(plan, state, step)),
        ),
        throughput_tokens_per_s=None if samples_per_s is None or tokens is None else samples_per_s * tokens,
        throughput_samples_per_s=samples_per_s,
        generations=list(state.generations),
        recoveries=list(state.recoveries),
        val_losses=list(state.val_losses.values()),
        val_steps=list(state.val_losses),
        metrics=_as_json(as_series(state.metrics, range(1, step + 1))),
        val_metrics=_as_json(as_series(state.val_metrics, state.val_losses)),
        memory={
            report.worker: WorkerMemory(peak_bytes=report.peak_bytes, optimizer_bytes=report.optimizer_bytes)
            for report in sorted(reports, key=lambda report: report.worker)
        },
        data_wait_s={report.worker: report.data_wait_s for report in reports},
        fence_ratios=_ratios_until(plan, state, step),
        fence_bypasses=_added(report.fence_bypasses for report in reports),
        checkpoints=list(checkpoints),
        start_up_s=state.start_up_s,
        duration_s=duration_s,
        config=plan.config.to_dict(),
    )
    return result, {name: f"{value:016x}" for name, value in digests.items()}


def _ratios_until(plan: RunPlan, state: RunState, step: int) -> list[str]:
    """Lists the ratios of adaptive fences in the steps up to this one: given, or chosen by the run."""
    given = plan.config.model.fence_ratios
    recorded = map(fence_ratio_of, given) if given else state.fence_ratios
    return [str(each) for each in recorded if each.from_step <= step]


def _grids_of(plan: RunPlan, exponents: Sequence[int]) -> list[int]:
    """Exponents of all tensors in an order that tells nothing of layers: that in which a network's tensors stand
    depends on where `elaswave.split` has cut it."""
    if not plan.config.model.network:
        return list(exponents)
    return [exponent for _, exponent in sorted(zip((slot.name for slot in plan.tensors), exponents, strict=True))]


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = sum(map(Counter, counts), Counter[str]())
    return dict(sorted(total.items()))


def _as_json(series: dict[str, list[float]]) -> dict[str, list[JsonFloat]]:
    return {name: [to_json_float(value) for value in values] for name, values in series.items()}


def check_followers(followed: Mapping[str, int], followers: Mapping[str, int]) -> None:
    """What the followers hold must be what they follow, tensor by tensor.

    Args:
        followed: sums of the owners' digests, of each block as often as it has followers.
        followers: sums of the followers' digests.
    Raises:
        StateError: they differ.
    """
    for name in sorted({*followed, *followers}):
        if followers.get(name, 0) != followed.get(name, 0):
            raise StateError(
                f"the followers' copy of {name} is not the owners' after the last step; the result is not to be "
                "trusted. Resume from the last checkpoint, and look at the hardware"
            )
