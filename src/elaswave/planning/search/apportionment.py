"""Micro-batches dealt out, to the workers of a stage or to pipelines. The batch stays what it is. Pure.

One rule: the last one to finish finishes as early as possible (`apportion`); the others here are cases of it. It is
exact, no other split has a smaller largest time, and vectorised, since a stage may have thousands of workers.
"""

from collections.abc import Sequence

import numpy as np

from elaswave.errors import InfeasiblePlan

_TIE = 1e-11
"""Times that differ by less than this share of each other are equal: differences of rounding, not of workers."""


def apportion(
    num_microbatches: int,
    seconds: np.ndarray,
    caps: np.ndarray | None = None,
    begun_s: np.ndarray | None = None,
) -> np.ndarray:
    """Splits micro-batches over workers so that the last one to finish finishes as early as possible.

    Each further micro-batch goes to the worker that would have finished it first, among equals to the fastest one, then
    to the one that comes first: the greedy rule, which is optimal for a largest time, carried out for all
    micro-batches at once.

    Args:
        num_microbatches: to be split, at least 0.
        seconds: of one micro-batch on each worker, above 0, shape [workers].
        caps: the most that each worker can take (memory), int64 [workers]; None means no limit.
        begun_s: for how long each worker is busy already, at least 0; None means not at all. Without caps.
    Returns:
        int64 [workers], adding up to num_microbatches.
    Raises:
        ValueError: no worker, or a time that is not above 0 and finite.
        InfeasiblePlan: the caps add up to fewer micro-batches.
    """
    seconds = np.asarray(seconds, dtype=np.float64)
    if len(seconds) == 0:
        raise ValueError(f"{num_microbatches} micro-batches are to be split over no workers: give at least one")
    if not bool(np.all((seconds > 0) & np.isfinite(seconds))):
        raise ValueError(f"seconds of a micro-batch are {seconds[:8].tolist()} ...: needed are finite ones above 0")
    if caps is not None and (room := int(np.sum(caps))) < num_microbatches:
        raise InfeasiblePlan(
            f"memory: the {len(seconds)} workers of a stage can take {room} micro-batches, but have to take "
            f"{num_microbatches}: {num_microbatches - room} too many"
        )
    if caps is None and begun_s is None and bool(np.all(seconds == seconds[0])):
        share, rest = divmod(num_microbatches, len(seconds))
        return np.full(len(seconds), share, dtype=np.int64) + (np.arange(len(seconds)) < rest)
    one_by_one = seconds, np.arange(len(seconds)), np.ones(len(seconds), dtype=np.int64)
    # Equally fast workers are dealt to together.
    each, of, members = _classes(seconds) if caps is None and begun_s is None else one_by_one
    # If micro-batches could be divided all workers would end together, or be full; rounding up what each of them has
    # then covers the batch, and takes the slowest worker's time longer at most. The greedy rule chooses between.
    begun = np.zeros(len(each)) if begun_s is None else np.asarray(begun_s, dtype=np.float64)
    if begun_s is None:
        evenly = _divisible_end(num_microbatches, each, members, caps)
    else:
        evenly = _level(num_microbatches, each, begun)
    counts = np.floor(np.maximum(0.0, evenly - begun) / each * (1 - _TIE)).astype(np.int64)
    most = np.floor(np.maximum(0.0, evenly + each.max() - begun) / each * (1 + _TIE)).astype(np.int64) + 1
    if caps is not None:
        counts, most = np.minimum(counts, caps), np.minimum(most, caps)
    rest = num_microbatches - int(counts @ members)
    more = most - counts
    taker = np.repeat(np.arange(len(each)), more)
    nth = np.arange(len(taker)) - np.repeat(np.cumsum(more) - more, more) + 1
    ends = begun[taker] + (counts[taker] + nth) * each[taker]
    order = taker[np.lexsort((taker, each[taker], np.round(ends / max(evenly, float(each.max())) / _TIE)))]
    taken = np.cumsum(members[order])
    whole = int(np.searchsorted(taken, rest, side="right"))
    dealt: np.ndarray = (counts + np.bincount(order[:whole], minlength=len(each)))[of]
    left = rest - (int(taken[whole - 1]) if whole else 0)
    if left:  # not enough for all who are equally fast
        dealt[np.flatnonzero(of == order[whole])[:left]] += 1
    return dealt


