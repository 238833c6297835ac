"""``elaswave inspect RUN`` and ``elaswave inspect diff RUN_A RUN_B``: what a run did, and whether two did the same."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from elaswave.cli.groups import DefaultCommand
from elaswave.cli.tables import format_bytes, format_seconds, render_table, terminal_width
from elaswave.config.values import SAMPLES_PER_S
from elaswave.observability.compare import Comparison, compare_results
from elaswave.observability.output import say, say_json, wrap
from elaswave.observability.progress import format_loss, format_rate, sparkline, writes_unicode
from elaswave.observability.result import from_json_float, read_digests, read_result
from elaswave.observability.summary import RunSummary, StageSummary, WorkerSummary, summarize_run

_MAX_NOTES = 20
"""Skipped and repeated steps that are listed one by one."""


class _InspectGroup(click.Group):
    """A group whose first argument may be a run folder: anything but the name of a subcommand is one."""

    _DEFAULT = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        position = next((index for index, arg in enumerate(args) if not arg.startswith("-")), None)
        if position is not None and args[position] in self.commands and args[position] != self._DEFAULT:
            args = [args[position], *args[:position], *args[position + 1 :]]
        elif set(args) & set(ctx.help_option_names):
            args = ["--help"]
        elif args:
            args = [self._DEFAULT, *args]
        return super().parse_args(ctx, args)


@click.group(
    name="inspect",
    cls=_InspectGroup,
    subcommand_metavar="RUN | diff RUN_A RUN_B",
    short_help="Look into a run folder, or compare two.",
)
def inspect_group() -> None:
    """Look into the folder of a run, finished or still going on, or compare two runs.

    \b
    elaswave inspect RUN                layout, timings, losses, recoveries
    elaswave inspect diff RUN_A RUN_B   exit 0 if they are the same computation

    Both take --json.

    Write ./diff for a run folder that is called diff.
    """


@inspect_group.command(name="run", cls=DefaultCommand, hidden=True)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_run(run: Path, as_json: bool) -> None:
    """Show what a run did: layout, timings, losses, recoveries, checkpoints."""
    summary = summarize_run(run)
    if as_json:
        _echo_json(summary)
        return
    say(*render_summary(summary, terminal_width(), ascii_only=not writes_unicode(sys.stdout)))


@inspect_group.command(name="diff", short_help="Whether two runs are the same computation.")
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def inspect_diff(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Compare two runs: exit code 0 if they are the same computation, else 1.

    They are exactly if all losses and the digest of the final state are equal. Otherwise the first differing step
    and tensor are named.
    """
    results = read_result(run_a), read_result(run_b)
    comparison = compare_results(*results, read_digests(run_a), read_digests(run_b))
    if as_json:
        _echo_json(comparison)
    else:
        say(*render_comparison(comparison, run_a, run_b, terminal_width()))
    if not comparison.same:
        sys.exit(1)


def _echo_json(document: msgspec.Struct) -> None:
    say_json(document)


# ---------------------------------------------------------------------------------------------------------- rendering


def render_summary(summary: RunSummary, width: int, *, ascii_only: bool = False) -> list[str]:
    """Makes the lines that ``elaswave inspect RUN`` prints.

    Args:
        summary: what the run folder tells.
        width: columns of the terminal.
        ascii_only: for terminals without block characters.
    """
    lines = wrap(_headline(summary), width)
    lines += _loss_lines(summary, width, ascii_only=ascii_only)
    lines += _layout_lines(summary, width)
    lines += _timing_lines(summary, width)
    lines += _event_lines(summary, width)
    if summary.state_digest is not None:
        lines += ["", f"state digest {summary.state_digest}"]
    return lines


def _headline(summary: RunSummary) -> str:
    steps = f"{summary.steps} steps"
    if summary.total_steps is not None:
        steps = f"{summary.steps} of {summary.total_steps} steps"
    text = f"run {summary.run_dir}: {summary.status}, {steps}"
    if summary.policy not in (None, "elaswave"):
        text += f"; planned by {summary.policy}"
    if summary.status == "unfinished" and summary.last_event_time is not None:
        text += f" (still running, or ended without a word; last event at {summary.last_event_time})"
    return text


def _loss_lines(summary: RunSummary, width: int, *, ascii_only: bool) -> list[str]:
    if not summary.losses:
        return []
    steps = sorted(summary.losses)
    losses = [from_json_float(summary.losses[step]) for step in steps]
    text = f"loss first {format_loss(losses[0])}, last {format_loss(losses[-1])}"
    finite = [(loss, step) for loss, step in zip(losses, steps, strict=True) if abs(loss) < float("inf")]
    if finite:
        lowest, step = min(finite)
        text += f", lowest {format_loss(lowest)} at step {step}"
    lines = ["", *wrap(text, width), sparkline(losses, min(width, 80), ascii_only=ascii_only)]
    if summary.val_losses:
        step = max(summary.val_losses)
        values = [from_json_float(loss) for loss in summary.val_losses.values()]
        text = f"validation loss last {format_loss(values[-1])} at step {step}, {len(values)} evaluations"
        lines += wrap(text, width)
    return lines


def _layout_lines(summary: RunSummary, width: int) -> list[str]:
    if not summary.generations:
        return []
    lines = [""]
    for record in summary.generations:
        text = f"layout {record.layout.describe()}, generation {record.generation}, from step {record.first_step}"
        lines += wrap(f"{text}: {record.reason}", width)
    header = ["stage", "workers", "layers", "parameters", "names"]
    lines += ["", *render_table(*_without_empty(header, [_stage_row(stage) for stage in summary.stages]), width)]
    header = ["worker", "stage", "micro-batches", "owns", "follows", "optimizer", "peak memory"]
    lines += ["", *render_table(*_without_empty(header, [_worker_row(worker) for worker in summary.workers]), width)]
    if summary.survival is not None:
        lines += ["", *wrap(f"the state {summary.survival.describe()}", width)]
    return lines


