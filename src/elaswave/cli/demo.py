"""``elaswave demo``: the same training twice, undisturbed and while workers are lost and others join in their places;
and both are one computation.

What is drawn (who, when, in which phase) follows from ``--seed``. The faults keep a distance of a few steps, so that
each finds its victim's state in two places again; faults that meet are the business of ``python -m verify chaos``.
"""

import contextlib
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import click
import msgspec
from rich.console import Console
from rich.text import Text

from elaswave.api.environment import prepare_to_compute
from elaswave.cli.tables import render_table
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.errors import ConfigError
from elaswave.faults.injection import Fault, FaultRecord, parse_faults, read_fault_records
from elaswave.hashing import key64
from elaswave.observability.compare import Comparison, compare_results
from elaswave.observability.output import say_json
from elaswave.observability.progress import format_loss, make_reporter, writes_unicode
from elaswave.observability.result import (
    GenerationRecord,
    JsonFloat,
    Recovery,
    RunResult,
    from_json_float,
    read_digests,
)
from elaswave.observability.run_folder import FAULTS_FILE, default_run_dir, open_run_dir
from elaswave.protocol.step.engine import PHASES
from elaswave.visible import visible

DEFAULTS = ("layout.widths=[4, 4]", "run.steps=36", "model.hidden_size=96", "batch.microbatch_size=4")
"""What the demonstration's configuration has beside the defaults of every run: eight workers share two cores, and it is
to be over in half a minute."""
_SHAPE = ("layout.stages", "layout.replicas", "layout.widths")
UNDISTURBED, DISTURBED = "undisturbed", "disturbed"
"""Names of the two runs, and of their folders."""
NUM_FAULTS = 4
"""Three kills and a hang; fewer in a job of fewer workers, of which two are to be left."""
FIRST_STEP = 3
REST_STEPS = 4
"""Fewest steps between two faults."""
_CURVE_HEIGHT = 7
_CURVE_WIDTH_MAX = 80
_FALLBACK_WIDTH = 100
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_EIGHTHS_ASCII = "    ::::#"


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has joined while the job ran."""

    worker: int
    first_step: int
    """The first one in which it was a member."""
    computes_from: int | None
    """The first one in which it had layers to run; None: the run was over before."""


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """What ``--json`` prints."""

    same: bool
    """Whether both runs are the same computation."""
    summary: str
    seed: int
    faults: list[str]
    struck: list[FaultRecord]
    losses: dict[str, list[JsonFloat]]
    """By run."""
    state_digests: dict[str, str]
    """By run."""
    recoveries: list[Recovery]
    joins: list[Join]
    run_dirs: dict[str, str]
    """By run."""


@click.command(
    name="demo",
    short_help="Kill workers and see that the result has the same bits.",
    epilog="Exit codes: 0 both runs are the same computation, 1 they differ, 2 bad input.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Decides who is struck, when and how."
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for both runs; default: runs/<UTC time>-<short id>.",
)
@click.option("--overwrite", is_flag=True, help="Replace the runs that DIR holds.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one key of the configuration, as in train; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; everything else to stderr.")
def demo_command(seed: int, run_dir: Path | None, overwrite: bool, overrides: tuple[str, ...], as_json: bool) -> None:
    """Train a small GPT on 8 workers (2 stages x 4 replicas), twice: undisturbed, and while three workers are killed
    and one is stopped, each somewhere in a step; new workers join in their places. Both are the same computation, bit
    for bit: same losses, same state.

    \b
    elaswave demo
    elaswave demo --seed 7
    elaswave demo --set model.family=llama --set 'layout.widths=[2,3]' --json
    """
    own_layout = any(override.strip().startswith(_SHAPE) for override in overrides)
    defaults = [default for default in DEFAULTS if not (own_layout and default.startswith(_SHAPE))]
    config = load_config(None, [*defaults, *overrides])
    from elaswave.launcher.resources import check_machine_memory  # late: --help needs none of it

    check_machine_memory(config)
    specs = draw_faults(seed, sum(config.widths), config.run.steps)
    now = datetime.now(UTC)
    run_dir = run_dir or default_run_dir(now, secrets.token_hex(3))
    prepare_to_compute()
    shown = _Shown(sys.stderr if as_json else sys.stdout)
    found = demonstrate(config, specs, seed, run_dir, shown, json_mode=as_json, overwrite=overwrite)
    if as_json:
        say_json(found)
    if not found.same:
        sys.exit(1)


def draw_faults(seed: int, num_workers: int, num_steps: int) -> list[str]:
    """Draws whom the demonstration strikes, when and how.

    Args:
        seed: decides it.
        num_workers: of the job; two are left.
        num_steps: of the run.
    Returns:
        Specs, in the order of their steps; the last but one of several is the hang.
    Raises:
        ConfigError: too few workers or steps to strike at all.
    """
    count = min(NUM_FAULTS, num_workers - 2)
    room = (num_steps - FIRST_STEP) // max(1, count)
    problems = []
    if count < 1:
        problems.append(f"--set layout: {num_workers} workers are too few to lose one and see the rest go on; give 3")
    elif room <= REST_STEPS:
        problems.append(
            f"--set run.steps: {num_steps} steps are too few for {count} faults; give at least "
            f"{FIRST_STEP + count * (REST_STEPS + 1)}"
        )
    if problems:
        raise ConfigError(problems)
    left, phases = list(range(num_workers)), list(PHASES)
    specs = []
    for number in range(count):
        worker = left.pop(key64(seed, number, "demo worker") % len(left))
        step = FIRST_STEP + number * room + key64(seed, number, "demo step") % (room - REST_STEPS)
        phase = phases.pop(key64(seed, number, "demo phase") % len(phases))
        kind = "hang" if count > 1 and number == count - 2 else "kill"
        specs.append(f"{kind}:{worker}@{step}:{phase}")
    return specs


class _Shown:
    """Where the demonstration speaks: styles on a terminal, plain lines anywhere else.

    Args:
        stream: standard output, or standard error beside a JSON document.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.ascii_only = not writes_unicode(stream)
        self.width = max(20, shutil.get_terminal_size((_FALLBACK_WIDTH + 1, 24)).columns - 1)
        self._console = Console(
            file=stream, width=None if stream.isatty() else 10_000, highlight=False, markup=False, emoji=False
        )

    def say(self, *parts: str | tuple[str, str]) -> None:
        """Prints one line of parts, each a text or (text, style)."""
        seen = (visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts)
        self._console.print(Text.assemble(*seen), soft_wrap=True)
        self.stream.flush()


