"""The dataflow axis: how many micro-batches each worker of a stage runs. The batch stays what it is. Pure.

Apportionment is exact: no other split of the micro-batches over the workers has a smaller largest time. It is also
vectorised, since a stage may have thousands of workers.
"""

import numpy as np

from elaswave.errors import InfeasiblePlan

_TIE = 1e-11
"""Times that differ by less than this share of each other are equal: differences of rounding, not of workers."""


def apportion(num_microbatches: int, seconds: np.ndarray, caps: np.ndarray | None = None) -> np.ndarray:
    """Splits micro-batches over workers so that the last one to finish finishes as early as possible.

    Each further micro-batch goes to the worker that would have finished it first, among equals to the one that comes
    first: the greedy rule, which is optimal for a largest time, carried out for all micro-batches at once.

    Args:
        num_microbatches: to be split, at least 0.
        seconds: of one micro-batch on each worker, above 0, shape [workers].
        caps: the most that each worker can take (memory), int64 [workers]; None means no limit.
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
    if caps is None and bool(np.all(seconds == seconds[0])):
        each, rest = divmod(num_microbatches, len(seconds))
        return np.full(len(seconds), each, dtype=np.int64) + (np.arange(len(seconds)) < rest)
    # If micro-batches could be divided all workers would end together, or be full; rounding up what each of them has
    # then covers the batch, and takes the slowest worker's time longer at most. The greedy rule chooses between.
    even = _divisible_end(num_microbatches, seconds, caps)
    counts = np.floor(even / seconds * (1 - _TIE)).astype(np.int64)
    most = np.floor((even + seconds.max()) / seconds * (1 + _TIE)).astype(np.int64) + 1
    if caps is not None:
        counts, most = np.minimum(counts, caps), np.minimum(most, caps)
    rest = num_microbatches - int(counts.sum())
    more = most - counts
    worker = np.repeat(np.arange(len(seconds)), more)
    nth = np.arange(len(worker)) - np.repeat(np.cumsum(more) - more, more) + 1
    ends = (counts[worker] + nth) * seconds[worker]
    chosen = np.lexsort((worker, np.round(ends / max(even, float(seconds.max())) / _TIE)))[:rest]
    return counts + np.bincount(worker[chosen], minlength=len(seconds))


def _divisible_end(num_microbatches: int, seconds: np.ndarray, caps: np.ndarray | None) -> float:
    """When all workers end if micro-batches can be divided and no worker takes more than its cap."""
    rates = 1.0 / seconds
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
