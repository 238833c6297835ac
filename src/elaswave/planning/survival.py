"""Which losses at one instant a job survives without going back to a checkpoint, as shares and as a line of text. Pure.

Single workers, pairs, triples, whole hosts and whole racks are counted, not drawn, unless there are too many fatal sets
to list.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import comb

import msgspec
import numpy as np

from elaswave.hashing import key64
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.plan import Allocation
from elaswave.planning.policy.replication import WHOLE, ReplicaSet, Replication
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing

LISTED_MAX = 2_000_000
"""Fatal sets that are listed to count them."""
DRAWN = 10_000
"""Sets that are drawn, always the same, where more would have to be listed."""
_NAMES = {1: ("worker", "single workers"), 2: ("two workers", "pairs"), 3: ("three workers", "triples")}


class SurvivalShares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of losses at one instant that leave a copy of everything."""

    workers: tuple[float, ...]
    """Of single workers, of pairs, of triples; up to the first that is below 1."""
    drawn: bool
    """The last of them is an estimate from `DRAWN` sets."""
    hosts: int
    """Whole hosts whose loss is survived."""
    num_hosts: int
    racks: int = 0
    """Whole racks whose loss is survived."""
    num_racks: int = 0
    """0 where racks are not known."""
    any_workers: int = 0
    """So many workers, whichever they are, may be lost at one instant."""
    whole_stages: bool = False
    """Whether all of each stage hold its state: of a stage all but one may be lost."""

    def describe(self) -> str:
        """Describes the shares as a line: survives any one worker; 96 % of pairs; no whole host."""
        parts = []
        size = len(self.workers)
        survived = size if self.workers[-1] == 1 else size - 1
        if self.whole_stages and self.any_workers:
            parts.append(f"any {self.any_workers} of a stage")
        elif self.any_workers > survived:
            parts.append(f"any {self.any_workers} workers")
        elif survived:
            parts.append(f"any {_NAMES[survived][0] if survived > 1 else 'one worker'}")
        if survived < size:
            share, name = self.workers[-1], _NAMES[size][1]
            parts.append(f"no loss of {name}" if share == 0 else f"{'about ' * self.drawn}{percent(share)} of {name}")
        parts.append(_of_domains("host", self.hosts, self.num_hosts))
        if self.num_racks:
            parts.append(_of_domains("rack", self.racks, self.num_racks))
        return "survives " + "; ".join(parts)


def _of_domains(name: str, survived: int, number: int) -> str:
    if survived == number:
        return f"any whole {name}"
    return f"{survived} of {number} whole {name}s" if survived else f"no whole {name}"


def survival(
    copies: ReplicaSet, workers: np.ndarray, nodes: np.ndarray, racks: np.ndarray | None = None
) -> SurvivalShares:
    """Counts what a job survives.

    Args:
        copies: who holds what.
        workers: that compute, ascending ids: of them losses are.
        nodes: the host of each.
        racks: the rack of each, where racks are known.
    """
    shares: list[float] = []
    drawn = False
    for size in (1, 2, 3):
        if len(workers) <= size:
            break
        share, drawn = _share(copies, workers, size)
        shares.append(share)
        if share < 1:
            break
    hosts, num_hosts = _survived(copies, workers, nodes)
    of_racks = (0, 0) if racks is None else _survived(copies, workers, racks)
    return SurvivalShares(
        workers=tuple(shares),
        drawn=drawn,
        hosts=hosts,
        num_hosts=num_hosts,
        racks=of_racks[0],
        num_racks=of_racks[1],
        any_workers=min(copies.smallest_fatal, len(workers)) - 1,
        whole_stages=copies.whole_stages,
    )


def survival_shares_of(
    replication: Replication, allocation: Allocation, there: Cluster, placing: Placing, costs: Costs
) -> SurvivalShares:
    """Computes what a policy's job survives.

    Args:
        replication: what the policy holds more than once.
        allocation: of the job.
        there: with all of its workers.
        placing: how blocks are copied, if the policy has blocks; which racks there are.
        costs: of the layers.
    """
    copies: ReplicaSet
    if replication.unit == "blocks":
        copies = PlacedBlocks.of(allocation, there, placing, costs)
    else:
        copies = WHOLE[replication.unit](allocation, ())
    workers = allocation.workers
    nodes = there.node[there.index_of(workers)]
    return survival(copies, workers, nodes, np.array(placing.racks)[nodes] if placing.racks else None)


def percent(share: float) -> str:
    """Formats a share below 1, with as many digits as it takes not to be rounded up to all."""
    for digits in range(7):
        text = f"{share * 100:.{digits}f}"
        if float(text) < 100:
            return f"{text} %"
    return f"all but {1 - share:.1e}"


def _share(copies: ReplicaSet, workers: np.ndarray, size: int) -> tuple[float, bool]:
    """Computes the share of the sets of so many workers that are survived, and tells whether it is estimated."""
    number = sum(1 for _ in islice(copies.fatal_sets(size), LISTED_MAX + 1))
    if number <= LISTED_MAX:
        return 1 - number / comb(len(workers), size), False
    drawn = (_draw(workers, size, number) for number in range(DRAWN))
    return sum(not copies.lost_with(each) for each in drawn) / DRAWN, True


def _draw(workers: np.ndarray, size: int, number: int) -> set[int]:
    """Draws a set of so many workers that follows from its number alone."""
    found: set[int] = set()
    place = 0
    while len(found) < size:
        found.add(int(workers[key64("survival", number, place) % len(workers)]))
        place += 1
    return found


def _survived(copies: ReplicaSet, workers: np.ndarray, domains: np.ndarray) -> tuple[int, int]:
    """Counts how many domains (hosts, or racks) may be lost whole, and how many there are."""
    groups = list(_by_domain(workers, domains))
    return sum(not copies.lost_with(members) for members in groups), len(groups)


def _by_domain(workers: np.ndarray, domains: np.ndarray) -> Iterator[list[int]]:
    order = np.argsort(domains, kind="stable")
    cuts = np.flatnonzero(np.diff(domains[order])) + 1
    groups: Iterable[np.ndarray] = np.split(workers[order], cuts)
    yield from (group.tolist() for group in groups)
