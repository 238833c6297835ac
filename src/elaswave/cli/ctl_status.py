"""What ``elaswave ctl RUN status`` prints: a running job as lines, once or drawn anew again and again."""

from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from elaswave.channel.messages.operator import JobOver, JobStatus, WorkerStatus
from elaswave.cli.tables import format_seconds, render_table, terminal_width
from elaswave.devices.gauges import Gauges
from elaswave.observability.output import printable
from elaswave.observability.progress import format_loss, format_rate
from elaswave.observability.result import from_json_float
from elaswave.observability.wrapping import wrap
from elaswave.visible import visible_lines

_RECOVERIES_SHOWN = 5


def render_status(status: JobStatus, run: Path, width: int, *, is_styled: bool | None = None) -> list[str]:
    """A job as lines of text.

    Args:
        status: of the job.
        run: the run folder, as the person called it.
        width: columns of the terminal.
        is_styled: as of `render_table`.
    """
    lines = [f"run folder {run}"]
    lines += wrap(_headline(status), width)
    lines += wrap(_pace(status), width)
    lines += wrap(
        f"layout {status.layout}, {status.num_microbatches} micro-batches, generation {status.generation}, coordinator "
        f"{status.term}, {status.state}",
        width,
    )
    lines += ["", *_worker_table(status, width, is_styled), ""]
    lines += wrap(_copies(status), width)
    lines += wrap(_checkpoints(status), width)
    lines += wrap(f"{status.num_recoveries} recoveries" if status.num_recoveries != 1 else "1 recovery", width)
    for recovery in status.recoveries[-_RECOVERIES_SHOWN:]:
        who = recovery.kind if recovery.worker is None else f"worker {recovery.worker} {recovery.kind}"
        lines += wrap(
            f"  {who} in step {recovery.step}, generation {recovery.generation}, {recovery.outcome}, "
            f"{format_seconds(recovery.total_s)}",
            width,
        )
    lines += wrap(f"under way: {'; '.join(status.under_way) or 'nothing'}", width)
    return lines


def _headline(status: JobStatus) -> str:
    parts = [f"step {status.step}/{status.total_steps}"]
    if status.loss is not None:
        parts.append(f"loss {format_loss(from_json_float(status.loss))}")
    if status.rate is not None:
        parts.append(format_rate(status.rate, status.rate_unit))
    return "  ".join(parts)


def _pace(status: JobStatus) -> str:
    measured = "not measured yet" if status.step_s is None else f"takes {format_seconds(status.step_s)}"
    predicted = status.predicted_step_s
    parts = [
        f"a step {measured}",
        "not predicted yet" if predicted is None else f"predicted {format_seconds(predicted)}",
    ]
    if status.left_s is not None:
        parts.append(f"about {_duration(status.left_s)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _worker_table(status: JobStatus, width: int, is_styled: bool | None) -> list[str]:
    header = ["worker", "stage", "layers", "micro-batches", "speed", "owned", "followed", "step", "doing", "heard"]
    rows = list(map(_row, status.workers))
    if any(worker.device is not None for worker in status.workers):
        header.append("device")
        for row, worker in zip(rows, status.workers, strict=True):
            row.append(_device(worker.device))
    return render_table(header, rows, width, is_styled=is_styled)


def _row(worker: WorkerStatus) -> list[str]:
    """Short words, so that the table fits on most terminals whatever the workers do."""
    cells = [
        worker.worker,
        worker.role if worker.stage is None else worker.stage,
        None if worker.layers is None else f"{worker.layers[0]} to {worker.layers[1] - 1}",
        worker.num_microbatches,
        f"{worker.speed:.2f}",
        worker.num_owned_blocks,
        worker.num_followed_blocks,
        worker.step,
        None if worker.doing is None else worker.doing + (", waits" if worker.waiting_on else ""),
        None if worker.last_heartbeat_s is None else f"{worker.last_heartbeat_s:.1f} s ago",
    ]
    return ["-" if cell is None else str(cell) for cell in cells]


def _device(gauges: Gauges | None) -> str:
    """Memory, share of the time in which it computes, and power, as far as they are told."""
    if gauges is None:
        return "-"
    parts = []
    if gauges.memory_used_bytes is not None and gauges.memory_total_bytes is not None:
        parts.append(f"{gauges.memory_used_bytes / 1e9:.1f}/{gauges.memory_total_bytes / 1e9:.1f} GB")
    if gauges.utilization is not None:
        parts.append(f"{gauges.utilization:.0%}")
    if gauges.power_w is not None:
        parts.append(f"{gauges.power_w:.0f} W")
    return ", ".join(parts) or "-"


def _copies(status: JobStatus) -> str:
    copies = status.copies
    held = "not known yet" if copies.num_held is None else f"{min(copies.num_held, copies.num_wanted)}"
    return f"{copies.num_blocks} blocks; live copies beside their owners: {held} of {copies.num_wanted}"


def _checkpoints(status: JobStatus) -> str:
    durable = ", ".join(f"step {each.step}" for each in status.checkpoints) or "none yet"
    writing = f"; being written: {', '.join(f'step {step}' for step in status.writing)}" if status.writing else ""
    return f"checkpoints: {durable}{writing}"


class StatusDisplay:
    """Shows one status after the other: in place on a terminal, else one below the other, or as lines of JSON.

    Args:
        run: the run folder, as the person called it.
        stream: where to.
        as_json: one JSON document on each line.
    """

    def __init__(self, run: Path, stream: TextIO, *, as_json: bool) -> None:
        self._run = run
        self._stream = stream
        self._as_json = as_json
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._is_live = not as_json and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "StatusDisplay":
        if self._is_live:
            self._live = self._stack.enter_context(
                Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def show(self, status: JobStatus) -> None:
        """Shows a status."""
        if self._as_json:
            self._print(msgspec.json.encode(status).decode())
            return
        lines = render_status(status, self._run, terminal_width(), is_styled=False)
        if self._live is not None:
            self._live.update(Text(visible_lines(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
        else:
            self._print("\n".join([*lines, ""]))

    def over(self, over: JobOver | None) -> None:
        """The job has ended."""
        self._stack.close()
        if over is None:
            return
        if self._as_json:
            self._print(msgspec.json.encode({"outcome": over.outcome, "reason": over.reason}).decode())
        else:
            self._print(f"the job is over: {over.outcome}{', ' if over.reason else ''}{over.reason}")

    def _print(self, text: str) -> None:
        self._stream.write(printable(text, self._stream) + "\n")
        self._stream.flush()
