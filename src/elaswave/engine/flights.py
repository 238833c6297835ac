"""Micro-batches on their way through the layers of a worker: how far each has come, and the value that it has there.

A computation that is interrupted goes on from here when the step is tried again (rule S2 of ``docs/protocol.md``), and
what was handed on can be handed on once more.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from elaswave.engine.layer_runs import Reached
from elaswave.protocol.step.salvage import InFlightMicrobatch


class ResumePoint(NamedTuple):
    """How far a micro-batch has come in the layers of a hop."""

    layers: range
    at: int
    """Forward, one past the last layer that has run, the loss counted; backward, the lowest one."""
    value: Any
    """Forward, the output of the last layer that has run; backward, a `Reached`."""


class InFlight:
    """Those of one worker in a step, by micro-batch."""

    def __init__(self) -> None:
        self._forwards: dict[int, ResumePoint] = {}
        self._backwards: dict[int, ResumePoint] = {}

    def forward(self, microbatch: int) -> ResumePoint | None:
        """How far a forward has come that has begun, while no backward has."""
        return self._forwards.get(microbatch)

    def backward(self, microbatch: int) -> ResumePoint | None:
        """How far a backward has come that has begun, until what it has made is needed no more."""
        return self._backwards.get(microbatch)

    def went(self, microbatch: int, layers: range, at: int, value: Any) -> None:
        """A forward has come so far."""
        self._forwards[microbatch] = ResumePoint(layers, at, value)

    def returned(self, microbatch: int, layers: range, at: int, reached: Reached) -> None:
        """A backward has come so far."""
        self._forwards.pop(microbatch, None)
        self._backwards[microbatch] = ResumePoint(layers, at, reached)

    def end(self, microbatch: int) -> None:
        """Nothing more is needed of a micro-batch."""
        self._forwards.pop(microbatch, None)
        self._backwards.pop(microbatch, None)

    def keep(self, microbatches: Collection[int]) -> None:
        """Forgets all others."""
        for resume_points in (self._forwards, self._backwards):
            for microbatch in resume_points.keys() - set(microbatches):
                del resume_points[microbatch]

    def through(self, layers: Collection[int]) -> set[int]:
        """Micro-batches whose hop has one of these layers."""
        return {
            microbatch
            for resume_points in (self._forwards, self._backwards)
            for microbatch, resume_point in resume_points.items()
            if not set(resume_point.layers).isdisjoint(layers)
        }

    def facts(self, left_out: Collection[int]) -> tuple[InFlightMicrobatch, ...]:
        """For a report.

        Args:
            left_out: micro-batches that cannot go on from here.
        """
        found = [
            InFlightMicrobatch(microbatch, resume_point.layers.start, resume_point.layers.stop, resume_point.at)
            for microbatch, resume_point in self._forwards.items()
        ]
        found += [
            InFlightMicrobatch(
                microbatch,
                resume_point.layers.start,
                resume_point.layers.stop,
                resume_point.layers.stop,
                resume_point.at,
            )
            for microbatch, resume_point in self._backwards.items()
        ]
        return tuple(
            sorted((each for each in found if each.microbatch not in left_out), key=lambda each: each.microbatch)
        )
