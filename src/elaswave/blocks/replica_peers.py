"""ReplicaPeers: among which workers the first follower of a worker's blocks is chosen. Pure: no torch, no IO.

If every worker of a stage follows blocks of every other (declustering without a bound), any two of them that are lost
at one instant take all copies of some block with them. Here each worker has a few replica peers only, its *scatter
width*: its blocks have their first followers on these, and two workers lost together lose state only if they are
replica peers. This is Cidon et al., "Copysets: Reducing the Frequency of Data Loss in Cloud Storage", USENIX ATC 2013,
with a graph in the place of random permutations: for two copies a copyset is an edge, and s replica peers need n x s /
2 of them.

The smaller the width, the fewer sets of workers are fatal; the larger, the more workers share what a lost one did.

Hosts count before stages: a replica peer is on another host where there is one, preferably in the same stage (a *group*
here), else in any. Hosts are linked first and workers only across linked hosts, as far as that suffices: eight workers
of a host that each choose for themselves would make nearly every pair of hosts fatal. Only where all workers are on one
host a replica peer is in the same group, or in any other for a worker that is alone in its groups.

Who has lost a replica peer is linked with others that have, so that a loss changes few pairs; a newcomer is inserted in
a pair of replica peers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

EVERYBODY = 1 << 30
"""A scatter width that makes all workers of a stage replica peers."""
ReplicaPeers = dict[int, tuple[int, ...]]
"""Worker -> those among which the first followers of its blocks are chosen. Nearly always mutual."""

_WINDOW = 128
"""So many workers near one that nobody is left for are looked at."""


def choose_replica_peers(
    groups: Sequence[Sequence[int]],
    width: int,
    *,
    hosts: Mapping[int, str | int] | None = None,
    kept: Mapping[int, Iterable[int]] | None = None,
    firm: bool = False,
) -> ReplicaPeers:
    """Chooses the replica peers of every worker; it is a deterministic function of its arguments.

    A worker gets `width` replica peers on other hosts, or as many as there are; where all are on one host, `width` in
    each of its groups, or as many as those have. Nothing kept and all on one host: the neighbours at distance 1, 2, ...
    in the ring of each group, for a width of 1 pairs (of an odd number the last three follow each other in a ring).
    100,000 workers take about a second.

    Args:
        groups: workers that run the same, such as those of one stage; groups may overlap. A worker in none has none.
        width: the scatter width, at least 1.
        hosts: the host of each worker; None means that all are on one.
        kept: the replica peers of before, most important first. Those that are too many or no longer fit are dropped.
        firm: whether each kept replica peer that fits stays. Otherwise workers that were nobody's replica peer, and had
            none, may be put between two that were replica peers.
    Returns:
        For each worker of a group its replica peers, kept ones first.
    Raises:
        ValueError: width < 1, or a worker without a host.
    """
    if width < 1:
        raise ValueError(f"the scatter width is {width}: a worker needs at least 1 replica peer")
    workers = sorted(set(chain.from_iterable(groups)))
    if hosts is not None and (missing := [worker for worker in workers if worker not in hosts]):
        raise ValueError(f"no host is given for workers {missing}: name one for every worker, or none")
    graph = _Graph(workers, groups, width, hosts)
    graph.keep(kept or {}, firm=firm)
    if graph.num_hosts > 1:
        for group in groups:
            # Nobody gives way before all have also looked beyond their own groups.
            graph.fill(group, group, last=False)
        graph.fill(workers, workers, last=True)
    else:
        for group in groups:
            graph.fill(group, group, last=True)
        graph.fill(sorted(graph.alone), workers, last=True)
    return {worker: tuple(replica_peers) for worker, replica_peers in graph.replica_peers.items()}


def replica_peer_pairs(replica_peers: Mapping[int, Iterable[int]]) -> set[tuple[int, int]]:
    """Lists all pairs (lower id first) of which one follows the other's blocks: with one follower, those pairs whose
    loss at one instant loses state."""
    return {(min(one, other), max(one, other)) for one, others in replica_peers.items() for other in others}


class _Graph:
    """Replica peers as they are chosen.

    Args:
        workers: all, ascending.
        groups, width, hosts: as of `choose_replica_peers`.
    """

    def __init__(
        self,
        workers: Sequence[int],
        groups: Sequence[Sequence[int]],
        width: int,
        hosts: Mapping[int, str | int] | None,
    ) -> None:
        self._width = width
        self._hosts: Mapping[int, str | int] = dict.fromkeys(workers, 0) if hosts is None else hosts
        self.num_hosts = len({self._hosts[worker] for worker in workers})
        self.replica_peers: dict[int, dict[int, None]] = {worker: {} for worker in workers}
        self._num_chosen = dict.fromkeys(workers, 0)  # how often each is a replica peer of another
        self._need = dict.fromkeys(workers, 0)
        self._host_links: dict[str | int, dict[str | int, None]] = {}
        self._groups_of: dict[int, list[int]] = {worker: [] for worker in workers}
        self._num_members = [len(set(group)) for group in groups]
        for index, group in enumerate(groups):
            for worker in group:
                self._groups_of[worker].append(index)
        self.alone = {worker for worker in workers if all(self._num_members[i] == 1 for i in self._groups_of[worker])}
        self._breakable: set[tuple[int, int]] = set()
        self._newcomers: set[int] = set()
        self._wished: dict[int, tuple[int, ...]] = {}

    # ------------------------------------------------------------------------------------------------ what was before

    def keep(self, kept: Mapping[int, Iterable[int]], *, firm: bool) -> None:
        """Takes over the replica peers of before."""
        for worker, others in kept.items():
            if worker not in self.replica_peers:
                continue
            known = [other for other in others if other in self.replica_peers]
            if len(self._groups_of[worker]) > 1:  # who is in one group with it only has no other group to stay for
                known.sort(key=lambda other: len(set(self._groups_of[worker]).intersection(self._groups_of[other])))
            for other in known:
                if other not in self.replica_peers[worker] and self._may_stay(worker, other):
                    self._add(worker, other)
        if firm:
            return
        # Whoever is nobody's replica peer shall become one: it gives up its own for such as choose it, too.
        # That may leave another one as nobody's, so it goes on until none is found.
        while unknown := [
            worker
            for worker in self.replica_peers
            if not self._num_chosen[worker] and worker not in self.alone and worker not in self._newcomers
        ]:
            for worker in unknown:
                self._newcomers.add(worker)
                self._wished[worker] = tuple(self.replica_peers[worker])
                for replica_peer in self._wished[worker]:
                    self._remove(worker, replica_peer)

    def _may_stay(self, worker: int, other: int) -> bool:
        replica_peers = self.replica_peers[worker]
        if worker == other or not self._fits(worker, other):
            return False
        if self.num_hosts > 1 or worker in self.alone:
            return len(replica_peers) < self._width
        return any(
            sum(index in self._groups_of[replica_peer] for replica_peer in replica_peers) < self._width
            for index in self._groups_of[worker]
            if index in self._groups_of[other]
        )

    def _fits(self, worker: int, other: int) -> bool:
        """Tells whether one may be a replica peer of another at all."""
        if self.num_hosts > 1:
            return self._hosts[worker] != self._hosts[other]
        return self._kin(worker, other) or all(self._num_members[index] == 1 for index in self._groups_of[worker])

    def _kin(self, worker: int, other: int) -> bool:
        return not set(self._groups_of[worker]).isdisjoint(self._groups_of[other])

    # -------------------------------------------------------------------------------------------------------- linking

    def _add(self, worker: int, replica_peer: int) -> None:
        self.replica_peers[worker][replica_peer] = None
        self._num_chosen[replica_peer] += 1
        if self.num_hosts > 1:
            here, there = self._hosts[worker], self._hosts[replica_peer]
            self._host_links.setdefault(here, {})[there] = None
            self._host_links.setdefault(there, {})[here] = None

    def _remove(self, worker: int, replica_peer: int) -> None:
        del self.replica_peers[worker][replica_peer]
        self._num_chosen[replica_peer] -= 1

    def _link(self, one: int, other: int) -> bool:
        """Makes two that need one each other's replica peers, if they may be.

        Returns:
            Whether they have become replica peers.
        """
        if not (self._need[one] > 0 and self._need[other] > 0) or one == other:
            return False
        if other in self.replica_peers[one] or one in self.replica_peers[other]:
            return False
        if self.num_hosts > 1 and self._hosts[one] == self._hosts[other]:
            return False
        self._join(one, other)
        self._need[one] -= 1
        self._need[other] -= 1
        return True

    def _join(self, one: int, other: int) -> None:
        self._add(one, other)
        self._add(other, one)
        self._breakable.add((min(one, other), max(one, other)))

    def fill(self, askers: Sequence[int], members: Sequence[int], *, last: bool) -> None:
        """Gives some workers the replica peers that they lack.

        Args:
            askers: those workers.
            members: among whom they find them.
            last: whether nobody else can be found later, so that others must give way.
        """
        if not askers or len(members) < 2:
            return
        needy = self._count_needs(askers, members)
        for worker in needy:
            # What newcomers have given up they take back where both sides still lack one.
            for replica_peer in self._wished.get(worker, ()):
                self._link(worker, replica_peer)
        for worker in needy:  # a replica peer of one side becomes one of both: no other pair becomes fatal
            for replica_peer in tuple(self.replica_peers[worker]):
                if self._need[replica_peer] > 0 and worker not in self.replica_peers[replica_peer]:
                    self._add(replica_peer, worker)
                    self._need[replica_peer] -= 1
        if self.num_hosts > 1:
            self._link_by_hosts(self._still(needy))
        self._link_in_circle(self._still(needy))
        if last:
            self._give_way(self._still(needy), sorted(members))
        for worker in needy:
            # The next call counts anew, among other members.
            self._need[worker] = 0

    def _count_needs(self, askers: Sequence[int], members: Sequence[int]) -> list[int]:
        """Notes how many replica peers each of the askers lacks among the members."""
        inside = frozenset(members)
        here: dict[str | int, int] = {}
        for worker in inside:
            here[self._hosts[worker]] = here.get(self._hosts[worker], 0) + 1
        needy = []
        for worker in sorted(set(askers)):
            if self.num_hosts > 1:
                others, has = len(inside) - here[self._hosts[worker]], len(self.replica_peers[worker])
            else:
                others, has = (
                    len(inside) - 1,
                    sum(replica_peer in inside for replica_peer in self.replica_peers[worker]),
                )
            lacking = min(self._width, others) - has
            if lacking > 0:
                self._need[worker] = lacking
                needy.append(worker)
        # Who lacks none may still become the other half of a replica peer that has chosen it, but asks for nothing.
        return needy

    def _still(self, workers: Iterable[int]) -> list[int]:
        return [worker for worker in workers if self._need[worker] > 0]

    def _link_in_circle(self, needy: list[int]) -> None:
        """Links the nearest of those that lack replica peers, in a ring."""
        if self.num_hosts > 1:
            # So that neighbours of the ring are on different hosts, as replica peers have to be.
            needy = list(_interleaved(self._by_host(needy).values()))
        found = True
        while found and len(needy) > 1:
            found = False
            for distance in range(1, min(len(needy) // 2, self._width + 1) + 1):
                for position, worker in enumerate(needy):
                    if self._need[worker] > 0 and self._link(worker, needy[(position + distance) % len(needy)]):
                        found = True
            needy = self._still(needy)

    # ---------------------------------------------------------------------------------------------------------- hosts

    def _by_host(self, workers: Iterable[int]) -> dict[str | int, list[int]]:
        """Groups workers by host, hosts in the order of their first workers."""
        found: dict[str | int, list[int]] = {}
        for worker in workers:
            found.setdefault(self._hosts[worker], []).append(worker)
        return found

    def _link_by_hosts(self, needy: Sequence[int]) -> None:
        """Links workers of hosts that are linked already, or are linked here, each host with as few as suffice."""
        by_host = self._by_host(needy)
        links = self._links_of_hosts(by_host)
        num_links: dict[str | int, int] = {}
        for one, other in links:
            num_links[one] = num_links.get(one, 0) + 1
            num_links[other] = num_links.get(other, 0) + 1
        for one, other in links:  # every worker takes some from each of its hosts' links ...
            self._link_across(
                by_host[one], by_host[other], (-(-self._width // num_links[one]), -(-self._width // num_links[other]))
            )
        for one, other in links:  # ... and then what is left
            self._link_across(by_host[one], by_host[other], (self._width, self._width))

    def _links_of_hosts(self, by_host: Mapping[str | int, Sequence[int]]) -> list[tuple[str | int, str | int]]:
        """Pairs of hosts across which workers find their replica peers: those that are linked, then the nearest."""
        names = list(by_host)
        position = {host: index for index, host in enumerate(names)}
        lacking = {host: max(self._need[worker] for worker in workers) for host, workers in by_host.items()}
        pairs: list[tuple[str | int, str | int]] = []

        def take(one: str | int, other: str | int) -> None:
            pairs.append((one, other))
            lacking[one] -= len(by_host[other])
            lacking[other] -= len(by_host[one])

        for host in names:
            for other in self._host_links.get(host, ()):
                if other in position and position[host] < position[other]:
                    take(host, other)
        taken = set(pairs)
        for distance in range(1, min(len(names) // 2, self._width) + 1):
            for index, one in enumerate(names):
                other = names[(index + distance) % len(names)]
                if lacking[one] > 0 and lacking[other] > 0 and not taken & {(one, other), (other, one)}:
                    taken.add((one, other))
                    take(one, other)
        return pairs

    def _link_across(self, ones: Sequence[int], others: Sequence[int], most: tuple[int, int]) -> None:
        """Links workers of two hosts, of each at most so many of the other host."""
        given = dict.fromkeys(chain(ones, others), 0)
        for shift in range(len(others)):
            found = False
            for index, one in enumerate(ones):
                other = others[(index + shift) % len(others)]
                if given[one] < most[0] and given[other] < most[1] and self._link(one, other):
                    given[one] += 1
                    given[other] += 1
                    found = True
            if not found and shift:
                return

    # -------------------------------------------------------------------------------------- who finds nobody that lacks

    def _give_way(self, needy: Sequence[int], members: Sequence[int]) -> None:
        """Finds replica peers for those whom no other lacks: others give way, or are chosen though they have enough."""
        place = {worker: index for index, worker in enumerate(members)}
        open_slots = [worker for worker in needy for _ in range(self._need[worker])]
        while open_slots:
            one = open_slots.pop(0)
            replica_peer = open_slots[0] if open_slots else None
            if replica_peer is not None and self._insert(one, replica_peer, members, place):
                open_slots.pop(0)
                self._need[one] -= 1
                self._need[replica_peer] -= 1
            else:
                if not (replica_peer is None and self._turn(one, members, place)):
                    self._choose(one, members, place)
                self._need[one] -= 1

    def _near(self, worker: int, members: Sequence[int], place: Mapping[int, int]) -> Iterator[int]:
        """Lists members near a worker: those it would keep, those on linked hosts, then the ring of all."""
        yield from (wished for wished in self._wished.get(worker, ()) if wished in place)
        start = place[worker]
        if self.num_hosts > 1:
            linked = self._host_links.get(self._hosts[worker], {})
            yield from (other for other in self._ring(start, members, _WINDOW) if self._hosts[other] in linked)
        yield from self._ring(start, members, len(members))

    @staticmethod
    def _ring(start: int, members: Sequence[int], most: int) -> Iterator[int]:
        for distance in range(1, min(len(members) // 2, most) + 1):
            before, after = (start - distance) % len(members), (start + distance) % len(members)
            yield members[before]
            if after != before:
                yield members[after]

    def _insert(self, one: int, other: int, members: Sequence[int], place: Mapping[int, int]) -> bool:
        """Breaks a pair (u, v) and makes (one, u) and (other, v) replica peers instead; the two may be the same
        worker."""
        for u in islice(self._near(one, members, place), _WINDOW):
            if not self._may_join(one, u):
                continue
            for v in self.replica_peers[u]:
                if v != one and v != other and u != other and self._may_break(u, v, (one, other)):
                    fits = self._may_join(other, v) and self._as_near(u, v, one) and self._as_near(v, u, other)
                    if fits:
                        self._unlink(u, v)
                        self._join(one, u)
                        self._join(other, v)
                        return True
        return False

    def _may_join(self, one: int, other: int) -> bool:
        mutual = self._fits(one, other) and self._fits(other, one)
        return mutual and one != other and other not in self.replica_peers[one] and one not in self.replica_peers[other]

    def _as_near(self, worker: int, replica_peer: int, instead: int) -> bool:
        """Tells whether a worker that loses a replica peer gets another of the same groups for it."""
        shared = set(self._groups_of[worker]).intersection(self._groups_of[replica_peer])
        return shared.issubset(self._groups_of[instead])

    def _may_break(self, u: int, v: int, newcomers: Collection[int]) -> bool:
        if u not in self.replica_peers[v]:
            return False
        # A pair that was made in this call has no copies yet; one of before is broken for newcomers alone.
        return (min(u, v), max(u, v)) in self._breakable or self._newcomers.issuperset(newcomers)

    def _unlink(self, u: int, v: int) -> None:
        self._remove(u, v)
        self._remove(v, u)
        self._breakable.discard((min(u, v), max(u, v)))

    def _turn(self, worker: int, members: Sequence[int], place: Mapping[int, int]) -> bool:
        """Takes one in between two new replica peers: v follows u, the worker v, and u the worker, so that each still
        has and is as many replica peers as before."""
        for u in islice(self._near(worker, members, place), _WINDOW):
            if not self._may_join(worker, u):
                continue
            for v in self.replica_peers[u]:
                new = (min(u, v), max(u, v)) in self._breakable and u in self.replica_peers[v]
                if new and v != worker and self._may_join(worker, v) and self._as_near(v, u, worker):
                    self._breakable.discard((min(u, v), max(u, v)))
                    self._remove(v, u)
                    self._add(v, worker)
                    self._add(worker, u)
                    return True
        return False

    def _choose(self, worker: int, members: Sequence[int], place: Mapping[int, int]) -> None:
        """Chooses one of those nearby that are replica peers of the fewest, though it has enough itself."""
        options = [
            other
            for other in islice(self._near(worker, members, place), _WINDOW)
            if other != worker and self._fits(worker, other) and other not in self.replica_peers[worker]
        ]
        if not options:  # on a crowded host
            options = [
                other for other in members if self._fits(worker, other) and other not in self.replica_peers[worker]
            ]
        wished = self._wished.get(worker, ())
        chosen = min(
            options,
            key=lambda other: (other not in wished, not self._kin(worker, other), self._num_chosen[other]),
        )
        self._add(worker, chosen)


def _interleaved(rows: Iterable[Sequence[int]]) -> Iterator[int]:
    """Lists the first of each row, then the second of each, and so on."""
    lists = list(rows)
    for index in range(max(map(len, lists), default=0)):
        yield from (row[index] for row in lists if index < len(row))
