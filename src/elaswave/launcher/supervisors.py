"""How an agent looks after a job's processes: its workers, the keys that all of them go by, its coordinators.

Workers are begun as the coordinator asks for them, and it is told of their ends, processor time and logs. Only the
agent can look at their processes and files: a coordinator may be on another host.

An agent that starts no coordinator only ever holds the keys that those who take part must hold, and is told them. The
one that starts them reads the job's new key itself, from the file beside its old one: so the job's key crosses no
connection to an agent, and who holds a joining key alone, whomever it poses as, neither learns the job's nor gives it
another one.

Coordinators come one after the other: each end is answered with the next one, and one that does not answer is ended. A
checkpoint that is being committed for one of them comes to its end before the next one looks. A coordinator is a fork
of the agent, which may be a candidate that waits, or, where a script's process must not fork, of the forkserver. A
candidate's process says by a pipe how far it is. When the next one is started, and when an agent without a coordinator
looks how the job has ended or gives up, is `elaswave.protocol.membership.agent`'s.
"""

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from elaswave.channel.messages.agent import (
    Awaited,
    BreakOffCommit,
    CheckpointCommitted,
    CommitCheckpoint,
    CpuTimes,
    Ended,
    Exited,
    LogPart,
    SpawnFirst,
)
from elaswave.config.schema import ControlConfig
from elaswave.coordinator.job_spec import CoordinatorSetup
from elaswave.coordinator.process import DISPLACED, PORT_TAKEN, STORE_GONE, SUPERSEDED, run_candidate, run_coordinator
from elaswave.errors import ConfigError, LaunchError, RecoveryError, RetryError, StoreError, UsageError
from elaswave.job.keys import JobKey, KeyRole, next_file, read_key
from elaswave.job.plan import StartingPoint
from elaswave.job.setup import AgentRole
from elaswave.launcher.forkserver.machine import COORDINATOR
from elaswave.launcher.forkserver.messages import (
    AbandonCommits,
    CommitCount,
    CommitDone,
    CommitShards,
    KillWorkers,
    SpawnCoordinator,
    SpawnRefused,
    SpawnWorkers,
    TakeKeys,
)
from elaswave.launcher.processes import TICK_S, JobProcesses, LauncherWaits
from elaswave.observability.processes import ProcessorWaits
from elaswave.observability.run_folder import RESULT_FILE, LogTail
from elaswave.protocol.coordinator.key_change import RETIRED_MAX
from elaswave.protocol.membership.agent import (
    ORPHAN_S,
    Agent,
    CoordinatorEnded,
    CoordinatorTimeout,
    ReportEnd,
    Standby,
    StartCoordinator,
    TimeoutAction,
    WorkerEnded,
)
from elaswave.protocol.membership.effects import EndJoiner, SpawnJoiner
from elaswave.store.claim import CandidateProgress, progress_of
from elaswave.store.opening import FILE, JobStore, read_outcome
from elaswave.transport.handshake import KeyRing, Secrets

SEND_LOGS_EVERY_S = 0.5
LOOK_S = 1.0
"""Between two looks at the processes of workers that have not registered."""
LOOK_AT_SILENT_S = 0.9 * TICK_S
"""Between two looks at the processes of workers that are silent: every turn of the loop, if nothing wakes it."""


