"""Which losses a placement survives. Pure: no torch, no IO."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import comb

import msgspec

from elaswave.blocks.domains import hosts_of, workers_by_site
from elaswave.blocks.placement import Placement
from elaswave.types import Layout

_SETS = {2: "pairs", 3: "sets of three"}


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    """What workers can be lost at one instant without any block losing its last copy."""

    num_workers: int
    """All that train or hold blocks."""
    num_copies: int
    """Copies of the blocks that have the fewest: fewer workers than this can always be lost."""
    num_fatal: int
    """Of the sets of so many workers those that hold all copies of some block."""
    num_hosts: int = 1
    """That the workers are on, as far as they can be told apart."""
    fatal_hosts: dict[str, str] = {}
    """Host whose loss, with all of its workers, is not survived without a checkpoint -> why."""
    num_sites: int = 1
    """That the workers are at."""
    fatal_sites: dict[str, str] = {}
    """The same of sites."""

    @property
    def share(self) -> float:
        """Of the sets of `num_copies` workers those whose loss is survived."""
        return 1 - self.num_fatal / comb(self.num_workers, self.num_copies)

    def describe(self) -> str:
        """Describes for people which losses the placement survives."""
        return "; it ".join(filter(None, (self._describe_workers(), self.describe_domains())))

    def describe_domains(self) -> str:
        """Describes for people what becomes of the job when it loses a site or a host; empty where there is one
        only."""
        parts = [_of_domains("site", self.num_sites, self.fatal_sites)] if self.num_sites > 1 else []
        parts += [_of_domains("host", self.num_hosts, self.fatal_hosts)] if self.num_hosts > 1 else []
        return "; it ".join(parts)

    def _describe_workers(self) -> str:
        copies = self.num_copies
        if copies == 1:
            return f"survives no loss of {self.num_fatal} of {self.num_workers} workers: these hold some block alone"
        any_loss = "any worker" if copies == 2 else f"any {copies - 1} workers"
        if copies >= self.num_workers:
            return f"survives the loss of {any_loss}; there are {self.num_workers}"
        sets = _SETS.get(copies, f"sets of {copies}")
        return (
            f"survives the loss of {any_loss}, and at one instant of {100 * self.share:.1f} % of the {sets} "
            f"({self.num_fatal} of {comb(self.num_workers, copies)} hold all copies of some block)"
        )


def _of_domains(kind: str, number: int, fatal: Mapping[str, str]) -> str:
    if not fatal:
        return f"survives the loss of any one of {number} {kind}s"
    why = "; ".join(f"{kind} {name}: {reason}" for name, reason in fatal.items())
    return f"survives the loss of {number - len(fatal) or 'none'} of {number} {kind}s ({why})"


def survival_of(
    placement: Placement, layout: Layout, problem_without: Callable[[Collection[int]], str | None] = lambda lost: None
) -> Survival | None:
    """Finds which losses a placement survives; None for one without blocks.

    Args:
        placement: of a job.
        layout: of all members, also those that hold nothing, and where they run.
        problem_without: why a job does not go on without some workers though it has copies of all blocks, such as that
            the others lack the memory; None if it does.
    """
    sets = set(map(frozenset, placement.groups))
    if not sets:
        return None
    copies = min(map(len, sets))
    hosts, sites = hosts_of(layout), workers_by_site(layout)
    return Survival(
        num_workers=len(set(layout.workers).union(*sets)),
        num_copies=copies,
        num_fatal=sum(len(s) == copies for s in sets),
        num_hosts=len(hosts),
        fatal_hosts=_fatal(placement, hosts, problem_without) if len(hosts) > 1 else {},
        num_sites=max(1, len(sites)),
        fatal_sites=_fatal(placement, sites, problem_without, inside=layout.copies == "inside")
        if len(sites) > 1
        else {},
    )


def _fatal(
    placement: Placement,
    hosts: dict[str, tuple[int, ...]],
    problem_without: Callable[[Collection[int]], str | None],
    *,
    inside: bool = False,
) -> dict[str, str]:
    alone = alone_on(placement, hosts)
    found = {}
    for host, members in hosts.items():
        if alone[host]:
            found[host] = f"{alone[host]} of {placement.num_blocks} blocks have all copies there"
            if inside:
                found[host] += ", as sites.copies asks for: without it the job goes back to the last checkpoint"
        elif problem := problem_without(members):
            found[host] = problem
    return found


def alone_on(placement: Placement, hosts: dict[str, tuple[int, ...]]) -> Counter[str]:
    """Maps host to the number of blocks of which all copies are on it.

    Args:
        placement: of a job.
        hosts: members by host, see `elaswave.blocks.domains.hosts_of`.
    """
    host_of = {worker: host for host, members in hosts.items() for worker in members}
    found = Counter[str]()
    for index, number in Counter(placement.group_indices.tolist()).items():
        on = {host_of.get(worker, "") for worker in placement.groups[index]}
        if len(on) == 1:
            found[on.pop()] += number
    return found
