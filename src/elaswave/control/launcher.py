"""Runs a job on this machine: this process is the agent of its node, forks coordinator and workers, has the terminal.

The agent sees at once when a process ends. A worker's end it reports to the coordinator; a coordinator's end it answers
with a new coordinator. Whatever happens, no process outlives the job: children ask the kernel to be killed when their
parent dies, and this process kills and reaps whoever is left. It has no threads, so it may fork at any time.
"""

import contextlib
import io
import os
import secrets
import selectors
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from elaswave.config.schema import Config
from elaswave.control.agent_messages import (
    AgentHello,
    Awaited,
    CpuTimes,
    Ended,
    Exited,
    ShowEvaluation,
    ShowStep,
    ShowText,
    StopJob,
    ToAgent,
)
from elaswave.control.client import ControlClient
from elaswave.control.coordinator import JOURNAL_FILE, CoordinatorSetup, run_coordinator
from elaswave.control.death_watch import DeathWatch
from elaswave.control.descriptors import provide_descriptors
from elaswave.control.job_folder import JobFolder, refused, sweep_dead
from elaswave.control.memory_pressure import offer_to_kernel
from elaswave.control.parent_death import end_with_parent
from elaswave.control.terminal import AGENT
from elaswave.data.fingerprint import check_same_data, fingerprint_in, fingerprint_of
from elaswave.errors import (
    CheckpointError,
    RecoveryError,
    RunFolderError,
    StateError,
    StoppedBySignalError,
    WorkerError,
)
from elaswave.faults.injection import FAULTS_FILE, Fault, FaultProbe
from elaswave.observability.events import ErrorRaised, EventLog, RunFinished, StepCommitted, read_events
from elaswave.observability.processes import described, facts_of, remove_processes, write_processes
from elaswave.observability.progress import Reporter
from elaswave.observability.result import DIGESTS_FILE, EVENTS_FILE, RESULT_FILE, Result, read_result
from elaswave.observability.run_folder import write_data_facts
from elaswave.observability.trace import PART_PATTERN, merge_traces
from elaswave.protocol.agent import (
    Agent,
    AgentEvent,
    CoordinatorEnded,
    JobEnded,
    ReportEnd,
    StartCoordinator,
    WorkerEnded,
)
from elaswave.protocol.events import CoordinatorEffect
from elaswave.state.checkpoint import find_newest_checkpoint, newest_committed_step, put_aside, remove_stale
from elaswave.state.checkpoint_format import CheckpointMeta
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.frequency import check_available, remove_groups
from elaswave.worker.messages import ToWorker
from elaswave.worker.probe import NoProbe, Probe, Probes
from elaswave.worker.process import Mailbox, WorkerSetup, run_worker
from elaswave.worker.step import StepEngine

