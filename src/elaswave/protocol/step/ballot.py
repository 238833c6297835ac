"""The vote: one small all-reduce whose result says whether a step commits, the same for all workers.

Every worker fills a `Ballot`. The vectors of all ballots are merged: 64-bit integers that are added (wrapping) in the
first part and maximised in the second, both free of order. The merged vector is the *commit certificate*, and
`read_verdict` reads the verdict off it. A worker fills its ballot only when it is prepared (its owned blocks have their
complete gradients, its followed blocks the same ones), so learning that the vote passed implies that every worker can
apply.
The parts:

- coverage: `coverage_key` of every (layer, micro-batch) that was added, and `loss_key` of every loss, against the known
  total;
- residency: a number for every held block, its role, holder and version, against what the placement says
  (`expected_residency`);
- next residency: the same of the placement that a planned change leads to, as far as its copies are held already: once
  it comes to what that placement says, the change comes into force;
- agreement: owners add (number of followers x key) of each gradient, of each master and, for a rotating sample of
  blocks, of the optimizer's states; followers subtract theirs. Owners add (number of those that run the layer x key)
  of the parameters that they serve, those that run it subtract that of what they compute with. Zero unless a copy
  differs;
- memory: how much of what RUN reads, and of the masters, is not as it was written, by the own seals of each worker;
- partial sums: workers add the sum of all words that they have added to their partial sums, and the coverage that they
  have sent beside them; owners subtract those of the totals, and the coverage that has come: zero unless a word of a
  partial sum has changed in an accumulator, on the way, or in being added up;
- layout and grids: max(h) and max(-h) of the hash h of layout, placement, grids and number of updates; all workers
  agree exactly if they add to 0;
- determinism hashes: the same of what processes compute with, and of what each layer makes of made-up numbers; of
  those that a worker knows and of its own ones;
- change: the same of the planned change of layout that each worker holds; it is adopted if all hold the same one;
- duration: how long the slowest worker has taken for the attempt, by which all of them know what copies may travel;
- the gradient norm in exact limbs, the scores (one slot per micro-batch for the losses, their counts, exact sums of
  metrics), the largest gradient per tensor, and the requests (stop, checkpoint) that must take effect at the same step
  everywhere;
- buffers: whether any micro-batch has written one, and whether all have left the same in one of whole numbers.

What workers must have in common so that they compute the same bits is one *determinism hash* of 62 bits in each place
of every ballot: place 0 for what a process computes with (processor, library, kernels), place 1 + l for what layer l
makes of made-up numbers (`elaswave.engine.checks.determinism_check`). A worker tells its own and those that it knows
from earlier votes. So a worker that is new, or a layer on a worker that has not held it before, is compared with all
that have ever voted.

The scores do not depend on the layout or on any order. A loss has one slot per micro-batch, which one worker fills.
Of a metric only the sum is needed, so it travels as an exact integer: a value is rounded once, to a multiple of
2**-160, and integers have no order. A loss that is a mean over its micro-batch has the mean over micro-batches for its
own. One that comes with a count (tokens that are not ignored) is divided by the sum of all counts, C; the mean
gradients, which were made before C was known, are then multiplied by N / C. An evaluation has no vote, and adds its
scores in the same way. No IO here.
"""

import functools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from elaswave.blocks.placement import Placement, ReplicaRole, block_keys
from elaswave.blocks.shapes import (
    FEWEST_BITS,
    NORM_LIMBS,
    WIDE_BITS,
    could_overflow,
    is_too_coarse,
    next_exponent,
    norm_from_limbs,
    norm_limbs,
)
from elaswave.hashing import MASK64, key64, mix_words

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

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


ENVIRONMENT = 0
"""Place of what a process computes with; layers follow."""

NO_HASH = -(1 << 63)
"""Less than any hash of 62 bits, and than its negative."""
TEXT_WORDS = 16
"""Whole numbers in which a worker describes itself when environments differ."""
_WORD_BYTES = 7
"""Of text in each of them: every value is below 2**63."""


class Environment(NamedTuple):
    """What a process computes with."""

    text: str
    """For people."""
    operators: Mapping[str, int]
    """62-bit hash of the results of each operator of a fixed list, the same list in every process of a release."""

    @property
    def determinism_hash(self) -> int:
        """Of all operators."""
        return key64(*(part for item in sorted(self.operators.items()) for part in item)) >> 2


Pair = tuple[int, int]
"""max(h) and max(-h)."""


