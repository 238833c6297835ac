"""Sums on a device have the bits of the CPU's accumulator: by torch's operators, and by the Triton kernel."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from tests.unit.shapes import make_shape

from elaswave.blocks.shapes import MAX_EXPONENT, MIN_EXPONENT, LayerShape
from elaswave.devices import sums_kernel
from elaswave.devices.sums_kernel import NOT_FINITE, Chunks, FlatRange, Gradients, add_by_kernel, add_by_operators
from elaswave.hashing import MASK64
from elaswave.state.sums import ExactAccumulator, plane_dtypes, unused_bits

CPU = torch.device("cpu")
SHAPE = make_shape([(3, 11), (1,), (64,), (5, 40), (129,)])
"""Sizes below, at and above those of a chunk, odd and even."""
CHUNK_ELEMENTS = 64
NOTHING = make_shape([(0,), (4, 0)])
BEFORE = 12345
"""What lies in memory that an addition must not count, or must not touch."""


def without_kernel() -> str | None:
    """Why the kernel cannot run in this process."""
    if not sums_kernel.has_kernel():
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        return "Triton needs a GPU; without one, set TRITON_INTERPRET=1"
    return None


KERNEL = pytest.param("kernel", marks=pytest.mark.skipif(without_kernel() is not None, reason=str(without_kernel())))
DEVICE = torch.device("cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")


class Sums(NamedTuple):
    """A sum on the device with all that is kept beside it."""

    planes: tuple[torch.Tensor, ...]
    maxima: torch.Tensor
    """[micro-batches, tensors]."""
    checksum: torch.Tensor


def runs_of(shape: LayerShape) -> list[FlatRange]:
    return [FlatRange(slot.offset, slot.numel) for slot in shape.tensors]


def sums_on_device(
    by: str, shape: LayerShape, microbatches: Sequence[Sequence[torch.Tensor | None]], exponents: list[int], width: int
) -> Sums:
    """The first addition finds other numbers in memory, which it replaces."""
    runs = runs_of(shape)
    planes = tuple(torch.zeros(shape.size, dtype=dtype, device=DEVICE) for dtype in plane_dtypes(width))
    for run in runs:
        for plane in planes:
            plane[run.offset : run.offset + run.numel] = BEFORE
    maxima = torch.zeros(len(microbatches), len(runs), dtype=torch.int32, device=DEVICE)
    checksum = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    chunks = Chunks(runs, DEVICE, CHUNK_ELEMENTS)
    for number, gradients in enumerate(microbatches):
        there = [None if gradient is None else gradient.to(DEVICE) for gradient in gradients]
        if by == "operators":
            add_by_operators(there, runs, exponents, planes, maxima[number], checksum, is_first=number == 0)
        else:
            addresses, dtype, is_aligned = sums_kernel.addresses_of(there, runs)
            found = Gradients(torch.tensor(addresses, dtype=torch.int64, device=DEVICE), dtype, is_aligned)
            grids = torch.tensor(exponents, dtype=torch.int64, device=DEVICE)
            add_by_kernel(found, chunks, grids, planes, maxima[number], checksum, is_first=number == 0)
    return Sums(tuple(plane.cpu() for plane in planes), maxima.cpu(), checksum.cpu())


def check(
    by: str, shape: LayerShape, microbatches: Sequence[Sequence[torch.Tensor | None]], exponents: list[int], width: int
) -> None:
    """Compares with the CPU's accumulator: planes, padding included, maxima and checksum."""
    found = sums_on_device(by, shape, microbatches, exponents, width)
    expected = ExactAccumulator(shape, width=width)
    expected.reset(exponents)
    for gradients in microbatches:
        assert expected.add([None if gradient is None else gradient.cpu() for gradient in gradients])
    assert all(map(torch.equal, found.planes, expected.planes))
    assert found.maxima.max(0).values.view(torch.float32).tolist() == expected.maxima
    assert (int(found.checksum) << unused_bits(width)) & MASK64 == expected.checksum


def bits_of_every_kind(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Finite numbers of all magnitudes, zeros of both signs and denormals among them: random bits."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for slot in SHAPE.tensors:
        words = torch.randint(-(2**31), 2**31, (slot.numel,), generator=generator, dtype=torch.int64).to(torch.int32)
        values = words.view(torch.float32) if dtype == torch.float32 else words.to(torch.int16).view(torch.bfloat16)
        values = torch.where(values.isfinite(), values, 0.0)
        values[:4] = torch.tensor([0.0, -0.0, 1e-40, -1.5], dtype=dtype)[: slot.numel]
        gradients.append(values.view(slot.shape))
    return gradients


def of_one_scale(dtype: torch.dtype, scale: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(slot.shape, generator=generator) * 2.0**scale).to(dtype) for slot in SHAPE.tensors]


both = pytest.mark.parametrize("by", ["operators", KERNEL])
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
widths = pytest.mark.parametrize("width", [64, 48])


