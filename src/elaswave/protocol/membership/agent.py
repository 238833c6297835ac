"""What a host's agent decides about its processes: what an end means, and how long it goes on alone. No IO, no clocks.

`Agent` answers the end of a worker or a coordinator. Its states and what leads from one to another are the table
`TRANSITIONS`, which drives it. `Standby` says when its own next coordinator, or its next candidate's process, is
started; `CoordinatorTimeout`, where another host has the coordinator, when it looks for the job's outcome and when its
part is over.

Rules H12 and H13: the workers of an agent go on without a coordinator, so the agent stays as long as they commit steps.
If they commit none either for as long as its patience lasts, they wait for what will not come: the agent ends them, and
may be started again. The job may also have ended while the agent was cut off; then no coordinator comes, and the
outcome is where the coordinator or its agent has written it before it ended.
"""

from enum import Enum
from typing import NamedTuple

from elaswave.protocol.coordinator.table import Transition, TransitionTable
from elaswave.protocol.detection.active_time import ActiveTime
from elaswave.protocol.membership.effects import SpawnJoiner

MAX_COORDINATORS = 100
"""So many coordinators are started; more ends mean that they cannot live."""


class AgentState(Enum):
    """Whether the job is going on."""

    RUNNING = "running"
    ENDED = "ended"


class AgentCause(Enum):
    """What has happened."""

    WORKER_ENDS = "a worker's process ends"
    COORDINATOR_ENDS = "the coordinator's process ends"
    COORDINATOR_GIVES_UP = "the coordinator's process ends with an error that another one would meet too"
    TOO_MANY_ENDS = "the coordinator's process ends once too often"
    JOINER_WANTED = "the coordinator wants a worker started that joins"
    JOINER_KNOWN = "it says so again"
    OVER = "the coordinator says that the job is over"


class AgentResponse(Enum):
    """What the agent does about it."""

    REPORT_END = "report it, also to every later coordinator"
    START_COORDINATOR = "start another one, which reads what the last one has persisted"
    START_JOINER = "start the worker, once"
    GIVE_UP = "end the job with the reason"


TRANSITIONS: TransitionTable[AgentState, AgentCause, AgentResponse] = TransitionTable(
    AgentState.RUNNING,
    Transition((AgentState.RUNNING,), AgentCause.WORKER_ENDS, None, (AgentResponse.REPORT_END,)),
    Transition((AgentState.RUNNING,), AgentCause.COORDINATOR_ENDS, None, (AgentResponse.START_COORDINATOR,)),
    Transition((AgentState.RUNNING,), AgentCause.COORDINATOR_GIVES_UP, AgentState.ENDED, (AgentResponse.GIVE_UP,)),
    Transition((AgentState.RUNNING,), AgentCause.TOO_MANY_ENDS, AgentState.ENDED, (AgentResponse.GIVE_UP,)),
    Transition((AgentState.RUNNING,), AgentCause.JOINER_WANTED, None, (AgentResponse.START_JOINER,)),
    Transition((AgentState.RUNNING,), AgentCause.JOINER_KNOWN, None),
    Transition((AgentState.RUNNING,), AgentCause.OVER, AgentState.ENDED),
)
"""All that the machine can do; after the end nothing is answered."""


class WorkerEnded(NamedTuple):
    """A worker's process has ended."""

    worker: int
    text: str
    """How: "was killed by SIGKILL"."""
    at_s: float
    """Monotonic time."""


class CoordinatorEnded(NamedTuple):
    """The coordinator's process has ended."""

    text: str
    gave_up: bool
    """It ended by itself, with an error that another one would meet too."""
    at_s: float


class JobEnded(NamedTuple):
    """The coordinator has said that the job is over."""


AgentEvent = WorkerEnded | CoordinatorEnded | SpawnJoiner | JobEnded


class ReportEnd(NamedTuple):
    """Tell the coordinator that a worker's process has ended, now and whenever a coordinator is found."""

    end: WorkerEnded


class StartCoordinator(NamedTuple):
    """Start another coordinator on the same store and address."""


class GiveUp(NamedTuple):
    """End the job: there can be no coordinator."""

    reason: str


AgentEffect = ReportEnd | StartCoordinator | SpawnJoiner | GiveUp


class Agent:
    """The agent's machine. Its public fields are what a new coordinator must be told."""

    def __init__(self) -> None:
        self.state = AgentState.RUNNING
        self.worker_ends: list[WorkerEnded] = []
        self.coordinator_ends_s: list[float] = []
        self.joiners: set[int] = set()
        """Those that were started."""

    def handle(self, event: AgentEvent) -> list[AgentEffect]:
        """Takes one event; returns effects in their order."""
        if isinstance(event, WorkerEnded):
            self.worker_ends.append(event)
        if self.state is AgentState.ENDED:
            return []
        if isinstance(event, JobEnded):
            return self._go(AgentCause.OVER, event)
        if isinstance(event, WorkerEnded):
            return self._go(AgentCause.WORKER_ENDS, event)
        if isinstance(event, SpawnJoiner):
            is_known = event.worker in self.joiners
            self.joiners.add(event.worker)
            return self._go(AgentCause.JOINER_KNOWN if is_known else AgentCause.JOINER_WANTED, event)
        self.coordinator_ends_s.append(event.at_s)
        if event.gave_up:
            return self._go(AgentCause.COORDINATOR_GIVES_UP, event, f"the coordinator {event.text}")
        if len(self.coordinator_ends_s) >= MAX_COORDINATORS:
            reason = f"{MAX_COORDINATORS} coordinators have ended, the last one {event.text}"
            return self._go(AgentCause.TOO_MANY_ENDS, event, reason)
        return self._go(AgentCause.COORDINATOR_ENDS, event)

    def _go(self, cause: AgentCause, event: AgentEvent, reason: str = "") -> list[AgentEffect]:
        """Does what the table says about a cause."""
        self.state, responses = TRANSITIONS.next(self.state, cause)
        return [_effect(response, event, reason) for response in responses]


def _effect(response: AgentResponse, event: AgentEvent, reason: str) -> AgentEffect:
    if response is AgentResponse.REPORT_END:
        assert isinstance(event, WorkerEnded)
        return ReportEnd(event)
    if response is AgentResponse.START_JOINER:
        assert isinstance(event, SpawnJoiner)
        return event
    return StartCoordinator() if response is AgentResponse.START_COORDINATOR else GiveUp(reason)


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
