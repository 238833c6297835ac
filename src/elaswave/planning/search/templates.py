"""Layers, and workers, to the stages of a pipeline of one worker each, beside other pipelines. Pure.

- `template_beside`: the slowest stage as fast as possible, by dynamic programming;
- `template_of_few`: for few micro-batches, which mostly wait for their way through all stages; small pipelines only,
  by trying all.

Source: Oobleck (Jang et al., SOSP 2023, arXiv 2309.08125, section 4), whose templates these are. Differs: workers of
several speeds, and the number of micro-batches.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb, factorial, prod
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs

TRIED_MAX = 2000
"""Splits, times orders of the workers, that `template_of_few` tries."""
_PARTS = ("forward", "input_gradient", "weight_gradient")


class PipelineTemplate(NamedTuple):
    """A pipeline of one worker per stage."""

    ranges: tuple[tuple[int, int], ...]
    """Layers [start, stop) of each stage."""
    speeds: tuple[float, ...]
    """Of each stage's worker."""


@lru_cache(maxsize=1024)
def template_beside(
    costs: Costs, speeds: tuple[float, ...], others: frozenset[tuple[int, int]]
) -> PipelineTemplate | None:
    """Makes a pipeline of workers of these speeds: its slowest stage as fast as may be, beside others in one `Layout`.

    Which worker has which stage is chosen with the layers. Of splits up to a layer with the same workers only the best
    is kept: smallest slowest stage, then the most even, then earliest starts.

    Args:
        costs: of the layers.
        speeds: of the pipeline's workers, in any order.
        others: layers of other pipelines' stages; none may lie inside one of these or enclose it.
    Returns:
        None if there is no such pipeline.
    """
    busy = costs.prefix["busy_s"].tolist()
    last, depth = costs.num_layers, len(speeds)
    kinds = sorted(set(speeds), reverse=True)
    wanted = tuple(speeds.count(kind) for kind in kinds)
    may_end = [
        [stop for stop in range(start + 1, last + 1) if _may_be(start, stop, others)] for start in range(last)
    ]  # fmt: skip

    # best[stop, workers used]: slowest stage, then sum of squares, then where the stages before begin, and their kinds.
    best: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[int, ...], tuple[int, ...]]] = {
        (0, (0,) * len(kinds)): (0.0, 0.0, (), ())
    }
    for stage in range(depth):
        reached: dict[tuple[int, tuple[int, ...]], tuple[float, float, tuple[int, ...], tuple[int, ...]]] = {}
        least, most = (last, last) if stage == depth - 1 else (stage + 1, last - (depth - stage - 1))
        for (start, used), (slowest, squares, starts, chosen) in best.items():
            for stop in may_end[start]:
                if not least <= stop <= most:
                    continue
                for kind, speed in enumerate(kinds):
                    if used[kind] == wanted[kind]:
                        continue
                    own = (busy[stop] - busy[start]) / speed
                    found = (max(slowest, own), squares + own * own, (*starts, start), (*chosen, kind))
                    key = (stop, (*used[:kind], used[kind] + 1, *used[kind + 1 :]))
                    if key not in reached or found < reached[key]:
                        reached[key] = found
        best = reached
    if (last, wanted) not in best:
        return None
    _, _, starts, chosen = best[last, wanted]
    return PipelineTemplate(tuple(pairwise((*starts, last))), tuple(kinds[kind] for kind in chosen))


@lru_cache(maxsize=1024)
def template_of_few(
    costs: Costs, speeds: tuple[float, ...], others: frozenset[tuple[int, int]], num_microbatches: int, *, split: bool
) -> PipelineTemplate | None:
    """Finds the pipeline with the shortest step of so many micro-batches: by a lower bound of it, worker by worker.

    A worker waits for its first input and does all its work; or all but its weight gradients, before the last gradient
    goes back to the first stage, whose weight gradient follows; and a micro-batch goes through all stages and back to
    each of them, whose weight gradient follows. With about as many micro-batches as stages it matters
    less how even stages are than which worker is first and how long the way is.

    Args:
        costs, speeds, others: as of `template_beside`.
        num_microbatches: of this pipeline.
        split: whether backwards are split.
    Returns:
        None if there is no such pipeline, or there are more than `TRIED_MAX` to try.
    """
    depth, num_layers = len(speeds), costs.num_layers
    alike = prod(factorial(speeds.count(speed)) for speed in set(speeds))
    if not 0 < comb(num_layers - 1, depth - 1) * (factorial(depth) // alike) <= TRIED_MAX:
        return None
    orders = orders_of(speeds)
    splits = [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), depth - 1)]
    bounds = [each for each in splits if all(_may_be(start, stop, others) for start, stop in pairwise(each))]
    if not bounds:
        return None
    parts = [np.diff(costs.prefix[f"{name}_s"][np.array(bounds)]) for name in _PARTS]
    best: tuple[float, float, int, tuple[float, ...]] | None = None
    for order in orders:
        forward, back, rest = (seconds / np.array(order) for seconds in parts)
        if not split:
            back, rest = back + rest, np.zeros_like(rest)
        there = np.cumsum(forward, axis=1) - forward
        returns = np.cumsum(back, axis=1) - back + rest[:, :1]
        ends = there + num_microbatches * (forward + back) + np.maximum(num_microbatches * rest, returns)
        way = forward.sum(axis=1, keepdims=True) + np.cumsum(back[:, ::-1], axis=1)[:, ::-1] + rest
        ends = np.maximum(ends, way)
        longest, squares = ends.max(axis=1), ((forward + back + rest) ** 2).sum(axis=1)
        index = int(np.lexsort((squares, longest))[0])
        found = (float(longest[index]), float(squares[index]), index, order)
        if best is None or found[:2] < best[:2]:
            best = found
    assert best is not None
    return PipelineTemplate(tuple(pairwise(bounds[best[2]])), best[3])


def orders_of(speeds: Sequence[float]) -> list[tuple[float, ...]]:
    """Lists all orders of some speeds that differ, the largest first; what takes time is how many these are, not how
    many permutations there are of workers, most of whom are alike."""
    if not speeds:
        return [()]
    first = sorted(set(speeds), reverse=True)
    return [(speed, *rest) for speed in first for rest in orders_of(_without(speeds, speed))]


def _without(speeds: Sequence[float], speed: float) -> tuple[float, ...]:
    """Returns the speeds less one of these."""
    place = speeds.index(speed)
    return (*speeds[:place], *speeds[place + 1 :])


def _may_be(start: int, stop: int, others: frozenset[tuple[int, int]]) -> bool:
    """Tells whether a stage neither lies inside one of these nor encloses one."""
    return not any((a < start and stop < b) or (start < a and b < stop) for a, b in others)
