"""The graph axis: which layers and how many workers each stage has, and where micro-batches are cut. Pure.

Three moves, from coarse to fine:

- *whole layers* go to stages so that the slowest stage is as fast as possible (`split_layers`), under limits of memory;
- *workers* change stage (`choose_widths`), since a layer may be a quarter of a stage;
- *neighbours share layers* (`share_layers`): micro-batches are cut on either side of a layer, in whatever proportion
  makes the work of stages match their workers' speed. Where workers of a stage cannot have the same number of
  micro-batches, cuts are spread over more layers (`widen_cuts`), so that a worker with one micro-batch more can run
  fewer layers of each.

Layer splits are exact for integers (ties are ties, and every worker computes the same) and fast for hundreds of stages:
both dynamic programmes look only at boundaries that a bound on the slowest stage leaves possible.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
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
    num_layers, num_stages = len(prefix) - 1, len(factors)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"cannot split {num_layers} layers into {num_stages} stages: every stage needs a layer")
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
                if cost * factor > limit or (fits is not None and start < fits[stop]):
                    break
                rest = following.get(stop)
                if rest is None:
                    continue
                total = cost * cost * factor + rest
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
    """First and last layer at which each stage can begin if no stage takes longer than a bound; one more for the end.

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
    """A time that some split keeps to, found by filling stages one after the other; infinite if none was found.

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
    """The smallest possible largest stage time over all contiguous splits, by dynamic programming over stages.

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
    """Workers for each stage, all equally fast, such that the busiest is done as early as possible.

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
        """For each number of stages, and each layer, the fewest workers for the layers before it."""
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


# ------------------------------------------------------------------------------------------------------------ sharing

Cut = Mapping[int, int]


def share_layers(
    prefix: np.ndarray,
    capacities: np.ndarray,
    num_microbatches: int,
    fits: Callable[[int, int, int], bool] | None = None,
) -> tuple[dict[int, int], ...] | None:
    """Cuts that give each stage work in proportion to the speed of its workers, neighbours sharing a boundary layer.

    Args:
        prefix: seconds of the layers before each one, and of all of them, float64.
        capacities: summed speed of each stage's workers, above 0.
        num_microbatches: of the step.
        fits: whether a stage, by index, may hold layers [start, stop) (memory); None means that all fit.
    Returns:
        For each boundary between stages: first layer of the later stage -> micro-batches, or None if nothing fits.
    """
    num_layers, num_stages = len(prefix) - 1, len(capacities)
    if num_stages > num_layers:
        return None
    total = float(prefix[-1])
    marks = np.cumsum(capacities)[:-1] / capacities.sum() * total
    cuts = _cuts_at(prefix, marks, num_microbatches)
    if fits is None or _all_fit(cuts, num_layers, fits):
        return cuts
    # Memory binds somewhere: stages are filled from the first to the last, to a pace as small as possible.
    low, high, best = total / float(capacities.sum()), total / float(capacities.min()), None
    for _ in range(30):
        middle = (low + high) / 2
        marks_or_none = _fill(prefix, capacities * middle, fits)
        found = None if marks_or_none is None else _cuts_at(prefix, marks_or_none, num_microbatches)
        if found is not None and _all_fit(found, num_layers, fits):
            best, high = found, middle
        else:
            low = middle
    return best


def held_ranges(cuts: Sequence[Cut], num_layers: int) -> list[tuple[int, int]]:
    """Layers that the workers of each stage hold under these cuts."""
    starts = [0, *(min(cut) for cut in cuts)]
    stops = [*(max(cut) for cut in cuts), num_layers]
    return list(zip(starts, stops))


def widen_cuts(
    prefix: np.ndarray,
    cuts: Sequence[Cut],
    counts: Sequence[np.ndarray],
    speeds: Sequence[np.ndarray],
    fits: Callable[[int, int, int], bool] | None = None,
) -> tuple[dict[int, int], ...]:
    """Spreads cuts over more layers where a worker could otherwise not be done with the others of its stage.

    A boundary is spread by moving as many micro-batches one layer up as down, so the work of both stages stays.

    Args:
        prefix: seconds of the layers before each one, and of all of them, float64.
        cuts: of all boundaries.
        counts: micro-batches of the workers of each stage.
        speeds: of the same workers.
        fits: whether a stage, by index, may hold layers [start, stop); None means that all fit.
    """
    num_layers = len(prefix) - 1
    spread = [dict(cut) for cut in cuts]
    for stage in range(len(counts)):
        for _ in range(4):  # each time one boundary is spread by a layer on both sides
            lack = _lack(prefix, spread, stage, counts[stage], speeds[stage], num_layers)
            sides = [side for side in (stage, stage - 1) if 0 <= side < len(spread)]
            if lack <= 0 or not sides:
                break
            side = min(sides, key=lambda each: len(spread[each]))
            wider = _spread_cut(spread, side, lack, prefix, num_layers)
            if wider is None:
                break
            trial = [*spread[:side], wider, *spread[side + 1 :]]
            if fits is not None and not _all_fit(trial, num_layers, fits):
                break
            spread = trial
    return tuple(spread)


def _lack(
    prefix: np.ndarray, cuts: Sequence[Cut], stage: int, counts: np.ndarray, speeds: np.ndarray, num_layers: int
) -> float:
    """Seconds of work that a stage's workers would have to hand to each other, but cannot with these cuts."""
    left = cuts[stage - 1] if stage else {0: int(counts.sum())}
    right = cuts[stage] if stage < len(cuts) else {num_layers: int(counts.sum())}
    core = max(0.0, float(prefix[min(right)] - prefix[max(left)]))
    longest = float(prefix[max(right)] - prefix[min(left)])
    work = sum(float(prefix[layer]) * n for layer, n in right.items())
    work -= sum(float(prefix[layer]) * n for layer, n in left.items())
    end = work / float(speeds.sum())
    too_much = float(np.sum(np.maximum(0.0, counts * core - end * speeds)))
    too_little = float(np.sum(np.maximum(0.0, end * speeds - counts * longest)))
    lack = max(too_much, too_little)
    return lack if lack > 1e-6 * work else 0.0


