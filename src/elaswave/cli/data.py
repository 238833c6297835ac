"""``elaswave data``: makes files that ``data.source`` reads."""

import sys
import time
from pathlib import Path

import click

from elaswave.cli.groups import LazyGroup
from elaswave.observability.output import say, say_json

_SAY_EVERY_S = 2.0
"""Between two lines about texts that take long."""


@click.group(
    name="data",
    cls=LazyGroup,
    places={"tokenize": "elaswave.cli.data:tokenize_command"},
    short_help="Make files of tokens from text.",
)
def data_group() -> None:
    """Make the files that data.source reads."""


@click.command(name="tokenize", short_help="Make a file of tokens from texts.")
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    "tokenizer_file",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The tokenizer.json of a Hugging Face model.",
)
@click.option(
    "--output",
    required=True,
    metavar="FILE.bin",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, in a folder that exists; an earlier one is replaced.",
)
@click.option("--append-eos", metavar="TOKEN", help="Follow each text with this token, such as '<|endoftext|>'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; progress goes to stderr.")
def tokenize_command(
    texts: tuple[Path, ...], tokenizer_file: Path, output: Path, append_eos: str | None, as_json: bool
) -> None:
    """Make FILE.bin from UTF-8 texts, for data.source: tokens of 2 bytes, or of 4 where the vocabulary has more than
    65,536. The file says how many different tokens there are, so that data.vocab_size can be left out.

    Needs the package tokenizers: pip install 'elaswave[tokenize]'.

    \b
    elaswave data tokenize book.txt --tokenizer tokenizer.json --output book.bin
    elaswave data tokenize a.txt b.txt --tokenizer tokenizer.json \\
      --append-eos '<|endoftext|>' --output shards/0.bin
    elaswave train --set 'data.source=shards/*.bin'
    """
    from elaswave.data.token_files import SUFFIX
    from elaswave.data.tokenize import load_tokenizer, tokenize

    if output.suffix != SUFFIX:
        raise click.UsageError(f"--output {output}: data.source takes a file for tokens if its name ends in {SUFFIX}")
    tokenizer = load_tokenizer(tokenizer_file)
    append = None if append_eos is None else tokenizer.id_of(append_eos)
    made = tokenize(texts, tokenizer, output, append=append, on_progress=_Progress())
    if as_json:
        document = {"output": str(output), **made._asdict()}
        say_json(document)
        return
    say(
        f"{output}: {made.num_tokens:,} tokens of {made.token_bytes} bytes from {made.num_text_bytes:,} bytes of text; "
        f"vocabulary of {made.vocab_size:,}"
    )


class _Progress:
    """Says on standard error how far it has come, when it takes long."""

    def __init__(self) -> None:
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, num_text_bytes: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            rate = num_text_bytes / (now_s - self._began_s)
            say(
                f"{num_text_bytes / 1e6:,.0f} MB of text, {num_tokens:,} tokens ({rate / 1e6:,.1f} MB/s)",
                file=sys.stderr,
            )
