"""Runs a job on this machine: forks the workers from this warm process, watches them, and ends with them.

Whatever happens (an error, a signal, the death of a worker, the death of this process), no worker outlives the job:
workers ask the kernel to be killed when their parent dies, and this process kills and reaps whoever is left.
"""

import contextlib
import ctypes
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

from elaswave.config.schema import Config
from elaswave.control.channel import Channel
from elaswave.control.coordinator import Coordinator
from elaswave.errors import CheckpointError, ElaswaveError, PeerLostError, StoppedBySignalError, WorkerError
from elaswave.observability.events import ErrorRaised, EventLog, RunFinished
from elaswave.observability.progress import Reporter
from elaswave.observability.result import (
    DIGESTS_FILE,
    EVENTS_FILE,
    RESULT_FILE,
    Result,
    write_digests,
    write_result,
)
from elaswave.observability.trace import PART_PATTERN, merge_traces
from elaswave.runtime.blueprint import Blueprint
from elaswave.runtime.messages import Exit, Failed, FromWorker, Stop, ToWorker
from elaswave.runtime.probe import NoProbe, Probe
from elaswave.runtime.worker import WorkerSetup, run_worker
from elaswave.state.checkpoint import find_newest_checkpoint, remove_stale
from elaswave.state.checkpoint_format import CheckpointMeta

TICK_S = 0.2
BLAME_S = 2.0
"""After the first sign of a failure, how long to wait for the worker that it began with."""
STOP_GRACE_S = 10.0
"""After Ctrl-C, how long the step in hand may take."""
CHECKPOINT_GRACE_S = 300.0
"""After SIGTERM, how long the step in hand and the checkpoint may take."""
_PR_SET_PDEATHSIG = 1


def train(
    config: Config,
    run_dir: Path,
    *,
    resume: bool = False,
    profile: bool = False,
    reporter: Reporter,
    probe: Probe | None = None,
) -> Result:
    """Trains to the end and writes the run folder.

    Args:
        config: with its layout resolved.
        run_dir: an existing folder, prepared for this run.
        resume: continue from its newest valid checkpoint.
        profile: also write a trace.
        reporter: shows progress.
        probe: told of every point of every step in every worker (for tests and fault injection).
    Returns:
        What stands in ``result.json``.
    Raises:
        WorkerError: a worker has ended with an error or was killed.
        StoppedBySignalError: SIGINT or SIGTERM; after SIGTERM a checkpoint has been written.
        UsageError: the data or the run folder cannot be used.
        CheckpointError: resume is asked for and there is no valid checkpoint.
    """
    started_s = time.monotonic()
    blueprint = Blueprint(config)
    _ = blueprint.programs, blueprint.placement  # computed and checked once, inherited by all workers
    remove_stale(run_dir)
    checkpoint = _newest_checkpoint(run_dir, reporter) if resume else None
    # A run that goes on has no result until its new end, and no part of a trace of workers that are long gone.
    for stale in (run_dir / RESULT_FILE, run_dir / DIGESTS_FILE, *run_dir.glob(PART_PATTERN)):
        stale.unlink(missing_ok=True)
    with EventLog(run_dir / EVENTS_FILE) as events, _Job(run_dir) as job:
        coordinator = Coordinator(
            blueprint,
            run_dir,
            checkpoint=checkpoint,
            reporter=reporter,
            events=events,
            send=job.send,
            started_s=started_s,
        )
        outcome: Literal["finished", "failed", "interrupted"] = "failed"
        reason = ""
        try:
            reporter.started(config, blueprint.layout, run_dir)
            for worker in blueprint.layout.workers:
                job.fork(
                    WorkerSetup(
                        config=config,
                        worker=worker,
                        run_dir=run_dir,
                        key=job.key,
                        listen=job.listen,
                        checkpoint=checkpoint,
                        probe=probe or NoProbe(),
                        profile=profile,
                    )
                )
            job.run(coordinator, reporter)
            result, digests = coordinator.result()
            write_digests(run_dir, digests)
            write_result(run_dir, result)
            outcome = "finished"
        except StoppedBySignalError as error:
            outcome, reason = "interrupted", str(error)
            raise
        except ElaswaveError as error:
            reason = str(error)
            worker_id = error.worker if isinstance(error, WorkerError) else None
            text = error.traceback_text if isinstance(error, WorkerError) else ""
            events.write(ErrorRaised(message=str(error), worker=worker_id, traceback=text))
            raise
        finally:
            job.end()
            if profile:
                merge_traces(run_dir)  # an interrupted run has recorded something too
            events.write(
                RunFinished(
                    outcome=outcome,
                    steps=coordinator.last_step,
                    duration_s=time.monotonic() - started_s,
                    reason=reason,
                )
            )
        reporter.finished(result, run_dir)
        return result


