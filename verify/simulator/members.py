"""What a simulated coordinator does about workers, joiners and hosts: the product's rules, on virtual time.

Who is started, let in, let go and held for lost is decided in `elaswave.protocol.membership`. Here is what carries that
out: agents that start processes, or the world where there are none; a store; and a detector that is told
of faults, in the place of one that listens to heartbeats.
"""

# ruff: noqa: D102 (what is not described here is where it is declared)

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.detection.active_time import ActiveTime
from elaswave.protocol.detection.detector import Detector
from elaswave.protocol.detection.host_silence import Counters
from elaswave.protocol.detection.unreachable import Unreachable
from elaswave.protocol.events import StartRecord, Suspected
from elaswave.protocol.membership.admissions import Founders
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.driver import MembersDriver
from elaswave.protocol.membership.effects import (
    AgentEffect,
    AnyRecord,
    EndJoiner,
    HangUp,
    HostCame,
    LeaveAsked,
    MembershipRecord,
    PlaceTaken,
    SpawnJoiner,
    StartFirst,
    StepPublished,
    TellAgent,
    TurnAway,
)
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.membership.joiners import Joiners, MembershipTerms
from elaswave.protocol.membership.membership import Membership
from elaswave.protocol.messages import PROTOCOL_VERSION, Decision, InForce
from verify.simulator.job import Job, model_of

if TYPE_CHECKING:
    from verify.simulator.agents import SimAgent
    from verify.simulator.candidates import WriteLease
    from verify.simulator.coordinator import SimCoordinator
    from verify.simulator.world import ControlLink, World

UNIT_S = 0.05
"""A unit of virtual time."""
LOOK = 8
"""Between two looks of a coordinator: less than what counts as sleep (`elaswave.protocol.detection.active_time`)."""
HOME = 0
"""Incarnation of the agent of a coordinator's own host, which starts all workers where there are no others."""
HEARTBEAT = 3
"""Between two heartbeats of a worker, and two looks of a coordinator that listens to them."""
REQUEST = 1
"""Number of the one request of a person for workers more."""
OwnRecord = PlaceTaken | LeaveAsked | HostCame | Founders | StepPublished
"""Records that the coordinator's machine does not read."""


def is_of_machine(record: object) -> bool:
    """Whether a record is one that the coordinator's machine reads."""
    return not isinstance(record, OwnRecord)


def founders_of(job: Job) -> Founders:
    """What all workers of a toy job have in common."""
    return Founders(
        protocol=PROTOCOL_VERSION,
        libraries="",
        environment="",
        config_hash=1,
        model_hash=1,
        data_hash=1,
        determinism_hashes={},
    )


class ToldDetector(Detector):
    """Holds workers for lost because it is told so: by ends of processes, and by bounds on how long a worker may have
    no connection. Faults that are seen by silence tell it as well.

    Args:
        suspect: holds a worker for lost, by what.
        expect: has a worker come within a bound.
    """

    def __init__(self, suspect: Callable[[int, str], None], expect: Callable[[int], None]) -> None:
        super().__init__()
        self._held = suspect
        self._await = expect

    def expect(self, worker: int, now_s: float) -> None:
        self._await(worker)

    def joined(self, worker: int, now_s: float) -> None:
        self._await(worker)

    def disconnected(self, worker: int, now_s: float) -> None:
        self._await(worker)

    def exited(self, worker: int, text: str, now_s: float) -> None:
        self._held(worker, "exit")

    def new_generation(self, now_s: float) -> None:
        pass

    def left(self, worker: int) -> None:
        pass

    def tick(self, now_s: float) -> list[Suspected]:
        return []


class NamedHosts(Hosts):
    """Each node has the workers that its name says, whichever comes first; nothing is known of failure domains."""

    def label_of(self, worker: int) -> str:
        return ""


