"""What a person sees while a run goes on: a live display on a terminal, plain lines anywhere else.

The display is redrawn by the caller of the reporter, at most ten times a second: there is no thread, so the process
may fork at any time and nothing has to be stopped after an error. On a terminal the display's lines never wrap, and
messages wrap between words; without one there are no control characters and no cursor movements.
"""

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elaswave.config.values import OWN, SAMPLES_PER_S, TOKENS_PER_S
from elaswave.observability.output import lead_elsewhere, printable, wrap
from elaswave.observability.result import RunResult, from_json_float
from elaswave.types import Layout
from elaswave.visible import visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_BLOCKS_ASCII = "_.-=+*#@"
_REFRESH_INTERVAL_S = 0.1
_LINE_EVERY_STEPS = 10
_LINE_INTERVAL_S_MIN = 0.5
_LINE_INTERVAL_S_MAX = 5.0
_CURVE_WIDTH = 60


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Draws a curve as one line of text, low to high; "×" ("x" in ASCII) where a value is not finite.

    Args:
        values: the curve. More values than ``width`` are averaged over equal runs.
        width: most characters to use, at least 1.
        ascii_only: for terminals without block characters.
    Returns:
        At most ``width`` characters, one per value or run of values; "" for no values.
    Raises:
        ValueError: width < 1.
    """
    if width < 1:
        raise ValueError(f"a sparkline needs a width of at least 1, not {width}")
    levels, gap = (_BLOCKS_ASCII, "x") if ascii_only else (_BLOCKS, "×")
    count = min(width, len(values))
    means: list[float] = []
    for index in range(count):
        run = values[index * len(values) // count : (index + 1) * len(values) // count]
        # Dividing first: the sum of a run of huge values could overflow.
        means.append(sum(value / len(run) for value in run) if all(map(math.isfinite, run)) else math.nan)
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return gap * count
    low, high = min(finite), max(finite)
    top = len(levels) - 1

    def level(mean: float) -> str:
        if not math.isfinite(mean):
            return gap
        if high == low:
            return levels[top // 2]
        span = high / 2 - low / 2
        return levels[min(top, int((mean / 2 - low / 2) / span * len(levels)))] if span > 0 else levels[top // 2]

    return "".join(map(level, means))


def writes_unicode(stream: TextIO) -> bool:
    """Tells whether a stream's encoding has the characters that curves are drawn with; a stream without one holds
    any."""
    try:
        (_BLOCKS + "×→").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Reporter(Protocol):
    """Where a run tells a person how it goes. All methods are cheap and may be called from one thread only."""

    def started(self, config: object, layout: Layout, run_dir: Path) -> None:
        """The run begins.

        Args:
            config: the resolved configuration, a struct or a mapping.
            layout: the first layout.
            run_dir: the run folder.
        """

    def step(
        self,
        step: int,
        total_steps: int,
        loss: float,
        tokens_per_s: float,
        data_pass: int,
        generation: int,
        layout_name: str,
        unit: str = TOKENS_PER_S,
    ) -> None:
        """A step has been committed.

        Args:
            step: its number, from 1.
            total_steps: number of the last step of the run.
            loss: mean nats per token.
            tokens_per_s: throughput of the last steps, in `unit`.
            data_pass: number of the pass over the data, from 0.
            generation: number of the membership view.
            layout_name: such as "2x2".
            unit: of the throughput: tokens per second, or samples of a script's own model.
        """

    def evaluation(self, step: int, loss: float) -> None:
        """Reports the validation loss after a step, in mean nats per token."""

    def message(self, text: str) -> None:
        """Reports something that a person should know, one line or more."""

    def error(self, text: str) -> None:
        """Reports something that went wrong."""

    def finished(self, result: RunResult, run_dir: Path) -> None:
        """The run is complete."""

    def refresh(self) -> None:
        """Redraws a live display if it is time; to be called now and then while a step lasts long."""

    def close(self) -> None:
        """Ends a live display, whatever has happened; may be called twice."""


def make_reporter(
    *,
    json_mode: bool,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    lost_output: Path | None = None,
) -> Reporter:
    """Makes the reporter that suits where the output goes. When its output is not taken any more, it goes on without.

    Args:
        json_mode: standard output belongs to a JSON document, so everything goes to standard error.
        stream: where to write instead of standard output (standard error in JSON mode).
        clock: monotonic seconds.
        lost_output: file for what cannot be shown any more; None: it is dropped.
    """
    errors = stream or sys.stderr
    stream = stream or (sys.stderr if json_mode else sys.stdout)
    if stream.isatty():
        console = _Console(file=stream, highlight=False, markup=False, emoji=False)
        if console.is_terminal and not console.is_dumb_terminal:
            live = _LiveReporter(console, clock, ascii_only=not writes_unicode(stream))
            return _LastingReporter(live, stream, errors, clock, lost_output)
    return _LastingReporter(_LineReporter(stream, errors, clock), stream, errors, clock, lost_output)


# ------------------------------------------------------------------------------------------------------------ wording


def _headline(config: object, layout: Layout, run_dir: Path) -> str:
    """Writes one or two lines about what is going to run."""
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else msgspec.to_builtins(config)
    model: Mapping[str, Any] = values.get("model") or {}
    run: Mapping[str, Any] = values.get("run") or {}
    facts = [
        f"{model['family']} model" if "family" in model else "",
        _size_of(model),
        str(model.get("dtype") or ""),
        f"{run['steps']} steps" if "steps" in run else "",
    ]
    workers = len(layout.workers)
    facts.append(f"layout {layout.describe()} ({workers} worker{'s' if workers != 1 else ''})")
    facts.append(f"{layout.num_microbatches} micro-batches")
    return ", ".join(fact for fact in facts if fact) + f"\nrun folder {run_dir}"


def _size_of(model: Mapping[str, Any]) -> str:
    if "num_layers" not in model:
        return ""
    layers = f"{model['num_layers']} layers"
    is_own = model.get("family") == OWN or "hidden_size" not in model
    return layers if is_own else f"{layers} of hidden size {model['hidden_size']}"


def format_loss(loss: float) -> str:
    """Formats a loss for people: four decimals, or "nan"."""
    return f"{loss:.4f}" if math.isfinite(loss) else str(loss)


def format_rate(rate: float | None, unit: str = TOKENS_PER_S) -> str:
    """Formats a throughput for people."""
    return f"- {unit}" if rate is None or not math.isfinite(rate) else f"{rate:,.0f} {unit}"


def _summary(result: RunResult, run_dir: Path, *, width: int, ascii_only: bool) -> list[str]:
    """Writes the closing lines of a run."""
    losses = [from_json_float(loss) for loss in result.losses]
    is_own = (result.config.get("model") or {}).get("family") == OWN
    rate = format_rate(result.throughput_tokens_per_s)
    if is_own:
        rate = format_rate(result.throughput_samples_per_s, SAMPLES_PER_S)
    lines = [f"finished {result.steps} steps in {result.duration_s:.1f} s (start-up {result.start_up_s:.1f} s), {rate}"]
    if losses:
        arrow = "->" if ascii_only else "→"
        text = f"loss {format_loss(losses[0])} {arrow} {format_loss(losses[-1])}"
        curve = sparkline(losses, max(1, min(_CURVE_WIDTH, width - len(text) - 2)), ascii_only=ascii_only)
        lines.append(f"{text}  {curve}")
    if result.val_losses:
        lines.append(f"validation loss {format_loss(from_json_float(result.val_losses[-1]))}")
    if failures := sum(recovery.is_failure for recovery in result.recoveries):
        lines.append("1 recovery" if failures == 1 else f"{failures} recoveries")
    if result.fence_bypasses:
        counts = ", ".join(f"{fence} {count}" for fence, count in result.fence_bypasses.items())
        lines.append(f"tensors that passed a fence as they were, since a number was not finite: {counts}")
    lines.append(f"state digest {result.state_digest}")
    lines += [f"results in {run_dir}", f"look at them with: elaswave inspect {shlex.quote(str(run_dir))}"]
    return lines


# -------------------------------------------------------------------------------------------------------------- lines


class _LineReporter:
    """Plain lines: the first step, then about every tenth or every few seconds, and the last."""

    def __init__(self, stream: TextIO, errors: TextIO, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._errors = errors
        self._clock = clock
        self._ascii_only = not writes_unicode(stream)
        self._last_step: int | None = None
        self._last_time = -math.inf

    def _print(self, text: str, stream: TextIO | None = None) -> None:
        stream = stream or self._stream
        stream.write(printable(text, stream) + "\n")
        stream.flush()

    def started(self, config: object, layout: Layout, run_dir: Path) -> None:
        self._print(_headline(config, layout, run_dir))

    def step(
        self,
        step: int,
        total_steps: int,
        loss: float,
        tokens_per_s: float,
        data_pass: int,
        generation: int,
        layout_name: str,
        unit: str = TOKENS_PER_S,
    ) -> None:
        now = self._clock()
        waited = now - self._last_time
        if self._last_step is not None and step != total_steps:
            due = step - self._last_step >= _LINE_EVERY_STEPS and waited >= _LINE_INTERVAL_S_MIN
            if not due and waited < _LINE_INTERVAL_S_MAX:
                return
        self._print(
            f"step {step}/{total_steps}  loss {format_loss(loss)}  {format_rate(tokens_per_s, unit)}  "
            f"layout {layout_name}  generation {generation}  epoch {data_pass + 1}"
        )
        self._last_step, self._last_time = step, now

    def evaluation(self, step: int, loss: float) -> None:
        self._print(f"step {step}  validation loss {format_loss(loss)}")

    def message(self, text: str) -> None:
        self._print(text)

    def error(self, text: str) -> None:
        self._print(f"error: {text}", self._errors)

    def finished(self, result: RunResult, run_dir: Path) -> None:
        for line in _summary(result, run_dir, width=80, ascii_only=self._ascii_only):
            self._print(line)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


# --------------------------------------------------------------------------------------------------------------- live


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to `_LastingReporter`, where rich would end the process."""
        error = sys.exception()
        assert error is not None
        raise error


