"""What a run folder tells about its run: one value that ``elaswave inspect`` prints, for people or as JSON.

Works on a run that is still going on, from its event log alone; once there is a result, the result's word counts.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from elaswave.blocks.survival import Survival
from elaswave.observability.events import (
    AnyEvent,
    CheckpointWritten,
    ErrorRaised,
    Evaluated,
    EventsLost,
    Holdings,
    LayoutChosen,
    Recovered,
    RunFinished,
    RunStarted,
    StepCommitted,
    StepSkipped,
    read_events,
)
from elaswave.observability.result import (
    CheckpointRecord,
    GenerationRecord,
    JsonFloat,
    Recovery,
    RunResult,
    check_run_folder,
    read_result,
)
from elaswave.observability.run_folder import EVENTS_FILE, RESULT_FILE
from elaswave.types import Layout

NUM_WARM_UP_STEPS = 3
"""Steps of a process that are left out of its timings, as in the result's throughput."""
PHASES = ("run", "data", "reduce", "vote", "apply", "gather")
"""The phases of a step, in order."""


class StageSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the latest layout."""

    stage: int
    start: int
    """First layer."""
    stop: int
    """One past the last layer."""
    layer_names: list[str]
    """Empty if the log does not tell."""
    num_parameters: int | None
    workers: list[int]


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of the latest layout; None for what the run folder does not tell."""

    worker: int
    stage: int
    num_microbatches: int
    """Micro-batches of a step that run on it."""
    holdings: Holdings | None
    optimizer_bytes: int | None
    peak_bytes: int | None


class StepTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step of the latest process, its first three steps left out."""

    num_steps: int
    """How many steps were measured."""
    mean_s: float
    median_s: float
    slowest_s: float
    phases_s: dict[str, float]
    """Mean of each phase over the steps that tell, in the order in which they run; empty if none does."""


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a step that did not commit."""

    step: int
    reason: str


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``elaswave inspect`` shows."""

    run_dir: str
    status: Literal["finished", "failed", "interrupted", "unfinished"]
    """"unfinished": no result and no end in the log: still running, or ended without a word."""
    steps: int
    """Steps committed so far."""
    total_steps: int | None
    """Steps asked for."""
    last_event_time: str | None
    """UTC time stamp of the log's last line."""
    policy: str | None
    """Who plans after losses, as configured: a name, or where a person's own function is."""
    losses: dict[int, JsonFloat]
    """By step."""
    val_losses: dict[int, JsonFloat]
    """By step."""
    generations: list[GenerationRecord]
    layout: str | None
    """Short name of the latest layout."""
    survival: Survival | None
    """Which losses its placement survives."""
    stages: list[StageSummary]
    workers: list[WorkerSummary]
    timings: StepTimings | None
    throughput_tokens_per_s: float | None
    throughput_samples_per_s: float | None
    start_up_s: float | None
    duration_s: float | None
    recoveries: list[Recovery]
    checkpoints: list[CheckpointRecord]
    skipped: list[StepSkipped]
    retries: list[Retry]
    errors: list[ErrorRaised]
    lost: list[EventsLost]
    """What the log lacks."""
    state_digest: str | None


def summarize_run(run_dir: Path) -> RunSummary:
    """Reads a run folder.

    Raises:
        RunFolderError: not a run folder, or a damaged file in it.
    """
    check_run_folder(run_dir)
    result = read_result(run_dir) if (run_dir / RESULT_FILE).exists() else None
    events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else []
    return build_summary(str(run_dir), result, events)


def _policy(config: Mapping[str, Any]) -> str | None:
    policy: str | None = config.get("elastic", {}).get("policy")
    return policy


