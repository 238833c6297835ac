"""Micro-batches that are in use on this worker: fetched once, and kept for their backward if a layer asks for them."""

import contextlib
from collections.abc import Callable
from typing import Any

from elaswave.devices.host import HOST
from elaswave.devices.interface import Device
from elaswave.engine.checks.values import flatten, unflatten
from elaswave.errors import UsageError
from elaswave.training.random_state import generators_kept

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
