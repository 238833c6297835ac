"""An agent's workers: begun as the coordinator asks for them, and what it is told of their ends, processor time and
logs. Only the agent can look at their processes and files: a coordinator may be on another host.

The keys that an agent's processes go by, and how they are exchanged while the job runs.

An agent that starts no coordinator only ever holds what those who take part must hold, and is told it. The one that
starts them reads the job's new key itself, from the file beside its old one: so the job's key crosses no connection to
an agent, and who holds a joining key alone, whomever it poses as, neither learns the job's nor gives it another one.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elaswave.channel.messages.agent import Awaited, CpuTimes, Exited, LogPart, SpawnFirst
from elaswave.errors import LaunchError, UsageError
from elaswave.job.keys import JobKey, KeyRole, next_file, read_key
from elaswave.job.plan import StartingPoint
from elaswave.launcher.forkserver.messages import KillWorkers, SpawnRefused, SpawnWorkers, TakeKeys
from elaswave.launcher.processes import TICK_S, JobProcesses, LauncherWaits
from elaswave.observability.processes import ProcessorWaits
from elaswave.observability.run_folder import LogTail
from elaswave.protocol.coordinator.key_change import RETIRED_MAX
from elaswave.protocol.membership.agent import Agent, ReportEnd, WorkerEnded
from elaswave.protocol.membership.effects import EndJoiner, SpawnJoiner
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
