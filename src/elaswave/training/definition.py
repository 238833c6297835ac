"""What is trained, as every worker of a run needs it.

A run's configuration says how training is carried out; a `Training` holds what cannot be written into a file: the
layers, the loss, the samples, the optimizer. The forkserver has it before it forks, so that none of it is ever
sent; a process that cannot inherit it gets it pickled.

Which samples an evaluation looks at. No torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from elaswave.blocks.shapes import LayerShape
from elaswave.data.fingerprint import SampleHash
from elaswave.data.sampler import Draw, Source
from elaswave.data.sources import Split
from elaswave.models.layers import ModelSpec
from elaswave.training.optimizer import Optimizer


class Samples(Protocol):
    """Samples by number."""

    sources: tuple[Source, ...]
    """Where the samples for training come from several sources with weights; else empty."""

    def num_samples(self, split: Split) -> int:
        """Samples of a split."""
        ...

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        """Hashes of some samples, by which a resumed run knows its data again; none where files are compared."""
        ...

    def batch(self, draws: Sequence[Draw], split: Split) -> tuple[Any, Any]:
        """Samples put together.

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
    """The samples of a micro-batch of an evaluation: always the same, in their order, from the first one.

    Args:
        microbatch: number in the evaluation.
        size: samples of a micro-batch.
        num_samples: of the split; after the last one the first one comes again.
    """
    numbers = range(microbatch * size, (microbatch + 1) * size)
    return [Draw(number % num_samples, 0, number % num_samples) for number in numbers]
