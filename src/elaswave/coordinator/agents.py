"""The agents of a job, as its coordinator's process sees them: who is told what, what follows when hosts come and go.

What follows from what is `elaswave.protocol.membership.hosts`'. A job begins once as many hosts are there as it was
configured with; the local run is a job of one host, whose agent is the launcher.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from elaswave.channel.messages.agent import (
    AgentHello,
    AgentRefused,
    AskJob,
    CheckpointCommitted,
    CpuTimes,
    EndJoiner,
    Exited,
    FromAgent,
    JobSpec,
    LogPart,
    SpawnFirst,
    SpawnJoiner,
    TermTaken,
    ToAgent,
    Verdict,
)
from elaswave.channel.wire import FIRST_AGENT, agent_id
from elaswave.job.plan import StartingPoint
from elaswave.protocol.events import Suspected
from elaswave.protocol.membership.hosts import GONE_AGAIN_S, GONE_S, Came, Host, Hosts, HostState, Turned
from elaswave.store.journal import HostCame, JournalRecord, PlaceTaken

SILENT_S = 1.0
"""An agent of which nothing is heard for so long, while a worker of its host is held for lost, is lost with it: two
heartbeats are missing."""

_log = logging.getLogger("elaswave.coordinator")


def _workers_in(message: FromAgent) -> Sequence[int]:
    """The workers that a message of an agent tells of."""
    match message:
        case Exited() | LogPart():
            return (message.worker,)
        case CpuTimes():
            return (*message.cpu_s, *message.waited_s)
    return ()


class Agents:
    """The agents of one job.

    Args:
        hosts: the machine.
        spec: what agents are told that want to take part; None: no others may.
        checkpoint: where the first workers begin; None: at the seed.
        records: of earlier coordinators.
        persist: writes one more.
        send: sends a message to a peer; returns whether it is connected.
        heard_s: gives the seconds since something came from a peer; None: it is not connected. As all times in here, of
            those in which the coordinator was awake.
        hang_up: ends a peer's connection.
        say: tells people.
        keys: gives what those who want to take part are told to go by, see `AskedKeys.told`.
        founded: called once all hosts are there with which the job begins.
        ended: called with workers whose host is gone, and that nobody else will say to have ended.
        room: called when there is room for more workers.
        now_s: when this coordinator begins.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        spec: JobSpec | None,
        checkpoint: StartingPoint | None,
        records: Iterable[JournalRecord],
        persist: Callable[[HostCame], None],
        send: Callable[[int, ToAgent], bool],
        heard_s: Callable[[int], float | None],
        hang_up: Callable[[int], None],
        say: Callable[[str], None],
        keys: Callable[[], tuple[bytes, ...]] = tuple,
        founded: Callable[[], None],
        ended: Callable[[int], object],
        room: Callable[[int], None],
        now_s: float,
    ) -> None:
        self._hosts = hosts
        self._spec = spec
        self._checkpoint = checkpoint
        self._persist = persist
        self._send = send
        self._heard_s = heard_s
        self._hang_up = hang_up
        self._say = say
        self._keys = keys
        self._founded = founded
        self._ended = ended
        self._room = room
        self._gone_s = GONE_S
        for record in records:
            if isinstance(record, HostCame):
                came = Came(record.number, record.node, record.incarnation, record.slots, record.num_fruitless)
                hosts.restore(came, now_s)
                self._gone_s = GONE_AGAIN_S
            elif isinstance(record, PlaceTaken):
                hosts.placed(record.worker, record.host)
        self._was_founded = hosts.is_founded

    # -------------------------------------------------------------------------------------------------- what agents say

    def asked(self, peer: int, message: AskJob) -> None:
        """An agent wants to know what is trained."""
        spec = self._spec
        if spec is None:
            self._refuse(peer, "this is a job of one machine, in which no other may take part", "misused")
        elif message.job != spec.job:
            text = f"the coordinator there is of job {spec.job}, and not of {message.job}: give another --coordinator"
            self._refuse(peer, text, "misused")
        elif message.config_digest and message.config_digest != spec.config_digest:
            text = (
                f"node {message.node} was given another configuration than the job that {spec.host} has founded "
                f"(digest {message.config_digest}, and there {spec.config_digest}): leave --config and --set out there"
            )
            self._refuse(peer, text, "misused")
        else:
            answer = self._hosts.hello(message.node, message.incarnation, 0)
            if isinstance(answer, Turned):
                self._turn_away(peer, answer)
            else:
                keys = self._keys()
                self._send(peer, msgspec.structs.replace(spec, keys=keys) if keys else spec)

    def came(self, peer: int, message: AgentHello) -> bool:
        """An agent is ready to start workers; said on every connection.

        Returns:
            Whether it takes part.
        """
        answer = self._hosts.hello(message.node, message.incarnation, message.slots)
        if isinstance(answer, Turned):
            self._turn_away(peer, answer)
            return False
        is_new = isinstance(answer, Came)
        if isinstance(answer, Came):
            self._persist(HostCame(**answer._asdict()))
            answer = self._hosts.add(answer, 0.0)
        host = answer
        self._hosts.connected(host)
        if self._hosts.num_founding > 1 and is_new:
            here, needed = self._hosts.num_here, self._hosts.num_founding
            self._say(f"host {host.node} has come" + ("" if self._was_founded else f": {here} of {needed}"))
        if self._hosts.is_founded and not self._was_founded:
            self._was_founded = True
            for number in range(self._hosts.num_founding):
                self._spawn_first(self._hosts.numbered(number))
            self._founded()
        elif self._was_founded:
            self._spawn_first(host)
            if is_new and not self._hosts.first_workers(host) and host.slots:
                self._room(host.slots)
        return True

    def may_say(self, peer: int, message: FromAgent) -> str:
        """Why what an agent says is a lie; "" if it is none.

        Every holder of the key can connect as any agent, so this is no proof of who it is. But an agent has no news of
        the workers of other hosts, a checkpoint is committed by the agent of this host, and who has not said that it
        has come says nothing yet. What is a lie is never acted upon.

        Args:
            peer: which agent its connection is of.
            message: what it says.
        """
        match message:
            case AskJob() | AgentHello():
                if agent_id(message.incarnation) != peer:
                    return f"it is that of agent {message.incarnation}"
            case TermTaken():  # the answer of a coordinator's candidate, also to one that its agent has not come to
                return ""
            case _ if self._hosts.find(peer - FIRST_AGENT) is None:
                return "it has not come"
            case CheckpointCommitted() if peer != self.home:
                return "the agent of the coordinator's host commits checkpoints"
        strangers = [worker for worker in _workers_in(message) if not self._is_of(peer, worker)]
        return f"worker {strangers[0]} is not of its host" if strangers else ""

    def _is_of(self, peer: int, worker: int) -> bool:
        """Whether a worker was placed on an agent's host."""
        host = self._hosts.of(worker)
        return host is not None and agent_id(host.incarnation) == peer

    def went(self, peer: int, now_s: float) -> None:
        """An agent's connection has ended."""
        self._hosts.disconnected(peer - FIRST_AGENT, now_s)

    def leaving(self, peer: int) -> list[int]:
        """An agent has had a notice; returns its workers."""
        host = self._hosts.find(peer - FIRST_AGENT)
        if host is None:
            return []
        self._hosts.leaving(host.incarnation)
        return sorted(host.workers)

    def _turn_away(self, peer: int, turned: Turned) -> None:
        self._refuse(peer, turned.reason, turned.verdict)

    def _refuse(self, peer: int, reason: str, verdict: Verdict) -> None:
        _log.warning("agent %d does not take part: %s", peer - FIRST_AGENT, reason)
        self._send(peer, AgentRefused(reason=reason, verdict=verdict))

    # ----------------------------------------------------------------------------------------------- what they are told

    def _spawn_first(self, host: Host) -> None:
        workers = self._hosts.first_workers(host)
        if workers and host.state in (HostState.HERE, HostState.LEAVING):
            self._send(agent_id(host.incarnation), SpawnFirst(workers=workers, checkpoint=self._checkpoint))

    def spawn(self, worker: int) -> None:
        """Has a worker started that joins: by the agent to which its id was given, and by no other one."""
        self._tell_host_of(worker, SpawnJoiner(worker=worker))

    def end(self, worker: int) -> None:
        """Has a joiner's process killed."""
        self._tell_host_of(worker, EndJoiner(worker=worker))

    def _tell_host_of(self, worker: int, message: ToAgent) -> None:
        host = self._hosts.of(worker)
        if host is not None and host.state is not HostState.GONE:
            self._send(agent_id(host.incarnation), message)

    @property
    def home(self) -> int:
        """The agent of this coordinator's host, on control connections."""
        return agent_id(self._hosts.home)

    @property
    def present(self) -> list[int]:
        """All that take part, as control connections name them, also while they are not connected; that of this host in
        any case."""
        return sorted({self.home, *map(agent_id, self._hosts.incarnations)})

    @property
    def is_founded(self) -> bool:
        """Whether all hosts have come with which the job begins."""
        return self._was_founded

    def node_of(self, worker: int) -> str:
        """The name of a worker's host; empty in a job of one."""
        host = self._hosts.of(worker)
        return "" if host is None or self._spec is None else host.node

    # ------------------------------------------------------------------------------------------------------- hosts lost

    def with_their_hosts(self, suspicions: Sequence[Suspected], members: Iterable[int]) -> list[Suspected]:
        """Suspicions, and those of all others that are lost with the same hosts: they are one event.

        Args:
            suspicions: of single workers.
            members: of the job.
        """
        known = {suspicion.worker for suspicion in suspicions}
        found = self._hosts.lost_with(known, self._is_silent)
        others = [
            Suspected(
                worker, "host", f"host {node} is lost: nothing is heard of its agent, and worker {worker} is there"
            )
            for node, workers in found.items()
            for worker in sorted(workers - known)
            if worker in set(members)
        ]
        return [*suspicions, *others]

    def hang_up_on_lost(self, suspicions: Iterable[Suspected]) -> None:
        """Ends the connections of agents that are lost with their hosts, which the kernel would keep for many minutes.
        Until its agent has connected again no worker is started there, and without it the host is given up."""
        hosts = [self._hosts.of(each.worker) for each in suspicions if each.detected_by == "host"]
        for incarnation in {host.incarnation for host in hosts if host is not None}:
            self._hang_up(agent_id(incarnation))

    def can_look(self, worker: int) -> bool:
        """Whether a worker's agent can be expected to say how its process gets on. That of this host waits for the same
        processors: its silence tells nothing."""
        host = self._hosts.of(worker)
        if host is None:
            return False
        heard_s = self._heard_s(agent_id(host.incarnation))
        return heard_s is not None and (host.incarnation == self._hosts.home or heard_s <= SILENT_S)

    def peers_beside(self, workers: Iterable[int]) -> list[int]:
        """All that have connections from the hosts of some workers, as control connections name them; of this
        coordinator's own host nobody, since its kernel is this one."""
        hosts = {host.incarnation: host for host in map(self._hosts.of, workers) if host is not None}
        hosts.pop(self._hosts.home, None)
        return [
            peer
            for incarnation, host in hosts.items()
            if host.state is not HostState.GONE
            for peer in (agent_id(incarnation), *sorted(host.workers))
        ]

    def _is_silent(self, incarnation: int) -> bool:
        """Of an agent whose connection may stand."""
        heard_s = self._heard_s(agent_id(incarnation))
        return heard_s is None or heard_s > SILENT_S

    def tick(self, registered: Iterable[int], now_s: float) -> None:
        """Gives up hosts whose agents have been away for too long; with them, and with those whose nodes have another
        agent now, go workers that have not come to this coordinator.

        Args:
            registered: members that have; they are lost when they fall silent.
            now_s: the time.
        """
        for host in self._hosts.overdue(now_s, self._gone_s):
            self._hosts.give_up(host)
            _log.warning("host %s is given up: its agent has been away", host.node)
            if self._spec is not None:
                self._say(f"host {host.node} is gone: its agent has not been connected for {self._gone_s:.0f} s")
        for worker in sorted(self._hosts.stranded.difference(registered)):
            self._ended(worker)
