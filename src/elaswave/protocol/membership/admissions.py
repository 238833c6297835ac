"""Who is to become a member, and who is to leave, before the next epoch says so. No IO.

A joiner becomes a member once every member has a link to it and it has one to every member; a worker that is asked to
leave is let go once it runs and holds nothing. Both happen at a voted boundary between two steps, at which all members
pause (docs/protocol.md, rules J).
"""

from collections.abc import Collection, Mapping

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import Dial
from elaswave.types import Layout


class Admissions:
    """What a coordinator knows of them. Nothing of it is durable but `leaving`: members, joiners and the agent say the
    rest again to every successor."""

    def __init__(self) -> None:
        self.joiners: dict[int, str] = {}
        """Those that may come in, in the order in which they came -> where their data plane listens."""
        self.domains: dict[int, str] = {}
        """Where joiners run, see `elaswave.blocks.domains`."""
        self.leaving: set[int] = set()
        """Members that are asked to leave."""
        self.paused: dict[int, int] = {}
        """Members that wait, in the present epoch -> the step after which they do."""
        self.go_on_after = 0
        """The newest step after which a member was let go on: who has paused after it, or before, is to go on too."""
        self.is_asked = False
        """Whether the members were asked to pause, in the present epoch."""
        self._linked: dict[int, frozenset[int]] = {}
        """Worker -> those of the wanted peers to which it has links."""

    def new_epoch(self) -> None:
        """What was said of the last epoch is void; links to joiners outlive it."""
        self.paused.clear()
        self.is_asked = False
        self.go_on_after = 0

    def came(self, worker: int, address: str, domain: str) -> None:
        """A joiner may come in; may be said again."""
        self.joiners[worker] = address
        self.domains[worker] = domain

    def gone(self, worker: int) -> bool:
        """A joiner has ended, or has not become a member in time; returns whether there was one."""
        self._linked.pop(worker, None)
        self.domains.pop(worker, None)
        return self.joiners.pop(worker, None) is not None

    def linked(self, worker: int, peers: Collection[int]) -> None:
        """A worker says to which of the peers that it is to be linked to it has links."""
        self._linked[worker] = frozenset(peers)

    def go_on(self, step: int) -> list[int]:
        """A member has been let go on after a step; returns those that have paused after it, or before: they wait for
        nothing any more."""
        self.go_on_after = max(self.go_on_after, step)
        waiting = [worker for worker, after in self.paused.items() if after <= self.go_on_after]
        for worker in waiting:
            del self.paused[worker]
        return waiting

    def ready(self, members: Collection[int]) -> tuple[int, ...]:
        """The joiners whose links stand, from both sides, and between each other."""
        found: list[int] = []
        for joiner in self.joiners:
            peers = {*members, *found}
            theirs = self._linked.get(joiner, frozenset())
            if peers <= theirs and all(joiner in self._linked.get(peer, ()) for peer in peers):
                found.append(joiner)
        return tuple(found)

    def released(self, members: Collection[int], layout: Layout, placement: Placement) -> tuple[int, ...]:
        """The leaving members that can be let go now, while others stay: those that run and hold nothing.

        Args:
            members: of the epoch.
            layout, placement: in force.
        """
        candidates = self.leaving.intersection(members, layout.idle)
        going = [worker for worker in sorted(candidates) if not placement.holds(worker)]
        return tuple(going) if len(going) < len(members) else ()

    def calls(
        self, addresses: Mapping[int, str], members: Collection[int], term: int, epoch: int
    ) -> list[tuple[int, Dial]]:
        """(worker, what it is told): members are to make links to all joiners, joiners to all members and joiners.

        Args:
            addresses: of those members that have told theirs; joiners are told nothing before all have.
            members, term, epoch: of the coordinator.
        """
        everybody = {**addresses, **self.joiners}
        calls = [(worker, Dial(term=term, epoch=epoch, addresses=self.joiners)) for worker in addresses]
        for joiner in self.joiners if addresses.keys() >= set(members) else ():
            others = {peer: address for peer, address in everybody.items() if peer != joiner}
            calls.append((joiner, Dial(term=term, epoch=epoch, addresses=others)))
        return calls
