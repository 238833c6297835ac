"""A coordinator's machine in a process: its parts, what it asks for, what follows by the clock. Others are connected
to it by `elaswave.coordinator.process`.

Faults that the coordinator carries out itself, and what is said of those that never struck anything.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from elaswave.blocks.domains import site_of
from elaswave.channel.client import next_heartbeat_s
from elaswave.channel.messages.agent import (
    Awaited,
    Ended,
    StopAsked,
    ToAgent,
    ToCoordinator,
)
from elaswave.channel.messages.worker import (
    Failed,
    Start,
    StepReport,
    Stop,
)
from elaswave.channel.server import ControlServer
from elaswave.channel.wire import agent_id
from elaswave.config.cluster import configured_sites, control_delays_s
from elaswave.coordinator.agents import Agents
from elaswave.coordinator.background import Background, call_at_end
from elaswave.coordinator.commands.commands import KeyCommands, Operations, obstacle_to
from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.operator_sessions import OperatorSessions
from elaswave.coordinator.job_spec import CoordinatorSetup, spec_of
from elaswave.coordinator.planning.measurements import TRIALS_MAX, DataWaits
from elaswave.coordinator.planning.run_planner import LayoutSearches, RecoveryPlanning, RunPlanner
from elaswave.coordinator.records.checkpoints import CheckpointFinder
from elaswave.coordinator.records.job_end import JobEnd
from elaswave.coordinator.records.recorder import Publishing, RecoveryReports, RunRecorder
from elaswave.coordinator.records.recoveries import RecoveryLog
from elaswave.coordinator.records.terminal import Terminal
from elaswave.errors import StateError
from elaswave.faults.injection import (
    Fault,
    Requests,
    away_until_s,
    coordinator_fault,
    never_struck,
    read_fault_records,
    strike_coordinator,
)
from elaswave.job.plan import Identity, RunPlan, identity_of
from elaswave.observability.events import EventLog
from elaswave.observability.processes import clock_here
from elaswave.observability.run_folder import EVENTS_FILE, FAULTS_FILE, data_facts
from elaswave.protocol import events
from elaswave.protocol.coordinator.decisions import MemberEnd
from elaswave.protocol.coordinator.machine import Bounds, Coordinator
from elaswave.protocol.detection.active_time import TICK_S, ActiveTime
from elaswave.protocol.detection.detector import Detector, Suspicion
from elaswave.protocol.detection.unreachable import Unreachable
from elaswave.protocol.membership.admissions import Founders, determinism_hashes_in
from elaswave.protocol.membership.agents import HostAgents
from elaswave.protocol.membership.driver import MembersDriver
from elaswave.protocol.membership.effects import AgentEffect, AnyRecord, Effect
from elaswave.protocol.membership.hosts import Hosts
from elaswave.protocol.membership.joiners import Joiners, MembershipTerms
from elaswave.protocol.membership.membership import Membership
from elaswave.protocol.messages import PROTOCOL_VERSION, CoreToWorker, Decision, InForce
from elaswave.protocol.step.ballot import decode_certificate
from elaswave.store.opening import open_store
from elaswave.store.store import ClockRead, JournalRecord, Owner, by_own_clock, core_records, membership_records
from elaswave.system.processes import workers_max


class CoordinatorFaults:
    """The injected faults of one run, as a coordinator sees them.

    Args:
        faults: all that were asked for.
        run_dir: where those that have struck leave a record, for every later coordinator too.
        requests: to the coordinator.
    """

    def __init__(self, faults: Sequence[Fault], run_dir: Path, requests: Requests) -> None:
        self._faults = faults
        self._requests = requests
        self._record = run_dir / FAULTS_FILE

    def strike(self, step: int) -> None:
        """Carries out the coordinator's own faults that are due when a step begins."""
        if not self._faults:
            return
        struck = {entry.position for entry in read_fault_records(self._record)}
        while (due := coordinator_fault(self._faults, step, struck)) is not None:
            struck.add(due.position)
            strike_coordinator(due, self._requests, step=step, record=self._record)

    def away_until_s(self, worker: int) -> float:
        """Tells when a worker's site is back that a fault has cut off, or was; 0 if none has."""
        return away_until_s(self._faults, read_fault_records(self._record), worker) if self._faults else 0.0

    def never_struck(self) -> list[str]:
        """Writes one line for each that has not struck."""
        return [
            f"--fault {fault} never struck: its worker was gone, or had no such action in step {fault.step} of this run"
            for fault in never_struck(self._faults, read_fault_records(self._record))
        ]


