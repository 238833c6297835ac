"""The options that every command which trains has: `elaswave train` and `elaswave run`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from elaswave.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., object])


def job_options(weaker: str, default_run_dir: str, faults: str) -> Callable[[Function], Function]:
    """Makes a decorator that adds them.

    Args:
        weaker: whose configuration `--set` is stronger than: "the file's".
        default_run_dir: in words.
        faults: the end of the help for `--fault`.
    """
    options = (
        click.option(
            "--workers", type=click.IntRange(min=1), metavar="N", help="Number of workers; the layout fits itself."
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help=f"Set one key of the configuration, stronger than {weaker}; may be repeated. VALUE is TOML, or else a "
            "string.",
        ),
        click.option(
            "--run-dir",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help=f"Folder for everything that the run writes; default: {default_run_dir}.",
        ),
        click.option(
            "--policy",
            metavar="NAME|CODE",
            help="Who plans after a loss: a name, or your own module:function or file.py:function, which also plans "
            "for joins and changes of speed. Sets elastic.policy.",
        ),
        click.option("--resume", is_flag=True, help="Go on from the newest valid checkpoint in DIR, under any layout."),
        click.option("--overwrite", is_flag=True, help="Replace the run that DIR holds."),
        click.option("--profile", is_flag=True, help="Write DIR/trace.json, to be opened in Perfetto or Chrome."),
        click.option(
            "--fault",
            "fault_specs",
            multiple=True,
            metavar="KIND:WORKER@STEP[:PHASE[+N]]",
            help=f"Inject a fault{faults}",
        ),
    )

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def with_policy(overrides: tuple[str, ...], policy: str | None) -> tuple[str, ...]:
    """Joins the values of `--set`, and what `--policy` sets.

    Args:
        overrides: of `--set`.
        policy: of `--policy`.
    Raises:
        UsageError: both say who plans.
    """
    if policy is None:
        return overrides
    if any(override.partition("=")[0].strip() == "elastic.policy" for override in overrides):
        raise UsageError("--policy sets elastic.policy, and so does --set; give one of them")
    return (*overrides, f"elastic.policy={json.dumps(policy)}")
