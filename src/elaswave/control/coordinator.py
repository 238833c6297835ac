"""The coordinator's process: the machine, the detector and the recorder on an asyncio control server.

Training does not need it between events. It persists what it decides before it says so; when it dies, the agent starts
another one, which reads the journal and goes on where this one stood.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from elaswave.control.agent_messages import (
    AgentHello,
    Awaited,
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    CpuTimes,
    Ended,
    EndJoiner,
    Exited,
    SpawnJoiner,
    StepLosses,
    StopAsked,
    StopJob,
    ToCoordinator,
)
from elaswave.control.asked_members import AskedMembers
from elaswave.control.background import Background, call_at_end, in_thread
from elaswave.control.clocks import by_own_clock
from elaswave.control.coordinator_setup import CoordinatorSetup
from elaswave.control.data_waits import DataWaits
from elaswave.control.descriptors import workers_max
from elaswave.control.job_status import JobParts
from elaswave.control.joiners import Joiners
from elaswave.control.journal import ClockRead, JournalRecord, core_records
from elaswave.control.membership import Membership
from elaswave.control.open_store import open_store
from elaswave.control.operations import Operations
from elaswave.control.operator_desk import OperatorDesk
from elaswave.control.operator_messages import FromOperator
from elaswave.control.own_faults import OwnFaults
from elaswave.control.recorder import RunRecorder
from elaswave.control.recoveries import RecoveryLog
from elaswave.control.recovery_reports import RecoveryReports
from elaswave.control.run_planner import LayoutSearch, RunPlanner
from elaswave.control.server import ControlServer
from elaswave.control.store import Owner
from elaswave.control.terminal import AGENT, Terminal
from elaswave.control.wire import is_operator
from elaswave.errors import ElaswaveError, RunFolderError, StateError, SupersededError
from elaswave.observability.clock import clock_here
from elaswave.observability.events import EventLog
from elaswave.observability.result import EVENTS_FILE, write_digests, write_result
from elaswave.observability.run_folder import data_facts
from elaswave.protocol import events
from elaswave.protocol.coordinator import Bounds, Coordinator
from elaswave.protocol.coordinator_table import State
from elaswave.protocol.detection import Detector, Position, Suspicion
from elaswave.protocol.driver import CoordinatorDriver
from elaswave.protocol.ending import MemberEnd
from elaswave.protocol.history import InForce
from elaswave.protocol.messages import (
    CoreToWorker,
    Decision,
    Evidence,
    Installed,
    Joining,
    Linked,
    Paused,
    Registered,
    Report,
)
from elaswave.state.checkpoint import find_newest_checkpoint, put_aside
from elaswave.worker.identity import identity_of
from elaswave.worker.messages import (
    EvaluationReport,
    Exit,
    Failed,
    Finished,
    Heartbeat,
    Leaving,
    LinkLost,
    Ready,
    Settled,
    ShardFailed,
    ShardWritten,
    Start,
    StepReport,
    Stop,
    Timings,
)

LINGER_S = 5.0
"""After the end, how long workers and agent may take to hear of it."""
SWITCH_INTERVAL_S = 0.001
"""How long a planning thread may hold the interpreter while a message waits."""

PLAN_TIMEOUT_S = 10.0
"""Within this time a recovery must be planned; else survivors keep their stages (P4)."""

_log = logging.getLogger("elaswave.control")


class CoordinatorProcess(CoordinatorDriver):
    """One coordinator, from its start to the end of the job.

    Args:
        setup: what it is started with.
    """

    def __init__(self, setup: CoordinatorSetup) -> None:
        self._setup = setup
        plan = setup.plan
        self._background = Background()
        """Planning, and looking for checkpoints."""
        self._store = open_store(plan.config.control, setup.run_dir, setup.control_dir, self._store_owner())
        records = self._records_by_own_clock()
        self._server: ControlServer[ToCoordinator] = ControlServer(when_durable=self._store.when_durable)
        self._terminal = Terminal(self._server)
        self._joiners = Joiners(
            plan,
            lambda: identity_of(plan, data_facts(setup.run_dir)),
            records,
            self._store.append,
            self._terminal.say,
        )
        self._environment = ""
        """What a member computes with, for people."""
        self._events = EventLog(setup.run_dir / EVENTS_FILE, on_trouble=self._terminal.say_trouble)
        self._recorder = RunRecorder(
            plan,
            setup.sampler,
            setup.run_dir,
            checkpoint=setup.checkpoint,
            store=self._store,
            events=self._events,
            terminal=self._terminal,
            records=records or None,
            commit=self._ask_to_commit,
            break_off=self._ask_to_break_off,
            started_s=setup.started_s,
        )
        self._state = self._recorder.state
        self._data_waits = DataWaits()
        elastic = plan.config.elastic
        self._planner = RunPlanner(plan)
        self.core = Coordinator(
            layout=plan.layout,
            placement=plan.placement,
            blocks=plan.blocks,
            num_followers=elastic.num_followers,
            scatter_width=plan.scatter_width,
            bounds=Bounds(elastic.min_workers, elastic.max_failures_per_hour),
            restarts=self._planner.restarts,
            first_step=self._state.first_step,
            records=core_records(records),
            execution=plan.execution,
        )
        self._membership = Membership(
            self.core,
            self._joiners,
            feed=self.feed,
            suspect=self._take_suspicions,
            spawn=lambda worker: self._server.send(AGENT, SpawnJoiner(worker=worker)),
            end=lambda worker: self._server.send(AGENT, EndJoiner(worker=worker)),
            send=self.send,
            say=self._terminal.say,
            drain_deadline_s=elastic.drain_deadline_s,
            workers_max=workers_max(setup.num_loaders),
            refused=lambda worker, problem: self._operations.not_admitted(worker, problem),
        )
        self._has_begun = any(isinstance(record, events.StartRecord | Decision) for record in records)
        """Whether all members have registered before: with an earlier coordinator."""
        self._knows_speeds = not self._has_begun
        """Whether the planner counts with the speeds that the layout in force was planned with; a new coordinator
        learns the layout from the first step."""
        self._asked_of_agent: tuple[int, ...] = ()
        """The workers of whose processes the agent tells."""
        self._decisions = [record for record in records if isinstance(record, Decision)]
        self._recoveries = RecoveryReports(
            RecoveryLog(setup.run_dir, plan.config.run.steps),
            self._recorder,
            self._terminal,
            num_steps=plan.config.run.steps,
            coordinator_ends_s=setup.coordinator_ends_s[self._state.num_restarts :],
        )
        self._faults = OwnFaults(setup.faults, setup.run_dir, self)
        self._detector = Detector(takes_over=self._has_begun)
        self._asked_planner_s = 0.0
        """When the newest recovery began to be planned."""
        self._plan_s = 0.0
        """How long that took."""
        self._is_searching = False
        """Whether a better layout is looked for."""
        job = JobParts(plan, self.core, self._state, self._recorder.checkpoints, self._planner)
        self._operations = Operations(
            job,
            send_all=self._server.send_all,
            stop=partial(self._stop_job, "elaswave ctl stop"),
            begin=self._background.begin,
            change=self.feed,
            members=AskedMembers(
                job,
                self.request_join,
                self.request_drain,
                lambda: self._membership.joining,
            ),
        )
        self._desk = OperatorDesk(self._server, job, self._operations)
        self._stop: Stop | None = None
        self._start: Start | None = None
        self._failures: dict[int, Failed] = {}
        self._leaving: set[int] = set()
        """Workers that have had a notice."""
        self._watched: set[int] = set()
        """Workers for whose end a thread waits."""
        self._over = asyncio.Event()
        self._ended: Ended | None = None
        self._informed: set[int] = set()
        """Who has been told of the end, or has ended itself."""
        self._ticker: asyncio.TimerHandle | None = None

    def _records_by_own_clock(self) -> list[JournalRecord]:
        """What earlier coordinators have recorded; from here on what this one records is by its clock."""
        clock, now_s = clock_here(), time.monotonic()
        records = by_own_clock(self._store.records(), clock, now_s)
        self._store.add(ClockRead(clock=clock, at_s=now_s))
        return records

    def _store_owner(self) -> Owner:
        """What a store that works beside the event loop may do here."""
        loop, background = asyncio.get_running_loop(), self._background
        return Owner(
            post=lambda call: loop.call_soon_threadsafe(background.guarded, call),
            turn=lambda: self._server.keep_alive(),
            say=lambda text: self._terminal.say_trouble(text),
            broken=background.fail,
        )

    # ------------------------------------------------------------------------------------------------------- planning

    def plan_recovery(self, question: events.PlanRecovery) -> None:
        """In the same turn if that is quick, else beside it, within a bound."""
        now_s = self._asked_planner_s = time.monotonic()
        plan = self._planner.recovery(question)
        if self._planner.is_quick(question):
            self._answer(question, _result_of(plan))
        else:
            self._detector.pause(now_s)
            self._background.begin(self._plan_slowly(question, plan))

    async def _plan_slowly(self, question: events.PlanRecovery, plan: Callable[[], events.RecoveryPlan]) -> None:
        try:
            answer = await asyncio.wait_for(in_thread(lambda: _result_of(plan)), PLAN_TIMEOUT_S)
        except TimeoutError:
            answer = f"no recovery is planned within {PLAN_TIMEOUT_S:g} s"
        self._answer(question, answer)

    def _answer(self, question: events.PlanRecovery, plan: events.RecoveryPlan | str) -> None:
        self._plan_s = time.monotonic() - self._asked_planner_s
        self.answer_plan(question, plan)

    def pending_work(self, step: int, asked: bool) -> events.PendingWork:
        """As the run's records have it."""
        return self._recorder.unfinished(step, asked)

    def _predict_first(self) -> None:
        """Begins to predict the step of the first layout, once, as soon as costs are known."""
        if self.core.decision is None and not self._is_searching:
            self._begin_search(self._planner.first_prediction())

    def _look_for_better(self) -> None:
        """Begins to plan a better layout, once after every decision, as soon as the members compute again and costs are
        known. Planning takes no part of the recovery: a thread does it."""
        decision, core = self.core.decision, self.core
        if decision is None or not self._may_search():
            return
        if core.epoch == decision.epoch and not core.has_planned:
            self._begin_search(self._planner.search(decision, self._state.layout_before(decision.epoch)))

    def _rebalance(self) -> None:
        """Begins to plan again if workers have become slower or faster, while no other change is under way."""
        if self._may_search() and not self.core.is_changing:
            before = self.core.in_force()
            self._begin_search(self._planner.rebalance(before.layout, before.execution))

    def _plan_for_members(self) -> None:
        """Begins to plan a layout in which members that are to leave are idle, and others are not."""
        core = self.core
        if self._may_search() and not core.is_changing and not core.admissions.is_asked:
            self._begin_search(self._planner.for_members(core.in_force(), core.admissions.leaving))

    def _may_search(self) -> bool:
        return not self._is_searching and self._ended is None and self.core.state is State.TRAINING

    def _begin_search(self, search: Callable[[], LayoutSearch] | None) -> None:
        if search is not None:
            self._is_searching = True
            self._background.begin(self._search(self.core.epoch, self.core.in_force(), search))

    async def _search(self, epoch: int, before: InForce, search: Callable[[], LayoutSearch]) -> None:
        """Looks for a better layout than what is in force, and has all members change to it. A job can go on without
        one."""

        def find() -> tuple[LayoutSearch, events.ChangePlanned | None]:
            found = search()
            return found, None if found.better is None else self._planner.change(found.better, epoch, before)

        try:
            found, change = await in_thread(find)
        except Exception:
            _log.exception("planning has failed; the layout stays as it is")
            return
        finally:
            self._is_searching = False
        core = self.core
        if (
            (core.epoch, core.in_force().change) != (epoch, before.change)
            or core.is_changing
            or self._ended is not None
        ):
            return
        self._recorder.predicted(found.predicted_step_s)
        if found.news:
            self._terminal.say(found.news)
        if change is not None:
            self.feed(change)

    # -------------------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Serves until the job is over."""
        await self._server.start(
            self._setup.listen,
            self._setup.key,
            ToCoordinator,
            self._on_message,
            self._on_connected,
            self._on_closed,
            tls=self._setup.tls,
            on_refused=lambda reason: _log.warning("refused: %s", reason),
        )
        serving = asyncio.ensure_future(self._server.serve())
        failure: ElaswaveError | None = None
        try:
            try:
                self._begin_or_take_over()
                over = asyncio.ensure_future(self._over.wait())
                ends: list[asyncio.Future[Any]] = [over, serving, self._background.broken]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
                for ended in (serving, self._background.broken):
                    if ended.done():
                        ended.result()
            except SupersededError:
                raise  # another coordinator speaks for the job
            except ElaswaveError as error:
                # Something that a successor would meet too, such as a journal that takes no more records.
                failure = error
                self._end(Ended(outcome="failed", reason=str(error)), write=False)
            deadline_s = time.monotonic() + LINGER_S
            while not self._all_know() and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
            if failure is not None:
                raise failure
        finally:
            if self._ticker is not None:
                self._ticker.cancel()
            await self._background.close()
            await self._server.close()
            serving.cancel()
            self._events.close()
            self._store.close()

    def _begin_or_take_over(self) -> None:
        """Begins the job, or goes on where earlier coordinators stood."""
        if self._state.outcome is not None:
            # An earlier coordinator has ended the job and died before it could tell all members.
            outcome = "stopped" if self._state.outcome == "interrupted" else self._state.outcome
            self._end(Ended(outcome=outcome, reason=self._state.reason), write=False)
        if self.core.state is not State.STARTING:
            self._recorder.catch_up(self.core.epoch, self.core.decision)
            undecided = self.core.undecided if self.core.state is State.COLLECTING else None
            self._recoveries.restore(self._decisions, undecided, time.monotonic())
        for worker in self.core.members:
            if self._has_begun:
                # A member that does not find this coordinator is lost, however it was to its predecessors.
                self._detector.joined(worker, time.monotonic())
            else:
                self._detector.expect(worker, time.monotonic())
        self._membership.take_over(time.monotonic())
        self.carry_out(self.core.begin())
        self._tick()

    def _all_know(self) -> bool:
        """Whether all have heard of the end and are gone. A new coordinator may first have to be found by them."""
        return all(map(is_operator, self._server.peers)) and self._informed >= {AGENT, *self.core.members}

    def _on_connected(self, peer: int) -> None:
        if is_operator(peer):
            self._desk.connected(peer)
            return
        if peer == AGENT:
            self._terminal.agent_came()
            self._membership.spawn_again()
            self._ask_agent()
        if self._ended is not None:
            self._server.send(peer, self._ended if peer == AGENT else Exit())
            self._informed.add(peer)

    def _on_closed(self, peer: int) -> None:
        if is_operator(peer):
            self._desk.closed(peer)
        elif peer != AGENT:
            self._detector.disconnected(peer, time.monotonic())

    def _ask_agent(self) -> None:
        """Asks how the processes of workers get on that have not registered, or have not said a word; of none once all
        have."""
        self._asked_of_agent = tuple(sorted({*self._detector.awaited, *self._membership.silent}))
        self._server.send(AGENT, Awaited(workers=self._asked_of_agent))

    def _tick(self) -> None:
        """Asks the detector whom it suspects, and when to ask again."""
        now_s = time.monotonic()
        self._take_suspicions(self._detector.tick(now_s))
        has_given_up = self._recorder.checkpoints.tick(now_s)
        self._tell_settled()
        if has_given_up:
            self._finish_if_complete()
        self._desk.turn()
        if set(self._asked_of_agent) != {*self._detector.awaited, *self._membership.silent}:
            self._ask_agent()
        next_s = min(self._detector.next_tick_s(now_s), self._membership.tick(now_s, self._state.step_s))
        wait_s = max(0.005, min(0.2, next_s - now_s))
        self._ticker = asyncio.get_running_loop().call_later(wait_s, self._background.guarded, self._tick)

    def _take_suspicions(self, suspicions: Sequence[Suspicion]) -> None:
        if suspicions and self._ended is None:
            self.suspect(suspicions)

    # ------------------------------------------------------------------------------------------------------- messages

    def _on_message(self, peer: int, message: ToCoordinator) -> None:
        now_s = time.monotonic()
        if is_operator(peer) or isinstance(message, FromOperator):
            self._desk.received(peer, message)
        elif isinstance(message, AgentHello | Exited | StopJob | CpuTimes | CheckpointCommitted):
            if peer == AGENT:
                self._on_agent(message)
        elif message.worker != peer:
            _log.warning("worker %d says that it is worker %d; its %s is ignored", peer, message.worker, type(message))
        elif isinstance(message, Joining):
            if self._ended is None:
                self._on_joining(message, now_s)
        elif isinstance(message, StepReport) and self._ended is None:
            self._on_step(message, now_s)
        elif isinstance(message, Leaving) and self._ended is None and self._membership.withdraws(message.worker):
            return
        elif self._ended is None and not isinstance(message, Failed | Linked) and not self.hears(message.worker):
            _log.info("%s of worker %d, which is no member, does not count", type(message).__name__, message.worker)
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(message, now_s)
        elif isinstance(message, Registered):
            self._on_registered(message, now_s)
        elif isinstance(message, Linked | Paused):
            self.feed(message)
        elif isinstance(message, Report | Installed):
            if isinstance(message, Installed):
                self._recoveries.log.installed(message)
            self.feed(message)
        elif isinstance(message, LinkLost):
            if self.core.believes(message.worker, message.peer, message.epoch):
                self._detector.link_lost(message.worker, message.peer, now_s)
                self._tick_soon()
        elif isinstance(message, Leaving):
            self._on_leaving(message, now_s)
        elif isinstance(message, Failed):
            if self._membership.failed(message.worker, message.summary):
                return
            self._failures[message.worker] = message
            self._detector.left(message.worker)
            self.feed(events.WorkerFailed(message.worker, message.signature, message.summary))
        elif self._ended is not None:
            _log.info("%s of worker %d comes after the end", type(message).__name__, message.worker)
        elif isinstance(message, Timings):
            if (slow := self._data_waits.add(message)) is not None:
                self._terminal.say(slow)
            self._recorder.timings(message.step, self._planner.measurements.add(message, self.core.members))
            self._rebalance()
        else:
            self._to_recorder(message, now_s)

    def _on_leaving(self, message: Leaving, now_s: float) -> None:
        """A worker has had a notice. A job that is stopping, or over, lets it go anyway."""
        if self._ended is not None or self._stop is not None:
            return
        left_s = max(0.0, message.left_s - self._server.age_s)
        if message.worker not in self._leaving:
            self._leaving.add(message.worker)
            self._terminal.say(
                f"worker {message.worker} has had a notice that its machine will be taken away (SIGTERM): it leaves "
                f"within {left_s:.0f} s"
            )
            self.request_drain(message.worker, left_s)

    def _tick_soon(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._tick()

    def _on_agent(self, message: AgentHello | Exited | StopJob | CpuTimes | CheckpointCommitted) -> None:
        if isinstance(message, AgentHello):
            for exited in message.exited:
                self._on_end_of_process(exited.worker, exited.text)
            losses = self._state.losses[message.called_step :]
            if losses:
                first, metrics = message.called_step + 1, self._state.metrics
                told = [dict(metrics.get(step, {})) for step in range(first, first + len(losses))]
                self._server.send(AGENT, StepLosses(first_step=first, losses=losses, metrics=told))
            if message.stop:
                self._stop_workers()
            self._recorder.checkpoints.ask_again()
        elif isinstance(message, CpuTimes):
            for worker, cpu_s in message.cpu_s.items():
                self._detector.used(worker, cpu_s, time.monotonic())
                self._membership.used(worker, cpu_s, time.monotonic())
        elif isinstance(message, CheckpointCommitted):
            self._on_committed(message)
        elif isinstance(message, Exited):
            _log.info("worker %d %s", message.worker, message.text)
            self._on_end_of_process(message.worker, message.text)
        else:
            self._stop_workers()

    def _stop_job(self, cause: str) -> None:
        """The agent deals with it as with a signal, and tells every later coordinator."""
        self._server.send(AGENT, StopAsked(cause=cause))
        self._stop_workers()

    def _stop_workers(self) -> None:
        self._membership.stop()
        self._stop = Stop()
        self._operations.stopping()
        self._server.send_all(self.core.members, self._stop)

    def _watch(self, worker: int) -> None:
        """Waits for a worker's end in a thread; the agent's own news of it comes later."""
        if worker in self._watched:
            return
        self._watched.add(worker)
        ended = partial(self._on_end_of_process, worker, "has ended")
        call_at_end(self._setup.deaths, worker, partial(self._background.guarded, ended))

    def _on_end_of_process(self, worker: int, text: str) -> None:
        self._membership.ended(worker, time.monotonic())
        self._operations.not_admitted(worker, f"its process {text}")
        if worker in self.core.members and self._ended is None and worker not in self._failures:
            self._detector.exited(worker, text, time.monotonic())
            self._tick_soon()

    def _on_registered(self, message: Registered, now_s: float) -> None:
        worker = message.worker
        if worker in self.core.members:
            self._detector.joined(worker, now_s)
            self._watch(worker)
        if self._ended is not None:
            return
        self.feed(message)
        if self._start is not None and worker in self.core.members and self.core.decision is None:
            self._server.send(worker, self._start)  # one that trains already takes no notice
        if self._stop is not None:
            self._server.send(worker, self._stop)
        self._operations.registered(worker)
        self._report_restart(now_s)

    def _on_joining(self, message: Joining, now_s: float) -> None:
        if message.worker in self.core.members:  # it has not heard yet that it is a member
            registered = Registered(worker=message.worker, address=message.address, epoch=0, report=None)
            self._on_registered(registered, now_s)
        else:
            self._membership.heard(message, now_s)

    def _report_restart(self, now_s: float) -> None:
        """Says that this coordinator follows others, once all members have found it."""
        if set(self._server.peers) >= set(self.core.members):
            self._recoveries.coordinator_found(now_s, self.core.epoch)

    def _on_heartbeat(self, message: Heartbeat, now_s: float) -> None:
        if message.worker not in self.core.members:
            return
        position = Position(
            epoch=message.epoch,
            step=message.step,
            attempt=message.attempt,
            label=message.label,
            computing=message.computing,
            waiting_on=message.waiting_on,
            since_s=message.since_s,
        )
        self._detector.heartbeat(message.worker, position, now_s)
        self._desk.heard(message)
        self._recoveries.log.seen(message.worker, position)
        self._faults.strike(message.step)

    def _on_step(self, message: StepReport, now_s: float) -> None:
        evidence = Evidence(
            step=message.step,
            attempt=message.attempt,
            commits=True,
            vector=message.vector,
            change=message.change,
            checkpoint=message.checkpoint,
        )
        if self.hears_vote(message.worker, evidence, message.epoch) and self._ended is None:
            self._operations.committed(message)
            self._to_recorder(message, now_s)

    def _to_recorder(
        self,
        message: Ready | StepReport | EvaluationReport | ShardWritten | ShardFailed | Finished,
        now_s: float,
    ) -> None:
        try:
            if isinstance(message, Ready):
                self._environment = message.environment
                self._recorder.ready(message)
            elif isinstance(message, StepReport):
                # By its own clock: a worker tells only how long ago it was.
                finished_s = now_s - self._server.age_s - message.ago_s
                self._recoveries.committed(message, finished_s)
                if self._recorder.step(message, finished_s):
                    self._planner.measurements.add_step(message)
                    self._after_step(message)
                    self._faults.strike(message.step + 1)  # a step may be over before a heartbeat tells of it
            elif isinstance(message, EvaluationReport):
                self._recorder.evaluation(message)
            elif isinstance(message, ShardWritten | ShardFailed):
                self._recorder.checkpoints.part(message)
                step = message.standing.step if isinstance(message, ShardWritten) else message.step
                if self._recorder.is_settled(step):
                    self._server.send(message.worker, Settled(step=step))
            else:
                self._joiners.stop()
                self._recorder.finish(message)
            self._tell_settled()
            self._finish_if_complete()
        except StateError as error:
            self._end(Ended(outcome="failed", reason=str(error), is_state_error=True))

    def _ask_to_commit(self, number: int, request: bytes) -> None:
        """Without an agent it is asked when one has connected."""
        self._server.send(AGENT, CommitCheckpoint(number=number, request=request))

    def _ask_to_break_off(self, number: int) -> None:
        self._server.send(AGENT, BreakOffCommit(number=number))

    def _on_committed(self, message: CheckpointCommitted) -> None:
        if self._ended is not None:
            return
        try:
            self._recorder.checkpoints.committed(message.number, message.error, again=message.again)
            self._tell_settled()
            self._finish_if_complete()
        except StateError as error:
            self._end(Ended(outcome="failed", reason=str(error), is_state_error=True))

    def _tell_settled(self) -> None:
        """Checkpoints are durable or given up: no worker need say again what became of its parts."""
        steps, self._recorder.settled[:] = tuple(self._recorder.settled), []
        for step in steps:
            self._server.send_all(self.core.members, Settled(step=step))

    def _after_step(self, message: StepReport) -> None:
        """Looks at what a published step says of layouts, and of what joiners must have in common."""
        answers = self._joiners.committed(self.core.members, message.vector, self._environment)
        self._membership.answer(answers, time.monotonic())
        change = self.core.change_in_force(message.change)
        if change is not None:
            self._recorder.changed(change, message.step + 1)
        if not self._knows_speeds:
            self._knows_speeds = True
            self._planner.take_over(self.core.in_force().execution)
        self._predict_first()
        self._plan_for_members()
        self._look_for_better()

    def ends(self) -> Mapping[int, MemberEnd]:
        """As the run's records have it."""
        return self._state.ends

    def published_step(self) -> int:
        """As the run's records have it."""
        return self._state.last_step

    def give_up_missing_parts(self) -> None:
        """With a word to the workers."""
        self._recorder.checkpoints.end()
        self._tell_settled()

    def is_committing(self) -> bool:
        """Whether the committer has still to answer."""
        return self._recorder.checkpoints.is_committing

    def _finish_if_complete(self) -> None:
        if self._ended is None:
            self.end_if_finished()

    def on_finished(self) -> None:
        """Writes the result, and ends the job."""
        self._recoveries.flush()
        if self._state.was_stopped:
            self._end(Ended(outcome="stopped", reason=f"stopped after step {self._state.last_step}"))
            return
        result, digests = self._recorder.result()
        try:
            write_digests(self._setup.run_dir, digests)
            write_result(self._setup.run_dir, result)
        except RunFolderError as error:
            what = f"all {result.steps} steps are trained, but their result cannot be written: {error}"
            self._end(Ended(outcome="failed", reason=what + self._recorder.advice()))
            return
        for line in self._faults.never_struck():
            self._terminal.say(line)
        self._end(Ended(outcome="finished"))

    def _end(self, ended: Ended, *, write: bool = True) -> None:
        """The job is over: all processes may end."""
        if self._ended is not None:
            return
        self._joiners.stop()
        lost_workers = sorted({*self._setup.plan.layout.workers, *self._joiners.started} - set(self.core.members))
        self._ended = msgspec.structs.replace(ended, lost=lost_workers)
        if write:
            outcome: Literal["finished", "failed", "interrupted"] = "failed"
            if ended.outcome == "finished":
                outcome = "finished"
            elif ended.outcome == "stopped":
                outcome = "interrupted"
            else:
                self._recorder.error(ended.reason, ended.worker, ended.traceback_text)
            self._recorder.close(outcome, ended.reason)
            if self._events.num_lost:
                self._terminal.say_trouble(
                    f"{self._events.path} lacks the last {self._events.num_lost} events of the run"
                )
        self._desk.ended(ended.outcome, ended.reason)
        for peer in self._server.peers:
            if not is_operator(peer):
                self._server.send(peer, self._ended if peer == AGENT else Exit())
                self._informed.add(peer)
        self._over.set()

    # --------------------------------------------------------------------------------------------------------- joiners

    def request_join(self, count: int, request: int = 0) -> list[int] | str:
        """Has workers started that join, beside those that the job aims at; returns their ids, or why there are none.

        Args:
            count: how many.
            request: of a person, as of `Joiners.request`.
        """
        return self._membership.join(count, time.monotonic(), request)

    def request_drain(self, worker: int, deadline_s: float | None = None) -> None:
        """Has a worker leave.

        Args:
            worker: its id.
            deadline_s: seconds after which it is lost; None: elastic.drain_deadline_s.
        """
        self._membership.leave(worker, deadline_s, time.monotonic())
        self._plan_for_members()
        self._stop_if_none_stay()

    def _stop_if_none_stay(self) -> None:
        """A job whose members are all to leave ends, with a checkpoint, before their time is over."""
        going = self.core.admissions.leaving.intersection(self.core.members)
        needed = max(1, self._setup.plan.config.elastic.min_workers)
        if going and len(self.core.members) - len(going) < needed and self._stop is None and self._ended is None:
            who = "all workers are" if len(going) == len(self.core.members) else f"workers {_named(going)} are"
            self._stop_job(f"{who} to leave, and the job needs {needed}")

    # --------------------------------------------------------------------------------------------------------- effects

    def carry_out(self, effects: Sequence[events.CoordinatorEffect]) -> None:
        """Carries out effects in their order."""
        super().carry_out(effects)
        self._tell_settled()

    def carry_out_one(self, effect: events.CoordinatorEffect) -> None:
        """Carries out one effect."""
        self._setup.before_effect(effect)
        super().carry_out_one(effect)

    def now_s(self) -> float:
        """Monotonic time of this machine."""
        return time.monotonic()

    def persist(self, record: events.Record) -> None:
        """Into the journal."""
        self._store.append(record)

    def send(self, worker: int, message: CoreToWorker) -> None:
        """Over the control connection, if there is one."""
        self._server.send(worker, message)

    def tell_addresses(self, addresses: dict[int, str]) -> None:
        """As the start."""
        self._start = Start(addresses=addresses)
        self._server.send_all(self.core.members, self._start)

    def find_checkpoint(self, question: events.FindCheckpoint) -> None:
        """In a thread: checksums of large files take longer than this process may be silent.

        They may also take longer than survivors may stand still: until the decision that is held against none of them.
        """
        self._detector.pause(time.monotonic())
        self._background.begin(self._find_checkpoint(question))

    async def _find_checkpoint(self, question: events.FindCheckpoint) -> None:
        """Looks for the newest checkpoint; under a policy of restarting only when a restart would have got there."""
        restarts = self.core.restarts
        if restarts:
            await asyncio.sleep(self._setup.plan.config.elastic.restart_s)
        checkpoints = self._recorder.checkpoints
        known: object = None
        while known != checkpoints.records or checkpoints.is_committing:  # a newer one may be completed meanwhile
            while checkpoints.is_committing:
                await asyncio.sleep(0.01)
            known = list(checkpoints.records)
            search = await asyncio.to_thread(find_newest_checkpoint, self._setup.run_dir)
            if not self.core.awaits(question) or self._ended is not None:
                return  # another search follows, or none; what this one has found damaged may have been replaced since
        checkpoints.hold()
        put_aside(search)
        newest = search.newest
        step = None if newest is None else newest.step
        if step is None and restarts and self._state.first_step == 1:
            step = 0  # from the seed, as a job without a checkpoint begins again
        self.answer_checkpoint(question, step)

    def on_new_epoch(self, effect: events.NewEpoch) -> None:
        """Shows that workers were lost."""
        now_s = time.monotonic()
        self._detector.new_epoch(now_s)
        self._state.new_epoch(effect.epoch)
        for worker in effect.joined:
            self._detector.joined(worker, now_s)
            self._watch(worker)
        for worker in effect.left:
            self._detector.left(worker)
        for suspicion in effect.suspicions:
            self._detector.left(suspicion.worker)
            _log.warning("epoch %d: %s", effect.epoch, suspicion.reason)
        self._membership.new_epoch(effect, now_s)
        self._operations.lost(suspicion.worker for suspicion in effect.suspicions)
        self._recoveries.new_epoch(effect, now_s)

    def on_decided(self, effect: events.Decided) -> None:
        """Shows how survivors go on."""
        decision = effect.decision
        self._detector.resume(time.monotonic())
        self._report_restart(time.monotonic())  # workers that were still missing are no members any more
        self._operations.decided(decision)
        self._recoveries.log.decided(decision, time.monotonic(), self._plan_s)
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
        self._stop_if_none_stay()
        self._plan_for_members()
        self._look_for_better()

    def note(self, effect: events.Note) -> None:
        """A line of the log."""
        _log.info("%s", effect.text)

    def on_end(self, effect: events.End) -> None:
        """Ends the job."""
        failure = None if effect.worker is None else self._failures.get(effect.worker)
        self._end(
            Ended(
                outcome="failed",
                reason=effect.reason + self._recorder.advice(),
                worker=effect.worker,
                traceback_text="" if failure is None else failure.traceback_text,
            )
        )


def _named(workers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(workers)))


def _result_of(plan: Callable[[], events.RecoveryPlan]) -> events.RecoveryPlan | str:
    """A plan, or why there is none: what is wrong with a planner must not end a job that can go on."""
    try:
        return plan()
    except Exception as error:
        _log.exception("planning a recovery has failed")
        return f"planning has failed ({error})"


def run_coordinator(setup: CoordinatorSetup) -> int:
    """A coordinator process from its start to its end.

    Returns:
        Exit status: 0 once the job is over, however it ended; else the agent starts another coordinator.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, force=True
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(_run(setup))
        return 0
    except ElaswaveError:
        _log.exception("the coordinator has ended with an error")
        return 1


async def _run(setup: CoordinatorSetup) -> None:
    await CoordinatorProcess(setup).run()