@both
@types
@widths
@pytest.mark.parametrize("exponent", [MIN_EXPONENT, -1, 0, 40, 52, 127, MAX_EXPONENT])
def test_numbers_of_every_magnitude_on_every_grid(by: str, dtype: torch.dtype, width: int, exponent: int) -> None:
    microbatches = [bits_of_every_kind(dtype, seed) for seed in range(3)]
    exponents = [exponent, exponent + 3 if exponent < 100 else exponent - 3, exponent, exponent, exponent]
    check(by, SHAPE, microbatches, exponents, width)


@both
@types
@widths
def test_numbers_beside_the_border_of_the_fast_path(by: str, dtype: torch.dtype, width: int) -> None:
    """At 2**51 units, and where halves of a unit are rounded to even."""
    exponents = [-60, -10, 0, 12, 60]
    near = torch.tensor(
        [
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            0.75,
            2.0**51,
            -(2.0**51),
            1.5 * 2.0**51,
            -1.25 * 2.0**51,
            -(2.0**52),
            2.0**62,
            -(2.0**63),
        ]
    )
    microbatches = []
    for turn in range(3):
        gradients = []
        for slot, exponent in zip(SHAPE.tensors, exponents, strict=True):
            values = near.roll(turn).repeat(slot.numel // len(near) + 1)[: slot.numel] * 2.0**-exponent
            gradients.append(values.to(dtype).view(slot.shape))
        microbatches.append(gradients)
    check(by, SHAPE, microbatches, exponents, width)


@both
@types
@widths
def test_real_sizes_with_tensors_without_gradients(by: str, dtype: torch.dtype, width: int) -> None:
    microbatches: list[list[torch.Tensor | None]] = [list(of_one_scale(dtype, -12, seed)) for seed in range(4)]
    microbatches[0][2] = microbatches[2][4] = None
    check(by, SHAPE, microbatches, [30, 31, 32, 33, 34], width)


@both
@widths
def test_gradients_that_start_anywhere(by: str, width: int) -> None:
    """The kernel may not load whole vectors there."""
    flat = torch.randn(SHAPE.size + 1, device=DEVICE)
    gradients = [flat[slot.offset + 1 : slot.stop + 1].view(slot.shape) for slot in SHAPE.tensors]
    assert all(gradient.data_ptr() % 16 for gradient in gradients)
    check(by, SHAPE, [gradients, gradients], [20] * 5, width)


@both
@types
@widths
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_adds_no_units_and_shows_in_its_row(
    by: str, dtype: torch.dtype, width: int, value: float
) -> None:
    good = [of_one_scale(dtype, 3, seed) for seed in range(3)]
    bad = [[gradient.clone() for gradient in gradients] for gradients in good]
    for place in (0, 70, 199):
        bad[1][3].view(-1)[place] = value
        good[1][3].view(-1)[place] = 0.0
    exponents = [25] * 5
    found, expected = (sums_on_device(by, SHAPE, each, exponents, width) for each in (bad, good))
    assert all(map(torch.equal, found.planes, expected.planes))
    assert torch.equal(found.checksum, expected.checksum)
    is_finite = found.maxima < NOT_FINITE
    assert is_finite.tolist() == [[True] * 5, [True, True, True, False, True], [True] * 5]
    assert torch.equal(found.maxima[is_finite], expected.maxima[is_finite])


@both
@widths
def test_a_layer_without_elements(by: str, width: int) -> None:
    found = sums_on_device(by, NOTHING, [[torch.zeros(0), torch.zeros(4, 0)]], [3, 4], width)
    assert found.maxima.tolist() == [[0, 0]] and found.checksum.tolist() == [0]


@both
def test_the_checksum_need_not_be_kept(by: str) -> None:
    gradients, exponents, runs = of_one_scale(torch.float32, 0, 7), [20] * 5, runs_of(SHAPE)
    sums, maxima = torch.zeros(SHAPE.size, dtype=torch.int64, device=DEVICE), torch.zeros(5, dtype=torch.int32)
    there = [gradient.to(DEVICE) for gradient in gradients]
    if by == "operators":
        add_by_operators(there, runs, exponents, [sums], maxima.to(DEVICE))
    else:
        addresses, dtype, is_aligned = sums_kernel.addresses_of(there, runs)
        found = Gradients(torch.tensor(addresses, device=DEVICE), dtype, is_aligned)
        grids = torch.tensor(exponents, device=DEVICE)
        add_by_kernel(found, Chunks(runs, DEVICE), grids, [sums], maxima.to(DEVICE))
    expected = ExactAccumulator(SHAPE, checked=False)
    expected.reset(exponents)
    assert expected.add(gradients)
    assert torch.equal(sums.cpu(), expected.sum)


def test_gradients_of_two_types_with_gaps_or_of_another_size_are_refused() -> None:
    with pytest.raises(AssertionError, match="gradients of types"):
        sums_kernel.addresses_of(
            [torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)], [FlatRange(0, 3), FlatRange(32, 3)]
        )
    with pytest.raises(AssertionError, match="order of memory"):
        sums_kernel.addresses_of([torch.zeros(3, 4).t()], [FlatRange(0, 12)])
    with pytest.raises(AssertionError, match="gradients of .11. elements"):
        sums_kernel.addresses_of([torch.zeros(11)], [FlatRange(0, 12)])
    assert sums_kernel.addresses_of([None], [FlatRange(0, 12)]) == ([0], torch.float32, True)
