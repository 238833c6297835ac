"""State that has to move for a plan: which workers lack which layers, and how long until they have them. Pure.

A worker that computes with a layer needs its parameters, and its share of the layer's masters and optimizer slots.
Layers are sliced over the workers of their stage, so transfers are disjoint and run beside each other.
"""

from collections.abc import Iterator

import numpy as np

from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster
from elaswave.costs.memory import DEFAULT_FOLLOWERS, MemoryModel
from elaswave.planning.plan import Allocation, StateTransfer


def needed_transfers(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    where: np.ndarray,
    held_start: np.ndarray,
    held_stop: np.ndarray,
    *,
    followers: int = DEFAULT_FOLLOWERS,
) -> tuple[tuple[StateTransfer, ...], float]:
    """State that workers lack for an allocation, and the seconds until all of them have it.

    The seconds are those of the worker that lacks most, or of all bytes over all workers' links, whichever is more.

    Args:
        cluster: the workers.
        costs: of the layers.
        allocation: wanted.
        where: positions of its workers in the cluster, in order of chains, stages and workers.
        held_start: first layer that each worker of the cluster has held, int64.
        held_stop: one past the last one; not above the first where a worker has held none.
        followers: live copies of every block.
    """
    transfers: list[StateTransfer] = []
    longest = 0.0
    link = cluster.between_nodes
    shares = [share for chain in allocation.chains for share in chain.stages]
    memory = MemoryModel.of_stages(costs, shares, followers)
    base = costs.num_layers + 1
    all_starts, all_stops, last = held_start[where], held_stop[where], 0
    for share in shares:
        first, last = last, last + share.width
        starts, stops = all_starts[first:last], all_stops[first:last]
        lacking = (starts > share.start) | (stops < share.stop)
        if not lacking.any():
            continue
        keys = starts[lacking] * base + stops[lacking]  # workers that have held the same go together
        workers = share.workers[lacking]
        for key in (np.unique(keys) if keys.min() < keys.max() else keys[:1]).tolist():
            own = tuple(workers[keys == key].tolist())
            each = 0.0
            for start, stop in _without((share.start, share.stop), divmod(key, base)):
                num_bytes = memory.sent_bytes(start, stop)
                each += num_bytes
                transfers.append(StateTransfer(start=start, stop=stop, workers=own, num_bytes=num_bytes * len(own)))
            longest = max(longest, link.transfer_s(each))
    total = sum(transfer.num_bytes for transfer in transfers)
    return tuple(transfers), max(longest, total / link.bandwidth_bytes_per_s / cluster.num_workers)


def any_layer_unheld(costs: Costs, held_start: np.ndarray, held_stop: np.ndarray) -> bool:
    """Whether there is a layer that no worker has computed with, so that a worker has to fetch it before training goes
    on.

    Args:
        costs: of the layers.
        held_start: first layer that each worker has held, int64.
        held_stop: one past the last one.
    """
    held = np.zeros(costs.num_layers + 1, dtype=np.int64)
    np.add.at(held, held_start, 1)
    np.add.at(held, held_stop, -1)
    return bool(np.any(np.cumsum(held)[:-1] == 0))


def _without(wanted: tuple[int, int], had: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The parts of a range of layers that lie outside of another."""
    if had[0] >= had[1] or had[1] <= wanted[0] or had[0] >= wanted[1]:
        yield wanted
        return
    for part in ((wanted[0], had[0]), (had[1], wanted[1])):
        if part[0] < part[1]:
            yield part
