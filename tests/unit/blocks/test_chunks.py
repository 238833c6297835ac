"""Runs and rectangles: every run is a few disjoint rectangles that cover exactly it."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave.blocks.chunks import Rectangle, decompose_run, find_cover_fault, run_of_rectangle

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def shapes_and_runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(0, math.prod(shape) - start))


@given(shapes_and_runs())
def test_a_run_is_a_few_rectangles_that_cover_exactly_it(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, length = case
    rectangles = decompose_run(shape, start, length)
    assert len(rectangles) <= max(1, 2 * len(shape) - 1)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    seen: list[int] = []
    for offsets, sizes in rectangles:
        part = numbers[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert part.shape == sizes
        seen.extend(part.reshape(-1).tolist())
    assert seen == list(range(start, start + length))


@given(shapes_and_runs())
def test_a_rectangle_gives_its_run_back(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, length = case
    runs = [run_of_rectangle(shape, *rectangle) for rectangle in decompose_run(shape, start, length)]
    position = start
    for run_start, run_length in runs:
        assert run_start == position
        position += run_length
    assert position == start + length


@given(shapes, st.data())
def test_only_rectangles_that_are_one_run_are_accepted(shape: tuple[int, ...], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    sizes = tuple(data.draw(st.integers(1, extent - offset)) for extent, offset in zip(shape, offsets, strict=True))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    part = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
    if (np.diff(part) == 1).all():
        assert run_of_rectangle(shape, offsets, sizes) == (int(part[0]), len(part))
    else:
        with pytest.raises(ValueError, match="not one run"):
            run_of_rectangle(shape, offsets, sizes)


def test_known_cases() -> None:
    assert decompose_run((), 0, 1) == [Rectangle((), ())]
    assert decompose_run((), 0, 0) == []
    assert decompose_run((0, 3), 0, 0) == []
    assert decompose_run((7,), 2, 3) == [Rectangle((2,), (3,))]
    assert decompose_run((3, 4), 0, 12) == [Rectangle((0, 0), (3, 4))]
    assert decompose_run((3, 4), 2, 8) == [
        Rectangle((0, 2), (1, 2)),
        Rectangle((1, 0), (1, 4)),
        Rectangle((2, 0), (1, 2)),
    ]
    assert len(decompose_run((4, 4, 4), 1, 62)) == 5


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 13), (12, 1), (3, -1)])
def test_a_run_outside_the_tensor_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match=r"not inside a tensor of shape \(3, 4\)"):
        decompose_run((3, 4), start, length)


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ((0,), (1,), "numbers of dimensions differ"),
        ((0, 0), (4, 4), "not inside"),
        ((0, -1), (1, 1), "not inside"),
        ((0, 0), (0, 4), "empty"),
    ],
)
def test_a_rectangle_outside_the_tensor_is_refused(
    offsets: tuple[int, ...], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_of_rectangle((3, 4), offsets, sizes)


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        ([(6, 4), (0, 6)], None),
        ([(0, 6), (7, 3)], r"\[6, 7\) are missing"),
        ([(0, 6), (5, 5)], r"\[5, 6\) occur more than once"),
        ([(0, 10), (2, 3)], r"\[2, 5\) occur more than once"),
        ([(0, 9)], r"\[9, 10\) are missing"),
        ([], r"\[0, 10\) are missing"),
        ([(0, 11)], "11 elements where 10 belong"),
    ],
)
def test_gaps_and_overlaps_are_named(runs: list[tuple[int, int]], fault: str | None) -> None:
    found = find_cover_fault(10, runs)
    assert found is None if fault is None else found is not None and re.search(fault, found)