def _classes(seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the times that there are, which of them each worker takes, and how many workers take each."""
    least, most = seconds.min(), seconds.max()
    slowest = seconds == most
    if bool(np.all(slowest | (seconds == least))):  # mostly; without sorting
        number = int(np.count_nonzero(slowest))
        return np.array([least, most]), slowest.astype(np.int64), np.array([len(seconds) - number, number])
    return np.unique(seconds, return_inverse=True, return_counts=True)


def _divisible_end(num_microbatches: int, seconds: np.ndarray, members: np.ndarray, caps: np.ndarray | None) -> float:
    """Computes when all workers end if micro-batches can be divided and no worker takes more than its cap."""
    rates = members / seconds
    if caps is None:
        return num_microbatches / float(rates.sum())
    full_at = caps * seconds
    order = np.argsort(full_at, kind="stable")
    # With the k workers that are full first at their caps, the others share what is left.
    taken = np.concatenate([[0.0], np.cumsum(caps[order], dtype=np.float64)[:-1]])
    open_rates = np.cumsum(rates[order][::-1])[::-1]
    ends = (num_microbatches - taken) / open_rates
    first = int(np.argmax(ends <= full_at[order] * (1 + _TIE)))
    return max(0.0, float(ends[first]))


def _level(num_microbatches: int, seconds: np.ndarray, begun_s: np.ndarray) -> float:
    """Computes when all workers end that take anything, if micro-batches can be divided and some are busy already."""
    order = np.argsort(begun_s, kind="stable")
    rates = np.cumsum(1.0 / seconds[order])
    ends = (num_microbatches + np.cumsum(begun_s[order] / seconds[order])) / rates
    # The k workers that are free first share everything, up to when the next one is free.
    free_next = np.concatenate([begun_s[order][1:], [np.inf]])
    return float(ends[int(np.argmax(ends <= free_next))])


def evenly(total: int, width: int, before: np.ndarray | None = None) -> np.ndarray:
    """Splits micro-batches as evenly as whole ones allow; those who had most before get the larger share.

    Args:
        total: micro-batches.
        width: workers, equally fast.
        before: micro-batches of each of them before, int64 [width].
    Returns:
        int64 [width], adding up to total.
    """
    counts = apportion(total, np.ones(width))
    if before is None:
        return counts
    by_load = np.empty(width, dtype=np.int64)
    by_load[np.argsort(-before, kind="stable")] = counts
    return by_load


def topped_up(counts: np.ndarray, extra: int) -> np.ndarray:
    """Deals micro-batches one by one to the worker that has fewest, then to the first.

    Args:
        counts: of each worker before, int64 [workers].
        extra: micro-batches to apportion_pipelines.
    """
    return counts + apportion(extra, np.ones(len(counts)), begun_s=counts)


def apportion_pipelines(
    num_microbatches: int, numbers: Sequence[int], times: Sequence[tuple[float, float]]
) -> list[int]:
    """Deals micro-batches to kinds of pipelines so that the slowest pipeline is as fast as possible.

    A pipeline takes some time beside its micro-batches, and none if it has no micro-batch.

    Args:
        num_microbatches: to apportion_pipelines.
        numbers: of pipelines of each kind, at least 1.
        times: of each kind: a pipeline with m micro-batches takes first + m x second seconds.
    Returns:
        Micro-batches of all pipelines of each kind together.
    """

    def fit(seconds: float) -> list[int]:
        return [
            number * max(0, int((seconds - fixed) / pace * (1 + 1e-12)))
            for number, (fixed, pace) in zip(numbers, times, strict=True)
        ]

    low, high = 0.0, max(fixed + num_microbatches * pace for fixed, pace in times)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(fit(middle)) >= num_microbatches else (middle, high)
    totals = fit(high)
    surplus = sum(totals) - num_microbatches
    while surplus:

        def end(kind: int) -> float:
            return times[kind][0] + -(-totals[kind] // numbers[kind]) * times[kind][1] if totals[kind] else 0.0

        latest = max(range(len(totals)), key=end)
        taken = min(surplus, totals[latest] % numbers[latest] or numbers[latest])
        totals[latest] -= taken
        surplus -= taken
    return totals