class LogSending:
    """Sends the logs of one host's workers to a coordinator whose run folder is another one.

    It is asked to on each connection (`SendLogs`). Nothing is kept for later: what cannot be sent stays in the log's
    file on this host, from which the next part is read.

    Args:
        run_dir: of this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._is_wanted = False
        self._tails: dict[int, LogTail] = {}
        self._looked_s = 0.0

    def started(self, worker: int) -> None:
        """A worker is being started here."""
        self._tails[worker] = LogTail(self._run_dir, worker)

    def connected(self) -> None:
        """There is a new connection: a coordinator asks for logs if it wants them."""
        self._is_wanted = False

    def wanted(self) -> None:
        """The coordinator wants them."""
        self._is_wanted = True

    def ended(self, worker: int) -> list[LogPart]:
        """Returns the last words of a worker that has ended, which are to be sent before that is said."""
        tail = self._tails.pop(worker, None)
        return [] if tail is None or not self._is_wanted else _parts({worker: tail.next(is_last=True)})

    def turn(self, now_s: float) -> list[LogPart]:
        """Returns, now and then, what has been printed."""
        if not self._is_wanted or now_s - self._looked_s < SEND_LOGS_EVERY_S:
            return []
        self._looked_s = now_s
        return _parts({worker: tail.next() for worker, tail in self._tails.items()})


class WorkerSupervisor:
    """Of one agent.

    Args:
        agent: the machine that knows who was started and who has ended.
        processes: has the forkserver, which forks workers.
        logs: what workers print.
        waits: of the agent.
        run_dir: the run's folder on this host.
    """

    def __init__(
        self, agent: Agent, processes: JobProcesses, logs: LogSending, waits: LauncherWaits, run_dir: Path
    ) -> None:
        self._agent, self._processes, self._logs, self._waits = agent, processes, logs, waits
        self._run_dir = run_dir
        self._first: set[int] = set()
        """Workers with which the job begins that the forkserver was asked for."""

    @property
    def has_first(self) -> bool:
        """Whether any was asked for with which the job begins."""
        return bool(self._first)

    def wanted(self, message: SpawnFirst | SpawnJoiner | EndJoiner) -> None:
        """The coordinator wants some started, or one that joins ended; it may say so again."""
        if isinstance(message, SpawnFirst):
            first = tuple(sorted(set(message.workers).difference(self._first)))
            self._first.update(first)
            if first:
                for worker in first:
                    self._logs.started(worker)
                checkpoint = _as_seen_from(self._run_dir, message.checkpoint)
                self._processes.ask_forkserver(SpawnWorkers(workers=first, checkpoint=checkpoint))
                self._waits.for_forks(first, time.monotonic())
        elif isinstance(message, SpawnJoiner):
            for effect in self._agent.handle(message):
                assert isinstance(effect, SpawnJoiner)
                self._logs.started(effect.worker)
                self._processes.ask_forkserver(effect)
        elif message.worker in self._agent.joiners:
            self._processes.ask_forkserver(KillWorkers(workers=(message.worker,)))

    def ended(self, end: WorkerEnded) -> Sequence[LogPart | Exited]:
        """Notes that one has ended; returns what the coordinator is to be told."""
        told: list[LogPart | Exited] = []
        for effect in self._agent.handle(end):
            assert isinstance(effect, ReportEnd)
            told += self._logs.ended(effect.end.worker)
            told.append(Exited(worker=effect.end.worker, text=effect.end.text))
        return told

    def refused(self, message: SpawnRefused) -> Sequence[LogPart | Exited]:
        """The job goes on without a joiner that the system has no room for, and not without any other process.

        Returns:
            What the coordinator is to be told.
        Raises:
            LaunchError: it is another one.
        """
        if message.child not in self._agent.joiners:
            raise LaunchError(message.text)
        self._processes.ask_forkserver(KillWorkers(workers=(message.child,)))  # it may be a loader that is lacking
        return self.ended(WorkerEnded(message.child, f"was not started: {message.text}", time.monotonic()))


def _as_seen_from(run_dir: Path, checkpoint: StartingPoint | None) -> StartingPoint | None:
    """Maps a checkpoint that the coordinator names by its own path to the one that this host has."""
    if checkpoint is None:
        return None
    there = Path(checkpoint.folder)
    folder = run_dir / there.parent.name / there.name
    return StartingPoint(folder=str(folder), meta=checkpoint.meta)


def _parts(texts: dict[int, str]) -> list[LogPart]:
    return [LogPart(worker=worker, text=text) for worker, text in texts.items() if text]


class WorkerLooks:
    """Looks at workers that the coordinator waits for, or hears nothing of: how much they compute, and how long they
    have waited for a processor.

    Args:
        processes: of the agent.
    """

    def __init__(self, processes: JobProcesses) -> None:
        self._processes = processes
        self._awaited: tuple[int, ...] = ()
        """Workers that the coordinator waits for."""
        self._looked_s = 0.0
        self._silent: Mapping[int, ProcessorWaits] = {}
        """Workers of which the coordinator hears nothing."""
        self._looked_at_silent_s = 0.0

    def asked(self, message: Awaited) -> None:
        """Notes whom the coordinator waits for now."""
        self._awaited = message.workers
        now_s, pids = time.monotonic(), self._processes.pids_of(message.silent)
        self._silent = {worker: self._silent.get(worker) or ProcessorWaits(pid, now_s) for worker, pid in pids.items()}

    def turn(self) -> list[CpuTimes]:
        """Returns what to tell the coordinator now; is to be called often."""
        now_s, found = time.monotonic(), []
        if self._awaited and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            cpu_s = {worker: facts.cpu_s for worker, facts in self._processes.facts_of(self._awaited).items()}
            found.append(CpuTimes(cpu_s=cpu_s))
        if self._silent and now_s - self._looked_at_silent_s >= LOOK_AT_SILENT_S:
            self._looked_at_silent_s = now_s
            waited_s = {worker: waits.look(now_s) for worker, waits in self._silent.items()}
            found.append(CpuTimes(cpu_s={}, waited_s=waited_s))
        return found


class AgentKeys:
    """Of one agent.

    Args:
        key: that it was given.
        file: where the job's key stands, on the host where it is changed.
        starts_coordinators: whether it needs the job's own.
        told: the secrets of participants that the coordinator has told already; none: those that are made of `key`.
    Raises:
        UsageError: the key is of a role that may not do what this agent does.
    """

    def __init__(self, key: JobKey, file: Path, *, starts_coordinators: bool, sent: tuple[bytes, ...] = ()) -> None:
        self.job = Secrets((key.held(KeyRole.JOB),) if starts_coordinators else ())
        """The job's; none where no coordinator is started."""
        self.ring = KeyRing(Secrets(sent or (key.held(KeyRole.JOINING),)))
        """Of those who take part."""
        self._file = file

    def take(self, keys: tuple[bytes, ...]) -> str:
        """From now on others count.

        Args:
            keys: of those who take part.
        Returns:
            Why this agent cannot go by them; empty: it does.
        """
        if self.job.accepted:
            known = {JobKey(key, None).held(KeyRole.JOINING): key for key in self._known()}
            missing = [key for key in keys if key not in known]
            if missing:
                return f"it stands neither in {next_file(self._file)} nor in {self._file}, where the agent looks"
            job = tuple(known[key] for key in keys)
            left = tuple(key for key in self.job.accepted if key not in job)
            retired = tuple(key for key in (*self.job.retired, *left) if key not in job)
            self.job = Secrets(job, retired[-RETIRED_MAX:])
        self.ring.now = Secrets(keys)
        return ""

    def for_forkserver(self) -> TakeKeys:
        """Makes what the forkserver is told, which forks workers, and may fork coordinators."""
        return TakeKeys(keys=self.ring.now.accepted, job_keys=self.job.accepted, retired=self.job.retired)

    def _known(self) -> Iterator[bytes]:
        """Yields the job's keys that may count. One that was retired never does again: the old file may still be
        there."""
        yield from self.job.accepted
        for file in (next_file(self._file), self._file):
            with contextlib.suppress(UsageError):
                key = read_key(file)
                if key.role is KeyRole.JOB and key.secret not in self.job.retired:
                    yield key.secret


