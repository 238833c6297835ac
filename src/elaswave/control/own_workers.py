"""An agent's workers: begun as the coordinator asks for them, and what is to be told of their ends."""

import time
from collections.abc import Sequence
from pathlib import Path

from elaswave.channel.messages.agent import EndJoiner, Exited, LogPart, SpawnFirst, SpawnJoiner
from elaswave.control import template_messages
from elaswave.control.job_processes import JobProcesses
from elaswave.control.launcher_waits import LauncherWaits
from elaswave.control.log_sending import LogSending
from elaswave.control.template_messages import KillWorkers, SpawnRefused, SpawnWorkers
from elaswave.errors import LaunchError
from elaswave.job.plan import StartingPoint
from elaswave.protocol.agent import Agent, JoinerWanted, ReportEnd, StartJoiner, WorkerEnded


class OwnWorkers:
    """Of one agent.

    Args:
        agent: the machine that knows who was started and who has ended.
        processes: has the template, which forks workers.
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
        """Workers with which the job begins that the template was asked for."""

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
                self._processes.ask_template(SpawnWorkers(workers=first, checkpoint=checkpoint))
                self._waits.for_forks(first, time.monotonic())
        elif isinstance(message, SpawnJoiner):
            for effect in self._agent.handle(JoinerWanted(message.worker)):
                assert isinstance(effect, StartJoiner)
                self._logs.started(effect.worker)
                self._processes.ask_template(template_messages.SpawnJoiner(worker=effect.worker))
        elif message.worker in self._agent.joiners:
            self._processes.ask_template(KillWorkers(workers=(message.worker,)))

    def ended(self, end: WorkerEnded) -> Sequence[LogPart | Exited]:
        """One has ended; returns what the coordinator is to be told."""
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
        self._processes.ask_template(KillWorkers(workers=(message.child,)))  # it may be a loader that is lacking
        return self.ended(WorkerEnded(message.child, f"was not started: {message.text}", time.monotonic()))


def _as_seen_from(run_dir: Path, checkpoint: StartingPoint | None) -> StartingPoint | None:
    """A checkpoint that the coordinator names by its own path, as this host has it."""
    if checkpoint is None:
        return None
    there = Path(checkpoint.folder)
    folder = run_dir / there.parent.name / there.name
    return StartingPoint(folder=str(folder), meta=checkpoint.meta)
