"""The agents of a job on control connections: what each may say, and how it is told.

What follows when hosts come and go is `elaswave.protocol.membership.agents`'.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from elaswave.channel.messages import agent as messages
from elaswave.channel.wire import FIRST_AGENT, agent_id
from elaswave.job.plan import StartingPoint
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.effects import AgentEffect, HangUp, StartFirst, TellAgent, TurnAway
from elaswave.protocol.membership.hosts import Turned

_log = logging.getLogger("elaswave.coordinator")


def incarnation_of(peer: int) -> int:
    """Returns the incarnation of an agent, by its id on control connections."""
    return peer - FIRST_AGENT


def _workers_in(message: messages.FromAgent) -> Sequence[int]:
    """Lists the workers that a message of an agent tells of."""
    match message:
        case messages.Exited() | messages.LogPart():
            return (message.worker,)
        case messages.CpuTimes():
            return (*message.cpu_s, *message.waited_s)
    return ()


class Agents:
    """The agents of one job.

    Args:
        known: the machine.
        send: sends a message to a peer; returns whether it is connected.
        hang_up: ends a peer's connection.
        spec: what agents are told that want to take part; None: no others may.
        checkpoint: where the first workers begin; None: at the seed.
    """

    def __init__(
        self,
        known: HostAgents,
        send: Callable[[int, messages.ToAgent], bool],
        hang_up: Callable[[int], None],
        *,
        spec: messages.JobSpec | None,
        checkpoint: StartingPoint | None,
    ) -> None:
        self._known = known
        self._hosts = known.hosts
        self._send = send
        self._hang_up = hang_up
        self._spec = spec
        self._checkpoint = checkpoint

    def asked(self, peer: int, message: messages.AskJob, keys: tuple[bytes, ...]) -> None:
        """An agent wants to know what is trained.

        Args:
            peer: the agent.
            message: its question.
            keys: what those who want to take part are told to go by, see `KeyCommands.told`.
        """
        spec = self._spec
        if spec is None:
            self._refuse(peer, "this is a job of one machine, in which no other may take part")
        elif message.job != spec.job:
            text = f"the coordinator there is of job {spec.job}, and not of {message.job}: give another --coordinator"
            self._refuse(peer, text)
        elif message.config_digest and message.config_digest != spec.config_digest:
            text = (
                f"node {message.node} was given another configuration than the job that {spec.host} has created "
                f"(digest {message.config_digest}, and there {spec.config_digest}): leave --config and --set out there"
            )
            self._refuse(peer, text)
        else:
            answer = self._hosts.hello(message.node, message.incarnation, 0)
            if isinstance(answer, Turned):
                self.tell(TurnAway(message.incarnation, answer.reason, answer.verdict))
            else:
                self._send(peer, msgspec.structs.replace(spec, keys=keys) if keys else spec)

    def _refuse(self, peer: int, reason: str) -> None:
        self.tell(TurnAway(incarnation_of(peer), reason, "misused"))

    def may_say(self, peer: int, message: messages.FromAgent) -> str:
        """Tells why what an agent says is a lie; "" if it is none.

        Every holder of the key can connect as any agent, so this is no proof of who it is. But an agent has no news of
        the workers of other hosts, a checkpoint is committed by the agent of this host, and who has not said that it
        has come says nothing yet. What is a lie is never acted upon.

        Args:
            peer: which agent its connection is of.
            message: what it says.
        """
        match message:
            case messages.AskJob() | messages.AgentHello():
                if agent_id(message.incarnation) != peer:
                    return f"it is that of agent {message.incarnation}"
            case messages.TermTaken():  # of a coordinator's candidate, also to one that its agent has not come to
                return ""
            case _ if not self._known.takes_part(incarnation_of(peer)):
                return "it has not come"
            case messages.CheckpointCommitted() if peer != self.home:
                return "the agent of the coordinator's host commits checkpoints"
        strangers = [worker for worker in _workers_in(message) if not self._is_of(peer, worker)]
        return f"worker {strangers[0]} is not of its host" if strangers else ""

    def _is_of(self, peer: int, worker: int) -> bool:
        """Tells whether a worker was placed on an agent's host."""
        host = self._hosts.of(worker)
        return host is not None and agent_id(host.incarnation) == peer

    def tell(self, effect: AgentEffect) -> None:
        """Tells an agent what is to be done."""
        peer = agent_id(effect.incarnation)
        match effect:
            case TellAgent(_, message):
                self._send(peer, message)
            case StartFirst(_, workers):
                self._send(peer, messages.SpawnFirst(workers=workers, checkpoint=self._checkpoint))
            case TurnAway(incarnation, reason, verdict):
                _log.warning("agent %d does not take part: %s", incarnation, reason)
                self._send(peer, messages.AgentRefused(reason=reason, verdict=verdict))
            case HangUp():
                self._hang_up(peer)

    @property
    def home(self) -> int:
        """The agent of this coordinator's host, on control connections."""
        return agent_id(self._hosts.home)

    @property
    def present(self) -> list[int]:
        """All that take part, as control connections name them, also while they are not connected; that of this host in
        any case."""
        return sorted({self.home, *map(agent_id, self._hosts.incarnations)})

    def peers_beside(self, workers: Iterable[int]) -> list[int]:
        """Lists all that have connections from the hosts of some workers, as control connections name them; of this
        coordinator's own host it lists nobody, since its kernel is this one."""
        return [
            peer
            for host in self._known.looked_at(workers)
            for peer in (agent_id(host.incarnation), *sorted(host.workers))
        ]
