"""Exact sums on a device have the integers of the host's, whatever is added; here the device's memory is the host's."""

import math
import random

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.shapes import MAX_EXPONENT, MIN_EXPONENT
from elaswave.state import device_sums
from elaswave.state.device_sums import DeviceAccumulator, pieces_of
from elaswave.state.sums import ExactAccumulator, add_planes, checksum, reduced_gradient

SHAPE = make_shape([(7, 9), (40,), (), (3, 33), (0,)], first_id=4)
CPU = torch.device("cpu")


def both(width: int, shape=SHAPE, exponents=None):
    pair = ExactAccumulator(shape, width=width), DeviceAccumulator(shape, CPU, width=width)
    for each in pair:
        each.reset(exponents or [40] * len(shape.tensors))
    return pair


def gradients(rng: random.Random, shape=SHAPE, dtype=torch.float32, size: float = 1.0):
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    return [torch.randn(slot.shape, generator=generator).mul_(size).to(dtype) for slot in shape.tensors]


def assert_equal(host: ExactAccumulator, device: DeviceAccumulator) -> None:
    assert all(torch.equal(one, other) for one, other in zip(host.planes, device.planes, strict=True))
    assert torch.equal(host.sum, device.sum)
    assert (host.maxima, host.checksum) == (device.maxima, device.checksum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 48])
def test_words_maxima_and_checksums_are_those_of_the_host(width, dtype):
    rng = random.Random(width)
    for _ in range(8):
        exponents = [rng.randint(MIN_EXPONENT, MAX_EXPONENT) for _ in SHAPE.tensors]
        host, device = both(width, exponents=exponents)
        for number in range(rng.randint(1, 4)):
            found = gradients(rng, dtype=dtype, size=2.0 ** rng.randint(-60, 60))
            given = [None if rng.random() < 0.2 else each for each in found]
            assert host.add(given) is True
            assert math.isfinite(device.add(given)), number
            assert_equal(host, device)


def test_elements_that_the_hosts_fast_path_cannot_hold_have_the_same_words():
    host, device = both(64, exponents=[140] * len(SHAPE.tensors))
    found = gradients(random.Random(1))
    found[0][0, 0] = torch.finfo(torch.float32).max
    for accumulator in (host, device):
        accumulator.add(found)
    assert_equal(host, device)


def test_halves_round_to_even():
    shape = make_shape([(6,)])
    host, device = both(64, shape, [0])
    halves = [torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])]
    host.add(halves)
    device.add(halves)
    assert_equal(host, device)


def test_a_gradient_of_other_strides_is_added_by_its_elements():
    shape = make_shape([(4, 6)])
    host, device = both(48, shape)
    turned = [torch.arange(24.0).view(6, 4).T]
    host.add(turned)
    device.add(turned)
    assert_equal(host, device)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_answer_and_in_no_maximum(wrong):
    _, device = both(64)
    first = gradients(random.Random(1))
    device.add(first)
    known = device.maxima
    second = gradients(random.Random(2), size=100.0)
    second[3][0, 5] = wrong
    assert not math.isfinite(device.add(second))
    assert device.maxima == known
    device.reset([40] * len(SHAPE.tensors))
    assert math.isfinite(device.add(first))
    assert device.maxima == known


def test_a_reset_sum_is_empty_whether_or_not_something_is_added():
    host, device = both(48)
    found = gradients(random.Random(3))
    for accumulator in (host, device):
        accumulator.add(found)
        accumulator.reset([30] * len(SHAPE.tensors))
    assert_equal(host, device)
    for accumulator in (host, device):
        accumulator.add(found)
    assert_equal(host, device)


def test_figures_that_were_read_together_are_known_without_a_wait():
    _, device = both(64)
    device.add(gradients(random.Random(4)))
    maxima, total = device.maxima, device.checksum
    read = device.figures.clone()
    device.figures.fill_(math.nan)  # so that a second look at the device would show
    device._known = None
    device.learn(read)
    assert (device.maxima, device.checksum) == (maxima, total)


def test_a_unit_without_tensors_has_sums_of_nothing():
    _, device = both(64, make_shape([]))
    assert math.isfinite(device.add([]))
    assert (device.maxima, device.checksum) == ([], 0)


@pytest.mark.parametrize("width", [64, 48])
def test_totals_their_checksums_and_means_are_those_of_the_host(width):
    rng = random.Random(width)
    exponents = [rng.randint(20, 60) for _ in SHAPE.tensors]
    parts = []
    for _ in range(3):
        host, _ = both(width, exponents=exponents)
        host.add(gradients(rng))
        parts.append(host.planes)
    for some in (parts[:1], parts[:2], parts):
        total = add_planes(some)
        assert torch.equal(total, device_sums.add_planes_on_device(some))
        for runs in ([(0, SHAPE.size)], [(5, 70)], [(64, 96)], [(0, 32), (64, 96), (96, 128), (192, SHAPE.size)]):
            there, pieces = torch.cat([total[start:stop] for start, stop in runs]), pieces_of(SHAPE, runs)
            found = int(device_sums.checksum_on_device(there, pieces)) & (1 << 64) - 1
            assert found == sum(checksum(total[start:stop], SHAPE, start) for start, stop in runs) & (1 << 64) - 1
            before = there.clone()
            mean = device_sums.reduced_gradient_on_device(there, pieces, exponents, len(some), 1, width)
            here = [
                reduced_gradient(total[start:stop], SHAPE, start, exponents, len(some), 1, width)
                for start, stop in runs
            ]
            assert torch.equal(mean, torch.cat(here)) and torch.equal(there, before)


def test_pieces_of_a_tensor_that_come_to_lie_beside_each_other_are_one():
    shape = make_shape([(96,), (40,), (32,)], first_id=2)
    assert [slot.offset for slot in shape.tensors] == [0, 96, 160]
    # Every other block of 32 elements; the second tensor's end has padding behind it.
    found = pieces_of(shape, [(0, 32), (64, 96), (128, 160)])
    assert found.tensors == (0, 1)
    assert found.slices == (slice(0, 64), slice(64, 72))
    assert found.gaps == (slice(72, 96),)
    assert pieces_of(shape, [(0, 192)]) == (
        (0, 1, 2),
        (slice(0, 96), slice(96, 136), slice(160, 192)),
        (slice(136, 160),),
    )
    assert pieces_of(make_shape([]), [(0, 0)]) == ((), (), ())


@pytest.mark.parametrize("element", [72, 95])
def test_padding_is_in_no_checksum_and_no_mean(element):
    shape = make_shape([(96,), (40,), (32,)])
    pieces = pieces_of(shape, [(0, 32), (64, 96), (128, 160)])
    total = torch.arange(96)
    expected = int(device_sums.checksum_on_device(total, pieces))
    total[element] = 1 << 40
    assert int(device_sums.checksum_on_device(total, pieces)) == expected
    assert device_sums.reduced_gradient_on_device(total, pieces, [40] * 3, 2)[72:].tolist() == [0.0] * 24


def test_sums_of_float32_have_no_checksum_and_plain_means():
    total = torch.arange(float(SHAPE.size))
    pieces = pieces_of(SHAPE, [(0, SHAPE.size)])
    assert int(device_sums.checksum_on_device(total, pieces)) == 0
    assert torch.equal(device_sums.reduced_gradient_on_device(total, pieces, [], 4), total / 4)