def demonstrate(
    config: Config,
    specs: Sequence[str],
    seed: int,
    run_dir: Path,
    shown: _Shown,
    *,
    json_mode: bool = False,
    overwrite: bool = False,
) -> Demonstration:
    """Trains twice and compares.

    Args:
        config: with its layout resolved.
        specs: faults of the second run.
        seed: that they were drawn from.
        run_dir: for both runs' folders.
        shown: where to speak.
        json_mode: standard output belongs to a JSON document.
        overwrite: replace the runs that the folder holds.
    """
    workers = range(sum(config.widths))
    faults = parse_faults(specs, seed=config.run.seed, workers=workers, num_steps=config.run.steps)
    shown.say(("1  Undisturbed", "bold"))
    calm_dir, calm = _train(config, run_dir / UNDISTURBED, (), json_mode=json_mode, overwrite=overwrite)
    shown.say()
    shown.say(("2  The same again, and these faults strike: ", "bold"), (", ".join(map(str, faults)), "bold yellow"))
    struck_dir, struck = _train(config, run_dir / DISTURBED, faults, json_mode=json_mode, overwrite=overwrite)
    joins = joins_of(struck.generations)
    comparison = compare_results(calm, struck, read_digests(calm_dir), read_digests(struck_dir))
    records = read_fault_records(struck_dir / FAULTS_FILE)
    shown.say()
    shown.say(("3  What came of it", "bold"))
    _show_curves(shown, calm, struck, records, joins)
    _show_recoveries(shown, struck.recoveries)
    _show_joins(shown, joins)
    _show_verdict(shown, comparison, len(records), len(joins), calm_dir, struck_dir)
    return Demonstration(
        same=comparison.same,
        summary=comparison.summary,
        seed=seed,
        faults=[str(fault) for fault in faults],
        struck=records,
        losses={UNDISTURBED: calm.losses, DISTURBED: struck.losses},
        state_digests={UNDISTURBED: calm.state_digest, DISTURBED: struck.state_digest},
        recoveries=struck.recoveries,
        joins=joins,
        run_dirs={UNDISTURBED: str(calm_dir), DISTURBED: str(struck_dir)},
    )


def joins_of(generations: Sequence[GenerationRecord]) -> list[Join]:
    """Finds who has joined, by the layouts that a run had.

    Args:
        generations: of the run, in their order.
    """
    first: dict[int, int] = {}
    computes: dict[int, int] = {}
    for record in generations:
        for worker in record.layout.workers:
            first.setdefault(worker, record.first_step)
        for worker in record.layout.active:
            computes.setdefault(worker, record.first_step)
    founders = generations[0].layout.workers if generations else ()
    return [
        Join(worker=worker, first_step=step, computes_from=computes.get(worker))
        for worker, step in first.items()
        if worker not in founders
    ]


def _train(
    config: Config, folder: Path, faults: tuple[Fault, ...], *, json_mode: bool, overwrite: bool
) -> tuple[Path, RunResult]:
    from elaswave.launcher.launcher import train  # the libraries that compute are loaded only now

    with (
        open_run_dir(folder, config, now=datetime.now(UTC), overwrite=overwrite) as run,
        contextlib.closing(make_reporter(json_mode=json_mode)) as reporter,
    ):
        return run, train(config, run, reporter=reporter, faults=faults)


# ---------------------------------------------------------------------------------------------------------- rendering


