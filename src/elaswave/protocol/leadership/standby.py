"""An agent between two coordinators: when its own next one, or its next candidate's process, is started; and, where
another host has the coordinator, when it looks for the job's outcome and when its part is over. No IO, no clocks.

Rules H12 and H13: the workers of an agent go on without a coordinator, so the agent stays as long as they commit
steps. If they commit none either for as long as its patience lasts, they wait for what will not come: the agent ends
them, and may be started again. The job may also have ended while the agent was cut off; then no coordinator comes, and
the outcome is where the coordinator or its agent has written it before it ended.
"""

from enum import Enum

from elaswave.protocol.detection.active_time import ActiveTime

STAND_BY_AGAIN_S = 1.0
STAND_BY_AGAIN_S_MAX = 60.0
"""After the end of a candidate that never had the job, or of a coordinator that another host's has replaced, the next
one is started so much later, doubled each time: no log fills with what it is refused for."""
ORPHAN_S = 30.0
"""An agent ends its workers after this long without a coordinator and without a commit."""
SEEK_AFTER_S = 5.0
"""After this long without a coordinator an agent looks for the outcome for the first time: new coordinators come
sooner."""
SEEK_EVERY_S = 5.0
"""Between two looks."""


class Standby:
    """Whether an agent has its job's coordinator, and when its next candidate's process is to wait.

    Args:
        leads: whether the coordinator is this agent's from the start.
        is_candidate: whether other agents may have it.
    """

    def __init__(self, *, leads: bool, is_candidate: bool) -> None:
        self.leads = leads
        """Whether the coordinator is this agent's."""
        self.had_it = leads
        """Whether it ever was."""
        self.stand_by_at_s: float | None = None
        """When the next process is to be started."""
        self.missed_since_s: float | None = None
        """Since when the last coordinator is missed."""
        self._is_candidate = is_candidate
        self._wait_s = STAND_BY_AGAIN_S

    def has_it(self) -> None:
        """The process has the job."""
        self.leads = self.had_it = True
        self._wait_s = STAND_BY_AGAIN_S

    def is_due(self, now_s: float) -> bool:
        """Tells whether to start the next process now; says so once."""
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


class TimeoutAction(Enum):
    """What the agent does now."""

    NOTHING = "wait"
    SEEK = "look for the outcome"
    END = "end the workers, and exit with 75"


class CoordinatorTimeout:
    """What an agent knows while it has no coordinator. To be asked often.

    Args:
        patience_s: how long it goes on without a coordinator and without a commit. An agent whose job waits longer for
            its store waits as long here.
    """

    def __init__(self, patience_s: float = ORPHAN_S) -> None:
        self._patience_s = patience_s
        self._without: ActiveTime | None = None
        """Since there was a coordinator; None: there is one."""
        self._num_commits = 0
        self._committed_s = 0.0
        """When the number of commits has changed, by `_without`."""
        self._seek_at_s = SEEK_AFTER_S

    @property
    def without_s(self) -> float:
        """Seconds without a coordinator in which this process was awake, at the last look."""
        return 0.0 if self._without is None else self._without.seen_s

    def look(self, now_s: float, *, has_coordinator: bool, num_commits: int) -> TimeoutAction:
        """Says what is due.

        Args:
            now_s: monotonic time.
            has_coordinator: whether one is connected.
            num_commits: a number that grows whenever a worker of this host commits a step.
        """
        if has_coordinator:
            self._without = None
            return TimeoutAction.NOTHING
        if self._without is None:
            self._without = ActiveTime(now_s)
            self._num_commits, self._committed_s, self._seek_at_s = num_commits, 0.0, SEEK_AFTER_S
        without_s = self._without.passed_s(now_s)
        if num_commits != self._num_commits:
            self._num_commits, self._committed_s = num_commits, without_s
        if without_s >= self._seek_at_s:
            self._seek_at_s = without_s + SEEK_EVERY_S
            return TimeoutAction.SEEK
        return TimeoutAction.END if without_s - self._committed_s >= self._patience_s else TimeoutAction.NOTHING
