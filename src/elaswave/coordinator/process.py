"""The coordinator's process: the machine, the detector and the recorder on an asyncio control server.

Training does not need it between events. It persists what it decides before it says so; when it dies, the agent starts
another one, which reads the journal and goes on where this one stood.
"""

import asyncio
import errno
import hmac
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from elaswave.channel.messages import agent as agent_messages
from elaswave.channel.messages.operator import FromOperator
from elaswave.channel.messages.worker import (
    Failed,
    Finished,
    Heartbeat,
    KeysTaken,
    Leaving,
    LinkLost,
    StepReport,
    Timings,
    Unreached,
)
from elaswave.channel.server import RefusedPeer
from elaswave.channel.wire import is_agent, is_operator, peer_name
from elaswave.coordinator.agents import incarnation_of
from elaswave.coordinator.driver import JobDriver
from elaswave.coordinator.job_spec import CoordinatorSetup, mark_of
from elaswave.errors import DisplacedError, ElaswaveError, RetryError, StoreError, StoreGoneError, SupersededError
from elaswave.observability.output import VisibleLines
from elaswave.observability.run_folder import add_to_copy
from elaswave.protocol import events
from elaswave.protocol.coordinator.transitions import CoordinatorState
from elaswave.protocol.detection.detector import WorkerActivity
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.messages import (
    Evidence,
    Installed,
    Joining,
    Linked,
    Paused,
    Registered,
    Report,
    Unsound,
)
from elaswave.store.claim import CandidateProgress, CandidateStage
from elaswave.store.opening import claim
from elaswave.store.seal import proof_of_term

LINGER_S = 5.0
"""After the end, how long workers and agent may take to hear of it."""
SUPERSEDED = 3
"""Exit status of a coordinator that another one has replaced."""
STORE_GONE = 4
"""Of one that cannot read the job's records."""
PORT_TAKEN = 5
"""Of one at whose address another program listens."""
DISPLACED = 6
"""Of one whose claim was taken away, by nobody who has followed it: the next one claims the job anew."""
CREATED_AGAIN = "the job was created again since this agent has come: what its workers have is of the last one"
SWITCH_INTERVAL_S = 0.001
"""How long a planning thread may hold the interpreter while a message waits."""

_log = logging.getLogger("elaswave.coordinator")


