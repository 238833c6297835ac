"""The forkserver as a machine: whom it forks, and what it tells the launcher of their ends. No IO.

The launcher asks, the forkserver answers; the launcher's messages are events of the machine as they come. A worker's id
is forked once, and with it the loaders of its data; one of those is replaced when the worker asks for it, and they end
with the worker. One checkpoint is committed at a time, by a process of its own, the committer; a request that is
repeated is answered again, since its answer may have been lost.
A coordinator that asks for another commit has given up the one before: its committer is killed, and the next one is
forked only once that has ended, since until then it can still give its checkpoint the final name.
Where the launcher must not fork, coordinators are forked here too, one after the other.
When the launcher is gone, or wants the end, the others are killed at once and a commit in hand is finished.
"""

from typing import NamedTuple

from elaswave.launcher.forkserver.messages import (
    AbandonCommits,
    CommitShards,
    KillWorkers,
    SpawnCoordinator,
    SpawnWorkers,
)
from elaswave.protocol.membership.effects import SpawnJoiner

COMMITTER = -1
"""Names the process that commits a checkpoint, among the ids of workers."""
COORDINATOR = -2
"""Names the coordinator, among the ids of workers."""


class Loader(NamedTuple):
    """Names a process that makes micro-batches for a worker."""

    worker: int
    number: int
    """Among the loaders of the worker, from 0."""


class LoaderAsked(NamedTuple):
    """A worker wants another loader in the place of one that has ended, or hangs."""

    loader: Loader


class ForkRefused(NamedTuple):
    """The system refuses a process: there is none that could end."""

    child: int | Loader


class ChildEnded(NamedTuple):
    """A forked process has ended, and is reaped."""

    child: int | Loader
    """A worker's id, `COMMITTER`, `COORDINATOR`, or a loader."""
    status: int
    """As `os.waitpid` gives it."""
    at_s: float
    """Monotonic time."""
    answer: str = ""
    """Of the committer: why it has not committed; empty if it said nothing."""


class EndAsked(NamedTuple):
    """The launcher is gone, or wants the end."""


LauncherRequest = SpawnWorkers | SpawnJoiner | SpawnCoordinator | KillWorkers | CommitShards | AbandonCommits
"""What the launcher wants: its messages, as they come."""
ForkServerEvent = LauncherRequest | LoaderAsked | ForkRefused | ChildEnded | EndAsked


class ForkWorker(NamedTuple):
    """Fork a worker."""

    worker: int
    joins: bool = False
    """Whether it joins a job that runs: then it begins without state."""


class ForkLoader(NamedTuple):
    """Fork a loader."""

    loader: Loader


class ForkCoordinator(NamedTuple):
    """Fork a coordinator."""

    request: SpawnCoordinator


class ForkCommitter(NamedTuple):
    """Fork the process that commits."""

    request: bytes


class KillChild(NamedTuple):
    """Kill a forked process; its end comes as an event."""

    child: int | Loader


class TellEnd(NamedTuple):
    """Tell the launcher that a process has ended that is no committer."""

    child: int
    """A worker's id, or `COORDINATOR`."""
    status: int
    at_s: float


class TellLoaderEnd(NamedTuple):
    """Tell the launcher that a loader's process has ended."""

    loader: Loader


class TellCommit(NamedTuple):
    """Tell the launcher what became of a commit."""

    number: int
    error: str | None
    """None: the checkpoint is durable. Else why it is not."""
    again: bool = False
    """Whether it is worth another try: not the checkpoint, but its committer was to blame."""


class EndForkServer(NamedTuple):
    """Nothing is left: end."""


ForkServerEffect = (
    ForkWorker
    | ForkLoader
    | ForkCoordinator
    | ForkCommitter
    | KillChild
    | TellEnd
    | TellLoaderEnd
    | TellCommit
    | EndForkServer
)


