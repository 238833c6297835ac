"""Whether an agent has been asked to stop, by whom, and what is to end: the job, or this host's part in it.

A signal may come at any moment: it changes one attribute.
"""

import signal
from types import FrameType

from elaswave.errors import StoppedBySignalError
from elaswave.system.stop_signals import STOP_SIGNALS

STOP_GRACE_S = 300.0
"""After the first signal, how long the step in hand and its checkpoint may take."""


class StopRequest:
    """What an agent was asked.

    Args:
        leave_s: how long this host's workers may take to leave after a notice; None: a notice ends the job.
    """

    def __init__(self, leave_s: float | None) -> None:
        self.signal: int | None = None
        """The first one; None: there was none."""
        self._cause = ""
        """Why the coordinator wants the end, if it was not a signal."""
        self._leave_s = leave_s
        self._is_over = False
        """Whether a second one has come."""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal asks for a clean end; another one ends at once, unless it is SIGHUP, which a terminal that
        closes may send twice, itself and by its shell.

        Raises:
            StoppedBySignalError: it is another one.
        """
        if self.signal is not None and number == signal.SIGHUP:
            return
        if self._is_over:
            return  # it unwinds already, and must not be interrupted in that
        if self.signal is not None:
            self._is_over = True
            raise StoppedBySignalError(number, "stopped at once by a second signal")
        self.signal = number

    def by_coordinator(self, cause: str) -> None:
        """The coordinator wants the job to end."""
        if self.signal is None:
            self.signal, self._cause = signal.SIGTERM, cause

    @property
    def is_leaving(self) -> bool:
        """Whether this host's workers leave, and the job goes on."""
        return self.signal is not None and self._leave_s is not None and not self._cause

    @property
    def grace_s(self) -> float:
        """How long the end that was asked for may take: a notice's time is this host's, not that of a job's stop."""
        return self._leave_s if self._leave_s is not None and self.is_leaving else STOP_GRACE_S

    @property
    def name(self) -> str:
        """Of what has asked, for people."""
        return self._cause or ("a callback has failed" if self.signal is None else STOP_SIGNALS[self.signal])
