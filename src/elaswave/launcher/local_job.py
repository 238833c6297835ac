"""The agent's side of a job on this machine: what the launcher does while its job runs.

It is told at once when a process ends: a worker's end it reports to the coordinator, a coordinator's end it answers
with a new coordinator, the forkserver's end is the job's. It passes signals on (`StopRequest`), shows what the
coordinator has to say (`TerminalView`, `StepCalls`), and has checkpoints committed. `LocalJob` is the loop, and who is
told what. Its parts are in `elaswave.launcher.supervisors`, `processes`, and `resources`: folder, network and store.
"""

import contextlib
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from elaswave.blocks.shapes import StateShapes
from elaswave.channel.client import ClientOwner, ControlClient
from elaswave.channel.messages.agent import (
    AgentHello,
    AgentKeysTaken,
    AgentLeaving,
    AgentRefused,
    Awaited,
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    Ended,
    Exited,
    FilesCut,
    LogPart,
    SendLogs,
    ShowEvaluation,
    ShowStep,
    ShowText,
    SpawnFirst,
    StepLosses,
    StopAsked,
    StopJob,
    TermTaken,
    ToAgent,
)
from elaswave.channel.messages.worker import KeysNow
from elaswave.channel.wire import agent_id
from elaswave.config.schema import Config
from elaswave.config.values import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.coordinator.job_spec import CoordinatorSetup, mark_of, write_marks
from elaswave.data.fingerprint import DatasetFingerprint, Finding, SampleHash
from elaswave.data.samples import Sampler
from elaswave.errors import ElaswaveError, NeedlessError, RecoveryError, RetryError, StoppedBySignalError, UsageError
from elaswave.faults.injection import Probe
from elaswave.job.plan import RunPlan, StartingPoint
from elaswave.job.script import Script
from elaswave.job.setup import AgentRole, JobSetup, remove_control_file
from elaswave.launcher.forkserver.machine import COORDINATOR
from elaswave.launcher.forkserver.messages import (
    ChildGone,
    CommitDone,
    ForkServerSetup,
    FromForkServer,
    KeysHeld,
    KillWorkers,
    LoaderGone,
    LoaderSpawned,
    Prepared,
    Spawned,
    SpawnRefused,
)
from elaswave.launcher.processes import (
    COORDINATOR_EXIT,
    FORKSERVER,
    FORKSERVER_EXIT,
    TICK_S,
    JobProcesses,
    LauncherWaits,
    await_prepared,
    forkserver_log,
)
from elaswave.launcher.resources import JobPlace
from elaswave.launcher.supervisors import (
    CANDIDATE,
    AgentKeys,
    CandidateReports,
    CoordinatorStarts,
    CoordinatorSupervisor,
    LogSending,
    WithoutCoordinator,
    WorkerLooks,
    WorkerSupervisor,
)
from elaswave.observability.processes import MappedFiles
from elaswave.observability.progress import Reporter
from elaswave.protocol.membership.agent import Agent, JobEnded, Standby, WorkerEnded
from elaswave.protocol.membership.effects import EndJoiner, SpawnJoiner
from elaswave.store.claim import CandidateStage
from elaswave.store.seal import proof_of_term
from elaswave.system.processes import STOP_SIGNALS, how_it_ended, stop_signals, undisturbed

STARTING_S = 10.0
"""Between two lines about a start that lasts."""


