"""What the processes of a job on one host are started with, and how this host's agent takes part."""

import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from elaswave.config.schema import Config
from elaswave.faults.injection import Fault
from elaswave.job.network import JobNetwork
from elaswave.protocol.events import CoordinatorEffect
from elaswave.system.processes import DeathWatch

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
    def starts_coordinators(self) -> bool:
        """Whether it starts coordinators, now or once those of other hosts are gone."""
        return self.creates_job or self.is_candidate

    @property
    def name(self) -> str:
        """By which its coordinators hold the job."""
        return f"{self.node}/{self.incarnation}"

    @property
    def suffix(self) -> str:
        """Of files that every host has its own one of in a shared folder; empty where the job was created."""
        return "" if self.creates_job else f"-{self.node}"


def new_incarnation() -> int:
    """Draws an incarnation that no other agent of the job has, as good as certain."""
    return secrets.randbits(_INCARNATION_BITS)


def own_role() -> AgentRole:
    """Makes the role of the launcher of a job on one machine."""
    return AgentRole(socket.gethostname(), new_incarnation())


class JobSetup(NamedTuple):
    """What all processes of a job on this host know of it; made once, by the launcher."""

    config: Config
    """With its layout resolved."""
    run_dir: Path
    control_dir: Path
    """Private folder of the job: journal, sockets."""
    network: JobNetwork
    """Where coordinator and workers listen and are dialled."""
    name: str
    """The job's; empty: no other hosts take part."""
    job_generation: int
    """Of the job that this host takes part in, see `elaswave.protocol.leadership.store_position.StorePosition`."""
    home: int
    """Incarnation of this host's agent; see `elaswave.protocol.membership.hosts`."""
    started_s: float
    """Monotonic time at which the command began."""
    faults: tuple[Fault, ...]
    """Each is carried out in the process that it is of."""
    before_effect: Callable[[CoordinatorEffect], None]
    """Called in the coordinator before each effect of the protocol's core (fault injection and tests)."""
    deaths: DeathWatch | None
    """None only on the way to a fresh interpreter, which makes its own."""
    profile: bool
    """Whether workers write traces."""
    num_loaders: int
    """Beside each worker."""
