"""Hosts' agents as parties that die, lose their connections and come again: rules H2, H11 and H12.

What an agent does when a process ends or is wanted is the product's machine (`elaswave.protocol.membership.agent`), and
so are how long it goes on without a coordinator (`elaswave.protocol.leadership.vigil`) and what the coordinator makes
of hosts (`elaswave.protocol.membership.hosts`). Here is what carries their words, which are lost with the connection.
With an agent all processes end that it has started.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from elaswave.protocol.events import JoinerGone, Suspected
from elaswave.protocol.leadership.vigil import Due, Vigil
from elaswave.protocol.membership.agent import Agent, JoinerWanted, StartJoiner, WorkerEnded
from elaswave.protocol.membership.hosts import GONE_AGAIN_S, GONE_S, Came, Host, Hosts, HostState, Turned
from verify.simulator.schedule import ScheduledFault
from verify.simulator.store import ActorDead, StaleTermError

if TYPE_CHECKING:
    from verify.simulator.coordinator import SimCoordinator
    from verify.simulator.world import CoordinatorActor, WorkerActor, World

UNIT_S = 0.05
"""A unit of virtual time."""
LOOK = 20
"""Between two looks for hosts that are gone."""
WATCH = 8
"""Between two looks of an agent whether it has a coordinator."""


class Placed(NamedTuple):
    """A joiner is to be started on a host: durable before its agent is asked (J1, H2)."""

    worker: int
    number: int


class SimAgent:
    """One agent: an incarnation of a node."""

    id = -1
    machine_class = Agent

    def __init__(self, crew: "Agents", node: int, incarnation: int) -> None:
        self.dead = False
        self.node = node
        self.incarnation = incarnation
        self.workers: set[int] = set()
        """Processes that it has started."""
        self.machine = self.machine_class()
        self.coordinator: SimCoordinator | None = None
        """To which it is connected."""
        self.shut_until = 0
        self.num_commits = 0
        """Of all its workers."""
        self.vigil = Vigil(crew.world.conditions.orphan_delay * UNIT_S)
        self._crew = crew

    def look(self) -> Due:
        """What is due while it has no coordinator."""
        now_s, has_coordinator = self._crew.world.now * UNIT_S, self.coordinator is not None
        return self.vigil.look(now_s, has_coordinator=has_coordinator, num_commits=self.num_commits)

    def wanted(self, worker: int) -> None:
        """The coordinator wants a joiner started."""
        for effect in self.machine.handle(JoinerWanted(worker)):
            assert isinstance(effect, StartJoiner)
            self.workers.add(worker)
            self._crew.world.see.forked(worker, self.incarnation)
            self._crew.world.spawn(worker)

    def ended(self, worker: int) -> None:
        """A process of its has ended."""
        self.machine.handle(WorkerEnded(worker, "has ended", 0.0))
        if self.coordinator is not None:
            self._crew.up(self, self.coordinator.desk.exited, worker)


class Agents:
    """The agents of a job, and the way to their coordinator.

    Args:
        world: time and processes.
        agent_class: of each.
    """

    def __init__(self, world: "World", agent_class: type[SimAgent] = SimAgent) -> None:
        self.world = world
        self.records: list[Came | Placed] = []
        """What coordinators have made durable of hosts."""
        self.founders = tuple(worker % world.conditions.agents for worker in range(world.job.num_workers))
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
            agent.workers.update(worker for worker, number in enumerate(self.founders) if number == node)
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
        if due is Due.END:
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
            self.up(agent, coordinator.desk.hello, agent, tuple(end.worker for end in agent.machine.worker_ends))

    def up(self, agent: SimAgent, call: Callable[..., None], *arguments: Any) -> None:
        """An agent says something to its coordinator."""
        self.world.tick(agent)
        self._send(agent, True, call, arguments)

    def down(self, agent: SimAgent, worker: int) -> None:
        """A coordinator asks an agent for a joiner."""
        self._send(agent, False, agent.wanted, (worker,))

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
            world.after(world.conditions.link_delay, coordinator, coordinator.desk.went, agent.incarnation)
            world.after(world.delay(), agent, self._dial, agent)

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


class HostDesk:
    """What a coordinator knows of hosts, and does about them.

    Args:
        coordinator: whose process it is.
        crew: all agents.
    """

    hosts_class = Hosts

    def __init__(self, coordinator: "SimCoordinator", crew: Agents) -> None:
        self._coordinator = coordinator
        self._crew = crew
        world = crew.world
        # The coordinator runs beside the first node's agent, which ends with it: here it is started again alone.
        self._hosts = self.hosts_class(crew.founders, (), home=0)
        self._gone_s = GONE_AGAIN_S if crew.records else GONE_S
        self._placed: dict[int, int] = {}
        self._ended: set[int] = set()
        for record in crew.records:
            if isinstance(record, Came):
                self._hosts.restore(record, world.now * UNIT_S)
            else:
                self._placed[record.worker] = record.number
                self._hosts.placed(record.worker, record.number)
        world.after(LOOK, coordinator, self._look)

    def hello(self, agent: SimAgent, ended: tuple[int, ...]) -> None:
        """An agent says who it is, and who has ended."""
        answer = self._hosts.hello(f"n{agent.node}", agent.incarnation, 0)
        if isinstance(answer, Turned):
            self._crew.world.say(f"agent {agent.incarnation} of n{agent.node} is turned away: {answer.reason}")
            self._crew.end(agent)
            return
        if isinstance(answer, Came):
            self._persist(answer)
            answer = self._hosts.add(answer, 0.0)
        self._hosts.connected(answer)
        for worker in self._placed:
            if worker not in self._ended:
                self.ask(worker)
        for worker in ended:
            self.exited(worker)

    def exited(self, worker: int) -> None:
        """A process has ended, as its agent says."""
        self._ended.add(worker)
        self._hosts.ended(worker)
        self._coordinator.on_exit(worker)

    def went(self, incarnation: int) -> None:
        """An agent's connection has ended."""
        self._hosts.disconnected(incarnation, self._crew.world.now * UNIT_S)

    def want(self, num_joiners: int) -> None:
        """So many workers more are wanted than the job began with: who has ended needs another, with an id of its
        own."""
        living = [worker for worker in self._placed if worker not in self._ended]
        job = self._crew.world.job
        while len(living) < num_joiners and len(self._placed) < 3 * job.joiners:
            host = self._hosts.choose()
            if host is None:
                return
            worker = max((job.num_workers - 1, *self._placed)) + 1
            self._place(worker, host)
            living.append(worker)

    def _place(self, worker: int, host: Host) -> None:
        self._persist(Placed(worker, host.number))
        self._placed[worker] = host.number
        self._hosts.placed(worker, host.number)
        self._crew.world.see.given(worker, host.incarnation)
        self.ask(worker)

    def ask(self, worker: int) -> None:
        """Has a worker started: by the agent to which its id was given, and by no other one."""
        host = self._hosts.of(worker)
        if host is None or host.state is HostState.GONE:
            return
        for agent in self._crew.on_nodes:
            if agent.incarnation == host.incarnation and agent.coordinator is self._coordinator:
                self._crew.world.tick(self._coordinator)
                self._crew.down(agent, worker)

    def with_their_hosts(self, suspicions: list[Suspected]) -> list[Suspected]:
        """Suspicions, and those of all that are lost with the same hosts (H11)."""
        known = {suspicion.worker for suspicion in suspicions}
        others = [
            Suspected(worker, "host", f"host {node} is lost, and worker {worker} is there")
            for node, workers in self._hosts.lost_with(known, lambda incarnation: False).items()
            for worker in sorted(workers - known)
            if worker in self._coordinator.core.members
        ]
        self._crew.world.suspected.update(other.worker for other in others)
        return [*suspicions, *others]

    def _look(self) -> None:
        world = self._crew.world
        world.after(LOOK, self._coordinator, self._look)
        for host in self._hosts.overdue(world.now * UNIT_S, self._gone_s):
            self._hosts.give_up(host)
        for worker in sorted(self._hosts.stranded.difference(self._coordinator.core.members, self._ended)):
            self._ended.add(worker)
            self._coordinator.feed(JoinerGone(worker))

    def _persist(self, record: Came | Placed) -> None:
        """Of a coordinator that was replaced the store takes nothing, and it ends."""
        world = self._crew.world
        try:
            world.store.check(self._coordinator.core.term)
        except StaleTermError:
            world.end_coordinator(self._coordinator)
            raise ActorDead from None
        self._crew.records.append(record)