TICK_S = 0.2
LOOK_S = 1.0
"""Between two looks at the processes of workers that have not registered."""
HEARTBEAT_S = 0.25
STARTING_S = 10.0
"""Between two lines about a start that lasts."""
STOP_GRACE_S = 300.0
"""After the first signal, how long the step in hand and its checkpoint may take."""
EXIT_GRACE_S = 10.0
"""After the end of the job, how long its processes may take to end."""
FAILED_GRACE_S = 0.5
"""The same after a failure: who is ending by itself may say so in its log; the others wait for what will not come."""
COORDINATOR_SILENCE_S = 10.0
"""A coordinator that has not answered the agent for this long gets a new connection."""
COORDINATOR_HUNG_S = 6.0
"""One that has not accepted it after this much more is killed, and followed by another as if it had died."""
COMPUTE_NICENESS = 5
"""Computing yields to the threads and processes that keep the job together, which need little and need it at once."""
SWITCH_INTERVAL_S = 0.001
"""How long a worker's main thread may hold the interpreter while its control thread wants it."""
_STOP_SIGNALS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
}
"""Signals that end a job, as a person knows them."""


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    profile: bool = False,
    reporter: Reporter,
    probe: Probe | None = None,
    faults: tuple[Fault, ...] = (),
    before_effect: Callable[[CoordinatorEffect], None] = lambda effect: None,
) -> Result:
    """Trains to the end and writes the run folder.

    Args:
        config: with its layout resolved.
        run_dir: an existing folder, prepared for this run.
        resume: continue from its newest valid checkpoint.
        profile: also write a trace.
        reporter: shows progress.
        probe: told of every point of every step in every worker (for tests and benchmarks).
        faults: injected into workers and coordinator.
        before_effect: called in the coordinator before each effect of the protocol's core (for tests).
    Returns:
        What stands in ``result.json``.
    Raises:
        WorkerError: a worker has ended with an error of its own that ends the job.
        RecoveryError: too much was lost to go on.
        StateError: the state contradicts itself.
        LaunchError: the system refuses a process or a folder that the job needs.
        StoppedBySignalError: SIGINT, SIGTERM or SIGHUP; says from which checkpoint the run can go on.
        UsageError: the data or the run folder cannot be used, or too few files may be open.
        CheckpointError: resume is asked for and there is no valid checkpoint.
    """
    started_s = time.monotonic()
    check_available(config.device.frequency)
    provide_descriptors(sum(config.widths))
    blueprint = Blueprint(config)
    _ = blueprint.programs, blueprint.placement  # computed and checked once, inherited by all processes
    data_path = _check_data(blueprint, run_dir)
    fingerprint = fingerprint_of(data_path, whole=config.data.verify == "full")
    remove_stale(run_dir)
    checkpoint = None
    if resume:
        checkpoint = _newest_checkpoint(run_dir, reporter)
        _check_resumable(config, checkpoint[1], run_dir, reporter)
        warning = check_same_data(data_path, fingerprint_in(checkpoint[1].extra), fingerprint)
        if warning:
            reporter.message(f"warning: {warning}")
    write_data_facts(run_dir, fingerprint)
    # A run that goes on has no result until its new end, and no part of a trace of workers that are long gone.
    for stale in (
        run_dir / RESULT_FILE,
        run_dir / DIGESTS_FILE,
        run_dir / FAULTS_FILE,
        *run_dir.glob(PART_PATTERN),
    ):
        stale.unlink(missing_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    sweep_dead()
    job = _Job(
        blueprint,
        run_dir,
        checkpoint=checkpoint,
        profile=profile,
        reporter=reporter,
        probe=probe,
        faults=faults,
        before_effect=before_effect,
        started_s=started_s,
    )
    reporter.started(config, blueprint.layout, run_dir)
    try:
        ended = job.run()
        result = _outcome(ended, job.stop_signal, run_dir)
    except StoppedBySignalError as error:
        job.end()  # from now on nobody writes checkpoints
        raise StoppedBySignalError(error.signal_number, f"{error}; {_way_on(run_dir)}") from None
    finally:
        job.end()
        if config.device.frequency == "cgroup":
            remove_groups(os.getpid())
        if profile:
            merge_traces(run_dir)  # an interrupted run has recorded something too
        _close_log(run_dir, started_s, reporter)
    reporter.finished(result, run_dir)
    return result


def _newest_checkpoint(run_dir: Path, reporter: Reporter) -> tuple[Path, CheckpointMeta]:
    search = find_newest_checkpoint(run_dir)
    put_aside(search)
    for skipped in search.skipped:
        reporter.message(f"checkpoint {skipped.folder.name} is not used: {skipped.reason}")
    if search.newest is None:
        raise CheckpointError(
            f"{run_dir} has no valid checkpoint to resume from; start again with --overwrite, and set "
            "run.checkpoint_every or run.checkpoint_every_s to have one sooner next time"
        )
    return search.newest.folder, search.newest.meta


def _check_data(blueprint: Blueprint, run_dir: Path) -> Path:
    """The file of a run's data, which is good for it: bad data ends here, not in a worker."""
    source = blueprint.open_source(run_dir / "data")
    blueprint.sampler(source)
    return source.path


def _check_resumable(config: Config, meta: CheckpointMeta, run_dir: Path, reporter: Reporter) -> None:
    """Refuses to go on to a step that a run has behind it, and says so if it has all of them already."""
    if config.run.steps < meta.step:
        raise RunFolderError(
            f"the run in {run_dir} has {meta.step} steps already, and run.steps = {config.run.steps} asks for fewer: "
            "there is nothing to do; ask for more steps, or begin again with --overwrite"
        )
    if config.run.steps == meta.step:
        reporter.message(f"the run has all of its {meta.step} steps already: nothing is trained; ask for more steps")


def _outcome(ended: Ended, stop_signal: int | None, run_dir: Path) -> Result:
    """The result of a job that has finished; raises what ended any other."""
    if ended.outcome == "finished":
        return read_result(run_dir)
    if ended.outcome == "stopped":
        raise StoppedBySignalError(stop_signal or signal.SIGTERM, ended.reason)
    if ended.worker is not None:
        raise WorkerError(ended.worker, ended.reason, ended.traceback_text)
    raise (StateError if ended.is_state_error else RecoveryError)(ended.reason)


def _way_on(run_dir: Path) -> str:
    """How a run that was stopped can go on."""
    try:
        step = newest_committed_step(run_dir)
    except CheckpointError as error:
        return str(error)
    if step is None:
        return "it has no checkpoint, so it can only begin again (--overwrite)"
    command = f"elaswave train --resume --run-dir {shlex.quote(str(run_dir))}"
    return f"its newest checkpoint is of step {step}, to go on from there: {command}"


def _close_log(run_dir: Path, started_s: float, reporter: Reporter) -> None:
    """The log of a run always ends with how it ended, also when the coordinator could not say it."""
    events = read_events(run_dir / EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else []
    if not events or isinstance(events[-1], RunFinished):
        return
    error = sys.exception()
    steps = max((event.step for event in events if isinstance(event, StepCommitted)), default=0)
    with EventLog(run_dir / EVENTS_FILE, on_trouble=reporter.message) as log:
        stopped = isinstance(error, StoppedBySignalError)
        if not stopped:
            log.write(ErrorRaised(message=str(error)))
        log.write(
            RunFinished(
                outcome="interrupted" if stopped else "failed",
                steps=steps,
                duration_s=time.monotonic() - started_s,
                reason=str(error),
            )
        )


class _Child:
    """A process that this one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pid_fd = os.pidfd_open(pid)

    def reap(self) -> str:
        """Collects it after its end, and says how it ended."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pid_fd)
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.WEXITSTATUS(status)}"


_COORDINATOR = -1
_LAUNCHER = -2


class _Job:
    """The processes, the socket folder and the agent's side of a job. `end` leaves none of them behind."""

    def __init__(
        self,
        blueprint: Blueprint,
        run_dir: Path,
        *,
        checkpoint: tuple[Path, CheckpointMeta] | None,
        profile: bool,
        reporter: Reporter,
        probe: Probe | None,
        faults: tuple[Fault, ...],
        before_effect: Callable[[CoordinatorEffect], None],
        started_s: float,
    ) -> None:
        self.stop_signal: int | None = None
        self._has_stepped = False
        self._say_at_s = STARTING_S
        """Seconds after the beginning at which the terminal hears again of a start that lasts."""
        self._blueprint = blueprint
        self._run_dir = run_dir
        self._checkpoint = checkpoint
        self._profile = profile
        self._reporter = reporter
        self._probe = probe
        self._faults = faults
        self._before_effect = before_effect
        self._started_s = started_s
        self._key = secrets.token_bytes(32)
        self._job_folder = JobFolder()
        self._folder = self._job_folder.path
        # Made here, so that a coordinator that follows another one knows whether it is still there.
        (self._folder / JOURNAL_FILE).touch(0o600)
        self._listen = f"unix:{self._folder / 'control.sock'}"
        self._deaths = DeathWatch(blueprint.layout.workers)
        self._children: dict[int, _Child] = {}
        self._agent = Agent()
        self._selector = selectors.DefaultSelector()
        self._client: ControlClient[ToAgent] | None = None
        self._ended: Ended | None = None
        self._is_over = False
        self._processes = {_LAUNCHER: described("launcher", 0, os.getpid())}
        self._processes_changed = True
        self._awaited: tuple[int, ...] = ()
        """Workers that the coordinator waits for."""
        self._looked_s = 0.0
        self._coordinator_since_s = 0.0
        self._patience_s = COORDINATOR_HUNG_S
        """With a coordinator that does not accept the agent."""

    # --------------------------------------------------------------------------------------------------------- forking

    def _fork(self, name: int, log: str, body: Callable[[], int]) -> None:
        """Runs a function in a new process whose output goes to a log file.

        Raises:
            LaunchError: the system refuses another process.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            raise refused(
                error,
                f"the process of {'the coordinator' if name == _COORDINATOR else f'worker {name}'} cannot be started",
                "raise the limit of processes (ulimit -u, or the container's), free memory, or use fewer workers",
            ) from error
        if pid == 0:
            self._be_child(parent, self._run_dir / "logs" / log, body)
        self._children[name] = _Child(pid)
        self._selector.register(self._children[name].pid_fd, selectors.EVENT_READ, ("exit", name))
        coordinator = 1 + len(self._agent.coordinator_ends_s)
        self._processes[name] = (
            described("coordinator", coordinator, pid) if name == _COORDINATOR else described("worker", name, pid)
        )
        self._processes_changed = True

    def _be_child(self, parent: int, log: Path, body: Callable[[], int]) -> None:
        """The rest of a child's life; never returns."""
        status = 1
        try:
            end_with_parent(parent)
            # The agent decides what a signal to the whole process group means.
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)
                for number in _STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
            for child in self._children.values():
                os.close(child.pid_fd)
            self._selector.close()
            _redirect_output(log)
            status = body()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _fork_coordinator(self) -> None:
        """Starts a coordinator.

        Raises:
            RecoveryError: the journal of the one before is gone, and with it what the job has decided.
        """
        if not (self._folder / JOURNAL_FILE).exists():
            raise RecoveryError(
                f"the coordinator is lost, and so is its journal: somebody has removed {self._folder} while the job "
                f"ran; keep what cleans temporary folders away from there; {_way_on(self._run_dir)}"
            )
        setup = CoordinatorSetup(
            plan=self._blueprint,
            run_dir=self._run_dir,
            control_dir=self._folder,
            listen=self._listen,
            key=self._key,
            checkpoint=self._checkpoint,
            started_s=self._started_s,
            deaths=self._deaths,
            faults=self._faults,
            coordinator_ends_s=tuple(self._agent.coordinator_ends_s),
            before_effect=self._before_effect,
        )
        self._coordinator_since_s = time.monotonic()
        self._fork(_COORDINATOR, "coordinator.log", lambda: run_coordinator(setup))

    def _fork_worker(self, worker: int) -> None:
        clients: list[ControlClient[ToWorker]] = []

        def silence(engine: StepEngine, *, close_links: bool) -> None:
            """The `cut` faults: from now on nothing goes in or out of this worker."""
            clients[0].silence(True)
            if close_links:
                engine.transport.close()
            threading.Event().wait()

        probe: Probe = self._probe or NoProbe()
        if self._faults:
            seed = self._blueprint.config.run.seed
            faults = FaultProbe(self._faults, seed=seed, record=self._run_dir / FAULTS_FILE, silence=silence)
            probe = Probes(probe, faults)
        setup = WorkerSetup(
            config=self._blueprint.config,
            worker=worker,
            run_dir=self._run_dir,
            key=self._key,
            listen=f"unix:{self._folder}",
            checkpoint=self._checkpoint,
            probe=probe,
            profile=self._profile,
        )

        def make_client(mailbox: Mailbox) -> ControlClient[ToWorker]:
            self._deaths.live(worker)
            client: ControlClient[ToWorker] = ControlClient(
                self._listen,
                self._key,
                worker,
                ToWorker,
                mailbox.receive,
                mailbox.hello,
                facts=mailbox.standing,
                heartbeat=mailbox.heartbeat,
                interval_s=HEARTBEAT_S,
            )
            clients.append(client)
            client.start()
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTE_NICENESS)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            return client

        def live() -> int:
            offer_to_kernel()
            return run_worker(setup, make_client)

        self._fork(worker, f"worker-{worker}.log", live)

    # --------------------------------------------------------------------------------------------------------- running

    def run(self) -> Ended:
        """Starts everybody and stays until the job is over."""
        self._fork_coordinator()
        for worker in self._blueprint.layout.workers:
            self._fork_worker(worker)
        self._show_processes()
        self._client = ControlClient(
            self._listen,
            self._key,
            AGENT,
            ToAgent,
            self._on_message,
            self._hello,
            silence_timeout_s=COORDINATOR_SILENCE_S,
        )
        self._selector.register(self._client.fileno(), selectors.EVENT_READ, ("control", 0))
        with _signals(self._on_signal) as wake_fd:
            if wake_fd is not None:
                self._selector.register(wake_fd, selectors.EVENT_READ, ("signal", 0))
            try:
                self._loop()
            finally:
                if wake_fd is not None:
                    self._selector.unregister(wake_fd)
        assert self._ended is not None
        self._selector.unregister(self._client.fileno())
        self._client.close(1.0)
        self._client = None
        for worker in self._ended.lost:
            self._kill(worker)  # one that is cut off does not hear that it may go
        self._reap_all(FAILED_GRACE_S if self._ended.outcome == "failed" else EXIT_GRACE_S)
        return self._ended

    def _loop(self) -> None:
        assert self._client is not None
        kill_at_s: float | None = None
        wait_s = 0.0
        while self._ended is None:
            self._show_processes()
            for key, _ in self._selector.select(max(0.0, min(TICK_S, wait_s))):
                what, name = key.data
                if what == "signal":
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                elif what == "exit":
                    self._on_exit(name)
            wait_s = self._client.turn()
            self._look_at_awaited()
            age_s = time.monotonic() - self._coordinator_since_s
            if min(age_s, self._client.disconnected_s) > self._patience_s:
                self._patience_s *= 2  # where none is ready in time, not one after the other is to be killed
                self._kill(_COORDINATOR)
            self._reporter.refresh()
            self._say_starting()
            if self.stop_signal is not None:
                now_s = time.monotonic()
                if kill_at_s is None:
                    kill_at_s = now_s + STOP_GRACE_S
                    self._ask_to_stop()
                elif now_s > kill_at_s:
                    raise StoppedBySignalError(self.stop_signal, "killed: it did not end in time after the signal")

    def _look_at_awaited(self) -> None:
        """Tells the coordinator now and then how the workers get on that it waits for."""
        now_s = time.monotonic()
        if not self._awaited or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        assert self._client is not None
        found = {name: facts_of(self._children[name].pid) for name in self._awaited if name in self._children}
        cpu_s = {name: facts.cpu_s for name, facts in found.items() if facts is not None}
        self._client.send(CpuTimes(cpu_s=cpu_s))

    def _say_starting(self) -> None:
        """Until the first step has been made, says now and then that the job is at it: a large model takes its time."""
        waited_s = time.monotonic() - self._started_s
        if not self._has_stepped and waited_s >= self._say_at_s:
            self._say_at_s = waited_s + STARTING_S
            workers = len(self._blueprint.layout.workers)
            self._reporter.message(
                f"{workers} workers are starting, and making the first step: {waited_s:.0f} s so far"
            )

    def _ask_to_stop(self) -> None:
        """Passes a signal on; later coordinators are told with the hello."""
        assert self._client is not None and self.stop_signal is not None
        name = _STOP_SIGNALS[self.stop_signal]
        self._reporter.message(f"{name}: ending after this step, with a checkpoint; Ctrl-C ends at once")
        self._client.send(StopJob())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean end; another one ends at once, unless it is SIGHUP, which a terminal that
        closes may send twice, itself and by its shell."""
        if self.stop_signal is not None and number == signal.SIGHUP:
            return
        if self.stop_signal is not None:
            raise StoppedBySignalError(number, "stopped at once by a second signal")
        self.stop_signal = number

    def _hello(self) -> AgentHello:
        exited = [Exited(worker=end.worker, text=end.text, at_s=end.at_s) for end in self._agent.worker_ends]
        return AgentHello(exited=exited, stop=self.stop_signal is not None)

    def _on_message(self, message: ToAgent) -> None:
        if isinstance(message, ShowStep):
            self._has_stepped = True
            self._reporter.step(
                message.step,
                message.total_steps,
                message.loss,
                message.tokens_per_s,
                message.data_pass,
                message.epoch,
                message.layout_name,
            )
        elif isinstance(message, ShowEvaluation):
            self._reporter.evaluation(message.step, message.loss)
        elif isinstance(message, ShowText):
            (self._reporter.error if message.is_error else self._reporter.message)(message.text)
        elif isinstance(message, Awaited):
            self._awaited = message.workers
        else:
            self._ended = message
            self._agent.handle(JobEnded())

    def _on_exit(self, name: int) -> None:
        assert self._client is not None
        at_s = time.monotonic()
        text = self._collect(name)
        event: AgentEvent = WorkerEnded(name, text, at_s)
        if name == _COORDINATOR:
            self._client.turn()  # its last words
            event = CoordinatorEnded(text, text.endswith("with status 1"), at_s)
        for effect in self._agent.handle(event):
            if isinstance(effect, ReportEnd):
                end = effect.end
                self._client.send(Exited(worker=end.worker, text=end.text, at_s=end.at_s))
            elif isinstance(effect, StartCoordinator):
                self._fork_coordinator()
            else:
                raise RecoveryError(f"{effect.reason}; see {self._run_dir / 'logs' / 'coordinator.log'}")

    def _collect(self, name: int) -> str:
        """Reaps a child that has ended, and says how it did."""
        child = self._children.pop(name)
        self._selector.unregister(child.pid_fd)
        del self._processes[name]
        self._processes_changed = True
        return child.reap()

    def _show_processes(self) -> None:
        """Brings `processes.json` up to date, if it is not."""
        if self._processes_changed:
            self._processes_changed = False
            write_processes(self._run_dir, list(self._processes.values()))

    def _kill(self, name: int) -> None:
        """Kills a child that may have ended already; it is reaped as any other."""
        if name in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._children[name].pid, signal.SIGKILL)

    def _reap_all(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self._children and time.monotonic() < deadline_s and not self._only_stopped():
            for key, _ in self._selector.select(TICK_S):
                what, name = key.data
                if what == "exit":
                    self._collect(name)

    def _only_stopped(self) -> bool:
        """Whether all that are left are stopped (a hung worker): nothing to wait for."""
        for child in self._children.values():
            facts = facts_of(child.pid)
            if facts is not None and facts.state != "T":
                return False
        return True

    def end(self) -> None:
        """Kills and reaps whoever is left and removes the temporary files. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        for name in self._children:
            self._kill(name)
        for child in self._children.values():
            child.reap()
        self._children.clear()
        if self._client is not None:
            self._client.close(0.0)
        self._selector.close()
        remove_processes(self._run_dir)
        self._job_folder.close()


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[int | None]:
    """Handles the signals that end a job; yields a descriptor that each makes readable (None outside the main thread).

    One that is ignored stays ignored: that is how nohup works.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    heard = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in heard}
    previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield read_fd
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, old in previous.items():
            signal.signal(number, old)
        os.close(read_fd)
        os.close(write_fd)


def _redirect_output(path: Path) -> None:
    """Points standard output and error at a log file and standard input at nothing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    # The inherited text layers may hold a parent's state.
    sys.stdout, sys.stderr = _LogStream(1), _LogStream(2)


class _LogStream(io.TextIOBase):
    """Text that goes to a log file at once. What the file does not take (a full disk) is dropped: no process of a job
    ends because it could not print.

    Args:
        fd: of the file.
    """

    encoding = "utf-8"

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        return len(text)
