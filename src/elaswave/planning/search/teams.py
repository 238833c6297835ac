"""Which workers are to have work: all of them, or all but some. Pure.

A slow worker can cost more than it brings, since whole micro-batches and layers fit its speed badly; and a number of
workers that is no multiple of the stages' can make a layout so uneven that one worker less is better. Those who are
left out stay members of a run: they hold copies.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SMALLER_SUBSETS = 4
"""Up to so many workers are left out one by one, and up to so many classes of slow ones."""


class WorkerSubset(NamedTuple):
    """Workers that are to have work, by position in the cluster."""

    stages: list[np.ndarray]
    """Those of each stage."""
    free: np.ndarray
    """Those in no stage."""
    num_left_out: int = 0

    @property
    def num_workers(self) -> int:
        """All together."""
        return sum(map(len, self.stages)) + len(self.free)

    @property
    def shown(self) -> str:
        """For the end of a plan's reason."""
        return f", {self.num_left_out} left out" if self.num_left_out else ""


def smaller_subsets(whole: WorkerSubset, speed: np.ndarray, *, one_by_one: bool) -> list[WorkerSubset]:
    """What is left without some: slow ones first, then those of the widest stages.

    Args:
        whole: all workers.
        speed: of all workers of the cluster.
        one_by_one: else only a team without any slow worker is asked for.
    """
    is_slow = speed < float(np.median(speed)) * (1 - 1e-9)
    num_slow = int(is_slow.sum())
    if not one_by_one:
        return [_staying(whole, ~is_slow, num_slow)] if 0 < num_slow < whole.num_workers else []
    slow = np.sort(speed[is_slow])
    classes = np.flatnonzero(np.diff(np.append(slow, np.inf))) + 1
    numbers = {*range(1, min(SMALLER_SUBSETS, max(1, num_slow)) + 1), *classes[:SMALLER_SUBSETS].tolist(), num_slow,
               whole.num_workers % len(whole.stages)}  # fmt: skip
    order = in_order(whole.stages, whole.free, speed)
    subsets = []
    for number in sorted(numbers):
        if 0 < number < whole.num_workers:
            stays = np.ones(len(speed), dtype=bool)
            stays[order[-number:]] = False
            subsets.append(_staying(whole, stays, number))
    return subsets


def _staying(whole: WorkerSubset, stays: np.ndarray, num_left_out: int) -> WorkerSubset:
    return WorkerSubset([own[stays[own]] for own in whole.stages], whole.free[stays[whole.free]], num_left_out)


def in_order(members: Sequence[np.ndarray], free: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Positions of workers, those last that are left out first: slow ones, those that hold nothing, those of the widest
    stages.

    Args:
        members: of each stage.
        free: those in no stage.
        speeds: of all workers of the cluster.
    """
    workers = np.concatenate([*members, free])
    ranks = np.concatenate([*(np.arange(len(own)) for own in members), np.arange(len(free))])
    is_empty = np.arange(len(workers)) >= len(workers) - len(free)
    return np.asarray(workers[np.lexsort((ranks, is_empty, -speeds[workers]))])
