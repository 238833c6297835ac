"""Traces: when every worker did what, for https://ui.perfetto.dev or chrome://tracing.

Each worker appends tuples to a list while it works and dumps them once, to ``trace-worker-3.json.part``; the launcher
merges the parts into ``trace.json`` in the Trace Event Format:

* one process row per worker, its stage in the name, rows in the order of the stages;
* complete events ("X") for actions (2F0, 2B0, ...) and, around them, the phases RUN, REDUCE, VOTE, APPLY, GATHER;
* asynchronous events ("b", "e") for transfers, which overlap with everything;
* counters ("C"), such as a device's memory, told with each step;
* flow events ("s", "f") from where the sender handed a transfer over to where the receiver went on after it arrived.

A simulated step is written with the same rows, actions and arrows.

Clock: ``time.monotonic_ns``, one for all processes of a machine; workers of different machines do not line up.
Recording costs one tuple per event, and nothing is recorded, allocated or written by a recorder that is off. A
recorder keeps a bounded number of events and counts those that it had to leave out.

Source: "Trace Event Format" by the Chromium authors. This module reads no clock: callers pass times.
"""

import bisect
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from elaswave.observability.run_folder import TRACE_FILE, atomic_write
from elaswave.untrusted import read_json

if TYPE_CHECKING:
    from elaswave.planning.costs.step_time.contended import SimulatedStep

ACTION = "action"
"""Category of the actions of a program."""
PHASE = "phase"
"""Category of the phases of a step."""

TRACE_BYTES_MAX = 1 << 30
"""Of one worker's part."""
PART_PATTERN = "trace-worker-*.json.part"
"""Names of the files that workers leave to be merged."""

MAX_EVENTS = 1_000_000
"""Events that a recorder keeps: some 200 bytes each."""

_MAX_WALK = 256
"""Spans looked at to find the innermost one around a moment."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that a worker did, from ``start_ns`` to ``end_ns``."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] | None = None


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One side of a message, from when it was asked for until it was done."""

    sent: bool
    """True on the sender's side."""
    peer: int
    """Worker id of the other side."""
    num_bytes: int
    start_ns: int
    end_ns: int
    tag: tuple[int, ...]
    """What the message was tagged with; both sides are joined by (sender, receiver, tag)."""


class Count(msgspec.Struct, frozen=True, array_like=True):
    """A number that a worker told at one instant."""

    name: str
    at_ns: int
    value: float


