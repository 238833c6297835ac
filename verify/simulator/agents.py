"""Hosts' agents as parties that die, lose their connections and come again: rules H2, H11 and H12.

What an agent does when a process ends or is wanted is the product's machine (`elaswave.protocol.membership.agent`), and
so are how long it goes on without a coordinator (`elaswave.protocol.membership.agent`) and what the
coordinator makes of hosts (`elaswave.protocol.membership`). Here is what carries their words, which are lost with the
connection. With an agent all processes end that it has started.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elaswave.protocol.membership.agent import Agent, CoordinatorTimeout, TimeoutAction, WorkerEnded
from elaswave.protocol.membership.effects import SpawnJoiner
from verify.simulator.members import UNIT_S
from verify.simulator.schedule import ScheduledFault

if TYPE_CHECKING:
    from verify.simulator.coordinator import SimCoordinator
    from verify.simulator.world import CoordinatorActor, WorkerActor, World

WATCH = 8
"""Between two looks of an agent whether it has a coordinator."""


class SimAgent:
    """One agent: an incarnation of a node."""

    id = -1
    machine_class = Agent

    def __init__(self, agents: "Agents", node: int, incarnation: int) -> None:
        self.dead = False
        self.node = node
        self.incarnation = incarnation
        self.workers: set[int] = set()
        """Processes that it has started."""
        self.machine = self.machine_class()
        self.coordinator: SimCoordinator | None = None
        """To which it is connected."""
        self.shut_until = 0
        self.leaves_at: int | None = None
        """When its machine is taken away, if it has had a notice."""
        self.num_commits = 0
        """Of all its workers."""
        self.coordinator_timeout = CoordinatorTimeout(agents.world.conditions.orphan_delay * UNIT_S)
        self._agents = agents

    def look(self) -> TimeoutAction:
        """What is due while it has no coordinator."""
        now_s, has_coordinator = self._agents.world.now * UNIT_S, self.coordinator is not None
        return self.coordinator_timeout.look(now_s, has_coordinator=has_coordinator, num_commits=self.num_commits)

    def begin(self, workers: Sequence[int]) -> None:
        """The job begins here with these workers; may be said again."""
        for worker in sorted(set(workers) - self.workers):
            self.workers.add(worker)
            self._agents.world.begin_worker(worker)

    def wanted(self, message: SpawnJoiner) -> None:
        """The coordinator wants a joiner started."""
        for effect in self.machine.handle(message):
            assert isinstance(effect, SpawnJoiner)
            self.workers.add(effect.worker)
            self._agents.world.see.forked(effect.worker, self.incarnation)
            self._agents.world.spawn(effect.worker)

    def ended(self, worker: int) -> None:
        """A process of its has ended."""
        self.machine.handle(WorkerEnded(worker, "has ended", 0.0))
        if self.coordinator is not None:
            self._agents.up(self, self.coordinator.on_exit, worker)


class Agents:
    """The agents of a job, and the way to their coordinator.

    Args:
        world: time and processes.
        agent_class: of each.
    """

    def __init__(self, world: "World", agent_class: type[SimAgent] = SimAgent) -> None:
        self.world = world
        self.founders = tuple(worker % world.conditions.agents for worker in range(world.job.num_workers))
        self.names = [f"n{node}" for node in range(world.conditions.agents)]
        self.on_nodes: list[SimAgent] = []
        """The newest agent of each node."""
        self._agent_class = agent_class
        self._num_incarnations = 0
        self._last: dict[tuple[int, bool], int] = {}
        self._alone_since: dict[int, int] = {}
        """Incarnation of an agent without a coordinator -> since when."""
        self._committed_at: dict[int, int] = {}
        """Incarnation of an agent -> when one of its workers has committed a step."""
        for node in range(world.conditions.agents):
            agent = self._start(node)
            self.on_nodes.append(agent)

    def _start(self, node: int) -> SimAgent:
        self._num_incarnations += 1
        agent = self._agent_class(self, node, self._num_incarnations)
        self.world.after(WATCH, agent, self._watch, agent)
        return agent

    def of(self, worker: int) -> SimAgent | None:
        """The living agent that has started a worker."""
        return next((agent for agent in self.on_nodes if worker in agent.workers and not agent.dead), None)

    def committed(self, worker: int) -> None:
        """A worker has committed a step."""
        agent = self.of(worker)
        if agent is not None:
            agent.num_commits += 1
            self._committed_at[agent.incarnation] = self.world.now

    def _watch(self, agent: SimAgent) -> None:
        """An agent looks after itself. Its watch is judged by times that are taken here."""
        world, incarnation = self.world, agent.incarnation
        world.after(WATCH, agent, self._watch, agent)
        due = agent.look()
        if agent.coordinator is not None:
            self._alone_since.pop(incarnation, None)
            return
        alone = world.now - self._alone_since.setdefault(incarnation, world.now)
        idle = world.now - self._committed_at.get(incarnation, 0)
        if due is TimeoutAction.END:
            world.say(f"agent {incarnation} of n{agent.node} ends with its workers: it has no coordinator")
            world.see.orphaned(incarnation, alone, idle)
            self.end(agent)
        else:
            world.see.waits(incarnation, alone, idle)

    # --------------------------------------------------------------------------------------------------- connections

    def find_coordinator(self) -> None:
        """Agents without a connection dial."""
        for agent in self.on_nodes:
            self.world.after(0, agent, self._dial, agent)

    def _dial(self, agent: SimAgent) -> None:
        world = self.world
        if agent.dead or agent.coordinator is not None:
            return
        if agent.shut_until > world.now:
            world.after(agent.shut_until - world.now, agent, self._dial, agent)
            return
        coordinator: Any = world.coordinator
        if coordinator is not None:
            agent.coordinator = coordinator
            ended = tuple(end.worker for end in agent.machine.worker_ends)
            self.up(agent, coordinator.on_agent, f"n{agent.node}", agent.incarnation, ended)
            self.say_notice(agent)

    def say_notice(self, agent: SimAgent) -> None:
        """An agent has had a notice that its machine is taken away; said on every connection."""
        if agent.coordinator is not None and agent.leaves_at is not None:
            left_s = max(0, agent.leaves_at - self.world.now) * UNIT_S
            self.up(agent, agent.coordinator.agent_leaving, agent.incarnation, left_s)

    def up(self, agent: SimAgent, call: Callable[..., None], *arguments: Any) -> None:
        """An agent says something to its coordinator."""
        self.world.tick(agent)
        self._send(agent, True, call, arguments)

    def down(self, agent: SimAgent, call: Callable[..., None], *arguments: Any) -> None:
        """A coordinator says something to an agent."""
        self._send(agent, False, call, arguments)

    def _send(self, agent: SimAgent, is_up: bool, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        world, way = self.world, (agent.incarnation, is_up)
        arrives = self._last[way] = max(world.now + world.delay(), self._last.get(way, 0))
        world.at(arrives - world.now, self._arrive, agent, agent.coordinator, is_up, call, arguments)

    def _arrive(
        self, agent: SimAgent, coordinator: Any, is_up: bool, call: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if coordinator is not None and agent.coordinator is coordinator:
            self.world.after(0, coordinator if is_up else agent, call, *arguments)

    def hang_up(self, agent: SimAgent) -> None:
        """Its connection ends; both ends see it, and the agent dials again."""
        coordinator, agent.coordinator = agent.coordinator, None
        if coordinator is not None:
            world = self.world
            world.after(world.conditions.link_delay, coordinator, self._went, agent, coordinator)
            world.after(world.delay(), agent, self._dial, agent)

    def _went(self, agent: SimAgent, coordinator: "SimCoordinator") -> None:
        """Of a connection that a newer one has replaced nothing is heard any more."""
        if agent.coordinator is not coordinator:
            coordinator.on_agent_went(agent.incarnation)

    def ended(self, coordinator: "CoordinatorActor") -> None:
        """A coordinator has ended."""
        for agent in self.on_nodes:
            if agent.coordinator is coordinator:
                agent.coordinator = None

    def worker_ended(self, worker: "WorkerActor") -> None:
        """A worker's process has ended, and its connection with it."""
        world = self.world
        agent = self.of(worker.id)
        if agent is not None:
            world.after(world.conditions.exit_delay, agent, agent.ended, worker.id)
        link = world.links.get(worker.id)
        if link is not None:
            world.at(world.conditions.link_delay, world.close_link, link)

    # --------------------------------------------------------------------------------------------------------- faults

    def strike(self, fault: ScheduledFault) -> None:
        """Something happens to an agent, or to its connection."""
        agent = self.on_nodes[int(fault.target[1:])]
        if agent.dead:
            return
        if fault.kind == "kill":
            self.end(agent)
        elif fault.kind == "notice":
            agent.leaves_at = self.world.now + fault.duration
            self.say_notice(agent)
            self.world.after(fault.duration, agent, self.end, agent)
        else:
            agent.shut_until = self.world.now + fault.duration
            self.hang_up(agent)

    def end(self, agent: SimAgent) -> None:
        """An agent ends, and all its processes; another one of its node comes."""
        agent.dead = True
        self.hang_up(agent)
        for worker in sorted(agent.workers):
            if worker in self.world.workers and not self.world.workers[worker].dead:
                self.world.end_worker(self.world.workers[worker])
        self.world.at(self.world.conditions.restart_delay, self._come_again, agent.node)

    def _come_again(self, node: int) -> None:
        agent = self.on_nodes[node] = self._start(node)
        self.world.after(0, agent, self._dial, agent)
