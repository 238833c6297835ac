"""The device on which the code of accelerators is tested shows what an accelerator would show."""

import pytest
import torch

from elaswave.devices.interface import HOST, Readings, read_tensors, wait_for
from elaswave.devices.loopback import LOOKS, Loopback


class Turned(Exception):
    """Raised by a check."""


def nothing() -> None:
    """Moves no bytes."""


def test_a_fetched_tensor_is_there_when_a_later_mark_has_passed_and_not_before():
    device = Loopback()
    early, source = device.mark(), torch.arange(4.0)
    copy = device.fetch(source)
    late = device.mark()
    assert early.has_passed()
    source.fill_(7.0)  # too early: it shows
    assert [late.has_passed() for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]
    assert copy.tolist() == [7.0] * 4
    source.zero_()
    assert copy.tolist() == [7.0] * 4 and late.seconds_since(early) >= 0


def test_what_is_brought_is_a_copy():
    device, source = Loopback(), torch.arange(6.0).view(2, 3).T
    brought = device.bring(source)
    out = torch.empty(3, 2)
    device.bring_into(source, out)
    source.zero_()
    assert brought.is_contiguous() and brought.flatten().tolist() == out.flatten().tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(AssertionError, match="device memory was used as host memory"):
        device.bring_into(out, out)


def test_a_wait_looks_after_other_things_and_can_be_ended():
    device = Loopback()
    device.fetch(torch.ones(1))
    looked = []
    wait_for(device.mark(), lambda: looked.append(1))
    assert len(looked) == LOOKS
    device.fetch(torch.ones(1))

    def turned() -> None:
        raise Turned

    with pytest.raises(Turned):
        wait_for(device.mark(), turned)


@pytest.mark.parametrize("device", [HOST, Loopback()], ids=["host", "loopback"])
def test_numbers_are_as_they_were_when_they_were_noted(device):
    readings = Readings(device, nothing)
    number = torch.tensor(1.5, dtype=torch.bfloat16)
    first = readings.note(number)
    second = readings.note(torch.tensor([-0.1]))
    number.fill_(9.0)
    assert (first.value, second.value) == (1.5, float(torch.tensor(-0.1)))
    assert readings.note(torch.tensor(float("inf"))).value == float("inf")


def test_several_tensors_are_read_by_one_wait():
    device, looked = Loopback(), []
    found = read_tensors(device, [torch.arange(3), torch.ones(2)], lambda: looked.append(1))
    assert [each.tolist() for each in found] == [[0, 1, 2], [1.0, 1.0]] and len(looked) == LOOKS


def test_every_device_tells_its_name_and_has_room_on_the_host():
    for device in (HOST, Loopback()):
        assert device.name
        assert device.room(torch.ones(2, 3, dtype=torch.int32)).shape == (2, 3)
