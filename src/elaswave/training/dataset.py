"""A script's map-style dataset as the samples of a run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from elaswave.data.sources import Split
from elaswave.errors import DataError


class DatasetSamples(NamedTuple):
    """Samples of a dataset, by number.

    Args:
        dataset: has a length, and ``dataset[i]`` is a sample.
        collate: makes inputs and targets of a micro-batch from a list of samples.
        eval_dataset: as the dataset, for evaluation; None: there is none.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    eval_dataset: Any = None

    def num_samples(self, split: Split) -> int:
        """Samples of a split."""
        return len(self._of(split))

    def batch(self, indices: Sequence[int], split: Split) -> tuple[Any, Any]:
        """Samples put together; see `elaswave.training.definition.Samples`.

        Raises:
            DataError: collate does not give inputs and targets.
        """
        dataset = self._of(split)
        batch = self.collate([dataset[index] for index in indices])
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"a micro-batch is {_described(batch)}, needed: inputs and targets. Let dataset[i] be a pair of them, "
                "or give Trainer a collate function that makes a pair of a list of samples"
            )
        return batch[0], batch[1]

    def _of(self, split: Split) -> Any:
        return self.dataset if split == "train" else self.eval_dataset


def _described(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)} values"
    return f"of type {type(batch).__name__}"
