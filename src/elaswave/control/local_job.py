"""The agent's side of a job on this machine: what the launcher does while its job runs.

It is told at once when a process ends: a worker's end it reports to the coordinator, a coordinator's end it answers
with a new coordinator, the template's end is the job's. It passes signals on, shows what the coordinator has to say,
and has checkpoints committed. The processes themselves are `elaswave.control.job_processes`'.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from elaswave.config.own import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.config.schema import Config
from elaswave.control import template_messages
from elaswave.control.agent_messages import (
    AgentHello,
    AgentLeaving,
    AgentRefused,
    Awaited,
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    Ended,
    EndJoiner,
    Exited,
    SendLogs,
    ShowEvaluation,
    ShowStep,
    ShowText,
    SpawnFirst,
    SpawnJoiner,
    StepLosses,
    StopAsked,
    StopJob,
    TermTaken,
    ToAgent,
)
from elaswave.control.asked_stop import AskedStop
from elaswave.control.candidacy import CANDIDATE, Candidacy
from elaswave.control.candidate import Progress, Stage
from elaswave.control.client import ControlClient
from elaswave.control.commit_count import CommitCount
from elaswave.control.control_file import remove_control_file, write_control_file
from elaswave.control.coordinator import STORE_GONE, SUPERSEDED, run_candidate, run_coordinator
from elaswave.control.coordinator_setup import CoordinatorSetup
from elaswave.control.death_watch import DeathWatch
from elaswave.control.forking import how_it_ended
from elaswave.control.job_folder import JobFolder
from elaswave.control.job_network import open_network
from elaswave.control.job_processes import COORDINATOR_EXIT, TEMPLATE, TEMPLATE_EXIT, TICK_S, JobProcesses
from elaswave.control.job_spec import mark_of, write_marks
from elaswave.control.key_files import JOB_KEY_FILE, JobKey
from elaswave.control.late_outcome import late_outcome
from elaswave.control.launcher_waits import LauncherWaits
from elaswave.control.log_sending import LogSending
from elaswave.control.open_store import FILE, JobStore
from elaswave.control.post import Post, own_post
from elaswave.control.script import Script
from elaswave.control.step_calls import StepCalls
from elaswave.control.stop_signals import stop_signals
from elaswave.control.template import TemplateSetup
from elaswave.control.template_link import template_log
from elaswave.control.template_messages import (
    AbandonCommits,
    ChildGone,
    CommitDone,
    CommitShards,
    KillWorkers,
    LoaderGone,
    LoaderSpawned,
    Prepared,
    SpawnCoordinator,
    Spawned,
    SpawnRefused,
    SpawnWorkers,
    StartingPoint,
)
from elaswave.control.template_start import await_prepared
from elaswave.control.wire import agent_id
from elaswave.control.worker_looks import WorkerLooks
from elaswave.data.fingerprint import SampleHash
from elaswave.data.sampler import Sampler
from elaswave.errors import (
    ElaswaveError,
    LaunchError,
    NeedlessError,
    RecoveryError,
    RetryError,
    StoppedBySignalError,
    UsageError,
)
from elaswave.faults.injection import Fault
from elaswave.observability.progress import Reporter
from elaswave.observability.run_folder import CHECKPOINTS_DIR
from elaswave.protocol.agent import (
    Agent,
    AgentEvent,
    CoordinatorEnded,
    JobEnded,
    JoinerWanted,
    ReportEnd,
    StartCoordinator,
    StartJoiner,
    WorkerEnded,
)
from elaswave.protocol.events import CoordinatorEffect
from elaswave.protocol.template import COORDINATOR
from elaswave.protocol.vigil import ORPHAN_S, Due, Vigil
from elaswave.state.shapes import StateShapes
from elaswave.worker.probe import Probe
from elaswave.worker.run_plan import RunPlan

LAST_WORDS_S = 1.0
"""After the template's end, how long the coordinator may take to say whether the job was over before."""
STARTING_S = 10.0
"""Between two lines about a start that lasts."""
EXIT_GRACE_S = 10.0
"""After the end of the job, how long its processes may take to end."""
FAILED_GRACE_S = 0.5
"""The same after a failure: who is ending by itself may say so in its log; the others wait for what will not come."""
HEARTBEAT_S = 0.5
"""Between two heartbeats to the coordinator. They only let this side see that it is silent, within the time below, and
wake both processes."""
COORDINATOR_HUNG_S = 6.0
"""One that has not accepted it after this much more is killed, and followed by another as if it had died."""