class CoordinatorProcess(JobDriver):
    """One coordinator, from its start to the end of the job.

    Args:
        setup: what it is started with.
    """

    async def _listen(self) -> None:
        try:
            await self._server.start(
                self._setup.job.network.listen,
                self._keys.of_peer(self._setup.job.home),
                agent_messages.ToCoordinator,
                self._on_message,
                self._on_connected,
                self._on_closed,
                tls=self._setup.job.network.tls,
                on_stranger=self._terminal.say_of_stranger,
                on_store_position=self._on_store_position,
                key_of=self._keys.of_peer,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise RetryError(
                f"another program listens at {self._setup.job.network.listen}, and keeps the coordinator out"
            ) from error

    async def run(self) -> None:
        """Serves until the job is over.

        Raises:
            RetryError: another program listens at its address.
        """
        await self._listen()
        serving = asyncio.ensure_future(self._server.serve())
        claimed = self._setup.claimed
        if claimed is not None:
            claimed.report(CandidateProgress(CandidateStage.SERVES, claimed.term.term))
        failure: ElaswaveError | None = None
        try:
            try:
                self._begin_or_take_over()
                over = asyncio.ensure_future(self._end.event.wait())
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
                is_gone = isinstance(error, StoreGoneError)
                self._end.come(agent_messages.Ended(outcome="failed", reason=str(error), again=is_gone), write=False)
            deadline_s = time.monotonic() + LINGER_S
            while not self._end.is_known() and time.monotonic() < deadline_s:
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
            if claimed is not None:
                claimed.lease_heartbeats.stop()

    def _begin_or_take_over(self) -> None:
        """Begins the job, or goes on where earlier coordinators stood."""
        if self._state.outcome is not None:
            # An earlier coordinator has ended the job and died before it could tell all members.
            outcome = "stopped" if self._state.outcome == "interrupted" else self._state.outcome
            self._end.come(agent_messages.Ended(outcome=outcome, reason=self._state.reason), write=False)
        if self.core.state is not CoordinatorState.STARTING:
            self._recorder.catch_up(self.core.generation, self.core.decision)
            undecided = self.core.undecided if self.core.state is CoordinatorState.COLLECTING else None
            self._recoveries.restore(self._decisions, undecided, time.monotonic())
        self.carry_out(self.membership.begin(time.monotonic()))
        self.carry_out(self.core.begin())
        self._tick()

    def _on_connected(self, peer: int) -> None:
        if is_operator(peer):
            self._operator_sessions.connected(peer)
            return
        self._keys.connected(peer)
        self._end.tell(peer)

    def _on_closed(self, peer: int) -> None:
        if is_operator(peer):
            self._operator_sessions.closed(peer)
        elif is_agent(peer):
            self._terminal.agent_went(peer)
            self.membership.agent_went(incarnation_of(peer), time.monotonic())
        else:
            self.detector.disconnected(peer, time.monotonic())

    def _on_store_position(self, peer: int, store_position: StorePosition) -> RefusedPeer | None:
        """A peer has heard of a history that this coordinator may lack (H9), or is of an earlier job generation
        (H1). If so, nothing that it says counts."""
        if self._end.is_there:
            return None
        try:
            if self._store.check(store_position):
                return None
        except StoreError as error:
            self._background.fail(error)
            return RefusedPeer(None)
        _log.info("%s is of another job generation: it is turned away", peer_name(peer))
        return RefusedPeer(
            agent_messages.AgentRefused(reason=CREATED_AGAIN, verdict="again") if is_agent(peer) else None
        )

    # --------------------------------------------------------------------------------------------------------- messages

    def _on_message(self, peer: int, message: agent_messages.ToCoordinator) -> None:
        now_s = time.monotonic()
        if isinstance(message, Heartbeat) and message.worker == peer and peer in self.core.members:
            self._on_heartbeat(message, now_s)  # most messages are: they take the shortest way
        elif is_operator(peer) or isinstance(message, FromOperator):
            self._operator_sessions.received(peer, message)
        elif isinstance(message, agent_messages.FromAgent):
            if is_agent(peer):
                self._on_agent(peer, message)
            else:
                _log.warning("%s says what agents say; its %s is ignored", peer_name(peer), type(message).__name__)
        elif message.worker != peer:
            _log.warning("worker %d says that it is worker %d; its %s is ignored", peer, message.worker, type(message))
        elif isinstance(message, KeysTaken):
            self._keys.taken(peer, message.ring)
        elif isinstance(message, Joining):
            if not self._end.is_there:
                self.worker_joining(message)
        elif isinstance(message, Unreached):
            if not self._end.is_there:
                self.worker_unreached(message.worker, message.peers)
        elif isinstance(message, StepReport) and not self._end.is_there:
            self._on_step(message, now_s)
        elif isinstance(message, Leaving) and self.membership.is_joiner(message.worker):
            self._on_leaving(message)
        elif not self._end.is_there and not isinstance(message, Failed | Linked) and not self.hears(message.worker):
            if not isinstance(message, Heartbeat):  # who was cut off sends them until it hears that it is none
                _log.info("%s of worker %d, which is no member, does not count", type(message).__name__, message.worker)
        elif isinstance(message, Heartbeat):
            pass  # after the end, of a worker that is no member
        elif isinstance(message, Registered):
            self.worker_registered(message)
        elif isinstance(message, Linked | Paused | Unsound):
            self.feed(message)
        elif isinstance(message, Report | Installed):
            if isinstance(message, Installed):
                self._recoveries.log.installed(message)
            self.feed(message)
        elif isinstance(message, LinkLost):
            if self.core.believes(message.worker, message.peer, message.generation):
                self.detector.link_lost(message.worker, message.peer, now_s)
                self.look_soon()
        elif isinstance(message, Leaving):
            self._on_leaving(message)
        elif isinstance(message, Failed):
            if not self.membership.is_joiner(message.worker):
                self.failures[message.worker] = message
            self.worker_failed(
                events.WorkerFailed(
                    message.worker,
                    message.signature,
                    message.summary,
                    is_common=message.is_common,
                    is_wrong=message.is_wrong,
                )
            )
        elif self._end.is_there:
            _log.info("%s of worker %d comes after the end", type(message).__name__, message.worker)
        elif isinstance(message, Timings):
            if (slow := self._data_waits.add(message)) is not None:
                self._terminal.say(slow)
            measurements = self._planner.measurements
            timings = measurements.add(message, self.core.members)
            self._recorder.timings(message.step, timings, measurements.gauges(self.core.members))
            self._searches.rebalance()
            self._drain_hopeless()
        else:
            if isinstance(message, Finished):
                self.membership.joiners.stop()
            self._publishing.publish(message, now_s)

    def _on_leaving(self, message: Leaving) -> None:
        """A worker has had a notice. A job that is over lets it go anyway."""
        if not self._end.is_there:
            self.worker_leaving(message.worker, max(0.0, message.left_s - self._server.age_s))

    def _on_agent(self, peer: int, message: agent_messages.FromAgent) -> None:
        if lie := self._agents.may_say(peer, message):
            _log.warning("%s of %s does not count: %s", type(message).__name__, peer_name(peer), lie)
        elif isinstance(message, agent_messages.AskJob):
            self._agents.asked(peer, message, self._keys.sent)
        elif isinstance(message, agent_messages.AgentHello):
            if not self._end.is_there and not self.agent_came(message.node, message.incarnation, message.slots):
                return
            self._terminal.agent_came(peer)
            if message.folder != mark_of(self._setup.job.run_dir):
                self._server.send(peer, agent_messages.SendLogs())
            self._ask_agents()
            for exited in message.exited:
                self._on_agent(peer, exited)
            losses = self._state.losses[message.called_step :]
            if losses:
                first, metrics = message.called_step + 1, self._state.metrics
                told = [dict(metrics.get(step, {})) for step in range(first, first + len(losses))]
                self._server.send(peer, agent_messages.StepLosses(first_step=first, losses=losses, metrics=told))
            if message.stop:
                self._stop_workers()
            else:
                self.stop_if_none_stay()  # its predecessor may have died before it could say so
            if message.leaving_s is not None:
                self._on_host_leaving(peer, message.leaving_s)
            if peer == self._agents.home:
                self._recorder.checkpoints.ask_again()
        elif isinstance(message, agent_messages.AgentLeaving):
            self._on_host_leaving(peer, message.left_s)
        elif isinstance(message, agent_messages.TermTaken):
            own = self._setup.claimed
            proof = proof_of_term(self._setup.keys.accepted[0], self._setup.job.job_generation, message.term)
            if not hmac.compare_digest(proof, message.proof):
                _log.warning("agent %d says that another coordinator has the job, and proves nothing", peer)
            elif own is not None and message.term > own.term.term:
                raise SupersededError(f"agent {peer} has the job's coordinator number {message.term}; this must end")
        elif isinstance(message, agent_messages.AgentKeysTaken):
            self._keys.taken(peer, message.ring, message.problem)
        elif isinstance(message, agent_messages.CpuTimes):
            for worker, cpu_s in message.cpu_s.items():
                self.detector.used(worker, cpu_s, time.monotonic())
                self.carry_out(self.membership.used(worker, cpu_s, time.monotonic()))
            for worker, waited_s in message.waited_s.items():
                self.detector.looked(worker, waited_s, time.monotonic())
        elif isinstance(message, agent_messages.LogPart):
            try:
                add_to_copy(self._setup.job.run_dir, message.worker, message.text)
            except OSError as error:
                _log.warning("the log of worker %d cannot be copied: %s", message.worker, error)
        elif isinstance(message, agent_messages.CheckpointCommitted):
            if not self._end.is_there:
                self._publishing.committed(message)
        elif isinstance(message, agent_messages.FilesCut):
            self._end.come(agent_messages.Ended(outcome="failed", reason=message.text + self._recorder.advice()))
        elif isinstance(message, agent_messages.Exited):
            _log.info("worker %d %s", message.worker, message.text)
            self.worker_ended(message.worker, message.text)
        else:
            self._stop_workers()

    def _on_host_leaving(self, peer: int, left_s: float) -> None:
        """An agent has had a notice: its workers leave. If nobody stays, the job ends with a checkpoint."""
        self.agent_leaving(incarnation_of(peer), max(0.0, left_s - self._server.age_s))

    def worker_registered(self, message: Registered) -> None:
        """A worker has connected: what was told may have been lost with its last connection."""
        super().worker_registered(message)
        worker = message.worker
        if worker in self.core.members:
            self._watch(worker)
        if self._end.is_there:
            return
        if self._start is not None and worker in self.core.members and self.core.decision is None:
            self._server.send(worker, self._start)  # one that trains already takes no notice
        if self._stop is not None:
            self._server.send(worker, self._stop)
        self._operations.registered(worker)
        self._report_restart(time.monotonic())

    def _on_heartbeat(self, message: Heartbeat, now_s: float) -> None:
        activity = WorkerActivity(
            generation=message.generation,
            step=message.step,
            attempt=message.attempt,
            label=message.label,
            computing=message.computing,
            waiting_on=message.waiting_on,
            since_s=message.since_s,
            moved_bytes=message.moved_bytes,
            starved_s=message.starved_s,
            first_s=message.first_s,
        )
        self.detector.heartbeat(message.worker, activity, now_s)
        self._operator_sessions.heartbeat(message)
        self._recoveries.log.seen(message.worker, activity)
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
        if self.hears_vote(message.worker, evidence, message.generation) and not self._end.is_there:
            self._operations.committed(message)
            self._publishing.publish(message, now_s)


def run_coordinator(setup: CoordinatorSetup) -> int:
    """Runs a coordinator process from its start to its end.

    Returns:
        Exit status: 0 once the job is over, however it ended; `SUPERSEDED` if another host's coordinator has taken
        over; `DISPLACED` if its own claim was taken away by nobody who follows; `STORE_GONE` if the store does not
        answer; `PORT_TAKEN` if another program listens at its address; 1 after an error that another one would meet
        too; else the agent starts another coordinator.
    """
    return _live(lambda: setup)


def run_candidate(
    setup: CoordinatorSetup, name: str, creates_job: bool, report: Callable[[CandidateProgress], None]
) -> int:
    """Runs a candidate's process from its start to its end: it waits until it has the job, then it is the coordinator.

    Args:
        setup: of the coordinator.
        name, creates, report: as of `elaswave.store.opening.claim`.
    Returns:
        Exit status, as of `run_coordinator`.
    """

    def take_over() -> CoordinatorSetup:
        control = setup.job.config.control
        claimed = claim(
            control,
            setup.job.name,
            name,
            setup.keys.accepted[0],
            creates_job=creates_job,
            job_generation=setup.job.job_generation,
            ended_s=setup.lost_s,
            report=report,
        )
        return setup._replace(claimed=claimed, lost_s=claimed.missed_s)

    return _live(take_over)


def _live(begin: Callable[[], CoordinatorSetup]) -> int:
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(VisibleLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log], force=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(_run(begin()))
        return 0
    except SupersededError as error:
        _log.warning("%s", error)
        return DISPLACED if isinstance(error, DisplacedError) else SUPERSEDED
    except StoreGoneError:
        _log.exception("the coordinator cannot read the job's records")
        return STORE_GONE
    except RetryError as error:
        _log.error("%s", error)
        return PORT_TAKEN
    except ElaswaveError:
        _log.exception("the coordinator has ended with an error")
        return 1


async def _run(setup: CoordinatorSetup) -> None:
    await CoordinatorProcess(setup).run()