def _newest_checkpoint(run_dir: Path, reporter: Reporter) -> tuple[Path, CheckpointMeta]:
    search = find_newest_checkpoint(run_dir)
    for skipped in search.skipped:
        reporter.message(f"checkpoint {skipped.folder.name} is not used: {skipped.reason}")
    if search.newest is None:
        raise CheckpointError(
            f"{run_dir} has no valid checkpoint to resume from; start again with --overwrite, and set "
            "run.checkpoint_every to have one next time"
        )
    return search.newest.folder, search.newest.meta


class _Job:
    """The processes, sockets and temporary files of a job; a context manager that leaves none of them behind."""

    def __init__(self, run_dir: Path) -> None:
        self.key = secrets.token_bytes(32)
        self._run_dir = run_dir
        self._sockets = Path(tempfile.mkdtemp(prefix="elaswave-"))
        self.listen = f"unix:{self._sockets}"
        self._channels: dict[int, Channel[FromWorker]] = {}
        self._pids: dict[int, int] = {}
        self._pid_fds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._signal: int | None = None
        self._failures: dict[int, Failed] = {}
        self._deaths: dict[int, str] = {}

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def send(self, worker: int, message: ToWorker) -> None:
        """Sends a message to a worker; one to a worker that has ended is dropped (its end is noticed elsewhere)."""
        with contextlib.suppress(PeerLostError):
            self._channels[worker].send(message)

    def fork(self, setup: WorkerSetup) -> None:
        """Starts a worker."""
        ours, theirs = socket.socketpair()
        (self._run_dir / "logs").mkdir(exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_worker(setup, theirs, parent)
        theirs.close()
        self._pids[setup.worker] = pid
        self._pid_fds[setup.worker] = os.pidfd_open(pid)
        self._channels[setup.worker] = Channel(ours, setup.worker, FromWorker)  # type: ignore[arg-type]
        self._selector.register(self._channels[setup.worker], selectors.EVENT_READ, ("message", setup.worker))
        self._selector.register(self._pid_fds[setup.worker], selectors.EVENT_READ, ("exit", setup.worker))

    def _be_worker(self, setup: WorkerSetup, connection: socket.socket, parent: int) -> None:
        """The rest of a worker process's life; never returns."""
        status = 1
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)  # the parent died before the kernel knew that we want to know
            # The launcher decides what a signal to the whole process group means.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for channel in self._channels.values():
                channel.close()
            for pid_fd in self._pid_fds.values():
                os.close(pid_fd)
            self._selector.close()
            _redirect_output(self._run_dir / "logs" / f"worker-{setup.worker}.log")
            control: Channel[ToWorker] = Channel(connection, -1, ToWorker)  # type: ignore[arg-type]
            status = run_worker(setup, control)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def run(self, coordinator: Coordinator, reporter: Reporter) -> None:
        """Hands messages to the coordinator until every worker has finished.

        Raises:
            WorkerError, StoppedBySignalError: see `train`.
        """
        with _signals(self._on_signal) as wake_fd:
            if wake_fd is not None:
                self._selector.register(wake_fd, selectors.EVENT_READ, ("signal", -1))
            try:
                self._loop(coordinator, reporter)
            finally:
                if wake_fd is not None:
                    self._selector.unregister(wake_fd)
        for worker in self._pids:
            self.send(worker, Exit())
        self._reap_all(STOP_GRACE_S)
        if self._signal is not None:
            raise self._stopped(coordinator)

    def _loop(self, coordinator: Coordinator, reporter: Reporter) -> None:
        blame_at_s: float | None = None
        kill_at_s: float | None = None
        stop_sent: int | None = None
        while not coordinator.all_finished:
            for key, _ in self._selector.select(TICK_S):
                what, worker = key.data
                if what == "signal":
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
                elif what == "exit":
                    self._on_exit(worker, coordinator)
                else:
                    self._on_messages(worker, coordinator)
            reporter.refresh()
            now_s = time.monotonic()
            if self._signal is not None and stop_sent is None:
                stop_sent = self._signal
                if not coordinator.all_ready:
                    raise self._stopped(coordinator)
                checkpoint = stop_sent == signal.SIGTERM
                reporter.message(
                    "SIGTERM: ending after this step, with a checkpoint" if checkpoint else "ending after this step"
                )
                for other in self._pids:
                    self.send(other, Stop(checkpoint=checkpoint))
                kill_at_s = now_s + (CHECKPOINT_GRACE_S if checkpoint else STOP_GRACE_S)
            if kill_at_s is not None and now_s > kill_at_s:
                raise self._stopped(coordinator)
            if (self._failures or self._deaths) and blame_at_s is None:
                blame_at_s = now_s + BLAME_S
            if blame_at_s is not None and (self._culprit() is not None or now_s > blame_at_s):
                raise self._error(coordinator)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean end; another one ends at once."""
        if self._signal is not None:
            self.end()
            raise StoppedBySignalError(number, "stopped at once by a second signal")
        self._signal = number

    def _stopped(self, coordinator: Coordinator) -> StoppedBySignalError:
        assert self._signal is not None
        name = signal.Signals(self._signal).name
        return StoppedBySignalError(
            self._signal,
            f"stopped by {name} after step {coordinator.last_step}; `elaswave train --resume` with the same --run-dir "
            "continues from the newest checkpoint",
        )

    def _on_messages(self, worker: int, coordinator: Coordinator) -> None:
        channel = self._channels[worker]
        for message in channel.receive():
            if isinstance(message, Failed):
                self._failures[worker] = message
            else:
                coordinator.handle(message)
        if channel.closed:
            self._selector.unregister(channel)

    def _on_exit(self, worker: int, coordinator: Coordinator) -> None:
        if not self._channels[worker].closed:
            self._on_messages(worker, coordinator)  # its last words
        self._selector.unregister(self._pid_fds[worker])
        self._deaths[worker] = self._reap(worker)

    def _reap(self, worker: int) -> str:
        """Collects a worker that has ended, and says how it ended."""
        _, status = os.waitpid(self._pids.pop(worker), 0)
        os.close(self._pid_fds.pop(worker))
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.WEXITSTATUS(status)}"

    def _culprit(self) -> int | None:
        """The worker whose end was not just the consequence of another's."""
        for worker, failure in self._failures.items():
            if failure.lost_peer is None:
                return worker
        return next((worker for worker in self._deaths if worker not in self._failures), None)

    def _error(self, coordinator: Coordinator) -> WorkerError:
        worker = self._culprit()
        if worker is None:
            worker = next(iter(self._failures))
        failure = self._failures.get(worker)
        if failure is not None:
            return WorkerError(worker, failure.summary, failure.traceback_text)
        log = self._run_dir / "logs" / f"worker-{worker}.log"
        return WorkerError(
            worker,
            f"{self._deaths[worker]} after step {coordinator.last_step}; its log is {log}",
        )

    def _reap_all(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._pids and time.monotonic() < deadline:
            for key, _ in self._selector.select(TICK_S):
                what, worker = key.data
                if what == "exit":
                    self._selector.unregister(self._pid_fds[worker])
                    self._reap(worker)
                elif what == "message":
                    self._channels[worker].receive()
                    if self._channels[worker].closed:
                        self._selector.unregister(self._channels[worker])

    def end(self) -> None:
        """Kills and reaps whoever is left and removes the temporary files. May be called twice."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in list(self._pids):
            self._reap(worker)
        for channel in self._channels.values():
            channel.close()
        self._selector.close()
        shutil.rmtree(self._sockets, ignore_errors=True)


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[int | None]:
    """Handles SIGINT and SIGTERM; yields a descriptor that each makes readable (None outside the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
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
    # The inherited text layers may hold a parent's state; new ones write line by line.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)
