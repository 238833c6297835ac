"""Owners and followers of blocks at worker level: which workers hold the only copies of some block together. Pure.

The replica peers of a worker are chosen by the engine's own function (`elaswave.blocks.replica_peers`), from the same
groups of workers that run the same layers. What is left out are the blocks: of an owner's blocks each of its replica
peers is taken to follow some, which holds as soon as it owns as many blocks as it has replica peers.

Replica peers are worked out when they are asked for: of 100,000 workers they take a second, and most losses need none.
Who is the second follower beside each replica peer follows from all choices before; above `CHOSEN_MAX` workers that
takes too long, and second followers are dealt in turn among those who may be one.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from elaswave.blocks.placement import FollowerChooser, default_block_size
from elaswave.blocks.replica_peers import ReplicaPeers, choose_replica_peers
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.plan import Allocation
from elaswave.planning.policy.replication import LayerRange, has, layer_ranges, place_of
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH

CHOSEN_MAX = 1024
"""Workers up to which further followers are chosen as the engine does."""
_ELEMENT_BYTES = 12
"""Of master and optimizer slots of an element, with AdamW."""


def num_blocks(costs: Costs) -> int:
    """Computes how many blocks the engine cuts a model into whose configuration gives no size of them.

    Args:
        costs: of its layers.
    """
    elements = [layer.optimizer_bytes / _ELEMENT_BYTES for layer in costs.layers]
    size = default_block_size(round(sum(elements)))
    return sum(ceil(each / size) for each in elements)


@dataclass(frozen=True, kw_only=True)
class Placing:
    """How followers are chosen, and made again."""

    followers: int = DEFAULT_FOLLOWERS
    """Live copies of every block beside its owner's."""
    scatter_width: int | None = DEFAULT_SCATTER_WIDTH
    """Replica peers of a worker; None means all other workers that run the same, as before there were replica peers."""
    knows_hosts: bool = True
    """Whether followers are put on other hosts."""
    racks: tuple[int, ...] = ()
    """Rack of host 0, 1, ..., where followers are put into other racks; empty: hosts are all that is known."""
    refill_bytes_per_step: float | None = None
    """The most that a worker sends in a step to make lost copies again (`elastic.refill_bytes_per_step`); None means
    what its link carries."""


