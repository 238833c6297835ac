"""The agent beside the workers as a machine: what the end of a process means. No IO.

Its states and what leads from one to another are the table `TRANSITIONS`, which every change of state is held to.
"""

from enum import Enum
from typing import NamedTuple

from elaswave.protocol.table import Transition, check_transition

MAX_COORDINATORS = 100
"""So many coordinators are started; more ends mean that they cannot live."""


class AgentState(Enum):
    """Whether the job is going on."""

    RUNNING = "running"
    ENDED = "ended"


WORKER_ENDS = "a worker's process ends"
COORDINATOR_ENDS = "the coordinator's process ends"
NO_COORDINATOR = "the coordinator gives up, or too many have ended"
OVER = "the coordinator says that the job is over"

TRANSITIONS = (
    Transition(AgentState.RUNNING, WORKER_ENDS, AgentState.RUNNING, "report it, also to every later coordinator"),
    Transition(
        AgentState.RUNNING,
        COORDINATOR_ENDS,
        AgentState.RUNNING,
        "start another one; it reads what the last one has persisted",
    ),
    Transition(AgentState.RUNNING, NO_COORDINATOR, AgentState.ENDED, "end the job with the reason"),
    Transition(AgentState.RUNNING, OVER, AgentState.ENDED, "nothing"),
)
"""All transitions; after the end nothing is answered."""


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


Event = WorkerEnded | CoordinatorEnded | JobEnded


class ReportEnd(NamedTuple):
    """Tell the coordinator that a worker's process has ended, now and whenever a coordinator is found."""

    end: WorkerEnded


class StartCoordinator(NamedTuple):
    """Start another coordinator on the same store and address."""


class GiveUp(NamedTuple):
    """End the job: there can be no coordinator."""

    reason: str


Effect = ReportEnd | StartCoordinator | GiveUp


class Agent:
    """The agent's machine. Its public fields are what a new coordinator must be told."""

    def __init__(self) -> None:
        self.state = AgentState.RUNNING
        self.worker_ends: list[WorkerEnded] = []
        self.coordinator_ends_s: list[float] = []

    def handle(self, event: Event) -> list[Effect]:
        """Takes one event; returns effects in their order."""
        if isinstance(event, WorkerEnded):
            self.worker_ends.append(event)
        if self.state is AgentState.ENDED:
            return []
        if isinstance(event, JobEnded):
            self._go(OVER, AgentState.ENDED)
            return []
        if isinstance(event, WorkerEnded):
            self._go(WORKER_ENDS, AgentState.RUNNING)
            return [ReportEnd(event)]
        self.coordinator_ends_s.append(event.at_s)
        if event.gave_up:
            self._go(NO_COORDINATOR, AgentState.ENDED)
            return [GiveUp(f"the coordinator {event.text}")]
        if len(self.coordinator_ends_s) >= MAX_COORDINATORS:
            self._go(NO_COORDINATOR, AgentState.ENDED)
            return [GiveUp(f"{MAX_COORDINATORS} coordinators have ended, the last one {event.text}")]
        self._go(COORDINATOR_ENDS, AgentState.RUNNING)
        return [StartCoordinator()]

    def _go(self, cause: str, after: AgentState) -> None:
        """Changes the state, as the table allows."""
        check_transition(TRANSITIONS, self.state, cause, after)
        self.state = after
