"""Which samples belong to which micro-batch: a pure function of (seed, step, micro-batch).

No state, no memory that grows with the data, no file: nothing has to be moved when workers come and go. A data pass
is one keyed permutation of all samples, computed for single positions; a batch that a pass cannot fill goes on with
the next one. Several sources with weights take turns in a fixed pattern, and each has passes of its own.

Source of the permutation: a Feistel network on mixed-radix halves (Black, Rogaway 2002, "Ciphers with arbitrary
finite domains", with addition in place of exclusive or) plus cycle walking.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from elaswave.hashing import key64, mix64

_NUM_ROUNDS = 8
"""Half rounds; Luby and Rackoff (1988) need four for a random-looking permutation, small domains profit from more."""


class Draw(NamedTuple):
    """One sample of a run, and where in the data it stands."""

    sample: int
    """Its number in the data; samples of several sources are counted through."""
    data_pass: int
    """Number of the pass over its source, from 0."""
    position: int
    """In the pass; where there are several sources, plus the number of samples of the sources before."""


class Source(NamedTuple):
    """One of several sources of samples."""

    name: str
    num_samples: int
    weight: float
    """Its share of the samples that a run takes is this, divided by the weights of all sources."""


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, data_pass: int) -> tuple[int, ...]:
    return tuple(key64(seed, "data", data_pass, index) for index in range(_NUM_ROUNDS))


def permuted(position: int, num_samples: int, seed: int, data_pass: int) -> int:
    """Computes the sample at one position of a data pass.

    Args:
        position: in [0, num_samples).
        num_samples: length of the permutation.
        seed: of the data order.
        data_pass: number of the pass, from 0; each has its own order.
    Returns:
        A sample in [0, num_samples); a permutation of the positions.
    Raises:
        ValueError: a position outside the range.
    """
    if not 0 <= position < num_samples:
        raise ValueError(f"position {position} is outside [0, {num_samples})")
    # The domain rows * columns is num_samples or a little more, so walking is rare: it exceeds num_samples by less
    # than rows, about the square root.
    rows = math.isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    keys = _round_keys(seed, data_pass)
    while True:
        row, column = divmod(position, columns)
        for index in range(0, _NUM_ROUNDS, 2):
            row = (row + mix64(keys[index] + column)) % rows
            column = (column + mix64(keys[index + 1] + row)) % columns
        position = row * columns + column
        if position < num_samples:
            return position


class Sampler:
    """The samples of every micro-batch of every step.

    Args:
        seed: of the data order.
        num_samples: samples of a data pass.
        samples_per_microbatch: B.
        num_microbatches: M, of a step.
    Raises:
        ValueError: a count below 1.
    """

    def __init__(self, seed: int, num_samples: int, samples_per_microbatch: int, num_microbatches: int) -> None:
        counts = {
            "num_samples": num_samples,
            "samples_per_microbatch": samples_per_microbatch,
            "num_microbatches": num_microbatches,
        }
        problems = [f"{name} is {count}" for name, count in counts.items() if count < 1]
        if problems:
            raise ValueError(f"a sampler needs counts of at least 1, but {', '.join(problems)}")
        self.seed = seed
        self.num_samples = num_samples
        self.samples_per_microbatch = samples_per_microbatch
        self.num_microbatches = num_microbatches

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """Lists the samples of one micro-batch, in order.

        Args:
            step: from 1.
            microbatch: in [0, num_microbatches).
        Raises:
            ValueError: a step or micro-batch outside its range.
        """
        return [draw.sample for draw in self.draws(step, microbatch)]

    def draws(self, step: int, microbatch: int) -> list[Draw]:
        """Lists the samples of one micro-batch, in order, with where they stand in the data.

        Args:
            step: from 1.
            microbatch: in [0, num_microbatches).
        Raises:
            ValueError: a step or micro-batch outside its range.
        """
        if step < 1 or not 0 <= microbatch < self.num_microbatches:
            raise ValueError(
                f"step {step}, micro-batch {microbatch}: steps count from 1, micro-batches from 0 to "
                f"{self.num_microbatches - 1}"
            )
        first = ((step - 1) * self.num_microbatches + microbatch) * self.samples_per_microbatch
        return [self._draw(first + index) for index in range(self.samples_per_microbatch)]

    def cursor(self, step: int) -> tuple[int, int]:
        """Computes where the data stand once `step` steps are done.

        Args:
            step: number of steps done, from 0.
        Returns:
            (data pass, position in it) of the next sample.
        """
        return divmod(step * self.num_microbatches * self.samples_per_microbatch, self.num_samples)

    def _draw(self, number: int) -> Draw:
        """Finds what the run takes as its sample number `number`, from 0."""
        data_pass, position = divmod(number, self.num_samples)
        return Draw(permuted(position, self.num_samples, self.seed, data_pass), data_pass, position)


class MixedSampler(Sampler):
    """The samples of every micro-batch of every step, from several sources with weights.

    Of any n samples that follow each other, a source with the share s gives n s, to within one for each source before
    it, plus one. Which source gives a sample depends on nothing but the sample's number.

    Args:
        seed: of the data order.
        sources: at least one; their names differ.
        samples_per_microbatch: B.
        num_microbatches: M, of a step.
    Raises:
        ValueError: a count below 1, or a weight that is no positive number.
    """

    def __init__(
        self, seed: int, sources: Sequence[Source], samples_per_microbatch: int, num_microbatches: int
    ) -> None:
        num_samples = sum(source.num_samples for source in sources)
        super().__init__(seed, num_samples, samples_per_microbatch, num_microbatches)
        for source in sources:
            if source.num_samples < 1 or not 0 < source.weight < math.inf:
                raise ValueError(
                    f"source {source.name} has {source.num_samples} samples and weight {source.weight}: it needs one "
                    "sample at least, and a weight above 0"
                )
        self._sources = tuple(sources)
        self._units = share_units([source.weight for source in sources])
        self._seeds = [key64(seed, source.name) for source in sources]

    def _draw(self, number: int) -> Draw:
        index, number = choose_source(number, self._units)
        size = self._sources[index].num_samples
        before = sum(source.num_samples for source in self._sources[:index])
        data_pass, position = divmod(number, size)
        return Draw(before + permuted(position, size, self._seeds[index], data_pass), data_pass, before + position)


def share_units(weights: Sequence[float]) -> tuple[int, ...]:
    """Converts weights to whole numbers, so that no rounding depends on a machine: their shares times 2**32, at least
    1."""
    total = sum(weights)
    return tuple(max(1, round(weight / total * 2**32)) for weight in weights)


def choose_source(number: int, units: Sequence[int]) -> tuple[int, int]:
    """Chooses which source gives a sample of the run.

    Of the first n samples the first source gives floor(n u / U), with u its units and U those of all; of the rest the
    second source gives its share of the units that are left, and so on.

    Args:
        number: of the sample, from 0.
        units: of the sources, see `share_units`.
    Returns:
        (index of the source, number of the sample among those of the source, from 0).
    """
    left = sum(units)
    for index, unit in enumerate(units):
        taken = number * unit // left
        if (number + 1) * unit // left > taken:
            return index, taken
        number -= taken
        left -= unit
    raise AssertionError("the last source takes all that is left")


def sample_order(
    seed: int, num_samples: int, step: int, microbatch: int, size: int, num_microbatches: int
) -> list[int]:
    """Lists the samples that one micro-batch of a run holds, so that another program can train on the same ones.

    Args:
        seed: ``run.seed``.
        num_samples: ``len(dataset)``.
        step: from 1.
        microbatch: in [0, num_microbatches).
        size: ``batch.microbatch_size``, samples of a micro-batch.
        num_microbatches: ``batch.num_microbatches``, of a step.
    Returns:
        Indices into the dataset, in order, as many as `size`.
    Raises:
        ValueError: a count below 1, or a step or micro-batch outside its range.
    """
    return Sampler(seed, num_samples, size, num_microbatches).microbatch(step, microbatch)