def build_summary(run_dir: str, result: RunResult | None, events: Sequence[AnyEvent]) -> RunSummary:
    """Puts a result and a log together; either may be missing. Pure.

    Args:
        run_dir: what to call the run.
        result: its result, if it has one.
        events: its log, in order.
    """
    # A resumed run goes on in the same log: what the earlier process did after the checkpoint did not count.
    losses: dict[int, JsonFloat] = {}
    val_losses: dict[int, JsonFloat] = {}
    skipped: dict[int, StepSkipped] = {}
    retries: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, RunStarted):
            losses, val_losses = _before(event.first_step, losses), _before(event.first_step, val_losses)
            skipped, retries = _before(event.first_step, skipped), _before(event.first_step, retries)
            losses |= dict(enumerate(event.losses, start=1))
        elif isinstance(event, StepCommitted):
            losses[event.step] = event.loss
            retries[event.step] = event.retries
        elif isinstance(event, StepSkipped):
            losses.setdefault(event.step, "nan")
            skipped[event.step] = event
        elif isinstance(event, Evaluated):
            val_losses[event.step] = event.loss
    starts = [index for index, event in enumerate(events) if isinstance(event, RunStarted)]
    latest = events[starts[-1] :] if starts else events
    started = next((event for event in latest if isinstance(event, RunStarted)), None)
    ended = next((event for event in reversed(latest) if isinstance(event, RunFinished)), None)
    chosen = [event for event in latest if isinstance(event, LayoutChosen)]
    steps = [event for event in latest if isinstance(event, StepCommitted)]
    measured = steps[NUM_WARM_UP_STEPS:]
    if result is not None:
        losses = dict(enumerate(result.losses, start=1))
        val_losses = dict(zip(result.val_steps, result.val_losses, strict=True))
    generations = result.generations if result is not None else [event.record for event in chosen]
    layout = generations[-1].layout if generations else None
    described = next((event for event in reversed(chosen) if event.layout == layout), None)
    return RunSummary(
        run_dir=run_dir,
        status="finished" if result is not None else ended.outcome if ended is not None else "unfinished",
        steps=result.steps if result is not None else max(losses, default=0),
        total_steps=started.total_steps if started is not None else None,
        last_event_time=events[-1].time if events else None,
        policy=_policy(result.config if result is not None else started.config if started is not None else {}),
        losses=losses,
        val_losses=val_losses,
        generations=generations,
        layout=layout.describe() if layout is not None else None,
        survival=described.survival if described is not None else None,
        stages=_stages(layout, described) if layout is not None else [],
        workers=_workers(layout, described, result) if layout is not None else [],
        timings=_timings(measured),
        throughput_tokens_per_s=result.throughput_tokens_per_s
        if result is not None
        else _throughput(measured, [event.tokens_per_s for event in measured]),
        throughput_samples_per_s=result.throughput_samples_per_s
        if result is not None
        else _throughput(measured, [event.samples_per_s for event in measured]),
        start_up_s=result.start_up_s if result is not None else None,
        duration_s=result.duration_s if result is not None else latest[-1].elapsed_s if latest else None,
        recoveries=result.recoveries if result is not None else _recoveries(events),
        checkpoints=result.checkpoints if result is not None else _checkpoints(events),
        skipped=list(skipped.values()),
        retries=[Retry(step=step, reason=reason) for step, reasons in retries.items() for reason in reasons],
        errors=[event for event in latest if isinstance(event, ErrorRaised)],
        lost=[event for event in events if isinstance(event, EventsLost)],
        state_digest=result.state_digest if result is not None else None,
    )


_T = TypeVar("_T")


def _before(step: int, values: Mapping[int, _T]) -> dict[int, _T]:
    """Selects what belongs to earlier steps."""
    return {key: value for key, value in values.items() if key < step}


def _recoveries(events: Sequence[AnyEvent]) -> list[Recovery]:
    return [event.recovery for event in events if isinstance(event, Recovered)]


def _checkpoints(events: Sequence[AnyEvent]) -> list[CheckpointRecord]:
    return list(
        {event.checkpoint.path: event.checkpoint for event in events if isinstance(event, CheckpointWritten)}.values()
    )


def _stages(layout: Layout, described: LayoutChosen | None) -> list[StageSummary]:
    names = described.layer_names if described is not None else []
    parameters = described.layer_parameters if described is not None else []
    return [
        StageSummary(
            stage=index,
            start=stage.start,
            stop=stage.stop,
            layer_names=names[stage.start : stage.stop],
            num_parameters=sum(parameters[stage.start : stage.stop]) if parameters else None,
            workers=list(stage.workers),
        )
        for index, stage in enumerate(layout.stages)
    ]


def _workers(layout: Layout, described: LayoutChosen | None, result: RunResult | None) -> list[WorkerSummary]:
    counts = Counter(worker for route in layout.routes for worker in {hop.worker for hop in route})
    holdings = described.holdings if described is not None else {}
    memory = result.memory if result is not None else {}
    return [
        WorkerSummary(
            worker=worker,
            stage=index,
            num_microbatches=counts[worker],
            holdings=holdings.get(worker),
            optimizer_bytes=memory[worker].optimizer_bytes if worker in memory else None,
            peak_bytes=memory[worker].peak_bytes if worker in memory else None,
        )
        for index, stage in enumerate(layout.stages)
        for worker in stage.workers
    ]


def _timings(steps: Sequence[StepCommitted]) -> StepTimings | None:
    if not steps:
        return None
    durations_s = [event.duration_s for event in steps]
    phases: dict[str, list[float]] = {}
    for event in steps:
        for name, seconds in event.phases_s.items():
            phases.setdefault(name, []).append(seconds)
    return StepTimings(
        num_steps=len(steps),
        mean_s=statistics.fmean(durations_s),
        median_s=statistics.median(durations_s),
        slowest_s=max(durations_s),
        phases_s={name: statistics.fmean(phases[name]) for name in sorted(phases, key=_phase_order)},
    )


def _phase_order(name: str) -> int:
    return PHASES.index(name) if name in PHASES else len(PHASES)


def _throughput(steps: Sequence[StepCommitted], rates: Sequence[float | None]) -> float | None:
    """Computes the rate over all the steps, from their own rates; None where one is not known."""
    seconds = sum(event.duration_s for event in steps)
    known = [rate for rate in rates if rate is not None]
    if seconds <= 0 or len(known) < len(steps):
        return None
    return sum(rate * event.duration_s for rate, event in zip(known, steps, strict=True)) / seconds
