"""A check that never ends: now and then a run of a layer or of the loss is done again and compared bit for bit.

By turns it is done again from its input, with its memory elsewhere, which finds what differs from one time to the next;
or the layer's probe is (`elaswave.engine.checks.determinism_check`), against the determinism hash that was voted on at
the start, which also finds a processor that has become wrong for good. The loss has no probe: in its place one operator
of the environment is run.

*Where* follows from the run's seed, the step, the layer and the micro-batch, never from worker or attempt. So whoever
repeats a micro-batch after a loss checks the same place: a fault of the layer's code shows again on the second worker,
one of a processor does not. In a step with checks, every worker of the first layout checks one micro-batch in all its
layers: nobody waits for another one's check.

*How often*: in one step of two of the first `DENSE_STEPS`, then more and more rarely, until the checks of a worker take
a given share of the time that its layers take. Here is what is due and what it is compared with; `Compute` runs it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from math import ceil

from elaswave.devices.interface import HOST, Device, generators_kept
from elaswave.errors import SpotCheckError, UsageError
from elaswave.hashing import key64

DENSE_STEPS = 50
_DENSE_WINDOW = 2
"""Steps of which one has checks, among the first."""
COST = 1.8
"""Time of one check, in runs of its layer forward and backward, at most. Measured on GPTs of 0.9 and 10 M parameters:
1.6 to 1.9 run again, which takes two forwards and a backward, and 1.2 to 1.5 the probe, one of each."""


class CheckKind(Enum):
    """What is done again."""

    RUN = "run"
    PROBE = "probe"


def window_of(step: int, longest: int) -> tuple[int, int, int]:
    """Finds the steps around a step of which one has checks: first of them, their number, and how many windows of this
    length came before.

    Args:
        step: from 1.
        longest: steps of a window in the long run.
    """
    level = ((step - 1) // DENSE_STEPS).bit_length()
    begin = 1 + (DENSE_STEPS << level - 1 if level else 0)
    length = min(longest, _DENSE_WINDOW << 2 * level)
    number = (step - begin) // length
    return begin + number * length, length, number


class SpotChecks:
    """Those of one worker.

    Args:
        seed: of the run.
        share: of the time that layers take which checks may take in the long run, above 0.
        num_microbatches: of a step.
        width: workers of the widest stage of the layout that the run began with.
        changed_operator: runs an operator of the environment, chosen by a key, and names it if its bits are others than
            at the start.
        device: that computes.
    """

    def __init__(
        self,
        seed: int,
        share: float,
        num_microbatches: int,
        width: int,
        changed_operator: Callable[[int], str | None] = lambda key: None,
        device: Device = HOST,
    ) -> None:
        self._seed = seed
        self._num_microbatches = num_microbatches
        self._width = width
        self._longest = max(1, ceil(COST * width / (share * num_microbatches)))
        self._changed_operator = changed_operator
        self._device = device
        self._step = 0
        self._turn = 0
        self._microbatches: frozenset[int] = frozenset()
        self._held = 0
        """The newest step in which a check held here."""
        self.spent_ns = 0
        """Of the present attempt, in checks."""

    def begin(self, step: int) -> None:
        """An attempt of a step begins."""
        self._step, self.spent_ns = step, 0
        first, length, self._turn = window_of(step, self._longest)
        if step != first + key64(self._seed, "spot check", first) % length:
            self._microbatches = frozenset()
            return
        start = key64(self._seed, "spot check", step, "micro-batch")
        self._microbatches = frozenset((start + place) % self._num_microbatches for place in range(self._width))

    def due(self, layer: int, microbatch: int) -> CheckKind | None:
        """Tells what of a layer's run is done again in this step; the loss is one past the last layer."""
        if microbatch not in self._microbatches:
            return None
        return CheckKind.PROBE if (self._turn + layer) % 2 else CheckKind.RUN

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Stands around a check: generators are left as they were, its time counts by itself, and what is found is
        this worker's loss.

        Raises:
            SpotCheckError: what is run again is not what it was.
        """
        began_ns = time.perf_counter_ns()
        try:
            with generators_kept(), self._device.generator_kept():
                yield
        except UsageError as error:
            since = f"the last one that held here was in step {self._held}" if self._held else "none has held before"
            raise SpotCheckError(
                f"{error}. This is a spot check, and {since}. If no other worker finds the same, this one's processor "
                "or memory is at fault, and what it has computed since then may be wrong"
            ) from error
        finally:
            self.spent_ns += time.perf_counter_ns() - began_ns
        self._held = self._step

    def check_operator(self) -> None:
        """Runs an operator of the environment.

        Raises:
            UsageError: its bits are others than at the start.
        """
        name = self._changed_operator(key64(self._seed, "spot check", self._step, "operator"))
        if name is not None:
            raise UsageError(f"the operator {name} gives other bits than at the start of the run, on the same numbers")


def check_probe(who: str, determinism_hash: int, known: int) -> None:
    """Compares a layer's determinism hash with the one that was voted on.

    Raises:
        UsageError: they differ.
    """
    if determinism_hash != known:
        raise UsageError(
            f"{who} gives other bits than at the start of the run: what it makes of made-up numbers that never change "
            f"has the hash {determinism_hash:x}, and had {known:x} when it was voted on. It must keep nothing "
            "between calls"
        )
