"""``elaswave run SCRIPT.py``: runs a script that trains, with options that are stronger than its configuration.

The command's first lines have prepared the environment (`elaswave.cli.main`): a numeric library that starts threads
would keep the script's process from forking, and sets of texts would have another order in each process.
"""

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import click

from elaswave.api.environment import prepare_to_compute
from elaswave.cli.job_options import job_options, with_policy
from elaswave.errors import ElaswaveError, UsageError
from elaswave.observability.output import say_error, say_json


@click.command(
    name="run",
    short_help="Run a script that trains its own model.",
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the script's own, or 0 done, 1 failed, 2 bad input, 129 SIGHUP (a closed terminal), 130 "
    "Ctrl-C, 138 and 140 SIGUSR1 and 2, 143 SIGTERM.",
)
@job_options(
    "the script's", "the script's, or runs/<UTC time>-<short id>", ", as elaswave train does; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document; all else to stderr.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    workers: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    policy: str | None,
    resume: bool,
    overwrite: bool,
    profile: bool,
    fault_specs: tuple[str, ...],
    as_json: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT.py as python does, with its own ARGUMENTS; what it trains with elaswave.Trainer gets these options.

    \b
    elaswave run examples/own_model.py
    elaswave run --workers 4 --fault kill:random@5:any examples/own_model.py
    elaswave run --run-dir runs/own --set run.steps=40 examples/own_model.py
    elaswave run --run-dir runs/own --resume --workers 1 --set run.steps=60 \\
      examples/own_model.py
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}; give the path of a Python file")
    prepare_to_compute()
    from elaswave.job.script import JobOptions, ScriptSession, active

    options = JobOptions(run_dir, resume, overwrite, profile, fault_specs, as_json)
    session = ScriptSession(options, workers, with_policy(overrides, policy))
    with active(session), _as_python_runs(script, arguments):
        # Standard output belongs to the document.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            _run(script)
    if not session.has_begun:
        raise UsageError(
            f"{script} has not trained: a script for `elaswave run` calls elaswave.Trainer(...).train(), also where "
            '__name__ == "__main__"'
        )
    if as_json:
        (job,) = session.jobs
        say_json(job.result)


@contextlib.contextmanager
def _as_python_runs(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Sets the arguments and the first folder of modules as ``python SCRIPT.py`` has them."""
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


def _run(script: Path) -> None:
    """Runs the script.

    Raises:
        SystemExit: the script ends itself, or has raised an exception, which is shown as python shows it.
        ElaswaveError: training has.
    """
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ElaswaveError:
        raise
    except Exception as error:
        # Without the frames of this command above the script's.
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename) != script:
            frames = frames.tb_next
        shown = error.with_traceback(frames) if frames is not None else error
        say_error("".join(traceback.format_exception(shown)).rstrip())
        raise SystemExit(1) from None