class StepCalls:
    """Calls back for committed steps.

    A coordinator may die before it has told of a step, and its successor tells of later ones: those wait until the
    missing one has been told of too.

    Args:
        call: takes step, loss and metrics.
    """

    def __init__(self, call: Callable[[int, float, Mapping[str, float]], None]) -> None:
        self.last_step = 0
        """The newest step that was called for, or that the job began after."""
        self.error: Exception | None = None
        """What a call has raised; nothing is called any more."""
        self._call = call
        self._waiting: dict[int, tuple[float, Mapping[str, float]]] = {}

    def begin(self, step: int) -> None:
        """The job begins after this step."""
        self.last_step = step

    def published(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """A step was committed; may be said again, and before a step that came before it."""
        if step <= self.last_step or self.error is not None:
            return
        self._waiting[step] = loss, metrics
        while self.last_step + 1 in self._waiting:
            self.last_step += 1
            try:
                self._call(self.last_step, *self._waiting.pop(self.last_step))
            except Exception as error:
                self.error = error
                return

    def finish(self, losses: Sequence[float], metrics: Mapping[str, Sequence[float]]) -> None:
        """Calls back for steps that no coordinator has told of.

        Args:
            losses: of every step from the first one.
            metrics: of the same steps by name.
        """
        for step, loss in enumerate(losses, 1):
            self.published(step, loss, {name: values[step - 1] for name, values in metrics.items()})

    def raise_error(self) -> None:
        """Raises what a call has raised, if one has: the job has ended because of it."""
        if self.error is not None:
            raise self.error


class TerminalView:
    """Of one agent.

    Args:
        reporter: shows progress.
        calls: of a script's callback.
        config: with its layout resolved.
        agent_role: how the agent takes part.
        started_s: monotonic time at which the command began.
    """

    def __init__(
        self, reporter: Reporter, calls: StepCalls, config: Config, agent_role: AgentRole, started_s: float
    ) -> None:
        self._reporter, self._calls = reporter, calls
        self._config, self._agent_role = config, agent_role
        self._started_s = started_s
        self._has_stepped = False
        self._say_at_s = STARTING_S
        """Seconds after the beginning at which the terminal hears again of a start that lasts."""

    def received(self, message: ShowStep | StepLosses | ShowEvaluation | ShowText) -> None:
        """The coordinator has something to show."""
        if isinstance(message, ShowStep):
            self._has_stepped = True
            self._reporter.step(
                message.step,
                message.total_steps,
                message.loss,
                message.rate,
                message.data_pass,
                message.generation,
                message.layout_name,
                SAMPLES_PER_S if message.counts_samples else TOKENS_PER_S,
            )
            self._calls.published(message.step, message.loss, message.metrics)
        elif isinstance(message, StepLosses):
            for step, (loss, metrics) in enumerate(zip(message.losses, message.metrics), message.first_step):
                self._calls.published(step, loss, metrics)
        elif isinstance(message, ShowEvaluation):
            self._reporter.evaluation(message.step, message.loss)
        else:
            (self._reporter.error if message.is_error else self._reporter.message)(message.text)

    def starting(self, *, has_workers: bool) -> None:
        """Says now and then, until the first step has been made, that the job is at it: a large model takes its time.

        Args:
            has_workers: whether this agent was asked for workers.
        """
        waited_s = time.monotonic() - self._started_s
        if not self._has_stepped and waited_s >= self._say_at_s:
            self._say_at_s = waited_s + STARTING_S
            what = f"{sum(self._config.widths)} workers are starting, and making the first step"
            if self._agent_role.job and not has_workers:
                what = f"{self._agent_role.node} waits until it is to start workers; the job begins with "
                what += f"{self._config.control.hosts} hosts"
            self._reporter.message(f"{what}: {waited_s:.0f} s so far")


STOP_GRACE_S = 300.0
"""After the first signal, how long the step in hand and its checkpoint may take."""


class StopRequest:
    """What an agent was asked.

    Args:
        leave_s: how long this host's workers may take to leave after a notice; None: a notice ends the job.
    """

    def __init__(self, leave_s: float | None) -> None:
        self.signal: int | None = None
        """The first one; None: there was none."""
        self._cause = ""
        """Why the coordinator wants the end, if it was not a signal."""
        self._leave_s = leave_s
        self._is_over = False
        """Whether a second one has come."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean end; another one ends at once, unless it is SIGHUP, which a terminal that
        closes may send twice, itself and by its shell.

        Raises:
            StoppedBySignalError: it is another one.
        """
        if self.signal is not None and number == signal.SIGHUP:
            return
        if self._is_over:
            return  # it unwinds already, and must not be interrupted in that
        if self.signal is not None:
            self._is_over = True
            raise StoppedBySignalError(number, "stopped at once by a second signal")
        self.signal = number

    def by_coordinator(self, cause: str) -> None:
        """The coordinator wants the job to end."""
        if self.signal is None:
            self.signal, self._cause = signal.SIGTERM, cause

    @property
    def is_leaving(self) -> bool:
        """Whether this host's workers leave, and the job goes on."""
        return self.signal is not None and self._leave_s is not None and not self._cause

    @property
    def grace_s(self) -> float:
        """How long the end that was asked for may take: a notice's time is this host's, not that of a job's stop."""
        return self._leave_s if self._leave_s is not None and self.is_leaving else STOP_GRACE_S

    @property
    def name(self) -> str:
        """Of what has asked, for people."""
        return self._cause or ("a callback has failed" if self.signal is None else STOP_SIGNALS[self.signal])


LAST_WORDS_S = 1.0
"""After the forkserver's end, how long the coordinator may take to say whether the job was over before."""
CUT_SHORT = "a file was cut short while the job reads it"
UNBEGUN_GRACE_S = 10.0
"""How long the coordinator, if there is one, may take to end a job in which this agent has not started a worker."""
EXIT_GRACE_S = 10.0
"""After the end of the job, how long its processes may take to end."""
FAILED_GRACE_S = 0.5
"""The same after a failure: who is ending by itself may say so in its log; the others wait for what will not come."""
HEARTBEAT_S = 0.5
"""Between two heartbeats to the coordinator. They only let this side see that it is silent, and wake both processes."""


class LocalJob(ClientOwner):
    """A job on this machine: its processes, its socket folder, its agent. `end` leaves none of them behind.

    Args:
        job: what its processes are started with.
        place: this agent's folder, network and store; closed in the end.
        reporter: shows progress.
        probe: told of every point of every step in every worker.
        script: what a script trains; None: what the configuration describes.
    Raises:
        LaunchError: the system refuses a process.
        UsageError: what the script trains cannot be sent to the job's processes.
    """

    def __init__(
        self, job: JobSetup, place: JobPlace, reporter: Reporter, *, probe: Probe | None, script: Script | None
    ) -> None:
        self._job, self._place, self._agent_role = job, place, place.agent_role
        self._run_dir = job.run_dir
        agent_role, key = place.agent_role, place.key
        self._stop = StopRequest(agent_role.leave_s)
        self._prepared: Prepared | None = None
        """What the forkserver has said, once it is there."""
        self._script = script
        self.calls = StepCalls(script.on_step if script is not None else lambda step, loss, metrics: None)
        """Of the script's callback."""
        self._reporter = reporter
        self._terminal_view = TerminalView(reporter, self.calls, job.config, agent_role, job.started_s)
        self._refused: AgentRefused | None = None
        self._agent = Agent()
        self._client: ControlClient[ToAgent] | None = None
        self._ended: Ended | None = None
        self._is_over = False
        self._waits = LauncherWaits()
        self._logs = LogSending(job.run_dir)
        self._keys = AgentKeys(
            key, place.key_file, starts_coordinators=agent_role.starts_coordinators, sent=agent_role.keys
        )
        self._without_coordinator = (
            WithoutCoordinator(job.config.control, job.name, job.run_dir, key, job.job_generation) if job.name else None
        )
        setup = ForkServerSetup(
            job=job,
            keys=self._keys.ring.now,
            job_keys=self._keys.job,
            commits=None if self._without_coordinator is None else self._without_coordinator.commits,
            probe=probe,
            suffix=agent_role.suffix,
            training=None if script is None else script.training,
            read_files=() if script is None else script.read_files,
        )
        try:
            self._processes = JobProcesses(setup, None if script is None else script.environment)
        except BaseException:
            # Else a job would stay in the store of which no process has ever begun.
            if place.store is not None and agent_role.creates_job:
                place.store.end(place.holder)
            place.close()
            raise
        self.forkserver_pid = self._processes.forkserver_pid
        self._selector = self._processes.selector
        self._workers = WorkerSupervisor(self._agent, self._processes, self._logs, self._waits, job.run_dir)
        self._looks = WorkerLooks(self._processes)
        self._mapped = MappedFiles(time.monotonic())
        self._ends: dict[int, str] = {}
        """How the processes of workers have ended."""
        self._cut = ""
        """What was found out about files that were cut short."""
        leads = agent_role.creates_job and not agent_role.is_candidate
        self._standby = Standby(leads=leads, is_candidate=agent_role.is_candidate)
        self._candidate_reports = CandidateReports(self._selector)
        if agent_role.creates_job:
            if job.name:
                write_marks(job.run_dir, job.name)
            self._write_control_file()

    def _write_control_file(self) -> None:
        trouble = self._place.write_control_file()
        if trouble:
            self._reporter.message(trouble)

    def await_forkserver(self) -> StateShapes:
        """Waits until workers can be forked.

        Returns:
            The shapes of model and optimizer.
        Raises:
            LaunchError: torch or the model cannot be loaded.
            UsageError: what is to be trained cannot be.
        """
        return self._await_prepared().state

    def dataset_facts(self, num_samples: dict[str, int]) -> DatasetFingerprint:
        """Returns what is known of a script's datasets, and of what else it gives; waits for the forkserver, as
        `await_forkserver`.

        Args:
            num_samples: of each dataset, by name.
        """
        prepared = self._await_prepared()
        found = ((each.sample, each.value) for each in prepared.findings)
        hashes = [SampleHash(sample=sample, hash=value) for sample, value in found if sample is not None]
        return DatasetFingerprint(num_samples=num_samples, hashes=hashes, script=prepared.given)

    def not_taken(self) -> list[str]:
        """Lists what a fresh forkserver could not take over of the script's modules; waits for it, as
        `await_forkserver`."""
        return self._await_prepared().not_taken

    def findings(self) -> list[Finding]:
        """Lists what samples and loss of a script are like in the job's processes; waits for the forkserver, as
        `await_forkserver`."""
        return self._await_prepared().findings

    def _await_prepared(self) -> Prepared:
        if self._prepared is not None:
            return self._prepared
        self._prepared = await_prepared(self._processes, self._forkserver_log, self._say_starting)
        return self._prepared

    # --------------------------------------------------------------------------------------------------------- running

    def run(
        self, plan: RunPlan, sampler: Sampler, checkpoint: StartingPoint | None, way_on: Callable[[], str]
    ) -> Ended:
        """Starts the coordinator, if it is this agent's to start, and workers as it asks for them; stays until the job
        is over.

        Args:
            plan, sampler: of the run.
            checkpoint: where workers begin; None: at the seed.
            way_on: says how the run can go on after its end.
        Raises:
            RecoveryError: the job cannot go on, for a reason that the coordinator could not say.
            LaunchError: the system refuses a process.
            StoppedBySignalError: a second signal has come, or too much time has passed after the first.
            RetryError: this agent's part is over, the job's is not.
            UsageError: the agent may not take part, by a person's mistake.
            NeedlessError: its node has another one.
        """
        self._way_on = way_on
        self.calls.begin(0 if checkpoint is None else checkpoint.meta.step)
        starts = CoordinatorStarts(
            CoordinatorSetup(
                job=self._job,
                plan=plan,
                sampler=sampler,
                keys=self._keys.job,
                checkpoint=checkpoint,
                coordinator_ends_s=(),
            ),
            self._agent_role,
            self._processes,
            self._standby,
            self._candidate_reports,
            self._waits,
            by_forkserver=self._script is not None,
        )
        self._coordinators = CoordinatorSupervisor(
            starts,
            self._place.store,
            self._agent,
            self._processes,
            self._standby,
            self._waits,
            self._run_dir / "logs" / "coordinator.log",
            way_on,
        )
        if self._agent_role.starts_coordinators:
            self._coordinators.start()
        # It is not started: `_loop` takes its turns, since a process that forks should have no threads.
        self._client = ControlClient(
            self._place.network.launcher_targets,
            self._keys.ring,
            agent_id(self._agent_role.incarnation),
            ToAgent,
            self,
            tls=self._place.network.tls,
            job_generation=self._place.job_generation,
        )
        self._client.interval_s = HEARTBEAT_S
        self._selector.register(self._client.fileno(), selectors.EVENT_READ, "control")
        with stop_signals(self._stop.on_signal) as wake_fd:
            if wake_fd is not None:
                self._selector.register(wake_fd, selectors.EVENT_READ, "signal")
            try:
                self._loop()
            finally:
                if wake_fd is not None:
                    self._selector.unregister(wake_fd)
        assert self._ended is not None
        if self._ended.outcome == "failed":
            self._check_forkserver()  # its end may be the reason: then the workers have ended only after it
        self._selector.unregister(self._client.fileno())
        self._candidate_reports.close()
        if self._agent_role.is_candidate and not self._standby.leads:
            self._processes.kill_coordinator()  # it waits for nothing any more
        self._client.close(1.0)
        self._client = None
        self._processes.ask_forkserver(
            KillWorkers(workers=tuple(self._ended.lost))
        )  # who is cut off does not hear that it may go
        # Before `reap_all`, which hears the same messages of the forkserver and keeps nothing of them.
        if self._ended.outcome == "failed":
            self._hear_how_they_ended()
            self._ended = msgspec.structs.replace(self._ended, reason=with_ends(self._ended.reason, self._ends))
        self._processes.reap_all(FAILED_GRACE_S if self._ended.outcome == "failed" else EXIT_GRACE_S)
        if self._cut and self._ended.outcome == "failed" and CUT_SHORT not in self._ended.reason:
            # All workers may have read there before anybody could be told.
            self._ended = msgspec.structs.replace(
                self._ended, reason=f"{self._cut}; {self._ended.reason}", worker=None, traceback_text=""
            )
        return self._ended

    def _loop(self) -> None:
        assert self._client is not None
        kill_at_s: float | None = None
        wait_s = 0.0
        while self._ended is None:
            self._processes.show()
            # Not longer than a tick: deadlines, logs and looks below are due without anything that wakes this loop.
            for key, _ in self._selector.select(max(0.0, min(TICK_S, wait_s))):
                if key.data == "signal":
                    # The handler has taken note already; these bytes only wake.
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                elif key.data == FORKSERVER_EXIT:
                    self._check_forkserver()
                elif key.data == COORDINATOR_EXIT:
                    at_s = time.monotonic()
                    self._on_coordinator_exit(self._processes.reap_coordinator(), at_s)
                elif key.data == FORKSERVER:
                    self._receive_from_forkserver()
                elif key.data == CANDIDATE:
                    self._hear_candidate()
            # Also for what has come from the coordinator: its descriptor only wakes.
            wait_s = self._client.turn()
            if self._refused is not None:
                raise error_of_refusal(self._refused)
            overdue = self._waits.overdue(self._processes.forkserver_facts, time.monotonic())
            if overdue is not None:
                raise RecoveryError(f"{overdue}; see {self._run_dir / 'logs'}; {self._way_on()}")
            for looked in self._looks.turn():
                self._client.send(looked)
            for part in self._logs.turn(time.monotonic()):
                self._client.send(part)
            if self._mapped.is_due(time.monotonic()):
                self._mapped.look(self._processes.all_pids)
            self._coordinators.turn(self._client.disconnected_s)
            self._check_coordinator_timeout()
            self._reporter.refresh()
            self._say_starting()
            if self._stop.signal is not None or self.calls.error is not None:
                now_s = time.monotonic()
                if kill_at_s is None:
                    has_begun = self._workers.has_first or bool(self._processes.workers)
                    kill_at_s = now_s + (self._stop.grace_s if has_begun else UNBEGUN_GRACE_S)
                    self._ask_to_stop()
                elif now_s > kill_at_s:
                    self.calls.raise_error()
                    assert self._stop.signal is not None
                    raise StoppedBySignalError(self._stop.signal, "killed: it did not end in time after the signal")
                if self._stop.is_leaving and not self._processes.workers:
                    self._client.close(1.0)
                    raise RetryError("this host's workers have left, as the notice asked for; the job goes on without")

    def _hear_candidate(self) -> None:
        """Hears that a candidate's process has the job, or can be dialled; or that its end of the pipe is closed."""
        assert self._client is not None
        for stage, term in self._candidate_reports.hear():
            if stage is CandidateStage.HOLDS:
                self._coordinators.has_job()
                if term > 1:
                    self._reporter.message(f"this host has the job's coordinator from now on, its number {term}")
                    self._write_control_file()
            else:
                if self._client.connected:  # to one that was replaced, and may not know it: it may not reach the store
                    proof = proof_of_term(self._keys.job.accepted[0], self._place.job_generation, term)
                    self._client.send(TermTaken(term=term, proof=proof))
                self._client.dial_first()

    def _check_coordinator_timeout(self) -> None:
        """Does, where another host has the coordinator, what is due while it cannot be reached.

        Raises:
            RetryError: it could not be for too long, and this host's workers have not committed a step either.
        """
        assert self._client is not None
        without = self._without_coordinator
        if without is None:
            return
        found = without.look(has_coordinator=self._standby.leads or self._client.connected)
        if found is not None:  # its workers wait for a coordinator, which does not come any more
            self._ended = msgspec.structs.replace(found, lost=self._processes.workers)
        elif without.gives_up:
            trouble = self._client.trouble or "nobody answers"
            raise RetryError(
                f"no coordinator for {without.for_s:.0f} s at "
                f"{self._place.network.launcher_dials} ({trouble}), "
                f"and no step committed here; {self._way_on()}"
            )

    @property
    def stop_signal(self) -> int | None:
        """The first signal that has asked this agent to stop; None: there was none."""
        return self._stop.signal

    @property
    def _forkserver_log(self) -> Path:
        return self._run_dir / "logs" / forkserver_log(self._agent_role.suffix)

    def _say_starting(self) -> None:
        self._terminal_view.starting(has_workers=self._workers.has_first)

    def _ask_to_stop(self) -> None:
        """Passes a signal on; later coordinators are told with the hello."""
        assert self._client is not None
        name = self._stop.name
        if self._stop.is_leaving:
            assert self._agent_role.leave_s is not None
            self._reporter.message(f"{name}: this host's workers leave; a second signal ends them at once")
            self._client.send(AgentLeaving(left_s=self._agent_role.leave_s))
            return
        self._reporter.message(f"{name}: ending after this step, with a checkpoint; Ctrl-C ends at once")
        self._client.send(StopJob())

    # ----------------------------------------------------------------------------------------------------- coordinator

    def hello(self) -> AgentHello:
        """Says what this agent is, and what has become of its workers."""
        exited = [Exited(worker=end.worker, text=end.text) for end in self._agent.worker_ends]
        agent_role = self._agent_role
        self._logs.connected()
        # A notice is of this host alone: the job goes on without it.
        stop = (self._stop.signal is not None or self.calls.error is not None) and not self._stop.is_leaving
        return AgentHello(
            node=agent_role.node,
            incarnation=agent_role.incarnation,
            slots=agent_role.slots,
            exited=exited,
            stop=stop,
            called_step=self.calls.last_step,
            folder=mark_of(self._run_dir) if agent_role.job else "",
            leaving_s=agent_role.leave_s if self._stop.is_leaving else None,
        )

    def receive(self, message: ToAgent) -> None:
        """Does what the coordinator says."""
        if isinstance(message, ShowStep | StepLosses | ShowEvaluation | ShowText):
            self._terminal_view.received(message)
            if isinstance(message, ShowStep):
                self._mapped.has_begun()
        elif isinstance(message, Awaited):
            self._looks.asked(message)
        elif isinstance(message, SendLogs):
            self._logs.wanted()
        elif isinstance(message, CommitCheckpoint | BreakOffCommit):
            self._coordinators.commit(message)
        elif isinstance(message, SpawnFirst | SpawnJoiner | EndJoiner):
            self._workers.wanted(message)
        elif isinstance(message, AgentRefused):
            self._refused = message
        elif isinstance(message, StopAsked):
            self._stop.by_coordinator(message.cause)
        elif isinstance(message, KeysNow):
            self._take_keys(message)
        elif isinstance(message, Ended):
            self._ended = message
            self._agent.handle(JobEnded())

    def _take_keys(self, message: KeysNow) -> None:
        """Coordinators and workers to come go by other keys; this is said once the forkserver does (`KeysHeld`)."""
        problem = self._keys.take(message.keys)
        if problem:
            self._tell([AgentKeysTaken(ring=b"", problem=problem)])
            return
        self._coordinators.take_keys(self._keys.job)
        # Not answered here: a worker that was forked before the forkserver has them would hold the old ones.
        self._processes.ask_forkserver(self._keys.for_forkserver())

    def _on_coordinator_exit(self, text: str, at_s: float) -> None:
        assert self._client is not None
        # Before `exited`, since they may say that the job is over.
        self._client.turn()  # its last words
        self._hear_candidate()  # it may have had the job for an instant
        self._coordinators.exited(text, at_s)

    # ------------------------------------------------------------------------------------------------------- forkserver

    def _receive_from_forkserver(self) -> None:
        for message in self._processes.receive_from_forkserver():
            self._note_end(message)
            if isinstance(message, ChildGone) and message.child == COORDINATOR:
                self._on_coordinator_exit(how_it_ended(message.status), message.at_s)
            elif isinstance(message, ChildGone):
                end = WorkerEnded(message.child, how_it_ended(message.status), message.at_s)
                self._tell(self._workers.ended(end))
            elif isinstance(message, CommitDone):
                sent = self._coordinators.committed(message)
                self._tell([] if sent is None else [sent])
            elif isinstance(message, SpawnRefused):
                self._tell(self._workers.refused(message))
            elif isinstance(message, KeysHeld):
                self._tell([AgentKeysTaken(ring=message.ring)])
            else:
                assert isinstance(message, Spawned | LoaderSpawned | LoaderGone), message
                if isinstance(message, Spawned):
                    self._waits.forked(message.child)

    def _hear_how_they_ended(self) -> None:
        """That workers have ended the coordinator hears before how they have."""
        deadline_s = time.monotonic() + FAILED_GRACE_S
        while self._processes.workers and time.monotonic() < deadline_s:
            if any(key.data == FORKSERVER for key, _ in self._selector.select(TICK_S)):
                for message in self._processes.receive_from_forkserver():
                    self._note_end(message)

    def _note_end(self, message: FromForkServer) -> None:
        """Keeps how a worker has ended, and names the files behind the end of which a process may have read, before
        others do."""
        if not isinstance(message, ChildGone | LoaderGone):
            return
        if isinstance(message, ChildGone):
            self._ends[message.child] = how_it_ended(message.status)
        if not os.WIFSIGNALED(message.status) or os.WTERMSIG(message.status) != signal.SIGBUS:
            return
        what = (
            f"worker {message.child}"
            if isinstance(message, ChildGone)
            else f"loader {message.number} of worker {message.worker}"
        )
        files = self._mapped.cut_short(self._processes.all_pids)
        if files:
            found = "; ".join(files)
            text = f"{what} was killed by SIGBUS: {CUT_SHORT}: {found}. Restore it"
            self._cut = self._cut or text
            self._tell([FilesCut(text=text)])

    def _tell(self, messages: Sequence[LogPart | Exited | CheckpointCommitted | FilesCut | AgentKeysTaken]) -> None:
        if self._client is not None:
            for message in messages:
                self._client.send(message)

    def _check_forkserver(self) -> None:
        """Ends the job if the forkserver has ended, and with it the workers, before the job was over.

        Raises:
            RecoveryError: it has.
        """
        text = self._processes.forkserver_end()
        if text is None:
            return
        assert self._client is not None
        self._receive_from_forkserver()  # what it has said last: a commit that is done, a process that was refused
        deadline_s = time.monotonic() + LAST_WORDS_S
        while self._ended is None and time.monotonic() < deadline_s:
            self._client.turn(TICK_S)
        if self._ended is None or self._ended.outcome == "failed":  # a coordinator knows only that workers have ended
            raise RecoveryError(
                f"the forkserver, from which the workers are forked, {text}, and all workers have ended with it "
                f"(see {self._forkserver_log}); {self._way_on()}"
            )

    def end(self) -> None:
        """Ends all processes and removes the temporary files. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        with undisturbed():
            self._end()

    def _end(self) -> None:
        is_ours = self._standby.leads or (self._agent_role.creates_job and not self._standby.had_it)
        if is_ours:
            remove_control_file(self._run_dir)
        self._candidate_reports.close()
        self._processes.end()
        if self._client is not None:
            self._client.close(0.0)
        self._place.close()
        # Of a job that may go on others need what is in the store.
        may_go_on = bool(self._agent_role.job) and self._ended is None and self._standby.had_it
        if self._place.store is None or not is_ours or may_go_on:
            return
        outcome = msgspec.json.encode(self._ended) if self._agent_role.job and self._ended is not None else None
        # Who was told to stop, or has waited for the store in vain, does not wait for it now.
        is_patient = outcome is not None and self._stop.signal is None and not (self._ended and self._ended.again)
        # Only now that no process of this host is left that could still write there.
        trouble = self._place.store.end(
            self._place.holder,
            outcome,
            self._place.job_generation if self._agent_role.job else 0,
            is_patient=is_patient,
            say=self._reporter.message,
        )
        if trouble:
            self._reporter.message(trouble)


def with_ends(reason: str, ends: Mapping[int, str]) -> str:
    """Completes a coordinator's reason with how processes have ended, where it has only heard that they have.

    Args:
        reason: such as "worker 0 has ended".
        ends: of workers, such as "ended with status 3".
    """
    pattern = r"\bworker (\d+) has ended(?=[;,]|$)"
    return re.sub(pattern, lambda found: f"worker {found[1]} {ends.get(int(found[1]), 'has ended')}", reason)


def error_of_refusal(refused: AgentRefused) -> ElaswaveError:
    """Makes the error that ends an agent that may not take part: a person's mistake (`UsageError`), another agent of
    its node (`NeedlessError`), or what a later one may not meet (`RetryError`)."""
    if refused.verdict == "needless":
        return NeedlessError(refused.reason)
    return RetryError(refused.reason) if refused.verdict == "again" else UsageError(refused.reason)
