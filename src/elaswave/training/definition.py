"""What is trained, as every worker of a run needs it.

A run's configuration says how training is carried out; a `Training` holds what cannot be written into a file: the
layers, the loss, the samples, the optimizer. The template process has it before it forks, so that none of it is ever
sent; a process that cannot inherit it gets it pickled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from elaswave.data.sources import Split
from elaswave.models.layers import ModelSpec
from elaswave.state.shapes import LayerShape
from elaswave.training.optimizer import Optimizer


class Samples(Protocol):
    """Samples by number."""

    def num_samples(self, split: Split) -> int:
        """Samples of a split."""
        ...

    def batch(self, indices: Sequence[int], split: Split) -> tuple[Any, Any]:
        """Samples put together.

        Args:
            indices: samples of the split, in any order.
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
    """

    model: ModelSpec
    dtype: torch.dtype
    make_optimizer: Callable[[tuple[LayerShape, ...]], Optimizer]
    open_samples: Callable[[Path], Samples]
