"""Hosts of a job as they come and go: which agent starts which worker, and who is lost with a host. No IO, no clocks.

An agent is (node, incarnation): the node has a name, and every agent that starts there draws a new incarnation. Hosts
are numbered as they come. The first workers are dealt out beforehand (`elaswave.blocks.domains`), so that what is
planned with them does not depend on who comes first; a worker that joins is started where there is room. An id that was
given to an incarnation is never given to another one: what an agent may have forked dies with it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import Literal, NamedTuple

GONE_S = 5.0
"""An agent that has not been connected for this long is gone, with all workers that are no members."""
GONE_AGAIN_S = 30.0
"""The same for a coordinator that takes over: agents have to find it first."""


FRUITLESS_MAX = 3
"""So many agents of a node in a row, none of whose workers had a part in a committed step, and the next one is turned
away for good: what ended them would end it too, and a launcher that starts it again would do so for ever."""


class HostState(Enum):
    """What is known of a host's agent."""

    EXPECTED = "its agent has not found this coordinator yet"
    HERE = "its agent is connected"
    LEAVING = "its agent has had a notice: it takes no worker any more"
    AWAY = "its agent's connection has ended"
    GONE = "the others go on without it: its incarnation never counts again"


_GIVES_WAY = (HostState.GONE, HostState.LEAVING, HostState.AWAY, HostState.EXPECTED, HostState.HERE)
"""In which order the numbers of first hosts are given to others before the job begins."""


class Host:
    """One host, as long as its agent lives."""

    def __init__(self, came: "Came", label: str, away_since_s: float) -> None:
        self.number, self.node, self.incarnation, self.slots, self.num_fruitless = came
        self.label = label
        """Its failure domain, see `elaswave.blocks.domains`."""
        self.state = HostState.EXPECTED
        self.away_since_s = away_since_s
        self.workers: set[int] = set()
        """Those that its agent was asked to start and that have not ended."""
        self.is_fruitless = False
        """Whether it was asked to start workers, and none of them has had a part in a committed step."""
        self.is_proven = False
        """Whether one of them has."""
        self.had_notice = False

    @property
    def room(self) -> float:
        """So many workers more may be started there."""
        if self.state is not HostState.HERE:
            return 0
        return math.inf if not self.slots else max(0, self.slots - len(self.workers))


class Came(NamedTuple):
    """A host has come: to be made durable before anything is started there."""

    number: int
    node: str
    incarnation: int
    slots: int
    """Workers that may run there; 0: as many as are asked for."""
    num_fruitless: int = 0
    """Agents of this node before it, in a row, that were fruitless."""


class Turned(NamedTuple):
    """An agent may not take part."""

    reason: str
    verdict: Literal["misused", "needless", "again"]
    """A person's mistake; the node has another one; or it is too late for this one, and a later one may."""


