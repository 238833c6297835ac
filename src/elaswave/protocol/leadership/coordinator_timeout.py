"""An agent without a coordinator as a machine: when it looks for the job's outcome, when its part is over. No IO, no
clocks.

Rules H12 and H13: the workers of an agent go on without a coordinator, so the agent stays as long as they commit
steps. If they commit none either for as long as its patience lasts, they wait for what will not come: the agent ends
them, and may be started again. The job may also have ended while the agent was cut off; then no coordinator comes, and
the outcome is where the coordinator or its agent has written it before it ended.
"""

from enum import Enum

from elaswave.protocol.detection.active_time import ActiveTime

ORPHAN_S = 30.0
"""An agent ends its workers after this long without a coordinator and without a commit."""
SEEK_AFTER_S = 5.0
"""After this long without a coordinator an agent looks for the outcome for the first time: new coordinators come
sooner."""
SEEK_EVERY_S = 5.0
"""Between two looks."""


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
