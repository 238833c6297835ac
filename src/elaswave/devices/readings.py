"""Numbers that a device computes and the host is to know, read together by one wait."""

from collections.abc import Callable

import torch

from elaswave.devices.interface import Device, read_tensors


class Reading:
    """One number.

    Args:
        all_of_them: what it is read with.
    """

    __slots__ = ("_all", "_value")

    def __init__(self, all_of_them: "Readings", value: float | None) -> None:
        self._all = all_of_them
        self._value = value

    @property
    def value(self) -> float:
        """The number; where it has not been read yet, all are, by one wait."""
        if self._value is None:
            self._all.read()
        assert self._value is not None
        return self._value

    def learn(self, value: float) -> None:
        """It has been read."""
        self._value = value


class Readings:
    """The numbers that are still to be read.

    Args:
        device: that computes them.
        check: called while the device is waited for.
    """

    def __init__(self, device: Device, check: Callable[[], None]) -> None:
        self._device = device
        self._check = check
        self._unread: list[tuple[Reading, torch.Tensor]] = []

    @property
    def are_known_at_once(self) -> bool:
        """Whether nothing has to be waited for: the host computes."""
        return self._device.is_host

    def note(self, number: torch.Tensor) -> Reading:
        """A number to be known later; on the host it is known at once.

        Args:
            number: a tensor of one element. It may change afterwards.
        """
        if self._device.is_host:
            return Reading(self, float(number.detach()))
        reading = Reading(self, None)
        self._unread.append((reading, number.detach().reshape(()).to(torch.float64, copy=True)))
        return reading

    def read(self) -> None:
        """Reads all that are not known."""
        if self._unread:
            (found,) = read_tensors(self._device, [torch.stack([number for _, number in self._unread])], self._check)
            for (reading, _), value in zip(self._unread, found.tolist(), strict=True):
                reading.learn(value)
            self._unread.clear()
