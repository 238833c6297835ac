"""Owners and followers of blocks at worker level: which workers hold the only copies of some block together. Pure.

The replica peers of a worker are chosen by the engine's own function (`elaswave.blocks.replica_peers`), from the same
groups of workers that run the same layers. What is left out are the blocks: of an owner's blocks each of its replica
peers is taken to follow some, which holds as soon as it owns as many blocks as it has replica peers.

How many followers a block has is up to the stage, as in the engine (`elaswave.blocks.placement.WantedFollowers`): a
number, those inside of the stage first, or all of the stage, and one outside where the stage has one worker only or is
all in one domain while others are elsewhere. A worker that has been sent layers holds the fewest copies that safety
needs (of its own blocks, and of those of which it is the first follower) until it has been filled up.

Replica peers are worked out when they are asked for: of 100,000 workers they take a second, and most losses need none.
Who is the second follower beside each replica peer follows from all choices before; above `CHOSEN_MAX` workers that
takes too long, and second followers are dealt in turn among those who may be one.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

import numpy as np

from elaswave.blocks.placement import FollowerChooser, default_block_size
from elaswave.blocks.replica_peers import ReplicaPeers, choose_replica_peers
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS, Costs, followers_that_fit
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.plan import Allocation, StageShare
from elaswave.planning.policy.replication import LayerRange, has, layer_ranges, place_of
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH
from elaswave.types import WHOLE_STAGE

CHOSEN_MAX = 1024
"""Workers up to which further followers are chosen as the engine does."""
DEFAULT_COPIES_MEMORY = 0.25
"""Share of a worker's memory that copies of others' blocks may take (`elastic.copies_memory`)."""
_ELEMENT_BYTES = 12
"""Of master and optimizer slots of an element, with AdamW."""
_MEAN_GRADIENT_BYTES = 4
"""Of an element, which a follower receives in each step."""


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

    followers: int | Literal["auto"] = DEFAULT_FOLLOWERS
    """Live copies of every block beside its owner's (`elastic.num_followers`): auto is all of the stage where these
    fit."""
    copies_memory: float = DEFAULT_COPIES_MEMORY
    """Share of a worker's memory that these may take, where their number is up to it."""
    scatter_width: int | None = DEFAULT_SCATTER_WIDTH
    """Replica peers of a worker; None means all other workers that run the same, as before there were replica peers."""
    knows_hosts: bool = True
    """Whether followers are put on other hosts."""
    racks: tuple[int, ...] = ()
    """Rack of host 0, 1, ..., where followers are put into other racks; empty: hosts are all that is known."""
    refill_bytes_per_step: float | None = None
    """The most that a worker sends, and receives, in a step to make lost copies again and to fill up new ones; None
    means the budget of copies that a plan moves."""

    @property
    def planned_followers(self) -> int:
        """Copies that layouts are planned with (`elastic.planned_followers`)."""
        return DEFAULT_FOLLOWERS if self.followers == "auto" else self.followers

    def followers_of(self, stage: StageShare, there: Cluster, costs: Costs) -> int:
        """Returns how many followers the blocks of a stage have, or `WHOLE_STAGE`, by the rule of a run.

        Args:
            stage: with its workers.
            there: the cluster, with all of them.
            costs: of the layers.
        """
        if self.followers != "auto":
            return self.followers
        least_bytes = float(there.memory_bytes[there.index_of(stage.workers)].min())
        copy_bytes = copied_bytes(costs, stage.start, stage.stop)
        return followers_that_fit(stage.width, copy_bytes, least_bytes, self.copies_memory)


def copied_bytes(costs: Costs, start: int, stop: int) -> float:
    """Computes the bytes of one copy of layers, with the mean gradients that it receives: 16 of a parameter, with
    AdamW."""
    return costs.between("optimizer_bytes", start, stop) * (1 + _MEAN_GRADIENT_BYTES / _ELEMENT_BYTES)


