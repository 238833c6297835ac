"""A person's own data: map-style datasets, one or several with weights, and how their samples become micro-batches.

A dataset answers ``dataset[i]``. The generators of torch, numpy and Python are seeded before each such call, by where
the sample stands in the data, and once more before the micro-batch is put together. So an augmentation draws the same
whichever process makes the sample, whatever that process has made before.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elaswave.config.values import plain
from elaswave.data.fingerprint import SampleHash
from elaswave.data.samples import Draw, Source, Split
from elaswave.devices.interface import seed_everything
from elaswave.errors import SIGNALS, DataError
from elaswave.hashing import key64
from elaswave.models.admission import why_not_computed
from elaswave.training.raised import said

Collate = Callable[[list[Any]], Any]

LABEL_KEYS = ("labels", "label")
"""In a micro-batch that is a dictionary, the targets; the other entries are the inputs."""
_PURPOSES: dict[Split, str] = {"train": "sample", "validation": "validation sample"}


class UserDataError(Exception):
    """An exception inside a user's dataset or collate function; its cause is the original.

    Args:
        place: what was asked for: ``dataset[17]``.
        cause: what was raised.
    """

    def __init__(self, place: str, cause: BaseException) -> None:
        self.place = place
        super().__init__(f"{said(cause)} (in {place})")


class _Part(NamedTuple):
    """One dataset of several."""

    name: str
    """As the user would write it, for messages: ``dataset["books"]``."""
    dataset: Any
    start: int
    """Its first sample, counted through."""
    num_samples: int


class DatasetSamples:
    """Samples of own datasets; see `elaswave.training.definition.Samples`.

    Args:
        dataset: map-style: it has ``__len__`` and ``__getitem__``; or several of them with weights, as a dictionary
            from a name to (dataset, weight).
        collate: makes a micro-batch of a list of samples: a pair (inputs, targets), or a dictionary with the targets
            under one of `LABEL_KEYS`.
        eval_dataset: map-style, for evaluation; None: there is none.
    Raises:
        DataError: says what is wrong with a dataset, and what to do.
    """

    def __init__(self, dataset: Any, collate: Collate = default_collate, eval_dataset: Any = None) -> None:
        if not callable(collate):
            raise DataError(f"collate: got {_kind(collate)}, needed a function that takes a list of samples")
        self._collate = collate
        self._seed = 0
        self.sources: tuple[Source, ...] = ()
        """Name, length and weight of several datasets; empty for a single one."""
        weights: list[float] = []
        parts = {"dataset": dataset}
        if isinstance(dataset, Mapping):
            parts, weights = _weighted(dataset)
        self._parts: dict[Split, list[_Part]] = {"train": _laid_out(parts)}
        self._parts["validation"] = [] if eval_dataset is None else _laid_out({"eval_dataset": eval_dataset})
        if weights:
            self.sources = tuple(
                Source(str(name), part.num_samples, weight)
                for name, part, weight in zip(dataset, self._parts["train"], weights, strict=True)
            )

    def seeded(self, seed: int) -> "DatasetSamples":
        """Returns the same data with the randomness of a run.

        Args:
            seed: of the run; 0 unless another one is given.
        """
        samples = copy.copy(self)
        samples._seed = seed
        return samples

    def num_samples(self, split: Split) -> int:
        """Counts the samples of a split; the number is 0 where there is no dataset for it."""
        return sum(part.num_samples for part in self._parts[split])

    @property
    def parts(self) -> dict[str, Any]:
        """All datasets, and the collate function, by the names that a person knows them by."""
        parts = [part for split in self._parts.values() for part in split]
        return {**{part.name: part.dataset for part in parts}, "collate": self._collate}

    @property
    def sizes(self) -> dict[str, int]:
        """Samples for training, by the name of their dataset."""
        return {part.name: part.num_samples for part in self._parts["train"]}

    def require_samples(self, microbatch_size: int) -> None:
        """Refuses data that a micro-batch would hold twice.

        Raises:
            DataError: a dataset has fewer samples than a micro-batch.
        """
        for part in self._parts["train"]:
            if part.num_samples < microbatch_size:
                raise DataError(
                    f"{part.name} has {part.num_samples} samples, fewer than one micro-batch of "
                    f"batch.microbatch_size = {microbatch_size}: give more samples, or make micro-batches smaller"
                )

    def batch(self, draws: Sequence[Draw], split: Split) -> tuple[Any, Any]:
        """See `elaswave.training.definition.Samples`.

        Raises:
            UserDataError: the dataset or the collate function has raised an exception.
            DataError: what they make is no pair of tensors.
        """
        samples = [self._sample(draw, split) for draw in draws]
        seed_everything(self._seed, "collate", _PURPOSES[split], draws[0].data_pass, draws[0].position)
        try:
            collated = self._collate(samples)
        except BaseException as error:  # also sys.exit: it ends no process, and is told
            raise UserDataError(f"collate of {', '.join(self._named(draw, split) for draw in draws)}", error) from error
        return as_pair(collated)

    def _sample(self, draw: Draw, split: Split) -> Any:
        seed_everything(self._seed, _PURPOSES[split], draw.data_pass, draw.position)
        part = self._part(draw, split)
        try:
            return part.dataset[draw.sample - part.start]
        except BaseException as error:  # also sys.exit: it ends no process, and is told
            raise UserDataError(self._named(draw, split), error) from error

    def _part(self, draw: Draw, split: Split) -> _Part:
        parts = self._parts[split]
        return next(part for part in parts if draw.sample < part.start + part.num_samples)

    def _named(self, draw: Draw, split: Split) -> str:
        part = self._part(draw, split)
        return f"{part.name}[{draw.sample - part.start}]"

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        """Yields hashes of samples that are evenly spread over the data, the first and the last among them; see
        `hash_of`.

        They come in an order in which the first few are spread as well. A sample that cannot be had is left out:
        training will say so, if it ever comes to it.
        """
        num_samples = self.num_samples("train")
        last = max(1, min(num_hashes, num_samples) - 1)
        spread = {(num_samples - 1) * index // last for index in range(last + 1)}
        for sample in sorted(spread, key=key64):
            try:
                pair = self.batch([Draw(sample, -1, sample)], "train")
            except (UserDataError, DataError) as error:
                if isinstance(error.__cause__, SIGNALS):
                    raise
                continue
            yield SampleHash(sample=sample, hash=hash_batch(pair))


def as_pair(collated: Any) -> tuple[Any, Any]:
    """Returns a micro-batch as inputs and targets.

    Args:
        collated: what a collate function has made.
    Returns:
        (inputs, targets), each a tensor, or tuples, lists and dictionaries of tensors and None.
    Raises:
        DataError: it is something else; names the place.
    """
    if isinstance(collated, Mapping):
        keys = [key for key in LABEL_KEYS if key in collated]
        if len(keys) != 1:
            raise DataError(
                f"a micro-batch is a dictionary with the keys {', '.join(map(repr, collated))}; needed one of "
                f"{' or '.join(map(repr, LABEL_KEYS))} for the targets: name it so, or give a collate function that "
                "returns (inputs, targets)"
            )
        pair: tuple[Any, Any] = ({key: value for key, value in collated.items() if key != keys[0]}, collated[keys[0]])
    elif isinstance(collated, tuple | list) and len(collated) == 2:
        pair = (collated[0], collated[1])
    else:
        length = f" of {len(collated)} values" if isinstance(collated, tuple | list) else ""
        raise DataError(
            f"a micro-batch is {_kind(collated)}{length}; needed a pair (inputs, targets): let dataset[i] return one, "
            "or give a collate function that does"
        )
    for place, leaf in _leaves_of_pair(pair):
        if not isinstance(leaf, torch.Tensor):
            raise DataError(
                f"{place} of a micro-batch is {_kind(leaf)}; needed a tensor: leave it out of the samples, or give a "
                "collate function that makes a tensor of it"
            )
        if leaf.layout != torch.strided or leaf.device.type != "cpu":
            raise DataError(
                f"{place} of a micro-batch is a tensor of layout {leaf.layout} on {leaf.device}; needed a dense tensor "
                "on the CPU: elaswave moves it itself"
            )
        if leaf.is_quantized:
            raise DataError(f"{place} of a micro-batch is {why_not_computed(leaf)}")
    return _plain(pair[0]), _plain(pair[1])


def _plain(value: Any) -> Any:
    """Returns the same with plain containers: a library's own kind of dictionary becomes one of Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return value


