"""The micro-batches of a run by (step, micro-batch): made here, whoever asks, and given to the engine of a worker.

Without loaders a worker makes them itself (`BatchMaker`), else its loaders do (`elaswave.engine.loading`): the
same ones, since nothing in them depends on who makes them.

Micro-batches that are in use on this worker: fetched once, and kept for their backward if a layer asks for them.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from elaswave.config.schema import Config
from elaswave.data.sampler import Sampler
from elaswave.data.sources import Split
from elaswave.devices.generators import generators_kept
from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.engine.activity import Activity
from elaswave.engine.checks.values import flatten, unflatten
from elaswave.errors import DataError, UsageError
from elaswave.protocol.step.activity import DATA
from elaswave.training.dataset import UserDataError
from elaswave.training.definition import Samples, evaluation_draws
from elaswave.training.raised import readable, said, traceback_of
from elaswave.types import Layout


class BatchName(NamedTuple):
    """Which micro-batch."""

    split: Split
    step: int
    """From 1; 0 for validation, whose micro-batches are the same at every step."""
    microbatch: int

    def __str__(self) -> str:
        if self.split == "validation":
            return f"micro-batch {self.microbatch} of the evaluation"
        return f"step {self.step}, micro-batch {self.microbatch}"


class BatchError(Exception):
    """A micro-batch cannot be made.

    Args:
        name: which one.
        kind: type of the exception behind it, or a word for what has happened.
        summary: one line.
        traceback_text: of the exception behind it, or "".
    """

    def __init__(self, name: BatchName, kind: str, summary: str, traceback_text: str = "") -> None:
        self.name = name
        self.kind = kind
        self.summary = summary
        self.traceback_text = traceback_text
        super().__init__(f"{summary} (at {name})")


class Supply(Protocol):
    """Where a worker's micro-batches come from."""

    def get(self, name: BatchName) -> tuple[Any, Any]:
        """Inputs and targets of one micro-batch.

        Raises:
            BatchError: it cannot be made.
        """
        ...

    def begin(self, step: int) -> None:
        """A step is begun, perhaps again: its micro-batches will be asked for next."""
        ...

    def use_layout(self, layout: Layout) -> None:
        """Who runs what from now on, and so which micro-batches will be asked for."""
        ...


class BatchMaker:
    """Makes micro-batches in this process.

    Args:
        config: of the run.
        samples: its data.
        sampler: which samples make up which micro-batch.
    """

    def __init__(self, config: Config, samples: Samples, sampler: Sampler) -> None:
        self._size = config.batch.microbatch_size
        self._samples = samples
        self._sampler = sampler

    def make(self, name: BatchName) -> tuple[Any, Any]:
        """Makes one micro-batch; raises whatever the data raise."""
        if name.split == "train":
            return self._samples.batch(self._sampler.draws(name.step, name.microbatch), "train")
        num_samples = self._samples.num_samples("validation")
        return self._samples.batch(evaluation_draws(name.microbatch, self._size, num_samples), "validation")

    def get(self, name: BatchName) -> tuple[Any, Any]:
        """See `Supply.get`."""
        try:
            return self.make(name)
        except (UserDataError, DataError) as error:
            raise failure_of(name, error) from error

    def begin(self, step: int) -> None:
        """See `Supply.begin`: nothing is made before it is needed."""

    def use_layout(self, layout: Layout) -> None:
        """See `Supply.use_layout`."""


class Batches:
    """The micro-batches of one worker, as its engine asks for them.

    Args:
        supply: where they come from.
        activity: told that the worker is at its data, which may take as long as it likes, unlike computing.
        on_waited: told the seconds that each micro-batch of training took to come.
    """

    def __init__(self, supply: Supply, activity: Activity, on_waited: Callable[[float], None]) -> None:
        self._supply = supply
        self._activity = activity
        self._on_waited = on_waited
        self.use_layout = supply.use_layout
        self.begin = supply.begin

    def training(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch of training."""
        begin_s = time.monotonic()
        pair = self._get(BatchName("train", step, microbatch))
        self._on_waited(time.monotonic() - begin_s)
        return pair

    def evaluation(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch of evaluation, the same after every step."""
        return self._get(BatchName("validation", 0, microbatch))

    def _get(self, name: BatchName) -> tuple[Any, Any]:
        before = self._activity.doing
        self._activity.compute(DATA)
        pair = self._supply.get(name)
        self._activity.has_run()
        if before.computing:
            self._activity.compute(before.label)
        return pair


def failure_of(name: BatchName, error: Exception) -> BatchError:
    """What a person is told of an exception from the data."""
    cause = error.__cause__ if isinstance(error, UserDataError) and error.__cause__ is not None else error
    summary = readable(str(error)) if isinstance(error, UserDataError) else said(error)
    return BatchError(name, type(cause).__name__, summary, traceback_of(cause))


Fetch = Callable[[int, int], tuple[Any, Any]]
"""(step, micro-batch) -> inputs and targets."""


class Microbatches:
    """What `elaswave.batch` answers with, and what the first layer and the loss are given.

    Args:
        training, evaluation: where micro-batches come from.
        device: where they are to be.
    """

    def __init__(self, training: Fetch, evaluation: Fetch, device: Device = HOST) -> None:
        self._device = device
        self._fetch = {True: training, False: evaluation}
        self._here: dict[tuple[int, int, bool], tuple[Any, Any]] = {}
        self._versions: dict[tuple[int, int, bool], list[int]] = {}
        """Of those that a layer has asked for: the versions of the inputs when they came."""

    def get(self, step: int, microbatch: int, *, train: bool) -> tuple[Any, Any]:
        """Inputs and targets; the same ones again until `release` or `clear`."""
        key = (step, microbatch, train)
        if key not in self._here:
            inputs, targets = self._fetch[train](step, microbatch)
            self._here[key] = (self._brought(inputs), self._brought(targets))
        return self._here[key]

    def _brought(self, value: Any) -> Any:
        if self._device.is_host:
            return value
        structure, leaves = flatten(value)
        return unflatten(structure, list(map(self._device.bring, leaves)))

    def inputs(self, step: int, microbatch: int, *, train: bool) -> Any:
        """The inputs, for a layer that asks for them. It may draw afterwards: a dataset that has to be asked draws
        from the same generators, which must not show.

        Raises:
            UsageError: a layer has written to them.
        """
        key = (step, microbatch, train)
        with contextlib.nullcontext() if key in self._here else generators_kept():
            inputs, _ = self.get(step, microbatch, train=train)
        versions = [leaf._version for leaf in flatten(inputs)[1]]
        if self._versions.setdefault(key, versions) != versions:
            raise UsageError(
                "a layer has written to what batch() returned, which others are given too: write to a copy"
            )
        return inputs

    def release(self, step: int, microbatch: int, *, train: bool, is_over: bool) -> None:
        """An action of a micro-batch has ended.

        Args:
            is_over: nothing more of it will run here; else it stays if a layer has asked for it.
        """
        key = (step, microbatch, train)
        if is_over or key not in self._versions:
            self._here.pop(key, None)
            self._versions.pop(key, None)

    def clear(self) -> None:
        """A new attempt begins."""
        self._here.clear()
        self._versions.clear()
