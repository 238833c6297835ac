"""Processes of a job: how a child is forked, what it may take, how it ends and is seen to, which signals end a job.

All processes of a job but workers ignore the signals that end one, since the launcher decides what these mean. SIGTERM
to a worker is a notice that its machine will be taken away, as providers of spot machines send it: the worker passes it
on and goes on training.

`DeathWatch` sees a process die before its memory is torn down. The kernel gives a dead child to its parent, and closes
its sockets, only after it has released all its memory: 20 ms for a small worker on a quiet machine, 100 to 240 ms when
all cores are busy, because the dying process does that work itself, in its turn. Robust mutexes it releases first. So
every worker holds one, in memory that it shares with the coordinator, and a thread that waits for it learns within 1 to
3 ms (3 to 20 on busy cores) that its owner is dying.

That memory is an anonymous mapping inherited through fork: it has no name and leaves nothing behind. It is made before
anybody is forked, so it has room for workers to come: a worker's slot is its id modulo the number of slots, and names
the worker that has taken it. Where the C library has no robust mutexes, or the slot's owner still lives, nothing is
reported, and only the agent sees, later, that a process has ended.
"""

import contextlib
import ctypes
import errno
import io
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from elaswave.errors import LaunchError, StoppedBySignalError, UsageError
from elaswave.observability.processes import children_of
from elaswave.transport.addresses import await_lookups
from elaswave.untrusted import open_regular

USER_SIGNALS: dict[int, str] = {
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGUSR2: "SIGUSR2",
}
"""What schedulers send some time before they kill (Slurm's ``--signal``). They end a job as SIGTERM does, but only
where nobody else hears them: a script may have a handler of its own, or `faulthandler`."""
STOP_SIGNALS: dict[int, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
    **USER_SIGNALS,
}
"""Signals that end a job, as a person knows them."""
LOOKUPS_S = 0.5
"""How long a fork waits for look-ups of names, the only threads of a process that forks."""
NOTICE = signal.SIGTERM
ORPHAN_S_MAX = 5.0
"""How long an orphan that is killed may take to end."""
_BESIDE = 48
"""Descriptors that a process of a job needs beside one or two for each worker: output, sockets, logs, checkpoints, and
what libraries open for a moment."""
GROWTH = 64
"""Workers that may join a job, as far as the system's limit permits: there is room for them from the beginning, since
the limit of a process that runs is raised by itself only."""
WORKER_SCORE = 500
"""Added to a worker's score, in thousandths of the machine's memory; when memory is short, the kernel kills the process
with the highest. By itself it chooses the largest one, often the launcher, whose end ends the job."""
_SCORE_FILE = Path("/proc/self/oom_score_adj")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
NUM_SLOTS = 4096
"""Far more than workers that live at once."""
_SLOT_BYTES = 64
"""A cache line for each worker: its mutex (at most 48 bytes in glibc on 64-bit machines), then who has taken it."""
_OWNER_AT = 56
_SHARED, _ROBUST = 1, 1


class Child:
    """A process that this one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pid_fd = os.pidfd_open(pid)

    def reap(self) -> int:
        """Collects it after its end.

        Returns:
            Its status, as `os.waitpid` gives it.
        """
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pid_fd)
        return status


def how_it_ended(status: int) -> str:
    """Tells what a status of `os.waitpid` means: "was killed by SIGKILL"."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        return f"was killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {os.WEXITSTATUS(status)}"


def refused(error: OSError, what: str, advice: str) -> LaunchError:
    """Makes the error to tell when the system refuses something that a job needs."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return LaunchError(f"{what}: {error.strerror} ({name}); {advice}")


def fork(what: str, log: Path, body: Callable[[], int], *, let_go: Callable[[], None]) -> Child:
    """Runs a function in a new process, which ends with this one. This process must have one thread only, but for
    look-ups of names.

    Args:
        what: the process as a person knows it.
        log: takes its output.
        body: its result is the exit status.
        let_go: called first in the child: closes what it must not hold.
    Raises:
        LaunchError: the system refuses another process.
    """
    await_lookups(LOOKUPS_S)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise refused(
            error,
            f"the process of {what} cannot be started",
            "raise the limit of processes (ulimit -u, or the container's), free memory, or use fewer workers",
        ) from error
    if pid == 0:
        _be_child(parent, log, body, let_go)
    return Child(pid)


def _be_child(parent: int, log: Path, body: Callable[[], int], let_go: Callable[[], None]) -> None:
    """Runs the rest of a child's life; never returns."""
    status = 1
    try:
        end_with_parent(parent)
        leave_signals_to_launcher()
        let_go()
        redirect_output(log)
        status = body()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def needed_descriptors(num_workers: int, num_loaders: int = 0) -> int:
    """Descriptors that the process of a job needs that needs most: a connection to each worker, and one to come; or,
    in the forkserver, each worker and each loader, and a line to each worker."""
    return (2 + num_loaders) * num_workers + _BESIDE


