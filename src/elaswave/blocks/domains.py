"""Failure domains: what workers share that can be lost at one instant. Pure: no torch, no IO.

A worker's *label* says where it runs, coarse to fine: ``host-3``, or ``rack-1/host-3``. What stands before a slash is a
domain of its own (a rack, a switch, a zone), so hosts of the same name in two racks are two hosts. Workers without a
label are on one host, whose label is empty. Labels travel in the layout (`elaswave.types.Layout.domains`): it is what
all members agree on in every vote, so all of them derive the same placements.

Copies are kept apart at the coarsest level at which there is anything to keep apart: over racks where there are
several, else over hosts. Where each worker has a domain of its own, losing a domain is losing a worker, and nothing is
otherwise than without labels.

Where workers are at several *sites*, which slow links join, the coarsest domain is the site (``oslo``,
``oslo/host-3``). Copies outside of it are one more level of the same rule. Copies inside
(`elaswave.types.Layout.copies`) never leave the owner's site, whose loss then takes state with it; within it they are
kept apart as ever.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from elaswave.types import Layout

Domains = tuple[Mapping[int, str], ...]
"""Worker -> domain, level by level, the coarsest first; empty where there is nothing to keep apart."""


def prefixes(label: str) -> tuple[str, ...]:
    """Lists the domains that a label is in, coarse to fine: ``("rack-1", "rack-1/host-3")``."""
    parts = label.split("/")
    return tuple("/".join(parts[: depth + 1]) for depth in range(len(parts)))


def domains_of(layout: Layout, excluded: Collection[int] = (), holders: Collection[int] = ()) -> Domains:
    """Finds by what the copies of a layout's blocks are kept apart.

    Args:
        layout: with the labels of its members.
        excluded: workers that hold nothing; idle ones hold nothing either.
        holders: idle workers that hold blocks all the same, as when a move to another placement ends half-way.
    Returns:
        Domains of all members. Of one that has no label it is the empty one.
    """
    if not layout.domains:
        return ()
    labels = layout.domain_of
    paths = {worker: prefixes(labels.get(worker, "")) for worker in layout.workers}
    holding = [worker for worker in {*layout.active, *holders} if worker not in excluded]
    levels = [
        {worker: path[min(depth, len(path) - 1)] for worker, path in paths.items()}
        for depth in range(layout.copies == "inside", max(map(len, paths.values()), default=0))
    ]
    for depth, level in enumerate(levels):
        number = len({level[worker] for worker in holding})
        if number > 1:
            return () if number == len(holding) else tuple(levels[depth:])
    return ()


def site_of(label: str) -> str:
    """Finds the coarsest domain of a label."""
    return label.partition("/")[0]


def workers_by_site(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Lists the members at each site, sites in the order of their first workers; empty where nothing is known of
    sites."""
    found: dict[str, list[int]] = {}
    for worker in layout.workers if layout.copies else ():
        found.setdefault(site_of(layout.domain_of.get(worker, "")), []).append(worker)
    return {site: tuple(members) for site, members in found.items()}


def realms_of(layout: Layout) -> Mapping[int, str]:
    """Maps worker to site, where copies do not leave their owner's site; else the map is empty: they may be
    anywhere."""
    if layout.copies != "inside":
        return {}
    return {worker: site for site, members in workers_by_site(layout).items() for worker in members}


def hosts_of(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Lists the members of each host, hosts in the order of their first workers. Where labels name sites and nothing
    finer, nothing is known of hosts: all members are on one, without a name."""
    if layout.copies and not any("/" in label for _, label in layout.domains):
        return {"": layout.workers} if layout.workers else {}
    found: dict[str, list[int]] = {}
    for worker in layout.workers:
        found.setdefault(layout.domain_of.get(worker, ""), []).append(worker)
    return {host: tuple(members) for host, members in found.items()}


def label_members(layout: Layout, labels: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
    """Makes what `Layout.domains` is for the members of a layout: nothing if none of them has a label."""
    known = {worker: labels.get(worker, "") for worker in layout.workers}
    return tuple(known.items()) if any(known.values()) else ()


def deal_over_hosts(widths: Sequence[int], hosts: Mapping[str, int]) -> tuple[tuple[int, str], ...]:
    """Chooses which worker is on which host, so that each stage is spread over as many as it can be.

    Worker ids are given stage by stage from 0. A worker of a stage comes to the domain, then the host, that has the
    fewest workers of that stage; of equals to the one with the most room. A stage of one worker stays on a host of the
    stage before, so that activations stay on one machine; there is nothing to spread.

    Args:
        widths: workers of each stage.
        hosts: label -> number of workers that it has; at least as many in all as the stages need.
    Returns:
        As of `Layout.domains`.
    Raises:
        ValueError: there is not room for all workers.
    """
    if sum(hosts.values()) < sum(widths):
        raise ValueError(f"there is room for {sum(hosts.values())} workers, but the stages have {sum(widths)}")
    room = dict(hosts)
    dealt: list[tuple[int, str]] = []
    before: list[str] = []
    for width in widths:
        here: list[str] = []
        counts: Counter[str] = Counter()
        for index in range(width):
            nearest = before[index] if index < len(before) else None

            def costs(
                host: str, width: int = width, nearest: str | None = nearest, before: Collection[str] = tuple(before)
            ) -> tuple[object, ...]:
                shared = [counts[domain] for domain in prefixes(host)]  # noqa: B023  # called in this turn only
                return shared, width == 1 and host not in before, -room[host], host != nearest

            chosen = min((host for host in hosts if room[host] > 0), key=costs)
            room[chosen] -= 1
            counts.update(prefixes(chosen))
            here.append(chosen)
            dealt.append((len(dealt), chosen))
        before = here
    return tuple(dealt)