class ForkServer:
    """The forkserver's machine.

    Args:
        num_loaders: of each worker.
    """

    def __init__(self, num_loaders: int = 0) -> None:
        self._num_loaders = num_loaders
        self._living: set[int] = set()
        self._forked: set[int] = set()
        self._loaders: set[Loader] = set()
        """Those that live."""
        self._replaced: set[Loader] = set()
        """Those that are to be forked again once they have ended."""
        self._committing: CommitShards | None = None
        self._next: CommitShards | None = None
        """A commit that is begun when the committer has ended that is at work."""
        self._is_abandoned = False
        """Whether the coordinator that has asked for the next one is gone."""
        self._answer: TellCommit | None = None
        self._is_ending = False

    def handle(self, event: ForkServerEvent) -> list[ForkServerEffect]:
        """Takes one event; returns effects in their order."""
        if isinstance(event, ChildEnded):
            return self._ended(event)
        if isinstance(event, EndAsked):
            self._is_ending = True
            killed: list[ForkServerEffect] = [KillChild(child) for child in sorted(self._living - {COMMITTER})]
            killed += [KillChild(loader) for loader in sorted(self._loaders)]
            return killed or self._exit()
        if isinstance(event, ForkRefused):
            if isinstance(event.child, Loader):
                self._loaders.discard(event.child)
            else:
                self._living.discard(event.child)
            return self._exit()
        if self._is_ending:
            return []
        return self._asked(event)

    def _asked(self, event: LauncherRequest | LoaderAsked) -> list[ForkServerEffect]:
        match event:
            case SpawnWorkers():
                return [effect for worker in event.workers for effect in self._fork(ForkWorker(worker))]
            case SpawnJoiner():
                return self._fork(ForkWorker(event.worker, joins=True))
            case SpawnCoordinator():
                self._living.add(COORDINATOR)
                return [ForkCoordinator(event)]
            case KillWorkers():
                return [KillChild(worker) for worker in event.workers if worker in self._living]
            case LoaderAsked():
                return self._replace(event.loader)
            case AbandonCommits():
                self._is_abandoned = True
                return [KillChild(COMMITTER)] if self._committing is not None else []
            case CommitShards():
                return self._commit(event)

    def _fork(self, wanted: ForkWorker) -> list[ForkServerEffect]:
        """An id is forked once, however often it is asked for."""
        if wanted.worker in self._forked:
            return []
        self._forked.add(wanted.worker)
        self._living.add(wanted.worker)
        return [wanted, *self._fork_loaders(wanted.worker)]

    def _fork_loaders(self, worker: int) -> list[ForkServerEffect]:
        loaders = [Loader(worker, number) for number in range(self._num_loaders)]
        self._loaders.update(loaders)
        return [ForkLoader(loader) for loader in loaders]

    def _replace(self, loader: Loader) -> list[ForkServerEffect]:
        if loader.worker not in self._living or not 0 <= loader.number < self._num_loaders:
            return []
        if loader in self._loaders:
            self._replaced.add(loader)
            return [KillChild(loader)]
        self._loaders.add(loader)
        return [ForkLoader(loader)]

    def _loader_ended(self, loader: Loader) -> list[ForkServerEffect]:
        self._loaders.discard(loader)
        effects: list[ForkServerEffect] = [TellLoaderEnd(loader)]
        if loader in self._replaced:
            self._replaced.discard(loader)
            if not self._is_ending:
                effects += self._replace(loader)
        return effects + self._exit()

    def _commit(self, asked: CommitShards) -> list[ForkServerEffect]:
        if self._answer is not None and self._answer.number == asked.number:
            return [self._answer]
        self._is_abandoned = False
        if self._committing is None:
            return self._begin(asked)
        if self._committing.number != asked.number:
            self._next = asked
            return [KillChild(COMMITTER)]
        return []

    def _begin(self, asked: CommitShards) -> list[ForkServerEffect]:
        self._committing, self._next, self._answer = asked, None, None
        self._living.add(COMMITTER)
        return [ForkCommitter(asked.request)]

    def _ended(self, event: ChildEnded) -> list[ForkServerEffect]:
        if isinstance(event.child, Loader):
            return self._loader_ended(event.child)
        self._living.discard(event.child)
        effects: list[ForkServerEffect] = []
        if event.child != COMMITTER:
            effects.append(TellEnd(event.child, event.status, event.at_s))
            effects += [KillChild(loader) for loader in sorted(self._loaders) if loader.worker == event.child]
        elif self._committing is not None:
            number, self._committing = self._committing.number, None
            if event.status == 0:
                self._answer = TellCommit(number, None)
            elif event.answer:
                self._answer = TellCommit(number, event.answer)
            else:
                self._answer = TellCommit(number, "the process that committed it was lost", again=True)
            effects += [self._answer, *self._go_on()]
        return effects + self._exit()

    def _go_on(self) -> list[ForkServerEffect]:
        """Begins the next commit, or says that it will not be made: the committer has ended."""
        waiting, self._next = self._next, None
        if waiting is None or self._is_ending:
            return []
        if self._is_abandoned:
            return [TellCommit(waiting.number, "it was broken off before it had begun", again=True)]
        return self._begin(waiting)

    def _exit(self) -> list[ForkServerEffect]:
        return [EndForkServer()] if self._is_ending and not self._living and not self._loaders else []
