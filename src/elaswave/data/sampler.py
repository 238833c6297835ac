"""Which samples belong to which micro-batch: a pure function of (seed, step, micro-batch).

No state, no memory that grows with the data, no file: nothing has to be moved when workers come and go. A data pass
is one keyed permutation of all samples, computed for single positions; a batch that a pass cannot fill goes on with
the next one.

Source of the permutation: a Feistel network on mixed-radix halves (Black, Rogaway 2002, "Ciphers with arbitrary
finite domains", with addition in place of exclusive or) plus cycle walking.
"""

import functools
import math

from elaswave.hashing import key64, mix64

_NUM_ROUNDS = 8
"""Half rounds; Luby and Rackoff (1988) need four for a random-looking permutation, small domains profit from more."""


@functools.lru_cache(maxsize=16)
def _round_keys(seed: int, data_pass: int) -> tuple[int, ...]:
    return tuple(key64(seed, "data", data_pass, index) for index in range(_NUM_ROUNDS))


def permuted(position: int, num_samples: int, seed: int, data_pass: int) -> int:
    """The sample at one position of a data pass.

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
        """The samples of one micro-batch, in order.

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
        return [self._sample(first + index) for index in range(self.samples_per_microbatch)]

    def cursor(self, step: int) -> tuple[int, int]:
        """Where the data stand once `step` steps are done.

        Args:
            step: number of steps done, from 0.
        Returns:
            (data pass, position in it) of the next sample.
        """
        return divmod(step * self.num_microbatches * self.samples_per_microbatch, self.num_samples)

    def _sample(self, position: int) -> int:
        data_pass, position_in_pass = divmod(position, self.num_samples)
        return permuted(position_in_pass, self.num_samples, self.seed, data_pass)