def workers_max(num_loaders: int = 0) -> int:
    """Computes how many workers a job may have with the limit that this process has.

    Args:
        num_loaders: of each worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(0, soft - _BESIDE) // (2 + num_loaders)


def provide_descriptors(num_workers: int, num_loaders: int = 0) -> None:
    """Raises this process's limit as far as the job needs and the system allows; children inherit it.

    Args:
        num_workers: of the job.
        num_loaders: of each worker.
    Raises:
        UsageError: the system does not allow enough.
    """
    needed = needed_descriptors(num_workers, num_loaders)
    wanted = needed_descriptors(num_workers + GROWTH, num_loaders)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"a job of {num_workers} workers needs up to {needed} open files in a process, and the limit here is "
            f"{hard} (ulimit -n): raise it to {needed} or more, or train with fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def offer_to_kernel() -> None:
    """Makes this process, a worker, one to be killed before those that the job cannot do without. It needs no privilege
    to raise one's own score, and one that was inherited and is higher stays; where there is no such file, the kernel
    chooses as it did."""
    with contextlib.suppress(OSError):
        if int(_SCORE_FILE.read_text()) < WORKER_SCORE:
            _SCORE_FILE.write_text(str(WORKER_SCORE))


def leave_signals_to_launcher() -> None:
    """From now on this process ignores signals that end a job: the launcher decides what they mean to all of them. A
    script's own handler of what a scheduler sends stays. Workers take one of them up again, see
    `elaswave.launcher.forkserver.worker_main`."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        for number in STOP_SIGNALS:
            # One that has come already, and waits, would be lost.
            if number not in held and (number not in USER_SIGNALS or is_ours(number)):
                signal.signal(number, signal.SIG_IGN)


def redirect_output(path: Path) -> None:
    """Points standard output and error at a log file, or at nothing where the file cannot be opened (a file system that
    has turned read-only), and standard input at nothing."""
    try:
        log = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
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


@contextlib.contextmanager
def holding_notices() -> Iterator[None]:
    """A process that is forked in this context holds notices from its first instant."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_notices() -> None:
    """Makes a notice wait from now on until it is heard. It is to be called in a worker before it has threads."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    signal.signal(NOTICE, signal.SIG_DFL)  # as long as it is blocked it does nothing; an ignored one might get lost