def pairs_of(known: Mapping[int, int], own: Mapping[int, int]) -> dict[int, Pair]:
    """Computes what a worker tells.

    Args:
        known: determinism hashes of earlier votes, by place.
        own: its own ones.
    """
    pairs = {place: (value, -value) for place, value in known.items()}
    for place, value in own.items():
        # Where both are told and differ, these maxima do not add to 0: the place differs in the vote.
        top, bottom = pairs.get(place, (value, -value))
        pairs[place] = (max(top, value), max(bottom, -value))
    return pairs


def flat(pairs: Mapping[int, Pair], num_places: int) -> list[int]:
    """Pairs of all places as they stand among the maxima of a vote."""
    return [value for place in range(num_places) for value in pairs.get(place, (NO_HASH, NO_HASH))]


class VotedHashes(NamedTuple):
    """What a vote says of them."""

    known: Mapping[int, int]
    """By place, of those that all agree on."""
    differing: tuple[int, ...]
    """Places at which workers differ."""


def read_votes(maxima: Iterable[int]) -> VotedHashes:
    """Computes the inverse of `flat`, after a vote."""
    values = list(maxima)
    pairs = [(place, top, bottom) for place, (top, bottom) in enumerate(zip(values[::2], values[1::2], strict=True))]
    told = [(place, top, bottom) for place, top, bottom in pairs if top != NO_HASH]
    return VotedHashes(
        {place: top for place, top, bottom in told if top == -bottom},
        tuple(place for place, top, bottom in told if top != -bottom),
    )


def text_words(text: str) -> list[int]:
    """Encodes the beginning of a text as whole numbers below 2**63."""
    data = text.encode()[: TEXT_WORDS * _WORD_BYTES].ljust(TEXT_WORDS * _WORD_BYTES, b"\0")
    return [int.from_bytes(data[start : start + _WORD_BYTES], "little") for start in range(0, len(data), _WORD_BYTES)]


def words_text(words: Iterable[int]) -> str:
    """Computes the inverse of `text_words`."""
    data = b"".join(word.to_bytes(_WORD_BYTES, "little") for word in words)
    # A long text may have been cut within a character.
    return data.rstrip(b"\0").decode(errors="replace")


_ROW_BITS = 20
_NUM_CHECKS = 7
"""Sums before those of the norm."""
_NUM_FLAGS = 7
"""Maxima before those of the tensors."""
_SIGN = 1 << 63
LOSS = -1
"""Stands for the loss where micro-batches are counted by unit."""
UNKNOWN_MICROBATCH = (1 << _ROW_BITS) - 1
"""Micro-batch of a non-finite value that was found only in the sum (scaled mode)."""


class NonFinite(NamedTuple):
    """The first loss or gradient of a micro-batch that was not finite."""

    microbatch: int
    layer: int
    """Layer whose gradient it was; the number of layers for the loss itself."""


NOTHING_COUNTED = NonFinite(UNKNOWN_MICROBATCH, (1 << _ROW_BITS) - 1)
"""The counts that came with the losses add up to 0: there is nothing that the loss could be a mean of."""


class Request(Enum):
    """What a worker asks of all in its ballot; the largest one takes effect after the step that the vote commits."""

    NONE = 0
    PAUSE = 1
    """Wait, before the next step, for what the coordinator says: the membership is about to change."""
    CHECKPOINT = 2
    """Write a durable checkpoint of the step, and go on."""
    STOP = 3
    """Write a durable checkpoint of the step, and end the job."""


class VoteOutcome(Enum):
    """What a vote decides."""

    COMMIT = "commit"
    SKIP = "skip"
    """Commit the step without an update (``run.skip_nonfinite``)."""
    RETRY = "retry"
    """No worker applies; the step is tried again on the verdict's grids."""
    NON_FINITE = "non-finite"
    REJECT = "reject"
    """The certificate does not hold."""
    UNEQUAL = "unequal"
    """Micro-batches have left different whole numbers in a buffer."""


class BufferTensor(NamedTuple):
    """A tensor of the model that is no parameter, but a buffer which a forward may write.

    Its "gradient" of a micro-batch is what the forward has left in it. Two maxima of the vote tell of it. Of a buffer
    of floating-point numbers the first is 1 if a micro-batch has changed it, and the second 0. Of one of whole numbers
    they are max(h) and max(-h), with h a hash of what a micro-batch has left: all agree exactly if they add to 0.
    """

    tensor: int
    """Its index."""
    is_whole: bool
    """Whether it holds whole numbers."""

    @property
    def nothing(self) -> tuple[int, int]:
        """What a worker without a micro-batch of its layer brings."""
        # No maximum changes by it.
        return (NO_HASH, NO_HASH) if self.is_whole else (0, 0)