class TracePart(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker has recorded."""

    worker: int
    stage: int | None
    num_dropped: int
    spans: list[Span]
    transfers: list[Transfer]
    counts: list[Count] = []


class TraceRecorder:
    """Records what one worker does.

    Args:
        worker: id of the worker.
        stage: its stage, for the name of its row.
        enabled: a recorder that is off ignores everything; test ``enabled`` to save even the calls and clock reads.
        max_events: bound on what is kept.
    """

    __slots__ = ("_counts", "_max_events", "_spans", "_transfers", "enabled", "num_dropped", "stage", "worker")

    def __init__(
        self, worker: int, *, stage: int | None = None, enabled: bool = True, max_events: int = MAX_EVENTS
    ) -> None:
        self.worker = worker
        self.stage = stage
        self.enabled = enabled
        self.num_dropped = 0
        self._max_events = max_events
        self._spans: list[tuple[str, str, int, int, dict[str, Any] | None]] = []
        self._transfers: list[tuple[bool, int, int, int, int, tuple[int, ...]]] = []
        self._counts: list[tuple[str, int, float]] = []

    @property
    def _is_full(self) -> bool:
        return len(self._spans) + len(self._transfers) + len(self._counts) >= self._max_events

    def add(self, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None) -> None:
        """Records a span: ``add("2F0", ACTION, t0, t1, {"step": 7})``, ``add("REDUCE", PHASE, t0, t1)``.

        Spans of one worker nest or follow each other: they are what its one computing thread does.

        Args:
            name: what was done.
            category: ``ACTION``, ``PHASE`` or another word to filter by.
            start_ns, end_ns: ``time.monotonic_ns()`` before and after.
            args: more to show beside it; kept, not copied.
        """
        if not self.enabled:
            return
        if self._is_full:
            self.num_dropped += 1
            return
        self._spans.append((name, category, start_ns, end_ns, args))

    def transfer(
        self, *, sent: bool, peer: int, num_bytes: int, start_ns: int, end_ns: int, tag: Sequence[int]
    ) -> None:
        """Records one side of a message.

        Args:
            sent: True on the sender's side, False on the receiver's.
            peer: worker id of the other side.
            num_bytes: length of the content.
            start_ns: when it was asked for (``send`` or ``recv`` was called).
            end_ns: when it was done.
            tag: the message's tag, the same on both sides.
        """
        if not self.enabled:
            return
        if self._is_full:
            self.num_dropped += 1
            return
        self._transfers.append((sent, peer, num_bytes, start_ns, end_ns, tuple(tag)))

    def count(self, name: str, at_ns: int, value: float) -> None:
        """Records a number, of which the newest holds until the next.

        Args:
            name: of what.
            at_ns: ``time.monotonic_ns()`` when it was so.
            value: the number.
        """
        if not self.enabled:
            return
        if self._is_full:
            self.num_dropped += 1
            return
        self._counts.append((name, at_ns, value))

    def dump(self, run_dir: Path) -> Path | None:
        """Writes what was recorded to the worker's part file and forgets it.

        Returns:
            Path of the part, or None if the recorder is off.
        Raises:
            RunFolderError: the folder cannot be written.
        """
        if not self.enabled:
            return None
        path = part_path(run_dir, self.worker)
        content = msgspec.json.encode(
            {
                "worker": self.worker,
                "stage": self.stage,
                "num_dropped": self.num_dropped,
                "spans": self._spans,
                "transfers": self._transfers,
                "counts": self._counts,
            }
        )
        atomic_write(path, [content])
        self._spans, self._transfers, self._counts, self.num_dropped = [], [], [], 0
        return path


def part_path(run_dir: Path, worker: int) -> Path:
    """Tells where a worker's part of the trace goes."""
    return run_dir / f"trace-worker-{worker}.json.part"


def merge_traces(run_dir: Path) -> Path | None:
    """Merges the workers' parts into ``trace.json`` and removes them.

    A part that is missing or damaged (its worker was killed) is left out and named in the trace's ``otherData``.

    Returns:
        Path of the trace, or None if there is no part.
    Raises:
        RunFolderError: the folder cannot be written.
    """
    paths = sorted(run_dir.glob(PART_PATTERN))
    if not paths:
        return None
    parts: list[TracePart] = []
    damaged: list[str] = []
    for path in paths:
        try:
            parts.append(read_json(path, TracePart, TRACE_BYTES_MAX))
        except (ValueError, OSError):
            damaged.append(path.name)
    trace_path = run_dir / TRACE_FILE
    write_trace(trace_path, parts, {"damaged_parts": damaged})
    for path in paths:
        with contextlib.suppress(OSError):  # a folder of that name, which no worker has made
            path.unlink(missing_ok=True)
    return trace_path


def write_trace(path: Path, parts: Sequence[TracePart], other_data: Mapping[str, Any]) -> None:
    """Writes a trace document.

    Args:
        path: of the file.
        parts: what the workers recorded.
        other_data: goes into its ``otherData``.
    Raises:
        RunFolderError: the file cannot be written.
    """
    atomic_write(path, _encode(build_trace(parts), {**other_data, **_dropped(parts)}))


def _dropped(parts: Sequence[TracePart]) -> dict[str, Any]:
    return {"dropped_events": {str(part.worker): part.num_dropped for part in parts if part.num_dropped}}


def _encode(events: Iterator[dict[str, Any]], other_data: Mapping[str, Any]) -> Iterator[bytes]:
    """Encodes the trace document, piece by piece, one event per line."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(other_data) + b',"traceEvents":['
    separator = b"\n"
    while batch := list(itertools.islice(events, 4096)):
        yield separator + b",\n".join(map(encode, batch))
        separator = b",\n"
    yield b"\n]}\n"


def build_trace(parts: Sequence[TracePart]) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace, in the Trace Event Format.

    Args:
        parts: what the workers recorded.
    Yields:
        One event after the other; ``ts`` and ``dur`` in microseconds, the earliest moment being 0.
    """
    starts = [span.start_ns for part in parts for span in part.spans]
    starts += [transfer.start_ns for part in parts for transfer in part.transfers]
    starts += [count.at_ns for part in parts for count in part.counts]
    zero_ns = min(starts, default=0)
    for part in parts:
        yield from _name_rows(part)
    for part in parts:
        yield from _span_events(part, zero_ns)
        yield from _transfer_events(part, zero_ns)
        yield from _count_events(part, zero_ns)
    yield from _flow_events(parts, zero_ns)


def _us(time_ns: int, zero_ns: int) -> float:
    return (time_ns - zero_ns) / 1000


def _name_rows(part: TracePart) -> Iterator[dict[str, Any]]:
    name = f"worker {part.worker}" if part.stage is None else f"stage {part.stage}, worker {part.worker}"
    order = part.worker + (0 if part.stage is None else part.stage << 24)
    common = {"ph": "M", "pid": part.worker, "tid": 0, "ts": 0}
    yield {"name": "process_name", **common, "args": {"name": name}}
    yield {"name": "process_sort_index", **common, "args": {"sort_index": order}}
    yield {"name": "thread_name", **common, "args": {"name": "compute"}}


def _span_events(part: TracePart, zero_ns: int) -> Iterator[dict[str, Any]]:
    for span in part.spans:
        event: dict[str, Any] = {
            "name": span.name,
            "cat": span.category,
            "ph": "X",
            "pid": part.worker,
            "tid": 0,
            "ts": _us(span.start_ns, zero_ns),
            "dur": (span.end_ns - span.start_ns) / 1000,
        }
        if span.args:
            event["args"] = span.args
        yield event


def _transfer_events(part: TracePart, zero_ns: int) -> Iterator[dict[str, Any]]:
    for number, transfer in enumerate(part.transfers):
        name = f"send to {transfer.peer}" if transfer.sent else f"receive from {transfer.peer}"
        common = {
            "name": name,
            "cat": "send" if transfer.sent else "receive",
            "id": f"{part.worker}.{number}",
            "pid": part.worker,
            "tid": 0,
        }
        args = {"peer": transfer.peer, "bytes": transfer.num_bytes, "tag": transfer.tag}
        yield {**common, "ph": "b", "ts": _us(transfer.start_ns, zero_ns), "args": args}
        yield {**common, "ph": "e", "ts": _us(max(transfer.start_ns, transfer.end_ns), zero_ns)}


def _count_events(part: TracePart, zero_ns: int) -> Iterator[dict[str, Any]]:
    for count in part.counts:
        at = {"ph": "C", "pid": part.worker, "tid": 0, "ts": _us(count.at_ns, zero_ns)}
        yield {"name": count.name, **at, "args": {"value": count.value}}


# ------------------------------------------------------------------------------------------------------------ flows


class _Row:
    """The phases and actions of one worker, for finding the one that an arrow begins or ends at."""

    def __init__(self, part: TracePart) -> None:
        known = (span for span in part.spans if span.category in (ACTION, PHASE))
        self.spans = sorted(known, key=lambda span: (span.start_ns, -span.end_ns))
        self.starts = [span.start_ns for span in self.spans]
        self.actions = [span for span in self.spans if span.category == ACTION]
        self.action_starts = [span.start_ns for span in self.actions]

    def handed_over(self, time_ns: int) -> tuple[Span, int] | None:
        """Finds the span that produced what was sent at a moment: the last one that had begun; and a moment inside
        it."""
        index = bisect.bisect_right(self.starts, time_ns) - 1
        if index < 0:
            return None
        span = self.spans[index]
        return span, min(time_ns, max(span.start_ns, span.end_ns - 1))

    def went_on(self, time_ns: int) -> tuple[Span, int] | None:
        """Finds the span that went on with what arrived at a moment, and a moment inside it.

        That is the next one to begin, unless a phase is running whose spans do not include it: then the phase. What
        arrives during an action is for a later one.
        """
        index = bisect.bisect_right(self.starts, time_ns)
        around = self._around(index, time_ns)
        if around is not None and around.category == ACTION:
            later = bisect.bisect_left(self.action_starts, time_ns)
            if later < len(self.actions):
                return self.actions[later], self.actions[later].start_ns
            return around, time_ns
        following = self.spans[index] if index < len(self.spans) else None
        if following is not None and (around is None or following.end_ns <= around.end_ns):
            return following, following.start_ns
        return None if around is None else (around, time_ns)

    def _around(self, index: int, time_ns: int) -> Span | None:
        """Finds the innermost span around a moment, among those before an index."""
        for span in reversed(self.spans[max(0, index - _MAX_WALK) : index]):
            if span.end_ns > time_ns:
                return span
        return None


def _flow_events(parts: Sequence[TracePart], zero_ns: int) -> Iterator[dict[str, Any]]:
    """Arrows between the two sides of every message that both sides recorded."""
    rows = {part.worker: _Row(part) for part in parts}
    received: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for part in parts:
        for transfer in part.transfers:
            if not transfer.sent:
                received[transfer.peer, part.worker, transfer.tag].append(transfer.end_ns)
    numbers = itertools.count(1)
    for part in parts:
        for transfer in part.transfers:
            arrivals = received.get((part.worker, transfer.peer, transfer.tag)) if transfer.sent else None
            if not arrivals:
                continue
            begin = rows[part.worker].handed_over(transfer.start_ns)
            end = rows[transfer.peer].went_on(arrivals.pop(0))
            if begin is None or end is None or begin[1] > end[1]:
                continue
            common = {"name": "transfer", "cat": "flow", "id": next(numbers), "tid": 0}
            yield {**common, "ph": "s", "pid": part.worker, "ts": _us(begin[1], zero_ns)}
            yield {**common, "ph": "f", "bp": "e", "pid": transfer.peer, "ts": _us(end[1], zero_ns)}


def step_trace(step: "SimulatedStep") -> list[TracePart]:
    """Makes what the workers of a simulated step would have recorded, as `elaswave.observability.trace.TraceRecorder`
    does.

    Args:
        step: any.
    Returns:
        One part per worker, in the order of ids; nanoseconds from the beginning of the step.
    """
    timeline = step.timeline
    transfers: dict[int, list[Transfer]] = {worker: [] for worker in timeline.layout.workers}
    for each in step.transfers:
        tag = (int(each.is_gradient), each.microbatch, each.stage)
        size, start_ns = round(each.num_bytes), _ns(each.start_s)
        transfers[each.source].append(Transfer(True, each.target, size, start_ns, _ns(each.sent_s), tag))
        transfers[each.target].append(Transfer(False, each.source, size, start_ns, _ns(each.end_s), tag))
    end_ns = _ns(timeline.step_s)
    parts = []
    for index, stage in enumerate(timeline.layout.stages):
        for worker in stage.workers:
            spans = [Span("RUN", PHASE, 0, end_ns)]
            before_ns = 0
            for action, start_s, end_s in zip(
                timeline.programs.get(worker, ()), timeline.start_s[worker], timeline.end_s[worker], strict=True
            ):
                if _ns(start_s) > before_ns:
                    spans.append(Span("wait", "wait", before_ns, _ns(start_s), {"for": str(action)}))
                before_ns = _ns(end_s)
                spans.append(Span(str(action), ACTION, _ns(start_s), before_ns))
            parts.append(TracePart(worker=worker, stage=index, num_dropped=0, spans=spans, transfers=transfers[worker]))
    return sorted(parts, key=lambda part: part.worker)


def write_step_trace(path: Path, step: "SimulatedStep") -> None:
    """Writes a simulated step as a trace for https://ui.perfetto.dev.

    Raises:
        RunFolderError: the file cannot be written.
    """
    write_trace(path, step_trace(step), {"simulated_step_s": step.step_s})


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
