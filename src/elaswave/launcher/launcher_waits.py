"""What the launcher waits for that may never come: every wait has a bound, and words for its end. No IO, no clocks."""

from collections.abc import Callable, Iterable

from elaswave.launcher.forkserver.machine import COORDINATOR
from elaswave.observability.processes import ProcessFacts
from elaswave.protocol.detection.active_time import ActiveTime

STOPPED_S_MAX = 20.0
"""How long the template may be stopped, and use no processor time, while it loads the model, or is to fork."""
STILL_S_MAX = 600.0
"""How long it may use none otherwise: what loads a model may wait for a disk or a network."""
KILLED_S_MAX = 60.0
"""How long a coordinator, or the process that commits a checkpoint, may take to end once it is to be killed."""


class Standstill:
    """For how long a process has used no processor time.

    Args:
        now_s: monotonic time of the beginning.
    """

    def __init__(self, now_s: float) -> None:
        self._active_time = ActiveTime(now_s)
        self._cpu_s = -1.0
        self._moved_s = 0.0

    def look(self, cpu_s: float, now_s: float) -> float:
        """Takes note of what a process has used up to now.

        Args:
            cpu_s: its processor time.
            now_s: monotonic time.
        Returns:
            Seconds for which it has used none, of those in which this process was awake.
        """
        passed_s = self._active_time.passed_s(now_s)
        if cpu_s != self._cpu_s:
            self._cpu_s, self._moved_s = cpu_s, passed_s
        return passed_s - self._moved_s


def how_it_stands_still(standstill: Standstill, forkserver: ProcessFacts | None, now_s: float) -> str | None:
    """What to tell of a template that has used no processor time for too long.

    Args:
        standstill: what was seen of it.
        forkserver: what the kernel says of it; None if it does not live.
        now_s: monotonic time.
    Returns:
        None of one that gets on.
    """
    if forkserver is None:
        return None
    still_s, is_stopped = standstill.look(forkserver.cpu_s, now_s), forkserver.state in "Tt"
    if still_s <= (STOPPED_S_MAX if is_stopped else STILL_S_MAX):
        return None
    return f"it has used no processor time for {still_s:.0f} s" + (" and is stopped" if is_stopped else "")


class LauncherWaits:
    """The waits of a launcher whose job runs."""

    def __init__(self) -> None:
        self._unforked: set[int] = set()
        self._forking = Standstill(0.0)
        self._killed: ActiveTime | None = None
        self._ending_commit: ActiveTime | None = None

    def for_forks(self, names: Iterable[int], now_s: float) -> None:
        """The template is to fork workers, or a `COORDINATOR`."""
        self._unforked.update(names)
        self._forking = Standstill(now_s)

    def forked(self, name: int) -> None:
        """The template has forked a process."""
        self._unforked.discard(name)

    def for_killed_coordinator(self, now_s: float) -> None:
        """The coordinator is to be killed; may be said again."""
        self._killed = self._killed or ActiveTime(now_s)

    def coordinator_ended(self) -> None:
        """It has ended."""
        self._killed = None

    @property
    def is_for_commit(self) -> bool:
        """Whether the next coordinator waits for the end of the commit that the one before had in hand."""
        return self._ending_commit is not None

    def for_commit(self, now_s: float) -> None:
        """The process that commits a checkpoint is to be killed before the next coordinator is started."""
        self._ending_commit = ActiveTime(now_s)

    def commit_ended(self) -> None:
        """No checkpoint is being committed any more."""
        self._ending_commit = None

    def overdue(self, forkserver: Callable[[], ProcessFacts | None], now_s: float) -> str | None:
        """Why the job cannot go on; to be asked often.

        Args:
            forkserver: what the kernel says of the template; None if it does not live. Called only while it is to fork.
            now_s: monotonic time.
        Returns:
            None if nothing is overdue.
        """
        still = how_it_stands_still(self._forking, forkserver(), now_s) if self._unforked else None
        if still is not None:
            names = ["the coordinator" if name == COORDINATOR else f"worker {name}" for name in sorted(self._unforked)]
            return f"the template process does not fork {', '.join(names)}: {still}"
        if self._killed is not None and self._killed.passed_s(now_s) > KILLED_S_MAX:
            return (
                f"the coordinator does not answer, and has not ended within {KILLED_S_MAX:.0f} s after it was to be "
                "killed; is a disk gone, or the template process stopped?"
            )
        if self._ending_commit is not None and self._ending_commit.passed_s(now_s) > KILLED_S_MAX:
            return (
                "the coordinator is lost, and no other one can be started: the process that was committing a "
                f"checkpoint was to be killed, and has not ended within {KILLED_S_MAX:.0f} s; is its disk gone, or "
                "the template process stopped?"
            )
        return None
