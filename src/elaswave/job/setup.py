"""How an agent takes part in its job: as whom, where, and whether it starts coordinators."""

import secrets
import socket
from typing import NamedTuple

from elaswave.job.network import JobNetwork

_INCARNATION_BITS = 30


class AgentRole(NamedTuple):
    """The part of one agent."""

    node: str
    """Its host's name."""
    incarnation: int
    """Tells it apart from other agents that were, or will be, started there."""
    slots: int = 0
    """Workers that may run here; 0: as many as are asked for."""
    creates_job: bool = True
    """Whether it starts the job's coordinators."""
    job: str = ""
    """The job's name; empty: it has no other hosts."""
    job_generation: int = 0
    """Which job generation it takes part in, see `elaswave.protocol.leadership.store_position.StorePosition`; 0: it
    creates it."""
    keys: tuple[bytes, ...] = ()
    """Secrets of those who take part that it was told; none: they are made of the key that it was given."""
    network: JobNetwork | None = None
    """Where everybody listens and is dialled; None: as configured for a job of one host."""
    kept_port: socket.socket | None = None
    """Keeps the coordinator's port as long as it is open."""
    is_candidate: bool = False
    """Whether it starts a coordinator when those of other hosts are gone; what they have decided is in the store."""
    leave_s: float | None = None
    """Seconds within which its workers leave after a notice; None: a notice ends the job."""

    @property
    def name(self) -> str:
        """By which its coordinators hold the job."""
        return f"{self.node}/{self.incarnation}"

    @property
    def suffix(self) -> str:
        """Of files that every host has its own one of in a shared folder; empty where the job was created."""
        return "" if self.creates_job else f"-{self.node}"


def new_incarnation() -> int:
    """One that no other agent of the job has, as good as certain."""
    return secrets.randbits(_INCARNATION_BITS)


def own_role() -> AgentRole:
    """Of the launcher of a job on one machine."""
    return AgentRole(socket.gethostname(), new_incarnation())