def hear_notices(on_notice: Callable[[], None]) -> None:
    """Waits in a thread of its own for the first notice; further ones say nothing new.

    Not with a handler: that would run in the main thread, wherever it stands, perhaps with the locks that telling the
    coordinator takes.

    Args:
        on_notice: called once, in that thread.
    """

    def wait() -> None:
        signal.sigwait({NOTICE})
        on_notice()

    threading.Thread(target=wait, name="notices", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies; ends it at once if the parent is dead already.

    To be called in the child. The kernel watches the thread that made the child, so that thread has to live as long as
    the child is wanted.

    Args:
        parent: process id of the parent, read before the child was made.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the kernel knew that we want to know


@contextlib.contextmanager
def parent_of_orphans() -> Iterator[None]:
    """While inside, the kernel gives this process the orphans among its descendants.

    Not a moment longer: orphans of something else would stay zombies, since this process does not wait for them.
    """
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def end_group(group: int, wait_s: float) -> bool:
    """Kills and reaps what is left of a process group, as far as it has become this process's children: what a worker
    has started, and left when it was killed.

    Args:
        group: its number, the process id of the worker.
        wait_s: how long the killed may take to end; 0: one look.
    Returns:
        Whether none is left.
    """
    deadline_s = time.monotonic() + wait_s
    try:
        while True:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
                if time.monotonic() >= deadline_s:
                    return False
                time.sleep(0.002)
    except ChildProcessError:
        return True


def end_children() -> None:
    """Kills and reaps all children of this process, and those that become its children thereby: also what has left its
    worker's group, as pools of compilers do."""
    deadline_s = time.monotonic() + ORPHAN_S_MAX
    while (left := children_of(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            end_orphan(pid)


def end_orphan(pid: int) -> None:
    """Kills and reaps a process whose parent has ended, if this process is its parent now; else does nothing.

    One that waits for a disk that is gone ends when the disk is back; it is not waited for.
    """
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            deadline_s = time.monotonic() + ORPHAN_S_MAX
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline_s:
                time.sleep(0.002)


class DeathWatch:
    """One robust mutex for each worker that lives. Made before any worker is forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_SLOTS * _SLOT_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._libc = ctypes.CDLL(None)
        self._attributes = ctypes.create_string_buffer(_SLOT_BYTES)
        try:
            failed = (
                self._libc.pthread_mutexattr_init(self._attributes)
                or self._libc.pthread_mutexattr_setpshared(self._attributes, _SHARED)
                or self._libc.pthread_mutexattr_setrobust(self._attributes, _ROBUST)
            )
        except AttributeError:
            failed = True
        self.works = not failed
        """Whether this C library can do it."""

    def _mutex(self, worker: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + worker % NUM_SLOTS * _SLOT_BYTES)

    def _owner(self, worker: int) -> ctypes.c_int64:
        """Tells who has taken the worker's slot: its id plus 1, 0 if nobody has yet."""
        return ctypes.c_int64.from_address(self._base + worker % NUM_SLOTS * _SLOT_BYTES + _OWNER_AT)

    def live(self, worker: int) -> None:
        """Lets the end of the worker's main thread be seen from now on; that thread calls this once."""
        if not self.works:
            return
        mutex, owner = self._mutex(worker), self._owner(worker)
        result = int(self._libc.pthread_mutex_trylock(mutex)) if owner.value else errno.ENOTRECOVERABLE
        if result == errno.EBUSY:  # its owner lives
            return
        if result == errno.EOWNERDEAD:  # nobody has watched it
            self._libc.pthread_mutex_consistent(mutex)
        elif result == errno.ENOTRECOVERABLE:  # new, or its owner's end was seen
            self._libc.pthread_mutex_init(mutex, self._attributes)
            self._libc.pthread_mutex_lock(mutex)
        owner.value = worker + 1

    def wait(self, worker: int) -> bool:
        """Blocks until the worker's main thread has ended; to be called from a thread of its own.

        Returns:
            True once it has; False if the worker has never said that it lives, or nothing can be told here.
        """
        return self._sees_end(worker, self._libc.pthread_mutex_lock)

    def has_ended(self, worker: int) -> bool:
        """Tells whether the worker's main thread has ended, as `wait` would, and blocks nobody."""
        # Not a trylock: the C library's keeps a mutex of which an end was seen, and who waits for that would wait on.
        return self._sees_end(worker, self._libc.pthread_mutex_timedlock, ctypes.create_string_buffer(16))

    def _sees_end(self, worker: int, lock: Callable[..., int], *until: object) -> bool:
        if not self.works or self._owner(worker).value != worker + 1:
            return False
        mutex = self._mutex(worker)
        result = int(lock(mutex, *until))
        if result not in (errno.ENOTRECOVERABLE, errno.ETIMEDOUT):
            # Not made consistent: everybody else who waits, or comes later, is told ENOTRECOVERABLE.
            self._libc.pthread_mutex_unlock(mutex)
        return result in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE)


_Handler = Callable[[int, FrameType | None], None] | signal.Handlers
_taken: set[int] = set()
"""Those of `USER_SIGNALS` that this process, or the one that it was forked from, has taken."""


def is_ours(number: int) -> bool:
    """Tells whether a job may take a signal: any that ends a job and is not ignored (that is how nohup works), one of
    `USER_SIGNALS` only where it would kill the process."""
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN or number not in USER_SIGNALS:
        return handler is not signal.SIG_IGN
    return number in _taken or (handler is signal.SIG_DFL and not _is_caught(number))


def _is_caught(number: int) -> bool:
    """Tells whether something handles a signal that Python does not know of."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


@contextlib.contextmanager
def _handled(numbers: Iterable[int], handler: _Handler) -> Iterator[None]:
    before = set(_taken)
    previous = {number: signal.signal(number, handler) for number in numbers if is_ours(number)}
    _taken.update(previous.keys() & USER_SIGNALS)
    try:
        yield
    finally:
        _taken.intersection_update(before)
        for number, old in previous.items():
            signal.signal(number, old)


@contextlib.contextmanager
def ending_early() -> Iterator[None]:
    """Before there is a job that could stop, one of `USER_SIGNALS` unwinds the process, as others do anyway."""

    def end(number: int, frame: FrameType | None) -> None:
        raise StoppedBySignalError(number, f"stopped by {USER_SIGNALS[number]} before the job had begun")

    with _handled(USER_SIGNALS if _is_main() else (), end):
        yield


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, which is bounded, signals that end a job do nothing: it is ending."""
    with _handled(STOP_SIGNALS if _is_main() else (), signal.SIG_IGN):
        yield


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[int | None]:
    """Handles the signals that end a job; yields a descriptor that each makes readable (None outside the main thread).

    Which those are says `is_ours`.
    """
    if not _is_main():
        yield None
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with _handled(STOP_SIGNALS, handler):
        previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            yield read_fd
        finally:
            signal.set_wakeup_fd(previous_fd)
            os.close(read_fd)
            os.close(write_fd)