class PlacedBlocks:
    """Who holds blocks together under an allocation (`elaswave.planning.policy.replication.Copies`).

    Args:
        ranges: the layers, by who runs them.
        hosts: ascending ids of all workers of the ranges, and the host of each; others may be among them.
        placing: how followers are chosen.
        kept: replica peers of before; they stay where they fit, as in the engine.
    """

    def __init__(
        self, ranges: Sequence[LayerRange], hosts: tuple[np.ndarray, np.ndarray], placing: Placing, kept: ReplicaPeers
    ) -> None:
        self._ranges, self._hosts, self._placing, self._kept = ranges, hosts, placing, kept

    @classmethod
    def of(cls, allocation: Allocation, there: Cluster, placing: Placing) -> "PlacedBlocks":
        """Makes blocks that are placed afresh.

        Args:
            allocation: who runs which layers.
            there: with all of its workers.
            placing: how followers are chosen.
        """
        return cls(layer_ranges(allocation), (there.ids, there.node), placing, {})

    def moved_to(self, allocation: Allocation, there: Cluster) -> "PlacedBlocks":
        """Returns the blocks under another allocation, once all copies are where it wants them."""
        return PlacedBlocks(
            layer_ranges(allocation), (there.ids, there.node), self._placing, self._replica_peers_so_far
        )

    def without(self, workers: Collection[int]) -> "PlacedBlocks":
        """Returns the blocks without some workers, once their copies have been made again."""
        gone = np.fromiter(workers, dtype=np.int64, count=len(workers))
        ranges = [
            LayerRange(start=each.start, stop=each.stop, members=each.members[~np.isin(each.members, gone)])
            for each in self._ranges
        ]
        return PlacedBlocks(ranges, self._hosts, self._placing, self._replica_peers_so_far)

    def shares(self, worker: int) -> Iterator[tuple[LayerRange, int]]:
        """Yields the layer ranges whose blocks a worker owns a share of, and how many workers share them."""
        for layers in self._ranges:
            if has(layers.members, worker):
                yield layers, len(layers.members)

    # ------------------------------------------------------------------------------------------------------ questions

    def lost_with(self, workers: Collection[int]) -> bool:
        """Does what `ReplicaSet` says."""
        gone = frozenset(worker for worker in workers if any(has(layers.members, worker) for layers in self._ranges))
        # Each block has one holder more than followers.
        if len(gone) <= self._num_followers:
            return False
        if not self._num_followers:
            return True
        if self._spreads and len(set(self._levels[0][np.searchsorted(self._members, list(gone))].tolist())) == 1:
            return False  # the first follower is in another domain
        return any(self._is_fatal(layers, (owner,), gone) for owner in gone for layers, _ in self.shares(owner))

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Does what `ReplicaSet` says."""
        if size != self._num_followers + 1:
            return
        # The same workers may be owner and followers in several ways.
        seen: set[tuple[int, ...]] = set()
        for layers in self._ranges:
            for owner in layers.members.tolist():
                for holders in self._holders(layers, (owner,)):
                    found = tuple(sorted(holders))
                    if found not in seen:
                        seen.add(found)
                        yield found

    def num_senders(self, worker: int) -> int:
        """Counts the workers that hold the other copies of what a worker holds, at least 1."""
        peers = max((width for _, width in self.shares(worker)), default=1) - 1
        return max(1, peers if self._placing.scatter_width is None else min(peers, self._placing.scatter_width))

    def _is_fatal(self, layers: LayerRange, holders: tuple[int, ...], gone: Collection[int]) -> bool:
        """Tells whether some block with these holders has all others among those who are gone, too."""
        if len(holders) > self._num_followers:
            return True
        next_ones = self._next_holders(layers, holders)
        return any(
            self._is_fatal(layers, (*holders, other), gone)
            for other in gone
            if other not in holders and has(next_ones, other)
        )

    def _holders(self, layers: LayerRange, holders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields all sets of owner and followers that begin with these."""
        if len(holders) > self._num_followers:
            yield holders
            return
        for other in self._next_holders(layers, holders).tolist():
            yield from self._holders(layers, (*holders, other))

    def _next_holders(self, layers: LayerRange, holders: tuple[int, ...]) -> np.ndarray:
        """Lists those among whom the next follower is chosen, ascending: replica peers of the owner, then as
        `FollowerChooser` does."""
        replica_peers = self._replica_peers_of(layers, holders[0])
        if len(holders) == 1 and len(replica_peers):
            return replica_peers
        if len(replica_peers) and len(self._members) <= CHOSEN_MAX:
            return np.array(sorted(self._chosen[layers.start, holders]), dtype=np.int64)
        free = self._apart(self._members[~np.isin(self._members, holders)], holders)
        inside = np.isin(free, layers.members)
        wants_inside = not any(has(layers.members, other) for other in holders[1:])
        fitting = free[inside == wants_inside]
        if not len(fitting):
            fitting = free
        # Without a bound on replica peers each of these follows some block.
        if not len(replica_peers):
            return fitting
        others = fitting[~np.isin(fitting, replica_peers)]
        fitting = others if len(others) else fitting
        # The engine takes the one that is such a follower least often.
        turn = sum(place * (place_of(self._members, holder) or 0) for place, holder in zip((1, 3, 5, 7), holders))
        return fitting[[turn % len(fitting)]]

    def _replica_peers_of(self, layers: LayerRange, owner: int) -> np.ndarray:
        """Lists the replica peers that may be first followers of an owner's blocks in these layers; the list is empty
        if all workers may."""
        if self._placing.scatter_width is None:
            return np.zeros(0, dtype=np.int64)
        replica_peers = np.array(self._replica_peers[owner], dtype=np.int64)
        inside = replica_peers[np.isin(replica_peers, layers.members)]
        fitting = inside if len(inside) and not self._spreads else replica_peers
        return np.sort(fitting[: self._placing.scatter_width])

    @cached_property
    def _chosen(self) -> dict[tuple[int, tuple[int, ...]], set[int]]:
        """First layer of a range, and holders so far -> those who are the next follower of some block.

        By the engine's own class, for as many equal blocks as make each first follower follow one.
        """
        assert self._placing.scatter_width is not None
        workers = self._members.tolist()
        chooser = FollowerChooser(workers, self._replica_peers, self._placing.scatter_width, self._domains)
        found: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        turns = [
            (layers.start, tuple(layers.members.tolist()), owner)
            for layers in self._ranges
            for _ in range(max(len(self._replica_peers_of(layers, each)) for each in layers.members.tolist()))
            # Owners come in turn, as `place_blocks` deals them.
            for owner in layers.members.tolist()
        ]
        # As in `place_blocks` all that is owned is counted before the first follower is chosen.
        for _, members, owner in turns:
            chooser.count(members, (owner,), 1)

        def follow(start: int, members: tuple[int, ...], owner: int, chosen: tuple[int, ...]) -> None:
            while len(chosen) < self._num_followers:
                follower = chooser.choose(members, owner, chosen, 1)
                assert follower is not None
                found.setdefault((start, (owner, *chosen)), set()).add(follower)
                chosen += (follower,)

        for start, members, owner in turns:
            follow(start, members, owner, ())
        # An owner that has blocks in several ranges may have had one replica peer in the one and another in the other;
        # with more blocks it has each of them in each.
        for layers in self._ranges:
            members = tuple(layers.members.tolist())
            for owner in members:
                for first in self._replica_peers_of(layers, owner).tolist():
                    if self._num_followers > 1 and (layers.start, (owner, first)) not in found:
                        chooser.note(owner, first, 1, num_firsts=1)
                        follow(layers.start, members, owner, (first,))
        return found

    # -------------------------------------------------------------------------------------------------------- derived

    @cached_property
    def _members(self) -> np.ndarray:
        """All that hold blocks, ascending."""
        return np.unique(np.concatenate([layers.members for layers in self._ranges]))

    @property
    def _num_followers(self) -> int:
        wanted = self._placing.followers
        enough = any(len(layers.members) > wanted for layers in self._ranges)
        return wanted if enough else min(wanted, len(self._members) - 1)

    @cached_property
    def _spreads(self) -> bool:
        """Whether each first follower is in another domain than its owner."""
        return self._placing.scatter_width is not None and bool(self._domains)

    @cached_property
    def _domains(self) -> tuple[dict[int, str], ...]:
        """By what copies are kept apart, coarse to fine, as `elaswave.blocks.domains.domains_of` has it."""
        members = self._members.tolist()
        return tuple(dict(zip(members, map(str, level.tolist()), strict=True)) for level in self._levels)

    @cached_property
    def _levels(self) -> tuple[np.ndarray, ...]:
        """The domain of each member, level by level, from the coarsest on of which there are several; empty where all
        workers share one, and where each has its own."""
        if not self._placing.knows_hosts:
            return ()
        hosts = self._hosts[1][np.searchsorted(self._hosts[0], self._members)]
        racks = self._placing.racks
        levels = (np.array(racks)[hosts], hosts) if racks else (hosts,)
        for depth, level in enumerate(levels):
            if (number := len(np.unique(level))) > 1:
                return () if number == len(level) else levels[depth:]
        return ()

    def _apart(self, workers: np.ndarray, holders: tuple[int, ...]) -> np.ndarray:
        """Finds those in domains without a copy, by the coarsest level at which there are any; all if there are
        none."""
        for level in self._levels:
            used = level[np.searchsorted(self._members, holders)]
            elsewhere = workers[~np.isin(level[np.searchsorted(self._members, workers)], used)]
            if len(elsewhere):
                return elsewhere
        return workers

    @cached_property
    def _replica_peers(self) -> ReplicaPeers:
        assert self._placing.scatter_width is not None
        return choose_replica_peers(
            [layers.members.tolist() for layers in self._ranges],
            self._placing.scatter_width,
            hosts=self._domains[0] if self._domains else None,
            kept=self._kept,
        )

    @property
    def _replica_peers_so_far(self) -> ReplicaPeers:
        """To be kept: those that were asked for, else those of before."""
        # Where `cached_property` keeps its value: the property itself would work them out, a second of many workers.
        return self.__dict__.get("_replica_peers", self._kept)
