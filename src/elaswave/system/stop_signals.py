"""The signals that end a job, and how they are heard while it runs."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from elaswave.errors import StoppedBySignalError

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


_Handler = Callable[[int, FrameType | None], None] | signal.Handlers
_taken: set[int] = set()
"""Those of `USER_SIGNALS` that this process, or the one that it was forked from, has taken."""


def is_ours(number: int) -> bool:
    """Whether a job may take a signal: any that ends a job and is not ignored (that is how nohup works), one of
    `USER_SIGNALS` only where it would kill the process."""
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN or number not in USER_SIGNALS:
        return handler is not signal.SIG_IGN
    return number in _taken or (handler is signal.SIG_DFL and not _is_caught(number))


def _is_caught(number: int) -> bool:
    """Whether something handles a signal that Python does not know of."""
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
