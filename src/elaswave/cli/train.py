"""``elaswave train``: reads the configuration, prepares the run folder, and hands over to the launcher.

The libraries that compute are imported only when training begins, so bad input is answered at once.
"""

from pathlib import Path

import click
import msgspec

from elaswave.api.environment import prepare_to_compute
from elaswave.cli.job_options import job_options
from elaswave.config.load import load_config
from elaswave.config.own import OWN
from elaswave.control.job import JobOptions, run_job
from elaswave.errors import UsageError
from elaswave.observability.run_folder import resume_command


@click.command(
    name="train",
    short_help="Train a model.",
    epilog="Every key, with its default: elaswave train --print-config. "
    "Exit codes: 0 done, 1 failed, 2 bad input, 129 SIGHUP (a closed terminal), 130 Ctrl-C, 143 SIGTERM.",
)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path))
@job_options(
    "the file's",
    "runs/<UTC time>-<short id>",
    ", such as kill:3@17:gather, hang:random@5, kill:coordinator@9; may be repeated. KIND: kill, hang, cut, cut-close. "
    "WORKER: a number, random, or, to be killed, coordinator. PHASE: forward, backward, reduce, vote, apply, gather, "
    "any. slow:2@18:0.5 makes a worker slow, here by half, slow:2@30:1 ends it; join@8 has one more worker join, "
    "drain:0@14 has one leave.",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document; progress to stderr.")
def train_command(
    config_file: Path | None,
    workers: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    overwrite: bool,
    profile: bool,
    fault_specs: tuple[str, ...],
    print_config: bool,
    as_json: bool,
) -> None:
    """Train a model. Without a configuration: a small GPT on the text of Python's own documentation, 4 workers as
    2 stages x 2 replicas, half a minute to a minute on two idle cores.

    \b
    elaswave train
    elaswave train --workers 3 --set model.family=llama --run-dir runs/llama
    elaswave train --set 'layout.widths=[1,3]' --set run.checkpoint_every=50 \\
      --run-dir runs/a
    elaswave train --resume --run-dir runs/a --workers 1 --set run.steps=300
    elaswave train --print-config > my.toml
    elaswave train my.toml --set data.source=book.txt --json > result.json
    """
    options = JobOptions(run_dir, resume, overwrite, profile, fault_specs, as_json)
    base = options.saved_config()
    if base is not None and base.model.family == OWN:
        raise UsageError(
            f"{run_dir} holds the run of a script's own model, which only the script can go on with: "
            f"{resume_command(base, Path(str(run_dir)))}"
        )
    config = load_config(config_file, overrides, workers, base=base, reads_old_format=resume)
    if print_config:
        click.echo(_as_json(config.to_dict()) if as_json else config.to_toml(), nl=as_json)
        return
    finished = run_job(config, options, prepare=prepare_to_compute)
    if as_json:
        click.echo(_as_json(finished.result))


def _as_json(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
