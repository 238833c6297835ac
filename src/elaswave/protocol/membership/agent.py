"""The agent beside the workers as a machine: what the end of a process means. No IO.

Its states and what leads from one to another are the table `TRANSITIONS`, which drives it.
"""

from enum import Enum
from typing import NamedTuple

from elaswave.protocol.coordinator.table import Transition, TransitionTable
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
