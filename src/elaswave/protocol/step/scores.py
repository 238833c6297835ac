"""What losses and metrics say of a step: means that depend neither on the layout nor on any order.

A loss has one slot per micro-batch, which one worker fills. Of a metric only the sum is needed, so it travels as an
exact integer: a value is rounded once, to a multiple of 2**-160, and integers have no order. All of it lies in the part
of a vote that is added, and is added in the same way after an evaluation. No IO here.

A loss that is a mean over its micro-batch has the mean over micro-batches for its own. One that comes with a count
(tokens that are not ignored) is divided by the sum of all counts, C; the mean gradients, which were made before C was
known, are then multiplied by N / C.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elaswave.hashing import MASK64

AUX_LOSS = "aux_loss"
"""Name under which auxiliary losses are reported; no metric may have it."""

_FRACTION_BITS = 160
_LIMB_BITS = 32
_NUM_LIMBS = 10
_ALL_BITS = _LIMB_BITS * _NUM_LIMBS
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_LARGEST = 2.0**128
"""Values from here on count as not finite: the sum of 2**31 smaller ones fits its limbs."""
_METRIC_WORDS = 2 + _NUM_LIMBS
_COUNT_WORDS = 2
_FLOAT, _WORD = struct.Struct("<d"), struct.Struct("<q")


class MetricSum(NamedTuple):
    """The exact sum of what a metric said of some micro-batches."""

    units: int = 0
    """Of 2**-160."""
    count: int = 0  # type: ignore[assignment]  # hides tuple.count
    """What the sum is to be divided by."""
    num_bad: int = 0
    """Values that are not finite, or not below 2**128."""

    def plus(self, total: float, count: int) -> "MetricSum":
        """Returns the sum with one more micro-batch."""
        # In this form nan is bad too.
        if not abs(total) < _LARGEST:
            return MetricSum(self.units, self.count + count, self.num_bad + 1)
        # Each value is rounded by itself and then added exactly: neither order nor grouping can show.
        numerator, denominator = total.as_integer_ratio()
        return MetricSum(self.units + (numerator << _FRACTION_BITS) // denominator, self.count + count, self.num_bad)

    def merged(self, other: "MetricSum") -> "MetricSum":
        """Returns both sums as one."""
        return MetricSum(self.units + other.units, self.count + other.count, self.num_bad + other.num_bad)

    def over(self, count: int) -> float:
        """Divides the sum by a count; the result is nan if a value was bad, or nothing was counted."""
        if self.num_bad or count == 0:
            return math.nan
        # Python divides whole numbers of any length with a single rounding.
        return self.units / (count << _FRACTION_BITS)

    def words(self) -> list[int]:
        """Encodes the sum as integers; those of all workers may be added in any order."""
        if self == _NOTHING:
            return [0] * _METRIC_WORDS  # of most workers
        # Two's complement, so that limbs of negative sums are added like all others.
        units = self.units % (1 << _ALL_BITS)
        limbs = [(units >> (_LIMB_BITS * index)) & _LIMB_MASK for index in range(_NUM_LIMBS)]
        return [self.num_bad, self.count, *limbs]


_NOTHING = MetricSum()


def _metric_from(words: Sequence[int]) -> MetricSum:
    num_bad, count, *limbs = words
    # Limbs are added over workers without carrying, so each may be longer than its bits.
    units = sum(limb << (_LIMB_BITS * index) for index, limb in enumerate(limbs)) % (1 << _ALL_BITS)
    return MetricSum(units - (1 << _ALL_BITS) if units >> (_ALL_BITS - 1) else units, count, num_bad)


class Scores(NamedTuple):
    """What one worker knows of losses and metrics."""

    losses: Mapping[int, float]
    """By micro-batch: the mean, or the total where it has a count."""
    count: int = 0  # type: ignore[assignment]  # hides tuple.count
    """Sum of the counts that came with losses."""
    num_counted: int = 0
    """Losses that came with a count."""
    metrics: Sequence[MetricSum] = ()
    """In the order of their names; none or all."""
    aux_loss: MetricSum = _NOTHING
    """Auxiliary losses, weighted as their gradients are; counts how many there were."""


class Means(NamedTuple):
    """What the scores of all workers come to."""

    losses: tuple[float, ...]
    """By micro-batch."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """That the sum of the losses is divided by: C, or the number of micro-batches."""
    num_counted: int
    metrics: tuple[float, ...]
    """In the order of their names."""
    aux_loss: float | None
    """What auxiliary losses add to the loss; None if there were none."""

    @property
    def loss(self) -> float:
        """The mean, added in the order of micro-batches; nan if nothing was counted."""
        return math.fsum(self.losses) / self.count if self.count else math.nan

    @property
    def scale(self) -> float:
        """N / C: what makes gradients that were divided by the number of micro-batches those of the loss."""
        return len(self.losses) / self.count if self.count else 0.0

    def by_name(self, names: Sequence[str]) -> dict[str, float]:
        """Metrics by name, auxiliary losses among them if there were any.

        Args:
            names: of the job's metrics.
        """
        found = dict(zip(names, self.metrics, strict=True))
        return found if self.aux_loss is None else {**found, AUX_LOSS: self.aux_loss}


def num_score_words(num_microbatches: int, num_metrics: int) -> int:
    """Computes how many integers `score_words` returns."""
    return _COUNT_WORDS + num_microbatches + _METRIC_WORDS * (num_metrics + 1)


def score_words(scores: Scores, num_microbatches: int, num_metrics: int) -> list[int]:
    """Scores as integers, to be added over all workers.

    Args:
        num_microbatches: slots for losses.
        num_metrics: of the job.
    """
    words = [scores.count, scores.num_counted]
    losses = scores.losses
    words += [float_bits(losses[index]) if index in losses else 0 for index in range(num_microbatches)]
    for metric in scores.metrics or (_NOTHING,) * num_metrics:
        words += metric.words()
    return words + scores.aux_loss.words()


def means_of(words: Sequence[int], slots: int, num_microbatches: int) -> Means:
    """Reads what `score_words` of all workers come to.

    Args:
        words: added.
        slots: for losses among them.
        num_microbatches: of the step, the first so many slots: a policy may let the batch shrink.
    """
    count, num_counted = words[:_COUNT_WORDS]
    first_metric = _COUNT_WORDS + slots
    losses = tuple(bits_float(word) for word in words[_COUNT_WORDS : _COUNT_WORDS + num_microbatches])
    *metrics, aux_loss = (
        _metric_from(words[start : start + _METRIC_WORDS]) for start in range(first_metric, len(words), _METRIC_WORDS)
    )
    divisor = count if num_counted else num_microbatches
    return Means(
        losses,
        divisor,
        num_counted,
        tuple(metric.over(metric.count) for metric in metrics),
        aux_loss.over(divisor) if aux_loss.count else None,
    )


def float_bits(value: float) -> int:
    """Returns the bits of a float64 as a signed integer. Sums of such integers, all but one of which are of 0.0, keep
    it."""
    bits: int = _WORD.unpack(_FLOAT.pack(value))[0]
    return bits


def bits_float(bits: int) -> float:
    """Does the inverse of `float_bits`."""
    value: float = _FLOAT.unpack((bits & MASK64).to_bytes(8, "little"))[0]
    return value
