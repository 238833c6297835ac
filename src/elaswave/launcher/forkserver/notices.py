"""SIGTERM to a worker: a notice that its machine will be taken away, as providers of spot machines send it.

All other processes of a job ignore the signals that end one (`elaswave.launcher.forkserver.forking`), since the
launcher decides what these mean; so did workers before there were drains. A worker passes the notice on and goes on
training.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

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
