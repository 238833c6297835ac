"""The training that a configuration alone describes: a GPT or Llama on tokens, with AdamW or SGD."""

import torch

from elaswave.config.own import OWN
from elaswave.config.schema import Config
from elaswave.errors import UsageError
from elaswave.models.layers import ModelSpec
from elaswave.models.registry import build_model
from elaswave.training.definition import Training
from elaswave.training.optimizer import ConfiguredOptimizer
from elaswave.training.tokens import TokenSamples, open_tokens

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
