"""What policies hold of the training state more than once, and which losses at one instant that survives. Pure.

What a policy replicates is data beside the policy (`Replication`); what follows for an allocation is worked out here by
its unit: which smallest sets of workers take the only copies of something with them (*fatal sets*), and whether some
workers contain one. The simulator asks that for every loss, ``compare`` and ``plan`` for the job before one.

Deliberately absent: time. That copies are made again after a loss is the simulator's matter
(`elaswave.sim.cluster.held_state`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

import msgspec
import numpy as np

from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS
from elaswave.planning.plan import Allocation, StageShare
from elaswave.types import WHOLE_STAGE

Unit = Literal["blocks", "stages", "groups", "nothing"]


class Replication(msgspec.Struct, frozen=True, kw_only=True):
    """What of the state a policy holds more than once."""

    unit: Unit
    """blocks: an owner and followers for each, as elaswave places them. stages: every worker of a stage holds all that
    the stage holds. groups: only a group of workers that is whole holds the model. nothing: there is the checkpoint."""
    what: str
    """One line: who holds copies, and what is assumed."""
    source: str
    """Where that is published."""
    rolls_back_in_place: bool = False
    """When state is lost, processes stay and load the checkpoint; otherwise the job is stopped and started again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRange:
    """Layers that the same workers run."""

    start: int
    stop: int
    members: np.ndarray
    """int64 ids, ascending."""
    followers: int = DEFAULT_FOLLOWERS
    """Of each block beside its owner, where state is in blocks: as far as there are other workers, or `WHOLE_STAGE`."""


def layer_ranges(
    allocation: Allocation, followers_of: Callable[[StageShare], int] = lambda stage: DEFAULT_FOLLOWERS
) -> tuple[LayerRange, ...]:
    """Lists the layers, cut wherever other workers run them. Layers that stages share are of the workers of both, and
    have as many followers as the stage that asks for the most.

    Args:
        allocation: who runs which layers.
        followers_of: that a stage asks for.
    """
    stages = [stage for chain in allocation.chains for stage in chain.stages]
    asked_for = {id(stage): followers_of(stage) for stage in stages}
    bounds = sorted({bound for stage in stages for bound in (stage.start, stage.stop)})
    found = []
    for start, stop in zip(bounds, bounds[1:]):
        of_both = [stage for stage in stages if stage.start <= start and stop <= stage.stop]
        columns = [stage.workers for stage in of_both]
        members = columns[0]
        if len(columns) > 1:
            members = np.sort(np.concatenate(columns), kind="stable")  # of sorted parts: far faster than np.unique
            members = members[np.concatenate([[True], members[1:] > members[:-1]])]
        asked = [asked_for[id(stage)] for stage in of_both]
        followers = WHOLE_STAGE if WHOLE_STAGE in asked else max(asked)
        found.append(LayerRange(start=start, stop=stop, members=members, followers=followers))
    return tuple(found)


class ReplicaSet(Protocol):
    """Who holds what under one allocation."""

    def lost_with(self, workers: Collection[int]) -> bool:
        """Tells whether something has no holder left when these workers go at one instant."""
        ...

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Yields the sets of exactly so many workers, ascending ids, each once, that are fatal and contain no smaller
        one."""
        ...

    @property
    def smallest_fatal(self) -> int:
        """Number of workers of the smallest fatal set."""
        ...

    @property
    def whole_stages(self) -> bool:
        """Whether blocks are followed by all of their stage."""
        ...


class WithoutCopies:
    """Nothing is held twice: the loss of any worker that computes leads back to a checkpoint."""

    smallest_fatal = 1
    whole_stages = False

    def __init__(self, allocation: Allocation) -> None:
        self._workers = allocation.workers

    def lost_with(self, workers: Collection[int]) -> bool:
        """Does what `ReplicaSet` says."""
        return any(has(self._workers, worker) for worker in workers)

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Does what `ReplicaSet` says."""
        if size == 1:
            yield from ((worker,) for worker in self._workers.tolist())


