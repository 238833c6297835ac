"""``elaswave ctl RUN ACTION``: asks a running job how it gets on, or for something; says what was decided and why.

What ``elaswave ctl RUN status`` prints: a running job as lines, once or drawn anew again and again.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from elaswave.channel.messages.operator import (
    FAILURES,
    Answer,
    AskCheckpoint,
    AskDrain,
    AskJoin,
    AskMigrate,
    AskRebalance,
    AskStatus,
    AskStop,
    JobOver,
    JobStatus,
    Request,
    StatusAnswer,
    WorkerStatus,
)
from elaswave.cli.operator_client import OperatorClient
from elaswave.cli.tables import format_seconds, render_table, terminal_width
from elaswave.errors import ControlError
from elaswave.observability.output import printable, say, say_error, say_json, wrap
from elaswave.observability.progress import format_loss, format_rate
from elaswave.observability.result import from_json_float
from elaswave.types import Gauges
from elaswave.visible import visible_lines

_RECOVERIES_SHOWN = 5


def render_status(status: JobStatus, run: Path, width: int, *, is_styled: bool | None = None) -> list[str]:
    """Describes a job as lines of text.

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
    """Describes a worker in short words, so that the table fits on most terminals whatever the workers do."""
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
    """Describes memory, share of the time in which it computes, and power, as far as they are told."""
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


Function = TypeVar("Function", bound=Callable[..., object])

DEFAULT_TIMEOUT_S = 60.0
SECONDS = click.FloatRange(min=0.0, min_open=True)


