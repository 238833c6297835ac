"""Where micro-batches are cut between stages, and neighbours that share a boundary layer. Pure.

Micro-batches are cut on either side of a layer, in whatever proportion makes the work of stages match their workers'
speed (`share_layers`). Where workers of a stage cannot have the same number of micro-batches, cuts are spread over more
layers (`widen_cuts`), so that a worker with one micro-batch more can run fewer layers of each.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

Cut = Mapping[int, int]
Fits = Callable[[int, int, int, int, int], bool]
"""Whether a stage, by index, may hold layers [start, stop) (memory), of which it shares so many with the stage before
and so many with the stage behind."""


def share_layers(
    prefix: np.ndarray,
    capacities: np.ndarray,
    num_microbatches: int,
    fits: Fits | None = None,
) -> tuple[dict[int, int], ...] | None:
    """Cuts that give each stage work in proportion to the speed of its workers, neighbours sharing a boundary layer.

    Args:
        prefix: seconds of the layers before each one, and of all of them, float64.
        capacities: summed speed of each stage's workers, above 0.
        num_microbatches: of the step.
        fits: what stages may hold; None means anything.
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
    seconds, last_that_fits = prefix.tolist(), _last_that_fits(fits, num_stages)
    for _ in range(30):
        middle = (low + high) / 2
        marks_or_none = _fill(seconds, (capacities * middle).tolist(), num_microbatches, last_that_fits)
        found = None if marks_or_none is None else _cuts_at(prefix, marks_or_none, num_microbatches)
        if found is not None and _all_fit(found, num_layers, fits):
            best, high = found, middle
        else:
            low = middle
    return best


def held_ranges(cuts: Sequence[Cut], num_layers: int) -> list[tuple[int, int]]:
    """Lists the layers that the workers of each stage hold under these cuts."""
    starts = [0, *(min(cut) for cut in cuts)]
    stops = [*(max(cut) for cut in cuts), num_layers]
    return list(zip(starts, stops))


def widen_cuts(
    prefix: np.ndarray,
    cuts: Sequence[Cut],
    counts: Sequence[np.ndarray],
    speeds: Sequence[np.ndarray],
    fits: Fits | None = None,
) -> tuple[dict[int, int], ...]:
    """Spreads cuts over more layers where a worker could otherwise not be done with the others of its stage.

    A boundary is spread by moving as many micro-batches one layer up as down, so the work of both stages stays.

    Args:
        prefix: seconds of the layers before each one, and of all of them, float64.
        cuts: of all boundaries.
        counts: micro-batches of the workers of each stage.
        speeds: of the same workers.
        fits: what stages may hold; None means anything.
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
    """Computes the seconds of work that a stage's workers would have to hand to each other, but cannot with these
    cuts."""
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
    """Spreads a boundary's cut by one layer on both sides; returns None if there is no layer or nothing to spread."""
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


def _all_fit(cuts: Sequence[Cut], num_layers: int, fits: Fits) -> bool:
    held = held_ranges(cuts, num_layers)
    before = [0, *(max(0, held[stage][1] - held[stage + 1][0]) for stage in range(len(cuts)))]
    behind = [*before[1:], 0]
    return all(fits(stage, *own, before[stage], behind[stage]) for stage, own in enumerate(held))


class _Stop(NamedTuple):
    """Where a stage ends."""

    layer: int
    """One past its last layer."""
    is_shared: bool
    """Whether the next stage has its last layer, too."""


LastThatFits = Callable[[int, int, bool, _Stop], _Stop]
"""Where a stage, by index, ends at the latest that begins at a layer, which it may share: at a stop, or before."""


def _last_that_fits(fits: Fits, num_stages: int) -> LastThatFits:
    """Stages end as late as they may; each has at least one layer. State of a shared layer takes less memory."""

    @cache
    def last_that_fits(stage: int, first: int, is_first_shared: bool, stop: _Stop) -> _Stop:
        while stop.layer > first + 1 and not fits(stage, first, stop.layer, is_first_shared, stop.is_shared):
            may_share = not stop.is_shared and stage < num_stages - 1
            stop = _Stop(stop.layer, True) if may_share else _Stop(stop.layer - 1, False)
        return stop

    return last_that_fits


def _fill(
    prefix: Sequence[float], seconds: Sequence[float], num_microbatches: int, last_that_fits: LastThatFits
) -> np.ndarray | None:
    """Boundaries if stages take so many seconds of layers, or as many layers as they can hold; None if some remain."""
    num_layers, at, marks = len(prefix) - 1, 0.0, []
    stop = _Stop(0, False)
    for stage, room in enumerate(seconds):
        end = min(at + room, prefix[-1])
        first = bisect_right(prefix, at * (1 + 1e-12)) - 1
        wanted = bisect_left(prefix, end * (1 - 1e-12))
        is_inside = stage < len(seconds) - 1 and end < prefix[wanted] * (1 - 1e-12)
        stop = last_that_fits(stage, first, at > prefix[first] * (1 + 1e-12), _Stop(wanted, is_inside))
        if stop != (wanted, is_inside):
            # Of a layer that has to be shared the next stage has one micro-batch.
            rest = (prefix[stop.layer] - prefix[stop.layer - 1]) / num_microbatches if stop.is_shared else 0.0
            end = prefix[stop.layer] - rest
        at = end
        marks.append(at)
    return np.array(marks[:-1]) if at >= prefix[-1] * (1 - 1e-9) and stop.layer == num_layers else None


def cuts_of(bounds: Sequence[int], num_microbatches: int) -> tuple[dict[int, int], ...]:
    """Cuts at these boundaries, nothing shared."""
    return tuple({bound: num_microbatches} for bound in bounds[1:-1])
