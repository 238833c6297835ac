"""The forkserver: it loads torch once, and forks what needs it: workers, and the committers of checkpoints.

So launcher and coordinator hold no torch. The launcher forks the forkserver, asks, and is told; what is done when
stands in `elaswave.launcher.forkserver.machine`. Only a parent learns at once, and surely, how a process has ended, so
the forkserver watches its children and tells the launcher. All of it hangs together: the forkserver ends with the
launcher, workers and committer end with the forkserver (`elaswave.system.processes`).

A process that forks may have one thread only. The forkserver has a second one for half a second, when workers have been
forked: it loads what commits need; until it has ended no process is forked.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from elaswave.checkpoints.format import CommitRequest
from elaswave.coordinator.job_spec import CoordinatorSetup
from elaswave.coordinator.process import run_coordinator
from elaswave.data.fingerprint import Finding
from elaswave.errors import CheckpointError, LaunchError, UsageError
from elaswave.job.plan import RunPlan, StartingPoint, sampler_of
from elaswave.job.script import ReadFile, apart, open_anew, open_descriptors, read_files
from elaswave.launcher.forkserver.loaders import LoaderSockets, probe_dataset
from elaswave.launcher.forkserver.machine import (
    COMMITTER,
    COORDINATOR,
    ChildEnded,
    EndAsked,
    ForkCommitter,
    ForkCoordinator,
    ForkLoader,
    ForkRefused,
    ForkServer,
    ForkServerEffect,
    ForkServerEvent,
    ForkWorker,
    KillChild,
    Loader,
    LoaderAsked,
    TellCommit,
    TellEnd,
    TellLoaderEnd,
)
from elaswave.launcher.forkserver.messages import (
    ChildGone,
    CommitDone,
    ForkServerSetup,
    FromForkServer,
    KeysHeld,
    LoaderGone,
    LoaderSpawned,
    Prepared,
    SpawnCoordinator,
    Spawned,
    SpawnRefused,
    SpawnWorkers,
    TakeKeys,
    ToForkServer,
    Unpacker,
    Unprepared,
    pack_message,
)
from elaswave.launcher.resources import memory_bytes
from elaswave.observability.run_folder import worker_log
from elaswave.system.processes import Child, end_children, end_group, fork, holding_notices, parent_of_orphans
from elaswave.training.raised import readable, said
from elaswave.transport.handshake import Secrets

_ANSWER_BYTES_MAX = 1 << 15
"""Of what a committer may say; a pipe holds more, so it never waits for a reader."""


def run_forkserver(setup: ForkServerSetup, link: socket.socket, inherited: Sequence[ReadFile] = ()) -> int:
    """Runs the forkserver from its start to the end of the launcher, or of the job.

    What its children leave, and theirs, becomes its own, and ends with it: so the launcher, which may be a script's
    process, need not tell it from what the script has started.

    Args:
        setup: what it is started with.
        link: to the launcher.
        inherited: files that a script's process shares with this one since the fork.
    Returns:
        Exit status.
    """
    with parent_of_orphans():
        try:
            return _run(setup, link, inherited)
        finally:
            end_children()


def _run(setup: ForkServerSetup, link: socket.socket, inherited: Sequence[ReadFile]) -> int:
    try:
        import torch  # late, as what follows: the launcher imports this module
        import torch.fx.experimental.symbolic_shapes  # or each worker's first gradient loads it

        from elaswave.engine.blueprint import Blueprint
        from elaswave.launcher.forkserver import worker_main

        torch.set_num_threads(1)  # a process with idle threads of a library must not fork
        open_anew(inherited)
        ours = open_descriptors().difference(*(file.fds for file in setup.read_files))
        plan = Blueprint(setup.job.config, setup.training)
        if setup.training is not None:
            _ = plan.programs, plan.placement  # computed and checked once, inherited by all coordinators
            setup = setup._replace(read_files=read_files(ours))  # whose layers may have opened more
    except UsageError as error:
        link.sendall(pack_message(Unprepared(text=readable(str(error)), is_usage=True)))
        return 1
    except BaseException as error:
        traceback.print_exc()
        link.sendall(pack_message(Unprepared(text=said(error))))
        return 1
    findings = [] if setup.training is None else _probe_dataset(setup, plan)
    given = {} if setup.training is None else _given(plan)
    not_taken = list(setup.not_taken)
    link.sendall(pack_message(Prepared(state=plan.state, findings=findings, given=given, not_taken=not_taken)))
    serving = _Serving(setup, plan, link, worker_main.worker_main, worker_main.loader_main)
    return serving.run()


def _probe_dataset(setup: ForkServerSetup, plan: RunPlan) -> list[Finding]:
    """See `elaswave.launcher.forkserver.loaders`."""
    from elaswave.engine.checks.rehearsal import Rehearsal  # loads torch, as `run_forkserver` has

    log = setup.job.run_dir / "logs" / "loader-survey.log"
    memory, _ = memory_bytes() or (None, "")

    def begin() -> Rehearsal:
        # The plan is a blueprint, a class that needs torch.
        return Rehearsal(plan, setup.training.open_samples(setup.job.run_dir / "data"), memory)  # type: ignore[arg-type]

    return probe_dataset(begin, log, setup.read_files)


def _given(plan: Any) -> dict[str, str]:
    """Collects what a script gives beside its data, for checkpoints; of its blueprint."""
    from elaswave.training.given import given_by  # late, as all that loads torch

    given: dict[str, str] = given_by(plan.training) | plan.optimizer.given
    return given


class _LoaderSocket(NamedTuple):
    """Marks the line to a worker over which it asks for loaders."""

    worker: int


class _Serving:
    """Carries out what the forkserver's machine decides."""

    def __init__(
        self,
        setup: ForkServerSetup,
        plan: RunPlan,
        link: socket.socket,
        live: Callable[[ForkServerSetup, int, StartingPoint | None, socket.socket | None, bool], int],
        load: Callable[[ForkServerSetup, socket.socket], int],
    ) -> None:
        self._setup = setup
        self._plan = plan
        self._link = link
        self._live = live
        self._load = load
        self._num_loaders = 0 if setup.training is None else setup.training.loaders
        self._machine = ForkServer(self._num_loaders)
        self._last_status = 0
        """Of the child whose end is dealt with."""
        self._unpacker: Unpacker[ToForkServer] = Unpacker(ToForkServer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ, None)
        self._children: dict[int | Loader, Child] = {}
        self._groups: set[int] = set()
        """Process groups of workers that have ended, of which there may be something left."""
        self._loader_sockets = LoaderSockets(
            lambda line, worker: self._selector.register(line, selectors.EVENT_READ, _LoaderSocket(worker)),
            self._selector.unregister,
        )
        self._checkpoint: StartingPoint | None = None
        self._answer_fd = -1
        """Gives what the committer says."""
        self._loading: threading.Thread | None = None
        self._is_over = False

    def run(self) -> int:
        while not self._is_over:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._hear()
                elif isinstance(key.data, _LoaderSocket):
                    for loader in self._loader_sockets.asked(key.data.worker):
                        self._handle(LoaderAsked(loader))
                elif key.data in self._children:
                    self._reap(key.data)
            self._groups = {group for group in self._groups if not end_group(group, 0.0)}
        return 0

    def _hear(self) -> None:
        """Takes what the launcher says; the end of its link is the end."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._link.recv(1 << 20)
        if not data:
            # A link that has ended would be readable for ever.
            self._selector.unregister(self._link)
            self._handle(EndAsked())
            return
        for message in self._unpacker.feed(data):
            if isinstance(message, TakeKeys):
                self._take_keys(message)
            elif isinstance(message, SpawnWorkers):
                self._checkpoint = message.checkpoint
                # Before the forks, which inherit what it finds.
                self._read_frozen()
                self._handle(message)
                # After the forks: from now on there is a second thread.
                self._load_for_commits()
            else:
                self._handle(message)

    def _take_keys(self, message: TakeKeys) -> None:
        keys = Secrets(message.keys)
        self._setup = self._setup._replace(keys=keys, job_keys=Secrets(message.job_keys, message.retired))
        self._say(KeysHeld(ring=keys.name))

    def _read_frozen(self) -> None:
        """Reads what the checkpoint has otherwise than it is built, once for all workers, also those to come."""
        if self._setup.frozen is not None or self._checkpoint is None:
            return
        from elaswave.engine.blueprint import changed_frozen  # loaded by `run_forkserver`

        checkpoint = (Path(self._checkpoint.folder), self._checkpoint.meta)
        with contextlib.suppress(CheckpointError):  # the workers meet it too, and say so
            # The plan is a blueprint, a class that needs torch.
            frozen = changed_frozen(self._plan, checkpoint)  # type: ignore[arg-type]
            self._setup = self._setup._replace(frozen=frozen)

    def _reap(self, name: int | Loader) -> None:
        child = self._children.pop(name)
        self._selector.unregister(child.pid_fd)
        at_s = time.monotonic()
        status = child.reap()
        self._groups.add(child.pid)
        answer = ""
        if name == COMMITTER:
            # Without a wait: the writer has ended, and the pipe has held all of it.
            answer = os.read(self._answer_fd, _ANSWER_BYTES_MAX).decode("utf-8", "replace")
            os.close(self._answer_fd)
        self._last_status = status
        self._handle(ChildEnded(name, status, at_s, answer))

    def _handle(self, event: ForkServerEvent) -> None:
        for effect in self._machine.handle(event):
            self._carry_out(effect)

    def _carry_out(self, effect: ForkServerEffect) -> None:
        if isinstance(effect, ForkWorker):
            self._fork_worker(effect.worker, joins=effect.joins)
        elif isinstance(effect, ForkLoader):
            self._fork_loader(effect.loader)
        elif isinstance(effect, ForkCoordinator):
            coordinator = self._coordinator_setup(effect.request)
            self._fork(COORDINATOR, "the coordinator", "coordinator.log", lambda: run_coordinator(coordinator))
        elif isinstance(effect, ForkCommitter):
            self._fork_committer(effect.request)
        elif isinstance(effect, KillChild):
            if effect.child in self._children:
                os.kill(self._children[effect.child].pid, signal.SIGKILL)
        elif isinstance(effect, TellEnd):
            self._say(ChildGone(child=effect.child, status=effect.status, at_s=effect.at_s))
        elif isinstance(effect, TellLoaderEnd):
            loader, status = effect.loader, self._last_status
            self._say(LoaderGone(worker=loader.worker, number=loader.number, status=status))
        elif isinstance(effect, TellCommit):
            self._say(CommitDone(number=effect.number, error=effect.error, again=effect.again))
        else:
            self._is_over = True

    def _coordinator_setup(self, asked: SpawnCoordinator) -> CoordinatorSetup:
        job = self._setup.job
        return CoordinatorSetup(
            job=job,
            plan=self._plan,
            sampler=sampler_of(job.config, asked.num_samples),
            keys=self._setup.job_keys,
            checkpoint=asked.checkpoint,
            coordinator_ends_s=asked.coordinator_ends_s,
        )

    def _say(self, message: FromForkServer) -> None:
        with contextlib.suppress(ConnectionError):  # then the link's end is heard too
            self._link.sendall(pack_message(message))

    # --------------------------------------------------------------------------------------------------------- forking

    def _fork_worker(self, worker: int, *, joins: bool) -> None:
        checkpoint = self._checkpoint
        line = self._loader_sockets.open(worker) if self._num_loaders else None
        what, log = f"worker {worker}", worker_log(worker)
        body = apart(self._setup.read_files, lambda: self._live(self._setup, worker, checkpoint, line, joins))
        # A notice that comes before the worker listens for one would kill it.
        with holding_notices():
            self._fork(worker, what, log, body)
        if line is not None:
            # The worker has its own copy, and its end must end the line.
            line.close()

    def _fork_loader(self, loader: Loader) -> None:
        from elaswave.engine.batches import loader_log  # loaded by the forkserver

        with self._loader_sockets.hand_over(loader) as line:
            what = f"loader {loader.number} of worker {loader.worker}"
            body = apart(self._setup.read_files, lambda: self._load(self._setup, line))
            self._fork(loader, what, loader_log(loader.worker), body)

    def _fork(self, name: int | Loader, what: str, log: str, body: Callable[[], int]) -> bool:
        """Forks a child and tells the launcher; returns whether the system has let it."""
        # That thread: a process that forks may have one only.
        if self._loading is not None:
            self._loading.join()
            self._loading = None
        try:
            child = fork(what, self._setup.job.run_dir / "logs" / log, body, let_go=self._let_go)
        except LaunchError as error:
            if name != COMMITTER:
                self._say(SpawnRefused(child=name.worker if isinstance(name, Loader) else name, text=str(error)))
                self._handle(ForkRefused(name))
            else:
                # As `waitpid` tells of a process that has ended with status 1.
                self._handle(ChildEnded(COMMITTER, 1 << 8, time.monotonic(), str(error)))
            return False
        self._children[name] = child
        self._selector.register(child.pid_fd, selectors.EVENT_READ, name)
        if isinstance(name, Loader):
            self._say(LoaderSpawned(worker=name.worker, number=name.number, pid=child.pid))
        else:
            self._say(Spawned(child=name, pid=child.pid))
        return True

    def _let_go(self) -> None:
        """Closes, in a child, what is the forkserver's."""
        self._link.close()
        self._selector.close()
        self._loader_sockets.let_go()
        for child in self._children.values():
            os.close(child.pid_fd)

    def _load_for_commits(self) -> None:
        """Loads what commits need, beside: that takes half a second of work, and ends must be told meanwhile."""
        if self._loading is None:
            loading = threading.Thread(target=_load_committing, daemon=True)
            with contextlib.suppress(RuntimeError):  # the system has no room for a thread: the committer loads it
                loading.start()
                self._loading = loading

    def _fork_committer(self, request: bytes) -> None:
        self._answer_fd, answer = os.pipe2(os.O_CLOEXEC)
        is_forked = self._fork(
            COMMITTER, "the committer of a checkpoint", "committer.log", lambda: commit(request, answer)
        )
        os.close(answer)
        if not is_forked:
            os.close(self._answer_fd)


def _load_committing() -> None:
    from elaswave.checkpoints import commit as checkpoint_commit  # noqa: F401  # late, as it takes so long


def commit(request: bytes, answer: int) -> int:
    """Runs the life of a committer.

    Args:
        request: a `CommitRequest`.
        answer: descriptor for the reason why there is no checkpoint.
    Returns:
        0 if the checkpoint is durable.
    """
    from elaswave.checkpoints.commit import commit_in_one_of  # loaded by the forkserver

    asked = msgspec.msgpack.decode(request, type=CommitRequest)
    try:
        commit_in_one_of(list(map(Path, asked.folders)), asked.items, asked.meta, sizes=asked.sizes)
    except CheckpointError as error:
        os.write(answer, str(error).encode()[:_ANSWER_BYTES_MAX])
        return 1
    return 0