class WholeStages:
    """Every worker of a stage holds all of its state.

    Args:
        allocation: who runs which layers.
        incomplete: workers of it that do not hold theirs yet.
    """

    whole_stages = False

    def __init__(self, allocation: Allocation, incomplete: Collection[int] = ()) -> None:
        self._ranges = layer_ranges(allocation)
        self._incomplete = frozenset(incomplete)

    def lost_with(self, workers: Collection[int]) -> bool:
        """Does what `ReplicaSet` says."""
        gone = self._incomplete.union(workers)
        for layers in self._ranges:
            if len(gone) < len(layers.members):
                continue
            members = layers.members.tolist()
            if gone.issuperset(members) and not frozenset(workers).isdisjoint(members):
                return True
        return False

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Does what `ReplicaSet` says."""
        complete = [_without(layers.members, self._incomplete) for layers in self._ranges]
        holders = {tuple(members.tolist()) for members in complete if len(members) <= size}
        yield from sorted(
            each for each in holders if len(each) == size and not any(set(other) < set(each) for other in holders)
        )

    @property
    def smallest_fatal(self) -> int:
        """Does what `ReplicaSet` says."""
        return min(len(_without(layers.members, self._incomplete)) for layers in self._ranges)


class WholeGroups:
    """Only a group that is whole holds the model: group j is the j-th worker of every stage (see `torchft`).

    Args:
        allocation: who runs which layers; the first chain's shape is that of a group.
        incomplete: workers whose groups are still healing.
    """

    whole_stages = False

    def __init__(self, allocation: Allocation, incomplete: Collection[int] = ()) -> None:
        stages = allocation.chains[0].stages
        number = min(stage.width for stage in stages)
        self._columns = [stage.workers[:number] for stage in stages]
        self._healing = self._groups_of(incomplete)
        self._number = number

    def lost_with(self, workers: Collection[int]) -> bool:
        """Does what `ReplicaSet` says."""
        broken = self._groups_of(workers)
        return bool(broken) and len(broken | self._healing) == self._number

    def fatal_sets(self, size: int) -> Iterator[tuple[int, ...]]:
        """Does what `ReplicaSet` says."""
        whole = [row for row in range(self._number) if row not in self._healing]
        if len(whole) == size:
            members = [[int(column[row]) for column in self._columns] for row in whole]
            yield from (tuple(sorted(each)) for each in product(*members))

    @property
    def smallest_fatal(self) -> int:
        """Does what `ReplicaSet` says."""
        return self._number - len(self._healing)

    def _groups_of(self, workers: Collection[int]) -> frozenset[int]:
        return frozenset(
            position
            for worker in workers
            for column in self._columns
            if (position := place_of(column, worker)) is not None
        )


WHOLE: Mapping[Unit, Callable[[Allocation, Collection[int]], ReplicaSet]] = {
    "stages": WholeStages,
    "groups": WholeGroups,
    "nothing": lambda allocation, incomplete: WithoutCopies(allocation),
}
"""Unit -> copies under an allocation, some of whose workers do not hold theirs yet. Blocks are another matter
(`elaswave.planning.state_moves.placed_blocks`)."""


def has(ids: np.ndarray, worker: int) -> bool:
    """Tells whether a worker is among ascending ids."""
    return place_of(ids, worker) is not None


def place_of(ids: np.ndarray, worker: int) -> int | None:
    """Finds the position of a worker among ascending ids; returns None if it is not there."""
    index = int(np.searchsorted(ids, worker))
    return index if index < len(ids) and int(ids[index]) == worker else None


def _without(ids: np.ndarray, gone: Collection[int]) -> np.ndarray:
    return ids[~np.isin(ids, np.fromiter(gone, dtype=np.int64, count=len(gone)))] if gone else ids
