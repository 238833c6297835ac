"""The tokens that a configuration names, and the order of their samples. No torch: the launcher checks them too."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elaswave.config.schema import Config
from elaswave.data.sampler import MixedSampler, Sampler, Source
from elaswave.data.sources import TokenSource, open_source

if TYPE_CHECKING:
    pass


def open_tokens(config: Config, cache_dir: Path) -> TokenSource:
    """Opens the tokens of a run.

    Args:
        config: of the run.
        cache_dir: where generated text is kept.
    Raises:
        DataError: see `elaswave.data.sources.open_source`.
    """
    data = config.data
    source = open_source(
        data.source,
        vocab_size=data.vocab_size,
        context_length=config.model.context_length,
        validation_fraction=data.validation_fraction,
        cache_dir=cache_dir,
    )
    if config.run.eval_every:
        source.require_sample("validation")
    return source


def sampler_of(config: Config, num_samples: int, sources: Sequence[Source] = ()) -> Sampler:
    """Makes the sampler that says which samples make up which micro-batch of a run's training.

    Args:
        config: of the run.
        num_samples: samples of a data pass.
        sources: where they come from, if these are several with weights.
    """
    batch = config.batch
    if sources:
        return MixedSampler(config.run.seed, sources, batch.microbatch_size, batch.num_microbatches)
    return Sampler(config.run.seed, num_samples, batch.microbatch_size, batch.num_microbatches)
