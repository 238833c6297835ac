"""Whole layers, and workers, to stages: every dynamic programme over layers is here. Pure.

- `split_layers`: the slowest stage as fast as possible, under limits of memory;
- `split_within`: the same where each boundary may stand in few places only, as after a loss;
- `choose_widths`: workers for stages, since a layer may be a quarter of a stage; `split_layers_and_workers`: both.

Pipelines of one worker per stage are `elaswave.planning.search.templates`, how neighbouring stages share layers is
`elaswave.planning.programs.shared_layers`. `split_layers` is exact for integers (ties
are ties, and every worker computes the same) and fast for hundreds of stages: both its dynamic programmes look only at
boundaries that a bound on the slowest stage leaves possible.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

N = TypeVar("N", int, float)

_SLACK = 1e-9
"""Relative; differences of rounding between floats that are equal on paper."""


def split_layers(
    prefix: Sequence[N], factors: Sequence[N], earliest_starts: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...] | None:
    """Splits a chain of layers into contiguous stages so that the slowest stage is as fast as possible.

    Among the splits with the smallest largest time it takes the most even one (smallest sum of cost x time, which is
    width x time**2); of equal ones the one whose first stages have the fewest layers.

    Args:
        prefix: cost of the layers before each one, and of all of them; ints are compared exactly.
        factors: of each stage, its time per unit of cost: one over its width or speed, up to a common constant.
        earliest_starts: for each stage and each layer at which it may end the first layer at which it may begin
            (memory), ascending; None means that there is no limit.
    Returns:
        Boundaries, one more than there are stages, from 0 to the number of layers; None if the limits leave no split.
    Raises:
        ValueError: fewer layers than stages, or no stage.
    """
    if not 1 <= len(factors) <= len(prefix) - 1:
        raise ValueError(f"cannot split {len(prefix) - 1} layers into {len(factors)} stages: every stage needs a layer")
    if earliest_starts is None:
        # Equal ints and floats are one key to a cache; the flag keeps them apart, since only ints are exact.
        return _split_freely(tuple(prefix), tuple(factors), isinstance(prefix[-1], int))
    return _split(prefix, factors, earliest_starts)


@lru_cache(maxsize=64)
def _split_freely(prefix: tuple[float, ...], factors: tuple[float, ...], _of_ints: bool) -> tuple[int, ...] | None:
    """Does the same as `_split`, but without limits: a plan asks for stages of the same widths several times."""
    return _split(prefix, factors, None)


def _split(
    prefix: Sequence[N], factors: Sequence[N], earliest_starts: Sequence[Sequence[int]] | None
) -> tuple[int, ...] | None:
    """Does the same as `split_layers`, but for at least as many layers as stages."""
    num_layers, num_stages = len(prefix) - 1, len(factors)
    windows = _windows(prefix, factors, _rough_bound(prefix, factors, earliest_starts))
    slowest = _smallest_slowest(prefix, factors, earliest_starts, windows)
    if slowest is None:
        return None
    # Only the values of splits that keep to `slowest` matter from here on.
    limit = slowest if isinstance(slowest, int) else slowest * (1 + _SLACK)
    windows = _windows(prefix, factors, slowest / (prefix[-1] * max(factors)) if prefix[-1] else float("inf"))
    best: dict[int, N] = {num_layers: prefix[0]}
    choices: list[dict[int, int]] = []
    for stage in reversed(range(num_stages)):
        following, best = best, {}
        choice: dict[int, int] = {}
        factor = factors[stage]
        first, last = windows[stage]
        fits = None if earliest_starts is None else earliest_starts[stage]
        for start in range(first, last + 1):
            known = None
            for stop in range(start + 1, num_layers + 1):
                cost = prefix[stop] - prefix[start]
                # Both only get worse with a later stop: `fits` ascends.
                if cost * factor > limit or (fits is not None and start < fits[stop]):
                    break
                rest = following.get(stop)
                if rest is None:
                    continue
                total = cost * cost * factor + rest
                # Of equal ones the earliest stop stays: first stages get the fewest layers.
                if known is None or total < known:
                    known, choice[start] = total, stop
            if known is not None:
                best[start] = known
        choices.append(choice)
    bounds = [0]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(bounds)


def _windows(prefix: Sequence[N], factors: Sequence[N], bound: float) -> list[tuple[int, int]]:
    """Finds the first and last layer at which each stage can begin if no stage takes longer than a bound; gives one
    more for the end.

    Every stage has a layer, and the stages before and after cannot hold more than the bound lets them. Floats are
    enough here: windows only leave out what is far off.

    Args:
        prefix: as in `split_layers`.
        factors: as in `split_layers`.
        bound: as a share of the time of all layers on the slowest stage; infinite if there is none.
    """
    num_layers, num_stages = len(prefix) - 1, len(factors)
    if bound == float("inf"):
        return [(stage, num_layers - (num_stages - stage)) for stage in range(num_stages + 1)]
    shares, rates = _normalised(prefix, factors)
    first, last = [0] * (num_stages + 1), [0] * (num_stages + 1)
    wide = bound * (1 + 1e-6)
    reach = 1e-9
    for stage in range(num_stages):
        reach += wide * rates[stage]
        last[stage + 1] = min(bisect_right(shares, reach) - 1, num_layers - (num_stages - stage - 1))
    reach = 1e-9
    first[num_stages] = num_layers
    for stage in reversed(range(1, num_stages)):
        reach += wide * rates[stage]
        first[stage] = max(bisect_left(shares, 1.0 - reach), stage)
    return list(zip(first, last))


def _normalised(prefix: Sequence[N], factors: Sequence[N]) -> tuple[list[float], list[float]]:
    """Costs before each layer as shares of all, and the speed of each stage relative to the slowest one."""
    total, slowest = prefix[-1], max(factors)
    return [value / total if total else 0.0 for value in prefix], [slowest / factor for factor in factors]


def _rough_bound(prefix: Sequence[N], factors: Sequence[N], earliest_starts: Sequence[Sequence[int]] | None) -> float:
    """Finds a time that some split keeps to, by filling stages one after the other; it is infinite if none was found.

    It is a share of the time of all layers on the slowest stage.
    """
    num_layers, num_stages = len(prefix) - 1, len(factors)
    shares, rates = _normalised(prefix, factors)

    def possible(bound: float) -> bool:
        start = 0
        for stage, rate in enumerate(rates):
            stop = bisect_right(shares, shares[start] + bound * rate) - 1
            stop = min(stop, num_layers - (num_stages - stage - 1))
            if earliest_starts is not None:
                stop = min(stop, bisect_right(earliest_starts[stage], start) - 1)
            # A split may exist all the same: then the bound is larger than need be, and windows are wider.
            if stop <= start:
                return False
            start = stop
        return start == num_layers

    low, high = 1.0 / sum(rates), 1.0 + 1e-6
    if not prefix[-1] or not possible(high):
        return float("inf")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
        if high - low <= 1e-6 * high:
            break
    return high * (1 + 1e-9)


def _smallest_slowest(
    prefix: Sequence[N],
    factors: Sequence[N],
    earliest_starts: Sequence[Sequence[int]] | None,
    windows: Sequence[tuple[int, int]],
) -> N | None:
    """Finds the smallest possible largest stage time over all contiguous splits, by dynamic programming over stages.

    No bisection: since every stage needs a layer, the slowest of the stages up to a layer may fall when a layer is
    added (a costly one moves to an earlier, wider stage).
    """
    earlier: dict[int, N] = {0: prefix[0]}
    for stage, factor in enumerate(factors):
        current: dict[int, N] = {}
        first, last = windows[stage + 1]
        fits = None if earliest_starts is None else earliest_starts[stage]
        lowest = windows[stage][0]
        for stop in range(first, last + 1):
            slowest: N | None = None
            end = prefix[stop]
            for start in range(stop - 1, (lowest if fits is None else max(lowest, fits[stop])) - 1, -1):
                time = (end - prefix[start]) * factor
                # With earlier starts the stage only gets longer.
                if slowest is not None and time >= slowest:
                    break
                before = earlier.get(start)
                if before is not None:
                    worst = before if before > time else time
                    if slowest is None or worst < slowest:
                        slowest = worst
            if slowest is not None:
                current[stop] = slowest
        earlier = current
    return earlier.get(len(prefix) - 1)


# ------------------------------------------------------------------------------------------------------------ workers


def choose_widths(
    seconds: np.ndarray, num_workers: int, num_microbatches: int, current: Sequence[int]
) -> np.ndarray | None:
    """Chooses workers for each stage, all equally fast, such that the busiest is done as early as possible.

    A worker runs whole micro-batches: at a pace T, n = floor(T / seconds) of them, so a stage needs M / n workers,
    rounded up. Workers that are not needed elsewhere stay in their stage, so that few change stage.

    Args:
        seconds: of one micro-batch in each stage, on one worker, shape [stages].
        num_workers: to be dealt out, all of them.
        num_microbatches: of the step.
        current: workers that each stage has.
    Returns:
        int64 [stages], each at least 1; None if there are fewer workers than stages.
    """
    num_stages = len(seconds)
    if num_workers < num_stages:
        return None
    # Layers may cost nothing, and a pace is divided by these.
    seconds = np.maximum(np.asarray(seconds, dtype=np.float64), 1e-30)

    def needed(pace: float) -> np.ndarray | None:
        each = np.floor(pace / seconds * (1 + _SLACK))
        return None if bool(np.any(each < 1)) else np.ceil(num_microbatches / each)

    low, high = 0.0, float(seconds.max()) * num_microbatches
    for _ in range(60):
        middle = (low + high) / 2
        found = needed(middle)
        low, high = (low, middle) if found is not None and found.sum() <= num_workers else (middle, high)
    least = needed(high)
    assert least is not None
    widths = least.astype(np.int64)
    spare = num_workers - int(widths.sum())
    # First the workers of a stage stay there; then the stages with the most work per worker get more.
    keep = np.maximum(0, np.asarray(current, dtype=np.int64) - widths)
    for stage in np.argsort(-(seconds / widths), kind="stable"):
        kept = min(spare, int(keep[stage]))
        widths[stage] += kept
        spare -= kept
    while spare:
        helped = np.argsort(-(seconds / widths), kind="stable")[:spare]
        widths[helped] += 1
        spare -= len(helped)
    return widths


def split_layers_and_workers(
    prefix: np.ndarray, num_stages: int, num_workers: int, num_microbatches: int
) -> tuple[int, ...] | None:
    """Boundaries for which `choose_widths` finds the best widths of all: layers and workers chosen together.

    For a pace T the fewest workers for the stages up to a layer follow by dynamic programming; the smallest T whose
    fewest workers are enough is found by bisection. It is for small problems: stages x layers**2 for each T.

    Args:
        prefix: seconds of the layers before each one, and of all of them, float64.
        num_stages: of equally fast workers.
        num_workers: at least num_stages.
        num_microbatches: of the step.
    Returns:
        Boundaries, or None if there are fewer workers or layers than stages.
    """
    num_layers = len(prefix) - 1
    if not num_stages <= min(num_layers, num_workers):
        return None
    seconds = prefix[None, :] - prefix[:, None]  # [start, stop]
    ordered = np.arange(num_layers + 1)[None, :] > np.arange(num_layers + 1)[:, None]
    seconds = np.where(ordered, np.maximum(seconds, 1e-30), np.inf)

    def fewest_workers(pace: float) -> list[np.ndarray]:
        """Computes for each number of stages, and each layer, the fewest workers for the layers before it."""
        each = np.floor(pace / seconds * (1 + _SLACK))
        workers = np.where(each >= 1, np.ceil(num_microbatches / np.maximum(each, 1)), np.inf)
        found = [np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)]
        for _ in range(num_stages):
            found.append((found[-1][:, None] + workers).min(axis=0))
        return [workers, *found]

    low, high = float(prefix[-1]) * num_microbatches / num_workers / 2, float(prefix[-1]) * num_microbatches
    if fewest_workers(high)[-1][-1] > num_workers:
        return None
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fewest_workers(middle)[-1][-1] <= num_workers else (middle, high)
    workers, *fewest = fewest_workers(high)
    bounds = [num_layers]
    for before in reversed(fewest[:-1]):
        bounds.append(int(np.argmin(before + workers[:, bounds[-1]])))
    return tuple(reversed(bounds))


def split_within(
    starts: Sequence[Sequence[int]],
    end: int,
    time: Callable[[int, int, int], int],
    cost: Callable[[int, int, int], int],
) -> tuple[int, ...]:
    """Boundaries between stages: the slowest stage as fast as possible, then the smallest sum of costs, then earliest.

    Two dynamic programmes over stages, from the last to the first, each by the layer at which a stage begins: the
    smallest possible slowest time, then the smallest sum by boundaries that keep to it.

    Args:
        starts: for each stage the layers at which it may begin, ascending.
        end: one past the last layer.
        time: of a stage with layers [start, stop): (stage, start, stop).
        cost: of the same.
    Returns:
        Where each stage begins, and the end.
    """
    stops = [*starts[1:], (end,)]
    slowest = {end: 0}
    for stage in reversed(range(len(starts))):
        slowest = {
            start: min(max(time(stage, start, stop), slowest[stop]) for stop in stops[stage]) for start in starts[stage]
        }
    limit = slowest[starts[0][0]]
    best: dict[int, tuple[int, tuple[int, ...]]] = {end: (0, (end,))}
    for stage in reversed(range(len(starts))):
        following, best = best, {}
        for start in starts[stage]:
            options = [
                (cost(stage, start, stop) + following[stop][0], (start, *following[stop][1]))
                for stop in stops[stage]
                if stop in following and time(stage, start, stop) <= limit
            ]
            if options:
                # Among equal costs the tuples decide: earliest boundaries.
                best[start] = min(options)
    return best[starts[0][0]][1]