CANDIDATE = "candidate"
"""In the selector: what a candidate's process reports."""


class CandidateReports:
    """The pipe by which a candidate's process says how far it is.

    Args:
        selector: of the agent's loop.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._reads: int | None = None

    def open(self) -> int:
        """Opens a pipe for the next process; returns where it writes what it reports."""
        self.close()
        self._reads, writes = os.pipe()
        os.set_blocking(self._reads, False)
        self._selector.register(self._reads, selectors.EVENT_READ, CANDIDATE)
        return writes

    def close(self) -> None:
        """Hears nothing more of the present process."""
        if self._reads is not None:
            self._selector.unregister(self._reads)
            os.close(self._reads)
            self._reads = None

    def hear(self) -> Sequence[CandidateProgress]:
        """Reads what the process has said, or nothing if its end of the pipe is closed."""
        if self._reads is None:
            return ()
        try:
            said = progress_of(os.read(self._reads, 4096))
        except BlockingIOError:
            return ()  # what was to be read was of the candidate before
        if not said:
            self.close()
        return said


COORDINATOR_HUNG_S = 6.0
"""One that has not accepted its agent for this long is killed, and followed by another as if it had died."""


class CoordinatorStarts:
    """Of one agent.

    Args:
        setup: what its first coordinator is started with.
        agent_role: how the agent takes part.
        processes, standby, reports, waits: of the agent.
        by_forkserver: whether the forkserver forks coordinators.
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        agent_role: AgentRole,
        processes: JobProcesses,
        standby: Standby,
        reports: CandidateReports,
        waits: LauncherWaits,
        *,
        by_forkserver: bool,
    ) -> None:
        self._setup, self._agent_role = setup, agent_role
        self.keys = setup.keys
        """The job's, of those that are started from now on; the forkserver has its own."""
        self._processes, self._standby, self._reports, self._waits = processes, standby, reports, waits
        self._by_forkserver = by_forkserver

    def start(self, ends_s: tuple[float, ...]) -> None:
        """Starts the next one.

        Args:
            ends_s: monotonic times at which earlier ones have ended.
        Raises:
            LaunchError: the system refuses its process.
        """
        number, setup = 1 + len(ends_s), self._setup
        if self._by_forkserver:
            message = SpawnCoordinator(
                num_samples=setup.sampler.num_samples,
                checkpoint=setup.checkpoint,
                coordinator_ends_s=ends_s,
            )
            self._processes.ask_for_coordinator(number, message)
            self._waits.for_forks((COORDINATOR,), time.monotonic())
            return
        setup = setup._replace(keys=self.keys, coordinator_ends_s=ends_s, lost_s=self._standby.missed_since_s)
        if not self._agent_role.is_candidate:
            self._processes.start_coordinator(number, lambda: run_coordinator(setup))
            return
        writes = self._reports.open()

        def stand_by() -> int:
            name, creates_job = self._agent_role.name, self._agent_role.creates_job
            return run_candidate(setup, name, creates_job, lambda progress: _tell(writes, progress))

        try:
            self._processes.start_coordinator(number, stand_by, waits=True)
        finally:
            os.close(writes)


