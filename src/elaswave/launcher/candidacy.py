"""How an agent stands to its job's coordinator: whether it has it, and when its next candidate's process is to wait.

A candidate's process says by a pipe how far it is. One that has ended without ever having the job, or that another
host's has replaced, is followed by the next one after a while, which doubles: no log fills with what it is refused for.
"""

import os
import selectors
from collections.abc import Sequence

from elaswave.store.claim import CandidateProgress, progress_of

CANDIDATE = "candidate"
"""In the selector: what a candidate's process reports."""
STAND_BY_AGAIN_S = 1.0
STAND_BY_AGAIN_S_MAX = 60.0
"""After the end of a candidate that never had the job, or of a coordinator that another host's has replaced, the next
one is started so much later."""


class Standby:
    """Of one agent.

    Args:
        leads: whether the coordinator is this agent's from the start.
        is_candidate: whether other agents may have it.
        selector: of the agent's loop.
    """

    def __init__(self, *, leads: bool, is_candidate: bool, selector: selectors.BaseSelector) -> None:
        self.leads = leads
        """Whether the coordinator is this agent's."""
        self.had_it = leads
        """Whether it ever was."""
        self.stand_by_at_s: float | None = None
        """When the next process is to be started."""
        self.missed_since_s: float | None = None
        """Since when the last coordinator is missed."""
        self._is_candidate = is_candidate
        self._selector = selector
        self._reports: int | None = None
        """Where a candidate's process says how far it is."""
        self._wait_s = STAND_BY_AGAIN_S

    def open(self) -> int:
        """For the next process; returns where it writes what it reports."""
        self.close()
        self._reports, writes = os.pipe()
        os.set_blocking(self._reports, False)
        self._selector.register(self._reports, selectors.EVENT_READ, CANDIDATE)
        return writes

    def close(self) -> None:
        """Hears nothing more of the present process."""
        if self._reports is not None:
            self._selector.unregister(self._reports)
            os.close(self._reports)
            self._reports = None

    def hear(self) -> Sequence[CandidateProgress]:
        """What the process has said, or nothing if its end of the pipe is closed."""
        if self._reports is None:
            return ()
        try:
            said = progress_of(os.read(self._reports, 4096))
        except BlockingIOError:
            return ()  # what was to be read was of the candidate before
        if not said:
            self.close()
        return said

    def has_it(self) -> None:
        """The process has the job."""
        self.leads = self.had_it = True
        self._wait_s = STAND_BY_AGAIN_S

    def is_due(self, now_s: float) -> bool:
        """Whether to start the next process now; says so once."""
        is_due = self.stand_by_at_s is not None and now_s >= self.stand_by_at_s
        if is_due:
            self.stand_by_at_s = None
        return is_due

    def ended(self, at_s: float, *, was_replaced: bool, was_displaced: bool = False) -> bool:
        """The process has ended.

        Args:
            at_s: when, monotonic.
            was_replaced: another host's coordinator has the job.
            was_displaced: its claim was taken away, by nobody who has followed it.
        Returns:
            Whether the next one is started after a while, and stands by if others may have the job; else the
            coordinator is to be followed at once.
        """
        had_it, self.leads = self.leads, self.leads and not self._is_candidate
        if not was_displaced and (not self._is_candidate or (had_it and not was_replaced)):
            return False
        self.missed_since_s = at_s if was_displaced else None
        self.stand_by_at_s = at_s + self._wait_s
        if self._is_candidate:  # nobody else would have the job meanwhile
            self._wait_s = min(2 * self._wait_s, STAND_BY_AGAIN_S_MAX)
        return True
