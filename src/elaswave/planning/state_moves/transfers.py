"""State that has to move for a plan: which workers lack which layers, and how long until they have them. Pure.

A worker that computes with a layer needs its parameters, and its share of the layer's masters and optimizer slots.
Layers are sliced over the workers of their stage, so transfers are disjoint and run beside each other; a worker's link
carries one direction's bytes one after the other, so they take as long as the one that receives, or sends, most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs, HeldLayers, MemoryModel
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.plan import Allocation, StateTransfer


class Sources(NamedTuple):
    """Who holds what is sent."""

    holders: np.ndarray
    """Workers that have held each layer and are left: int64 [num_layers]."""
    ranges: tuple[tuple[int, int], ...]
    """Layers of each stage that they were in."""

    @classmethod
    def of(cls, costs: Costs, before: Allocation, held_start: np.ndarray, held_stop: np.ndarray) -> "Sources":
        """Makes the sources of the workers that are left of a job.

        Args:
            costs: of the layers.
            before: who has run what.
            held_start: first layer that each of them has held, int64.
            held_stop: one past the last one; not above the first where a worker has held none.
        """
        some = held_stop > held_start
        bins = costs.num_layers + 1
        changes = np.bincount(held_start[some], minlength=bins) - np.bincount(held_stop[some], minlength=bins)
        ranges = {(share.start, share.stop) for chain in before.chains for share in chain.stages}
        return cls(np.cumsum(changes)[:-1], tuple(sorted(ranges)))

    @classmethod
    def of_stages(cls, costs: Costs, stages: Sequence[HeldLayers]) -> "Sources":
        """Makes the sources of all workers of a job.

        Args:
            costs: of the layers.
            stages: who has run what.
        """
        holders = np.zeros(costs.num_layers, dtype=np.int64)
        for stage in stages:
            holders[stage.start : stage.stop] += stage.width
        return cls(holders, tuple(sorted({(stage.start, stage.stop) for stage in stages})))

    def sending_s(self, link: NetworkLink, costs: Costs, transfers: Sequence[StateTransfer]) -> float:
        """Computes the seconds of the worker that sends most: a layer's holders send equal parts of it, and a worker
        all its layers one after the other. Layers that nobody has held come from elsewhere.

        Args:
            link: of each worker.
            costs: of the layers: a transfer's bytes are in proportion to its layers' parameters.
            transfers: all that is sent.
        """
        if not transfers:
            return 0.0
        sizes = np.maximum(np.diff(costs.prefix["parameter_bytes"]), 1e-9)
        wanted = np.zeros(len(self.holders))
        for transfer in transfers:
            own = sizes[transfer.start : transfer.stop]
            wanted[transfer.start : transfer.stop] += own * (transfer.num_bytes / own.sum())
        each = np.divide(wanted, self.holders, out=np.zeros_like(wanted), where=self.holders > 0)
        sums = np.concatenate([[0.0], np.cumsum(each)])
        return link.transfer_s(max((float(sums[stop] - sums[start]) for start, stop in self.ranges), default=0.0))


def needed_transfers(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    where: np.ndarray,
    held_start: np.ndarray,
    held_stop: np.ndarray,
    *,
    sources: Sources | None = None,
    followers: int = DEFAULT_FOLLOWERS,
) -> tuple[tuple[StateTransfer, ...], float]:
    """Finds the state that workers lack for an allocation, and computes the seconds until all of them have it.

    The seconds are those of the worker that receives most, or sends most, whichever is more, if training stood still.

    Args:
        cluster: the workers.
        costs: of the layers.
        allocation: wanted.
        where: positions of its workers in the cluster, in order of chains, stages and workers.
        held_start: first layer that each worker of the cluster has held, int64.
        held_stop: one past the last one; not above the first where a worker has held none.
        sources: who sends; None: all workers of the cluster, each as much as any other.
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
    if sources is not None:
        return tuple(transfers), max(longest, sources.sending_s(link, costs, transfers))
    total = sum(transfer.num_bytes for transfer in transfers)
    return tuple(transfers), max(longest, total / link.bandwidth_bytes_per_s / cluster.num_workers)


def receiving_s(link: NetworkLink, transfers: Sequence[StateTransfer]) -> float:
    """Computes the seconds of the worker that receives most.

    Args:
        link: of each worker.
        transfers: all that is sent.
    """
    received: dict[int, float] = {}
    for transfer in transfers:
        for worker in transfer.workers:
            received[worker] = received.get(worker, 0.0) + transfer.num_bytes / len(transfer.workers)
    return link.transfer_s(max(received.values())) if received else 0.0


def shared_links(cluster: Cluster, costs: Costs, share: float) -> tuple[Cluster, Costs]:
    """Computes the cluster and costs as training has them while copies take a share of the links' bandwidth.

    Args:
        cluster: its links.
        costs: its link of the end of a step.
        share: of the copies, below 1.
    """

    def left(link: NetworkLink) -> NetworkLink:
        return msgspec.structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (1 - share))

    slower = replace(cluster, within_node=left(cluster.within_node), between_nodes=left(cluster.between_nodes))
    return slower, costs if costs.end_link is None else msgspec.structs.replace(costs, end_link=left(costs.end_link))


def _without(wanted: tuple[int, int], had: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yields the parts of a range of layers that lie outside of another."""
    if had[0] >= had[1] or had[1] <= wanted[0] or had[0] >= wanted[1]:
        yield wanted
        return
    for part in ((wanted[0], had[0]), (had[1], wanted[1])):
        if part[0] < part[1]:
            yield part
