"""``elaswave train --hf``: a transformers checkpoint and a text as a `Trainer`."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from elaswave.api.trainer import Trainer
from elaswave.data.samples import PYTHON_DOCS, MappedTokens, Split, open_source, write_python_docs
from elaswave.data.token_files import SUFFIX
from elaswave.errors import RunFolderError, UsageError
from elaswave.models.huggingface.model import HuggingFaceModel, hf
from elaswave.observability.run_folder import FINE_TUNING_FILE, HUGGINGFACE_DIR
from elaswave.untrusted import read_json, reason

DEFAULTS: Mapping[str, Any] = {"optimizer.lr": 2e-5, "optimizer.betas": (0.9, 0.999), "optimizer.weight_decay": 0.01}
"""Of the configuration, where it says nothing else: a model that is trained already takes smaller steps."""
CONTEXT_LENGTH_MAX = 1024
"""Tokens of a sample, unless more are asked for."""
_TOKENIZER = "tokenizer.json"


class FineTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was given; kept in the run's folder, so that the run can go on."""

    folder: str
    """With the checkpoint."""
    data: str
    """A text, files of tokens, or ``python-docs``."""
    context_length: int | None = None
    """Tokens of a sample; None: as many as the model takes, up to `CONTEXT_LENGTH_MAX`."""
    validation_fraction: float = 0.1
    """Share of the tokens, at the end, that is for evaluations."""
    dtype: str | None = None
    """As of `hf`."""


def saved_fine_tuning(run_dir: Path) -> FineTuning:
    """Reads what the command was given that began a run.

    Raises:
        RunFolderError: the file is not there, or damaged.
    """
    path = run_dir / HUGGINGFACE_DIR / FINE_TUNING_FILE
    try:
        return read_json(path, FineTuning)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read ({reason(error)}); give --hf and --data again") from error


class Windows:
    """Windows of tokens as samples: the tokens are the inputs, and the labels, which the loss shifts.

    Args:
        tokens: the source.
        split: of it.
    """

    def __init__(self, tokens: MappedTokens, split: Split) -> None:
        self._tokens, self._split = tokens, split

    def __len__(self) -> int:
        return self._tokens.num_samples(self._split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = self._tokens.batch([index], self._split)
        return inputs[0], inputs[0]


def trainer_of(
    given: FineTuning, *, settings: Mapping[str, Any] = {}, run_dir: Path | None = None, resume: bool = False
) -> Trainer:
    """Makes the trainer of a command.

    Args:
        given: checkpoint and data.
        settings: of the configuration, by dotted key or by section.
        run_dir, resume: as of `Trainer`.
    Raises:
        UsageError: the checkpoint, its tokenizer or the data cannot be used.
        DataError: the text or the file of tokens cannot.
    """
    layers = hf(given.folder, dtype=given.dtype)
    tokens = _tokens(given, layers)
    layers.files = {**layers.files, FINE_TUNING_FILE: msgspec.json.format(msgspec.json.encode(given), indent=2)}
    has_validation = tokens.num_samples("validation") > 0
    return Trainer(
        layers,
        layers.loss,
        Windows(tokens, "train"),
        config={**(DEFAULTS if not resume else {}), **settings},
        eval_dataset=Windows(tokens, "validation") if has_validation else None,
        run_dir=run_dir,
        resume=resume,
    )


def _tokens(given: FineTuning, layers: HuggingFaceModel) -> MappedTokens:
    """Makes the tokens of the text, or of the files, as the model takes them."""
    positions, vocab_size = layers.config.max_position_embeddings, layers.config.vocab_size
    context_length = given.context_length or min(positions, CONTEXT_LENGTH_MAX)
    if context_length > positions:
        raise UsageError(
            f"--context-length {context_length} does not fit the model, which has {positions} positions "
            f"(max_position_embeddings in {Path(given.folder) / 'config.json'}): give at most as many"
        )

    def opened(source: str, folder: Path) -> MappedTokens:
        return open_source(
            source,
            vocab_size=vocab_size,
            context_length=context_length,
            validation_fraction=given.validation_fraction,
            cache_dir=folder,
        )

    # What is mapped stays readable without its file.
    with tempfile.TemporaryDirectory(prefix="elaswave-tokens-") as scratch:
        if given.data.endswith(SUFFIX):
            return opened(given.data, Path(scratch))
        made = Path(scratch) / f"tokens{SUFFIX}"
        _tokenize(given, vocab_size, made)
        return opened(str(made), Path(scratch))


def _tokenize(given: FineTuning, vocab_size: int, output: Path) -> None:
    """Makes tokens of the text with the checkpoint's own tokenizer."""
    from elaswave.data.tokenize import load_tokenizer, tokenize

    path = Path(given.folder) / _TOKENIZER
    if not path.is_file():
        raise UsageError(
            f"{given.folder} has no {_TOKENIZER}, needed to make tokens of {given.data}. Write it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(DIR), or make a .bin file of tokens with another "
            "tokenizer (elaswave data tokenize) and give that as --data"
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would keep this process from forking
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"{path} has {tokenizer.vocab_size} tokens, and the model {vocab_size} (vocab_size in its config.json): "
            "they are not of one model"
        )
    text = write_python_docs(output.parent) if given.data == PYTHON_DOCS else Path(given.data)
    tokenize([text], tokenizer, output)
