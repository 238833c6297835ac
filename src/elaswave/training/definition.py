"""What is trained, as every worker of a run needs it: by a script, or by a configuration alone.

A run's configuration says how training is carried out; a `Training` holds what cannot be written into a file: the
layers, the loss, the samples, the optimizer. The forkserver has it before it forks, so that none of it is ever
sent; a process that cannot inherit it gets it pickled.

A configuration alone describes a GPT or Llama on tokens, with AdamW or SGD (`builtin_training`). A family of models is
a function of keyword-only sizes that returns a list of layers and a loss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from elaswave.blocks.shapes import LayerShape
from elaswave.config.schema import Config
from elaswave.config.values import OWN
from elaswave.data.fingerprint import SampleHash
from elaswave.data.samples import Draw, Source, Split, TokenSamples
from elaswave.errors import ConfigError, UsageError
from elaswave.models.gpt import gpt
from elaswave.models.layers import ModelSpec
from elaswave.models.llama import llama
from elaswave.training.optimizer import ConfiguredOptimizer, Optimizer
from elaswave.training.tokens import open_tokens


class Samples(Protocol):
    """Samples by number."""

    sources: tuple[Source, ...]
    """Where the samples for training come from several sources with weights; else empty."""

    def num_samples(self, split: Split) -> int:
        """Counts the samples of a split."""
        ...

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        """Yields hashes of some samples, by which a resumed run knows its data again; there are none where files are
        compared."""
        ...

    def batch(self, draws: Sequence[Draw], split: Split) -> tuple[Any, Any]:
        """Puts samples together.

        Args:
            draws: samples of the split, at least one, in any order. What is random in a sample depends on where it
                stands in the data, and on nothing else.
            split: which part of the data.
        Returns:
            Inputs of the first layer, and targets of the loss.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Args:
        model: layers and loss.
        dtype: that layers compute in.
        make_optimizer: from the tensors of the model; called once in each process.
        open_samples: opens the data; takes a folder for what is made of it.
        loaders: processes beside each worker that make its micro-batches; 0: it makes them itself.
    """

    model: ModelSpec
    dtype: torch.dtype
    make_optimizer: Callable[[tuple[LayerShape, ...]], Optimizer]
    open_samples: Callable[[Path], Samples]
    loaders: int = 0


def evaluation_draws(microbatch: int, size: int, num_samples: int) -> list[Draw]:
    """Lists the samples of a micro-batch of an evaluation: always the same, in their order, from the first one.

    Args:
        microbatch: number in the evaluation.
        size: samples of a micro-batch.
        num_samples: of the split; after the last one the first one comes again.
    """
    numbers = range(microbatch * size, (microbatch + 1) * size)
    return [Draw(number % num_samples, 0, number % num_samples) for number in numbers]


MODELS: dict[str, Callable[..., ModelSpec]] = {"gpt": gpt, "llama": llama}
"""Every family takes vocab_size, num_layers, hidden_size, num_heads, context_length and dropout."""

FAMILY_OPTIONS: dict[str, tuple[str, ...]] = {"gpt": (), "llama": ("num_kv_heads", "intermediate_size", "rope_theta")}
"""What a family takes beyond that."""


def build_model(
    family: str,
    *,
    vocab_size: int,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    context_length: int,
    dropout: float,
    **options: int | float | None,
) -> ModelSpec:
    """Makes the layers and the loss of a model.

    Args:
        family: a key of `MODELS`.
        options: of `FAMILY_OPTIONS`; those of another family are ignored, those of none are refused, so that a
            caller can pass all that a configuration holds.
    Raises:
        ConfigError: an unknown family, or impossible sizes, all of them listed.
        TypeError: an option that no family has.
    """
    if family not in MODELS:
        raise ConfigError([f"model.family: {family!r} is not known, choose one of {', '.join(sorted(MODELS))}"])
    unknown = set(options) - {name for names in FAMILY_OPTIONS.values() for name in names}
    if unknown:
        raise TypeError(f"no model family has the option {', '.join(sorted(unknown))}")
    return MODELS[family](
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        context_length=context_length,
        dropout=dropout,
        **{name: value for name, value in options.items() if name in FAMILY_OPTIONS[family]},
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def builtin_training(config: Config) -> Training:
    """Makes what ``elaswave train`` trains.

    Args:
        config: with its layout resolved.
    Raises:
        ConfigError: impossible sizes, all of them listed.
        UsageError: the model is a script's.
    """
    if config.model.family == OWN:
        raise UsageError(
            "the model of this run is a script's, and is known to the script only: run it with elaswave run SCRIPT.py"
        )
    return Training(
        model=_model(config).with_fences(config.model.fences, config.model.fence_ratios),
        dtype=DTYPES[config.model.dtype],
        make_optimizer=lambda shapes: ConfiguredOptimizer(config.optimizer, config.run.steps),
        open_samples=lambda folder: TokenSamples(open_tokens(config, folder)),
    )


def _model(config: Config) -> ModelSpec:
    model = config.model
    return build_model(
        model.family,
        vocab_size=config.data.resolved_vocab_size,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        context_length=model.context_length,
        dropout=model.dropout,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        rope_theta=model.rope_theta,
    )