class _Curve:
    """The losses so far in bounded memory: means over runs of steps, whose length doubles when there are too many."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._run: list[float] = []
        self._run_length = 1

    def append(self, value: float) -> None:
        """Adds the next step's loss."""
        self._run.append(value)
        if len(self._run) < self._run_length:
            return
        self._means.append(sum(self._run) / self._run_length)
        self._run.clear()
        if len(self._means) == 8 * _CURVE_WIDTH:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._run_length *= 2

    def means(self) -> list[float]:
        """Returns the curve so far."""
        return self._means + ([sum(self._run) / len(self._run)] if self._run else [])


class _LiveReporter:
    """A display of a few lines that is redrawn in place, under the messages."""

    def __init__(self, console: Console, clock: Callable[[], float], *, ascii_only: bool) -> None:
        self._console = console
        self._clock = clock
        self._ascii_only = ascii_only
        self._live: Live | None = None
        self._drawn_at = -math.inf
        self._began_at = 0.0
        self._first_step = 0
        self._step = 0
        self._total_steps = 0
        self._facts = ""
        self._curve = _Curve()

    def _print(self, text: str, style: str = "") -> None:
        text = printable(text, cast(TextIO, self._console.file))
        # Wrapped here: rich, and terminals, break lines wherever they are full, also inside a path or a command.
        lines = [line for paragraph in text.splitlines() for line in wrap(paragraph, self._console.width) or [""]]
        self._console.print(Text("\n".join(lines), style=style), soft_wrap=True)

    def started(self, config: object, layout: Layout, run_dir: Path) -> None:
        headline, _, folder = _headline(config, layout, run_dir).partition("\n")
        self._print(headline, "bold")
        self._console.print(Text(printable(folder, cast(TextIO, self._console.file)), style="dim"), soft_wrap=True)

    def step(
        self,
        step: int,
        total_steps: int,
        loss: float,
        tokens_per_s: float,
        data_pass: int,
        generation: int,
        layout_name: str,
        unit: str = TOKENS_PER_S,
    ) -> None:
        now = self._clock()
        if self._live is None:
            self._first_step, self._began_at = step, now
        self._step, self._total_steps = step, total_steps
        self._curve.append(loss)
        self._facts = (
            f"loss {format_loss(loss)}  {format_rate(tokens_per_s, unit)}  layout {layout_name}  "
            f"generation {generation}  epoch {data_pass + 1}"
        )
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=self._render,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)
            self._drawn_at = now
        elif step == total_steps or now - self._drawn_at >= _REFRESH_INTERVAL_S:
            self._draw(now)

    def _draw(self, now: float) -> None:
        if self._live is not None:
            self._live.refresh()
            self._drawn_at = now

    def _render(self) -> Group:
        """Renders the display as it stands now."""
        done = self._step - self._first_step
        elapsed_s = self._clock() - self._began_at
        left = "-:--"
        if done > 0:
            left_s = int(elapsed_s / done * (self._total_steps - self._step))
            left = f"{left_s // 60}:{left_s % 60:02d}"
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {self._step}/{self._total_steps}"),
            ProgressBar(total=max(1, self._total_steps), completed=self._step),
            Text(f"{left} left"),
        )
        width = max(1, self._console.width - 1)
        curve = sparkline(self._curve.means(), min(_CURVE_WIDTH, width), ascii_only=self._ascii_only)
        return Group(
            bar,
            Text(visible(self._facts), no_wrap=True, overflow="crop" if self._ascii_only else "ellipsis"),
            Text(curve, style="cyan", no_wrap=True, overflow="crop"),
        )

    def evaluation(self, step: int, loss: float) -> None:
        self._print(f"step {step}  validation loss {format_loss(loss)}")

    def message(self, text: str) -> None:
        self._print(text)

    def error(self, text: str) -> None:
        self._print(f"error: {text}", "bold red")

    def finished(self, result: RunResult, run_dir: Path) -> None:
        self.close()
        for line in _summary(result, run_dir, width=self._console.width, ascii_only=self._ascii_only):
            self._print(line)

    def refresh(self) -> None:
        now = self._clock()
        if now - self._drawn_at >= _REFRESH_INTERVAL_S:
            self._draw(now)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


