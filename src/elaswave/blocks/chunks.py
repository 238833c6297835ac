"""Runs of a flattened tensor as rectangles of the tensor, and back. Pure: no torch, no IO.

A block of optimizer state is a run of one layer's flat storage, so its share of a tensor is a run [start, stop) of
that tensor's row-major elements. torch.distributed.checkpoint knows only rectangles (offsets and sizes per
dimension). Every run is a union of a few rectangles, each of which is again one run: a partial first row, whole
rows, a partial last row, and so on inside the partial rows. So checking that rectangles cover a tensor is checking
that runs follow each other.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Rectangle(NamedTuple):
    """An axis-aligned part of a tensor, whose elements are one run of the flattened tensor."""

    offsets: tuple[int, ...]
    """First index in every dimension."""
    sizes: tuple[int, ...]
    """Number of elements in every dimension, at least 1."""


def decompose_run(shape: Sequence[int], start: int, length: int) -> list[Rectangle]:
    """Finds the fewest rectangles that make up a run of the flattened tensor, in the order of the run.

    Args:
        shape: of the whole tensor; () is a scalar, which has one element.
        start: first element of the run, row-major.
        length: number of elements; 0 gives no rectangle.
    Returns:
        At most ``2 * len(shape) - 1`` rectangles (one for a scalar), each itself a run, one after the other.
    Raises:
        ValueError: the run does not lie inside the tensor.
    """
    num_elements = math.prod(shape)
    if start < 0 or length < 0 or start + length > num_elements:
        raise ValueError(
            f"the run [{start}, {start + length}) is not inside a tensor of shape {tuple(shape)}, "
            f"which has {num_elements} elements"
        )
    return _decompose(tuple(shape), start, start + length) if length else []


def _decompose(shape: tuple[int, ...], start: int, stop: int) -> list[Rectangle]:
    if len(shape) <= 1:
        return [Rectangle((start,), (stop - start,)) if shape else Rectangle((), ())]
    inner = shape[1:]
    row_length = math.prod(inner)
    rectangles: list[Rectangle] = []

    def add_part_of_row(row: int, first: int, last: int) -> None:
        for offsets, sizes in _decompose(inner, first, last):
            rectangles.append(Rectangle((row, *offsets), (1, *sizes)))

    first_row, first_column = divmod(start, row_length)
    last_row, last_column = divmod(stop, row_length)
    if first_row == last_row:
        add_part_of_row(first_row, first_column, last_column)
        return rectangles
    if first_column:
        add_part_of_row(first_row, first_column, row_length)
        first_row += 1
    if first_row < last_row:
        offsets = (first_row, *(0 for _ in inner))
        rectangles.append(Rectangle(offsets, (last_row - first_row, *inner)))
    if last_column:
        add_part_of_row(last_row, 0, last_column)
    return rectangles


def run_of_rectangle(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Finds the run of the flattened tensor that a rectangle of :func:`decompose_run` stands for.

    Args:
        shape: of the whole tensor.
        offsets: first index in every dimension.
        sizes: number of elements in every dimension.
    Returns:
        (start, length) in elements.
    Raises:
        ValueError: the rectangle is empty, is not inside the tensor, or is more than one run.
    """

    def fault(what: str) -> ValueError:  # told only where there is one: a checkpoint has thousands of rectangles
        place = f"rectangle at {tuple(offsets)} of size {tuple(sizes)} in a tensor of shape {tuple(shape)}"
        return ValueError(f"{place}: {what}")

    if not len(shape) == len(offsets) == len(sizes):
        raise fault("the numbers of dimensions differ")
    for extent, offset, size in zip(shape, offsets, sizes, strict=True):
        if offset < 0 or size < 1 or offset + size > extent:
            raise fault("it is empty or not inside the tensor")
    start = 0
    for extent, offset in zip(shape, offsets, strict=True):
        start = start * extent + offset
    wide = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if any(size != extent for size, extent in zip(sizes[wide + 1 :], shape[wide + 1 :], strict=True)):
        raise fault("its elements are not one run of the flattened tensor")
    return start, math.prod(sizes)


def find_cover_fault(num_elements: int, runs: Iterable[tuple[int, int]]) -> str | None:
    """Checks whether runs cover [0, num_elements) exactly once.

    Args:
        num_elements: of the whole tensor.
        runs: (start, length) pairs in any order.
    Returns:
        None if they do, else a phrase that names the first gap or overlap.
    """
    covered = 0
    for start, length in sorted(runs):
        if start > covered:
            return f"elements [{covered}, {start}) are missing"
        if start < covered:
            return f"elements [{start}, {min(covered, start + length)}) occur more than once"
        covered = start + length
    if covered > num_elements:
        return f"there are {covered} elements where {num_elements} belong"
    if covered < num_elements:
        return f"elements [{covered}, {num_elements}) are missing"
    return None