class Numbers(click.ParamType):
    """Whole numbers with commas between them, each at least 1."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Reads the numbers; what is none is a bad parameter."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of whole numbers with commas between them, such as 3,5", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r} has a number below 1; every stage needs a layer and a worker", param, ctx)
        return numbers


NUMBERS = Numbers()


class _Job(NamedTuple):
    """The job that is talked to."""

    run: Path
    key_file: Path | None

    def client(self) -> OperatorClient:
        """Talks to it."""
        return OperatorClient(self.run, self.key_file)


@click.group(
    name="ctl",
    subcommand_metavar="ACTION [OPTIONS]",
    short_help="Talk to a running job: status, joins, leaves, layouts, checkpoint, stop.",
    epilog="Exit codes: 0 done, 1 refused, not done in time, or no job runs there, 2 bad input.",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Of a reading or steering key (elaswave keys --role); default: the job's own.",
)
@click.pass_context
def ctl_group(ctx: click.Context, run: Path, key_file: Path | None) -> None:
    """Talk to the job that runs in the folder RUN. Every action answers with what was decided and why.

    \b
    elaswave ctl RUN status --watch
    elaswave ctl RUN checkpoint --wait
    elaswave ctl RUN rebalance
    elaswave ctl RUN migrate --layers 3,5
    elaswave ctl RUN join 2
    elaswave ctl RUN drain 1
    elaswave ctl RUN stop --wait
    elaswave ctl RUN ACTION --help
    """
    ctx.obj = _Job(run, key_file)


def _options(function: Function) -> Function:
    """Adds the options that every action has."""
    timeout = click.option(
        "--timeout",
        "timeout_s",
        type=SECONDS,
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for the answer, also while the coordinator is being replaced.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON; how it gets on goes to stderr.")
    return timeout(as_json(function))


@ctl_group.command(name="status", short_help="How the job gets on.")
@click.option("--watch", is_flag=True, help="Again and again, until the job ends; with --json one line each time.")
@click.option("--interval", "interval_s", type=SECONDS, default=1.0, show_default=True, help="Seconds between two.")
@_options
@click.pass_obj
def status_command(job: _Job, watch: bool, interval_s: float, timeout_s: float, as_json: bool) -> None:
    """Show step, loss, layout, workers, copies, recoveries, checkpoints, what is under way, and a prediction."""
    with job.client() as client:
        if watch:
            _watch(client, job.run, max(0.1, interval_s), timeout_s, as_json=as_json)
            return
        status = _ask_status(client, timeout_s)
    if as_json:
        say_json(status)
    else:
        say(*render_status(status, job.run, terminal_width()))


def _ask_status(client: OperatorClient, timeout_s: float) -> JobStatus:
    for answer in client.ask(lambda request: AskStatus(request=request), timeout_s):
        if isinstance(answer, StatusAnswer):
            return answer.status
        raise ControlError(answer.reason)
    raise AssertionError("an answer or an error comes")


def _watch(client: OperatorClient, run: Path, interval_s: float, timeout_s: float, *, as_json: bool) -> None:
    """Shows the status until the job ends."""
    with StatusDisplay(run, sys.stdout, as_json=as_json) as display:
        while client.over() is None:
            try:
                display.show(_ask_status(client, timeout_s))
            except ControlError:
                if client.over() is None:
                    raise
                break
            client.wait(interval_s)
        display.over(client.over())


@ctl_group.command(name="checkpoint", short_help="Have a durable checkpoint written.")
@click.option("--wait", is_flag=True, help="Until it is durable; else until the vote that asks all workers for it.")
@_options
@click.pass_obj
def checkpoint_command(job: _Job, wait: bool, timeout_s: float, as_json: bool) -> None:
    """Have a durable checkpoint written of the state after one of the next steps, and say of which."""
    _act(job, lambda request: AskCheckpoint(request=request, wait=wait), timeout_s, as_json)


@ctl_group.command(name="stop", short_help="End the job with a checkpoint.")
@click.option("--wait", is_flag=True, help="Until the job has ended.")
@_options
@click.pass_obj
def stop_command(job: _Job, wait: bool, timeout_s: float, as_json: bool) -> None:
    """End the job after the step in hand, with a checkpoint, as SIGTERM does."""
    with job.client() as client:
        answer = last_answer(client, lambda request: AskStop(request=request), timeout_s, as_json)
        over = client.wait_for_end(timeout_s) if wait and answer.decided == "stopping" else None
    _finish(answer, as_json, over)


@ctl_group.command(name="rebalance", short_help="Look for a better layout now.")
@_options
@click.pass_obj
def rebalance_command(job: _Job, timeout_s: float, as_json: bool) -> None:
    """Look for a better layout of the present workers, with what was measured, and change to it if there is one."""
    _act(job, lambda request: AskRebalance(request=request), timeout_s, as_json)


@ctl_group.command(name="migrate", short_help="Change to another layout.")
@click.option("--layers", type=NUMBERS, help="Number of layers of each stage, as layout.layers; default: as they are.")
@click.option("--widths", type=NUMBERS, help="Number of workers of each stage, as layout.widths; default: as they are.")
@_options
@click.pass_obj
def migrate_command(
    job: _Job, layers: tuple[int, ...] | None, widths: tuple[int, ...] | None, timeout_s: float, as_json: bool
) -> None:
    """Change to a layout with these layers and workers of the stages, while training goes on.

    Workers stay in their stage as far as the widths permit; micro-batches are divided by the workers' speeds. No result
    depends on it.
    """
    if layers is None and widths is None:
        raise click.UsageError("give --layers, --widths, or both: what is the layout to be?")
    _act(job, lambda request: AskMigrate(request=request, layers=layers, widths=widths), timeout_s, as_json)


@ctl_group.command(name="join", short_help="Take in new workers.")
@click.argument("num_workers", metavar="[N]", type=click.IntRange(min=1), default=1)
@_options
@click.pass_obj
def join_command(job: _Job, num_workers: int, timeout_s: float, as_json: bool) -> None:
    """Start N new workers (1 if it is not given) and take them into the job."""
    _act(job, lambda request: AskJoin(request=request, num_workers=num_workers), timeout_s, as_json)


@ctl_group.command(name="drain", short_help="Let a worker go.")
@click.argument("worker", type=click.IntRange(min=0))
@click.option("--deadline", "deadline_s", type=SECONDS, metavar="SECONDS", help="After which it is lost instead.")
@_options
@click.pass_obj
def drain_command(job: _Job, worker: int, deadline_s: float | None, timeout_s: float, as_json: bool) -> None:
    """Let a worker leave at a step boundary, when others hold what it held: nothing is done twice."""
    make = lambda request: AskDrain(request=request, worker=worker, deadline_s=deadline_s)  # noqa: E731
    _act(job, make, timeout_s, as_json)


# ------------------------------------------------------------------------------------------------------------ answers


def _act(job: _Job, make: Callable[[int], Request], timeout_s: float, as_json: bool) -> None:
    with job.client() as client:
        answer = last_answer(client, make, timeout_s, as_json)
    _finish(answer, as_json)


def last_answer(client: OperatorClient, make: Callable[[int], Request], timeout_s: float, as_json: bool) -> Answer:
    """Asks, shows how it gets on, and returns the last answer."""
    for answer in client.ask(make, timeout_s):
        assert isinstance(answer, Answer)
        if answer.is_last:
            return answer
        say(answer_line(answer), err=as_json)
    raise AssertionError("a last answer or an error comes")


def _finish(answer: Answer, as_json: bool, over: JobOver | None = None) -> None:
    """Shows what came of it; ends with 1 if that is not what was asked for."""
    failed = answer.decided in FAILURES or (over is not None and over.outcome == "failed")
    if as_json:
        document: dict[str, Any] = {"decided": answer.decided, "reason": answer.reason}
        if answer.workers:
            document["workers"] = list(answer.workers)
        for name in ("step", "layout", "predicted_step_s", "present_step_s"):
            if (value := getattr(answer, name)) is not None:
                document[name] = value
        if over is not None:
            document["outcome"], document["outcome_reason"] = over.outcome, over.reason
        say_json(document)
    lines = [answer_line(answer)] + (
        [f"{over.outcome}: {over.reason}" if over.reason else over.outcome] if over else []
    )
    if failed:
        say_error("error: " + "; ".join(lines))
        sys.exit(1)
    if not as_json:
        say(*lines)


def answer_line(answer: Answer) -> str:
    """Describes an answer for people."""
    step = "" if answer.step is None else f" (step {answer.step})"
    return f"{answer.decided}{step}: {answer.reason}"
