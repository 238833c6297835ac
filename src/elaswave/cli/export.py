"""``elaswave export RUN``: the weights of a run's newest checkpoint as one file that other programs load."""

from pathlib import Path

import click
import msgspec

from elaswave.errors import RunFolderError


@click.command(name="export", short_help="Write a run's weights as one file.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors"]),
    default="safetensors",
    show_default=True,
    help="Format of the file.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, in a folder that exists; an earlier one is replaced.  [default: RUN/export/model.safetensors]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export_command(run: Path, file_format: str, output: Path | None, as_json: bool) -> None:
    """Write the float32 weights of RUN's newest valid checkpoint as one file of named, whole tensors.

    A Llama gets Hugging Face's names and a config.json beside the file, so that transformers loads the folder; other
    models keep elaswave's names. A damaged checkpoint is skipped, and the one before it is used.
    """
    # Imported here: torch takes a second, which --help and the other commands need not wait for.
    from elaswave.state.export import export_safetensors

    if not run.is_dir():
        raise RunFolderError(f"there is no run folder {run}; give the --run-dir of an `elaswave train`")
    assert file_format == "safetensors"
    summary = export_safetensors(run, output)
    for skipped in summary.skipped:
        click.echo(f"skipped {skipped.folder.name}: {skipped.reason}", err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary, enc_hook=str), indent=2))
        return
    click.echo(
        f"{summary.output}: {summary.num_tensors} tensors, {summary.num_parameters:,} parameters, "
        f"{summary.num_bytes / 1e6:,.1f} MB, as of step {summary.step}"
    )
    if summary.config_file:
        click.echo(f"{summary.config_file}: configuration for transformers")
