"""``elaswave export RUN``: the weights of a run's newest checkpoint as one file that other programs load."""

from pathlib import Path

import click

from elaswave.config.values import OWN
from elaswave.errors import RunFolderError, UsageError
from elaswave.observability.output import say, say_json
from elaswave.observability.run_folder import huggingface_files, saved_config


@click.command(name="export", short_help="Write a run's weights for other programs.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "hf"]),
    default="safetensors",
    show_default=True,
    help="One file, or a folder for from_pretrained of transformers: weights, configuration, tokenizer.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File to write, with --format hf the folder, in a folder that exists; an earlier one is replaced.  [default: "
    "RUN/export/model.safetensors, RUN/export]",
)
@click.option(
    "--step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of the checkpoint of step N; 0: the initial weights.  [default: the newest valid checkpoint]",
)
@click.option("--own-names", is_flag=True, help="Keep elaswave's names instead of Hugging Face's; no config.json.")
@click.option("--ema", is_flag=True, help="Their moving average instead, which optimizer.ema_decay keeps.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export_command(
    run: Path, file_format: str, output: Path | None, step: int | None, own_names: bool, ema: bool, as_json: bool
) -> None:
    """Write the weights of RUN's newest valid checkpoint: in float32 as one file of named, whole tensors, or as the
    folder that from_pretrained loads, in the type that the run computed in.

    Tensors get Hugging Face's names, and a config.json is written beside the file, so that transformers loads the
    folder: a Llama as LlamaForCausalLM, a GPT as GPT2LMHeadModel. A script's own model keeps the names of its
    nn.Sequential. A damaged checkpoint is skipped, and the one before it is used.

    \b
    elaswave export runs/a
    elaswave export runs/a --step 0 --output initial.safetensors
    elaswave export runs/a --format hf --output my-model
    """
    # Imported here: torch takes a second, which --help and the other commands need not wait for.
    from elaswave.api.export import export_folder, export_safetensors, initial_weights, newest_weights, stored_weights
    from elaswave.checkpoints.checkpoint import checkpoint_of_step
    from elaswave.engine.blueprint import Blueprint

    if not run.is_dir():
        raise RunFolderError(f"there is no run folder {run}; give the --run-dir of an `elaswave train`")
    as_folder = file_format == "hf"
    if as_folder and own_names:
        raise UsageError("--own-names keeps names that transformers does not know; leave it out with --format hf")
    if not as_folder and output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it, or add --format hf")
    if step is None:
        weights = newest_weights(run, ema=ema)
    elif step:
        weights = stored_weights(checkpoint_of_step(run, step), ema=ema)
    else:
        config = saved_config(run)  # the average begins with the initial weights
        if config.model.family == OWN:
            raise UsageError(
                f"the initial weights of {run} are those of a script's own model, which only the script can make, or "
                "of the folder that --hf named; leave --step out for the newest checkpoint, or give the step of "
                "another one"
            )
        weights = initial_weights(Blueprint(config).model, config.run.seed, config.to_dict())
    if as_folder:
        summary = export_folder(run, huggingface_files(run), output, weights=weights)
    else:
        summary = export_safetensors(run, output, weights=weights, own_names=own_names)
    for skipped in summary.skipped:
        say(f"skipped {skipped.folder.name}: {skipped.reason}", err=True)
    if as_json:
        say_json(summary, enc_hook=str)
        return
    say(
        f"{summary.output}: {summary.num_tensors} tensors, {summary.num_parameters:,} parameters, "
        f"{summary.num_bytes / 1e6:,.1f} MB, as of step {summary.step}"
    )
    if summary.config_file:
        say(f"{summary.config_file}: configuration for transformers")
    for note in summary.notes:
        say(note)