def _leaves_of_pair(pair: tuple[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield from _leaves_of(pair[0], "inputs")
    yield from _leaves_of(pair[1], "targets")


def _leaves_of(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields what stands in tuples, lists and dictionaries, but for None, each with its place."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves_of(inner, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for index, inner in enumerate(value):
            yield from _leaves_of(inner, f"{name}[{index}]")
    elif value is not None:
        yield name, value


def hash_batch(pair: tuple[Any, Any]) -> str:
    """Computes the hash of a micro-batch: of the place, type, shape and bytes of each of its tensors, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for place, leaf in _leaves_of_pair(pair):
        digest.update(f"{place} {leaf.dtype} {list(leaf.shape)}\n".encode())
        digest.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _weighted(mixture: Mapping[Any, Any]) -> tuple[dict[str, Any], list[float]]:
    """Datasets by their name for messages, and their weights."""
    if not mixture:
        raise DataError("dataset: an empty dictionary; needed a dataset, or a dictionary of name: (dataset, weight)")
    parts, weights = {}, []
    for name, value in mixture.items():
        place = f"dataset[{name!r}]"
        weight = plain(value[1]) if isinstance(value, tuple | list) and len(value) == 2 else None
        if not isinstance(weight, int | float):
            raise DataError(
                f"{place} is {_kind(value)}; a dictionary mixes datasets, and its values are (dataset, weight): write "
                f"{{{name!r}: (dataset, 1.0), ...}}, or give the one dataset that is meant"
            )
        weight = float(weight)
        if not 0 < weight < float("inf"):
            raise DataError(f"{place} has weight {weight}; needed a number above 0: leave out what is not wanted")
        parts[place] = value[0]
        weights.append(weight)
    return parts, weights


def _laid_out(datasets: Mapping[str, Any]) -> list[_Part]:
    """Datasets behind each other."""
    parts: list[_Part] = []
    start = 0
    for name, dataset in datasets.items():
        dataset = _as_tensors(dataset)
        num_samples = _length(dataset, name)
        parts.append(_Part(name, dataset, start, num_samples))
        start += num_samples
    return parts


def _as_tensors(dataset: Any) -> Any:
    """Returns a Hugging Face dataset in its own torch format, unless it has been given one: lists then become
    tensors."""
    given = getattr(dataset, "format", None)
    if isinstance(given, Mapping) and "type" in given and given["type"] is None and hasattr(dataset, "with_format"):
        return dataset.with_format("torch")
    return dataset


def _length(dataset: Any, name: str) -> int:
    """Returns the number of samples of a map-style dataset.

    Raises:
        DataError: it is none, or it is empty.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"{name} is a DataLoader; needed the dataset itself: give {name}=loader.dataset, and its collate_fn as "
            "collate=, its num_workers as loaders="
        )
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if is_iterable:
        what = "can only be iterated over" if hasattr(dataset, "__iter__") else "has no __getitem__"
        raise DataError(
            f"{name} is {_kind(dataset)}, which {what}; needed a map-style dataset, with __len__ and __getitem__, "
            "since any worker must be able to make any sample again: write the samples into a list or a file once "
            "(Hugging Face: Dataset.from_generator; text: elaswave data tokenize)"
        )
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise DataError(
            f"{name} is {_kind(dataset)}, which has no length ({error}); needed __len__, the number of samples of a "
            "pass over the data"
        ) from error
    if num_samples < 1:
        raise DataError(f"{name} is empty: len({name}) is {num_samples}; needed one sample at least")
    return num_samples


def _kind(value: Any) -> str:
    """Names a value's type, for messages."""
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
