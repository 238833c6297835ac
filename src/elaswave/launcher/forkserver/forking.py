"""Forks the processes of a job: what a child inherits, where its output goes, how its end is told.

SIGTERM to a worker: a notice that its machine will be taken away, as providers of spot machines send it.

All other processes of a job ignore the signals that end one (`elaswave.launcher.forkserver.forking`), since the
launcher decides what these mean; so did workers before there were drains. A worker passes the notice on and goes on
training.
"""

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from elaswave.system.job_folder import refused
from elaswave.system.parent_death import end_with_parent
from elaswave.system.stop_signals import STOP_SIGNALS, USER_SIGNALS, is_ours
from elaswave.transport.addresses import await_lookups
from elaswave.untrusted import open_regular

LOOKUPS_S = 0.5
"""How long a fork waits for look-ups of names, the only threads of a process that forks."""


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
    """What a status of `os.waitpid` means: "was killed by SIGKILL"."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        return f"was killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {os.WEXITSTATUS(status)}"


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
    """The rest of a child's life; never returns."""
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


NOTICE = signal.SIGTERM


@contextlib.contextmanager
def holding_notices() -> Iterator[None]:
    """A process that is forked in this context holds notices from its first instant."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def hold_notices() -> None:
    """From now on a notice waits until it is heard. To be called in a worker before it has threads."""
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
