"""Signals in commands that tests start."""

import signal


def hear_signals() -> None:
    """For ``preexec_fn``: a command hears what ends it, also where the tests themselves run in the background or under
    nohup, whose ignored signals a command would inherit and keep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
