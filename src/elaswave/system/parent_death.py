"""Families of processes: a child ends with its parent, however that dies, and a grandparent can reap what it leaves."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

from elaswave.observability.processes import children_of

ORPHAN_S_MAX = 5.0
"""How long an orphan that is killed may take to end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


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
