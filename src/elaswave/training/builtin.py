"""The training that a configuration alone describes: a GPT or Llama on tokens, with AdamW or SGD.

The model families by name. A family is a function of keyword-only sizes that returns a list of layers and a loss.
"""

from collections.abc import Callable

import torch

from elaswave.config.schema import Config
from elaswave.config.values import OWN
from elaswave.errors import ConfigError, UsageError
from elaswave.models.gpt import gpt
from elaswave.models.layers import ModelSpec
from elaswave.models.llama import llama
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer
from elaswave.training.tokens import TokenSamples, open_tokens

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
    """The layers and the loss of a model.

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
    """What ``elaswave train`` trains.

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