_log = logging.getLogger("elaswave.coordinator")


class JobDriver(MembersDriver):
    """Drives the machine of one job.

    Args:
        setup: what its process is started with.
    """

    def __init__(self, setup: CoordinatorSetup) -> None:
        self._setup = setup
        plan = setup.plan
        self._background = Background()
        """Planning, and looking for checkpoints."""
        claimed = setup.claimed
        self._store = open_store(
            plan.config.control,
            setup.job.run_dir,
            setup.job.control_dir,
            self._store_owner(),
            setup.keys.accepted[0],
            job=setup.job.name,
            term=None if claimed is None else claimed.term,
            job_generation=setup.job.job_generation,
        )
        if claimed is not None:
            claimed.lease_heartbeats.tell(self._call_on_loop(self._background.fail))
        records = self._records_by_own_clock()
        self._active_time = ActiveTime()
        """Nobody is silent, or away, in time in which this process does not run."""
        self._server: ControlServer[ToCoordinator] = ControlServer(history=self._store, now_s=self._active_s)
        self._terminal = Terminal(self._server)
        workers = plan.layout.workers
        labels = list(plan.config.hosts or ()) if plan.config.control.hosts > 1 else []
        domain_of = plan.layout.domain_of
        founders = [labels.index(domain_of[worker]) if labels else 0 for worker in workers]
        self._hosts = Hosts(founders, labels, home=setup.job.home)
        self._faults = CoordinatorFaults(setup.job.faults, setup.job.run_dir, self)
        self._events = EventLog(setup.job.run_dir / EVENTS_FILE, on_trouble=self._terminal.say_trouble)
        # A predecessor that died before its first record but the clock's leaves none: this one begins the run.
        self._recorder = RunRecorder(
            setup, self._store, self._events, self._terminal, records or None, self._tell_home, self._at_home
        )
        self._state = self._recorder.state
        self._data_waits = DataWaits()
        elastic = plan.config.elastic
        self._planner = RunPlanner(plan)
        self.core = Coordinator(
            InForce(plan.layout, plan.placement, plan.execution),
            blocks=plan.blocks,
            scatter_width=plan.scatter_width,
            bounds=Bounds(elastic.min_workers, elastic.max_failures_per_hour),
            restarts=self._planner.restarts,
            first_step=self._state.first_step,
            records=core_records(records),
        )
        terms, written = _terms_of(plan, setup.job.num_loaders), membership_records(records)
        agents = HostAgents(
            self._hosts,
            written,
            lambda incarnation: self._server.last_heartbeat_s(agent_id(incarnation)),
            now_s=self._active_s(),
            wait_s=terms.hosts_wait_s,
            is_local=not setup.job.name,
        )
        joiners = Joiners(terms, self._hosts, written, self._found, self._faults.away_until_s)
        self.membership = Membership(self.core, joiners, agents, terms, self._active_time)
        self._agents = Agents(
            agents,
            self._server.send,
            self._server.hang_up,
            spec=spec_of(setup),
            checkpoint=setup.checkpoint,
        )
        self.has_begun = any(isinstance(record, events.StartRecord | Decision) for record in records)
        """Whether all members have registered before: with an earlier coordinator."""
        self._knows_speeds = not self.has_begun
        """Whether the planner counts with the speeds that the layout in force was planned with; a new coordinator
        learns the layout from the first step."""
        self._asked_of_agents = Awaited(workers=())
        """The workers of whose processes the agents tell."""
        self._decisions = [record for record in records if isinstance(record, Decision)]
        self._recoveries = RecoveryReports(
            RecoveryLog(setup.job.run_dir, plan.config.run.steps),
            self._recorder,
            self._terminal,
            num_steps=plan.config.run.steps,
            coordinator_ends_s=self._ends_to_tell(),
        )
        self._suspected = ""
        """Why workers are held for lost, while the core hears of it."""
        self.detector = Detector(
            takes_over=self.has_begun,
            # The machine's own, not a copy: it enters there where joiners run.
            domains=self.core.domains,
            can_look=agents.can_look,
            held_up_s=self._held_up_s(),
            active_time=self._active_time,
        )
        self.unreachable = Unreachable()
        self._recovery_planning = RecoveryPlanning(
            self._planner, self._background, pause=self.detector.pause, answer=self.answer_plan
        )
        self._searches = LayoutSearches(
            self._planner,
            self.core,
            self._recorder,
            self._terminal,
            self._background,
            # Asked later: the end is made below, of parts that are made here.
            is_over=lambda: self._end.is_there,
            change=self.feed,
        )
        self._checkpoint_finder = CheckpointFinder(
            self.core,
            self._recorder.checkpoints,
            plan.config,
            setup.job.run_dir,
            begins_at_seed=self._state.first_step == 1,
            is_over=lambda: self._end.is_there,
            answer=self.answer_checkpoint,
        )
        job = JobParts(plan, self.core, self._state, self._recorder.checkpoints, self._planner)
        self._keys = KeyCommands(
            setup.keys,
            obstacle_to(plan.config.control.store, setup.job.network.listen, has_tls=setup.job.network.tls is not None),
            self._server,
            self._participants,
            self._key_retired,
        )
        self._operations = Operations(job, self, self._server, self._background, self._keys)
        self._operator_sessions = OperatorSessions(self._server, job, self._operations)
        self._end = JobEnd(
            self.core,
            self.membership,
            self._recorder,
            self._terminal,
            self._server,
            first_workers=workers,
            home=self._agents.home,
            tell_operators=self._operator_sessions.ended,
        )
        self._publishing = Publishing(self, self._recorder, self._recoveries, self._server)
        self._stop: Stop | None = None
        self._start: Start | None = None
        self.failures: dict[int, Failed] = {}
        self._watched: set[int] = set()
        """Workers for whose end a thread waits."""
        self._ticker: asyncio.Handle | None = None

    def _records_by_own_clock(self) -> list[JournalRecord]:
        """Returns what earlier coordinators have recorded; from here on what this one records is by its clock."""
        clock, now_s = clock_here(), time.monotonic()
        records = by_own_clock(self._store.records(), clock, now_s)
        # The first record of this coordinator: by it a successor reads the times of all that follow.
        self._store.add(ClockRead(clock=clock, at_s=now_s))
        return records

    def _ends_to_tell(self) -> tuple[float, ...]:
        """Ends of coordinators of which no one has told yet. Those of another host are not seen, but missed."""
        setup = self._setup
        if setup.job.name:
            return () if setup.lost_s is None else (setup.lost_s,)
        return setup.coordinator_ends_s[self._state.num_restarts :]

    def _call_on_loop(self, call: Callable[[Exception], None]) -> Callable[[Exception], None]:
        """Wraps a call for a thread."""
        loop = asyncio.get_running_loop()

        def hand_over(error: Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(call, error)

        return hand_over

    def _store_owner(self) -> Owner:
        """Describes what a store that works beside the event loop may do here."""
        loop, background = asyncio.get_running_loop(), self._background
        return Owner(
            post=lambda call: loop.call_soon_threadsafe(background.guarded, call),
            # Looked up when they are called: the store is opened before server and terminal are made.
            turn=lambda: self._server.keep_alive(),
            say=lambda text: self._terminal.say_trouble(text),
            broken=background.fail,
        )

    def _found(self, vector: bytes, environment: str) -> Founders:
        """Makes the founders of the first committed step. The data's facts stand in the run's folder by then."""
        plan = self._setup.plan
        return founders_of(plan, identity_of(plan, data_facts(self._setup.job.run_dir)), vector, environment)

    def _held_up_s(self) -> Callable[[int], float]:
        """Returns a function that tells for how long the link from a worker's site may hold back what it says."""
        config, labels = self._setup.plan.config, self.core.domains
        sites, delays_s = configured_sites(config), control_delays_s(config)
        if sites is None or not delays_s:
            return lambda worker: 0.0
        return lambda worker: delays_s[sites.site_of(worker, labels)]

    def _at_home(self) -> Collection[int]:
        """Finds the workers that are lost together with this coordinator, which nobody on another host follows."""
        config = self._setup.plan.config
        if config.control.hosts == 1 and config.sites.coordinator is not None:
            return [worker for worker, label in self.core.domains.items() if site_of(label) == config.sites.coordinator]
        host = self._hosts.find(self._setup.job.home) if self._setup.plan.config.control.hosts > 1 else None
        return () if host is None else host.workers

    def _tell_home(self, message: ToAgent) -> None:
        """Tells the agent of this host. Without a connection it is dropped; what it must know it is told when it has
        connected."""
        self._server.send(self._agents.home, message)

    def _participants(self) -> set[int]:
        """Collects all that take part in the job, as control connections name them."""
        return {*self.core.members, *self.membership.coming, *self._agents.present}

    def _key_retired(self) -> None:
        self._terminal.say("the job's key was changed (elaswave keys rotate): the old one is refused from now on")
        # All participants have said that they have the new key; whoever else is connected has still to show it.
        self._server.keep(self._participants())

    # ---------------------------------------------------------------------------------------------------------- effects

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carries out effects in their order."""
        super().carry_out(effects)
        self._publishing.tell_settled()

    def carry_out_one(self, effect: Effect) -> None:
        """Carries out one effect."""
        if isinstance(effect, events.CoordinatorEffect):
            self._setup.job.before_effect(effect)
        super().carry_out_one(effect)

    def now_s(self) -> float:
        """Reads the monotonic time of this machine."""
        return time.monotonic()

    def _active_s(self) -> float:
        """Counts the seconds for which this process has been awake."""
        return self._active_time.passed_s(time.monotonic())

    def persist(self, record: AnyRecord) -> None:
        """Writes a record into the journal."""
        # Not `add`: what the machine sends next must not be said before this is durable.
        self._store.append(record)

    def send(self, worker: int, message: CoreToWorker) -> None:
        """Sends a message over the control connection, if there is one."""
        self._server.send(worker, message)

    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """Tells the addresses as the start."""
        self._start = Start(addresses=addresses)
        self._server.send_all(self.core.members, self._start)

    def find_checkpoint(self, question: events.FindCheckpoint) -> None:
        """Finds a checkpoint in a thread: checksums of large files take longer than this process may be silent.

        They may also take longer than survivors may stand still: until the decision that is held against none of them.
        """
        self.detector.pause(time.monotonic())
        self._background.begin(self._checkpoint_finder.find(question))

    def on_new_generation(self, effect: events.NewGeneration) -> None:
        """Shows that workers were lost."""
        super().on_new_generation(effect)
        self._state.new_generation(effect.generation)
        for worker in effect.joined:
            self._watch(worker)
        for suspicion in effect.suspicions:
            _log.warning("generation %d: %s", effect.generation, suspicion.reason)
        if effect.unsound:
            self._terminal.say(f"{self.core.reason}; what is wrong is made good")
        self._operations.lost(suspicion.worker for suspicion in effect.suspicions)
        self._recoveries.new_generation(effect, time.monotonic())

    def on_decided(self, effect: events.Decided) -> None:
        """Shows how survivors go on."""
        decision = effect.decision
        self.detector.resume(time.monotonic())
        self._report_restart(time.monotonic())  # workers that were still missing are no members any more
        self._operations.decided(decision)
        self._recoveries.log.decided(decision, time.monotonic(), self._recovery_planning.took_s)
        self._recorder.decided(decision)
        if effect.predicted_step_s is not None:
            self._recorder.predicted(effect.predicted_step_s)
        if decision.rollback is not None:
            where = f"the job goes back to the checkpoint of step {decision.rollback}"
            self._terminal.say(
                f"{decision.reason}: {where if decision.rollback else 'the job begins again from the seed'}"
            )

    def on_resumed(self, effect: events.Resumed) -> None:
        """Shows that all members compute again."""
        self._recoveries.resumed(time.monotonic())
        super().on_resumed(effect)
        # First, since there is one search at a time: members that are to leave have a deadline.
        self._searches.plan_for_members()
        self._searches.look_for_better()

    def note(self, effect: events.Note) -> None:
        """Writes a line of the log."""
        _log.info("%s", effect.text)

    def on_end(self, effect: events.End) -> None:
        """Ends the job."""
        failure = None if effect.worker is None else self.failures.get(effect.worker)
        self._end.come(
            Ended(
                outcome="failed",
                reason=effect.reason + (f": {self._suspected}" if self._suspected else "") + self._recorder.advice(),
                worker=effect.worker,
                traceback_text="" if failure is None else failure.traceback_text,
            )
        )

    # -------------------------------------------------------------------------------------------------------- questions

    def plan_recovery(self, question: events.PlanRecovery) -> None:
        """Plans a recovery in the same turn if that is quick, else beside it, within a bound."""
        self._recovery_planning.plan(question)

    def pending_work(self, step: int, asked: bool) -> events.PendingWork:
        """Returns the pending work as the run's records have it."""
        return self._recorder.unfinished(step, asked)

    def ends(self) -> Mapping[int, MemberEnd]:
        """Returns the members' ends as the run's records have them."""
        return self._state.ends

    def published_step(self) -> int:
        """Returns the published step as the run's records have it."""
        return self._state.last_step

    def give_up_missing_parts(self) -> None:
        """Gives up missing parts, with a word to the workers."""
        self._publishing.give_up_missing_parts()

    def is_committing(self) -> bool:
        """Tells whether the committer has still to answer."""
        return self._recorder.checkpoints.is_committing

    def finish_if_complete(self) -> None:
        """Finishes once; see `FollowsRecords`."""
        if not self._end.is_there:
            self.end_if_finished()

    def fail_with(self, error: StateError) -> None:
        """Ends the job."""
        self._end.come(Ended(outcome="failed", reason=str(error), is_state_error=True))

    def on_finished(self) -> None:
        """Writes the result, and ends the job."""
        self._recoveries.flush()
        self._end.finish(self._setup.job.run_dir, self._faults.never_struck)

    # ------------------------------------------------------------------------------------------------------------ steps

    def after_step(self, message: StepReport) -> None:
        """Looks at what a published step says of layouts, and of what joiners must have in common."""
        self._planner.measurements.add_step(message)
        self.carry_out(self.membership.committed(message.vector, self._publishing.environment, time.monotonic()))
        change = self.core.change_in_force(message.change)
        if change is not None:
            self._recorder.changed(change, message.step + 1)
        if not self._knows_speeds:
            self._knows_speeds = True
            self._planner.take_over(self.core.in_force().execution)
        self._searches.predict_first()
        self._searches.plan_for_members()
        self._searches.look_for_better()
        self._faults.strike(message.step + 1)  # a step may be over before a heartbeat tells of it

    # ----------------------------------------------------------------------------------------------- comings and goings

    def leaves_were_asked(self) -> None:
        """Plans for the members as soon as members wait for nothing else."""
        self._searches.plan_for_members()

    def _drain_hopeless(self) -> None:
        """Has a worker leave that is too slow for any work, and was found so again and again."""
        core = self.core
        if not self.membership.may_drain:
            return
        worker = self._planner.costs_more_than_it_gives(core.in_force().layout, core.admissions.leaving)
        if worker is not None:
            self._terminal.say(
                f"worker {worker} leaves: it is too slow for any work, and was so in {TRIALS_MAX} trials; others hold "
                "its blocks from now on"
            )
            self.request_drain(worker)

    def stop_job(self, cause: str) -> None:
        """The agents deal with it as with a signal, and tell every later coordinator."""
        self._server.send_all(self._terminal.agents, StopAsked(cause=cause))
        self._stop_workers()

    def give_up_job(self, reason: str) -> None:
        """Another one may begin when the hosts are there."""
        self._end.come(Ended(outcome="failed", reason=reason, again=True))

    def _stop_workers(self) -> None:
        self.membership.stop()
        self._stop = Stop()
        self._operations.stopping()
        self._server.send_all(self.core.members, self._stop)
        if not self.membership.agents.is_complete:  # there is nobody whose step could be waited for
            ended = Ended(outcome="stopped", reason="stopped before all hosts had come: nothing was trained")
            asyncio.get_running_loop().call_soon(self._background.guarded, partial(self._end.come, ended))

    # -------------------------------------------------------------------------------------------------------- processes

    def _ask_agents(self) -> None:
        """Asks how the processes of workers get on that have not registered, have not said a word, or are silent; of
        none once all are heard."""
        self._asked_of_agents = self._of_interest()
        self._server.send_all(self._terminal.agents, self._asked_of_agents)

    def _of_interest(self) -> Awaited:
        awaited = {*self.detector.awaited, *self.membership.silent}
        return Awaited(workers=tuple(sorted(awaited)), silent=self.detector.quiet)

    def _watch(self, worker: int) -> None:
        """Waits for the end of a worker of this host in a thread; its agent's own news of it comes later."""
        if worker in self._watched:
            return
        self._watched.add(worker)
        ended = partial(self.worker_ended, worker, "has ended")
        deaths = self._setup.job.deaths
        assert deaths is not None
        call_at_end(deaths, worker, partial(self._background.guarded, ended))

    def worker_ended(self, worker: int, text: str) -> None:
        """Ends that are not told of yet may be of the same instant."""
        deaths = self._setup.job.deaths
        assert deaths is not None
        for other in self._watched.intersection(self.core.members) - {worker}:
            if deaths.has_ended(other):
                self.note_end(other, "has ended")
        super().worker_ended(worker, text)

    def not_admitted(self, worker: int, problem: str) -> None:
        """A person who has asked for it hears of it."""
        self._operations.not_admitted(worker, problem)

    def say(self, text: str) -> None:
        """Says a text on the terminals, and in this process's log."""
        _log.info("%s", text)
        self._terminal.say(text)

    def tell_agent(self, effect: AgentEffect) -> None:
        """Tells an agent over its control connection, if there is one."""
        self._agents.tell(effect)

    def last_heartbeat_s(self, worker: int) -> float | None:
        """Returns the time of a worker's last heartbeat as the server has it."""
        return self._server.last_heartbeat_s(worker)

    def step_s(self) -> float:
        """Returns the seconds of a step as the run's records have them."""
        return self._state.step_s

    @property
    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self._end.is_there

    def _report_restart(self, now_s: float) -> None:
        """Says that this coordinator follows others, once all members have found it."""
        if set(self._server.peers) >= set(self.core.members):
            self._recoveries.coordinator_found(now_s, self.core.generation)

    # ------------------------------------------------------------------------------------------------------------ hosts

    def _look_at_quiet_hosts(self, now_s: float) -> None:
        """Asks the kernel whether those of hosts that are silent still acknowledge."""
        for host, workers in self.detector.quiet_hosts.items():
            peers = self._agents.peers_beside(workers)
            if peers:
                self.detector.looked_at_host(host, self._server.look(peers), now_s)

    # ------------------------------------------------------------------------------------------------------------- time

    def _tick(self) -> None:
        """Asks the machines what is due, and when to ask again."""
        now_s, next_s = time.monotonic(), self.look()
        self._publishing.tick(now_s)
        self._operator_sessions.turn()
        for excuse in self.detector.take_excuses():
            _log.info("%s", excuse)
        if self._asked_of_agents != self._of_interest():
            self._ask_agents()
        self._look_at_quiet_hosts(now_s)
        next_s = min(next_s, next_heartbeat_s(now_s, TICK_S))  # when heartbeats come, to wake once for both
        wait_s = max(0.005, min(0.2, next_s - now_s))
        self._ticker = asyncio.get_running_loop().call_later(wait_s, self._background.guarded, self._tick)

    def look_soon(self) -> None:
        """Looks as soon as all that has come is read, and then as before: who is lost at one instant is lost together,
        in one new generation."""
        # Else there would be one more chain of ticks from now on.
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = asyncio.get_running_loop().call_soon(self._background.guarded, self._tick)

    def suspect(self, suspicions: Sequence[Suspicion]) -> None:
        """Tells the core; if the job ends with that, people are told why."""
        self._suspected = "; ".join(each.reason for each in suspicions)
        super().suspect(suspicions)
        self._suspected = ""


def _terms_of(plan: RunPlan, num_loaders: int) -> MembershipTerms:
    elastic, control = plan.config.elastic, plan.config.control
    return MembershipTerms(
        layout=plan.layout,
        labels=tuple(plan.config.hosts or dict.fromkeys(plan.layout.domain_of.values())),
        respawns=elastic.respawns,
        layer_names=tuple(plan.state.layer_names),
        drain_deadline_s=elastic.drain_deadline_s,
        workers_min=elastic.min_workers,
        workers_max=workers_max(num_loaders),
        hosts_wait_s=control.hosts_wait_s,
    )


def founders_of(plan: RunPlan, identity: Identity, vector: bytes, environment: str) -> Founders:
    """Collects what all workers of a job have in common.

    Args:
        plan: of the run.
        identity: of those that begin.
        vector: of their first merged vote.
        environment: of one of them, for people.
    """
    determinism_hashes = determinism_hashes_in(
        decode_certificate(vector),
        num_layers=plan.state.num_layers,
        num_tensors=len(plan.tensors),
        num_buffers=sum(tensor.is_buffer for tensor in plan.tensors),
    )
    return Founders(
        protocol=PROTOCOL_VERSION,
        libraries=identity.libraries,
        environment=environment,
        config_hash=identity.config_hash,
        model_hash=identity.model_hash,
        data_hash=identity.data_hash,
        foreign=plan.config.model.foreign,
        determinism_hashes=dict(determinism_hashes),
    )
