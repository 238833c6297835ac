"""The log of a run: ``events.jsonl``, one JSON object per line, readable while it grows.

Every line has ``kind``, ``time`` (UTC, ISO 8601) and ``elapsed_s`` (monotonic seconds since this process opened the
log: differences are exact also when the clock is set); the rest depends on the kind. A line reaches the file in one
write, so a reader sees whole lines, except that a crash of the machine may tear the last one: the reader leaves it
out, and the next writer cuts it off before it appends.

A resumed run appends to the same file; each ``run_started`` begins a new process and starts ``elapsed_s`` anew.
There is one writer at a time: the coordinator, then its successor; after them the launcher. Nothing depends on the log:
a job goes on while it cannot be written, and `events_lost` says what it lacks. Non-finite numbers are strings, see
``elaswave.observability.result``.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from elaswave.blocks.survival import Survival
from elaswave.errors import RunFolderError
from elaswave.observability.result import (
    CheckpointRecord,
    GenerationRecord,
    JsonFloat,
    Recovery,
    of_an_earlier_release,
    set_json_floats,
)
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.types import Gauges, Layout
from elaswave.untrusted import decode_json, open_binary, open_regular
from elaswave.untrusted import reason as why

LINE_BYTES_MAX = 1 << 24
"""Of one event: the state of thousands of workers takes a tenth of it."""
LOG_BYTES_MAX = 1 << 32
DAMAGED_SHOWN = 100
"""Damaged lines of which each is told; of more, how many."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every event has. The log fills in both stamps."""

    time: str = ""
    """UTC, ISO 8601 with microseconds, such as "2026-11-20T12:57:01.250000Z"."""
    elapsed_s: float = 0.0
    """Monotonic seconds since the log was opened."""


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """A process has begun to work on the run."""

    version: str
    """Version of elaswave."""
    total_steps: int
    """``run.steps``."""
    first_step: int = 1
    """First step that this process will run: 1, or the one after the checkpoint that it resumes from."""
    num_workers: int = 0
    resumed_from: str | None = None
    """The checkpoint's folder, if any."""
    losses: list[JsonFloat] = []
    """Losses of the steps before ``first_step``, carried over by the checkpoint."""
    config: dict[str, Any] = {}
    """The resolved configuration."""

    def __post_init__(self) -> None:
        set_json_floats(self, "losses")


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker holds under a layout; counts of blocks, and of parameters (elements)."""

    num_parameters: int
    """Parameters of its stage's layers, which it computes with."""
    num_owned_blocks: int
    num_owned_parameters: int
    num_followed_blocks: int
    num_followed_parameters: int


class LayoutChosen(Event, frozen=True, kw_only=True, tag="layout"):
    """A layout takes effect."""

    generation: int
    layout: Layout
    reason: str
    first_step: int
    layer_names: list[str] = []
    """Names of the model's layers, in order."""
    layer_parameters: list[int] = []
    """Number of parameters of each layer."""
    holdings: dict[int, Holdings] = {}
    """By worker id."""
    start_up_s: float = 0.0
    """From the start of the command until the first step began; kept for a coordinator that takes over."""
    change: int = 0
    """Number of the planned change that brought it; 0 for the first layout and those that a recovery brought."""
    schedule: str = ""
    """Of the workers' programs."""
    levels: dict[int, int] = {}
    """By worker id the index of its frequency level, of those that are not at their device's base level."""
    in_flight: dict[int, int] = {}
    """By worker id the most micro-batches that it may hold; empty where the schedule alone says so."""
    ratios: dict[str, int] = {}
    """By the layer before it the ratio of each adaptive fence, where the run chooses them."""
    predicted_step_s: float | None = None
    """Seconds of a step as they were predicted beforehand; None where nothing was known yet."""
    speeds: dict[int, float] = {}
    """By worker id the speed that it was planned with, relative to the configured one; 1 for those not in it."""
    survival: Survival | None = None
    """Which losses its placement survives once all copies are there; None in logs of older versions."""

    @property
    def record(self) -> GenerationRecord:
        """The layout as it stands in ``result.json``, before its steps have been measured."""
        return GenerationRecord(
            generation=self.generation,
            layout=self.layout,
            reason=self.reason,
            first_step=self.first_step,
            change=self.change,
            schedule=self.schedule,
            predicted_step_s=self.predicted_step_s,
        )


class StepTimePredicted(Event, frozen=True, kw_only=True, tag="step_time_predicted"):
    """What a step of the layout in force should take, where that was not known when it was chosen."""

    generation: int
    change: int
    predicted_step_s: float