class PlacedBlocks:
    """Who holds blocks together under an allocation (`elaswave.planning.policy.replication.Copies`).

    Args:
        ranges: the layers, by who runs them, and how many followers they have.
        hosts: ascending ids of all workers of the ranges, and the host of each; others may be among them.
        placing: how followers are chosen.
        kept: replica peers of before; they stay where they fit, as in the engine.
    """

    def __init__(
        self, ranges: Sequence[LayerRange], hosts: tuple[np.ndarray, np.ndarray], placing: Placing, kept: ReplicaPeers
    ) -> None:
        self.ranges, self._hosts, self._placing, self._kept = ranges, hosts, placing, kept

    @classmethod
    def of(
        cls, allocation: Allocation, there: Cluster, placing: Placing, costs: Costs, kept: ReplicaPeers | None = None
    ) -> "PlacedBlocks":
        """Makes blocks all of whose copies are there.

        Args:
            allocation: who runs which layers.
            there: with all of its workers.
            placing: how followers are chosen.
            costs: of the layers.
            kept: replica peers of before; None: they are placed afresh.
        """
        ranges = layer_ranges(allocation, lambda stage: placing.followers_of(stage, there, costs))
        return cls(ranges, (there.ids, there.node), placing, kept or {})

    def moved_to(self, allocation: Allocation, there: Cluster, costs: Costs) -> "PlacedBlocks":
        """Returns the blocks under another allocation, once all copies are where it wants them."""
        return PlacedBlocks.of(allocation, there, self._placing, costs, self._replica_peers_so_far)

    def without(self, workers: Collection[int]) -> "PlacedBlocks":
        """Returns the blocks without some workers, once their copies have been made again."""
        gone = np.fromiter(workers, dtype=np.int64, count=len(workers))
        ranges = [
            LayerRange(
                start=each.start,
                stop=each.stop,
                members=each.members[~np.isin(each.members, gone)],
                followers=each.followers,
            )
            for each in self.ranges
        ]
        return PlacedBlocks(ranges, self._hosts, self._placing, self._replica_peers_so_far)

    def shares(self, worker: int) -> Iterator[LayerRange]:
        """Yields the layer ranges whose blocks a worker owns a share of."""
        for layers in self.ranges:
            if has(layers.members, worker):
                yield layers

    def num_followers(self, layers: LayerRange) -> int:
        """Counts the followers of each block of these layers."""
        if layers.followers == WHOLE_STAGE:
            return max(0, len(layers.members) - 1 + self._needs_one_outside(layers))
        # Of many workers all are only looked for where they might not suffice.
        if len(layers.members) > layers.followers:
            return layers.followers
        return min(layers.followers, len(self._members) - 1)

    # ------------------------------------------------------------------------------------------------------ questions

    def lost_with(self, workers: Collection[int], filling: Collection[tuple[int, int, int]] = ()) -> bool:
        """Does what `ReplicaSet` says.

        Args:
            workers: that go.
            filling: (worker, first layer, one past the last) of those that are there and hold the fewest copies of some
                layers so far.
        """
        gone = frozenset(workers)
        for layers in self.ranges:
            few = {worker for worker, start, stop in filling if start < layers.stop and layers.start < stop}
            if self._loses(layers, gone, few):
                return True
        return False

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Does what `ReplicaSet` says."""
        of_size: dict[int, list[LayerRange]] = {}
        for layers in self.ranges:
            of_size.setdefault(1 + self.num_followers(layers), []).append(layers)
        smaller = [
            frozenset(holders)
            for each, several in of_size.items()
            if each < size and size in of_size
            for layers in several
            for holders in self._holder_sets(layers)
        ]
        # The same workers may be owner and followers in several ways.
        seen: set[tuple[int, ...]] = set()
        for layers in of_size.get(size, ()):
            for holders in self._holder_sets(layers):
                found = tuple(sorted(holders))
                if found not in seen:
                    seen.add(found)
                    if not any(each.issubset(found) for each in smaller):
                        yield found

    @property
    def smallest_fatal(self) -> int:
        """Does what `ReplicaSet` says."""
        return 1 + min(map(self.num_followers, self.ranges))

    @property
    def whole_stages(self) -> bool:
        """Does what `ReplicaSet` says."""
        return all(layers.followers == WHOLE_STAGE for layers in self.ranges)

    @property
    def state_share(self) -> np.ndarray:
        """Share of each layer's state that one of those who run it holds, float64 [num_layers]."""
        share = np.zeros(self.ranges[-1].stop)
        for layers in self.ranges:
            share[layers.start : layers.stop] = (1 + self.num_followers(layers)) / max(1, len(layers.members))
        return share

    def num_senders(self, worker: int) -> int:
        """Counts the workers that hold the other copies of what a worker holds, at least 1."""
        most = 1
        for layers in self.shares(worker):
            peers = len(layers.members) - 1
            if self._placing.scatter_width is not None:
                peers = min(peers, self._placing.scatter_width + max(0, self.num_followers(layers) - 1))
            most = max(most, peers)
        return most

    def _loses(self, layers: LayerRange, gone: frozenset[int], few: set[int]) -> bool:
        """Tells whether blocks of some layers have no holder left.

        Args:
            layers: that the same workers run.
            gone: workers that are lost.
            few: those that hold no more copies of these layers than they own, or follow as the first one.
        """
        owners = [worker for worker in gone if has(layers.members, worker)]
        number = self.num_followers(layers)
        if not owners or len(gone) <= min(number, 1):
            return False
        if not number:
            return True
        absent = gone | few
        if len(absent) <= number:
            return False
        if layers.followers == WHOLE_STAGE:
            if not absent.issuperset(layers.members.tolist()):
                return False
            if not few and not self._needs_one_outside(layers):
                return True
            number = 1  # what is left are the first followers
        if self._spreads and len(set(self._levels[0][self._positions(gone)].tolist())) == 1:
            return False  # the first follower is in another domain
        return any(self._is_fatal(layers, owner, number, gone, absent) for owner in owners)

    def _is_fatal(
        self, layers: LayerRange, owner: int, number: int, gone: Collection[int], absent: Collection[int]
    ) -> bool:
        """Tells whether some block of an owner has its first follower among those who are gone and its further ones
        among those who hold no copy of it."""
        waiting: list[tuple[int, ...]] = [(owner,)]
        while waiting:
            holders = waiting.pop()
            if len(holders) > number:
                return True
            next_ones = self._next_holders(layers, holders)
            among = gone if len(holders) == 1 else absent
            waiting += [(*holders, other) for other in among if other not in holders and has(next_ones, other)]
        return False

    def _holder_sets(self, layers: LayerRange) -> Iterator[tuple[int, ...]]:
        """Yields the sets of owner and followers of blocks of these layers; the same one may come several times."""
        members = layers.members.tolist()
        if layers.followers != WHOLE_STAGE:
            for owner in members:
                yield from self._holders(layers, (owner,))
        elif not self._needs_one_outside(layers):
            yield tuple(members)
        else:
            for owner in members:
                for other in self._next_holders(layers, (owner,)).tolist():
                    yield (*members, other)

    def _holders(self, layers: LayerRange, holders: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yields all sets of owner and followers that begin with these."""
        if len(holders) > self.num_followers(layers):
            yield holders
            return
        for other in self._next_holders(layers, holders).tolist():
            yield from self._holders(layers, (*holders, other))

    def _needs_one_outside(self, layers: LayerRange) -> bool:
        """Tells whether one outside of a stage follows, beside all inside: as `WantedFollowers` has it."""
        if len(layers.members) == 1 or not self._levels:
            return len(layers.members) == 1 and len(self._members) > 1
        return len(set(self._levels[0][np.searchsorted(self._members, layers.members)].tolist())) == 1

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
        fitting = free[inside] if inside.any() else free
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
            (layers, tuple(layers.members.tolist()), owner)
            for layers in self.ranges
            for _ in range(
                max((len(self._replica_peers_of(layers, each)) for each in layers.members.tolist()), default=0)
            )
            # Owners come in turn, as `place_blocks` deals them.
            for owner in layers.members.tolist()
        ]
        # As in `place_blocks` all that is owned is counted before the first follower is chosen.
        for _, members, owner in turns:
            chooser.count(members, (owner,), 1)

        def follow(layers: LayerRange, members: tuple[int, ...], owner: int, chosen: tuple[int, ...]) -> None:
            while len(chosen) < self.num_followers(layers):
                follower = chooser.choose(members, owner, chosen, 1)
                assert follower is not None
                found.setdefault((layers.start, (owner, *chosen)), set()).add(follower)
                chosen += (follower,)

        for layers, members, owner in turns:
            whole = sorted(members, key=lambda worker: (worker <= owner, worker))[:-1]  # in a ring behind the owner
            follow(layers, members, owner, tuple(whole) if layers.followers == WHOLE_STAGE else ())
        # An owner that has blocks in several ranges may have had one replica peer in the one and another in the other;
        # with more blocks it has each of them in each.
        for layers in self.ranges:
            members = tuple(layers.members.tolist())
            for owner in members:
                for first in self._replica_peers_of(layers, owner).tolist():
                    if not self._has_further(layers) or (layers.start, (owner, first)) in found:
                        continue
                    chooser.note(owner, first, 1, num_firsts=1)
                    follow(layers, members, owner, (first,))
        return found

    # -------------------------------------------------------------------------------------------------------- derived

    @cached_property
    def _members(self) -> np.ndarray:
        """All that hold blocks, ascending."""
        return np.unique(np.concatenate([layers.members for layers in self.ranges]))

    def _has_further(self, layers: LayerRange) -> bool:
        """Tells whether who follows blocks of these layers is chosen one by one, beyond the first."""
        return layers.followers != WHOLE_STAGE and self.num_followers(layers) > 1

    def _positions(self, workers: Collection[int]) -> np.ndarray:
        """Finds the positions of those of some workers that hold blocks among all that do."""
        some = np.fromiter(workers, dtype=np.int64, count=len(workers))
        return np.searchsorted(self._members, some[np.isin(some, self._members)])

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
            [layers.members.tolist() for layers in self.ranges],
            self._placing.scatter_width,
            hosts=self._domains[0] if self._domains else None,
            kept=self._kept,
        )

    @property
    def _replica_peers_so_far(self) -> ReplicaPeers:
        """To be kept: those that were asked for, else those of before."""
        # Where `cached_property` keeps its value: the property itself would work them out, a second of many workers.
        return self.__dict__.get("_replica_peers", self._kept)
