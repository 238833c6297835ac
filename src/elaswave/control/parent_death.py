"""A child process ends with its parent, however the parent dies: the kernel kills it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


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