class StepTimeMeasured(Event, frozen=True, kw_only=True, tag="step_time"):
    """A layout is left, or the run ends: what its steps were predicted to take, and what they took."""

    generation: int
    change: int
    predicted_step_s: float | None
    measured_step_s: float
    """Median, the layout's first step left out."""
    num_steps: int
    """That were measured."""


class StepCommitted(Event, frozen=True, kw_only=True, tag="step"):
    """A step has been committed."""

    step: int
    generation: int
    attempt: int
    """Which try of the step was the one that committed, from 1."""
    loss: JsonFloat
    """Mean nats per token over the global batch."""
    grad_norm: JsonFloat
    """Norm of the whole gradient before clipping."""
    lr: float
    tokens_per_s: float | None
    """None for a script's own model, whose samples are not counted in tokens."""
    duration_s: float
    samples_per_s: float | None = None
    """None in logs that are older than this field."""
    finished_s: float = 0.0
    """Monotonic time of the machine at which the step was done."""
    phases_s: dict[str, float] = {}
    """Seconds of the reporting worker in each phase of the step."""
    retries: list[str] = []
    """Why earlier attempts of the step did not commit."""
    metrics: dict[str, JsonFloat] = {}
    """Means over the global batch by name, and under "aux_loss" what auxiliary losses add to the loss."""

    def __post_init__(self) -> None:
        set_json_floats(self, "loss", "grad_norm", "metrics")


class TimingsMeasured(Event, frozen=True, kw_only=True, tag="timings"):
    """How long workers' actions take: written soon after the start, and then ever more rarely."""

    step: int
    """Newest step that is in it."""
    timings: list[ActionTiming]
    """Of every worker that had something to tell."""
    devices: dict[int, Gauges] = {}
    """What devices tell of themselves, by worker; those that tell nothing are not there."""


class CheckpointWritten(Event, frozen=True, kw_only=True, tag="checkpoint"):
    """A durable checkpoint is complete."""

    checkpoint: CheckpointRecord


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluation"):
    """The validation loss after a step."""

    step: int
    loss: JsonFloat
    num_tokens: int | None = 0
    duration_s: float = 0.0
    metrics: dict[str, JsonFloat] = {}
    """Means over the validation micro-batches by name."""

    def __post_init__(self) -> None:
        set_json_floats(self, "loss", "metrics")


class Recovered(Event, frozen=True, kw_only=True, tag="recovery"):
    """Training goes on after something changed who takes part."""

    recovery: Recovery


class StepSkipped(Event, frozen=True, kw_only=True, tag="skipped"):
    """A step was committed without an update because something in it was not finite."""

    step: int
    reason: str
    microbatch: int | None = None
    layer: str | None = None


class ErrorRaised(Event, frozen=True, kw_only=True, tag="error"):
    """Something went wrong; whether the run goes on, the following events say."""

    message: str
    worker: int | None = None
    step: int | None = None
    traceback: str = ""


class EventsLost(Event, frozen=True, kw_only=True, tag="events_lost"):
    """The log could not be written for a while; this is the first line after that. Also what is read in place of a
    damaged line."""

    num_events: int
    """That are missing here."""
    since: str
    """When the first of them should have been written: UTC, ISO 8601."""
    reason: str
    """Why it could not be, such as "No space left on device"."""


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """The process has ended its work on the run."""

    outcome: Literal["finished", "failed", "interrupted"]
    steps: int
    """Last committed step."""
    duration_s: float
    reason: str = ""


AnyEvent = (
    RunStarted
    | LayoutChosen
    | StepTimePredicted
    | StepTimeMeasured
    | StepCommitted
    | TimingsMeasured
    | CheckpointWritten
    | Evaluated
    | Recovered
    | StepSkipped
    | ErrorRaised
    | EventsLost
    | RunFinished
)
"""Every kind of event, told apart by ``kind``."""

KINDS: dict[str, type[Event]] = {cls.__struct_config__.tag: cls for cls in get_args(AnyEvent)}
"""The struct of each ``kind``."""