class CoordinatorSupervisor:
    """Of one agent.

    Args:
        starts: starts one.
        store: of the job; None: this agent starts none.
        agent: the machine that knows whether a coordinator is to be followed.
        processes, standby, waits: of the agent.
        log: what they print.
        way_on: says how the run can go on after its end.
    """

    def __init__(
        self,
        starts: CoordinatorStarts,
        store: JobStore | None,
        agent: Agent,
        processes: JobProcesses,
        standby: Standby,
        waits: LauncherWaits,
        log: Path,
        way_on: Callable[[], str],
    ) -> None:
        self._starts, self._store, self._agent = starts, store, agent
        self._processes, self._standby, self._waits = processes, standby, waits
        self._log, self._way_on = log, way_on
        self._since_s = 0.0
        self._patience_s = COORDINATOR_HUNG_S
        """With one that does not accept the agent."""
        self._committing: int | None = None
        """Number of the commit that the forkserver has been asked for and has not answered."""

    def start(self) -> None:
        """Starts the next one.

        Raises:
            RecoveryError: the journal of the one before is gone, and with it what the job has decided.
            LaunchError: the system refuses its process.
        """
        assert self._store is not None
        try:
            self._store.check()
        except RecoveryError as error:
            raise RecoveryError(f"{error}; {self._way_on()}") from None
        self._since_s = time.monotonic()
        self._starts.start(tuple(self._agent.coordinator_ends_s))

    def take_keys(self, keys: Secrets) -> None:
        """The job's key is changed: those that are started from now on go by others."""
        self._starts.keys = keys

    def turn(self, disconnected_s: float) -> None:
        """Starts the next candidate when it is due, and has a coordinator killed that does not accept this agent.

        Args:
            disconnected_s: how long the agent has had no connection.
        """
        if self._standby.is_due(time.monotonic()):
            self.start()
        if not self._standby.leads:
            return
        assert self._store is not None
        age_s = time.monotonic() - self._since_s
        if min(age_s, disconnected_s) > self._patience_s + self._store.patience_s:
            self._patience_s *= 2  # where none is ready in time, not one after the other is to be killed
            self._processes.kill_coordinator()
            self._waits.for_killed_coordinator(time.monotonic())

    def has_job(self) -> None:
        """The candidate's process has the job now."""
        self._standby.has_it()
        self._since_s = time.monotonic()
        self._processes.has_taken_over()

    def exited(self, text: str, at_s: float) -> None:
        """One has ended; its last words were heard.

        Args:
            text: how.
            at_s: when, monotonic.
        Raises:
            RetryError, RecoveryError: there can be no other one, here or at all.
            LaunchError: the system refuses the next one's process.
        """
        self._waits.coordinator_ended()
        # One that cannot be dialled leaves the job to other candidates, as one that was replaced.
        was_replaced, was_displaced = _has(text, SUPERSEDED, PORT_TAKEN), _has(text, DISPLACED)
        if self._standby.ended(at_s, was_replaced=was_replaced, was_displaced=was_displaced):
            return
        if _has(text, PORT_TAKEN):
            raise RetryError(f"another program has the coordinator's port on this host; see {self._log}")
        if _has(text, STORE_GONE):
            raise RetryError(f"the coordinator was lost, and the store does not answer the next one; see {self._log}")
        self._standby.missed_since_s = at_s
        for effect in self._agent.handle(CoordinatorEnded(text, _gave_up(text), at_s)):
            if not isinstance(effect, StartCoordinator):
                assert not isinstance(effect, ReportEnd | SpawnJoiner)
                raise RecoveryError(f"{effect.reason}; see {self._log}")
            if self._committing is None:
                self.start()
            else:
                # The next one may go back behind that checkpoint: it must not appear when it has looked.
                self._waits.for_commit(at_s)
                self._processes.ask_forkserver(AbandonCommits())

    def commit(self, message: CommitCheckpoint | BreakOffCommit) -> None:
        """The coordinator wants a checkpoint committed, or that broken off."""
        if isinstance(message, CommitCheckpoint):
            self._committing = message.number
            self._processes.ask_forkserver(CommitShards(number=message.number, request=message.request))
        elif message.number == self._committing:
            self._processes.ask_forkserver(AbandonCommits())

    def committed(self, message: CommitDone) -> CheckpointCommitted | None:
        """Notes that a commit has ended; returns what the coordinator is to be told, if there is one."""
        if message.number == self._committing:
            self._committing = None
        if not self._waits.is_for_commit:
            return CheckpointCommitted(number=message.number, error=message.error, again=message.again)
        if self._committing is None:
            self._waits.commit_ended()
            self.start()
        return None


