"""The tokens that a configuration names. No torch: the launcher checks them too."""

from pathlib import Path

from elaswave.config.schema import Config
from elaswave.data.samples import TokenSource, open_source


def open_tokens(config: Config, cache_dir: Path) -> TokenSource:
    """Opens the tokens of a run.

    Args:
        config: of the run.
        cache_dir: where generated text is kept.
    Raises:
        DataError: see `elaswave.data.samples.open_source`.
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