class EventLog:
    """Appends events to a run's log, each in one write.

    Args:
        path: the file; created if missing, continued if not.
        on_trouble: called with one line when the log cannot be written any more, and again when it can; events of the
            time between are counted and left out. None: `write` raises.
    Raises:
        RunFolderError: the file cannot be opened for writing, and there is no `on_trouble`.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self._on_trouble = on_trouble
        self._lost: EventsLost | None = None
        """What is missing since the newest line."""
        self._fd, self._end, self._is_closed = -1, 0, False
        try:
            self._open()
        except OSError as error:
            if on_trouble is None:
                raise RunFolderError(
                    f"cannot write {path}: {error.strerror or error}; choose another --run-dir"
                ) from error
        self._start = time.monotonic()
        self._encoder = msgspec.json.Encoder()

    def _open(self) -> None:
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._end = _cut_torn_line(fd)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    @property
    def num_lost(self) -> int:
        """Events that are missing since the newest line."""
        return 0 if self._lost is None else self._lost.num_events

    def write(self, event: AnyEvent) -> None:
        """Stamps an event and appends it; it is readable by others when this returns, unless `on_trouble` was told.

        Raises:
            RunFolderError: the line cannot be written (disk full, log closed), and there is no `on_trouble`.
        """
        stamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        stamps = {"time": stamp, "elapsed_s": round(time.monotonic() - self._start, 6)}
        lines = [event] if self._lost is None else [self._lost, event]
        try:
            self._append(
                b"".join(self._encoder.encode(msgspec.structs.replace(line, **stamps)) + b"\n" for line in lines)
            )
        except OSError as error:
            reason = error.strerror or str(error)
            if self._on_trouble is None:
                raise RunFolderError(f"cannot append to {self.path}: {reason}") from error
            before = self._lost or EventsLost(num_events=0, since=stamp, reason=reason)
            self._lost = msgspec.structs.replace(before, num_events=before.num_events + 1)
            if before.num_events == 0:
                self._on_trouble(
                    f"{self.path} cannot be written ({reason}): training goes on, and the log will say what it lacks "
                    "once it can be written again"
                )
            return
        if self._lost is not None and self._on_trouble is not None:
            self._on_trouble(f"{self.path} can be written again; it lacks {self._lost.num_events} events")
        self._lost = None

    def _append(self, data: bytes) -> None:
        """Appends bytes wholly, or not at all."""
        if self._fd < 0 and not self._is_closed:  # its file system could not be written when it was to be opened
            self._open()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Closes the file; further writes fail. Closing twice is allowed."""
        self._is_closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _cut_torn_line(fd: int) -> int:
    """Truncates a file to the end of its last complete line; returns its length then."""
    end = os.lseek(fd, 0, os.SEEK_END)
    keep = end
    while keep > 0:
        start = max(0, keep - 65536)
        newline = os.pread(fd, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < end:
        os.ftruncate(fd, keep)
    return keep


class _Kind(msgspec.Struct):
    """Only the kind of a line, to tell an event of a newer version from a damaged one."""

    kind: str


def read_events(path: Path) -> list[AnyEvent]:
    """Reads a log, also one that is being written.

    A last line without its end is left out, and so are kinds of events that this version does not know. In place of a
    damaged line there is an `EventsLost` that names it: nothing of a run depends on its log.

    Args:
        path: ``events.jsonl``.
    Returns:
        The events in the order they were written.
    Raises:
        RunFolderError: the file is missing, or cannot be read.
    """
    events: list[AnyEvent] = []
    num_damaged = 0
    try:
        for number, line in _lines(path):
            try:
                events.append(_event_of(line))
            except ValueError as error:
                if _is_of_a_newer_version(line):
                    continue
                num_damaged += 1
                reason = f"{path.name}, line {number}, is damaged: {error}"
                time, elapsed_s = (events[-1].time, events[-1].elapsed_s) if events else ("", 0.0)
                if num_damaged <= DAMAGED_SHOWN:
                    events.append(EventsLost(num_events=1, since=time, reason=reason, time=time, elapsed_s=elapsed_s))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {why(error)}") from error
    if (more := num_damaged - DAMAGED_SHOWN) > 0:
        reason = f"{path.name} has {more} damaged lines besides"
        events.append(EventsLost(num_events=more, since=events[-1].time, reason=reason, time=events[-1].time))
    return events


def _event_of(line: bytes) -> AnyEvent:
    try:
        return decode_json(line, _EVENTS)
    except ValueError:
        if (translated := of_an_earlier_release(line)) is None:
            raise
        return decode_json(translated, _EVENTS)


_EVENTS = msgspec.json.Decoder(AnyEvent)
_KIND = msgspec.json.Decoder(_Kind)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the whole lines of a log, with their numbers. Of one that is too long, only the beginning is there.

    Raises:
        OSError: it cannot be read, or is too long.
    """
    with open_binary(path, LOG_BYTES_MAX) as log:
        number, begun = 1, b""
        while part := log.readline(LINE_BYTES_MAX):
            begun = begun or part
            if part.endswith(b"\n"):
                yield number, begun
                number, begun = number + 1, b""


def _is_of_a_newer_version(line: bytes) -> bool:
    try:
        return decode_json(line, _KIND).kind not in KINDS
    except ValueError:
        return False
