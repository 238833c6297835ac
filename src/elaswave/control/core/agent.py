"""The agent beside the workers as a machine: what the end of a process means. No IO.

RUNNING ── a worker ends ──▶ RUNNING        report it
   │ ───── the coordinator ends ──▶ RUNNING  start another one: it reads what the last one has persisted
   │ ───── the coordinator refuses to live ──▶ ENDED
   └────── the coordinator says that the job is over ──▶ ENDED
"""

from enum import Enum
from typing import NamedTuple

MAX_COORDINATORS = 100
"""So many coordinators are started; more ends mean that they cannot live."""


class AgentState(Enum):
    """Whether the job is going on."""

    RUNNING = "running"
    ENDED = "ended"


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
    """Tell the coordinator, durably, that a worker's process has ended."""

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
        if isinstance(event, JobEnded):
            self.state = AgentState.ENDED
            return []
        if isinstance(event, WorkerEnded):
            self.worker_ends.append(event)
            return [ReportEnd(event)] if self.state is AgentState.RUNNING else []
        if self.state is AgentState.ENDED:
            return []
        self.coordinator_ends_s.append(event.at_s)
        if event.gave_up:
            self.state = AgentState.ENDED
            return [GiveUp(f"the coordinator {event.text}")]
        if len(self.coordinator_ends_s) >= MAX_COORDINATORS:
            self.state = AgentState.ENDED
            return [GiveUp(f"{MAX_COORDINATORS} coordinators have ended, the last one {event.text}")]
        return [StartCoordinator()]