def _spread_cut(
    cuts: Sequence[Cut], side: int, lack: float, prefix: np.ndarray, num_layers: int
) -> dict[int, int] | None:
    """A boundary's cut, spread by one layer on both sides; None if there is no layer or nothing to spread."""
    cut = dict(cuts[side])
    lowest, highest = min(cut), max(cut)
    floor = max(cuts[side - 1]) if side else 0
    ceiling = min(cuts[side + 1]) if side + 1 < len(cuts) else num_layers
    if lowest - 1 <= floor or highest + 1 >= ceiling:
        return None
    down, up = float(prefix[lowest] - prefix[lowest - 1]), float(prefix[highest + 1] - prefix[highest])
    number = int(np.ceil(lack / max(down, up, 1e-30)))
    number = min(number, cut[lowest], cut[highest]) if lowest != highest else min(number, cut[lowest] // 2)
    if number < 1:
        return None
    cut[lowest] -= number
    cut[lowest - 1] = number
    cut[highest] -= number
    cut[highest + 1] = number
    return {layer: cut[layer] for layer in sorted(cut) if cut[layer] > 0}


def _cuts_at(prefix: np.ndarray, marks: np.ndarray, num_microbatches: int) -> tuple[dict[int, int], ...]:
    """Cuts whose mean positions are these marks in seconds; every stage keeps a layer of every micro-batch."""
    num_layers, num_marks = len(prefix) - 1, len(marks)
    layer = np.clip(np.searchsorted(prefix, marks, side="right") - 1, 0, num_layers - 1)
    seconds = prefix[layer + 1] - prefix[layer]
    positions = layer + np.divide(marks - prefix[layer], seconds, out=np.zeros(num_marks), where=seconds > 0)
    # In micro-batches on a layer; neighbouring boundaries are at least a layer apart, for every micro-batch.
    index = np.arange(1, num_marks + 1) * num_microbatches
    room = num_layers * num_microbatches - index[::-1]
    later = np.round(positions * num_microbatches).astype(np.int64)
    later = index + np.maximum.accumulate(np.maximum(later - index, 0))
    later = room - np.maximum.accumulate(np.maximum(room - later, 0)[::-1])[::-1]
    whole, part = later // num_microbatches, later % num_microbatches
    return tuple(
        {at: num_microbatches} if beyond == 0 else {at: num_microbatches - beyond, at + 1: beyond}
        for at, beyond in zip(whole.tolist(), part.tolist(), strict=True)
    )


def _all_fit(cuts: Sequence[Cut], num_layers: int, fits: Callable[[int, int, int], bool]) -> bool:
    return all(fits(stage, start, stop) for stage, (start, stop) in enumerate(held_ranges(cuts, num_layers)))


def _fill(prefix: np.ndarray, seconds: np.ndarray, fits: Callable[[int, int, int], bool]) -> np.ndarray | None:
    """Boundaries if stages take so many seconds of layers, or as many layers as they can hold; None if some remain."""
    num_layers = len(prefix) - 1
    at, marks = 0.0, []
    for stage, room in enumerate(seconds.tolist()):
        end = min(at + room, float(prefix[-1]))
        first = int(np.searchsorted(prefix, at * (1 + 1e-12), side="right")) - 1
        last = int(np.searchsorted(prefix, end * (1 - 1e-12), side="left"))
        while last > first + 1 and not fits(stage, first, last):
            last -= 1
            end = float(prefix[last])
        at = end
        marks.append(at)
    return np.array(marks[:-1]) if at >= float(prefix[-1]) * (1 - 1e-9) and last == num_layers else None


def cuts_of(bounds: Sequence[int], num_microbatches: int) -> tuple[dict[int, int], ...]:
    """Cuts at these boundaries, nothing shared."""
    return tuple({bound: num_microbatches} for bound in bounds[1:-1])