class Ballot(NamedTuple):
    """What one worker brings to a vote."""

    coverage: int
    residency: int
    agreement: int
    partial_sums: int
    next_state: int
    """62-bit hash of the layout, of the placement that this vote brings into force, of grids and number of updates."""
    scores: Scores
    square_sums: Sequence[float]
    """Of the mean gradient of each owned block, finite."""
    maxima: Mapping[int, float]
    """Largest absolute gradient by tensor index, finite."""
    nonfinite: NonFinite | None
    request: Request
    change: int = 0
    """62-bit hash of the planned change that this worker holds and that is not adopted yet, 0 for none."""
    next_residency: int = 0
    """Of the copies that this worker has under the placement that a change leads to."""
    duration_us: int = 0
    """That the attempt has taken here so far."""
    determinism_hashes: Mapping[int, Pair] = {}
    """By place."""
    num_changed: int = 0
    """Places in this worker's memory that are not as they were written."""
    writes: Mapping[int, tuple[int, int]] = {}
    """The two maxima of each buffer of which this worker has run a micro-batch, by tensor index."""


class Expected(NamedTuple):
    """What the sums must come to, known to every worker beforehand."""

    num_workers: int
    coverage: int
    residency: int
    next_state: int
    num_microbatches: int
    """Of the step: a policy may let the batch shrink, then the first ones are run."""


class Verdict(NamedTuple):
    """What a vote says."""

    outcome: VoteOutcome
    reason: str
    norm: float
    """Of the loss's gradient before clipping."""
    means: Means
    """Losses and metrics."""
    grids: tuple[int, ...]
    """Exponent per tensor for the next step or attempt."""
    request: Request
    failed: tuple[str, ...] = ()
    """Parts of the certificate that failed."""
    nonfinite: NonFinite | None = None
    change: int = 0
    """Hash of the planned change that all workers hold, if the step commits; else 0."""
    next_residency: int = 0
    """The merged sum, modulo 2**64."""
    duration_us: int = 0
    """Of the slowest worker."""
    determinism_hashes: VotedHashes = VotedHashes({}, ())
    written: tuple[int, ...] = ()
    """Tensors that are buffers and that a micro-batch may have changed."""
    unequal: tuple[int, ...] = ()
    """Tensors that are buffers of whole numbers, and in which micro-batches do not agree."""

    @property
    def commits(self) -> bool:
        """Whether it commits the step."""
        return self.outcome in (VoteOutcome.COMMIT, VoteOutcome.SKIP)

    @property
    def asks_checkpoint(self) -> bool:
        """Whether it commits a step of which a worker wants a durable checkpoint."""
        return self.commits and self.request in (Request.CHECKPOINT, Request.STOP)

    @property
    def loss(self) -> float:
        """Of the step; nan where a loss or gradient is not finite."""
        return math.nan if self.nonfinite is not None else self.means.loss