# -------------------------------------------------------------------------------------------------------- lost output


class _LastingReporter:
    """Another reporter for as long as its output is taken, then plain lines in a file.

    Args:
        reporter: the other one.
        stream, errors: what it writes to.
        clock: monotonic seconds.
        lost_output: the file; None: nowhere.
    """

    def __init__(
        self,
        reporter: Reporter,
        stream: TextIO,
        errors: TextIO,
        clock: Callable[[], float],
        lost_output: Path | None,
    ) -> None:
        self._reporter = reporter
        self._stream = stream
        self._errors = errors
        self._lost: set[int] = set()
        """Identities of the streams that lead to the file."""
        self._clock = clock
        self._lost_output = lost_output

    def _tell(self, tell: Callable[[Reporter], None], *, is_error: bool = False) -> None:
        try:
            tell(self._reporter)
        except OSError as error:
            is_live = not isinstance(self._reporter, _LineReporter)
            stream = self._errors if is_error and not is_live else self._stream
            if id(stream) in self._lost or not lead_elsewhere(stream, self._lost_output):
                return  # the file takes nothing either; there may be room again later
            self._lost.add(id(stream))
            if is_live:
                self._reporter = _LineReporter(self._stream, self._errors, self._clock)
            with contextlib.suppress(OSError):
                print(f"output is not taken any more ({error.strerror}); what follows goes here", file=stream)
                tell(self._reporter)

    def started(self, config: object, layout: Layout, run_dir: Path) -> None:
        self._tell(lambda reporter: reporter.started(config, layout, run_dir))

    def step(
        self,
        step: int,
        total_steps: int,
        loss: float,
        tokens_per_s: float,
        data_pass: int,
        generation: int,
        layout_name: str,
        unit: str = TOKENS_PER_S,
    ) -> None:
        self._tell(
            lambda reporter: reporter.step(
                step, total_steps, loss, tokens_per_s, data_pass, generation, layout_name, unit
            )
        )

    def evaluation(self, step: int, loss: float) -> None:
        self._tell(lambda reporter: reporter.evaluation(step, loss))

    def message(self, text: str) -> None:
        self._tell(lambda reporter: reporter.message(text))

    def error(self, text: str) -> None:
        self._tell(lambda reporter: reporter.error(text), is_error=True)

    def finished(self, result: RunResult, run_dir: Path) -> None:
        self._tell(lambda reporter: reporter.finished(result, run_dir))

    def refresh(self) -> None:
        self._tell(lambda reporter: reporter.refresh())

    def close(self) -> None:
        self._tell(lambda reporter: reporter.close())