def curve_lines(losses: Sequence[float], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Draws a loss curve as lines of text, the highest first, filled below; every column is the mean of a run of steps.

    Args:
        losses: finite ones are drawn, others leave a gap.
        width: most columns.
        height: lines.
        ascii_only: for terminals without block characters.
    Returns:
        ``height`` lines of at most ``width`` characters.
    """
    columns = min(width, len(losses))
    means = []
    for column in range(columns):
        run = losses[column * len(losses) // columns : (column + 1) * len(losses) // columns]
        means.append(sum(run) / len(run))
    finite = [mean for mean in means if mean - mean == 0.0]
    if not finite:
        return [" " * columns] * height
    low, high = min(finite), max(finite)
    eighths = _EIGHTHS_ASCII if ascii_only else _EIGHTHS
    # The lowest point is still seen.
    fill = [
        1 + round((mean - low) / ((high - low) or 1.0) * (8 * height - 1)) if mean - mean == 0.0 else 0
        for mean in means
    ]
    return [
        "".join(eighths[min(8, max(0, level - 8 * row))] for level in fill).rstrip() for row in reversed(range(height))
    ]


def fault_line(records: Sequence[FaultRecord], num_steps: int, width: int, joins: Sequence[Join] = ()) -> str:
    """Shows where faults have struck, under a curve: the first letter of each fault's kind, and J where a worker
    joined."""
    columns = min(width, num_steps)
    line = [" "] * columns
    for join in joins:
        line[(min(join.first_step, num_steps) - 1) * columns // num_steps] = "J"
    for record in records:
        line[(record.step - 1) * columns // num_steps] = record.fault[0].upper()
    return "".join(line).rstrip()


def _show_curves(
    shown: _Shown, calm: RunResult, struck: RunResult, records: Sequence[FaultRecord], joins: Sequence[Join]
) -> None:
    margin = 8
    width = max(1, min(_CURVE_WIDTH_MAX, shown.width - margin))
    for title, result, style, faults in (
        ("undisturbed", calm, "cyan", []),
        ("with faults", struck, "green", records),
    ):
        losses = [from_json_float(loss) for loss in result.losses]
        shown.say()
        shown.say(f"loss, {title}")
        lines = curve_lines(losses, width, _CURVE_HEIGHT, ascii_only=shown.ascii_only)
        for row, line in enumerate(lines):
            label = {0: format_loss(max(losses)), _CURVE_HEIGHT - 1: format_loss(min(losses))}.get(row, "")
            shown.say((label.rjust(margin - 1) + " ", "dim"), (line, style))
        if faults:
            shown.say(" " * margin, (fault_line(faults, len(losses), width, joins), "bold red"))
            shown.say((" " * margin + "K a worker is killed, H one is stopped, J one joins", "dim"))


def _show_recoveries(shown: _Shown, recoveries: Sequence[Recovery]) -> None:
    header = ["worker", "step", "phase", "noticed by", "after", "going on after", "step was", "moved"]
    rows = []
    for recovery in recoveries:
        if not recovery.is_failure:  # joins have lines of their own
            continue
        going_on_s = recovery.total_s - recovery.redo_s
        rows.append(
            [
                "-" if recovery.worker is None else str(recovery.worker),
                str(recovery.step),
                recovery.phase,
                recovery.detected_by or "-",
                "-" if recovery.detect_s is None else _milliseconds(recovery.detect_s),
                _milliseconds(going_on_s),
                {"committed": "committed", "retried": "done again"}[recovery.outcome],
                f"{recovery.critical_bytes} B",
            ]
        )
    if not rows:
        return
    shown.say()
    head, *lines = render_table(header, rows, shown.width, is_styled=False)
    shown.say((head, "bold"))
    for line in lines:
        shown.say(line)


def _show_joins(shown: _Shown, joins: Sequence[Join]) -> None:
    if joins:
        shown.say()
    for join in joins:
        works = "" if join.computes_from is None else f", and computes from step {join.computes_from} on"
        shown.say(f"worker {join.worker} has joined before step {join.first_step}{works}")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _show_verdict(
    shown: _Shown, comparison: Comparison, num_struck: int, num_joined: int, calm_dir: Path, struck_dir: Path
) -> None:
    sign, style = ("=", "bold green") if comparison.same else ("≠", "bold red")
    if shown.ascii_only and not comparison.same:
        sign = "!="
    digests = comparison.state_digests
    shown.say()
    shown.say((comparison.summary, style))
    shown.say("state digest ", (f"{digests[0]} {sign} {digests[1]}", style))
    lost = f"{num_struck} worker{'s' if num_struck != 1 else ''}"
    if comparison.same:
        lost += f" lost, {num_joined} joined in their places" if num_joined else " lost"
        shown.say(f"{lost}, no step lost, no restart, and not one bit differs")
    calm_run, struck_run = shlex.quote(str(calm_dir)), shlex.quote(str(struck_dir))
    shown.say((f"look closer: elaswave inspect {struck_run}", "dim"))
    shown.say((f"             elaswave inspect diff {calm_run} {struck_run}", "dim"))
