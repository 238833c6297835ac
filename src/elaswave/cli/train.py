"""``elaswave train``: reads the configuration, prepares the run folder, and hands over to the launcher.

The libraries that compute are imported only when training begins, so bad input is answered at once.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from elaswave.api.environment import given_key, prepare_to_compute
from elaswave.cli.job_options import job_options, with_policy
from elaswave.config.load import BUILT_IN_SOURCES, load_config
from elaswave.config.values import OWN, read_toml
from elaswave.errors import UsageError
from elaswave.job.script import JobOptions
from elaswave.observability.output import say
from elaswave.observability.run_folder import is_fine_tuning, resume_command


@click.command(
    name="train",
    short_help="Train a model.",
    epilog="Every key, with its default: elaswave train --print-config. "
    "Exit codes: 0 done, 1 failed, 2 bad input, 129 SIGHUP (a closed terminal), 130 Ctrl-C, 138 and 140 "
    "SIGUSR1 and 2, 143 SIGTERM.",
)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path))
@job_options(
    "the file's",
    "runs/<UTC time>-<short id>",
    ", such as kill:3@17:gather, hang:random@5, kill:coordinator@9; may be repeated. KIND: kill, hang, cut, cut-close. "
    "WORKER: a number, random, or, to be killed, coordinator. PHASE: forward, backward, reduce, vote, apply, gather, "
    "any. kill:0+1+2@6:backward kills several at one instant; hang and drain take several too. slow:2@18:0.5 makes a "
    "worker slow, here by half, slow:2@30:1 ends it; join@8 has one more worker join, drain:0@14 has one leave; "
    "kill-host:a@5 kills all workers of a host of elastic.hosts; slow-link:1@3:0.01 makes a "
    "worker's links to other sites slow, away:oslo@5:60 cuts a site off for a minute.",
)
@click.option(
    "--hf",
    "hf_folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Train a checkpoint of transformers: a local folder with config.json, safetensors and tokenizer. Goes with "
    "--data.",
)
@click.option(
    "--data",
    metavar="FILE",
    help="With --hf: a text, which the folder's tokenizer makes tokens of, or a .bin file or pattern of them.",
)
@click.option(
    "--context-length",
    type=click.IntRange(min=2),
    metavar="N",
    help="With --hf: tokens of a sample.  [default: what the model takes, at most 1024]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="With --hf: type of weights and activations.  [default: the folder's]",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document; progress to stderr.")
def train_command(
    config_file: Path | None,
    workers: int | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    policy: str | None,
    resume: bool,
    overwrite: bool,
    profile: bool,
    fault_specs: tuple[str, ...],
    hf_folder: Path | None,
    data: str | None,
    context_length: int | None,
    dtype: str | None,
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
    elaswave train --policy examples/policies/my_policy.py:plan --fault kill:1@9
    elaswave train --print-config > my.toml
    elaswave train my.toml --set data.source=book.txt --json > result.json
    elaswave train --hf my-llama --data book.txt --set run.steps=200 \\
      --run-dir runs/b
    """
    overrides = with_policy(overrides, policy)
    options = JobOptions(run_dir, resume, overwrite, profile, fault_specs, as_json)
    of_checkpoint = {"--data": data, "--context-length": context_length, "--dtype": dtype}
    if hf_folder is not None or (resume and run_dir is not None and is_fine_tuning(run_dir)):
        if print_config:
            raise UsageError("--print-config shows the configuration of a built-in model; leave --hf out")
        _fine_tune(hf_folder, data, context_length, dtype, config_file, options, workers, overrides)
        return
    if given := [name for name, value in of_checkpoint.items() if value is not None]:
        raise UsageError(
            f"{given[0]} goes with --hf, the folder of a transformers checkpoint; built-in models have "
            "data.source, model.context_length and model.dtype: use --set"
        )
    base = options.saved_config()
    if base is not None and base.model.family == OWN:
        raise UsageError(
            f"{run_dir} holds the run of a script's own model, which only the script can go on with: "
            f"{resume_command(base, Path(str(run_dir)))}"
        )
    config = load_config(config_file, overrides, workers, base=base)
    if print_config:
        say(_as_json(config.to_dict()) if as_json else config.to_toml(), nl=as_json)
        return
    # late: bad input and --help are answered before what runs a job is loaded
    from elaswave.launcher.launcher import run_job

    finished = run_job(config, options, prepare=prepare_to_compute, key=given_key())
    if as_json:
        say(_as_json(finished.result))


def _fine_tune(
    folder: Path | None,
    data: str | None,
    context_length: int | None,
    dtype: str | None,
    config_file: Path | None,
    options: JobOptions,
    workers: int | None,
    overrides: tuple[str, ...],
) -> None:
    """Trains a transformers checkpoint; arguments as of the command."""
    settings = {} if config_file is None else read_toml(config_file)
    prepare_to_compute()
    from elaswave.api.fine_tuning import FineTuning, saved_fine_tuning, trainer_of
    from elaswave.job.script import ScriptSession, active

    changes: dict[str, Any] = {"folder": folder, "data": data, "context_length": context_length, "dtype": dtype}
    given = {name: value for name, value in changes.items() if value is not None}
    for name in ("folder", "data"):
        if name in given and given[name] not in BUILT_IN_SOURCES:
            given[name] = os.path.abspath(os.path.expanduser(given[name]))
    if options.resume and options.run_dir is not None and is_fine_tuning(options.run_dir):
        fine_tuning = msgspec.structs.replace(saved_fine_tuning(options.run_dir), **given)
    elif data is None:
        raise UsageError("--hf needs --data, a text or a .bin file of tokens to train on")
    else:
        fine_tuning = FineTuning(**given)
    session = ScriptSession(options, workers, overrides)
    with active(session), contextlib.redirect_stdout(sys.stderr) if options.as_json else contextlib.nullcontext():
        trainer_of(fine_tuning, settings=settings, run_dir=options.run_dir, resume=options.resume).train()
    if options.as_json:
        (job,) = session.jobs
        say(_as_json(job.result))


def _as_json(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
