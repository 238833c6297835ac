"""The agents of a job's hosts, as its coordinator sees them: what follows as they come and go. No IO, no clocks.

What is known of each host is in `elaswave.protocol.membership.hosts`. A job begins once as many hosts are there as it
was configured with; the local run is a job of one host, whose agent is the launcher. All times are of seconds in which
the coordinator was awake: nobody is away while it sleeps.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from elaswave.protocol.events import Suspected
from elaswave.protocol.membership import effects as asked
from elaswave.protocol.membership.hosts import GONE_AGAIN_S, GONE_S, Came, Host, Hosts, HostState, Turned

SILENT_S = 1.0
"""An agent of which nothing is heard for so long, while a worker of its host is held for lost, is lost with it: two
heartbeats are missing."""


class HostAgents:
    """The agents of one job.

    Args:
        hosts: what is known of each.
        records: of earlier coordinators, of all kinds.
        last_heartbeat_s: gives the seconds since something came from the agent of an incarnation; None: it is not
            connected.
        now_s: when this coordinator begins.
        wait_s: how long the hosts with which the job begins are waited for.
        is_local: whether this is a job of one machine, in which nobody else may take part.
    """

    def __init__(
        self,
        hosts: Hosts,
        records: Iterable[Any],
        last_heartbeat_s: Callable[[int], float | None],
        *,
        now_s: float,
        wait_s: float = math.inf,
        is_local: bool = True,
    ) -> None:
        self.hosts = hosts
        self._last_heartbeat_s = last_heartbeat_s
        self._began_s = now_s
        self._wait_s = wait_s
        self._is_local = is_local
        self._gone_s = GONE_S
        for record in records:
            if isinstance(record, asked.HostCame):
                came = Came(record.number, record.node, record.incarnation, record.slots, record.num_fruitless)
                hosts.restore(came, now_s)
                self._gone_s = GONE_AGAIN_S
            elif isinstance(record, asked.PlaceTaken):
                hosts.placed(record.worker, record.host)
        self.is_complete = hosts.is_complete
        """Whether all hosts have come with which the job begins."""

    # ----------------------------------------------------------------------------------------------- who comes and goes

    def came(self, node: str, incarnation: int, slots: int) -> tuple[list[asked.MembershipEffect], int]:
        """An agent is ready to start workers; said on every connection.

        Args:
            node: its machine.
            incarnation: drawn by every agent that starts there.
            slots: workers that may run there; 0: any number.
        Returns:
            What follows, and how many workers more there is room for since it has come. Whether it takes part says
            `takes_part`.
        """
        answer = self.hosts.hello(node, incarnation, slots)
        if isinstance(answer, Turned):
            return [asked.TurnAway(incarnation, answer.reason, answer.verdict)], 0
        effects: list[asked.MembershipEffect] = []
        is_new = isinstance(answer, Came)
        if isinstance(answer, Came):
            effects.append(asked.WriteDown(asked.HostCame(**answer._asdict())))
            answer = self.hosts.add(answer, 0.0)
        host = answer
        self.hosts.connected(host)
        if self.hosts.num_initial > 1 and is_new:
            here, needed = self.hosts.num_here, self.hosts.num_initial
            effects.append(
                asked.Say(f"host {host.node} has come" + ("" if self.is_complete else f": {here} of {needed}"))
            )
        if not self.is_complete:
            if self.hosts.is_complete:
                effects += self._begin()
            return effects, 0
        effects += self._first_of(host)
        return effects, host.slots if is_new and not self.hosts.first_workers(host) else 0

    def _begin(self) -> list[asked.MembershipEffect]:
        self.is_complete = True
        first = map(self.hosts.numbered, range(self.hosts.num_initial))
        return [effect for host in first for effect in self._first_of(host)]

    def _first_of(self, host: Host) -> list[asked.MembershipEffect]:
        workers = self.hosts.first_workers(host)
        is_here = host.state in (HostState.HERE, HostState.LEAVING)
        return [asked.StartFirst(host.incarnation, workers)] if workers and is_here else []

    def takes_part(self, incarnation: int) -> bool:
        """Tells whether an agent has come, and is not given up."""
        return self.hosts.find(incarnation) is not None

    def went(self, incarnation: int, now_s: float) -> None:
        """An agent's connection has ended."""
        self.hosts.disconnected(incarnation, now_s)

    def leaving(self, incarnation: int) -> list[int]:
        """An agent has had a notice; returns its workers."""
        host = self.hosts.find(incarnation)
        if host is None:
            return []
        self.hosts.leaving(incarnation)
        return sorted(host.workers)

    def tick(self, registered: Collection[int], now_s: float) -> list[asked.MembershipEffect]:
        """Gives up hosts whose agents have been away for too long; with them, and with those whose nodes have another
        agent now, go workers that have not come to this coordinator. Gives up a job whose hosts do not come.

        Args:
            registered: members that have come; they are lost when they fall silent.
            now_s: the time.
        """
        effects: list[asked.MembershipEffect] = []
        for host in self.hosts.overdue(now_s, self._gone_s):
            self.hosts.give_up(host)
            if not self._is_local:
                text = f"host {host.node} is gone: its agent has not been connected for {self._gone_s:.0f} s"
                effects.append(asked.Say(text))
        for worker in sorted(self.hosts.stranded.difference(registered)):
            effects.append(asked.WorkerGone(worker, "has ended with its host"))
        if not self.is_complete and now_s - self._began_s > self._wait_s:
            here, needed = self.hosts.num_here, self.hosts.num_initial
            reason = f"only {here} of {needed} hosts have come within {self._wait_s:g} s"
            effects.append(asked.GiveUpJob(f"{reason} (control.hosts_wait_s): start the others"))
        return effects

    # ----------------------------------------------------------------------------------------------- what they are told

    def start(self, worker: int) -> list[asked.MembershipEffect]:
        """Has a worker started that joins: by the agent to which its id was given, and by no other one."""
        host = self._host_of(worker)
        return [] if host is None else [asked.TellAgent(host.incarnation, asked.SpawnJoiner(worker=worker))]

    def end(self, worker: int) -> list[asked.MembershipEffect]:
        """Has a joiner's process killed."""
        host = self._host_of(worker)
        return [] if host is None else [asked.TellAgent(host.incarnation, asked.EndJoiner(worker=worker))]

    def _host_of(self, worker: int) -> Host | None:
        """Finds the host of a worker, if the others do not go on without it."""
        host = self.hosts.of(worker)
        return None if host is None or host.state is HostState.GONE else host

    # ------------------------------------------------------------------------------------------------------- hosts lost

    def with_their_hosts(self, suspicions: Sequence[Suspected], members: Collection[int]) -> list[Suspected]:
        """Suspicions, and those of all others that are lost with the same hosts: they are one event (H11).

        Args:
            suspicions: of single workers.
            members: of the job.
        """
        known = {suspicion.worker for suspicion in suspicions}
        others = [
            Suspected(
                worker, "host", f"host {node} is lost: nothing is heard of its agent, and worker {worker} is there"
            )
            for node, workers in self.hosts.lost_with(known, self._is_silent).items()
            for worker in sorted(workers - known)
            if worker in members
        ]
        return [*suspicions, *others]

    def _is_silent(self, incarnation: int) -> bool:
        """Tells whether an agent is silent whose connection may stand."""
        last_heartbeat_s = self._last_heartbeat_s(incarnation)
        return last_heartbeat_s is None or last_heartbeat_s > SILENT_S

    def hang_up_on_lost(self, suspicions: Iterable[Suspected]) -> list[asked.MembershipEffect]:
        """Ends the connections of agents that are lost with their hosts, which the kernel would keep for many minutes.
        Until its agent has connected again no worker is started there, and without it the host is given up."""
        hosts = [self.hosts.of(each.worker) for each in suspicions if each.detected_by == "host"]
        return [
            asked.HangUp(incarnation)
            for incarnation in sorted({host.incarnation for host in hosts if host is not None})
        ]

    def can_look(self, worker: int) -> bool:
        """Tells whether a worker's agent can be expected to say how its process gets on. That of this host waits for
        the same processors: its silence tells nothing."""
        host = self.hosts.of(worker)
        if host is None:
            return False
        last_heartbeat_s = self._last_heartbeat_s(host.incarnation)
        return last_heartbeat_s is not None and (host.incarnation == self.hosts.home or last_heartbeat_s <= SILENT_S)

    def looked_at(self, workers: Iterable[int]) -> list[Host]:
        """Lists the hosts of some workers whose connections tell whether they are cut off: not this coordinator's own,
        since its kernel is this one."""
        hosts = {host.incarnation: host for host in map(self.hosts.of, workers) if host is not None}
        hosts.pop(self.hosts.home, None)
        return [host for host in hosts.values() if host.state is not HostState.GONE]