def _without_empty(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Leaves out columns about which nothing is known."""
    kept = [column for column in range(len(header)) if any(row[column] != "-" for row in rows)]
    return [header[column] for column in kept], [[row[column] for column in kept] for row in rows]


def _stage_row(stage: StageSummary) -> list[str]:
    names = [stage.layer_names[0], stage.layer_names[-1]] if stage.layer_names else []
    return [
        str(stage.stage),
        " ".join(map(str, stage.workers)),
        f"{stage.start} to {stage.stop - 1}" if stage.stop - stage.start > 1 else str(stage.start),
        f"{stage.num_parameters:,}" if stage.num_parameters is not None else "-",
        " to ".join(dict.fromkeys(names)) or "-",
    ]


def _worker_row(worker: WorkerSummary) -> list[str]:
    held = worker.holdings
    return [
        str(worker.worker),
        str(worker.stage),
        str(worker.num_microbatches),
        f"{held.num_owned_parameters:,} in {held.num_owned_blocks} blocks" if held is not None else "-",
        f"{held.num_followed_parameters:,} in {held.num_followed_blocks} blocks" if held is not None else "-",
        format_bytes(worker.optimizer_bytes),
        format_bytes(worker.peak_bytes),
    ]


def _timing_lines(summary: RunSummary, width: int) -> list[str]:
    lines: list[str] = []
    timings = summary.timings
    if timings is not None:
        text = (
            f"step mean {format_seconds(timings.mean_s)}, median {format_seconds(timings.median_s)}, slowest "
            f"{format_seconds(timings.slowest_s)}, over {timings.num_steps} steps"
        )
        lines += wrap(text, width)
        if timings.phases_s:
            phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in timings.phases_s.items())
            lines += wrap(f"phases of a step, mean: {phases}", width)
    facts = []
    if summary.throughput_tokens_per_s is not None:
        facts.append(format_rate(summary.throughput_tokens_per_s))
    elif summary.throughput_samples_per_s is not None:
        facts.append(format_rate(summary.throughput_samples_per_s, SAMPLES_PER_S))
    if summary.start_up_s is not None:
        facts.append(f"start-up {format_seconds(summary.start_up_s)}")
    if summary.duration_s is not None:
        facts.append(f"whole run {format_seconds(summary.duration_s)}")
    if facts:
        lines += wrap(", ".join(facts), width)
    return ["", *lines] if lines else []


def _event_lines(summary: RunSummary, width: int) -> list[str]:
    lines: list[str] = []
    if summary.recoveries:
        header = ["event", "worker", "step", "phase", "detected by", "outcome", "total"]
        rows = [
            [
                recovery.kind,
                "-" if recovery.worker is None else str(recovery.worker),
                str(recovery.step),
                recovery.phase,
                recovery.detected_by or "-",
                recovery.outcome,
                format_seconds(recovery.total_s),
            ]
            for recovery in summary.recoveries
        ]
        lines += ["", *render_table(header, rows, width)]
    if summary.checkpoints:
        rows = [
            [str(point.step), point.path, format_bytes(point.num_bytes), format_seconds(point.duration_s)]
            for point in summary.checkpoints
        ]
        lines += ["", *render_table(["checkpoint after step", "folder", "size", "took"], rows, width)]
    notes = [f"step {event.step} skipped: {event.reason}" for event in summary.skipped]
    notes += [f"step {retry.step} tried again: {retry.reason}" for retry in summary.retries]
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"{len(notes) - _MAX_NOTES} more skipped or repeated steps; --json lists all"]
    notes += [f"error: {event.message}" for event in summary.errors]
    notes += [f"the log lacks {event.num_events} event(s): {event.reason}" for event in summary.lost]
    if notes:
        lines.append("")
    for note in notes:
        lines += wrap(note, width)
    return lines


def render_comparison(comparison: Comparison, run_a: Path, run_b: Path, width: int) -> list[str]:
    """Makes the lines that ``elaswave inspect diff`` prints.

    Args:
        comparison: what was found.
        run_a, run_b: the run folders, as the person called them.
        width: columns of the terminal.
    """
    lines = wrap(comparison.summary, width)
    if comparison.same:
        return [*lines, f"state digest {comparison.state_digests[0]}"]
    step, tensor = comparison.first_differing_step, comparison.first_differing_tensor
    if step is not None:
        lines += _pair(f"loss of step {step.step}", run_a, run_b, step.losses)
    if comparison.steps[0] == comparison.steps[1] and comparison.state_digests[0] != comparison.state_digests[1]:
        lines += _pair("state digest", run_a, run_b, comparison.state_digests)
        if tensor is not None:
            lines += _pair(f"digest of {tensor.name}", run_a, run_b, tensor.digests)
            lines += [f"{comparison.num_differing_tensors} tensors differ"]
        elif comparison.num_differing_tensors is None:
            lines += wrap("which tensor differs cannot be told: one of the runs has no digests.json", width)
        else:
            lines += wrap("no tensor differs: the data cursor or the grids of the exact sums do", width)
    if comparison.differing_config:
        lines += ["", "configuration:"]
        for key, (value_a, value_b) in comparison.differing_config.items():
            lines += wrap(f"{key}: {_toml(value_a)} against {_toml(value_b)}", width)
    return lines


def _pair(what: str, run_a: Path, run_b: Path, values: tuple[Any, Any]) -> list[str]:
    first, second = ("none" if value is None else value for value in values)
    return ["", f"{what}:", f"  {first}  {run_a}", f"  {second}  {run_b}"]


def _toml(value: Any) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()