class Hosts:
    """The hosts of one job.

    Args:
        founders: number of the host of each first worker.
        labels: failure domains of the hosts with which the job begins, by number; none: it begins with one host.
        home: incarnation of the agent of the coordinator's own host. It is never held for lost, whatever is heard of
            it: if it were, so would be the coordinator.
    """

    def __init__(self, founders: Sequence[int] = (), labels: Sequence[str] = (), *, home: int) -> None:
        self._first_workers: dict[int, tuple[int, ...]] = {}
        """Number of a host -> workers with which the job begins there."""
        for worker, number in enumerate(founders):
            self._first_workers[number] = (*self._first_workers.get(number, ()), worker)
        self._labels = tuple(labels)
        self.home = home
        self.num_initial = 1 + max(founders, default=0)
        self._hosts: dict[int, Host] = {}
        # All that is asked when an agent comes is kept, and not searched for: ten thousand come at once.
        self._incarnations: dict[int, Host] = {}
        self._named: defaultdict[str, list[int]] = defaultdict(list)
        """Name -> the numbers of first hosts that bear it, ascending."""
        for number, label in enumerate(self._labels[: self.num_initial]):
            self._named[label.rpartition("/")[2]].append(number)
        self._free = list(range(self.num_initial))
        """A heap with all numbers of first hosts that nobody has, and others."""
        self._present: set[int] = set()
        """Numbers of first hosts that are not gone."""
        self._here: set[int] = set()
        """Numbers of first hosts that are `HostState.HERE`."""
        self._num_here = 0
        """Hosts with a connected agent."""
        self._gone: dict[int, Host] = {}
        """By incarnation, those that never count again."""
        self._host_of: dict[int, Host] = {}
        """Worker -> its host: another one that has the number later has not its workers (H2)."""
        self._label_of: dict[str, str] = {}
        """Of every node that there ever was."""
        self._newest: dict[str, Host] = {}
        """The last host of every node."""
        self._unproven: set[Host] = set()
        """Those that are fruitless so far."""
        self._was_complete = False

    # --------------------------------------------------------------------------------------------------- what happens

    def restore(self, came: Came, now_s: float) -> Host:
        """A host came to an earlier coordinator. Who was there at a time is not known: the job may have begun."""
        host = self.add(came, now_s)
        self._was_complete = self._was_complete or len(self._present) == self.num_initial
        return host

    def add(self, came: Came, now_s: float) -> Host:
        """A host comes. An earlier one of this number, or node, is gone."""
        # First, since it takes a number out of `_present`, where the new host stands from then on.
        for other in (self._hosts.get(came.number), self._newest.get(came.node)):
            if other is not None and other.incarnation != came.incarnation:
                self.give_up(other)
        host = Host(came, self._label(came), now_s)
        self._incarnations[came.incarnation] = host
        if came.number < self.num_initial:
            self._present.add(came.number)
        self._label_of[came.node] = host.label
        self._newest[came.node] = host
        self._hosts[came.number] = host
        for worker in self.first_workers(host):
            self.placed(worker, came.number)
        return host

    def placed(self, worker: int, number: int) -> None:
        """A worker is to be started on a host."""
        if number in self._hosts:
            host = self._host_of[worker] = self._hosts[number]
            if not host.is_proven:
                host.is_fruitless = True
                self._unproven.add(host)
            host.workers.add(worker)

    def committed(self, members: Collection[int]) -> None:
        """A step has been committed by these members."""
        # Each step calls this: only hosts that are still to be proven are looked at.
        for host in [host for host in self._unproven if not host.workers.isdisjoint(members)]:
            host.is_fruitless, host.is_proven = False, True
            self._unproven.discard(host)

    def ended(self, worker: int) -> None:
        """A worker's process has ended; may be said again."""
        host = self.of(worker)
        if host is not None:
            host.workers.discard(worker)

    def hello(self, node: str, incarnation: int, slots: int) -> Host | Came | Turned:
        """An agent says who it is.

        Returns:
            The host, if it is known already; what is to be made durable and given to `add`, if it is new; or why it
            may not take part.
        """
        if incarnation in self._gone:
            return Turned("the job has gone on without this host, whose workers were lost", "again")
        known = self.find(incarnation)
        if known is not None:
            return known
        other = self._newest.get(node)  # those before it are gone
        if other is not None and self._must_be_here(other):
            return Turned(f"node {node} has an agent of this job already", "needless")
        num_fruitless = self._num_fruitless(node)
        if num_fruitless >= FRUITLESS_MAX:
            return Turned(
                f"{num_fruitless} agents of node {node} have ended before any of their workers had a part in a "
                "committed step: see what they have said; once the node is mended, give its agent another --node-name",
                "misused",
            )
        number, share = self._free_number(node), 0
        holder = self._hosts.get(number)
        # `_free_number` comes to such a host only if there is no other: nobody can stand for the coordinator's own.
        if holder is not None and self._must_be_here(holder) and holder.state is not HostState.LEAVING:
            return Turned("the job waits only for the coordinator's own host to begin: start this one again", "again")
        if not self.is_complete:
            share = len(self._first_workers.get(number, ()))
            if slots and slots < share:
                text = f"node {node} takes {slots} workers, but the job begins with {share} on each of its hosts"
                return Turned(f"{text}: raise --workers there, or the number of hosts", "misused")
        return Came(number, node, incarnation, slots or 0, num_fruitless)

    def connected(self, host: Host) -> None:
        """Its agent is connected. The job begins once the agents of all first hosts are: those that have gone, or had a
        notice, would begin with losses."""
        if host.state in (HostState.EXPECTED, HostState.AWAY):
            self._enter(host, HostState.HERE)
        self._was_complete = self._was_complete or len(self._here) == self.num_initial

    def disconnected(self, incarnation: int, now_s: float) -> None:
        """An agent's connection has ended."""
        host = self.find(incarnation)
        if host is not None:
            self._enter(host, HostState.AWAY)
            host.away_since_s = now_s

    def leaving(self, incarnation: int) -> None:
        """An agent has had a notice."""
        host = self.find(incarnation)
        if host is not None:
            self._enter(host, HostState.LEAVING)
            host.had_notice = True

    def give_up(self, host: Host) -> None:
        """The others go on without a host."""
        if host.state is not HostState.GONE:
            self._enter(host, HostState.GONE)
        self._gone[host.incarnation] = host

    def _enter(self, host: Host, state: HostState) -> None:
        """What is known of a host has changed."""
        connected = (HostState.HERE, HostState.LEAVING)
        self._num_here += (state in connected) - (host.state in connected)
        host.state = state
        if host.number < self.num_initial:
            (self._here.add if state is HostState.HERE else self._here.discard)(host.number)
            if state is HostState.GONE:
                self._present.discard(host.number)
                # Who takes the number by its name leaves it in the heap: `_free_number` drops it when it is on top.
                heappush(self._free, host.number)

    def overdue(self, now_s: float, bound_s: float) -> list[Host]:
        """Lists the hosts whose agents have been away for too long: they are to be given up. The host of the
        coordinator is never among them: its agent is slow to connect again, as on a machine without a free processor,
        or the coordinator ends with it."""
        return [
            host
            for host in self._hosts.values()
            if host.state in (HostState.EXPECTED, HostState.AWAY)
            and host.incarnation != self.home
            and now_s - host.away_since_s > bound_s
        ]

    # --------------------------------------------------------------------------------------------------- what is known

    @property
    def is_complete(self) -> bool:
        """Whether as many hosts have been there at a time as the job begins with."""
        return self._was_complete

    @property
    def num_here(self) -> int:
        """Hosts with a connected agent."""
        return self._num_here

    def find(self, incarnation: int) -> Host | None:
        """Finds the host of an agent that counts."""
        host = self._incarnations.get(incarnation)
        return None if host is None or host.state is HostState.GONE else host

    @property
    def incarnations(self) -> list[int]:
        """Of all agents that have come and are not given up."""
        return [each for each, host in self._incarnations.items() if host.state is not HostState.GONE]

    @property
    def stranded(self) -> set[int]:
        """Workers whose hosts the others go on without, and that nobody has said to have ended: nobody will."""
        return {worker for host in self._gone.values() for worker in host.workers if self._host_of.get(worker) is host}

    def of(self, worker: int) -> Host | None:
        """Finds the host of a worker that was placed."""
        return self._host_of.get(worker)

    def label_of(self, worker: int) -> str:
        """Returns the failure domain of a worker that was placed; empty if there is only one host."""
        host = self.of(worker)
        return "" if host is None else host.label

    def numbered(self, number: int) -> Host:
        """Returns the host with a number."""
        return self._hosts[number]

    def first_workers(self, host: Host) -> tuple[int, ...]:
        """Lists the workers with which the job begins there."""
        return self._first_workers.get(host.number, ())

    @property
    def room(self) -> float:
        """So many workers more may be started; infinite where a host takes any number."""
        return sum(host.room for host in self._hosts.values())

    def choose(self) -> Host | None:
        """Chooses where the next worker that joins is started: where most room is."""
        return max(
            (host for host in self._hosts.values() if host.room),
            key=lambda host: (host.room, -host.number),
            default=None,
        )

    def lost_with(self, suspected: Iterable[int], is_silent: Callable[[int], bool]) -> dict[str, set[int]]:
        """Finds who is lost together with workers that are suspected (H11): all workers of a host whose agent has gone
        too.

        Args:
            suspected: workers that have ended, or whose links have.
            is_silent: whether nothing is heard of an incarnation, though its connection may stand.
        Returns:
            By the host's node: its workers.
        """
        found: dict[str, set[int]] = {}
        for worker in suspected:
            host = self.of(worker)
            # A coordinator that takes over has not heard of an expected agent yet, which says nothing about its host.
            if host is None or host.incarnation == self.home or host.state in (HostState.EXPECTED, HostState.GONE):
                continue
            if host.state is HostState.AWAY or is_silent(host.incarnation):
                found.setdefault(host.node, set()).update(host.workers)
        return found

    def _num_fruitless(self, node: str) -> int:
        """Computes `num_fruitless` of the next agent of a node. One that had a notice has ended for another reason, and
        proves nothing."""
        last = self._newest.get(node)
        if last is None or not (last.is_fruitless or last.had_notice):
            return 0
        return last.num_fruitless + (last.is_fruitless and not last.had_notice)

    def _must_be_here(self, host: Host) -> bool:
        """Tells whether a host's agent is connected, or is about to be: it lives as long as this coordinator."""
        is_home = host.incarnation == self.home and host.state is not HostState.GONE
        return is_home or host.state in (HostState.HERE, HostState.LEAVING)

    def _free_number(self, node: str) -> int:
        """Chooses the number of the next host: one of those with which the job begins, while one of them is missing;
        that with the node's name before others. Before the job begins, who has not waited for it gives way to who
        comes."""
        if self.is_complete:
            # A number of the beginning brings the workers that the job begins with: none is given again.
            return 1 + max(self._hosts, default=-1)
        # Numbers that somebody has taken by name, or with its node, since they were put there.
        while self._free and not self._is_free(self._free[0]):
            heappop(self._free)
        last = self._newest.get(node)
        own = [] if last is None or last.number >= self.num_initial else [last.number]
        named = self._named.get(node, [])
        free = [number for number in (*named, *own, *self._free[:1]) if self._is_free(number, node)]
        if free:
            return min(free, key=lambda number: (number not in named, number))

        def order(number: int) -> tuple[int, bool]:
            host = self._hosts[number]
            if self._must_be_here(host) and host.state is not HostState.LEAVING:
                return len(_GIVES_WAY), number not in named
            return _GIVES_WAY.index(host.state), number not in named

        return min(range(self.num_initial), key=order)

    def _is_free(self, number: int, node: str = "") -> bool:
        """Tells whether nobody has the number of a first host, but perhaps an earlier agent of a node."""
        host = self._hosts.get(number)
        return host is None or host.state is HostState.GONE or host.node == node

    def _label(self, came: Came) -> str:
        """A node keeps the label that it had; a new one beyond those that the job began with gets one by its number."""
        if came.number < self.num_initial:
            return self._labels[came.number] if self._labels else ""
        return self._label_of.get(came.node, f"host-{came.number}")
