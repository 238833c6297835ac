"""What a simulated worker has of a step: sums, losses, and micro-batches on their way through its layers.

The counterpart of `elaswave.engine.compute` and its accumulators. Coverage and sums lie together and are emptied
together; what an attempt keeps of an earlier one is what `Keep` says, and nothing else.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from elaswave.hashing import MASK64
from elaswave.protocol.step.ballot import LOSS, coverage_key, loss_key
from elaswave.protocol.step.engine import Unfinished
from elaswave.protocol.step.salvage import InFlightMicrobatch, Keep, encode_rows, mask_of, numbers_in
from verify.simulator.job import Model, maximum_of, to_units


class ResumePoint(NamedTuple):
    """How far a micro-batch has come in the layers of a hop, and the value that it has there."""

    layers: range
    at: int
    """Forward, one past the last layer that has run, the loss counted; backward, the lowest one."""
    value: int


class ToySums:
    """What there is of a step.

    Args:
        model: of the job.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.words: dict[int, int] = {}
        """The sums, by block."""
        self.checksums: dict[int, int] = {}
        """By unit: all that was added to its sums."""
        self.masks: dict[tuple[int, int], int] = {}
        """(unit, use) -> micro-batches that were added, one bit each."""
        self.maxima: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.inputs: dict[tuple[int, int], int] = {}
        """(micro-batch, layer) -> what its backward needs; the loss is the last layer."""
        self.forwards: dict[int, ResumePoint] = {}
        self.backwards: dict[int, ResumePoint] = {}
        self._covered: Sequence[int] = ()

    def begin(self, units: Iterable[int], keep: Keep | None) -> None:
        """A new attempt.

        Args:
            units: that are here.
            keep: as of `elaswave.protocol.step.engine.Engine.begin`.
        """
        if keep is None:
            self.words = {block: 0 for unit in units for block in self._model.blocks_of_layer[unit]}
            self.checksums, self.masks, self.maxima, self.losses = {}, {}, {}, {}
            self.inputs, self.forwards, self.backwards = {}, {}, {}
            self._covered = (0,) * (self._model.terms.num_layers + 1)
            return
        layout = self._model.layout
        kept = {unit for unit in units if self._users(unit) & keep.layers}
        self.words = {
            block: self.words.get(block, 0) if unit in kept else 0
            for unit in units
            for block in self._model.blocks_of_layer[unit]
        }
        self.checksums = {unit: words for unit, words in self.checksums.items() if unit in kept}
        self.masks = {key: mask for key, mask in self.masks.items() if key[0] in kept}
        self.maxima = {unit: maximum for unit, maximum in self.maxima.items() if unit in kept}
        self.losses = {number: loss for number, loss in self.losses.items() if keep.losses >> number & 1}
        in_flight = keep.in_flight
        self.inputs = {key: value for key, value in self.inputs.items() if key[0] in in_flight}
        self.forwards = {number: resume_point for number, resume_point in self.forwards.items() if number in in_flight}
        self.backwards = {
            number: resume_point for number, resume_point in self.backwards.items() if number in in_flight
        }
        self._covered = keep.covered
        assert len(keep.covered) == layout.num_layers + 1

    def forget(self, units: Collection[int]) -> None:
        """These units are here no more, nor is what depends on them."""
        self.masks = {key: mask for key, mask in self.masks.items() if key[0] not in units}
        self.checksums = {unit: words for unit, words in self.checksums.items() if unit not in units}
        for fronts in (self.forwards, self.backwards):
            for number in [
                number for number, resume_point in fronts.items() if not set(resume_point.layers).isdisjoint(units)
            ]:
                del fronts[number]

    def _users(self, unit: int) -> set[int]:
        first = self._model.layout.num_layers
        return {unit} if unit < first else set(self._model.layout.shared[unit - first])

    def is_covered(self, layer: int, microbatch: int) -> bool:
        """Whether some worker has kept it; the loss is the last layer."""
        return bool(self._covered[layer] >> microbatch & 1)

    def add(self, layer: int, microbatch: int, gradients: Mapping[int, int], exponents: Sequence[int]) -> None:
        """Adds a layer's gradients, and what it brings to the units that it shares.

        Args:
            gradients: by block.
        """
        for block, gradient in gradients.items():
            unit = self._model.blocks[block].layer
            units = to_units(gradient, exponents[unit])
            self.words[block] += units
            self.checksums[unit] = self.checksums.get(unit, 0) + units
            maximum = maximum_of(gradient)
            if maximum > self.maxima.get(unit, -1.0):
                self.maxima[unit] = maximum
        for key in ((layer, 0), *self._model.uses[layer]):
            self.masks[key] = self.masks.get(key, 0) | 1 << microbatch

    def unfinished(self) -> Unfinished:
        """For a report."""
        in_flight = [
            InFlightMicrobatch(number, resume_point.layers.start, resume_point.layers.stop, resume_point.at)
            for number, resume_point in self.forwards.items()
        ]
        in_flight += [
            InFlightMicrobatch(
                number, resume_point.layers.start, resume_point.layers.stop, resume_point.layers.stop, resume_point.at
            )
            for number, resume_point in self.backwards.items()
        ]
        losses = mask_of(self.losses)
        return Unfinished(
            True, encode_rows(self.masks), losses, tuple(sorted(in_flight, key=lambda each: each.microbatch))
        )

    def added(self) -> list[tuple[int, int]]:
        """(layer, micro-batch) of all that is in the sums."""
        num_layers = self._model.terms.num_layers
        return [
            (unit, number) for (unit, _), mask in self.masks.items() if unit < num_layers for number in numbers_in(mask)
        ]

    def coverage(self, unit: int) -> int:
        """Sum of the coverage keys of what was added to a unit."""
        return sum(
            coverage_key(unit, number, use)
            for (of, use), mask in self.masks.items()
            if of == unit
            for number in numbers_in(mask)
        )

    @property
    def total_coverage(self) -> int:
        """Of all units and losses."""
        return (sum(coverage_key(*each) for each in self._counted()) + sum(map(loss_key, self.losses))) & MASK64

    def _counted(self) -> Iterator[tuple[int, int, int]]:
        """(unit, micro-batch, use) of all that is in the sums."""
        for (unit, use), mask in self.masks.items():
            for number in numbers_in(mask):
                yield unit, number, use

    def counts(self) -> dict[tuple[int, int], int]:
        """How often each (unit, micro-batch) was added."""
        found: dict[tuple[int, int], int] = {(LOSS, number): 1 for number in self.losses}
        for (unit, _), mask in self.masks.items():
            for number in numbers_in(mask):
                found[unit, number] = found.get((unit, number), 0) + 1
        return found
