"""Who is left of a job after an event, what they hold, and the frequency levels that plans start from. Pure."""

from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.machines import Cluster, ClusterEvent, worker_power
from elaswave.planning.frequency import common_levels
from elaswave.planning.plan import Allocation


class Survivors(NamedTuple):
    """Workers by position in the cluster; arrays have one entry for each of them."""

    gone: np.ndarray
    """Ids of those that the event takes away."""
    start: np.ndarray
    """First layer that each has had; start = stop for those without one."""
    stop: np.ndarray
    levels: np.ndarray
    """Frequency level that each has had, -1 without one."""
    stages: list[np.ndarray]
    """Positions of the workers of each stage, ascending; a pipeline's of another depth belong to the nearest stage."""
    free: np.ndarray
    """Positions of those in no stage."""

    @property
    def held(self) -> np.ndarray:
        """int64 [workers of the cluster, 2]: layers [start, stop) that each has held."""
        return np.stack([self.start, self.stop], axis=1)


def survivors_of(cluster: Cluster, before: Allocation, event: ClusterEvent) -> Survivors:
    """Who is left, and what they have had.

    Args:
        cluster: after the event.
        before: the allocation before it.
        event: what happened.
    """
    ids = cluster.ids
    num_workers = len(ids)
    gone = np.array(event.workers if event.kind in ("lost", "drained") else (), dtype=np.int64)
    starts, stops, levels = np.zeros(num_workers, np.int64), np.zeros(num_workers, np.int64), np.full(num_workers, -1)
    chains = sorted(before.chains, key=lambda chain: -len(chain.stages))
    middles = np.array([(share.start + share.stop) / 2 for share in chains[0].stages])
    members: list[list[np.ndarray]] = [[] for _ in middles]
    available = np.ones(num_workers, dtype=bool)
    still = np.minimum(np.searchsorted(ids, gone), num_workers - 1)
    available[still[ids[still] == gone]] = False
    for chain in chains:
        for share in chain.stages:
            where = np.searchsorted(ids, share.workers)
            there = np.minimum(where, num_workers - 1)
            left = (ids[there] == share.workers) & available[there]
            own = there[left]
            available[own] = False
            starts[own], stops[own], levels[own] = share.start, share.stop, share.levels[left]
            nearest = int(np.argmin(np.abs(middles - (share.start + share.stop) / 2)))
            members[nearest].append(own)
    stages = [np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0] for parts in members]
    return Survivors(gone, starts, stops, levels, stages, np.flatnonzero(available))


def start_levels(cluster: Cluster, before: np.ndarray, *, may_change: bool) -> np.ndarray:
    """Levels before any is chosen: common ones; where none may be chosen workers keep theirs, if power permits.

    Args:
        cluster: the workers.
        before: level of each, -1 without one.
        may_change: whether levels are chosen later.
    """
    all_workers = np.arange(cluster.num_workers)
    common = common_levels(cluster, all_workers)
    if may_change:
        return common
    kept = np.where(before >= 0, before, common)
    draw = float(worker_power(cluster, all_workers, kept)[0].sum())
    return kept if cluster.power_limit_w is None or draw <= cluster.power_limit_w * (1 + 1e-9) else common