class LocalJob:
    """A job on this machine: its processes, its socket folder, its agent. `end` leaves none of them behind.

    Args:
        config: with its layout resolved.
        run_dir: the run's folder.
        profile: also write a trace.
        reporter: shows progress.
        probe: told of every point of every step in every worker.
        faults: injected into workers and coordinator.
        before_effect: called in the coordinator before each effect of the protocol's core.
        started_s: monotonic time at which the command began.
        script: what a script trains; None: what the configuration describes.
        key: the job's.
        post: how this agent takes part; None: it is the job's only one.
    Raises:
        LaunchError: the system refuses a process, a folder or a port.
        UsageError: what the script trains cannot be sent to the job's processes, or its network cannot be used.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        profile: bool,
        reporter: Reporter,
        probe: Probe | None,
        faults: tuple[Fault, ...],
        before_effect: Callable[[CoordinatorEffect], None],
        started_s: float,
        script: Script | None = None,
        key: JobKey,
        post: Post | None = None,
    ) -> None:
        self._post = post = post or own_post()
        self._stop = AskedStop(post.leave_s)
        self._prepared: Prepared | None = None
        """What the template has said, once it is there."""
        self._script = script
        self._calls = StepCalls(script.on_step if script is not None else lambda step, loss, metrics: None)
        self._config = config
        self._run_dir = run_dir
        self._reporter = reporter
        self._profile = profile
        self._faults = faults
        self._before_effect = before_effect
        self._started_s = started_s
        self._has_stepped = False
        self._first_workers: set[int] = set()
        """Workers with which the job begins that the template was asked for."""
        self._refused: AgentRefused | None = None
        self._key_of_job = key
        self._say_at_s = STARTING_S
        """Seconds after the beginning at which the terminal hears again of a start that lasts."""
        self._agent = Agent()
        self._client: ControlClient[ToAgent] | None = None
        self._ended: Ended | None = None
        self._is_over = False
        self._coordinator_since_s = 0.0
        self._patience_s = COORDINATOR_HUNG_S
        """With a coordinator that does not accept the agent."""
        self._committing: int | None = None
        """Number of the commit that the template has been asked for and has not answered."""
        self._waits = LauncherWaits()
        self._logs = LogSending(run_dir)
        self._key = key.secret
        self._job_folder = JobFolder()
        self._folder = self._job_folder.path
        self._kept_port: socket.socket | None = None
        self._store: JobStore | None = None
        control = config.control
        self._vigil = Vigil(ORPHAN_S if control.store == FILE else max(ORPHAN_S, control.store_patience_s))
        try:
            if post.network is None:
                self._network, self._kept_port = open_network(config.net, self._folder, sum(config.widths))
            else:
                self._network, self._kept_port = post.network, post.kept_port
            if post.founds or post.is_candidate:
                self._store = JobStore(config.control, run_dir, self._folder, job=post.job, founds=post.founds)
        except BaseException:
            self._close_folder()
            raise
        self._founded = post.founded or (self._store.founded if self._store is not None else 0) or post.incarnation
        self._deaths = DeathWatch()
        self._commits = CommitCount() if post.job else None
        setup = TemplateSetup(
            config=config,
            run_dir=run_dir,
            control_dir=self._folder,
            network=self._network,
            key=self._key,
            deaths=self._deaths,
            commits=self._commits,
            faults=faults,
            probe=probe,
            profile=profile,
            training=None if script is None else script.training,
            before_effect=before_effect,
            founded=self._founded,
            suffix=post.suffix,
        )
        try:
            self._processes = JobProcesses(setup, None if script is None else script.environment)
        except BaseException:
            if self._store is not None and post.founds:
                self._store.end(post.name if post.is_candidate else "")
            self._close_folder()
            raise
        self.template_pid = self._processes.template_pid
        self._selector = self._processes.selector
        self._looks = WorkerLooks(self._processes)
        leads = post.founds and not post.is_candidate
        self._candidacy = Candidacy(leads=leads, is_candidate=post.is_candidate, selector=self._selector)
        if post.founds:
            if post.job:
                write_marks(run_dir, post.job)
            self._write_control_file()

    def _write_control_file(self) -> None:
        try:
            write_control_file(self._run_dir, self._network, self._key_file(self._key_of_job))
        except OSError as error:
            self._reporter.message(f"elaswave ctl cannot reach this run, its key cannot be written: {error}")

    def _key_file(self, key: JobKey) -> Path:
        """Where operators of this machine read the key: no file of the run's folder holds it."""
        if key.file is not None:
            return key.file
        path = self._folder / JOB_KEY_FILE
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(key.secret)
        return path

    def _close_folder(self) -> None:
        if self._kept_port is not None:
            self._kept_port.close()
        self._job_folder.close()

    def await_template(self) -> StateShapes:
        """Waits until workers can be forked.

        Returns:
            The shapes of model and optimizer.
        Raises:
            LaunchError: torch or the model cannot be loaded.
            UsageError: what is to be trained cannot be.
        """
        return self._await_prepared().state

    def sample_hashes(self) -> list[SampleHash]:
        """Hashes of samples of a script's datasets; waits for the template, as `await_template`."""
        return self._await_prepared().samples

    def _await_prepared(self) -> Prepared:
        if self._prepared is not None:
            return self._prepared
        self._prepared = await_prepared(self._processes, self._template_log, self._say_starting)
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
        self._plan, self._sampler, self._checkpoint, self._way_on = plan, sampler, checkpoint, way_on
        self._calls.begin(0 if checkpoint is None else checkpoint.meta.step)
        if self._post.founds or self._post.is_candidate:
            self._start_coordinator()
        self._client = ControlClient(
            self._network.launcher_dials,
            self._key,
            agent_id(self._post.incarnation),
            ToAgent,
            self._on_message,
            self._hello,
            interval_s=HEARTBEAT_S,
            tls=self._network.tls,
            host=self._network.host,
            others=self._network.others,
            founded=self._founded,
        )
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
            self._check_template()  # its end may be the reason: then the workers have ended only after it
        self._selector.unregister(self._client.fileno())
        self._candidacy.close()
        if self._post.is_candidate and not self._candidacy.leads:
            self._processes.kill_coordinator()  # it waits for nothing any more
        self._client.close(1.0)
        self._client = None
        self._processes.ask_template(
            KillWorkers(workers=tuple(self._ended.lost))
        )  # who is cut off does not hear that it may go
        self._processes.reap_all(FAILED_GRACE_S if self._ended.outcome == "failed" else EXIT_GRACE_S)
        return self._ended

    def _loop(self) -> None:
        assert self._client is not None
        kill_at_s: float | None = None
        wait_s = 0.0
        while self._ended is None:
            self._processes.show()
            for key, _ in self._selector.select(max(0.0, min(TICK_S, wait_s))):
                if key.data == "signal":
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                elif key.data == TEMPLATE_EXIT:
                    self._check_template()
                elif key.data == COORDINATOR_EXIT:
                    at_s = time.monotonic()
                    self._on_coordinator_exit(self._processes.reap_coordinator(), at_s)
                elif key.data == TEMPLATE:
                    self._hear_template()
                elif key.data == CANDIDATE:
                    self._hear_candidate()
            if self._candidacy.is_due(time.monotonic()):
                self._start_coordinator()
            wait_s = self._client.turn()
            self._check_refused()
            overdue = self._waits.overdue(self._processes.template_facts, time.monotonic())
            if overdue is not None:
                raise RecoveryError(f"{overdue}; see {self._run_dir / 'logs'}; {self._way_on()}")
            for looked in self._looks.turn():
                self._client.send(looked)
            for part in self._logs.turn(time.monotonic()):
                self._client.send(part)
            if self._candidacy.leads:
                assert self._store is not None
                self._look_at_coordinator(self._client.disconnected_s, self._store.patience_s)
            self._keep_vigil()
            self._reporter.refresh()
            self._say_starting()
            if self._stop.signal is not None or self._calls.error is not None:
                now_s = time.monotonic()
                if kill_at_s is None:
                    kill_at_s = now_s + self._stop.grace_s
                    self._ask_to_stop()
                elif now_s > kill_at_s:
                    self._calls.raise_error()
                    assert self._stop.signal is not None
                    raise StoppedBySignalError(self._stop.signal, "killed: it did not end in time after the signal")
                if self._stop.is_leaving and not self._processes.workers:
                    self._client.close(1.0)
                    raise RetryError("this host's workers have left, as the notice asked for; the job goes on without")

    def _look_at_coordinator(self, disconnected_s: float, store_patience_s: float) -> None:
        """Has one killed that does not accept this agent."""
        age_s = time.monotonic() - self._coordinator_since_s
        if min(age_s, disconnected_s) > self._patience_s + store_patience_s:
            self._patience_s *= 2  # where none is ready in time, not one after the other is to be killed
            self._processes.kill_coordinator()
            self._waits.for_killed_coordinator(time.monotonic())

    def _hear_candidate(self) -> None:
        """A candidate's process has the job, or can be dialled; or its end of the pipe is closed."""
        assert self._client is not None
        for stage, term in self._candidacy.hear():
            if stage is Stage.HOLDS:
                self._candidacy.has_it()
                self._coordinator_since_s = time.monotonic()
                self._processes.has_taken_over()
                if term > 1:
                    self._reporter.message(f"this host has the job's coordinator from now on, its number {term}")
                    self._write_control_file()
            else:
                if self._client.connected:  # to one that was replaced, and may not know it: it may not reach the store
                    self._client.send(TermTaken(term=term))
                self._client.dial_first()

    def _keep_vigil(self) -> None:
        """Where another host has the coordinator: does what is due while it cannot be reached.

        Raises:
            RetryError: it could not be for too long, and this host's workers have not committed a step either.
        """
        assert self._client is not None
        has_coordinator = self._candidacy.leads or self._client.connected
        num_commits = 0 if self._commits is None else self._commits.value
        due = self._vigil.look(time.monotonic(), has_coordinator=has_coordinator, num_commits=num_commits)
        if due is Due.SEEK:
            found = late_outcome(self._config.control, self._post.job, self._run_dir)
            if found is not None:  # its workers wait for a coordinator, which does not come any more
                self._ended = msgspec.structs.replace(found, lost=self._processes.workers)
        elif due is Due.END:
            trouble = self._client.trouble or "nobody answers"
            raise RetryError(
                f"no coordinator for {self._vigil.alone_s:.0f} s at {self._network.launcher_dials} ({trouble}), and no "
                f"step committed here; {self._way_on()}"
            )

    @property
    def stop_signal(self) -> int | None:
        """The first signal that has asked this agent to stop; None: there was none."""
        return self._stop.signal

    @property
    def _template_log(self) -> Path:
        return self._run_dir / "logs" / template_log(self._post.suffix)

    def _say_starting(self) -> None:
        """Until the first step has been made, says now and then that the job is at it: a large model takes its time."""
        waited_s = time.monotonic() - self._started_s
        if not self._has_stepped and waited_s >= self._say_at_s:
            self._say_at_s = waited_s + STARTING_S
            what = f"{sum(self._config.widths)} workers are starting, and making the first step"
            if self._post.job and not self._first_workers:
                what = f"{self._post.node} waits until it is to start workers; the job begins with "
                what += f"{self._config.control.hosts} hosts"
            self._reporter.message(f"{what}: {waited_s:.0f} s so far")

    def _check_refused(self) -> None:
        """Ends this agent if the coordinator does not want it.

        Raises:
            ElaswaveError: as of `refusal`.
        """
        if self._refused is not None:
            raise refusal(self._refused)

    def _ask_to_stop(self) -> None:
        """Passes a signal on; later coordinators are told with the hello."""
        assert self._client is not None
        name = self._stop.name
        if self._stop.is_leaving:
            assert self._post.leave_s is not None
            self._reporter.message(f"{name}: this host's workers leave; a second signal ends them at once")
            self._client.send(AgentLeaving(left_s=self._post.leave_s))
            return
        self._reporter.message(f"{name}: ending after this step, with a checkpoint; Ctrl-C ends at once")
        self._client.send(StopJob())

    # ----------------------------------------------------------------------------------------------------- coordinator

    def _hello(self) -> AgentHello:
        exited = [Exited(worker=end.worker, text=end.text) for end in self._agent.worker_ends]
        post = self._post
        self._logs.connected()
        stop = (self._stop.signal is not None or self._calls.error is not None) and not self._stop.is_leaving
        return AgentHello(
            node=post.node,
            incarnation=post.incarnation,
            slots=post.slots,
            exited=exited,
            stop=stop,
            called_step=self._calls.last_step,
            folder=mark_of(self._run_dir) if post.job else "",
            leaving_s=post.leave_s if self._stop.is_leaving else None,
        )

    def _on_message(self, message: ToAgent) -> None:
        if isinstance(message, ShowStep):
            self._has_stepped = True
            self._reporter.step(
                message.step,
                message.total_steps,
                message.loss,
                message.rate,
                message.data_pass,
                message.epoch,
                message.layout_name,
                SAMPLES_PER_S if message.counts_samples else TOKENS_PER_S,
            )
            self._calls.published(message.step, message.loss, message.metrics)
        elif isinstance(message, StepLosses):
            for step, (loss, metrics) in enumerate(zip(message.losses, message.metrics), message.first_step):
                self._calls.published(step, loss, metrics)
        elif isinstance(message, ShowEvaluation):
            self._reporter.evaluation(message.step, message.loss)
        elif isinstance(message, ShowText):
            (self._reporter.error if message.is_error else self._reporter.message)(message.text)
        elif isinstance(message, Awaited):
            self._looks.asked(message)
        elif isinstance(message, SendLogs):
            self._logs.wanted()
        elif isinstance(message, CommitCheckpoint):
            self._committing = message.number
            self._processes.ask_template(CommitShards(number=message.number, request=message.request))
        elif isinstance(message, BreakOffCommit):
            if message.number == self._committing:
                self._processes.ask_template(AbandonCommits())
        elif isinstance(message, SpawnFirst):
            unknown = set(message.workers).difference(self._first_workers)
            self._first_workers.update(unknown)
            if unknown:
                first = tuple(sorted(unknown))
                for worker in first:
                    self._logs.started(worker)
                checkpoint = _as_seen_from(self._run_dir, message.checkpoint)
                self._processes.ask_template(SpawnWorkers(workers=first, checkpoint=checkpoint))
                self._waits.for_forks(first, time.monotonic())
        elif isinstance(message, AgentRefused):
            self._refused = message
        elif isinstance(message, SpawnJoiner):
            for effect in self._agent.handle(JoinerWanted(message.worker)):
                assert isinstance(effect, StartJoiner)
                self._logs.started(effect.worker)
                self._processes.ask_template(template_messages.SpawnJoiner(worker=effect.worker))
        elif isinstance(message, EndJoiner):
            if message.worker in self._agent.joiners:
                self._processes.ask_template(KillWorkers(workers=(message.worker,)))
        elif isinstance(message, StopAsked):
            self._stop.by_coordinator(message.cause)
        elif isinstance(message, Ended):
            self._ended = message
            self._agent.handle(JobEnded())

    def _start_coordinator(self) -> None:
        """Starts a coordinator.

        Raises:
            RecoveryError: the journal of the one before is gone, and with it what the job has decided.
        """
        assert self._store is not None
        try:
            self._store.check()
        except RecoveryError as error:
            raise RecoveryError(f"{error}; {self._way_on()}") from None
        self._coordinator_since_s = time.monotonic()
        number = 1 + len(self._agent.coordinator_ends_s)
        if self._script is not None:
            message = SpawnCoordinator(
                num_samples=self._sampler.num_samples,
                checkpoint=self._checkpoint,
                started_s=self._started_s,
                coordinator_ends_s=tuple(self._agent.coordinator_ends_s),
                home=self._post.incarnation,
            )
            self._processes.ask_for_coordinator(number, message)
            self._waits.for_forks((COORDINATOR,), time.monotonic())
            return
        setup = CoordinatorSetup(
            plan=self._plan,
            sampler=self._sampler,
            run_dir=self._run_dir,
            control_dir=self._folder,
            listen=self._network.listen,
            key=self._key,
            checkpoint=None if self._checkpoint is None else (Path(self._checkpoint.folder), self._checkpoint.meta),
            started_s=self._started_s,
            deaths=self._deaths,
            faults=self._faults,
            coordinator_ends_s=tuple(self._agent.coordinator_ends_s),
            before_effect=self._before_effect,
            home=self._post.incarnation,
            job=self._post.job,
            founded=self._founded,
            lost_s=self._candidacy.missed_since_s,
            profile=self._profile,
            tls=self._network.tls,
        )
        if not self._post.is_candidate:
            self._processes.start_coordinator(number, lambda: run_coordinator(setup))
            return
        writes = self._candidacy.open()

        def stand_by() -> int:
            name, founds = self._post.name, self._post.founds
            return run_candidate(setup, name, founds, lambda progress: _tell(writes, progress))

        try:
            self._processes.start_coordinator(number, stand_by, waits=True)
        finally:
            os.close(writes)

    def _on_coordinator_exit(self, text: str, at_s: float) -> None:
        assert self._client is not None
        self._waits.coordinator_ended()
        self._client.turn()  # its last words
        if self._candidacy.ended(at_s, was_replaced=text.endswith(f"with status {SUPERSEDED}")):
            return
        if text.endswith(f"with status {STORE_GONE}"):
            log = self._run_dir / "logs" / "coordinator.log"
            raise RetryError(f"the coordinator was lost, and the store does not answer the next one; see {log}")
        self._candidacy.missed_since_s = at_s
        for effect in self._agent.handle(CoordinatorEnded(text, _gave_up(text), at_s)):
            if not isinstance(effect, StartCoordinator):
                assert not isinstance(effect, ReportEnd | StartJoiner)
                raise RecoveryError(f"{effect.reason}; see {self._run_dir / 'logs' / 'coordinator.log'}")
            if self._committing is None:
                self._start_coordinator()
            else:
                # The next one may go back behind that checkpoint: it must not appear when it has looked.
                self._waits.for_commit(at_s)
                self._processes.ask_template(AbandonCommits())

    # -------------------------------------------------------------------------------------------------------- template

    def _hear_template(self) -> None:
        for message in self._processes.hear_template():
            if isinstance(message, ChildGone) and message.child == COORDINATOR:
                self._on_coordinator_exit(how_it_ended(message.status), message.at_s)
            elif isinstance(message, ChildGone):
                self._on_worker_end(WorkerEnded(message.child, how_it_ended(message.status), message.at_s))
            elif isinstance(message, CommitDone):
                self._on_commit_done(message)
            elif isinstance(message, SpawnRefused):
                self._on_refused(message)
            else:
                assert isinstance(message, Spawned | LoaderSpawned | LoaderGone), message
                if isinstance(message, Spawned):
                    self._waits.forked(message.child)

    def _on_refused(self, message: SpawnRefused) -> None:
        """The job goes on without a joiner that the system has no room for, and not without any other process.

        Raises:
            LaunchError: it is another one.
        """
        if message.child not in self._agent.joiners:
            raise LaunchError(message.text)
        self._processes.ask_template(KillWorkers(workers=(message.child,)))  # it may be a loader that is lacking
        self._on_worker_end(WorkerEnded(message.child, f"was not started: {message.text}", time.monotonic()))

    def _on_worker_end(self, event: AgentEvent) -> None:
        for effect in self._agent.handle(event):
            assert isinstance(effect, ReportEnd)
            last_words = self._logs.ended(effect.end.worker)
            if self._client is not None:
                for message in (*last_words, Exited(worker=effect.end.worker, text=effect.end.text)):
                    self._client.send(message)

    def _on_commit_done(self, message: CommitDone) -> None:
        if message.number == self._committing:
            self._committing = None
        if self._waits.is_for_commit:
            if self._committing is None:
                self._waits.commit_ended()
                self._start_coordinator()
        elif self._client is not None:
            self._client.send(CheckpointCommitted(number=message.number, error=message.error, again=message.again))

    def _check_template(self) -> None:
        """Ends the job if the template has ended, and with it the workers, before the job was over.

        Raises:
            RecoveryError: it has.
        """
        text = self._processes.template_end()
        if text is None:
            return
        assert self._client is not None
        deadline_s = time.monotonic() + LAST_WORDS_S
        while self._ended is None and time.monotonic() < deadline_s:
            self._client.turn(TICK_S)
        if self._ended is None or self._ended.outcome == "failed":  # a coordinator knows only that workers have ended
            raise RecoveryError(
                f"the template process, from which the workers are forked, {text}, and all workers have ended with it "
                f"(see {self._template_log}); {self._way_on()}"
            )

    def finish_calls(self, losses: Sequence[float], metrics: Mapping[str, Sequence[float]]) -> None:
        """Calls back for steps that no coordinator has told of.

        Args:
            losses: of every step from the first one.
            metrics: of the same steps by name.
        """
        for step, loss in enumerate(losses, 1):
            self._calls.published(step, loss, {name: values[step - 1] for name, values in metrics.items()})

    def raise_callback_error(self) -> None:
        """Raises what a script's callback has raised, if one has: the job has ended because of it."""
        self._calls.raise_error()

    def end(self) -> None:
        """Ends all processes and removes the temporary files. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        is_ours = self._candidacy.leads or (self._post.founds and not self._candidacy.had_it)
        if is_ours:
            remove_control_file(self._run_dir)
        self._candidacy.close()
        self._processes.end()
        if self._client is not None:
            self._client.close(0.0)
        # Of a job that may go on others need what is in the store.
        may_go_on = bool(self._post.job) and self._ended is None and self._candidacy.had_it
        name = self._post.name if self._post.is_candidate else ""
        outcome = msgspec.json.encode(self._ended) if self._post.job and self._ended is not None else None
        self._close_folder()
        if self._store is None or not is_ours or may_go_on:
            return
        # Who was told to stop, or has waited for the store in vain, does not wait for it now.
        is_patient = outcome is not None and self._stop.signal is None and not (self._ended and self._ended.again)
        founded = self._founded if self._post.job else 0
        trouble = self._store.end(name, outcome, founded, is_patient=is_patient, say=self._reporter.message)
        if trouble:
            self._reporter.message(trouble)


def refusal(refused: AgentRefused) -> ElaswaveError:
    """What ends an agent that may not take part: a person's mistake (`UsageError`), another agent of its node
    (`NeedlessError`), or what a later one may not meet (`RetryError`)."""
    if refused.verdict == "needless":
        return NeedlessError(refused.reason)
    return RetryError(refused.reason) if refused.verdict == "again" else UsageError(refused.reason)


def _tell(writes: int, progress: Progress) -> None:
    """In a candidate's process: a report to its agent, which may have ended, and with it this process."""
    with contextlib.suppress(OSError):
        os.write(writes, progress.line())


def _as_seen_from(run_dir: Path, checkpoint: StartingPoint | None) -> StartingPoint | None:
    """A checkpoint that the coordinator names by its own path, as this host has it."""
    if checkpoint is None:
        return None
    folder = run_dir / CHECKPOINTS_DIR / Path(checkpoint.folder).name
    return StartingPoint(folder=str(folder), meta=checkpoint.meta)


def _gave_up(text: str) -> bool:
    """Whether a coordinator has ended by an error that another one would meet too."""
    return text.endswith(("with status 1", f"with status {SUPERSEDED}"))
