"""Signals that tests send, to themselves or to commands that they start."""

import contextlib
import signal
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def hear_signals() -> None:
    """For ``preexec_fn``: a command hears what ends it, also where the tests themselves run in the background or under
    nohup, whose ignored signals a command would inherit and keep."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def hearing_signals() -> Iterator[None]:
    """The same for this process while a test sends signals to it: what is ignored otherwise, for the sake of a whole
    run of tests, is ignored again afterwards."""
    default = {signal.SIGINT: signal.default_int_handler}
    previous = {number: signal.signal(number, default.get(number, signal.SIG_DFL)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