class VoteShape:
    """Where things lie in the vector of a vote.

    Args:
        num_microbatches: of the global batch.
        num_tensors: of the model.
        num_metrics: of the job.
        num_determinism_hashes: places for them.
        uses: tensor -> how often each micro-batch adds to it, where that is not once.
        buffers: tensors that are buffers.
        accumulator_bits: width of a sum of gradients.
    """

    REQUEST = 3
    """Place of the requests among the maxima."""

    SCORES = _NUM_CHECKS + NORM_LIMBS
    """Place of the first score."""

    def __init__(
        self,
        num_microbatches: int,
        num_tensors: int,
        num_metrics: int = 0,
        num_determinism_hashes: int = 0,
        *,
        uses: Mapping[int, int] = {},
        buffers: Sequence[BufferTensor] = (),
        accumulator_bits: int = WIDE_BITS,
    ) -> None:
        self.accumulator_bits = accumulator_bits
        self.num_microbatches = num_microbatches
        self.num_tensors = num_tensors
        self.num_metrics = num_metrics
        self.num_determinism_hashes = num_determinism_hashes
        self.buffers = buffers
        self.num_terms = [num_microbatches * uses.get(tensor, 1) for tensor in range(num_tensors)]
        """Of the sum of each tensor."""
        self.num_sums = self.SCORES + num_score_words(num_microbatches, num_metrics)
        self.first_tensor = self.num_sums + _NUM_FLAGS + 2 * num_determinism_hashes
        """Place of the first tensor's maximum."""
        self.first_write = self.first_tensor + num_tensors
        """Place of what is told of the first buffer."""
        self.num_maxima = _NUM_FLAGS + 2 * num_determinism_hashes + num_tensors + 2 * len(buffers)
        self.size = self.num_sums + self.num_maxima

    def vector_of(self, ballot: Ballot) -> list[int]:
        """Makes the vector of one worker's ballot: signed 64-bit integers, [size]."""
        checks = (
            1,
            ballot.coverage,
            ballot.residency,
            ballot.next_residency,
            ballot.num_changed,
            ballot.agreement,
            ballot.partial_sums,
        )
        vector = [(value + _SIGN & MASK64) - _SIGN for value in checks]  # keys of 64 bits; all others fit as they are
        vector += norm_limbs(ballot.square_sums)
        vector += score_words(ballot.scores, self.num_microbatches, self.num_metrics)
        vector += (
            ballot.next_state,
            -ballot.next_state,
            _nonfinite_code(ballot.nonfinite),
            ballot.request.value,
            ballot.change,
            -ballot.change,
            ballot.duration_us,
            *flat(ballot.determinism_hashes, self.num_determinism_hashes),
        )
        maxima = ballot.maxima
        # Bits of floats that are not negative are ordered as the floats are, so one maximum over integers serves all.
        vector += [float_bits(maxima[index]) if index in maxima else 0 for index in range(self.num_tensors)]
        for buffer in self.buffers:
            vector += ballot.writes.get(buffer.tensor, buffer.nothing)
        return vector

    def merge(self, ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
        """Merges both vectors into one: sums wrap, maxima are maximised."""
        num_sums = self.num_sums
        merged = add_words(ours[:num_sums], theirs[:num_sums])
        merged += map(max, ours[num_sums:], theirs[num_sums:])
        return merged

    def means(self, vector: Sequence[int], num_microbatches: int) -> Means:
        """Losses and metrics in a merged vector.

        Args:
            num_microbatches: of the step, the first ones.
        """
        return means_of(vector[self.SCORES : self.num_sums], self.num_microbatches, num_microbatches)


def add_words(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Computes element by element the sums of signed 64-bit integers, wrapping."""
    return [(a + b + _SIGN & MASK64) - _SIGN for a, b in zip(ours, theirs, strict=True)]


def encode_certificate(vector: Sequence[int]) -> bytes:
    """Encodes a merged vector as evidence carries it: little-endian, 8 bytes for each integer."""
    return struct.pack(f"<{len(vector)}q", *vector)


def decode_certificate(certificate: bytes) -> tuple[int, ...]:
    """Computes the inverse of `encode_certificate`."""
    return struct.unpack(f"<{len(certificate) // 8}q", certificate)


class GridState(NamedTuple):
    """The grids of a step and what is known of them."""

    exponents: tuple[int, ...]
    calibrated: bool
    """False until a first attempt has measured the gradients."""
    exact: bool
    """False in scaled mode, where grids are not used."""


def read_verdict(
    vector: Sequence[int], shape: VoteShape, expected: Expected, grids: GridState, *, skip_nonfinite: bool
) -> Verdict:
    """Reads the verdict off the merged vector; a pure function, so all workers come to the same one.

    Args:
        vector: merged over all workers, [shape.size].
        shape: its layout.
        expected: what the sums must be.
        grids: the grids of this attempt.
        skip_nonfinite: commit a step whose loss or gradient is not finite without an update.
    """
    sums = tuple(value & MASK64 for value in vector[:_NUM_CHECKS])
    num_voters, coverage, residency, next_residency, num_changed, agreement, partial_sums = sums
    limbs = vector[_NUM_CHECKS : shape.SCORES]
    means = shape.means(vector, expected.num_microbatches)
    flags = vector[shape.num_sums : shape.num_sums + _NUM_FLAGS]
    layout_max, layout_min, nonfinite_code, request, change_max, change_min, duration_us = flags
    determinism_hashes = read_votes(vector[shape.num_sums + _NUM_FLAGS : shape.first_tensor])
    maxima = [bits_float(value) for value in vector[shape.first_tensor : shape.first_write]]
    written, unequal = _read_writes(shape, vector[shape.first_write :])
    checks = {
        "voters": num_voters == expected.num_workers,
        "coverage": coverage == expected.coverage,
        "residency": residency == expected.residency,
        "memory": num_changed == 0,
        "agreement": agreement == 0,
        "partial sums": partial_sums == 0,
        "layout and grids": layout_max == -layout_min == expected.next_state,
        "loss counts": means.num_counted in (0, expected.num_microbatches),
        "environment": ENVIRONMENT not in determinism_hashes.differing,
        "layers": all(place == ENVIRONMENT for place in determinism_hashes.differing),
    }
    failed = tuple(name for name, passed in checks.items() if not passed)
    nonfinite = _nonfinite_from(nonfinite_code) or (NOTHING_COUNTED if means.count <= 0 else None)

    def verdict(outcome: VoteOutcome, reason: str, grids_after: tuple[int, ...]) -> Verdict:
        # What is not finite stands in no limb: the rest is no norm.
        norm = means.scale * norm_from_limbs(limbs) if nonfinite is None else math.nan
        commits = outcome in (VoteOutcome.COMMIT, VoteOutcome.SKIP)
        change = change_max if commits and change_max == -change_min else 0
        return Verdict(
            outcome,
            reason,
            norm,
            means,
            grids_after,
            Request(request),
            failed,
            nonfinite,
            change,
            next_residency,
            duration_us,
            determinism_hashes,
            written,
            unequal,
        )

    # First, since nothing else in a certificate that does not hold can be trusted: the grids stay as they are.
    if failed:
        return verdict(VoteOutcome.REJECT, "the certificate does not hold: " + ", ".join(failed), grids.exponents)
    # Before grids are judged: what is not finite was not added, and is missing from the maxima.
    if nonfinite is not None:
        outcome = VoteOutcome.SKIP if skip_nonfinite else VoteOutcome.NON_FINITE
        what = "the loss counts nothing" if nonfinite == NOTHING_COUNTED else "a loss or gradient is not finite"
        return verdict(outcome, what, grids.exponents)
    if unequal:
        return verdict(VoteOutcome.UNEQUAL, "micro-batches have left different whole numbers", grids.exponents)
    if not grids.exact:
        return verdict(VoteOutcome.COMMIT, "the certificate holds", grids.exponents)
    width = shape.accumulator_bits
    after = tuple(
        next_exponent(maximum, exponent, num_terms, width)
        for maximum, exponent, num_terms in zip(maxima, grids.exponents, shape.num_terms, strict=True)
    )
    if not grids.calibrated:
        return verdict(VoteOutcome.RETRY, "the first gradients have been measured", after)
    tensors = list(zip(maxima, grids.exponents, after, strict=True))
    # By the largest single gradient: a sum that has wrapped around looks like any other.
    overflows = sum(map(could_overflow, maxima, grids.exponents, shape.num_terms, repeat(width)))
    # Once per step: the same gradients have all the bits that there are on the grids which they ask for.
    coarse = sum(is_too_coarse(maximum, grid) and finer > grid for maximum, grid, finer in tensors)
    reasons = [f"sums of {overflows} tensors could overflow"] if overflows else []
    reasons += [f"gradients of {coarse} tensors have fewer than {FEWEST_BITS} bits on their grids"] if coarse else []
    if reasons:
        return verdict(VoteOutcome.RETRY, "; ".join(reasons), after)
    return verdict(VoteOutcome.COMMIT, "the certificate holds", after)


def _read_writes(shape: VoteShape, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Buffers that may have been changed, and those in which micro-batches do not agree."""
    pairs = list(zip(shape.buffers, values[::2], values[1::2], strict=True))
    # Whole numbers count as written in any case: where micro-batches agree, the mean is exactly what they have left.
    written = tuple(buffer.tensor for buffer, first, _ in pairs if buffer.is_whole or first > 0)
    unequal = tuple(buffer.tensor for buffer, first, second in pairs if buffer.is_whole and first != -second)
    return written, unequal


@functools.lru_cache(maxsize=1 << 16)
def holder_key(worker: int, role: int, version: int) -> int:
    """Computes by what the `block_keys` of blocks are multiplied that a worker holds in a role, at a version; odd."""
    return key64("residency", worker, role, version) | 1


def key_sums(
    blocks: "npt.NDArray[np.int64]", roles: "npt.NDArray[np.unsignedinteger[Any]]", num_blocks: int
) -> tuple[int, ...]:
    """Sums the `block_keys` of blocks by role, modulo 2**64.

    Args:
        blocks, roles: of what is held; what has another role than those that there are does not count.
        num_blocks: of the model.
    Returns:
        In the order of `ReplicaRole`.
    """
    keys = block_keys(num_blocks)[blocks]
    return tuple(int(keys @ (roles == role)) for role in ReplicaRole)


def residency_of(worker: int, sums: Sequence[int], version: int) -> int:
    """Computes what a worker brings to a residency sum.

    Args:
        worker: its id.
        sums: as of `key_sums`, of its copies.
        version: of these.
    """
    return sum(holder_key(worker, role, version) * keys for role, keys in zip(ReplicaRole, sums, strict=True)) & MASK64


def expected_residency(placement: Placement, step: int) -> int:
    """Computes what the residency sums must come to in the vote on a step.

    A held block counts the product of its block's key and its holder's, so blocks of one holder are summed once for a
    placement, and a step costs as much as there are holders, however many blocks they hold. A product of random numbers
    is enough, by Freivalds' argument: say that what is held differs from what should be. Then the keys of the blocks in
    which one holder (worker, role and version) differs add up to a random number x that does not depend on the holders'
    keys, and modulo 2**64 the odd random number by which it is multiplied makes up for what all others have wrong only
    by chance (about once in 2**58). Where only one block, or only one holder, is another than it should be, never.

    Args:
        placement: the one under which the vote is held.
        step: all copies must be of the step before.
    """
    sums = placement.key_sums
    return sum(holder_key(worker, role, step - 1) * blocks for worker, role, blocks in sums) & MASK64


def agreement_keys(kind: str, blocks: "Words", step: int, attempt: int, *hashes: "Words") -> "Words":
    """Computes what copies of blocks contribute to the agreement sum, before it is multiplied by the number of
    partners. Each hash goes through a mixing of its own: hashes are sums, and what differs in two of them could add up
    to nothing.

    Args:
        kind: "copy", of gradient and state, or "parameters".
        blocks: the `block_keys` of those that they are of.
        step, attempt: of the vote.
        hashes: of what is compared, each [number of copies].
    """
    keys = blocks + _attempt_key(kind, step, attempt)
    for each in hashes:
        keys += each
        mix_words(keys)
    return keys


@functools.lru_cache(maxsize=64)
def _attempt_key(kind: str, step: int, attempt: int) -> "np.uint64":
    return np.uint64(key64(kind, step, attempt))


@functools.lru_cache(maxsize=1 << 16)
def coverage_key(unit: int, microbatch: int, use: int = 0) -> int:
    """Computes what adding a micro-batch to a unit adds to the coverage.

    Args:
        unit: a layer, or what layers share.
        microbatch: whose backward has run.
        use: which of the uses of a shared unit it is.
    """
    return key64("coverage", unit, microbatch, use) if use else key64("coverage", unit, microbatch)


@functools.lru_cache(maxsize=1 << 16)
def loss_key(microbatch: int) -> int:
    """Computes what a micro-batch's loss adds to the coverage: it must count once, like a gradient (S1)."""
    return key64("coverage", "loss", microbatch)


@functools.lru_cache(maxsize=64)
def expected_coverage(num_layers: int, num_microbatches: int, shared: tuple[tuple[int, ...], ...] = ()) -> int:
    """Computes the coverage of a step in which everything ran exactly once.

    Args:
        num_layers, num_microbatches: of the step.
        shared: as of `Layout.shared`.
    """
    uses = [1] * num_layers + [len(users) for users in shared]
    added = sum(
        coverage_key(unit, microbatch, use)
        for unit, num_uses in enumerate(uses)
        for microbatch in range(num_microbatches)
        for use in range(num_uses)
    )
    return (added + sum(map(loss_key, range(num_microbatches)))) & MASK64


def _nonfinite_code(nonfinite: NonFinite | None) -> int:
    """Encodes none as 0, and all else as a number that is larger for earlier micro-batches, then for later layers
    (backward meets those first)."""
    if nonfinite is None:
        return 0
    return ((UNKNOWN_MICROBATCH - nonfinite.microbatch) << _ROW_BITS | nonfinite.layer) + 1


def _nonfinite_from(code: int) -> NonFinite | None:
    if code == 0:
        return None
    return NonFinite(UNKNOWN_MICROBATCH - ((code - 1) >> _ROW_BITS), (code - 1) & ((1 << _ROW_BITS) - 1))