class SimMembers(MembersDriver):
    """The part of a simulated coordinator that deals with workers' processes and hosts.

    Args:
        world: time, network and observers.
        write_lease: its right to write, where there are candidates.
        records: of earlier coordinators, of all kinds.
    """

    core_class = Coordinator
    membership_class = Membership
    joiners_class = Joiners
    hosts_class = NamedHosts
    detector_class = Detector
    id = -1

    def __init__(self, world: "World", write_lease: "WriteLease | None", records: Sequence[Any]) -> None:
        self.world = world
        self.write_lease = write_lease
        self.dead = False
        self.unreachable = Unreachable()
        self.failures: dict[int, object] = {}
        self._acknowledged: dict[int, int] = {}
        """Worker -> what the kernel of its host has acknowledged, in looks."""
        self.links: dict[int, ControlLink] = {}
        self._suspicions: list[Suspected] = []
        """Those of the present moment, which are taken together."""
        job, model, agents = world.job, model_of(world.job), world.agents
        self.core = self.core_class(
            InForce(model.layout, model.placement),
            blocks=model.blocks,
            scatter_width=job.scatter_width,
            records=tuple(filter(is_of_machine, records)),
        )
        self.has_begun = any(isinstance(record, StartRecord | Decision) for record in records)
        self.active_time = ActiveTime()
        terms = MembershipTerms(
            layout=model.layout,
            labels=tuple(job.hosts or ()),
            respawns=world.conditions.respawns,
            drain_deadline_s=world.conditions.drain_delay * UNIT_S,
            workers_min=job.min_workers,
        )
        own: list[Any] = [] if agents else [HostCame(number=0, node="n", incarnation=HOME, slots=0)]
        own += [] if self._lets_in else [founders_of(job)]
        hosts = self.hosts_class(agents.founders if agents else (), agents.names if agents else (), home=HOME)
        host_agents = HostAgents(
            hosts, [*own, *records], self._agent_heard_s, now_s=self._active_s(), is_local=agents is None
        )
        joiners = self.joiners_class(terms, hosts, [*own, *records], lambda vector, environment: founders_of(job))
        self.membership = self.membership_class(self.core, joiners, host_agents, terms, self.active_time)
        if not agents:
            hosts.connected(hosts.numbered(0))
        self.detector = self._detector()

    def _detector(self) -> Detector:
        if not self._detects:
            return ToldDetector(self.hold_for_lost, self._expect)
        return self.detector_class(takes_over=self.has_begun, domains=self.core.domains, active_time=self.active_time)

    @property
    def _lets_in(self) -> bool:
        """Whether anybody may ever join."""
        return bool(self.world.job.join_step or self.world.conditions.respawns)

    @property
    def _has_to_look(self) -> bool:
        """Whether anything may become due by the clock alone."""
        world = self.world
        return bool(self._lets_in or world.job.leave_step or world.agents or world.has_notices or self._detects)

    @property
    def _detects(self) -> bool:
        return self.world.conditions.detects

    def begin_members(self) -> None:
        """What it hears and does first about workers and hosts."""
        if self.world.is_stopping:
            self._stop()
        if self._has_to_look:
            self.world.after(LOOK, self, self._look_again)
        if self.world.agents is None:
            dead = [worker.id for worker in self.world.workers.values() if worker.dead]
            self.world.after(self.world.conditions.exit_delay, self, self.on_agent, "n", HOME, dead)

    def on_agent(self, node: str, incarnation: int, ended: Sequence[int]) -> None:
        """An agent says who it is, and which of its processes have ended."""
        if self.agent_came(node, incarnation, 0):
            for worker in ended:
                self.then(self.on_exit, worker)
            self.then(self.stop_if_none_stay)

    def on_agent_went(self, incarnation: int) -> None:
        """An agent's connection has ended."""
        self.membership.agent_went(incarnation, self.now_s())

    def _look_again(self) -> None:
        self.world.after(HEARTBEAT if self._detects else LOOK, self, self._look_again)
        if self._detects:
            self._listen()
        self.world.see.expects(self.membership.coming, self.core.members)
        for worker in self.membership.silent:
            if self.world.is_running(worker):
                self.then(self._saw, worker)
        self.then(self.look_now)

    def look_now(self) -> None:
        """What is due by now; it looks again by itself."""
        self.look()

    def _listen(self) -> None:
        """Heartbeats have come of all that are heard, and agents have looked at who has not registered."""
        now_s = self.now_s()
        for worker in self.detector.awaited:
            if self.world.is_running(worker):
                self.detector.used(worker, now_s, now_s)
        for worker in self.detector.workers:
            if self.last_heartbeat_s(worker) is not None:
                self.detector.heartbeat(worker, self.links[worker].worker.position(), now_s)
        for host, workers in self.detector.quiet_hosts.items():
            links = [self.links[worker] for worker in workers if worker in self.links and self.links[worker].open]
            self.detector.looked_at_host(host, map(self._counters, links), now_s)

    def _counters(self, link: "ControlLink") -> Counters:
        """A kernel acknowledges what comes, also where processes are stopped; one that is cut off does not."""
        is_cut_off, number = self.world.is_cut_off(link.worker), link.worker.id
        acknowledged = self._acknowledged[number] = self._acknowledged.get(number, 0) + (not is_cut_off)
        return Counters(number, 0, acknowledged, is_cut_off)

    def _saw(self, worker: int) -> None:
        """An agent tells of a process that uses its processor."""
        self.carry_out(self.membership.used(worker, self.world.now, self.now_s()))

    # ---------------------------------------------------------------------------------------------- what is carried out

    def then(self, call: Callable[..., object], *arguments: Any) -> None:
        """Goes on, once nothing is waited for."""
        if not self.world.postponed(self, call, *arguments):
            call(*arguments)

    def now_s(self) -> float:
        """Virtual time."""
        return self.world.now * UNIT_S

    def _active_s(self) -> float:
        return self.active_time.passed_s(self.now_s())

    @property
    def is_over(self) -> bool:
        """As the world has it."""
        return bool(self.world.outcome)

    def persist(self, record: AnyRecord) -> None:
        """Into the store, which refuses replaced coordinators."""
        if self.write_lease is not None:
            self.write_lease.persist(cast("SimCoordinator", self), record)
            return
        self.world.store.check(self.core.term)
        self.world.store.append(record)
        if isinstance(record, Decision):
            self.world.decided(record)
        elif isinstance(record, MembershipRecord):
            self.world.see.wrote_down(record)
        if isinstance(record, PlaceTaken):
            host = self.membership.agents.hosts.numbered(record.host)
            self.world.see.given(record.worker, host.incarnation)

    def tell_agent(self, effect: AgentEffect) -> None:
        """The world does what the only agent would."""
        agents = self.world.agents
        if agents is not None:
            for agent in agents.on_nodes:
                if agent.incarnation == effect.incarnation and agent.coordinator is self:
                    self._tell(agent, effect)
            return
        match effect:
            case TellAgent(incarnation, SpawnJoiner(worker=worker)):
                if worker not in self.world.workers:
                    self.world.see.forked(worker, incarnation)
                self.world.spawn(worker)
            case TellAgent(_, EndJoiner(worker=worker)):
                self.world.kill_process(worker)

    def _tell(self, agent: "SimAgent", effect: AgentEffect) -> None:
        agents = self.world.agents
        assert agents is not None
        match effect:
            case TurnAway(_, reason, _):
                self.world.say(f"agent {agent.incarnation} of n{agent.node} is turned away: {reason}")
                agents.end(agent)
            case HangUp():
                agents.hang_up(agent)
            case TellAgent(_, SpawnJoiner() as message):
                agents.down(agent, agent.wanted, message)
            case TellAgent(_, EndJoiner(worker=worker)):
                agents.down(agent, self.world.kill_process, worker)
            case StartFirst(_, workers):
                agents.down(agent, agent.begin, workers)

    def say(self, text: str) -> None:
        """A line of the log."""
        self.world.say(f"people are told: {text}")

    def not_admitted(self, worker: int, problem: str) -> None:
        """Nobody asks."""

    def step_s(self) -> float:
        """Steps take next to no time."""
        return 0.0

    def last_heartbeat_s(self, worker: int) -> float | None:
        """A worker that is connected sends heartbeats, unless it is stopped, or cut off."""
        link = self.links.get(worker)
        is_there = link is not None and link.open and self.world.is_heard(link.worker)
        return 0.0 if is_there else None

    def _agent_heard_s(self, incarnation: int) -> float | None:
        """An agent that is connected is heard: neither hosts nor agents hang."""
        return 0.0

    def stop_job(self, cause: str) -> None:
        """As after a signal: every later coordinator hears of it too."""
        self.world.say(f"the job is to stop: {cause}")
        self.world.is_stopping = True
        self.world.see.stopping(self.core.members, self.core.admissions.leaving)
        self._stop()

    def _stop(self) -> None:
        self.membership.stop()
        for worker in self.core.members:
            self.tell_to_stop(worker)

    def tell_to_stop(self, worker: int) -> None:
        """Has a worker ask for the end of the job in its next ballot."""
        raise NotImplementedError

    def give_up_job(self, reason: str) -> None:
        """The hosts of a toy job come at once."""
        raise AssertionError(reason)

    def look_soon(self) -> None:
        """What a detector is told that does not listen, it says itself."""
        if self._detects:
            self.world.after(0, self, self.look_now)

    # ------------------------------------------------------------------------------------------------------- detectors

    def on_link_closed(self, worker: int) -> None:
        """A worker has to come back within the bound."""
        self.detector.disconnected(worker, self.now_s())

    def on_exit(self, worker: int) -> None:
        """A worker's process has ended."""
        self.worker_ended(worker, "has ended")

    def note_end(self, worker: int, text: str) -> bool:
        """A worker's process has ended, or is given up with its host."""
        if text != "has ended":
            self.world.see.held_for_lost(worker, "host")
        return super().note_end(worker, text)

    def hold_for_lost(self, worker: int, detected_by: str) -> None:
        """A detector holds a worker for lost."""
        self.suspected(Suspected(worker, detected_by, f"worker {worker} was lost ({detected_by})"))

    def suspected(self, suspicion: Suspected) -> None:
        """All suspicions of one moment are taken together."""
        self._suspicions.append(suspicion)
        if len(self._suspicions) == 1:
            self.world.after(0, self, self._take_all)

    def _take_all(self) -> None:
        suspicions, self._suspicions = self._suspicions, []
        self.take_suspicions(suspicions)
        self.then(self.after_suspicions)

    def after_suspicions(self) -> None:
        """Some members may be none any more."""

    def suspect(self, suspicions: Sequence[Suspected]) -> None:
        """Tells the machine of suspicions that came together."""
        self.world.suspected.update(suspicion.worker for suspicion in suspicions)
        for suspicion in suspicions:
            self.world.see.held_for_lost(suspicion.worker, suspicion.detected_by)
        self.world.overdue.update(each.worker for each in suspicions if each.detected_by == "drain")
        super().suspect(suspicions)

    def _expect(self, worker: int) -> None:
        """A worker has to come within the bound; of one that is connected the end of its connection is awaited."""
        link = self.links.get(worker)
        if link is not None and link.open:
            return
        self.world.after(2 * self.world.conditions.heartbeat_bound, self, self._check_present, worker)

    def _check_present(self, worker: int) -> None:
        link = self.links.get(worker)
        is_silent = link is None or not link.open or link.worker.dead
        if is_silent and worker in self.core.members:
            self.hold_for_lost(worker, "heartbeat")
