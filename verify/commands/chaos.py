"""``python -m verify chaos``: jobs and faults drawn at random, each compared bit for bit with its reference run."""

import itertools
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elaswave.api.environment import prepare_to_compute
from elaswave.observability.output import say, say_json

if TYPE_CHECKING:
    from verify.chaos.bench import ChaosRun

_COLUMNS = (("run", 5), ("layout", 9), ("model", 16), ("outcome", 16), ("struck", 6), ("recovered", 9), ("going on", 9))


@click.command(
    name="chaos",
    short_help="Random jobs with random faults against their reference runs.",
    epilog="Exit codes: 0 every run had its reference run's bits (or could not have, and named the blocks that were "
    "lost), 1 one had not, 2 bad input.",
)
@click.option(
    "--runs", type=click.IntRange(min=1), metavar="N", help="Number of jobs; default: 20, or what --minutes allow."
)
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), metavar="M", help="Begin no job after so long.")
@click.option(
    "--outside",
    is_flag=True,
    help="Strike real `elaswave train` commands from outside: SIGKILL, SIGSTOP, SIGTERM to its processes.",
)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Decides all jobs and faults.")
@click.option("--only", type=click.IntRange(min=0), metavar="I", help="Only the job with this number.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A job that lasts longer hangs.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the folders of all jobs here; default: a temporary folder, of which only a failed job's is kept.",
)
@click.option("--keep-going", is_flag=True, help="Run all jobs, also after one that went wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress to stderr.")
def chaos_command(
    runs: int | None,
    minutes: float | None,
    outside: bool,
    seed: int,
    only: int | None,
    timeout_s: float,
    run_dir: Path | None,
    keep_going: bool,
    as_json: bool,
) -> None:
    """Train small jobs drawn at random (model, layout, schedule, followers, checkpoints) while up to three faults
    strike each (kill, hang, cut; workers and coordinator; any phase), and compare losses, evaluations and state with
    a fault-free run. In half of the jobs workers also join, leave and become slow.

    The fault-free run is one worker's: the layout does not show in the result, so all jobs of a model share it.
    With --outside the jobs are longer, and signals strike their processes as a person's would: during start-up,
    steps, evaluations, checkpoints and at the end.

    \b
    python -m verify chaos --runs 20 --seed 1
    python -m verify chaos --seed 1 --only 7 --run-dir chaos-7
    python -m verify chaos --outside --minutes 10
    """
    prepare_to_compute()
    from verify.chaos.bench import ChaosBench

    out = sys.stderr if as_json else sys.stdout
    folder = Path(tempfile.mkdtemp(prefix="elaswave-chaos-")) if run_dir is None else run_dir
    if run_dir is not None:
        if run_dir.exists() and any(run_dir.iterdir()):
            raise click.UsageError(f"{run_dir} is not empty; give a new folder")
        run_dir.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ) if outside else None
    bench = ChaosBench(seed, folder, timeout_s=timeout_s, keep=run_dir is not None, outside=environment)
    end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if runs is None and minutes is None:
        runs = 20
    done: list[ChaosRun] = []
    try:
        _print(out, "  ".join(name.ljust(width) for name, width in _COLUMNS) + "  faults")
        for index in [only] if only is not None else itertools.count() if runs is None else range(runs):
            if done and time.monotonic() > end_s:
                break
            done.append(bench.run(index))
            _print(out, _row(done[-1]))
            if not done[-1].good:
                for line in _explanation(done[-1]):
                    _print(out, line)
                if not keep_going:
                    break
    finally:
        if run_dir is None and all(run.good for run in done):
            shutil.rmtree(folder, ignore_errors=True)
    summary = _summary(done)
    if as_json:
        document = {"seed": seed, "good": all(run.good for run in done), "summary": summary, "runs": done}
        say_json(document)
    else:
        for line in _summary_lines(summary):
            _print(out, line)
    if not all(run.good for run in done):
        sys.exit(1)


def _print(stream: Any, text: str) -> None:
    say(text.rstrip(), file=stream)
    stream.flush()


def _row(run: "ChaosRun") -> str:
    median_s = run.median_going_on_s
    cells = (
        str(run.index),
        run.layout,
        run.model,
        run.outcome,
        f"{run.num_struck}/{len(run.faults)}",
        str(run.num_recoveries),
        "-" if median_s is None else f"{median_s * 1e3:.0f} ms",
    )
    text = "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS))
    note = f"  ({run.detail})" if run.good and run.detail else ""
    return f"{text}  {' '.join(run.faults)}{note}"


def _explanation(run: "ChaosRun") -> list[str]:
    return [
        f"run {run.index}: {run.outcome}: {run.detail}",
        *(f"{each.victim} was struck {each.after_s:.2f} s after the start: {each.strike}" for each in run.struck),
        f"what it left is in {run.folder}",
        "the same case again:",
        f"  {run.replay}",
        "the same job alone:",
        f"  {run.command}",
    ]


def _summary(runs: list["ChaosRun"]) -> dict[str, Any]:
    outcomes: dict[str, int] = {}
    for run in runs:
        outcomes[run.outcome] = outcomes.get(run.outcome, 0) + 1
    going_on_s = sorted(seconds for run in runs for seconds in run.going_on_s)
    return {
        "runs": len(runs),
        "outcomes": outcomes,
        "faults_struck": sum(run.num_struck for run in runs),
        "recoveries": sum(run.num_recoveries for run in runs),
        "false_alarms": sum(run.num_false_alarms for run in runs),
        "median_going_on_s": statistics.median(going_on_s) if going_on_s else None,
        "duration_s": sum(run.duration_s for run in runs),
    }


def _summary_lines(summary: dict[str, Any]) -> list[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    text = f"{summary['runs']} runs in {summary['duration_s']:.0f} s: {outcomes}"
    facts = f"{summary['faults_struck']} faults struck, {summary['recoveries']} recoveries"
    if summary["median_going_on_s"] is not None:
        facts += f", going on after {summary['median_going_on_s'] * 1e3:.0f} ms (median)"
    if summary["false_alarms"]:
        facts += f", {summary['false_alarms']} false alarms"
    return [text, facts]