def _gave_up(text: str) -> bool:
    """Tells whether a coordinator has ended by an error that another one would meet too."""
    return _has(text, 1, SUPERSEDED)


def _has(text: str, *statuses: int) -> bool:
    """Tells whether a process has ended with one of these."""
    return text.endswith(tuple(f"with status {status}" for status in statuses))


def _tell(writes: int, progress: CandidateProgress) -> None:
    """Writes, in a candidate's process, a report to its agent, which may have ended, and with it this process."""
    with contextlib.suppress(OSError):
        os.write(writes, progress.line())


_log = logging.getLogger("elaswave.launcher")


class WithoutCoordinator:
    """Of one agent of a job of several hosts. (That of a job of one starts its coordinators itself.)

    Args:
        config: which store.
        job: the job's name.
        run_dir: the run's folder on this host.
        key: the job's.
        job_generation: which job generation it takes part in.
    """

    def __init__(self, config: ControlConfig, job: str, run_dir: Path, key: JobKey, job_generation: int) -> None:
        self._config, self._job, self._run_dir, self._key, self._job_generation = (
            config,
            job,
            run_dir,
            key,
            job_generation,
        )
        self._coordinator_timeout = CoordinatorTimeout(
            ORPHAN_S if config.store == FILE else max(ORPHAN_S, config.store_patience_s)
        )
        self.commits = CommitCount()
        """Counts the steps that this host's workers commit."""
        self.gives_up = False
        """Whether it has been alone for too long."""

    @property
    def for_s(self) -> float:
        """How long it has been so."""
        return self._coordinator_timeout.without_s

    def look(self, *, has_coordinator: bool) -> Ended | None:
        """Does what is due; is to be called often, and may take a second or a little more.

        Returns:
            How the job has ended, if that was found out.
        """
        now_s, num_commits = time.monotonic(), self.commits.value
        due = self._coordinator_timeout.look(now_s, has_coordinator=has_coordinator, num_commits=num_commits)
        self.gives_up = due is TimeoutAction.END
        if due is not TimeoutAction.SEEK:
            return None
        return find_outcome(self._config, self._job, self._run_dir, self._key, self._job_generation)


def find_outcome(config: ControlConfig, job: str, run_dir: Path, key: JobKey, job_generation: int) -> Ended | None:
    """Finds out how the job has ended, for an agent that was cut off when its coordinator told the others (rule H13).

    It looks once, for a second or a little more: for the result in the run's folder, if hosts share it, and for any
    outcome in the job's store, if that is etcd.

    The run's log does not tell: what it ends with may be the end of one host's part.

    Args:
        config: which store.
        job: the name of a job of several hosts.
        run_dir: the run's folder on this host.
        key: of this agent. Without the job's it cannot tell whether an outcome in the store is genuine.
        job_generation: which job generation this agent takes part in.
    Returns:
        None: the job goes on, or nothing can be learned from here.
    """
    try:
        if (run_dir / RESULT_FILE).exists():
            return Ended(outcome="finished")
    except OSError as error:
        _log.info("this agent cannot look for the result: %s", error)
    try:
        found = None if key.role is not KeyRole.JOB else read_outcome(config, job, key.secret, job_generation)
        return None if found is None else msgspec.json.decode(found, type=Ended)
    except (StoreError, ConfigError, msgspec.MsgspecError) as error:
        _log.info("the store does not tell this agent how the job has ended: %s", error)
        return None
